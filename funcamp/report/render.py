"""Findings as text and as JSON."""

from __future__ import annotations

from typing import TypeAlias

from funcamp.report.audit import Auditor, Finding

#: A finding for JSON.
Row: TypeAlias = dict[str, str | int]


def headline(auditor: Auditor) -> str:
    """Return how many mistakes and notes there are, and in how many backward passes."""
    findings = auditor.findings()
    notes = sum(finding.rule.is_note for finding in findings)
    counts = _counted(len(findings) - notes, "mistake")
    if notes:
        counts += f" and {_counted(notes, 'note')}"
    return f"The loop: {counts} in {_counted(auditor.passes, 'backward pass', 'es')}."


def text(auditor: Auditor) -> str:
    """Return the findings as plain text, a paragraph each."""
    return "\n\n".join([headline(auditor), *map(_paragraph, auditor.findings())])


def _paragraph(finding: Finding) -> str:
    """Return a finding: its name, where it is, the mistake, its effect, and what to change."""
    rule = finding.rule
    kind = "note: " if rule.is_note else ""
    detail = f" ({finding.detail})" if finding.detail else ""
    lines = [
        rule.name,
        f"{finding.line}, {_counted(finding.times, 'time')}: {finding.line.text}",
        f"{kind}{rule.mistake}{detail}",
        f"effect: {rule.effect}",
        f"change: {rule.change}",
    ]
    return "\n    ".join(lines)


def rows(auditor: Auditor) -> list[Row]:
    """Return the findings for JSON."""
    return [
        {
            "name": finding.rule.name,
            "file": finding.line.file,
            "line": finding.line.number,
            "text": finding.line.text,
            "times": finding.times,
            "detail": finding.detail,
            "note": finding.rule.is_note,
            "mistake": finding.rule.mistake,
            "effect": finding.rule.effect,
            "change": finding.rule.change,
        }
        for finding in auditor.findings()
    ]


def _counted(number: int, word: str, plural: str = "s") -> str:
    """Return a number with a word, to which the plural's ending is added if needed."""
    return f"{number} {word}{'' if number == 1 else plural}"
