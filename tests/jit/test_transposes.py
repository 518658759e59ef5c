"""Compiled programs that transpose 16-bit tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from funcamp import jit


@pytest.mark.inductor
def test_two_layers_of_attention_with_dropout() -> None:
    """Two kernels transpose keys. GCC 12 shares a function between them, wrong for CPUs of its time: it gave NaN."""
    weight = torch.eye(64, dtype=torch.bfloat16)

    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        for _ in "12":
            heads = x.view(2, 64, 4, 16).transpose(1, 2)
            attended = scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
            x = attended.transpose(1, 2).reshape(2, 64, 64) @ weight
        return state, x

    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    results = []
    for run in (step, jit(step, exact=True)):  # exact: the same dropout
        torch.manual_seed(0)
        results.append(run(torch.zeros(()), x)[1])
    torch.testing.assert_close(results[1], results[0])
