"""`jit` runs a step's Python once, as JAX does: what is in it acts as in eager code, or is refused by name."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcamp import ScalerConfig, jit, make_train_step, module_loss, stateless
from tests.helpers import assert_same
from tests.recipes import advance, scaler_for, values

CONFIG = ScalerConfig(2.0**24, growth_interval=4)
SGD = stateless(torch.optim.SGD, lr=0.05, momentum=0.9)
Wrap = Callable[[Any], Any]


def eager(step: Any) -> Any:
    return step


def compiled(step: Any, **options: Any) -> Any:
    return jit(step, backend="eager", **options)


WRAPS = pytest.mark.parametrize("wrap", [eager, compiled])


# Models as they come, against torch's own loop.


class Attention(nn.Module):
    """torch's encoder layer, with its dropout of 0.1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x).mean(1))
        return out.float()


class Scaled(torch.autograd.Function):
    """Takes ctx, and has a gradient that its forward has not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 3 + 0 * x


class Experts(nn.Module):
    """A mixture with a Function as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        mixed = torch.stack([expert(x) for expert in self.experts], -1) * weights.unsqueeze(-2)
        out: Tensor = Scaled.apply(mixed.sum(-1).mean(1))
        return out.float()


class Spectral(nn.Module):
    """The older spectral_norm: a forward pre-hook that writes buffers."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.layer = nn.utils.spectral_norm(nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).mean(1)
        return out.float()


def _through(module: Any, _: Any, grads: Any) -> Any:
    """The gradient of a Linear's input by hand."""
    return (grads[0] @ module.weight.to(grads[0].dtype),)


class Hooked(nn.Module):
    """Full backward hooks, forward hooks, and a logger that warns once."""

    def __init__(self) -> None:
        super().__init__()
        self.zeroth, self.first, self.second = (nn.Linear(8, width) for width in (8, 8, 2))
        self.first.register_full_backward_hook(_through)
        self.second.register_forward_hook(lambda module, args, out: out * 2)

    def forward(self, x: Tensor) -> Tensor:
        logging.getLogger("a.model").info("a batch of %s", tuple(x.shape))
        out: Tensor = self.second(self.first(self.zeroth(x)).tanh()).mean(1)
        return out.float()


MODELS = [Attention, Experts, Spectral, Hooked]


def batch_of(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(4, 3, 8, generator=generator), torch.randn(4, 2, generator=generator)


def torchs_loop(model: nn.Module, dtype: torch.dtype, steps: int) -> tuple[list[Any], dict[str, Tensor]]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    scaler, trace = scaler_for(CONFIG, "cpu"), []
    torch.manual_seed(1)
    for index in range(steps):
        x, y = batch_of(index)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        trace.append((loss.item(), *advance(scaler)))
    return trace, values(model)


@WRAPS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("make", MODELS)
def test_model_as_it_comes_is_torchs_loop(make: Callable[[], nn.Module], dtype: torch.dtype, wrap: Wrap) -> None:
    torch.manual_seed(0)
    model = make()
    step = make_train_step(
        module_loss(model, nn.functional.mse_loss), SGD, CONFIG, policy=str(dtype)[6:], keep_buffers=True
    )
    state, call, trace = step.init(), wrap(step), []
    torch.manual_seed(1)
    for index in range(16):
        state, metrics = call(state, batch_of(index))
        trace.append((metrics.loss.item(), metrics.scale.item(), metrics.found_inf.item()))
    expected, weights = torchs_loop(model, dtype, 16)
    assert trace == expected
    assert_same({name: state.params.tree()[name] for name in weights}, weights)
