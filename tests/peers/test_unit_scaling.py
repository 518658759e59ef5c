"""The claim: the standard deviations are those that unit-scaling's own `analyse_module` and `track_scales` show."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad

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


CASES = {"mlp": (MLP, (64, 16)), "conv": (Conv, (8, 3, 8, 8)), "attention": (Attention, (4, 10, 16))}


def case(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    kind, shape = CASES[name]
    torch.manual_seed(0)
    model, x = kind(), torch.randn(shape)
    return model, x, torch.randn_like(model(x))


def ours(model: nn.Module, x: Tensor, backward: Tensor) -> dict[str, tuple[float, float]]:
    tracked = track_scales(model, sample=None)
    params = {name: value.detach() for name, value in model.named_parameters()}
    records = grad(lambda q: (tracked(params, q, x) * backward).sum())(tracked.probes())
    return {name: (r.forward.std.item(), r.backward.std.item()) for name, r in records.items()}


@pytest.mark.parametrize("name", CASES)
def test_analyse_module_shows_the_same(name: str) -> None:
    from unit_scaling.utils import analyse_module

    model, x, backward = case(name)
    code = analyse_module(
        copy.deepcopy(model), x.clone().requires_grad_(), backward, recurse_modules=False, syntax_highlight=False
    )
    shown = re.findall(r"= self\.(\w+)\(.*\(-> ([^,]+), <- ([^)]+)\)", code)
    assert {layer for layer, *_ in shown} == {layer for layer, _ in model.named_children()}
    for layer, forward, back in shown:
        found = ours(model, x, backward)[layer]
        assert found == pytest.approx((float(forward), float(back)), rel=6e-3)  # three digits


@pytest.mark.parametrize("name", CASES)
def test_their_track_scales_measures_the_same(name: str) -> None:
    from unit_scaling.transforms import track_scales as theirs

    model, x, backward = case(name)
    twin = theirs(copy.deepcopy(model))
    twin(x).backward(backward)
    metrics = [node.meta["metrics"] for node in twin.scales_graph().nodes if "metrics" in node.meta]
    measured = [(m.fwd.std, m.bwd.std) for m in metrics if m.bwd is not None]
    for found in ours(model, x, backward).values():
        assert any(found == pytest.approx(pair, rel=1e-4) for pair in measured)
