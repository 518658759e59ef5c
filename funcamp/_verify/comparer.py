"""Run all roads of `verify`, and compare each with its reference."""

from __future__ import annotations

from collections.abc import Callable

from funcamp._autograd.module_loss import ModuleLoss
from funcamp._jit.jit import jit
from funcamp._jit.jit_step import JitStep
from funcamp._step.step import TrainStep
from funcamp._storage.params import clone
from funcamp._verify.report import Comparison, Outcome, Verification
from funcamp._verify.roads import Training
from funcamp._verify.rounding import Difference, Rounding, Row, distance, skips
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
        rounding = self._with_torch(eager)
        name, compiled = "jit(exact=True)", jit(training.step, exact=True)
        if self._compiled is not None:
            options = self._compiled._options
            if draws_numbers and options.backend == "inductor":
                options = options._replace(exact=True)  # other programs draw other numbers
            name, compiled = "compiled step", JitStep(training.step, options)
        self._compare(rounding, eager, _EAGER, name, lambda: training.step_rows(compiled))
        if self._comparisons[-1].outcome is not Outcome.REFUSED:
            middle = len(eager) // 2
            name = f"{name.removesuffix(' step')}, saved, and loaded"
            self._compare(rounding, eager, _EAGER, name, lambda: training.resumed_rows(compiled, middle), middle)

        skipped = tuple([number for number, row in enumerate(eager) if skips(row)])
        if len(skipped) == len(eager):
            self._notes.append("every step was skipped, so little was compared: begin from a state in mid-training")
        different = [one.difference for one in self._comparisons if one.difference and not one.difference.is_rounding]
        causes = self._causes(eager, max(one.share for one in different)) if different else []
        return Verification(
            tuple(self._comparisons), len(eager), skipped, training.overflow, tuple(causes), tuple(self._notes)
        )

    def _with_torch(self, eager: list[Row]) -> Rounding:
        """Compare the eager step with torch's loop; return what rounding does to it, or to the step without a loop."""
        training = self._training
        step = training.step
        start = training.start()
        reason = why_not(step, training.state) if isinstance(step, TrainStep) else "the step is a function of its own"
        if not reason:
            scales = [float(row["metrics.scale"]) for row in eager]
            try:
                rows, without_gradient = training.torch_rows(scales)
                disturbed = [training.torch_rows(scales, seed)[0] for seed in _SEEDS]
            except Exception as error:
                reason = f"torch's loop raises {_text(error)}"
        if reason:
            self._comparisons.append(Comparison(_TORCH, _EAGER, Outcome.LEFT_OUT, reason=reason))
            return Rounding(eager, [training.step_rows(step, seed) for seed in _SEEDS], start)
        if without_gradient:
            self._notes.append(
                f"{', '.join(sorted(without_gradient))} gets no gradient: torch's loop leaves it alone; the step takes "
                "zeros, so that weight decay and momentum move it"
            )
        rounding = Rounding(rows, disturbed, start)
        self._compare(rounding, rows, _TORCH, _EAGER, lambda: eager)
        return rounding

    def _compare(
        self,
        rounding: Rounding,
        reference_rows: list[Row],
        reference: str,
        road: str,
        run: Callable[[], list[Row]],
        first: int = 0,
    ) -> None:
        """Compare a road with its reference, step by step from the first, and note the result."""
        largest: Difference | None = None
        try:
            for number, row in enumerate(run(), first):
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

    def _causes(self, eager: list[Row], largest: float) -> list[str]:
        """Return what may explain a difference, after another run of the eager step."""
        training = self._training
        with training.from_start():
            before = training.contents.described()
            again = training.rows_from(0, clone(training.state), training.step)
            after = training.contents.described()
        causes = [
            f"{name} changes from step to step, and is no part of the state: make it a buffer, an entry of the batch, "
            "or return it in the metrics"
            for name in before | after
            if before.get(name) != after.get(name)
        ]
        if training.generators.have_drawn():
            causes.append("the step draws random numbers: roads may draw them in another order or number")
        if any(distance(row[name], other[name]) for row, other in zip(eager, again) for name in row):
            causes.append(
                "a second run of the eager step gives other numbers: something changes that is not in the module, such "
                "as a variable of a closure, of a class or of Python's module"
            )
        loss_fn = getattr(training.step, "loss_fn", None)
        if isinstance(loss_fn, ModuleLoss):
            for name, parameter in loss_fn.model.named_parameters():
                if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                    causes.append(f"model.{name} has a hook on its gradient")
        if not causes and largest > _FAR:
            causes.append("none was found: please report it, with the smallest model that shows it")
        return causes or ["none was found, and rounding does nearly as much: see what policy=None gives"]


def _text(error: Exception) -> str:
    first_lines = str(error).strip().splitlines()[:3]
    return f"{type(error).__name__}: {' '.join(first_lines)}"
