"""A rule: one mistake, how it is noticed, what it does to training, and the changed line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from funcamp._audit.events import Event
from funcamp._audit.lines import Line
from funcamp._audit.loop import Loop

_E = TypeVar("_E", bound=Event)

#: Yields the lines of a mistake at an event, in a loop that has not followed the event yet.
Check = Callable[[_E, Loop], Iterable[Line]]


class Rule(NamedTuple):
    """A mistake that the auditor knows."""

    name: str
    mistake: str
    """What the loop does, in a few words."""
    effect: str
    """What it does to training."""
    change: str
    """The changed line."""
    is_note: bool
    """Whether it costs time at most."""
    events: tuple[type[Event], ...]
    """The events at which it is checked."""
    check: Check[Any]

    def lines(self, event: Event, loop: Loop) -> Iterator[Line]:
        """Yield the lines of the mistake at an event."""
        if isinstance(event, self.events):
            yield from self.check(event, loop)


#: All rules, in the order of their files.
RULES: list[Rule] = []


def rule(
    *events: type[Event], mistake: str, effect: str, change: str, is_note: bool = False
) -> Callable[[Check[_E]], Check[_E]]:
    """Add a function to the rules; its name becomes the rule's, with hyphens."""

    def add(check: Check[_E]) -> Check[_E]:
        name = check.__name__.replace("_", "-")
        RULES.append(Rule(name, mistake, effect, change, is_note, events, check))
        return check

    return add
