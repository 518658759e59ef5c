"""Run all roads of `verify`, and compare each with its reference."""

from __future__ import annotations

from collections.abc import Callable

from funcamp._jit.jit import jit
from funcamp._jit.jit_step import JitStep
from funcamp._step.step import TrainStep
from funcamp._verify.report import Comparison, Outcome, Verification
from funcamp._verify.roads import Training, row_of
from funcamp._verify.rounding import Rounding, Row, skips
from funcamp._verify.torch_loop import why_not

_TORCH, _EAGER = "torch's loop", "eager step"
#: One for each run of a reference with disturbed parameters.
_SEEDS = range(4)
#: A difference is a case for a report if it is this multiple of what rounding may do.
_FAR = 10.0


def compare(training: Training, compiled: JitStep | None) -> Verification:
    """Run the roads one after the other, and compare each with its reference.

    Args:
        training: what they train.
        compiled: a step with the options to compile with; None for `exact=True`.
    """
    step = training.step
    changed, draws_numbers = training.probe()
    eager = training.step_rows(step)
    disturbed = [training.step_rows(step, seed=seed) for seed in _SEEDS]
    rounding = Rounding(eager, disturbed, row_of(step, training.state, None))
    first, notes = _with_torch(training, rounding, eager)
    comparisons = [first]
    name, run = "jit(exact=True)", jit(step, exact=True)
    if compiled is not None:
        options = compiled._options
        if draws_numbers and options.backend == "inductor":
            options = options._replace(exact=True)  # other programs draw other numbers
        name, run = "compiled step", JitStep(step, options)
    comparisons.append(_compared(rounding, eager, _EAGER, name, lambda: training.step_rows(run)))
    if comparisons[-1].outcome is not Outcome.REFUSED:
        name = f"{name.removesuffix(' step')}, saved, and loaded"
        middle = len(eager) // 2
        resumed = _compared(rounding, eager, _EAGER, name, lambda: training.step_rows(run, resumed_at=middle))
        comparisons.append(resumed)

    skipped = tuple([number for number, row in enumerate(eager) if skips(row)])
    if len(skipped) == len(eager):
        notes.append("every step was skipped, so little was compared: begin from a state in mid-training")
    if rounding.noisy_step is not None:
        notes.append(
            f"the model amplifies rounding: from step {rounding.noisy_step} on its gradients are noise, and "
            "what is noise is not compared; policy=None, a larger batch or a lower learning rate shows more"
        )
    shares = [one.difference.share for one in comparisons if one.difference and one.outcome is Outcome.DIFFERENT]
    causes = _causes(max(shares), changed, draws_numbers=draws_numbers) if shares else []
    return Verification(tuple(comparisons), len(eager), skipped, training.overflow, tuple(causes), tuple(notes))


def _with_torch(training: Training, rounding: Rounding, eager: list[Row]) -> tuple[Comparison, list[str]]:
    """Compare the eager step with torch's loop, if there is one; return notes on what differs by design, too."""
    step = training.step
    reason = why_not(step, training.state) if isinstance(step, TrainStep) else "the step is a function of its own"
    if not reason:
        try:
            rows, loop = training.torch_rows([float(row["metrics.scale"]) for row in eager])
        except Exception as error:
            reason = f"torch's loop raises {_text(error)}"
    if reason:
        return Comparison(_TORCH, _EAGER, Outcome.LEFT_OUT, reason=reason), []
    notes: list[str] = []
    if loop.without_gradient:
        notes.append(
            f"{', '.join(sorted(loop.without_gradient))} gets no gradient: torch's loop leaves it alone; the step "
            "takes zeros, so that weight decay and momentum move it"
        )
    if loop.written_backward:
        notes.append(
            f"the backward pass writes {', '.join(sorted(loop.written_backward))} again, as layers do that "
            "torch.utils.checkpoint runs twice: torch's loop keeps that, the step what the forward pass wrote"
        )
    return _compared(rounding, rows, _TORCH, _EAGER, lambda: eager), notes


def _compared(
    rounding: Rounding, reference_rows: list[Row], reference: str, road: str, run: Callable[[], list[Row]]
) -> Comparison:
    """Run a road, and compare it with its reference step by step."""
    try:
        rows = run()
    except Exception as error:
        return Comparison(reference, road, Outcome.REFUSED, reason=_text(error))
    found = [rounding.difference(number, reference_rows[number], row) for number, row in enumerate(rows)]
    differences = [difference for difference in found if difference]
    for difference in differences:
        if not difference.is_rounding:
            return Comparison(reference, road, Outcome.DIFFERENT, difference)
    if differences:
        largest = max(differences, key=lambda difference: difference.share)
        return Comparison(reference, road, Outcome.ROUNDING, largest)
    return Comparison(reference, road, Outcome.EQUAL)


def _causes(largest: float, changed: list[str], *, draws_numbers: bool) -> list[str]:
    """Return what may explain differences, of which the largest is this multiple of what rounding may do."""
    causes = [
        f"{name} changes from step to step, and is no part of the state: make it a buffer, an entry of the batch, "
        "or return it in the metrics"
        for name in changed
    ]
    if draws_numbers:
        causes.append("the step draws random numbers: roads may draw them in another order or number")
    if not causes and largest > _FAR:
        causes.append("none was found: please report it, with the smallest model that shows it")
    return causes or ["none was found, and rounding does nearly as much: see what policy=None gives"]


def _text(error: Exception) -> str:
    first_lines = str(error).strip().splitlines()[:3]
    return f"{type(error).__name__}: {' '.join(first_lines)}"
