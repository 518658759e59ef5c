"""The scaled gradients of one micro-batch, and how the loss is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._autograd.loss import Loss
from funcamp._autograd.scaled_grad import Engine, backward_runner, differentiate, refuse_hooks_beside
from funcamp._scaler.state import ScalerState
from funcamp._step.accumulate import Result
from funcamp._storage.inputs import gradients_as_stored
from funcamp._storage.params import Params, clone
from funcamp._storage.policy import Policy, autocast_of
from funcamp._trace.tracing import compiling
from funcamp._types import Tree


class SharedByMicroBatches(NamedTuple):
    """What all micro-batches of a step share."""

    loss_fn: Loss
    policy: Policy
    scaler: ScalerState
    params: Params
    """In full, also if the state is sharded."""
    tape: Tree
    """Of the loss's taps."""
    engine: Engine


class LossArguments(NamedTuple):
    """All that a loss may take."""

    params: Tree
    taps: Tree
    buffers: dict[str, Tensor]
    scaler: ScalerState
    batch: Tree


def differentiate_loss(
    shared: SharedByMicroBatches, buffers: dict[str, Tensor], batch: Tree, weigh: Callable[[Tensor], Tensor]
) -> Result:
    """Differentiate weigh(loss) of one micro-batch with respect to the inputs of the loss and the tape."""
    loss_fn = shared.loss_fn
    layout = shared.params.layout
    # The loss is differentiated with respect to the parameters, and after them the zeros of the tape, in one list.
    param_values = shared.params.values()
    param_count = len(param_values)
    zeros, tape_spec = _tree.flatten(shared.tape)

    def taps_of(values: list[Tensor]) -> Tree:
        return _tree.unflatten(values[param_count:], tape_spec)

    def differentiated_tree(values: list[Tensor]) -> Tree:
        """Return what the loss is differentiated with respect to, as the loss gets it."""
        params = layout.tree(values[:param_count])
        return (params, taps_of(values)) if loss_fn.probes else params

    def loss_of(values: list[Tensor]) -> Tree:
        params = layout.tree(values[:param_count])
        arguments = LossArguments(params, taps_of(values), buffers, shared.scaler, batch)
        returned = call_loss(loss_fn, shared.policy, arguments)
        if shared.engine == "autograd" and not torch.compiler.is_dynamo_compiling():
            _check_first_graph(loss_fn, returned, values)
        return returned

    gradients, loss, aux = differentiate(
        "step",
        shared.scaler,
        loss_of,
        param_values + zeros,
        loss_fn.has_buffers or loss_fn.has_aux,
        shared.engine,
        weigh=weigh,
        run_backward=backward_runner(loss_fn, differentiated_tree),
    )
    if loss_fn.has_buffers:
        buffers, aux = _buffers_and_aux(loss_fn, buffers, aux)
    records = _tree.unflatten(gradients[param_count:], tape_spec)
    return Result(gradients_as_stored(gradients[:param_count], layout), loss, buffers, records, clone(aux))


def call_loss(loss_fn: Loss, policy: Policy, arguments: LossArguments) -> Tree:
    """Call a loss under the policy's autocast, with the arguments that it takes."""
    arguments_of_loss: list[object] = [arguments.params]
    if loss_fn.probes:
        arguments_of_loss.append(arguments.taps)
    if loss_fn.has_buffers:
        arguments_of_loss.append(loss_fn.fresh(arguments.buffers))
    if loss_fn.has_scaler:
        arguments_of_loss.append(arguments.scaler)
    arguments_of_loss.append(arguments.batch)
    with autocast_of(policy, arguments.scaler.scale.device.type):
        return loss_fn(*arguments_of_loss)


def _check_first_graph(loss_fn: Loss, returned: Tree, values: list[Tensor]) -> None:
    """Raise RuntimeError if a part of the graph would not be differentiated: at the first call, and in every trace."""
    if loss_fn.graph_is_checked and not compiling():
        return
    loss = returned[0] if isinstance(returned, tuple) and returned else returned
    if isinstance(loss, Tensor):
        refuse_hooks_beside("step", loss, values)
        loss_fn.graph_is_checked = True


def _buffers_and_aux(loss_fn: Loss, before: dict[str, Tensor], beside: Tree) -> tuple[dict[str, Tensor], Tree]:
    """Return the new buffers and aux of what a loss returned besides itself.

    Raises:
        TypeError: this is not a dict of buffers, or not a pair with one.
        ValueError: the buffers have other names, shapes or dtypes than those given.
    """
    after = beside
    aux: Tree = ()
    if loss_fn.has_aux:
        if not isinstance(beside, tuple) or len(beside) != 2:
            got = _tree.brief(beside)
            raise TypeError(f"step: loss_fn must return (loss, (buffers, aux)) with both; got {got} besides loss")
        after, aux = beside
    if not isinstance(after, dict):
        raise TypeError(f"step: loss_fn must return its buffers as a dict; got {_tree.brief(after)}")
    for name in {**before, **after}:
        _check_buffer(name, before.get(name), after.get(name))
    return {name: after[name] for name in before}, aux


def _check_buffer(name: str, before: Tensor | None, after: Tensor | None) -> None:
    """Raise ValueError if a buffer appears, disappears, or has another shape or dtype than before."""
    if before is not None and after is not None and before.shape == after.shape and before.dtype == after.dtype:
        return
    was = "nothing" if before is None else _tree.describe(before)
    now = "nothing" if after is None else _tree.describe(after)
    raise ValueError(
        f"step: loss_fn must return buffers like those given; {name!r} was {was}, is {now}; call a model "
        "that fills a buffer in its first call once before init"
    )
