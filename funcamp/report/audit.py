"""The auditor: it passes the events of a run to the rules and to the state machine, and collects the findings."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from funcamp.report.events import Backward, Ended, Event, GradientsTaken
from funcamp.report.lines import UNKNOWN, Line
from funcamp.report.loop import Loop
from funcamp.report.observer import Observer
from funcamp.report.rules import RULES, Found, Rule


class Enough(BaseException):
    """Ends a run that was watched long enough. A BaseException: `except Exception` in the script does not catch it."""


class Finding(NamedTuple):
    """A mistake, and where it is."""

    rule: Rule
    line: Line
    times: int
    """The number of events at which it was found on this line; once for what only the end shows."""
    detail: str
    """What the first event adds, such as the operation and the range of its inputs."""


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
        self.has_ended = False
        """Whether more backward passes began than are to be watched."""
        self.loop = Loop()
        """The state after the last event."""
        # By the rule and the line, in the order in which they were first found.
        self._times: Counter[tuple[Rule, Line]] = Counter()
        self._details: dict[tuple[Rule, Line], str] = {}

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
            self._check(Ended(UNKNOWN, is_cut or self.has_ended))

    def findings(self) -> list[Finding]:
        """Return the findings: mistakes before notes, each in the order in which it was first found."""
        findings = [
            Finding(rule, line, times, self._details[rule, line]) for (rule, line), times in self._times.items()
        ]
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
            self.has_ended |= self.passes == self._limit
            if self.has_ended:  # at every later pass too, if the script caught the exception
                raise Enough
            self.passes += 1
        if self.has_ended:  # the script ends in its own way: it may save what it has
            return
        self._check(event)
        self.loop.follow(event)

    def _check(self, event: Event) -> None:
        """Ask every rule about an event, and note the lines of the mistakes."""
        for rule in RULES:
            if not isinstance(event, rule.events):
                continue
            for found in rule.check(event, self.loop):
                line, detail = found if isinstance(found, Found) else (found, "")
                self._times[rule, line] += 1
                self._details.setdefault((rule, line), detail or event.detail)
