"""The same operations with torch.amp.custom_fwd and custom_bwd, in torch's loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd

from tests.recipes import Outcome, amp_loop

TOLERANCE = 0.0


def functions(device: str) -> tuple[Any, Any]:
    class Gate(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device)  # type: ignore[untyped-decorator]
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return torch.nn.functional.silu(x @ w)

        @staticmethod
        @custom_bwd(device_type=device)  # type: ignore[untyped-decorator]
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            y = x @ w
            low = (grad * (y.sigmoid() * (1 + y * (1 - y.sigmoid())))).to(y.dtype)
            return low @ w.mT, x.mT @ low

    class SquaredError(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device, cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(x, y)
            return (x - y).square().sum(1).mean()

        @staticmethod
        @custom_bwd(device_type=device)  # type: ignore[untyped-decorator]
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            x, y = ctx.saved_tensors
            return (x - y) * (2 * grad / len(x)), None

    return Gate, SquaredError


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    gate, squared_error = functions(device)
    params = {name: value.requires_grad_() for name, value in recipe.make_params(device).items()}
    optimizer = torch.optim.SGD(params.values(), lr=0.1)

    def loss_of(x: Tensor, y: Tensor) -> Any:
        return squared_error.apply(gate.apply(x, params["gate"]) @ params["head"], y)

    trace = amp_loop(recipe, optimizer, steps, device, loss_of)
    return {name: value.detach() for name, value in params.items()}, trace
