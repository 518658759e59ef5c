"""A scale per block, for gradients that differ by more than float16's range, about 2^25.

    python examples/recipes/layer_scalers.py

Watch `scale_branch`, in units of the head's scale: a branch that starts at 1e-5 (LayerScale) comes down as it learns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, mse_loss

import funcamp

CONFIGS = [funcamp.ScalerConfig(init_scale=scale, growth_interval=10) for scale in (2.0**20, 2.0**34, 2.0**18)]
BLOCKS: Any = (  # each a function of its parameters and the previous block's output, in float32
    lambda own, x: gelu(x @ own["stem"]).float(),
    lambda own, x: x + own["gamma"] * (gelu(x @ own["up"]) @ own["down"]),
    lambda own, x: (x @ own["head"]).float(),
)


class Row(NamedTuple):
    loss: Tensor
    scale: Tensor  # (3,), as found_inf: of each block
    found_inf: Tensor


def batch(index: int, device: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(index)).to(device)
    return x, x[:, :4].sin().sum(1, keepdim=True)


def make_params(device: str) -> list[dict[str, Tensor]]:
    stem, up, down, head = torch.randn(4, 32, 32, generator=torch.Generator().manual_seed(0)).to(device) / 32**0.5
    return [{"stem": stem}, {"gamma": torch.full_like(up[0], 1e-5), "up": up, "down": down}, {"head": head[:, :1]}]


def train(steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> tuple[Any, list[Row]]:
    """Return the parameters after some steps, and every step's row; wrap may compile the step."""
    params, adam = make_params(device), funcamp.stateless(torch.optim.Adam, lr=1e-3)

    def step(state: Any, batch: tuple[Tensor, Tensor]) -> tuple[Any, Row]:
        (params, opt_state, scalers), (x, y) = state, batch
        grads, after, checked, backward = [*params], [*scalers], [*scalers, scalers[-1]], [*BLOCKS]
        with torch.autocast(device, torch.float16):
            for i, block in enumerate(BLOCKS):
                x, backward[i] = torch.func.vjp(block, params[i], x)[:2]
        *below, loss = torch.func.grad_and_value(mse_loss)(x, y)
        for i in (2, 1, 0):  # from the loss down, each under its own scale; the data, below block 0, need no gradient
            scaled = backward[i](funcamp.scale(scalers[i], below[0]))
            (grads[i], *below), checked[i] = funcamp.unscale_and_check(scalers[i], scaled[: i + 1])
            # An overflow above propagates down to here and does not concern this block: its scale stays.
            after[i] = funcamp.skip_step(checked[i + 1], new=funcamp.update(checked[i], CONFIGS[i]), old=scalers[i])
        new, old = adam.update(params, grads, opt_state), (params, opt_state)  # skips if any block overflowed
        scale, _, found_inf = [torch.stack(column) for column in zip(*checked[:3])]
        return (*funcamp.skip_step(funcamp.merge(*checked), new=new, old=old), after), Row(loss, scale, found_inf)

    run, state, history = wrap(step), (params, adam.init(params), [funcamp.init(c, device=device) for c in CONFIGS]), []
    for index in range(steps):
        state, row = run(state, batch(index, device))
        history.append(row)
    return state[0], history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    rows = Row(*map(torch.stack, zip(*train(steps, wrap, device)[1])))
    first, last = rows.loss[0].item(), rows.loss[-10:].mean().item()
    skipped, ratio = rows.found_inf.amax(1).sum().item(), (rows.scale[:, 1] / rows.scale[:, 2]).tolist()
    assert last < 0.7 * first, (first, last)
    assert 2**4 <= ratio[-1] < max(ratio) / 2**4, ratio
    return {"loss_first": first, "loss_last": last, "skipped": skipped, "scale_branch": ratio[-1]}


if __name__ == "__main__":
    print(main())
