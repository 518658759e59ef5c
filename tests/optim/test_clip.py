"""`clip_grad_norm` is `torch.nn.utils.clip_grad_norm_` on values, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from funcamp import clip_grad_norm
from tests.conftest import Transform
from tests.support.helpers import assert_same, clone


def reference(grads: list[Tensor], max_norm: float) -> tuple[list[Tensor], Tensor]:
    leaves = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for leaf, grad in zip(leaves, grads):
        leaf.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(leaves, max_norm)
    return [leaf.grad for leaf in leaves if leaf.grad is not None], norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("factor", [0.0, 1e-8, 1e-3, 1.0, 1e6, 1e20])
@pytest.mark.parametrize("max_norm", [1e-7, 0.5, 1e3])
def test_clip_grad_norm_equals_torch(max_norm: float, factor: float, dtype: torch.dtype) -> None:
    grads = [torch.randn(7, 3, dtype=dtype) * factor, torch.randn(5, dtype=dtype) * factor, torch.zeros(0, dtype=dtype)]
    expected, norm = reference(grads, max_norm)
    before = clone(grads)
    actual, actual_norm = clip_grad_norm(grads, max_norm)
    assert_same((actual, actual_norm), (expected, norm))
    assert_same(grads, before)


@pytest.mark.compiled
def test_clip_grad_norm_every_transform_agrees(transform: Transform) -> None:
    grads = {"w": torch.tensor([3.0, 0.0]), "b": [torch.tensor([[4.0]])]}
    clipped, norm = transform(lambda grads: clip_grad_norm(grads, 2.5))(grads)
    torch.testing.assert_close(clipped, {"w": torch.tensor([1.5, 0.0]), "b": [torch.tensor([[2.0]])]})
    torch.testing.assert_close(norm, torch.tensor(5.0))


def test_clip_grad_norm_tensor_bound_none_leaf_and_empty_tree() -> None:
    clipped, _ = clip_grad_norm([torch.tensor([3.0, 4.0]), None], torch.tensor(1.0))
    assert_same(clipped, clip_grad_norm([torch.tensor([3.0, 4.0]), None], 1.0)[0])
    assert_same(clip_grad_norm({}, 1.0), ({}, torch.tensor(0.0)))


def test_clip_grad_norm_of_float16_is_taken_in_float32() -> None:
    _, norm = clip_grad_norm(torch.full((4,), 6e4).half(), 1.0)
    assert norm.item() == pytest.approx(2 * 6e4, rel=1e-3)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_clip_grad_norm_of_a_gradient_that_is_not_finite_is_not_finite(bad: float) -> None:
    clipped, norm = clip_grad_norm([torch.ones(2), torch.tensor([bad])], 1.0)
    assert not torch.isfinite(norm)
    assert not torch.isfinite(clipped[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.complex64])
@pytest.mark.parametrize("beside", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [0.3, torch.tensor(0.3, dtype=torch.float64)], ids=["number", "float64"])
def test_clip_keeps_the_dtype_of_a_gradient_without_dimensions(
    max_norm: float | Tensor, beside: torch.dtype | None, dtype: torch.dtype
) -> None:
    """Its product with the factor would have the wider dtype of both; torch multiplies in place."""
    grads = [torch.tensor(2.37, dtype=dtype), torch.tensor([1.23, -4.56], dtype=dtype)]
    if beside is not None:
        grads.append(torch.tensor([0.7], dtype=beside))
    clipped, norm = clip_grad_norm(grads, max_norm)
    assert_same(clipped, [grad.clone().mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0)) for grad in grads])
    if dtype.itemsize >= 4 and not isinstance(max_norm, Tensor):  # torch's norm of narrower ones is as narrow
        assert_same((clipped, norm), reference(grads, max_norm))
