"""An `autograd.Function` in a loss: its backward is never lost, and torch.amp's decorators work as in torch's loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from funcamp import ScalerConfig, init, jit, make_train_step, module_loss, scaled_grad_and_value, stateless
from tests.support.helpers import assert_close, assert_same

X, W = torch.randn(3, 4), torch.randn(4, 5)


def compiled(fn: Any) -> Any:
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


class PowerOfProduct(Function):
    """The style that torch.func takes, with two outputs; its gradient is 7 times the true one, so that it shows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, power: float = 2.0) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y.abs() ** power, y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, ctx.power = inputs
        ctx.save_for_backward(x, w, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        gy = 7 * g * ctx.power * y.abs() ** (ctx.power - 1) * y.sign()
        return gy @ w.T, x.T @ gy, None


class Reciprocal(Function):
    """One input, a direct one of the loss, and a backward that is 7 times the true one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 1 / x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -7 * ctx.saved_tensors[0] ** 2 * g


@torch.no_grad()
def without_grad(x: Tensor) -> Any:
    return Reciprocal.apply(x).sum()


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "direct": lambda p, x: Reciprocal.apply(p["w"]).sum(),
    "intermediate": lambda p, x: Reciprocal.apply(p["w"] * x).sum(),
    "with a constant": lambda p, x: PowerOfProduct.apply(x[None], p["w"].expand(3, 3) + torch.eye(3))[0].sum(),
    "vmap": lambda p, x: vmap(lambda w: Reciprocal.apply(w))(p["w"]).sum(),
    "grad in the loss": lambda p, x: grad(lambda w: Reciprocal.apply(w).sum())(p["w"]).square().sum(),
    "vmap of grad in the loss": lambda p, x: vmap(grad(lambda w: Reciprocal.apply(w)))(p["w"]).square().sum(),
    "under no_grad too": lambda p, x: Reciprocal.apply(p["w"]).sum() * without_grad(x),
}


@pytest.mark.thorough(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_backward_is_not_lost_in_a_step(name: str) -> None:
    step = make_train_step(LOSSES[name], stateless(torch.optim.SGD, lr=0.1), ScalerConfig(8.0))
    params, x = {"w": torch.tensor([1.0, 2.0, 4.0])}, torch.tensor([1.0, 0.5, 2.0])
    expected = step(step.init(params), x)
    assert_same(jit(step, backend="eager")(step.init(params), x), expected)
    assert_same(compiled(step)(step.init(params), x), expected)


@pytest.mark.compiled
@pytest.mark.parametrize("name", LOSSES)
def test_backward_is_not_lost_in_a_compiled_core_loop(name: str) -> None:
    fn = scaled_grad_and_value(LOSSES[name])
    args = init(ScalerConfig(8.0)), {"w": torch.tensor([1.0, 2.0, 4.0])}, torch.tensor([1.0, 0.5, 2.0])
    expected = fn(*args)
    assert_same(compiled(fn)(*args), expected)
    if name == "direct":
        assert_close(expected[0][0]["w"], -7 / args[1]["w"] ** 2, 1e-6)


def test_backward_is_not_lost_in_a_step_that_differentiates_by_itself() -> None:
    def step(state: Tensor, x: Tensor) -> Any:
        return state - grad(lambda w: (Reciprocal.apply(w) * x).sum())(state), {}

    assert_same(jit(step, backend="eager")(torch.ones(3), torch.ones(3))[0], torch.full((3,), 8.0))


def test_dynamo_is_changed_once(without_the_change: None) -> None:
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    args = init(ScalerConfig(8.0)), {"w": torch.ones(3)}, torch.ones(3)
    changes = []
    for name in ("direct", "intermediate"):
        compiled(scaled_grad_and_value(LOSSES[name]))(*args)
        changes.append(AutogradFunctionVariable.call_method)
    assert changes[0] is changes[1]
    assert not hasattr(changes[0].__wrapped__, "__wrapped__")  # type: ignore[attr-defined]


# Dynamo's own, at a frame that takes a tensor with a graph.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_backward_is_not_lost_in_a_frame_after_a_graph_break(without_the_change: None) -> None:
    def loss(p: Any, x: Tensor) -> Any:
        torch._dynamo.graph_break()
        return (p["w"] * grad(lambda v: Reciprocal.apply(v).sum())(x)).sum()

    args = init(ScalerConfig(8.0)), {"w": torch.ones(3)}, torch.ones(3)
    for engine in ("autograd", "func"):
        fn = scaled_grad_and_value(loss, engine=engine)
        expected = fn(*args)
        assert_same(expected[0][0]["w"], torch.full((3,), -7.0))
        assert_same(torch.compile(fn, backend="aot_eager")(*args), expected)


class Amp(Function):
    """A forward that takes ctx, with torch's decorators; its gradient is 7 times the true one."""

    @staticmethod
    @custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        ctx.save_for_backward(x, y)
        return y.square()

    @staticmethod
    @custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return None, x.T @ (14 * g * y)


def amp_loss(w: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return Amp.apply(x, w).float().sum()  # type: ignore[no-any-return]


def torchs_gradient() -> Tensor:
    w = W.clone().requires_grad_()
    amp_loss(w, X).backward()
    assert w.grad is not None
    return w.grad


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("transform", [lambda fn: fn, compiled], ids=["eager", "compiled"])
def test_a_forward_that_takes_ctx_works_with_autograd_and_is_refused_by_torch_func(transform: Any) -> None:
    def gradient(engine: Any) -> Tensor:
        fn = scaled_grad_and_value(lambda p, x: amp_loss(p["w"], x), engine=engine)
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            (grads, _), _ = transform(fn)(init(ScalerConfig(8.0)), {"w": W}, X)
        found: Tensor = grads["w"]
        return found

    assert_same(gradient("autograd"), torchs_gradient())
    with pytest.raises(Exception, match=r"must override the setup_context|takes ctx .*setup_context"):
        gradient("func")


class HoldsApply(torch.nn.Module):
    """Has the function as an attribute, and may run it in a checkpoint."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.w, self.fn = torch.nn.Parameter(W.clone()), Amp.apply
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(self.fn, x, self.w, use_reentrant=False) if self.checkpoints else self.fn(x, self.w)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_function_of_a_module_and_in_a_checkpoint(checkpoints: bool) -> None:
    loss = module_loss(HoldsApply(checkpoints), lambda out, _: out.float().sum())
    step = make_train_step(loss, stateless(torch.optim.SGD, lr=0.1), ScalerConfig(8.0))
    for run in (step, jit(step, backend="eager")):
        found = run(step.init(), (X, None))[0].params.tree()["w"]
        assert_close(found, W - 0.1 * torchs_gradient(), 1e-6)
