"""The claim: the report says what float8 loses in each linear layer at its scale, and which layers to keep."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcamp import ScalerConfig, float8, make_train_step, module_loss, stateless
from funcamp.numerics import Float8Layer, numerics_report
from tests.float8.models import batch, net

SGD = stateless(torch.optim.SGD, lr=0.1)


def wide_rows(x: Tensor) -> Tensor:
    """Numbers so far apart that E4M3 has no scale for them all."""
    x = x.clone()
    x[0] *= 2.0**24
    return x


def layers(model: nn.Module, x: Tensor, **options: Any) -> dict[str, Float8Layer]:
    report = numerics_report(lambda: model(x).square().mean(), module=model)
    return {one.path: one for one in report.float8(**options)}


def test_a_layer_that_fits_and_layers_that_do_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
    found = layers(model, torch.randn(8, 16))
    assert [one.keep for one in found.values()] == ["", "", "its sizes (10, 32) are not multiples of 16"]
    assert str(found["0"]) == "0: float8 holds it (lost: input 0 %, weight 0 %, gradient 0 %)"
    spread = layers(model, wide_rows(torch.randn(8, 16)))
    assert spread["0"].keep.startswith("E4M3 loses 8")
    assert spread["0"].input == pytest.approx(7 / 8, abs=0.1)
    assert layers(model, wide_rows(torch.randn(8, 16)), most=1.0)["0"].keep == ""
    bad = layers(model, torch.full((8, 16), math.inf))
    assert "its input has values that are not finite" in bad["0"].keep


def test_what_it_says_is_what_quantize_does() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 16) * torch.randn(64, 16).mul(6).exp()
    model = nn.Linear(16, 16)
    values, scale = float8.quantize(x)
    zero = ((values.float() == 0) & (x != 0)).float().mean().item()
    found = layers(model, x)[""]
    assert 0.01 < zero <= found.input + 0.02
    # The present scale is up to 3.5 times as large as the power of two below it.
    exact = layers(model, x, scales={"": torch.tensor([scale.item(), 1.0, 1.0])})[""]
    assert exact.input == pytest.approx(zero, abs=0.02)
    assert exact.weight == 0.0


@pytest.mark.parametrize("policy", ["float8", "float8,float8=delayed|history=2", "float16"])
def test_the_report_of_a_step_has_its_layers_by_their_names(policy: str) -> None:
    model = net()
    loss = module_loss(model, F.cross_entropy)
    step = make_train_step(loss, SGD, ScalerConfig(2.0**4), policy=policy)
    state = step.init()
    for number in range(2):
        state, _ = step(state, batch(number))
    report = numerics_report(step, state, batch(2), module=model)
    assert report.first_nonfinite() is None
    found = {one.path: one for one in report.float8(step.float8_scales(state))}
    assert list(found) == ["first", "middle", "odd", "head"]
    assert [one.path for one in found.values() if one.keep] == ["odd"]
    assert set(step.float8_scales(state)) == ({"first", "middle", "head"} if "delayed" in policy else set())
    # A scale that is far too large saturates.
    wrong = {path: torch.full((3,), 2.0**40) for path in found}
    assert all("loses 1e+02 % of its input" in one.keep for one in report.float8(wrong))


def test_most_outside_of_0_to_1_is_refused() -> None:
    report = numerics_report(lambda x: nn.Linear(2, 2)(x).sum(), torch.ones(1, 2))
    with pytest.raises(ValueError, match="most must be from 0 to 1; got 2"):
        report.float8(most=2)
