"""The auditor: it passes the events of a run to the rules and to the state machine, and collects the findings."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from funcamp.report.events import Backward, Ended, Event, GradientsTaken, Overflowed
from funcamp.report.lines import UNKNOWN, Line
from funcamp.report.loop import Loop
from funcamp.report.observer import Observer
from funcamp.report.proposals import Proposal
from funcamp.report.rules import RULES, Found, Rule
from funcamp.report.rules.values import epsilon_below_float16

#: The changed line for what a hook does with scaled gradients.
_CHANGE_OF_HOOK = "scaler.unscale_(optimizer)  # after backward, then this, in the loop and not in a hook"


class Enough(BaseException):
    """Ends a run that was watched long enough. A BaseException: `except Exception` in the script does not catch it."""


class Finding(NamedTuple):
    """A mistake, and where it is."""

    rule: Rule
    line: Line
    times: int
    """The number of events at which it was found on this line."""
    detail: str
    """What the first event adds, such as the operation and the range of its inputs."""
    effect: str
    """What it does to training."""
    changed_line: str
    """The rule's changed line, or what suits this loop better."""
    proposal: Proposal | None = None
    """The change that was tried on the operation of the first event; None if the event has no operation."""

    @property
    def change(self) -> str:
        """The changed line: the one that was tried and helps, else the rule's; empty if none helps."""
        return self.changed_line if self.proposal is None else self.proposal.change


class Auditor:
    """Watches a run and names its mistakes.

    Args:
        passes: the number of backward passes to watch; the next one ends the run. None for no limit.
    """

    def __init__(self, passes: int | None = None) -> None:
        self._limit = passes
        self.passes = 0
        """The number of backward passes that were watched."""
        self._process = os.getpid()
        self._has_ended = False
        """Whether more backward passes began than are to be watched."""
        self.loop = Loop()
        """The state after the last event."""
        # By the name of the rule and the line, in the order in which they were first found.
        self._times: Counter[tuple[str, Line]] = Counter()
        self._first: dict[tuple[str, Line], Found] = {}
        self._proposals: dict[tuple[str, Line], Proposal | None] = {}
        self._epsilon_proposals: dict[Line, Proposal | None] = {}
        """By the line of an epsilon that is zero: the change for the first operation that divides by it."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager: the run is watched."""
        observer = Observer(self._take)
        is_cut = True  # unless the run ends by itself
        try:
            with contextlib.suppress(Enough), observer.observing():
                yield
                is_cut = False
        except SystemExit:
            is_cut = False
            raise
        finally:
            self._check(Ended(UNKNOWN, is_cut or self._has_ended))

    def findings(self) -> list[Finding]:
        """Return the findings: mistakes before notes, each in the order in which it was first found."""
        rules_by_name = {rule.name: rule for rule in RULES}
        findings = []
        for (name, line), times in self._times.items():
            rule, found = rules_by_name[name], self._first[name, line]
            effect, change = found.effect or rule.effect, found.change or rule.change
            if line in self.loop.hook_lines and "scaler.unscale_(" in change:  # the pass of the hook has not ended
                change = _CHANGE_OF_HOOK
            proposal = self._proposals[name, line]
            if rule.check is epsilon_below_float16:
                proposal = self._epsilon_proposals.get(line)
            findings.append(Finding(rule, line, times, found.detail, effect, change, proposal))
        return sorted(findings, key=lambda finding: finding.rule.is_note)

    def has_mistakes(self) -> bool:
        """Return whether a mistake was found; a note is none."""
        return any(not finding.rule.is_note for finding in self.findings())

    def _take(self, event: Event) -> None:
        """Check an event and follow it; end the run before the first pass that is not to be watched.

        The rules get the event before the state machine does: they see the state before the event.
        """
        if os.getpid() != self._process:  # a process that the script has forked is not watched
            return
        if isinstance(event, (Backward, GradientsTaken)):
            self._has_ended |= self.passes == self._limit
            if self._has_ended:  # at every later pass too, if the script caught the exception
                raise Enough
            self.passes += 1
        if self._has_ended:  # the script ends in its own way: it may save what it has
            return
        if event.is_in_hook:
            self.loop.hook_lines.add(event.line)
        self._check(event)
        self.loop.follow(event)

    def _check(self, event: Event) -> None:
        """Ask every rule about an event, and note the lines of the mistakes."""
        for rule in RULES:
            for found in rule.find(event, self.loop):
                place = rule.name, found.line
                self._times[place] += 1
                if place not in self._first:
                    self._first[place] = found._replace(detail=found.detail or event.detail)
                    self._proposals[place] = event.propose()
                    if isinstance(event, Overflowed) and event.epsilon_line is not None:
                        self._epsilon_proposals.setdefault(event.epsilon_line, self._proposals[place])
