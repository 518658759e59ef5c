"""Run all roads of `verify`, and compare each with its reference."""

from __future__ import annotations

from collections.abc import Callable

from funcamp._jit.jit import jit
from funcamp._jit.jit_step import JitStep
from funcamp._step.step import TrainStep
from funcamp._storage.params import clone
from funcamp._verify.report import Comparison, Outcome, Verification
from funcamp._verify.roads import Training, row_of
from funcamp._verify.rounding import Difference, Rounding, Row, skips
from funcamp._verify.torch_loop import why_not

_TORCH, _EAGER = "torch's loop", "eager step"
#: One for each run of a reference with disturbed parameters.
_SEEDS = range(4)
#: A difference is a case for a report if it is this multiple of what rounding may do.
_FAR = 10.0


class Comparer:
    """Runs the roads one after the other, and compares each with its reference."""

    def __init__(self, training: Training, compiled: JitStep | None) -> None:
        self._training = training
        self._compiled = compiled
        self._comparisons: list[Comparison] = []
        self._notes: list[str] = []

    def run(self) -> Verification:
        """Return what all roads gave."""
        training = self._training
        eager = training.step_rows(training.step)
        draws_numbers = training.generators.have_drawn()
        disturbed = [training.step_rows(training.step, seed) for seed in _SEEDS]
        rounding = Rounding(eager, disturbed, row_of(training.step, training.state, None))
        self._compare_with_torch(rounding, eager)
        name, compiled = "jit(exact=True)", jit(training.step, exact=True)
        if self._compiled is not None:
            options = self._compiled._options
            if draws_numbers and options.backend == "inductor":
                options = options._replace(exact=True)  # other programs draw other numbers
            name, compiled = "compiled step", JitStep(training.step, options)
        self._compare(rounding, eager, _EAGER, name, lambda: training.step_rows(compiled))
        if self._comparisons[-1].outcome is not Outcome.REFUSED:
            name = f"{name.removesuffix(' step')}, saved, and loaded"
            middle = len(eager) // 2
            self._compare(rounding, eager, _EAGER, name, lambda: training.resumed_rows(compiled, middle))

        skipped = tuple([number for number, row in enumerate(eager) if skips(row)])
        if len(skipped) == len(eager):
            self._notes.append("every step was skipped, so little was compared: begin from a state in mid-training")
        if rounding.noisy_step is not None:
            self._notes.append(
                f"the model amplifies rounding: from step {rounding.noisy_step} on its gradients are noise, and "
                "what is noise is not compared; policy=None, a larger batch or a lower learning rate shows more"
            )
        different = [one.difference for one in self._comparisons if one.difference and not one.difference.is_rounding]
        causes = self._causes(max(one.share for one in different), draws_numbers=draws_numbers) if different else []
        return Verification(
            tuple(self._comparisons), len(eager), skipped, training.overflow, tuple(causes), tuple(self._notes)
        )

    def _compare_with_torch(self, rounding: Rounding, eager: list[Row]) -> None:
        """Compare the eager step with torch's loop, if there is one."""
        training = self._training
        step = training.step
        reason = why_not(step, training.state) if isinstance(step, TrainStep) else "the step is a function of its own"
        if not reason:
            try:
                rows, loop = training.torch_rows([float(row["metrics.scale"]) for row in eager])
            except Exception as error:
                reason = f"torch's loop raises {_text(error)}"
        if reason:
            self._comparisons.append(Comparison(_TORCH, _EAGER, Outcome.LEFT_OUT, reason=reason))
            return
        if loop.without_gradient:
            self._notes.append(
                f"{', '.join(sorted(loop.without_gradient))} gets no gradient: torch's loop leaves it alone; the step "
                "takes zeros, so that weight decay and momentum move it"
            )
        if loop.written_backward:
            self._notes.append(
                f"the backward pass writes {', '.join(sorted(loop.written_backward))} again, as layers do that "
                "torch.utils.checkpoint runs twice: torch's loop keeps that, the step what the forward pass wrote"
            )
        self._compare(rounding, rows, _TORCH, _EAGER, lambda: eager)

    def _compare(
        self, rounding: Rounding, reference_rows: list[Row], reference: str, road: str, run: Callable[[], list[Row]]
    ) -> None:
        """Compare a road with its reference, step by step, and note the result."""
        largest: Difference | None = None
        try:
            for number, row in enumerate(run()):
                difference = rounding.difference(number, reference_rows[number], row)
                if difference and (largest is None or difference.share > largest.share):
                    largest = difference
                if difference and not difference.is_rounding:
                    break
        except Exception as error:
            self._comparisons.append(Comparison(reference, road, Outcome.REFUSED, reason=_text(error)))
            return
        outcome = Outcome.EQUAL
        if largest is not None:
            outcome = Outcome.ROUNDING if largest.is_rounding else Outcome.DIFFERENT
        self._comparisons.append(Comparison(reference, road, outcome, largest))

    def _causes(self, largest: float, *, draws_numbers: bool) -> list[str]:
        """Return what may explain a difference, after another run of the eager step."""
        training = self._training
        with training.from_start():
            before = training.contents.described()
            training.rows_and_state(training.step, clone(training.state), range(len(training.batches)))
            after = training.contents.described()
        causes = [
            f"{name} changes from step to step, and is no part of the state: make it a buffer, an entry of the batch, "
            "or return it in the metrics"
            for name in before | after
            if before.get(name) != after.get(name)
        ]
        if draws_numbers:
            causes.append("the step draws random numbers: roads may draw them in another order or number")
        if not causes and largest > _FAR:
            causes.append("none was found: please report it, with the smallest model that shows it")
        return causes or ["none was found, and rounding does nearly as much: see what policy=None gives"]


def _text(error: Exception) -> str:
    first_lines = str(error).strip().splitlines()[:3]
    return f"{type(error).__name__}: {' '.join(first_lines)}"
