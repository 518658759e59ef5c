"""A rule: one mistake, how it is recognized, what it does to training, and the changed line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from funcamp.report.events import Event
from funcamp.report.lines import Line
from funcamp.report.loop import Loop

_E = TypeVar("_E", bound=Event)


class Found(NamedTuple):
    """A line of a mistake, and what is added about it in place of the event's detail."""

    line: Line
    detail: str


#: Yields the lines of the mistake, from an event and from the state of the loop before that event.
Check = Callable[[_E, Loop], "Iterable[Line | Found]"]


class Rule(NamedTuple):
    """A mistake that the auditor knows."""

    name: str
    mistake: str
    """What the loop does wrong, in a few words."""
    effect: str
    """What it does to training."""
    change: str
    """The changed line."""
    is_note: bool
    """Whether it costs only time, or may be intended; `--strict` does not count it."""
    events: tuple[type[Event], ...]
    """The kinds of events at which it is checked."""
    check: Check[Any]


#: All rules, in the order of their files.
RULES: list[Rule] = []


def rule(
    *events: type[Event], mistake: str, effect: str, change: str, is_note: bool = False
) -> Callable[[Check[_E]], Check[_E]]:
    """Register a function as a rule, named after it with hyphens.

    The order of the rules, and so of the documentation's table, is the order of registration.

    Args:
        *events: the kinds of events at which the function is called; subclasses are included.
        mistake: what the loop does wrong. This and the next two are the cells of docs/loop-mistakes.md.
        effect: what it does to training.
        change: the changed line, a piece of code.
        is_note: whether it costs only time, or may be intended.
    """

    def add(check: Check[_E]) -> Check[_E]:
        name = check.__name__.replace("_", "-")
        RULES.append(Rule(name, mistake, effect, change, is_note, events, check))
        return check

    return add
