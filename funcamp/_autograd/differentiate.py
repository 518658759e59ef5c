"""Differentiate a scaled loss; `scaled_grad_and_value` also unscales and checks, all with the same scale."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import Node

from funcamp import _tree, _upstream
from funcamp._autograd.checkpointing import allow_hooks, same_parameters
from funcamp._check import boolean
from funcamp._scaler.scale import scale, unscale_and_check
from funcamp._scaler.state import ScalerState, check_state
from funcamp._types import Tree
from funcamp._upstream.advice import advise
from funcamp._upstream.autograd_function import keep_functions_whole

#: What a loss with a backward pass inside has to become.
BACKWARD_IN_LOSS = (
    "the loss must not call backward(), neither in the forward pass nor in a gradient hook (as losses that cache "
    "gradients do), because the step differentiates it, once: return the loss without a backward pass of its own, take "
    "torch.autograd.grad for a gradient inside it, and split a batch that is too large by accumulate="
)
#: What differentiates: torch.func.grad, or torch.autograd.grad with respect to detached parameters.
Engine = Literal["func", "autograd"]
#: Gradients of the inputs of a loss; None for one that the loss does not use.
_Gradients: TypeAlias = Sequence[Tensor | None]
#: Scaled gradients of the inputs of a loss, the loss and aux.
Differentiated: TypeAlias = tuple[list[Tensor], Tensor, Tree]
#: A loss as a function of the tensors that it is differentiated with respect to. A module has them inside the block.
LossOf: TypeAlias = Callable[[list[Tensor]], AbstractContextManager[Tree]]


def scaled_grad_and_value(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, engine: Engine | None = None
) -> Callable[..., Any]:
    """Turn a loss function into one that returns unscaled, checked gradients and the loss.

    grads = d(scale * loss)/d(params) * f32(1 / f64(scale)); found_inf as in `unscale_and_check`. The loss is returned
    as loss_fn returned it. Pure; safe under torch.compile and vmap; no sync.

    The returned state has the flag: pass it to `skip_step` and `update`. If you drop it, a gradient that is not finite
    is applied.

    Start from `{name: p.detach().clone() for name, p in module.named_parameters()}`. The module's own parameters
    require a gradient. Then engine None is "func", and the results require a gradient too, as meta-learning needs it;
    and if you write the update yourself, `p - lr * g`, autograd records it, and the graph grows with every step.

    Args:
        loss_fn: `(params, *args, **kwargs) -> loss`, or `-> (loss, aux)` with has_aux; the loss is a floating-point
            tensor of shape (), aux a pytree of tensors. Use autocast inside it.
        has_aux: whether loss_fn returns `(loss, aux)`.
        engine: "autograd" for torch.autograd, the operations of `loss.backward()` in their order; "func" for
            torch.func, which nests and vmaps, but supports neither `torch.utils.checkpoint` nor attention with dropout
            under autocast (a dtype error of torch's). None chooses at each call: "func" inside a transform (vmap, grad,
            jvp), inside another loss, if an argument requires a gradient, and under your own torch.compile unless
            `torch._dynamo.config.trace_autograd_ops` is set; otherwise "autograd".

    Returns:
        A function `(state, params, *args, **kwargs) -> ((grads, state), loss)`, or `-> ((grads, state), (loss, aux))`.
        params is a pytree of floating-point or complex tensors; None passes through with a None gradient. grads is the
        same tree, float32 for narrower parameters.

    Raises:
        ValueError: engine is another string; when called: the loss has a shape other than (), or does not depend on a
            parameter (detached, computed under torch.no_grad).
        TypeError: has_aux is not a bool; when called: a leaf of params is an integer tensor or not a tensor, the loss
            is not a floating-point tensor, aux contains something else than tensors, or has_aux is set and loss_fn does
            not return a pair.

    Example:
        >>> step = scaled_grad_and_value(lambda params, x: ((params["w"] * x) ** 2).sum())
        >>> (grads, state), loss = step(init(), {"w": torch.tensor([2.0])}, torch.tensor([3.0]))
        >>> grads["w"], loss, state.found_inf
        (tensor([36.]), tensor(36.), tensor(0.))
    """
    call = "scaled_grad_and_value"
    if not callable(loss_fn):
        raise TypeError(f"{call}: loss_fn must be callable; got {loss_fn!r}")
    boolean(call, "has_aux", has_aux)
    check_engine(call, engine)
    put_leaves_in_graphs()
    called = getattr(loss_fn, "called", None)

    def grad_and_value(state: ScalerState, params: Tree, *args: object, **kwargs: object) -> Any:
        state = check_state(call, state)
        leaves, spec = _tree.gradients(call, "params", params, state.scale.device)
        tensors = [leaf for leaf in leaves if leaf is not None]
        chosen_engine = choose_engine(engine or getattr(loss_fn, "engine", None), (state, params, args, kwargs))

        def tree_of(values: list[Tensor]) -> Tree:
            """Return the tree of params with these values in place of its tensors."""
            remaining = iter(values)
            return _tree.unflatten([None if leaf is None else next(remaining) for leaf in leaves], spec)

        def loss_of(values: list[Tensor]) -> AbstractContextManager[Tree]:
            if called is not None:
                block: AbstractContextManager[Tree] = called(contextlib.nullcontext(), tree_of(values), *args, **kwargs)
                return block
            return contextlib.nullcontext(loss_fn(tree_of(values), *args, **kwargs))

        scaled_grads, loss, aux = differentiate(
            call, state, loss_of, tensors, has_aux, chosen_engine, has_module=getattr(loss_fn, "has_module", False)
        )
        checked = unscale_and_check(state, tree_of(scaled_grads))
        return (checked, (loss, aux)) if has_aux else (checked, loss)

    return grad_and_value


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
        loss, aux = _checked_loss_and_aux(call, returned, has_aux)
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
        with _differentiating():
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
def _differentiating() -> Iterator[None]:
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
    allow_hooks()
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


def nodes(grad_fn: Node | None, without: Iterable[Node | None] = ()) -> Iterator[Node]:
    """Yield the nodes of an autograd graph.

    Args:
        grad_fn: the last node; None for no graph.
        without: nodes that are left out, and with them what only they lead to.
    """
    seen = set(without)
    waiting: list[Node | None] = [grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [function for function, _ in node.next_functions]
        yield node


def refuse_hooks_beside(call: str, loss: Tensor, inputs: Iterable[Tensor]) -> None:
    """Raise RuntimeError if a loss depends on a tensor that is no input and has a hook, which no backward pass runs.

    Losses that cache gradients return `loss.detach().requires_grad_()` with a hook that calls `backward()`. A step
    differentiates with respect to its inputs, so torch does not come to this tensor.
    """
    input_ids = set(map(id, inputs))
    for node in nodes(loss.grad_fn):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and id(leaf) not in input_ids and leaf._backward_hooks:
            raise RuntimeError(f"{call}: {BACKWARD_IN_LOSS}; got a gradient hook on {_tree.describe(leaf)}")
    if loss.grad_fn is None and loss.requires_grad and id(loss) not in input_ids and loss._backward_hooks:
        raise RuntimeError(f"{call}: {BACKWARD_IN_LOSS}; got a gradient hook on the loss itself")


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


def pair(call: str, name: str, returned: Tree) -> tuple[Tree, Tree]:
    """Return what a loss returned if it is a pair; raise TypeError for anything else.

    Args:
        call: the public function, for errors.
        name: the function that returned it, by the name of its argument.
        returned: what it returned.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        rule = "must return a pair: (loss, aux), (loss, buffers) or (loss, (buffers, aux))"
        raise TypeError(f"{call}: {name} {rule}; got {_tree.brief(returned)}")
    return returned


