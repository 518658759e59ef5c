"""A scale per loss: two losses on one trunk whose gradients differ by orders of magnitude.

    python examples/recipes/scaler_per_loss.py

Watch `scale_main` and `scale_auxiliary`: with one scale the smaller gradients would vanish in float16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import funcamp

CONFIGS = [funcamp.ScalerConfig(init_scale=init_scale, growth_interval=10) for init_scale in (2.0**7, 2.0**39)]


class Row(NamedTuple):
    losses: Tensor  # (2,), as the others: of the main loss and of the auxiliary one
    scale: Tensor
    found_inf: Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.main, self.auxiliary = nn.Linear(8, 32), nn.Linear(32, 1), nn.Linear(32, 4)

    def forward(self, x: Tensor, value: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        hidden = nn.functional.gelu(self.trunk(x))
        auxiliary = nn.functional.cross_entropy(self.auxiliary(hidden).float(), label)
        return 1e4 * nn.functional.mse_loss(self.main(hidden).float(), value), 1e-6 * auxiliary


def batch(index: int, device: str) -> tuple[Tensor, ...]:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(index)).to(device)
    return x, x.sin().sum(1, keepdim=True), x[:, :4].argmax(1)


def train(steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> tuple[Any, list[Row]]:
    """Return the parameters after some steps, and every step's row; wrap may compile the step."""
    torch.manual_seed(0)
    model, adamw = Model().to(device), funcamp.stateless(torch.optim.AdamW, lr=1e-2)

    @funcamp.scaled_grad_and_value
    def graded(params: Any, batch: Any, task: int) -> Any:
        with torch.autocast(device, torch.float16):
            return torch.func.functional_call(model, params, batch)[task]

    def step(state: Any, batch: Any) -> tuple[Any, Row]:
        params, opt_state, scalers = state
        checked, losses = zip(*[graded(scaler, params, batch, task) for task, scaler in enumerate(scalers)])
        (grads0, grads1), scalers = zip(*checked)
        new = adamw.update(params, {name: grads0[name] + grads1[name] for name in params}, opt_state)
        either = funcamp.merge(*scalers)  # only for the skip: each scale is updated by its own flag
        after = funcamp.skip_step(either, new=new, old=(params, opt_state))
        scale, _, found_inf = [torch.stack(column) for column in zip(*scalers)]
        return (*after, list(map(funcamp.update, scalers, CONFIGS))), Row(torch.stack(losses), scale, found_inf)

    run, params = wrap(step), funcamp.clone(dict(model.named_parameters()))
    state, history = (params, adamw.init(params), [funcamp.init(config, device=device) for config in CONFIGS]), []
    for index in range(steps):
        state, row = run(state, batch(index, device))
        history.append(row)
    return state[0], history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    rows = Row(*map(torch.stack, zip(*train(steps, wrap, device)[1])))
    assert (rows.losses[-10:].mean(0) < 0.7 * rows.losses[0]).all(), rows.losses
    large, small = rows.scale[-1].tolist()
    assert small > 2**20 * large, (large, small)
    return {"skipped": rows.found_inf.amax(1).sum().item(), "scale_main": large, "scale_auxiliary": small}


if __name__ == "__main__":
    print(main())
