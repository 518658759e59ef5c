"""`verify`: is a step right for somebody's own model?"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from funcamp import _tree
from funcamp._autograd.module_loss import ModuleLoss
from funcamp._check import integer
from funcamp._step.state import check_train_state
from funcamp._step.step import TrainStep
from funcamp._trace.autocast_regions import without_autocast
from funcamp._types import Tree
from funcamp._verify.copied_contents import CopiedContents
from funcamp._verify.report import Verification
from funcamp._verify.roads import Training, devices_of, generators_restored, with_scale

#: The step whose scale is too high: not the first, so that there is something to undo.
_OVERFLOW = 1
#: The scale to begin with in float16, because the first steps of a higher one may be skipped, which shows little.
_FIRST_SCALE = 2.0**10
_LEAST_STEPS = 3


def verify(
    step: Callable[[Tree, Tree], tuple[Tree, Tree]],
    batches: Iterable[Tree],
    *,
    state: Tree = None,
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

    While a road runs, the attributes of the model's modules and of the criterion are deep copies, and so are dicts
    and modules among the variables that a criterion names. Afterwards everything is as it was: their tensors, the
    random number generators of torch, Python and numpy. Not put back are other variables of closures and globals, a
    DataLoader's own generator, and version counters: a graph made before cannot be differentiated after. Runs without
    an autocast around it. Syncs. Takes some ten times as long as the steps, and a compilation; keeps the values after
    every step in host memory, for six runs. Not for a step inside another transform, and not while another thread
    uses the module.

    Args:
        step: a step of `make_train_step`, which is compiled by `jit(step, exact=True)`; or a `JitStep`, which is
            compiled anew with its own options (and with exact=True too if the step draws random numbers, since other
            programs draw others); or any pure function `(state, batch) -> (state, metrics)`, which has no torch loop
            to compare with.
        batches: an iterable of batches, such as a list or a DataLoader; the first `steps` of them are used. Different
            ones show more. A tuple, a mapping and a tensor are one batch, and an error.
        state: the state to start from; by default `step.init()`, with the module's present values, and with a scale of
            at most 1,024, because skipped steps show little.
        steps: number of steps, at least 3.

    Returns:
        A `Verification`: `print` it. `ok` is False if a road differs by more than rounding, or raises.

    Raises:
        TypeError: step is not callable; batches is one batch; state is missing for a step that does not know its
            parameters.
        ValueError: steps is below 3, or there are fewer batches; step is a `JitStep` with unroll.
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
    from funcamp._jit.jit import check_step
    from funcamp._jit.jit_step import JitStep  # imports torch's compiler, which takes seconds
    from funcamp._verify.compare import compare

    compiled = step if isinstance(step, JitStep) else None
    if compiled is not None and compiled._options.unroll is not None:
        raise ValueError("verify: step must take one step in a call; got unroll: pass jit(step) without it")
    plain_step: Any = step if compiled is None else compiled._step
    check_step("verify", plain_step)
    integer("verify", "steps", steps, _LEAST_STEPS)
    if isinstance(plain_step, TrainStep) and state is not None:
        check_train_state("verify", "state", state)
    if state is None and not isinstance(plain_step, TrainStep):
        raise TypeError("verify: state must be given for a step that make_train_step did not make; got None")
    contents = CopiedContents(_objects(plain_step))
    with generators_restored(devices_of((state, contents.tensors))):
        chosen = _first_batches(batches, steps)  # which may draw random numbers
        # A step with a policy disables an autocast around it, and torch's loop would not.
        with without_autocast(), torch.inference_mode(False), torch.enable_grad():
            if state is None:
                with contents.entered():
                    state = plain_step.init()
                state = with_scale(state, min(float(state.scaler.scale), _FIRST_SCALE))
            is_float16 = isinstance(plain_step, TrainStep) and plain_step._options.policy.compute_dtype == torch.float16
            overflow = _OVERFLOW if is_float16 else None
            return compare(Training(plain_step, state, chosen, overflow, contents), compiled)


def _first_batches(batches: Iterable[Tree], steps: int) -> list[Tree]:
    """Return the first batches.

    Raises:
        TypeError: batches is one batch: in a list of batches nothing else has the form of one.
        ValueError: there are too few.
    """
    if isinstance(batches, (Tensor, Mapping, tuple)) or not isinstance(batches, Iterable):
        raise TypeError(
            "verify: batches must be an iterable of batches, such as a list or a DataLoader; got "
            f"{_tree.brief(batches)}, which is one batch: pass several in a list, or [batch] * {steps}"
        )
    chosen = list(itertools.islice(batches, steps))
    if len(chosen) < steps:
        raise ValueError(f"verify: batches must be at least {steps}, the number of steps; got {_tree.brief(chosen)}")
    return chosen


def _objects(step: object) -> dict[str, object]:
    """Return the user's objects by name, in which things may be kept from step to step."""
    loss_fn = getattr(step, "loss_fn", None)
    objects: dict[str, object]
    if isinstance(loss_fn, ModuleLoss):
        objects = {"model": loss_fn.model, "criterion": loss_fn.criterion}
    else:
        objects = {"step": step if loss_fn is None else loss_fn.function}
    for function in list(objects.values()):
        if inspect.isroutine(function) and hasattr(function, "__code__"):
            variables = inspect.getclosurevars(function)
            for name, value in {**variables.globals, **variables.nonlocals}.items():
                if isinstance(value, (dict, nn.Module)):
                    objects[f"variable {name}"] = value
    return objects
