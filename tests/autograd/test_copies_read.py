"""A low-precision copy that is read outside of its layer is not silent: torch's loop has the full values there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcamp import jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_silent

X, Y = torch.randn(8, 4), torch.randn(8, 4)


class Reads(nn.Module):
    """A layer, whose weight the model reads in some way besides."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.conv = nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.layer(x))
        weight = self.layer.weight
        if self.how == "penalty":
            out = out + 1e-2 * weight.square().sum()
        if self.how == "normalized":
            out = F.linear(out, F.normalize(weight))
        if self.how == "masked":
            out = F.linear(out, weight.t() * (torch.arange(4) > 1))
        if self.how == "again":
            out = F.linear(out, weight, self.layer.bias)
        if self.how == "turned":
            out = out @ weight.t()[:, :4].reshape(4, 4)
        if self.how == "dtype":
            out = self.last(out.to(weight.dtype))
        if self.how == "layers":
            out = self.conv(self.attention(out[None], out[None], out[None])[0][0].T[None])[0].T + out
        return out


def taken(how: str, policy: str, jitted: bool) -> None:
    torch.manual_seed(0)
    step: Any = make_train_step(module_loss(Reads(how), F.mse_loss), stateless(torch.optim.SGD, lr=0.1), policy=policy)
    run, state = jit(step, backend="eager") if jitted else step, step.init()
    for _ in range(2):
        state, _ = run(state, (X, Y))


@pytest.mark.compiled
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("how", ["penalty", "normalized", "masked"])
def test_a_read_that_is_no_product_warns_once(how: str, jitted: bool) -> None:
    with pytest.warns(UserWarning, match=r"reads 'layer.weight' outside .*keep=layer.weight") as caught:
        taken(how, "float16", jitted)
    assert len(caught) == 1


@pytest.mark.compiled
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("how", ["again", "turned", "dtype", "layers"])
def test_products_and_layers_are_silent(how: str, jitted: bool) -> None:
    with assert_silent():
        taken(how, "bfloat16", jitted)


def test_a_parameter_that_is_kept_is_silent() -> None:
    with assert_silent():
        taken("penalty", "float16,keep=layer.weight", jitted=False)
