"""Loops with one mistake each, named after its rule; with `--right` each is its right twin.

The comment `# wrong` marks the line that the auditor must name.
"""
