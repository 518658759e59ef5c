"""The claim: a converted model is the same model with its linear layers in float8, in every loop and step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import funcamp
from funcamp import float8
from tests.float8.models import Net, batch, converted, made, net, trained
from tests.support.helpers import assert_close, assert_same
from tests.support.steps import compiled, traced


def test_layers_are_changed_in_place_and_named() -> None:
    model = net()
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    layers = ["first", "middle", "head"]
    assert float8.convert(model, keep=["odd"]) == layers
    assert all(found is parameters[name] for name, found in model.named_parameters())
    assert all(found is modules[name] for name, found in model.named_modules())
    assert model.state_dict().keys() == net().state_dict().keys()
    assert [name for name, module in model.named_modules() if isinstance(module, float8.Float8Linear)] == layers
    with pytest.raises(ValueError, match="got none in Net"):
        float8.convert(model, keep=["odd"])  # they are no Linear any more


def test_keep_names_a_layer_by_any_of_its_names_or_a_module_with_layers() -> None:
    def blocks() -> nn.ModuleDict:
        shared = nn.Linear(16, 16)
        return nn.ModuleDict({"a": nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 7)), "b": shared, "c": shared})

    assert float8.convert(blocks(), keep=["a"]) == ["b"]
    assert float8.convert(blocks(), keep=("a.1", "c")) == ["a.0"]


def test_subclasses_compute_in_their_own_way() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
    model = nn.ModuleList([Twice(16, 16), nn.MultiheadAttention(16, 2), normed, nn.Linear(16, 16)])
    assert float8.convert(model) == ["3"]


def test_an_encoder_calls_its_layers_in_eval_mode_too() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 16)
    assert float8.convert(layer) == ["linear1", "linear2"]
    expected = layer(x)
    with torch.no_grad():
        assert_close(layer.eval()(x), expected, 1e-5)  # attention rounds otherwise


def test_a_layer_is_the_product_and_the_bias() -> None:
    for config in (float8.Float8Config(), float8.Float8Config("row", emulate=True)):
        layer, x = nn.Linear(16, 32), torch.randn(2, 3, 16)
        float8.convert(layer, config)
        assert_same(layer(x), float8.scaled_mm(x, layer.weight, config) + layer.bias)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(input=x)
        assert_same(y, float8.scaled_mm(x.bfloat16(), layer.weight, config) + layer.bias.bfloat16())
        assert_same(copy.deepcopy(layer)(x), layer(x))


class ByHand(Net):
    """The model with its layers in float8 written out."""

    def forward(self, x: Tensor) -> Tensor:
        def linear(layer: nn.Linear, x: Tensor) -> Tensor:
            y = float8.scaled_mm(x, layer.weight)
            return y + layer.bias.to(y.dtype)

        x = linear(self.middle, F.gelu(linear(self.first, x)))
        x = self.norm(linear(self.middle, self.conv(x[..., None])[..., 0]))
        out: Tensor = linear(self.head, x + self.odd(x[..., :24]).repeat(1, 2))
        return out


class Saving(Net):
    """The model under activation checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def test_a_step_is_the_model_with_its_products_written_out() -> None:
    found = trained(converted())
    assert_same(found, trained(net(ByHand)))
    assert_same(found, trained(converted(kind=Saving)))
    assert trained(net())[1] != found[1]
    # Sums in another order, on some processors, can move a number to the next one of bfloat16.
    assert_close(trained(converted(float8.Float8Config(emulate=True)))[1], found[1], 1e-2)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_loop_of_grad_scaler_is_the_step(enabled: bool) -> None:
    model = converted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = funcamp.GradScaler("cpu", init_scale=2.0**8, enabled=enabled)
    for number in range(4):
        x, y = batch(number)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    state, losses = trained(converted())
    # Without a scale the smallest gradients round otherwise in E5M2.
    found = (loss.detach(), model.head.weight.detach())
    assert_close(found, (losses[-1], state["params.head.weight"]), 1e-6 if enabled else 1e-2)


@pytest.mark.parametrize(("scale", "value"), [(2.0**127, 1.0), (1.0, torch.inf)], ids=["scale", "input"])
def test_an_overflow_skips_the_step(scale: float, value: float) -> None:
    step = made(converted(), scale)
    state, (x, y) = step.init(), batch(0)
    after, metrics = step(state, (x * value, y))
    assert metrics.found_inf == 1
    assert_same((after.params, after.opt_state), (state.params, state.opt_state))


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does that
@pytest.mark.parametrize("config", [float8.Float8Config(), float8.Float8Config("row", True, emulate=True)])
@pytest.mark.parametrize(
    ("wrap", "options"),
    [(traced, {"max_norm": 1.0, "ema_decay": 0.9}), (traced, {"accumulate": 2}), (compiled, {"max_norm": 1.0})],
)
def test_every_way_to_run_a_step_is_the_eager_one(config: float8.Float8Config, wrap: Any, options: Any) -> None:
    assert_close(trained(converted(config), wrap, **options), trained(converted(config), **options), 1e-6)


@pytest.mark.compiled
def test_verify_compares_a_converted_model_with_torchs_loop() -> None:
    report = funcamp.verify(traced(made(converted(), 1.0)), [batch(number) for number in range(4)])
    assert report.ok, str(report)
