"""The result of one micro-batch: the loss is called and differentiated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._autograd.differentiate import choose_engine, differentiate
from funcamp._autograd.returned import buffers_and_aux
from funcamp._step.accumulate import Result, ResultOf
from funcamp._step.shares import Shares
from funcamp._step.state import TrainState
from funcamp._storage.layout import Layout
from funcamp._storage.params import Params, clone
from funcamp._storage.policy import autocast_of
from funcamp._types import Tree

if TYPE_CHECKING:
    from funcamp._step.step import TrainStep


def result_function(
    step: TrainStep, state: TrainState, params: Params, tape: Tree, shares: Shares, precision: torch.dtype
) -> ResultOf:
    """Return the function that differentiates the loss of a batch or a micro-batch.

    Args:
        step: the step.
        state: its state.
        params: what the loss gets: the parameters in full, also if the state is sharded.
        tape: the tape of the loss's taps.
        shares: how much each micro-batch counts.
        precision: the dtype of the autocast in which the loss runs; float32 for none.
    """
    loss_fn = step.loss_fn
    engine = choose_engine(loss_fn.engine, state)
    device_type = state.scaler.scale.device.type
    layout = params.layout
    # The loss is differentiated with respect to the parameters, and after them the zeros of the tape, in one list.
    param_values = params.values()
    param_count = len(param_values)
    zeros, tape_spec = _tree.flatten(tape)

    def result_of(buffers: dict[str, Tensor], batch: Tree, share: Tensor | None) -> Result:
        @contextlib.contextmanager
        def loss_of(values: list[Tensor]) -> Iterator[Tree]:
            taps = _tree.unflatten(values[param_count:], tape_spec)
            arguments = loss_fn.arguments(layout.tree(values[:param_count]), taps, buffers, state.scaler, batch)
            with loss_fn.called(autocast_of(precision, device_type), *arguments) as returned:
                if engine == "autograd" and not torch.compiler.is_dynamo_compiling():
                    loss_fn.check_graph(returned, values)
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
        after, aux = buffers_and_aux(buffers, beside, loss_fn.has_aux) if loss_fn.has_buffers else (buffers, beside)
        records = _tree.unflatten(gradients[param_count:], tape_spec)
        return Result(gradients_as_stored(gradients[:param_count], layout), loss, after, records, clone(aux))

    return result_of


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
