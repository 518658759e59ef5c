"""Findings as text, as a table and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from funcamp.report.audit import Auditor, Finding

if TYPE_CHECKING:
    from rich.table import Table

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
    return "\n    ".join([finding.rule.name, *_lines_of(finding)])


def _lines_of(finding: Finding) -> list[str]:
    """Return the lines of a finding below its name: where it is, the mistake, its effect, and what to change."""
    rule = finding.rule
    kind = "note: " if rule.is_note else ""
    lines = [
        f"{finding.line}, {_counted(finding.times, 'time')}: {finding.line.text}",
        f"{kind}{rule.mistake}{f' ({finding.detail})' if finding.detail else ''}",
        f"effect: {finding.effect}",
    ]
    if finding.change:
        lines.append(f"change: {finding.change}")
    if finding.proposal is not None:
        lines.append(f"tried: {finding.proposal.proof}")
    return lines


def table(auditor: Auditor) -> Table:
    """Return the findings as a `rich.table.Table`.

    Raises:
        ImportError: rich is not installed.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rich_table = Table(title=headline(auditor), title_justify="left", box=box.SIMPLE_HEAD, show_lines=True)
    rich_table.add_column("mistake", no_wrap=True)
    rich_table.add_column("where, what it does to training, and the changed line")
    for finding in auditor.findings():
        name, style = finding.rule.name, "yellow" if finding.rule.is_note else "red"
        rich_table.add_row(Text(name, style=style), Text("\n".join(_lines_of(finding))))
    return rich_table


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
            "effect": finding.effect,
            "change": finding.change,
            "tried": "" if finding.proposal is None else finding.proposal.proof,
        }
        for finding in auditor.findings()
    ]


def _counted(number: int, word: str, plural: str = "s") -> str:
    """Return a number with a word, to which the plural's ending is added if needed."""
    return f"{number} {word}{'' if number == 1 else plural}"
