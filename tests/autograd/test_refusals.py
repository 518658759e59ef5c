"""What a loss must not do, or be called with: a step that cannot work, and words that its error must have.

A refused call leaves the module as it was. What `jit` alone refuses is in tests/jit/test_refusals.py, and what a
module must share and keep in tests/storage/test_ties.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from funcamp import ScalerConfig, init, loss, make_train_step, module_loss, scaled_grad_and_value
from tests.support.helpers import assert_same, clone, values_of
from tests.support.steps import SGD, eager, traced

X, Y = torch.linspace(-1, 1, 12).reshape(3, 4), torch.ones(3, 4)
Call = Callable[[Callable[[Any], Any]], object]


def of_module(
    make: Callable[[], nn.Module],
    criterion: Any = F.mse_loss,
    batch: Any = (X, Y),
    then: Any = None,
    engine: Any = None,
) -> Call:
    """The first step of a module; `then` changes the module after init."""

    def call(wrap: Callable[[Any], Any]) -> None:
        model = make()
        step = make_train_step(module_loss(model, criterion, engine=engine), SGD)
        state, before = step.init(), clone(values_of(model))
        if then is not None:
            then(model)
        try:
            wrap(step)(state, batch)
        finally:
            if then is None:
                assert_same(values_of(model), before)

    return call


def of_function(function: Callable[[Any, Tensor], Any], engine: Any = None) -> Call:
    """The first step of a loss function of one tensor."""
    step = make_train_step(loss(function, engine=engine), SGD, ScalerConfig(8.0))
    return lambda wrap: wrap(step)(step.init({"w": torch.ones(4)}), X)


LINEAR = nn.Linear(4, 4)
KEPT = [LINEAR.weight]


# Backward passes inside of a loss.


def calls_backward(p: Any, x: Tensor) -> Any:
    (p["w"] * x).sum().backward()
    return p["w"].square().sum()


def leaf_with_a_hook(p: Any, x: Tensor) -> Any:
    """As cached contrastive losses return it: the hook calls `backward()`."""
    leaf = (p["w"] * x).detach().sum().requires_grad_()
    leaf.register_hook(torch.neg)
    return leaf


# Modules that change or keep their parameters.


class Writes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.detach()[1:].zero_()
        return super().forward(x)


class Freezes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.bias.requires_grad_(False)
        return super().forward(x)


def hooked(register: Callable[[nn.Parameter], Any]) -> Callable[[], nn.Module]:
    """A module with a hook on a parameter."""

    def make() -> nn.Module:
        model = nn.Linear(4, 4)
        register(model.bias)
        return model

    return make


def other_shape(model: Any) -> None:
    model[1] = nn.Linear(8, 5)


def late_hook(model: Any) -> None:
    model[1].bias.register_hook(torch.neg)


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def two() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


# Checkpoints and transforms of torch.func.


class TakesCtx(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


class Again(nn.Module):
    """A layer that is computed again with the parameters that the module has then."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.body, x, use_reentrant=False)


AGAIN = Again()


def again(p: Any, x: Tensor, model: nn.Module = AGAIN) -> Any:
    return functional_call(model, {"body.weight": p["w"][None]}, x).tanh().sum()


def slope_of(p: Any, x: Tensor) -> Any:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad((p["w"] * x).sin().sum(), x, create_graph=True)
    return (slope - x).pow(2).mean()


def curvature(p: Any, x: Tensor) -> Any:
    hessian = torch.func.hessian(lambda row: (p["w"] * row).sin().prod())
    return torch.func.vmap(hessian)(x).square().sum()


def stacked(wrap: Any) -> object:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    step = make_train_step(module_loss(model, F.mse_loss), SGD, policy="bfloat16")
    states = torch.utils._pytree.tree_map(lambda leaf: torch.stack([leaf] * 2), step.init(flat=False))
    return torch.func.vmap(step)(states, (torch.randn(2, 3, 4), torch.randn(2, 3, 4)))


def vmapped(wrap: Any) -> object:
    step = make_train_step(loss(lambda p, x: (p["w"] * x).sum(), engine="autograd"), SGD)
    return torch.func.vmap(step, (None, 0))(step.init({"w": torch.ones(4)}), X)


