"""The claim: float8 scales are those of flax and torchao themselves, bit for bit; `make peers` installs them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from funcamp import float8

pytestmark = pytest.mark.peers


def test_scale_and_history_of_500_steps_are_flaxs() -> None:
    import jax
    import jax.numpy as jnp
    from flax.linen import fp8_ops

    def step(scale: Any, history: Any, x: Any) -> Any:
        scale = fp8_ops.compute_scale(
            jnp.max(history, axis=0), scale, fp8_ops.get_fp8_max(jnp.float8_e5m2, jnp.float32)
        )
        return scale, fp8_ops.compute_amax_history(x, history)

    compiled = jax.jit(step)
    rng, config = random.Random(3), float8.flax(7)
    scale, history = jnp.ones((1,), jnp.float32), jnp.zeros((7,), jnp.float32)
    state = float8.init(config, 1)
    for _ in range(500):
        amax = torch.tensor(rng.uniform(1, 2) * 2.0 ** rng.randrange(-30, 30)).item()
        scale, history = compiled(scale, history, jnp.array([0.5 * amax, -amax], jnp.float32))
        assert float(scale[0]) == state.scale[0, 2].double().reciprocal().float().item()
        state = float8.update(state, torch.tensor([[0.0, 0.0, amax]]), config)
        assert sorted(float(one) for one in history) == sorted(state.history[:, 0, 2].tolist())


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
        y = float8.scaled_mm(x, layer.weight, float8.torchao(emulate=emulate))
        # torchao divides by the scale where the kernel multiplies by its reciprocal: a last bit of each term.
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        for found, other in zip(torch.autograd.grad(y, (x, layer.weight), g), grads):
            torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())
