"""The scaled gradients of one micro-batch, and how the loss is called."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._autograd.loss import Loss
from funcamp._autograd.differentiate import choose_engine, differentiate, refuse_hooks_beside
from funcamp._scaler.state import ScalerState
from funcamp._step.accumulate import Differentiate, Result, Shares
from funcamp._step.state import TrainState
from funcamp._storage.layout import Layout
from funcamp._storage.params import Params, clone
from funcamp._trace.tracing import compiling
from funcamp._types import Tree

if TYPE_CHECKING:
    from funcamp._step.step import TrainStep


def differentiator(step: TrainStep, state: TrainState, params: Params, tape: Tree, shares: Shares) -> Differentiate:
    """Return the function that differentiates the loss of a batch or a micro-batch.

    Args:
        step: the step.
        state: its state.
        params: what the loss gets: the parameters in full, also if the state is sharded.
        tape: the tape of the loss's taps.
        shares: how much each micro-batch counts.
    """
    loss_fn = step.loss_fn
    engine = choose_engine(loss_fn.engine, state)
    layout = params.layout
    # The loss is differentiated with respect to the parameters, and after them the zeros of the tape, in one list.
    param_values = params.values()
    param_count = len(param_values)
    zeros, tape_spec = _tree.flatten(tape)

    def differentiate_loss(buffers: dict[str, Tensor], batch: Tree, share: Tensor | None) -> Result:
        @contextlib.contextmanager
        def loss_of(values: list[Tensor]) -> Iterator[Tree]:
            taps = _tree.unflatten(values[param_count:], tape_spec)
            arguments = arguments_of(loss_fn, layout.tree(values[:param_count]), taps, buffers, state.scaler, batch)
            with loss_fn.called(step.autocast(state), *arguments) as returned:
                if engine == "autograd" and not torch.compiler.is_dynamo_compiling():
                    _check_first_graph(loss_fn, returned, values)
                yield returned

        gradients, loss, beside = differentiate(
            "step",
            state.scaler,
            loss_of,
            param_values + zeros,
            loss_fn.has_buffers or loss_fn.has_aux,
            engine,
            weigh=lambda loss: shares.weigh(loss, share),
            has_module=loss_fn.has_module,
        )
        after, aux = _buffers_and_aux(loss_fn, buffers, beside)
        records = _tree.unflatten(gradients[param_count:], tape_spec)
        return Result(gradients_as_stored(gradients[:param_count], layout), loss, after, records, clone(aux))

    return differentiate_loss


def arguments_of(
    loss_fn: Loss, params: Tree, taps: Tree, buffers: dict[str, Tensor], scaler: ScalerState, batch: Tree
) -> list[Tree]:
    """Return the arguments that a loss takes."""
    arguments = [params]
    if loss_fn.probes:
        arguments.append(taps)
    if loss_fn.has_buffers:
        # A function may write them. A call of a module copies them itself.
        arguments.append(buffers if loss_fn.has_module else {name: value.clone() for name, value in buffers.items()})
    if loss_fn.has_scaler:
        arguments.append(scaler)
    arguments.append(batch)
    return arguments


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
    if not loss_fn.has_buffers:
        return before, beside
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
        was, now = before.get(name), after.get(name)
        if was is None or now is None or was.shape != now.shape or was.dtype != now.dtype:
            raise ValueError(
                f"step: loss_fn must return buffers like those given; {name!r} was {_tree.describe(was)}, is "
                f"{_tree.describe(now)}; call a model that fills a buffer in its first call once before init"
            )
    return {name: after[name] for name in before}, aux


def gradients_as_stored(gradients: Sequence[Tensor], layout: Layout) -> Params:
    """Return gradients, one per slot of a layout, as the parameters are stored.

    Raises:
        TypeError: a gradient is sparse.
    """
    for gradient in gradients:
        if gradient.layout != torch.strided:
            raise TypeError(
                f"step: gradients must be dense (sparse=False in an embedding); got layout {gradient.layout} for "
                f"a parameter of shape {tuple(gradient.shape)}"
            )
    return Params(layout.join(gradients), layout)
