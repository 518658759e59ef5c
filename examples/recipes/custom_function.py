"""Custom autograd functions under autocast: an operation with a custom backward in a compiled step.

    python examples/recipes/custom_function.py

Watch the casts before `apply`: the operation then has one precision in both passes, whatever autocast does, as with
torch.amp.custom_fwd and custom_bwd. Those need a forward that takes ctx, which works in a step too, but neither in vmap
nor under torch.func; a forward with `setup_context` works everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import funcamp

CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10)


def batch(index: int, device: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(index))
    return x.to(device), x[:, :4].sin().to(device)


class Gate(torch.autograd.Function):  # saves only its inputs
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return nn.functional.silu(x @ w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], _: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        y = x @ w
        low = (grad * (y.sigmoid() * (1 + y * (1 - y.sigmoid())))).to(y.dtype)
        return low @ w.mT, x.mT @ low


class SquaredError(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return (x - y).square().sum(1).mean()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], _: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        return (x - y) * (2 * grad / len(x)), None


def make_params(device: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"gate": torch.randn(8, 32, device=device) * 0.3, "head": torch.randn(32, 4, device=device) * 0.3}


def loss_fn(params: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Any:
    x, y = data
    gated: Tensor = Gate.apply(x.half(), params["gate"].half())  # type: ignore[no-untyped-call]
    return SquaredError.apply((gated @ params["head"]).float(), y)  # type: ignore[no-untyped-call]


def train(steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> tuple[Any, list[Any]]:
    step = funcamp.make_train_step(loss_fn, funcamp.stateless(torch.optim.SGD, lr=0.1), CONFIG, policy="float16")
    run, state, history = wrap(step), step.init(make_params(device)), []
    for index in range(steps):
        state, metrics = run(state, batch(index, device))
        history.append(metrics)
    return state.params.tree(), history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    _, history = train(steps, wrap, device)
    assert history[-1].loss < history[0].loss / 2
    return {"loss": history[-1].loss.item(), "skipped": history[-1].skipped.item()}


if __name__ == "__main__":
    print(main())
