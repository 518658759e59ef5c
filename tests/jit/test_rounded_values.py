"""In 16 bits all operations of a compiled program read one value of a tensor, the rounded one, as in eager code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from funcamp import jit
from tests.support.helpers import assert_same
from tests.support.scaled import scaled

pytestmark = [pytest.mark.inductor, pytest.mark.usefixtures("one_thread")]

ROWS, CHANNELS, WIDTH = 4, 6, 16


def _within_the_largest(x: Tensor) -> Tensor:
    ratio = x / x.abs().amax(1, keepdim=True)
    return ratio.where(ratio.abs() <= 1, torch.nan)


#: Functions of shape (rows, WIDTH) that compare elements. What they return differs much from eager code, or is NaN, if
#: two of their operations read different values of the input.
READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.amax(1),
    "largest norm": lambda x: torch.linalg.vector_norm(x, torch.inf, dim=1),
    "ties": lambda x: (x == x.amax(1, keepdim=True)) * x,
    "within the largest": _within_the_largest,
}


def _convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return what a linear layer does, by a convolution over the rows."""
    return F.conv1d(x.t()[None], weight.t()[:, :, None], bias)[0].t()


#: Of shapes (ROWS, CHANNELS), (CHANNELS, WIDTH), (WIDTH,) to (ROWS, WIDTH).
LAYERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda x, weight, bias: F.linear(x, weight.t(), bias),
    "linear, gelu": lambda x, weight, bias: F.gelu(F.linear(x, weight.t(), bias)),
    "convolution": _convolution,
    "convolution, silu": lambda *args: F.silu(_convolution(*args)),
}


def tensors() -> list[Tensor]:
    """Return an input, a weight and a bias: sums of their products are exact in float32, in any order."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(ROWS, CHANNELS), (CHANNELS, WIDTH), (WIDTH,)]
    return [torch.randint(-127, 128, size, generator=generator) / 64 for size in sizes]


def gradients(state: list[Tensor], dtypes: list[torch.dtype]) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Return the state, and for each layer and reader the result and the derivatives with respect to the state."""
    found: dict[str, list[Tensor]] = {}
    for (layer, compute), dtype in zip(LAYERS.items(), dtypes):
        for number, (reader, read) in enumerate(READERS.items()):
            # Of other numbers for each, so that a layer is computed for one reader only.
            arguments = [value.roll(number).detach().to(dtype).requires_grad_() for value in state]
            result = read(compute(*arguments))
            found[f"{layer}, {reader}"] = [result.detach(), *torch.autograd.grad(result.float().sum(), arguments)]
    return [value + 0 for value in state], found


@pytest.mark.thorough
@pytest.mark.parametrize(("of_linear", "of_convolutions"), [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_what_compares_elements_finds_the_eager_ones(of_linear: str, of_convolutions: str) -> None:
    dtypes = [getattr(torch, name) for name in (of_linear, of_linear, of_convolutions, of_convolutions)]

    def step(state: list[Tensor], _: Tensor) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        return gradients(state, dtypes)

    expected = step(tensors(), torch.zeros(()))[1]
    _, found = jit(step)(tensors(), torch.zeros(()))
    for name, values in expected.items():
        for got, wanted in zip(found[name], values):
            limit = 4 * torch.finfo(wanted.dtype).eps * wanted.abs().max().item()
            torch.testing.assert_close(got, wanted, rtol=0, atol=limit, msg=f"{name}: {got} instead of {wanted}")


def test_a_stored_value_is_read_rounded_in_its_own_loop() -> None:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        low = (x * 3).bfloat16()
        return state + 1, [low, low + x]

    x = torch.full((64,), 1 + 2.0**-12)
    _, found = jit(step)(torch.zeros(()), x)
    assert_same(found, step(torch.zeros(()), x)[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_number_in_a_tensor_is_rounded_where_eager_code_rounds_it(dtype: torch.dtype) -> None:
    assert_same(*scaled(dtype, "cpu"))


def test_no_probability_of_a_category_is_above_one() -> None:
    def step(state: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        return state + 1, torch.distributions.Categorical(logits=logits / 0.7, validate_args=False).logits

    logits = (torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) * 30).bfloat16()
    _, log_probabilities = jit(step)(torch.zeros(()), logits)
    assert log_probabilities.max() <= 0
