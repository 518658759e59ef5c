"""The claim: what torch.compile gets wrong, or fails to run, a compiled program computes as the eager step does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcamp import ScalerConfig, jit, make_train_step, module_loss, stateless
from tests.support.steps import SGD, assert_as_eager

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
    "projected": {"proj_size": 4},
}


class Layers(nn.Module):
    """An LSTM of each kind on the same sequences, whose results are summed."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(6, 8, batch_first=True, **KINDS[kind]) for kind in kinds])

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(3)
        for layer in self.layers:
            seen, (hidden, _) = layer(x)
            out = out + (seen[:, -1] + hidden.mean() * seen[:, -1].square())[:, :3]
        return out


@pytest.mark.thorough
@pytest.mark.inductor
def test_every_gradient_of_the_generated_code_is_the_eager_one() -> None:
    gradients = {"gradients": lambda grads: {name: grad.clone() for name, grad in grads.items()}}
    loss_fn, config = module_loss(Layers(*KINDS), F.cross_entropy), ScalerConfig(init_scale=2.0**10)
    step = make_train_step(loss_fn, SGD, config, observe=gradients)
    batches = [(torch.randn(4, 5, 6), torch.randint(3, (4,))) for _ in range(2)]
    assert_as_eager(step, jit(step), step.init(flat=False), batches, 1e-5)


def test_multilabel_margin_loss_ends_at_the_first_negative_target() -> None:
    target = torch.tensor([[0, 1, -1, 0, 0], [2, -1, -1, -1, -1], [4, 3, 2, 1, 0]])

    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return state + 1, F.multilabel_margin_loss(x, target, reduction="none")

    assert_as_eager(step, jit(step, backend="aot_eager"), torch.zeros(()), [torch.randn(3, 5)], 1e-6)


#: Of shape (2, 9, 9, 9), seen as so many channels; in some, windows or pixels do not fit the size.
RESIZED: dict[str, Callable[[Tensor], Tensor]] = {
    "in 2-d": lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True),
    "the largest of -inf": lambda x: F.max_pool3d(x.where(x > 0, -torch.inf)[None], 3, 2, 1).clamp(min=-1),
    "powers of 2": lambda x: torch.ldexp(x[..., :4], torch.arange(4)),
}


def gradients(state: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    x = x.detach().requires_grad_()
    outputs = {name: resize(x).sin() for name, resize in RESIZED.items()}
    ramps = {name: torch.arange(1.0, out.numel() + 1).view_as(out) for name, out in outputs.items()}
    return state + 1, {name: torch.autograd.grad((out * ramps[name]).sum(), x)[0] for name, out in outputs.items()}


@pytest.mark.inductor
def test_gradients_of_resized_images_are_the_eager_ones() -> None:
    assert_as_eager(gradients, jit(gradients), torch.zeros(()), [torch.linspace(-3, 3, 1458).view(2, 9, 9, 9)], 1e-5)


@pytest.mark.inductor
def test_powers_of_a_number_are_the_eager_ones() -> None:
    def step(state: Tensor, exponents: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        powers = {
            "2": 2**exponents,
            "of a bool": 3 ** (exponents > 1),
            "read": state * 2**exponents,
            "1.5": 1.5**exponents,
        }
        return state + 1, powers

    assert_as_eager(step, jit(step), torch.ones(4), [torch.arange(4)], 1e-6)


@pytest.mark.inductor
def test_trilinear_interpolation_where_tests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return state + 1, F.interpolate(x * state, scale_factor=2, mode="trilinear").sin()

    monkeypatch.setenv("CI", "true")
    assert_as_eager(step, jit(step), torch.ones(1), [torch.arange(24.0).view(1, 1, 2, 3, 4)], 1e-5)


def hessian_product(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Forward over reverse; torch.func.jvp makes zeros without memory for what does not depend on x."""

    def out(x: Tensor) -> Tensor:
        hidden: Tensor = (x @ params["w"] + params["b"]).tanh() @ params["w"] + params["b"]
        return hidden.square().sum() + torch.sgn(hidden)[-1].sum()

    tangents: Any = torch.func.jvp(torch.func.grad(out), (x,), (torch.ones_like(x),))
    mean: Tensor = tangents[1].square().mean()
    return mean


@pytest.mark.thorough
@pytest.mark.inductor
def test_a_hessian_product_is_the_eager_ones() -> None:
    step = make_train_step(hessian_product, stateless(torch.optim.SGD, lr=5e-4), ScalerConfig(init_scale=4.0))
    state = step.init({"w": torch.linspace(-1, 1, 64).view(8, 8).sin(), "b": torch.zeros(8)})
    assert_as_eager(step, jit(step), state, [torch.linspace(-1, 1, 32).view(4, 8)] * 3, 1e-5)
