"""The report says what float8 loses in each linear layer at its scale, and which layers to keep."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from funcamp.report import Float8Layer, numerics_report


def layers(model: nn.Module, x: Tensor, most: float = 0.01) -> dict[str, Float8Layer]:
    report = numerics_report(lambda: model(x).square().mean(), module=model)
    return {one.path: one for one in report.float8(most=most)}


def test_a_layer_that_fits_and_layers_that_do_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
    x = torch.randn(8, 16)
    found = layers(model, x)
    assert [one.keep for one in found.values()] == ["", "", "its sizes (10, 32) are not multiples of 16"]
    assert str(found["0"]) == "0: float8 holds it (lost: input 0 %, weight 0 %, gradient 0 %)"
    wide = x.clone()
    wide[0] *= 2.0**24  # E4M3 has no scale for numbers so far apart
    spread = layers(model, wide)
    assert spread["0"].keep.startswith("E4M3 loses 8")
    assert spread["0"].input == pytest.approx(7 / 8, abs=0.1)
    assert layers(model, wide, most=1.0)["0"].keep == ""
    assert "its input has values that are not finite" in layers(model, torch.full((8, 16), math.inf))["0"].keep
    with pytest.raises(ValueError, match="most must be from 0 to 1; got 2"):
        layers(model, x, most=2)
