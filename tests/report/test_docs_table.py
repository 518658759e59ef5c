"""The documentation's table of mistakes is the auditor's."""

from __future__ import annotations

from pathlib import Path

from funcamp.report.rules import RULES
from funcamp.report.rules.rule import Rule

PAGE = Path(__file__).parents[2] / "docs" / "loop-mistakes.md"


def row(rule: Rule) -> str:
    """A row of the table."""
    name = f"[{rule.name}](../tests/report/loops/{rule.name.replace('-', '_')}.py)"
    cells = (name, f"{'note: ' if rule.is_note else ''}{rule.mistake}", rule.effect, f"`{rule.change}`")
    return f"| {' | '.join(cells)} |"


def test_the_table_has_each_rule_in_its_words() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| [")]
    assert rows == [row(rule) for rule in RULES]
