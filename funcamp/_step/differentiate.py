"""The scaled gradients of one micro-batch, and how the loss is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from funcamp import _tree
from funcamp._autograd.loss import Loss
from funcamp._autograd.scaled_grad import Engine, backward_runner, differentiate
from funcamp._autograd.tape import Tape, zeros_of
from funcamp._scaler.state import ScalerState
from funcamp._step.accumulate import Result
from funcamp._step.products import ProductContext
from funcamp._storage.inputs import Cast, Inputs
from funcamp._storage.params import clone
from funcamp._storage.policy import Policy, autocast_of
from funcamp._types import Tree


class SharedByMicroBatches(NamedTuple):
    """What all micro-batches of a step share."""

    loss_fn: Loss
    policy: Policy
    scaler: ScalerState
    inputs: Inputs
    cast: Cast
    """The parameters, from `Inputs.cast`."""
    product_context: ProductContext
    tapes: tuple[Tape, Tape]
    """Of the loss's taps, and of the products."""
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
    """Differentiate weigh(loss) of one micro-batch with respect to the inputs of the loss and the tapes."""
    loss_fn = shared.loss_fn
    inputs = shared.inputs
    # The loss is differentiated with respect to its inputs, and after them the zeros of the tapes, in one list.
    input_values = inputs.values(shared.cast)
    input_count = len(input_values)
    zeros, tapes_spec = _tree.flatten(zeros_of(shared.tapes))

    def differentiated_tree(values: list[Tensor]) -> Tree:
        """Return what the loss is differentiated with respect to, as the loss gets it."""
        params = inputs.tree(values[:input_count])
        taps, _ = _tree.unflatten(values[input_count:], tapes_spec)
        return (params, taps) if loss_fn.probes else params

    def loss_of(values: list[Tensor]) -> Tree:
        params = inputs.tree(values[:input_count])
        taps, amaxes = _tree.unflatten(values[input_count:], tapes_spec)
        shared.product_context.begin(values, amaxes)
        return call_loss(loss_fn, shared.policy, LossArguments(params, taps, buffers, shared.scaler, batch))

    with shared.product_context:
        gradients, loss, aux = differentiate(
            "step",
            shared.scaler,
            loss_of,
            input_values + zeros,
            loss_fn.has_buffers or loss_fn.has_aux,
            shared.engine,
            weigh=weigh,
            run_backward=backward_runner(loss_fn, differentiated_tree),
            low=(shared.policy.compute_dtype,),
        )
    if loss_fn.has_buffers:
        buffers, aux = _buffers_and_aux(loss_fn, buffers, aux)
    records = _tree.unflatten(gradients[input_count:], tapes_spec)
    return Result(inputs.gradients(gradients[:input_count]), loss, buffers, records, clone(aux))


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
