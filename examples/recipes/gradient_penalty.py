"""A penalty on the norm of the loss's gradient: second derivatives with one scale.

    python examples/recipes/gradient_penalty.py

Watch the inner gradient: it is scaled like the outer one, because float16 would flush it to zero, and unscaled before
the penalty, which would grow with the scale. Both use the scale as a tensor; torch's loop calls `get_scale()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import funcamp

CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10)
LR, WEIGHT = 0.02, 0.1


def batch(index: int, device: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(index))
    return x.to(device), x.sin().sum(1, keepdim=True).to(device)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def train(
    steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu"
) -> tuple[dict[str, Tensor], list[Any]]:
    """Return the parameters after some steps, and all metrics; aux is the plain loss and the norm."""
    model = make_model().to(device)
    inner = funcamp.scaled_grad_and_value(
        lambda params, x, y: criterion(torch.func.functional_call(model, params, x), y)
    )

    def penalized(params: dict[str, Tensor], scaler: funcamp.ScalerState, batch: tuple[Tensor, Tensor]) -> Any:
        (grads, _), loss = inner(scaler, params, *batch)  # if these are not finite, the outer gradient is not either
        norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
        return loss + WEIGHT * norm, (loss, norm)

    sgd = funcamp.stateless(torch.optim.SGD, lr=LR, momentum=0.9)
    loss_fn = funcamp.loss(penalized, has_scaler=True, has_aux=True)
    step = funcamp.make_train_step(loss_fn, sgd, CONFIG, policy="float16")
    run, state, history = wrap(step), step.init(dict(model.named_parameters())), []
    for index in range(steps):
        state, metrics = run(state, batch(index, device))
        history.append(metrics)
    return state.params.tree(), history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    _, history = train(steps, wrap, device)
    fit = torch.stack([metrics.aux[0] for metrics in history])
    first, last = fit[:10].mean().item(), fit[-10:].mean().item()
    assert last < first / 2, (first, last)
    applied = next(index for index, metrics in enumerate(history) if not metrics.found_inf)
    norm, exact = history[applied].aux[1].item(), float32_norm(applied, device)
    assert abs(norm - exact) < 0.01 * exact, (norm, exact)
    return {"first": first, "last": last, "norm": norm, "norm_in_float32": exact, "skipped": history[-1].skipped.item()}


def float32_norm(index: int, device: str) -> float:
    """Return the norm at the first parameters, without autocast and without a scale."""
    model, (x, y) = make_model().to(device), batch(index, device)
    grads = torch.autograd.grad(criterion(model(x), y), list(model.parameters()))
    return torch.stack([grad.square().sum() for grad in grads]).sum().sqrt().item()


if __name__ == "__main__":
    print(main())
