"""`verify`: is a step right for somebody's own model?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from funcamp import _tree
from funcamp._autograd.loss import Loss
from funcamp._autograd.module_loss import ModuleLoss
from funcamp._check import integer
from funcamp._step.state import check_train_state
from funcamp._step.step import TrainStep
from funcamp._trace.autocast_regions import without_autocast
from funcamp._types import Tree
from funcamp._verify.python_state import PythonState
from funcamp._verify.report import Verification
from funcamp._verify.roads import Generators, Task

#: The step whose scale is too high: not the first, so that there is something to undo.
_OVERFLOW = 1
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
    `torch.amp.GradScaler`, the optimizer's own class, with the step's clipping, micro-batches and average), the eager
    step, the compiled step, and the compiled step continued from a state that was saved and loaded. Under float16 one
    step gets a scale that is too high, so that it must be skipped. Loss, parameters, buffers, optimizer state, average,
    scale, flag and counts are compared after every step, leaf by leaf:

        |road - reference| / |reference - start| <= 4 * (the same for a reference disturbed by one ulp) + 16 ulp

    in the 2-norm of a leaf, where an ulp is of the compute dtype. So a model that amplifies rounding is not blamed.
    In a low precision that hides a wrong factor of some percent: verify with policy=None too. A skipped step must leave
    parameters, moments and average to the bit. Module, criterion, torch's, Python's and numpy's generators, and batches
    are put back, except objects of other libraries that they keep, closures of backward hooks, and version counters: a
    graph made before cannot be differentiated after. Runs without an autocast around it. Syncs. Takes a few times as
    long as the steps, and a compilation; keeps the values after every step in host memory, twice. Not for a step inside
    another transform, and not while another thread uses the module.

    Args:
        step: a step of `make_train_step`, which is compiled by `jit(step, exact=True)`; or a `JitStep`, which is
            compiled anew with its own options (and with exact=True too if the step draws random numbers, since other
            programs draw others); or any pure function `(state, batch) -> (state, metrics)`, which has no torch loop
            to compare with.
        batches: an iterable of batches, such as a list or a DataLoader; the first `steps` of them are used. Different
            ones show more.
        state: the state to start from; by default `step.init()`, with the module's present values.
        steps: number of steps, at least 3.

    Returns:
        A `Verification`: `print` it. `ok` is False if a road differs by more than rounding, or raises.

    Raises:
        TypeError: step is not callable; state is missing for a step that does not know its parameters.
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
    from funcamp._jit.jit_step import JitStep  # imports torch's compiler, which takes seconds
    from funcamp._verify.comparer import OURS, Comparer

    compiled = step if isinstance(step, JitStep) else None
    if compiled is not None and compiled._options.unroll is not None:
        raise ValueError("verify: step must take one step in a call; got unroll: pass jit(step) without it")
    plain_step = step if compiled is None else compiled._step
    _check_step(plain_step)
    integer("verify", "steps", steps, _LEAST_STEPS)
    if isinstance(batches, (Tensor, Mapping)) or not isinstance(batches, Iterable):
        raise TypeError(f"verify: batches must be an iterable of batches, such as a list; got {_tree.brief(batches)}")
    if isinstance(plain_step, TrainStep) and state is not None:
        check_train_state("verify", "state", state)
    # Recorded before the batches are taken, because taking them may draw random numbers.
    python_state = PythonState(_roots(plain_step, OURS) | _generators(batches))
    generators = Generators(_devices_of(state))
    try:
        chosen = list(itertools.islice(batches, steps))
        if len(chosen) < steps:
            raise ValueError(f"verify: batches must be at least {steps}, the number of steps; got {len(chosen)}")
        # A step with a policy disables an autocast around it, and torch's loop would not.
        with without_autocast(), torch.inference_mode(False), torch.enable_grad():
            if state is None:
                state = _first_state(plain_step)
            task = Task(
                step=plain_step,
                state=state,
                batches=chosen,
                overflow=_overflow_of(plain_step),
                python_state=python_state,
                generators=Generators(_devices_of((state, chosen))),
            )
            return Comparer(task, compiled).run()
    finally:
        python_state.restore()
        generators.restore()


def _devices_of(tree: Tree) -> set[torch.device]:
    return {tensor.device for tensor in _tree.tensors_in(tree)}


def _overflow_of(step: object) -> int | None:
    """Return the number of the step that gets a scale that is too high; None if nothing is computed in float16."""
    is_float16 = isinstance(step, TrainStep) and step._options.policy.compute_dtype == torch.float16
    return _OVERFLOW if is_float16 else None


def _generators(batches: Iterable[Tree]) -> dict[str, object]:
    """Return the generators of a DataLoader, which its iteration moves."""
    own_generator = getattr(batches, "generator", None)
    sampler = getattr(batches, "sampler", None)
    sampler_generator = getattr(sampler, "generator", None)
    generators: dict[str, object] = {}
    for number, generator in enumerate((own_generator, sampler_generator)):
        if generator:
            generators[f"generator {number} of batches"] = generator
    return generators


def _check_step(step: object) -> None:
    """Raise TypeError if this is not a step."""
    if not callable(step) or isinstance(step, (nn.Module, Loss, type)):
        raise TypeError(
            f"verify: step must be a function (state, batch) -> (state, metrics), as make_train_step and jit make it; "
            f"got {_tree.brief(step)}"
        )


def _first_state(step: object) -> Tree:
    if not isinstance(step, TrainStep):
        raise TypeError("verify: state must be given for a step that make_train_step did not make; got None")
    if not isinstance(step.loss_fn, ModuleLoss):
        raise TypeError(
            "verify: state must be given for a loss that module_loss did not make: step.init(params); got None"
        )
    return step.init()


def _roots(step: object, ours: str) -> dict[str, object]:
    """Return the user's objects by name, in which things may be kept from step to step."""
    if not isinstance(step, TrainStep):
        return {"step": step}
    loss_fn = step.loss_fn
    roots: dict[str, object] = {}
    if isinstance(loss_fn, ModuleLoss):
        roots["model"] = loss_fn.model
        roots["criterion"] = loss_fn.criterion
    else:
        roots["loss_fn"] = loss_fn.function
    roots["weight"] = step._options.weight
    roots["observe"] = dict(step._options.observe)
    roots[ours] = step
    return roots
