"""`clip_grad_norm` is `torch.nn.utils.clip_grad_norm_` on values, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from funcamp import chain, clip_by_norm, clip_grad_norm, ravel, stateless
from tests.conftest import Transform
from tests.support.helpers import assert_same, clone


def reference(grads: list[Tensor], max_norm: float) -> tuple[list[Tensor], Tensor]:
    leaves = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for leaf, grad in zip(leaves, grads):
        leaf.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(leaves, max_norm)
    return [leaf.grad for leaf in leaves if leaf.grad is not None], norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("factor", [0.0, 1e-3, 1.0, 1e20])
@pytest.mark.parametrize("max_norm", [1e-7, 0.5, 1e3])
def test_clip_grad_norm_equals_torch(max_norm: float, factor: float, dtype: torch.dtype) -> None:
    grads = [torch.randn(shape, dtype=dtype) * factor for shape in ((7, 3), (5,), (), (0,))]
    expected, norm = reference(grads, max_norm)
    before = clone(grads)
    assert_same(clip_grad_norm(grads, max_norm), (expected, norm))
    assert_same(grads, before)


@pytest.mark.compiled
def test_clip_grad_norm_every_transform_agrees(transform: Transform) -> None:
    grads = {"w": torch.tensor([3.0, 0.0]), "b": [torch.tensor([[4.0]])]}
    clipped, norm = transform(lambda grads: clip_grad_norm(grads, 2.5))(grads)
    torch.testing.assert_close(clipped, {"w": torch.tensor([1.5, 0.0]), "b": [torch.tensor([[2.0]])]})
    torch.testing.assert_close(norm, torch.tensor(5.0))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_clip_grad_norm_of_a_gradient_that_is_not_finite_is_not_finite(bad: float) -> None:
    clipped, norm = clip_grad_norm([torch.ones(2), torch.tensor([bad])], 1.0)
    assert not torch.isfinite(norm)
    assert not torch.isfinite(clipped[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_clip_grad_norm_keeps_16_bits_and_takes_the_norm_in_float32(dtype: torch.dtype) -> None:
    """The product of a gradient without dimensions with the factor would be wider; torch multiplies in place."""
    grads = [torch.tensor(6e4, dtype=dtype), torch.full((3,), 6e4, dtype=dtype), None]
    clipped, norm = clip_grad_norm(grads, torch.tensor(0.3, dtype=torch.float64))
    assert norm.item() == pytest.approx(2 * 6e4, rel=1e-2)
    factor = 0.3 / (norm + 1e-6)
    assert_same(clipped, [None if grad is None else grad.clone().mul_(factor) for grad in grads])
    assert_same(clip_grad_norm({}, 1.0), ({}, torch.tensor(0.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_padding_of_flat_storage_is_not_in_the_norm(dtype: torch.dtype) -> None:
    """A function of the groups, such as noise, writes into it."""
    shared = torch.zeros(3, 3, dtype=dtype)
    zeros = ravel({"w": shared, "tied": shared, "b": torch.zeros(3)})
    ones = _pytree.tree_map(lambda group: group + 1, zeros)
    clipped, norm = clip_grad_norm(ones, 1.0)
    torch.testing.assert_close(norm, torch.tensor(12**0.5))
    torch.testing.assert_close(clipped["b"], torch.full((3,), 12**-0.5))
    sgd = stateless(torch.optim.SGD, lr=1.0)
    by_part, _ = chain(clip_by_norm(1.0), sgd).update(zeros, ones, sgd.init(zeros))
    torch.testing.assert_close(by_part["w"], torch.full((3, 3), -(12**-0.5), dtype=dtype))
