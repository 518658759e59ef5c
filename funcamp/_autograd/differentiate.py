"""Differentiate a scaled loss, by torch.func or by torch.autograd."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from funcamp import _tree, _upstream
from funcamp._autograd.checkpointing import same_parameters
from funcamp._autograd.graph import BACKWARD_IN_LOSS, nodes
from funcamp._autograd.returned import differentiable_loss_and_aux
from funcamp._scaler.scale import scale
from funcamp._scaler.state import ScalerState
from funcamp._types import Tree
from funcamp._upstream.advice import advise
from funcamp._upstream.autograd_function import keep_functions_whole

#: What differentiates: torch.func.grad, or torch.autograd.grad with respect to detached parameters.
Engine = Literal["func", "autograd"]
#: Gradients of the inputs of a loss; None for one that the loss does not use.
_Gradients: TypeAlias = Sequence[Tensor | None]
#: Scaled gradients of the inputs of a loss, the loss and aux.
Differentiated: TypeAlias = tuple[list[Tensor], Tensor, Tree]
#: A loss as a function of the tensors that it is differentiated with respect to. A module has them inside the block.
LossOf: TypeAlias = Callable[[list[Tensor]], AbstractContextManager[Tree]]


def differentiate(
    call: str,
    state: ScalerState,
    loss_of: LossOf,
    inputs: list[Tensor],
    has_aux: bool,
    engine: Engine,
    *,
    weigh: Callable[[Tensor], Tensor] = lambda loss: loss,
    has_module: bool = False,
) -> Differentiated:
    """Return the scaled gradients of weigh(loss) for every input, and the loss and aux as returned.

    Args:
        call: the public function, for errors.
        state: the scaler's state.
        loss_of: calls the loss with the inputs (`Loss.called`).
        inputs: the tensors with respect to which it is differentiated.
        has_aux: whether the loss returns more than itself.
        engine: what differentiates.
        weigh: a function of the loss that is scaled in its place, such as its share of a sum over micro-batches.
        has_module: whether a module has the inputs until that function has returned.
    """

    def scaled_loss(returned: Tree) -> tuple[Tensor, tuple[Tensor, Tree]]:
        loss, aux = differentiable_loss_and_aux(call, returned, has_aux)
        return scale(state, weigh(loss)), (loss, aux)

    def run() -> Differentiated:
        if engine == "func":
            return _by_func(loss_of, scaled_loss, inputs)
        return _by_autograd(call, loss_of, scaled_loss, inputs, has_module=has_module)

    keep_functions_whole()  # without Dynamo, too: the loss may contain frames that torch.compile compiles one by one
    if torch.compiler.is_dynamo_compiling():
        return run()
    if torch.is_inference_mode_enabled():
        raise RuntimeError(f"{call}: a loss must not be differentiated under torch.inference_mode()")
    try:
        with _inside_loss():
            return run()
    except (RuntimeError, ZeroDivisionError) as error:
        advise(call, error, uses_func=engine == "func")
        raise


def choose_engine(engine: Engine | None, arguments: Tree) -> Engine:
    """Return the engine; for None, torch.func if the call is inside a transform or loss, else autograd."""
    if engine is not None:
        return engine
    if torch.compiler.is_dynamo_compiling():
        return "autograd" if torch._dynamo.config.trace_autograd_ops else "func"
    # a torch without the level may be inside a jvp, in which "autograd" would lose the tangents
    is_in_jvp = getattr(forward_ad, "_current_level", 0) >= 0
    if is_in_jvp or _upstream.transforms_active() or _this_thread.losses:
        return "func"
    if not torch.is_grad_enabled():
        return "autograd"
    requires_grad = any(tensor.requires_grad for tensor in _tree.tensors_in(arguments))
    return "func" if requires_grad else "autograd"


class _ThisThread(threading.local):
    #: The number of nested losses that this thread is differentiating.
    losses = 0


_this_thread = _ThisThread()


@contextlib.contextmanager
def _inside_loss() -> Iterator[None]:
    """Context manager: a loss is being differentiated in this thread."""
    _this_thread.losses += 1
    try:
        yield
    finally:
        _this_thread.losses -= 1


#: Returns the scaled loss of what a loss returned, and beside it the loss and aux as returned.
_ScaledLoss: TypeAlias = Callable[[Tree], tuple[Tensor, tuple[Tensor, Tree]]]


def _by_func(loss_of: LossOf, scaled_loss: _ScaledLoss, inputs: list[Tensor]) -> Differentiated:
    """Return gradients, loss and aux by torch.func."""

    def scaled_loss_of(values: list[Tensor]) -> tuple[Tensor, tuple[Tensor, Tree]]:
        with loss_of(values) as returned:
            return scaled_loss(returned)

    grads, (_, (loss, aux)) = torch.func.grad_and_value(scaled_loss_of, has_aux=True)(inputs)
    return list(grads), loss, aux


def _by_autograd(
    call: str, loss_of: LossOf, scaled_loss: _ScaledLoss, inputs: list[Tensor], *, has_module: bool
) -> Differentiated:
    """Return gradients, loss and aux by torch.autograd."""
    is_traced_by_dynamo = torch.compiler.is_dynamo_compiling()
    with torch.enable_grad(), same_parameters(has_module=has_module) as begin_backward:
        leaves = [_leaf(value) for value in inputs]

        with loss_of(leaves) as returned:
            scaled, (loss, aux) = scaled_loss(returned)
            begin_backward()
            if not is_traced_by_dynamo and any(leaf.grad is not None for leaf in leaves):
                raise RuntimeError(f"{call}: {BACKWARD_IN_LOSS}; got a backward() in the forward pass")
            gradients: _Gradients = torch.autograd.grad(scaled, leaves, allow_unused=True)
    if not is_traced_by_dynamo:
        gradients = [_with_accumulated(gradient, leaf.grad) for gradient, leaf in zip(gradients, leaves)]
        _advise_if_passed_over(call, scaled, gradients)
    if all(gradient is None for gradient in gradients):
        fix = "take them from the argument, or write module_loss(model, criterion), which puts them into the module"
        if has_module:
            fix = "compute it from the output of the model, without detach() on the way"
        raise ValueError(
            f"{call}: loss_fn must return a loss that depends on the parameters it is given; it uses none: {fix}"
        )
    results = [_result(gradient, value) for gradient, value in zip(gradients, inputs)]
    aux_leaves, aux_spec = _tree.flatten(aux)
    return results, loss.detach(), _tree.map_leaves(Tensor.detach, aux_leaves, aux_spec)


def _with_accumulated(gradient: Tensor | None, accumulated: Tensor | None) -> Tensor | None:
    """Add what a backward() inside of the backward pass, of an autograd.Function, has put into `.grad`."""
    if accumulated is None:
        return gradient
    return accumulated if gradient is None else gradient + accumulated


def _advise_if_passed_over(call: str, scaled: Tensor, gradients: _Gradients) -> None:
    """Raise an error with advice if a reentrant checkpoint has no parameter before it: torch passes over it."""
    if all(gradient is not None for gradient in gradients):
        return
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes(scaled.grad_fn)):
        advise(call, RuntimeError("incompatible with .grad()"))


def _result(gradient: Tensor | None, value: Tensor) -> Tensor:
    """Return a gradient as a result: without a graph, and zeros if the loss does not depend on the value."""
    if gradient is None:
        return torch.zeros_like(value)
    # A sparse gradient cannot be detached in a trace, and requires no gradient.
    return gradient.detach() if gradient.requires_grad else gradient


def put_leaves_in_graphs() -> None:
    """Let Dynamo put `_leaf` into the graph if it cannot trace it."""
    if _upstream.NO_LEAVES and not torch.compiler.is_dynamo_compiling():
        torch.compiler.allow_in_graph(_leaf)  # type: ignore[no-untyped-call]


def _leaf(value: Tensor) -> Tensor:
    """Return the tensor without its history, as a leaf of a new graph."""
    return value.detach().requires_grad_()


def check_engine(call: str, engine: object) -> None:
    """Raise ValueError if this is not an engine."""
    if engine is not None and engine not in get_args(Engine):
        raise ValueError(f"{call}: engine must be 'func', 'autograd' or None; got {engine!r}")
