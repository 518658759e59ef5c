"""`scaled_grad_and_value`: differentiate a scaled loss, unscale and check its gradients, all with the same scale."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from funcamp import _tree
from funcamp._autograd.differentiate import Engine, check_engine, choose_engine, differentiate
from funcamp._autograd.loss import Loss
from funcamp._check import boolean
from funcamp._scaler.scale import unscale_and_check
from funcamp._scaler.state import ScalerState, check_state
from funcamp._types import Tree


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
            `torch._dynamo.config.trace_autograd_ops` is set; otherwise "autograd", whose results have no graph. So give
            "func" if you differentiate them with respect to what loss_fn closes over: a penalty on a module's gradient.

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
    described_loss = loss_fn if isinstance(loss_fn, Loss) else Loss(loss_fn)

    def grad_and_value(state: ScalerState, params: Tree, *args: object, **kwargs: object) -> Any:
        state = check_state(call, state)
        leaves, spec = _tree.gradients(call, "params", params, state.scale.device)
        tensors = [leaf for leaf in leaves if leaf is not None]
        chosen_engine = choose_engine(engine or described_loss.engine, (state, params, args, kwargs))

        def tree_of(values: list[Tensor]) -> Tree:
            """Return the tree of params with these values in place of its tensors."""
            remaining = iter(values)
            return _tree.unflatten([None if leaf is None else next(remaining) for leaf in leaves], spec)

        def loss_of(values: list[Tensor]) -> AbstractContextManager[Tree]:
            return described_loss.called(contextlib.nullcontext(), tree_of(values), *args, **kwargs)

        scaled_grads, loss, aux = differentiate(
            call, state, loss_of, tensors, has_aux, chosen_engine, has_module=described_loss.has_module
        )
        checked = unscale_and_check(state, tree_of(scaled_grads))
        return (checked, (loss, aux)) if has_aux else (checked, loss)

    return grad_and_value
