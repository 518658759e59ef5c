"""The claim: float8 scales are those of torchao itself, bit for bit; `make peers` installs them."""

from __future__ import annotations

import pytest
import torch

from funcamp import float8

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("power", [False, True])
def test_the_current_scale_is_torchaos(dtype: torch.dtype, power: bool) -> None:
    from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

    for seed in range(200):
        torch.manual_seed(seed)
        x = torch.randn(64) * 2.0 ** (seed % 80 - 40)
        scale = amax_to_scale(x.abs().max(), dtype, power)
        found = float8.quantize(x, dtype, power_of_two=power)
        assert torch.equal(found.scale, scale)
        expected = to_fp8_saturated(x * scale, dtype)
        assert torch.equal(found.values.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("emulate", [False, True])
def test_a_layer_and_its_gradients_are_torchaos_emulation(emulate: bool) -> None:
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    for seed in range(5):
        torch.manual_seed(seed)
        layer = torch.nn.Linear(64, 48, bias=False)
        x, g = torch.randn(32, 64, requires_grad=True), torch.randn(32, 48) * 1e-4
        theirs = Float8Linear.from_float(layer, config=Float8LinearConfig(emulate=True))
        expected = theirs(x)
        grads = torch.autograd.grad(expected, (x, theirs.weight), g)
        y = float8.scaled_mm(x, layer.weight, float8.Float8Config(emulate=emulate))
        # torchao divides by the scale where the kernel multiplies by its reciprocal: a last bit of each term.
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        for found, other in zip(torch.autograd.grad(y, (x, layer.weight), g), grads):
            torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())
