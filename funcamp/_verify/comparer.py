"""Run all roads of `verify`, and compare each with its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from funcamp._jit.jit import jit
from funcamp._jit.jit_step import JitStep
from funcamp._step.step import TrainStep
from funcamp._verify.compare import Difference, Rounding, Row, changed_by_a_skip
from funcamp._verify.report import Comparison, Outcome, Verification
from funcamp._verify.roads import Disturbance, Task, start_of, step_rows, torch_rows
from funcamp._verify.torch_loop import why_not

_TORCH, _EAGER = "torch's loop", "eager step"
#: The name of what belongs to funcamp among the objects that are looked at.
OURS = "funcamp's step"
#: The number of powers of two to go down in search of a scale that does not overflow.
_SCALES = 40


class Comparer:
    """Runs the roads one after the other, and compares each with its reference."""

    def __init__(self, task: Task, compiled: JitStep | None) -> None:
        self._task = task
        self._compiled = compiled
        self._comparisons: list[Comparison] = []
        self._causes: dict[str, None] = {}
        """What may explain a difference, each once, in order."""
        self._notes: list[str] = []

    def run(self) -> Verification:
        """Return what all roads gave."""
        task = self._task = self._with_usable_scale(self._task)
        start = start_of(task)
        eager = list(step_rows(task, task.step))
        draws_numbers = task.generators.have_drawn()
        changes = task.python_state.changes()
        rounding = self._with_torch(start, eager)
        if rounding is None:
            disturbed = _disturbed(task, lambda disturbance: list(step_rows(task, task.step, disturbed=disturbance)))
            rounding = Rounding(eager, disturbed, start)
        skipped = tuple([number for number, row in enumerate(eager) if row["found_inf"].item()])
        self._note_what_shows_little(rounding, eager, skipped)
        for name, run in self._compiled_steps(draws_numbers):
            self._with_compiled(rounding.against(eager), start, name, run, middle=len(eager) // 2)
        if any(comparison.outcome is Outcome.DIFFERENT for comparison in self._comparisons):
            self._explain(changes, draws_numbers)
        return Verification(
            tuple(self._comparisons), len(eager), skipped, task.overflow, tuple(self._causes), tuple(self._notes)
        )

    def _note_what_shows_little(self, rounding: Rounding, eager: list[Row], skipped: tuple[int, ...]) -> None:
        """Note if every step was skipped, or if many values are noise."""
        if len(skipped) == len(eager):
            self._notes.append("every step was skipped, so little was compared: begin from a state in mid-training")
        lost, count = rounding.noise
        if lost > count // 4:
            self._notes.append(
                f"{lost} of {count} values are noise after these steps: one ulp changes them by a quarter of what they "
                "moved, so they cannot be compared; a policy of higher precision or fewer steps shows more"
            )

    def _with_usable_scale(self, task: Task) -> Task:
        """Return the task with a lower scale if the first step would be skipped: skipped steps show little."""
        if task.overflow is None:
            return task
        first_scale = task.state.scaler.scale
        for power in range(0, _SCALES, 2):
            scale = first_scale * 2.0**-power
            state = task.state._replace(scaler=task.state.scaler._replace(scale=scale))
            row = next(step_rows(task._replace(state=state), task.step))
            if not row["found_inf"].item():
                break
        else:
            self._notes.append("the first step is skipped at every scale: its gradients are not finite")
            return task
        if power:
            self._notes.append(
                f"the scale is {scale.item():g} at first, not {first_scale.item():g}, which skips the first step"
            )
        return task._replace(state=state)

    def _with_torch(self, start: Row, eager: list[Row]) -> Rounding | None:
        """Compare the eager step with torch's loop; return what rounding does to it, or None if there is no loop."""
        task = self._task
        reason = why_not(task.step) if isinstance(task.step, TrainStep) else "the step is a function of its own"
        if reason:
            self._comparisons.append(Comparison(_TORCH, _EAGER, Outcome.LEFT_OUT, reason=reason))
            return None
        scales = [float(row["metrics.scale"]) for row in eager]

        def disturbed_rows(disturbance: Disturbance) -> list[Row]:
            rows, _ = torch_rows(task, scales, disturbed=disturbance)
            return rows

        try:
            rows, without_gradient = torch_rows(task, scales)
            disturbed = _disturbed(task, disturbed_rows)
        except Exception as error:
            reason = f"torch's loop raises {_text(error)}"
            self._comparisons.append(Comparison(_TORCH, _EAGER, Outcome.LEFT_OUT, reason=reason))
            return None
        if without_gradient:
            self._notes.append(
                f"{', '.join(sorted(without_gradient))} gets no gradient: torch's loop leaves it alone; the step takes "
                "zeros, so that weight decay and momentum move it"
            )
        rounding = Rounding(rows, disturbed, start)
        self._compare(rounding, _TORCH, _EAGER, eager, before=start)
        return rounding

    def _with_compiled(self, rounding: Rounding, start: Row, name: str, run: Any, middle: int) -> None:
        """Compare a compiled step with the eager one, then again from a saved state."""
        self._compare(rounding, _EAGER, name, step_rows(self._task, run), before=start)
        if self._comparisons[-1].outcome is Outcome.REFUSED:
            return
        resumed = step_rows(self._task, run, save_after=middle)
        self._compare(rounding, _EAGER, f"{name.removesuffix(' step')}, saved, and loaded", resumed, first=middle)

    def _compiled_steps(self, draws_numbers: bool) -> list[tuple[str, Any]]:
        """Return the compiled steps to compare, by name."""
        if self._compiled is None:
            return [("jit(exact=True)", jit(self._task.step, exact=True))]
        options = self._compiled._options
        if draws_numbers and options.backend == "inductor" and not options.exact:
            self._notes.append(
                "the step draws random numbers, and a compiled step draws others; so it is compared with exact=True, "
                "which draws those of eager mode"
            )
            options = options._replace(exact=True)
        return [("compiled step", JitStep(self._task.step, options))]

    def _compare(
        self,
        rounding: Rounding,
        reference: str,
        road: str,
        rows: Iterable[Row],
        *,
        first: int = 0,
        before: Row | None = None,
    ) -> None:
        """Compare a road with its reference, step by step, and note the result."""
        largest: Difference | None = None
        try:
            for number, row in enumerate(rows, first):
                difference = rounding.difference(number, row)
                if before is not None:
                    difference = changed_by_a_skip(number, before, row) or difference
                before = row
                if difference is None:
                    continue
                if not difference.is_rounding:
                    self._comparisons.append(Comparison(reference, road, Outcome.DIFFERENT, difference))
                    return
                if largest is None or difference.is_larger_than(largest):
                    largest = difference
        except Exception as error:
            self._comparisons.append(Comparison(reference, road, Outcome.REFUSED, reason=_text(error)))
            return
        lost, count = rounding.noise
        if largest is None:
            outcome = Outcome.EQUAL
        elif lost > count // 2:
            outcome = Outcome.NOISE
        else:
            outcome = Outcome.ROUNDING
        self._comparisons.append(Comparison(reference, road, outcome, largest))

    def _explain(self, changes: dict[str, str], draws_numbers: bool) -> None:
        """Note what may explain a difference."""
        for name, change in changes.items():
            if not name.startswith(OURS):
                cause = (
                    f"{name} is {change}, from step to step: it is no part of the state. Make it a buffer, an entry "
                    "of the batch, or return it in the metrics"
                )
                self._causes[cause] = None
        for name in self._task.python_state.hooks():
            self._causes[f"{name} has a hook on its gradient"] = None
        if draws_numbers:
            self._causes["the step draws random numbers: roads may draw them in another order or number"] = None
        if not self._causes:
            self._causes["none was found: please report it, with the smallest model that shows it"] = None


def _disturbed(task: Task, run: Callable[[Disturbance], list[Row]]) -> list[Row]:
    """Return the rows of a run in which all numbers are changed by one ulp, or all but the batches' if that raises."""
    try:
        return run(Disturbance(_one_ulp(task)))
    except Exception:
        return run(Disturbance(_one_ulp(task), also_batches=False))


def _one_ulp(task: Task) -> float:
    """Return the relative distance of two neighbours in a low precision that the step computes in; 0 if there is none.

    Values are changed by no less than one ulp of their own dtype.
    """
    if not isinstance(task.step, TrainStep):
        return 0.0
    dtype = task.step._options.policy.compute_dtype
    if dtype == torch.float32:
        return 0.0
    return torch.finfo(dtype).eps


def _text(error: Exception) -> str:
    first_lines = str(error).strip().splitlines()[:3]
    return f"{type(error).__name__}: {' '.join(first_lines)}"
