"""Matrix products as kernels of a compiled program, against torch's own, with what may become part of their loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import jit
from tests.support.generated import code_of, written
from tests.support.helpers import assert_close

Case = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def in_between(flat: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The last operation after a product has its shape, and one before it has not."""
    flat = torch.tanh(flat)
    return flat, flat.view_as(g) * g + 1


#: Functions of an input (m, k), a weight (n, k), a bias (n,) and a gradient (m, n).
CASES: dict[str, Case] = {
    "alone": lambda x, w, b, g: x @ w.t(),
    "with a function": lambda x, w, b, g: torch.tanh(x @ w.t() + b),
    "read by two": lambda x, w, b, g: (torch.tanh(x @ w.t() + b), (x @ w.t() + b) * 2),
    "of a result": lambda x, w, b, g: torch.relu(x @ w.t() + b) @ g.t(),
    "gradient of the input": lambda x, w, b, g: (g @ w) * (1 - x * x),
    "gradient of the weight": lambda x, w, b, g: g.t() @ x,
    "of a weight inside a tensor": lambda x, w, b, g: x @ torch.cat([x.new_ones(5), w.flatten()])[5:].view_as(w).t(),
    "of rows inside a tensor": lambda x, w, b, g: (x[1:] @ w[1:].t(), g[:, 1:].t() @ x),
    "summed": lambda x, w, b, g: ((x @ w.t()).sum(0), (x @ w.t()).sum(1)),
    "of another shape in between": lambda x, w, b, g: in_between((x @ w.t()).view(-1), g),
}
SHAPES = [(64, 17, 48), (3, 300, 1), (1, 7, 300), (100, 40, 33)]


def step(total: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Any]]:
    return total + 1, {name: case(*batch) for name, case in CASES.items()}


def batch_of(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(size, generator=generator).to(dtype) for size in ((m, k), (n, k), (n,), (m, n)))


@pytest.mark.thorough(keep=1)
@pytest.mark.inductor
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_products_and_what_follows_are_torch_s(m: int, k: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("funcamp._cpu.product_kernel.SHARED", 1000)  # shares for threads, of uneven sizes
    monkeypatch.setattr("funcamp._cpu.product_kernel.BLOCK", 16)  # several blocks
    batch = batch_of(m, k, n)
    run = jit(step)
    with torch._inductor.config.patch({"cpp.threads": 3, "force_disable_caches": True}):
        assert "brgemm" in code_of(run, torch.zeros(()), batch)
    _, results = run(torch.zeros(()), batch)
    assert_close(results, step(torch.zeros(()), batch)[1], 2e-5)


@pytest.mark.inductor
def test_bfloat16_products_are_rounded_at_most_as_often_as_torch_s() -> None:
    batch = batch_of(64, 48, 32, torch.bfloat16)
    _, results = jit(step)(torch.zeros(()), batch)
    exact = step(torch.zeros(()), tuple(one.double() for one in batch))[1]
    eager = step(torch.zeros(()), batch)[1]
    for name, result in results.items():
        for got, torch_s, wanted in zip(*map(torch.utils._pytree.tree_leaves, (result, eager[name], exact[name]))):
            assert got.dtype == torch_s.dtype
            error, allowed = ((one.double() - wanted).abs().max() for one in (got, torch_s))
            assert error <= 1.5 * allowed, name


@pytest.mark.inductor
def test_a_float16_product_overflows_where_torch_s_does() -> None:
    batch = tuple(one * 300 for one in batch_of(8, 16, 8, torch.float16))

    def product(total: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return total + 1, (batch[0] @ batch[1].t()).float() / 1000

    _, result = jit(product)(torch.zeros(()), batch)
    assert result.isinf().any()
    assert torch.equal(result.isinf(), product(torch.zeros(()), batch)[1].isinf())


@pytest.mark.inductor
def test_large_products_of_few_rows_and_in_bfloat16_are_torch_s() -> None:
    batch = *batch_of(8, 512, 512)[:2], *batch_of(128, 128, 128, torch.bfloat16)[:2]
    run = jit(lambda total, batch: (total + 1, (batch[0] @ batch[1].t(), batch[2] @ batch[3].t())))
    assert "brgemm" not in written(run, torch.zeros(()), batch)
