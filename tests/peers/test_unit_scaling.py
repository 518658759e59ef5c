"""The claim: the standard deviations are those that unit-scaling's own `analyse_module` shows."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad

from funcamp import module_loss
from funcamp.numerics import track_scales

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.act(self.first(x)))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.head = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Linear(8 * 36, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.act(self.conv(x)).flatten(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize(("kind", "shape"), [(MLP, (64, 16)), (Conv, (8, 3, 8, 8)), (Attention, (4, 10, 16))])
def test_analyse_module_shows_the_same(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    from unit_scaling.utils import analyse_module

    torch.manual_seed(0)
    model, x = kind(), torch.randn(shape)
    backward = torch.randn_like(model(x))
    code = analyse_module(
        copy.deepcopy(model), x.clone().requires_grad_(), backward, recurse_modules=False, syntax_highlight=False
    )
    shown = re.findall(r"= self\.(\w+)\(.*\(-> ([^,]+), <- ([^)]+)\)", code)
    assert {layer for layer, *_ in shown} == {layer for layer, _ in model.named_children()}

    tracked = track_scales(module_loss(model, lambda out, weights: (out * weights).sum()), sample=None)
    records = grad(tracked, argnums=1)(tracked.params(), tracked.tape(x.device), (x, backward))
    for layer, forward, back in shown:
        found = [one.std.item() for one in (records[layer].forward, records[layer].backward)]
        assert found == pytest.approx([float(forward), float(back)], rel=6e-3)  # three digits
