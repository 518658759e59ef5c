"""`verify`: is a step right for somebody's own model?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch

from funcamp import _tree
from funcamp._check import integer
from funcamp._step.state import Metrics, TrainState, check_train_state
from funcamp._step.step import TrainStep
from funcamp._trace.autocast_regions import without_autocast
from funcamp._types import Tree
from funcamp._verify.copied_contents import CopiedContents
from funcamp._verify.report import Comparison, Outcome, Verification
from funcamp._verify.roads import Run, Training, generators_restored, row_of
from funcamp._verify.rounding import Rounding, Row

#: The step whose scale is too high: not the first, so that there is something to undo.
_OVERFLOW = 1
#: The scale at which float16 gradients overflow. Float32's largest number is 2^128.
_OVERFLOWS = 2.0**120
#: The scale to begin with in float16, because the first steps of a higher one may be skipped, which shows little.
_FIRST_SCALE = 2.0**10
_LEAST_STEPS = 3
#: One for each run of a reference with disturbed parameters.
_SEEDS = range(4)
_UNUSED = "torch's loop leaves it alone; the step takes zeros, so that weight decay and momentum move it"
_IF_DIFFERENT = (
    "likely causes: a value in an attribute that changes from step to step and is no part of the state (make it a "
    "buffer, or an entry of the batch), or a parameter that is read in another way than by its name in the module; "
    "see what policy=None gives; if that differs too, please report it"
)


def verify(
    step: Callable[[TrainState, Tree], tuple[TrainState, Metrics]],
    batches: Iterable[Tree],
    *,
    state: TrainState | None = None,
    steps: int = 4,
) -> Verification:
    """Compare a step for your own model with torch's loop, eager, compiled, and from a saved state.

    Trains from the same weights and seeds along several roads: torch's own loop (`torch.autocast`,
    `torch.amp.GradScaler`, the optimizer's own class, with the step's scales, clipping, micro-batches and average), the
    eager step, the compiled step, and the compiled step continued from a state that was saved and loaded. Under float16
    one step gets a scale that is too high, so that it must be skipped. Loss, flag, parameters, buffers, optimizer state
    and average are compared after every step, leaf by leaf, of the step's own roads everything in state and metrics:

        |road - reference| <= 2 * (the largest |disturbed - reference|) + 16 ulp of the value

    in the 2-norm of a leaf. The disturbed runs are four more runs of the eager step, in which every number of the
    parameters begins one ulp of the compute dtype up or down. So a model that amplifies rounding is not blamed. If they
    differ by a quarter of what a value has moved, it is noise, and only asked for inf and NaN; a note has the step from
    which on the gradients are. In a low precision a wrong factor of a percent is hidden: verify with policy=None too.

    While a road runs, the attributes of the model's modules and of the criterion are deep copies. Before each step the
    random number generators of torch, Python and numpy are seeded with its number. Afterwards everything is as it was:
    tensors, attributes, generators. Not put back are variables of closures and globals (a teacher that the criterion
    names, a dict that it writes), a DataLoader's own generator, and version counters: a graph made before cannot be
    differentiated after. Runs without an autocast around it. Syncs. Takes some ten times as long as the steps, and a
    compilation; keeps the values after every step in host memory, for six runs. Not for a step inside another
    transform, and not while another thread uses the module.

    Args:
        step: a step of `make_train_step`, or `jit` of one. It is compiled anew, with the options of `jit`, but one step
            in a call, and exact=True, because other programs draw other random numbers.
        batches: an iterable of batches, such as a list or a DataLoader; the first `steps` of them are used. Different
            ones show more.
        state: the state to start from; by default `step.init()`, with the module's present values, and with a scale of
            at most 1,024, because skipped steps show little.
        steps: number of steps, at least 3.

    Returns:
        A `Verification`: `print` it. `ok` is False if a road differs by more than rounding, or raises.

    Raises:
        TypeError: step is not of `make_train_step`; state is missing for a loss without a module.
        ValueError: steps is below 3, or there are fewer batches.
        Exception: any error of the eager step.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> step = make_train_step(module_loss(model, torch.nn.functional.mse_loss), stateless(torch.optim.SGD))
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(4)]
        >>> print(verify(jit(step, backend="eager"), batches))
        4 steps; skipped: none
        torch's loop - eager step                 equal
        eager step - compiled step                equal
        eager step - compiled, saved, and loaded  equal

    References:
        The loop of torch's automatic mixed precision examples, PyTorch 2.13.
    """
    from funcamp._jit.jit import jit
    from funcamp._jit.jit_step import JitStep  # imports torch's compiler, which takes seconds

    plain_step = step._step if isinstance(step, JitStep) else step
    if not isinstance(plain_step, TrainStep):
        raise TypeError(f"verify: step must be a step of make_train_step, or jit of one; got {_tree.brief(step)}")
    options = step._options if isinstance(step, JitStep) else jit(step)._options
    compiled = JitStep(plain_step, options._replace(exact=True, unroll=None))  # else other random numbers
    integer("verify", "steps", steps, _LEAST_STEPS)
    if state is not None:
        check_train_state("verify", "state", state)
    elif not plain_step.loss_fn.has_module:
        raise TypeError("verify: state must be given for a loss without a module; got None: pass step.init(params)")
    contents = CopiedContents(plain_step.loss_fn.python_parts().values())
    with generators_restored(contents.tensors + _tree.tensors_in(state)):
        chosen = _first_batches(batches, steps)  # which may draw random numbers
        # A step with a policy disables an autocast around it, and torch's loop would not.
        with without_autocast(), torch.inference_mode(False), torch.enable_grad():
            if state is None:
                with contents.entered():
                    state = plain_step.init()
                scale = min(float(state.scaler.scale), _FIRST_SCALE)
            else:
                scale = float(state.scaler.scale)
            scales = {0: scale}
            if plain_step.options.policy == torch.float16:
                scales |= {_OVERFLOW: _OVERFLOWS, _OVERFLOW + 1: scale}
            return _compare(Training(plain_step, state, chosen, scales, contents), compiled)


def _first_batches(batches: Iterable[Tree], steps: int) -> list[Tree]:
    """Return the first batches; raise ValueError if there are too few."""
    chosen = list(itertools.islice(batches, steps))
    if len(chosen) < steps:
        raise ValueError(
            f"verify: batches must be at least {steps}, in a list or a DataLoader, one for each step; got "
            f"{_tree.brief(chosen)}: of one batch write [batch] * {steps}"
        )
    return chosen


def _compare(training: Training, compiled: Run) -> Verification:
    """Run the roads one after the other, and compare each with its reference."""
    eager = training.step_rows(training.step)
    disturbed = [training.step_rows(training.step, seed=seed) for seed in _SEEDS]
    rounding = Rounding(eager, disturbed, row_of(training.step, training.state, None))
    unused: set[str] = set()
    rows = _tried(lambda: training.torch_rows(eager, unused))
    comparisons = [_compared(rounding, "torch's loop - eager step", rows, eager)]
    rows = _tried(lambda: training.step_rows(compiled))
    comparisons.append(_compared(rounding, "eager step - compiled step", eager, rows))
    run, roads = compiled, "eager step - compiled, saved, and loaded"
    if comparisons[-1].outcome is Outcome.REFUSED:
        run, roads = training.step, "eager step - saved, and loaded"
    rows = _tried(lambda: training.step_rows(run, resumed_at=len(eager) // 2))
    comparisons.append(_compared(rounding, roads, eager, rows))

    notes: list[str] = []
    if unused:
        notes.append(f"no gradient for {', '.join(sorted(unused))}: {_UNUSED}")
    if any(one.outcome is Outcome.DIFFERENT for one in comparisons):
        notes.append(_IF_DIFFERENT)
    skipped = tuple([number for number, row in enumerate(eager) if row["metrics.found_inf"]])
    if len(skipped) == len(eager):
        notes.append("every step was skipped, so little was compared: begin from a state in mid-training")
    if rounding.noisy_step is not None:
        notes.append(
            f"the model amplifies rounding: from step {rounding.noisy_step} on its gradients are noise, and "
            "what is noise is not compared; policy=None, a larger batch or a lower learning rate shows more"
        )
    overflow = _OVERFLOW if _OVERFLOW in training.scales else None
    return Verification(tuple(comparisons), len(eager), skipped, overflow, tuple(notes))


def _tried(run: Callable[[], list[Row]]) -> list[Row] | str:
    """Return the rows of a road, or the text of its error."""
    try:
        return run()
    except Exception as error:
        first_lines = f"{type(error).__name__}: {error}".splitlines()[:3]
        return " ".join(first_lines)


def _compared(rounding: Rounding, roads: str, reference_rows: list[Row] | str, rows: list[Row] | str) -> Comparison:
    """Compare a road with its reference step by step; either may be the text of an error instead."""
    if isinstance(reference_rows, str):
        return Comparison(roads, Outcome.LEFT_OUT, reason=reference_rows)
    if isinstance(rows, str):
        return Comparison(roads, Outcome.REFUSED, reason=rows)
    found = [rounding.difference(number, reference_rows[number], row) for number, row in enumerate(rows)]
    differences = [difference for difference in found if difference]
    for difference in differences:
        if difference.share > 1:
            return Comparison(roads, Outcome.DIFFERENT, difference)
    if differences:
        largest = max(differences, key=lambda difference: difference.share)
        return Comparison(roads, Outcome.ROUNDING, largest)
    return Comparison(roads, Outcome.EQUAL)