def loss_and_aux(call: str, returned: Tree, beside: bool) -> tuple[Tensor, Tree]:
    """Return the loss, and what a loss function returned beside it if it returns more.

    Args:
        call: the public function, for errors.
        returned: what the loss function returned.
        beside: whether it returns more than the loss.

    Raises:
        TypeError: it returned no pair, or no floating-point tensor as loss.
    """
    loss, aux = pair(call, "loss_fn", returned) if beside else (returned, ())
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        raise TypeError(
            f"{call}: loss_fn must return a floating-point tensor as loss; got {_tree.describe(loss)}: with "
            "has_aux=True it returns (loss, aux)"
        )
    return loss, aux


def _checked_loss_and_aux(call: str, returned: Tree, has_aux: bool) -> tuple[Tensor, Tree]:
    """Return the loss and aux that a loss function returned; raise if they cannot be differentiated and returned."""
    loss, aux = loss_and_aux(call, returned, has_aux)
    if loss.dim() != 0:
        got = f"{tuple(loss.shape)}: take its mean() or sum()"
        raise ValueError(f"{call}: loss_fn must return a loss of shape (); got {got}")
    if not loss.requires_grad:
        raise ValueError(
            f"{call}: loss_fn must return a loss that depends on the parameters through differentiable operations; got "
            "one with requires_grad=False, which trains nothing: compute it outside torch.no_grad(), without detach(), "
            "item(), argmax() or a comparison on the way"
        )
    for index, leaf in enumerate(_tree.leaves(aux)):
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{call}: aux{_tree.path_of(aux, index)} must be a tensor; got {_tree.describe(leaf)}")
    return loss, aux
