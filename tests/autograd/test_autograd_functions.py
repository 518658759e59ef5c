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

from funcamp import ScalerConfig, init, make_train_step, scaled_grad_and_value
from tests.support.helpers import assert_same
from tests.support.steps import SGD, compiled, eager_and_traced, traced
from tests.support.torch_loop import Made, assert_as_torchs_loop


class Reciprocal(Function):
    """The style that torch.func takes; its gradient is 7 times the true one, so that it shows."""

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


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "direct": lambda p, x: Reciprocal.apply(p["w"]).sum(),
    "intermediate": lambda p, x: Reciprocal.apply(p["w"] * x).sum(),
    "vmap": lambda p, x: vmap(lambda w: Reciprocal.apply(w))(p["w"]).sum(),
    "grad in the loss": lambda p, x: grad(lambda w: Reciprocal.apply(w).sum())(p["w"]).square().sum(),
    "vmap of grad in the loss": lambda p, x: vmap(grad(lambda w: Reciprocal.apply(w)))(p["w"]).square().sum(),
}
W, X = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 0.5, 2.0])


@pytest.mark.compiled
@pytest.mark.parametrize("name", LOSSES)
def test_the_backward_is_not_lost(name: str) -> None:
    grad_fn, arguments = scaled_grad_and_value(LOSSES[name]), (init(ScalerConfig(8.0)), {"w": W}, X)
    expected = grad_fn(*arguments)
    if name == "direct":
        torch.testing.assert_close(expected[0][0]["w"], -7 / W**2)
    assert_same(compiled(grad_fn)(*arguments), expected)
    step = make_train_step(LOSSES[name], SGD, ScalerConfig(8.0))
    assert_same(traced(step)(step.init({"w": W}), X), step(step.init({"w": W}), X))


# Dynamo's own, at a frame that takes a tensor with a graph.
@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("engine", ["autograd", "func"])
def test_the_backward_is_not_lost_in_a_frame_after_a_graph_break(without_the_change: None, engine: Any) -> None:
    def loss(p: Any, x: Tensor) -> Any:
        torch._dynamo.graph_break()
        return (p["w"] * grad(lambda v: Reciprocal.apply(v).sum())(x)).sum()

    fn, arguments = scaled_grad_and_value(loss, engine=engine), (init(ScalerConfig(8.0)), {"w": W}, X)
    assert_same(torch.compile(fn, backend="aot_eager")(*arguments), fn(*arguments))


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


class HoldsApply(torch.nn.Module):
    """Has the function as an attribute, and may run it in a checkpoint."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.w, self.fn, self.checkpoints = torch.nn.Parameter(torch.randn(4, 5)), Amp.apply, checkpoints

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.fn, x, self.w, use_reentrant=False) if self.checkpoints else self.fn(x, self.w)


@pytest.mark.compiled
@eager_and_traced
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_function_with_torch_amps_decorators_is_that_of_torchs_loop(checkpoints: bool, wrap: Any) -> None:
    def make() -> Made:
        return HoldsApply(checkpoints), lambda out, _: out.float().sum()

    assert_as_torchs_loop(make, [(torch.randn(3, 4), None)], wrap, policy="bfloat16")