def inference(wrap: Any) -> object:
    with torch.inference_mode():
        return of_function(lambda p, x: (p["w"] * x).sum())(wrap)


def without_a_step(wrap: Any) -> object:
    grad_fn = scaled_grad_and_value(lambda p, x: functional_call(LINEAR, p, x).sum())
    return grad_fn(init(), dict(LINEAR.named_parameters()), X.double())


PLAIN, OWN = r"module_loss: batch must be a tuple or list \(\*inputs, target\) with a criterion", "a mapping of keyword"
BACKWARD = r"step: the loss must not call backward\(\), neither in the forward pass nor in a gradient hook"
NOTHING = r"loss_fn must return a loss that depends on the parameters"
HOOK = r"must have no hook on their gradients; got one on '(1\.)?bias': change .* in a part of a chain"
REENTRANT, TWO_SETS = "pass use_reentrant=False", "Linear must be computed again with"
MET = "met an input and parameters of two dtypes, as torch says: .*; cast .* batch.float"

#: What is called eagerly and under `jit`, the error, and its words.
ALWAYS: dict[str, tuple[Call, type[Exception], str]] = {
    "backward() beside another term": (
        # contract: "no backward pass that reaches the step's parameters"
        of_function(calls_backward), RuntimeError, BACKWARD
    ),
    "a hook that calls backward()": (of_function(leaf_with_a_hook), RuntimeError, BACKWARD),
    "such a hook and another term": (
        of_function(lambda p, x: leaf_with_a_hook(p, x) + p["w"].sum()), RuntimeError, BACKWARD
    ),
    "backward() under torch.func": (of_function(calls_backward, engine="func"), RuntimeError, r"not call backward\(\)"),
    "no graph": (of_module(two, lambda o, t: F.mse_loss(o, t).detach()), ValueError, f"{NOTHING} through"),
    "no graph under torch.func": (of_module(two, lambda o, t: t.sum(), engine="func"), ValueError, NOTHING),
    "a graph of no parameter": (
        of_module(two, lambda o, t: F.mse_loss(o.detach().requires_grad_(), t)),
        *(ValueError, "it uses none: compute it from the output of the model"),
    ),
    "a parameter from before": (
        # contract: "A module keeps no parameter from before the call"
        of_module(lambda: LINEAR, lambda o, t: F.mse_loss(o, t) + KEPT[0].exp().sum()),
        *(ValueError, "must be read of the model .* got 'weight' as a tensor kept from before"),
    ),
    "a criterion with parameters": (
        of_module(two, lambda o, t, layer=nn.Linear(4, 4): F.mse_loss(layer(o), t)),
        *(ValueError, "criterion must have no trainable parameter, .* got one, a torch.float32 .+: make"),
    ),
    "a write": (of_module(lambda: Writes(4, 4)), ValueError, "must not write to its parameters .* wrote to 'weight'"),
    "a hook": (
        # contract: "no hooks on their gradients"
        of_module(hooked(lambda p: p.register_hook(torch.neg))), ValueError, HOOK
    ),
    "a hook after accumulation": (
        of_module(hooked(lambda p: p.register_post_accumulate_grad_hook(lambda p: None))), ValueError, HOOK
    ),
    "a hook that comes later": (of_module(two, then=late_hook), ValueError, HOOK),
    "a layer of another shape": (
        of_module(two, then=other_shape), ValueError, r"'1.weight' had the shape \(4, 8\) and has \(5, 8\): make the"
    ),
    "a checkpoint under torch.func": (
        of_function(lambda p, x: checkpoint(torch.sin, p["w"] * x, use_reentrant=False).sum(), engine="func"),
        *(RuntimeError, "torch.func does not take torch.utils.checkpoint .*; pass engine='autograd'"),
    ),
    "ctx under torch.func": (
        of_function(lambda p, x: TakesCtx.apply(p["w"]).sum(), engine="func"),
        *(RuntimeError, "does not take an autograd.Function whose forward takes ctx .*; override its setup_context"),
    ),
    "a reentrant checkpoint": (
        of_function(lambda p, x: checkpoint(torch.sin, p["w"] * x, use_reentrant=True).sum()), RuntimeError, REENTRANT
    ),
    "a reentrant checkpoint that no parameter is before": (
        of_function(lambda p, x: checkpoint(p["w"].mul, x.detach().requires_grad_(), use_reentrant=True).sum()),
        *(RuntimeError, REENTRANT),
    ),
    "a module that is computed again": (of_function(again), RuntimeError, TWO_SETS),
    "a batch of float64": (of_module(two, batch=(X.double(), Y)), RuntimeError, f"^(?!.*says.*says).*layer.* {MET}"),
    "an error of the model": (of_module(two, batch=([X], Y)), TypeError, "^linear"),
    "a division of the loss's": (
        of_function(lambda p, x: p["w"].sum() * (1 / (x.shape[0] - 3))), ZeroDivisionError, "division"
    ),
    "a gradient with respect to other parameters": (
        of_function(lambda p, x: torch.autograd.grad((p["w"] * x).sum(), [LINEAR.weight])[0].sum()),
        *(RuntimeError, "such as a module's parameters; give it those of the loss's argument"),
    ),
    "a forgotten criterion": (
        of_module(two, None), TypeError, r"the arguments of Sequential.forward .*too many.*\. Pass module_loss a criterion"
    ),
    "a text": (of_module(two, batch="hello"), TypeError, f"{PLAIN}; got 'hello'"),
}  # fmt: skip
#: The same of an eager step.
EAGER: dict[str, tuple[Call, type[Exception], str]] = {
    "a parameter that freezes": (of_module(lambda: Freezes(4, 4)), RuntimeError, "must not freeze a parameter"),
    "a target of another dtype": (of_module(two, F.nll_loss, (X, Y[:, 0])), RuntimeError, "^expected .* Long"),
    "autograd under vmap": (vmapped, RuntimeError, r"step: engine='autograd' does not nest .*; pass engine='func'"),
    "norms of two dtypes under vmap": (stacked, RuntimeError, "under vmap torch cannot .* LayerNorm.*give the layer x"),
    "inference mode": (inference, RuntimeError, "must not be differentiated under torch.inference_mode"),
    "a slope under torch.func": (
        of_function(slope_of, engine="func"), RuntimeError, "take torch.func.grad in the loss, or pass engine='auto"
    ),
    "a penalty under torch.func": (
        of_function(lambda p, x: torch.autograd.grad((p["w"] * KEPT[0]).sum(), KEPT)[0].sum(), engine="func"),
        *(RuntimeError, r"take torch\.func\.grad there, or pass engine='autograd'"),
    ),
    "two dtypes in a convolution": (
        of_module(lambda: nn.Sequential(nn.ReLU(), nn.Conv2d(1, 4, 1)), batch=(X[None].double(), Y)),
        *(RuntimeError, f"layer '1' {MET}"),
    ),
    "two dtypes without a step": (without_a_step, RuntimeError, f"scaled_grad_and_value: a layer {MET}"),
    "an empty tuple": (of_module(two, batch=()), TypeError, rf"{PLAIN}; got \(\)"),
    "keys that are no names": (of_module(linear, None, {1: X}), TypeError, f"{OWN}.*; got a dict with 1"),
    "no loss": (of_module(linear, None, X), TypeError, r"must return its loss.*got .*shape \(3, 4\)"),
    "a tuple as loss": (of_module(lambda: nn.LSTM(4, 4), None, X), TypeError, "must return its loss.*got a tuple of"),
}  # fmt: skip
#: The same under `jit`.
JIT: dict[str, tuple[Call, type[Exception], str]] = {
    "a hessian under vmap": (of_function(curvature), RuntimeError, r"vmap\(hessian\(f\)\): take vmap\(jacrev"),
    "no rows": (
        of_module(two, batch=(X[:0], Y[:0])),
        RuntimeError,
        "the batch must not be empty: .* leave a batch of 0",
    ),
}
ROWS = {
    **{(name, "eager"): row for name, row in {**ALWAYS, **EAGER}.items()},
    **{(name, "jit"): row for name, row in {**ALWAYS, **JIT}.items()},
}


@pytest.mark.compiled
@pytest.mark.parametrize(("name", "how"), ROWS)
def test_it_is_refused_with_the_fix(name: str, how: str) -> None:
    call, error, text = ROWS[name, how]
    with pytest.raises(error, match=f"(?s){text}"):
        call(traced if how == "jit" else eager)
    assert not nn.modules.module._global_forward_pre_hooks
