"""`scale`, `unscale` and `unscale_and_check` against torch.amp.GradScaler and its kernel, on every kind of leaf."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from funcamp import ScalerState, all_finite, scale, unscale, unscale_and_check
from tests.conftest import Transform
from tests.support.helpers import assert_same
from tests.support.oracle import state_of

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


def widened(leaf: Tensor) -> Tensor:
    return leaf.float() if leaf.dtype.itemsize == 2 else leaf


def kernel(scale_value: float, grads: list[Tensor]) -> tuple[list[Tensor], float]:
    """torch's own check and unscale, in place on copies."""
    inv_scale = torch.tensor(scale_value, dtype=torch.float32).double().reciprocal().float()
    found_inf = torch.zeros(())
    grads = [grad.clone() for grad in grads]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    return grads, found_inf.item()


@pytest.mark.parametrize("dtype", DTYPES[:4])
@pytest.mark.parametrize("scale_value", [1.0, 2.0**16, 3.7e4, 0.3, 2.0**-100, 2.0**100])
def test_finite_gradients_are_unscaled_as_by_the_kernel_in_float32_at_least(
    scale_value: float, dtype: torch.dtype
) -> None:
    size = min(scale_value, 1e4) if dtype.itemsize == 2 else scale_value
    grads = [(torch.randn(shape) * size).to(dtype) for shape in ((37,), (3, 5))]
    expected, found_inf = kernel(scale_value, [widened(grad) for grad in grads])
    assert found_inf == 0.0
    assert_same(unscale_and_check(state_of(scale_value), grads), (expected, state_of(scale_value)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_non_finite_value_anywhere_sets_the_flag(dtype: torch.dtype, bad: float) -> None:
    for position in range(5):
        for value in (bad, complex(1.0, bad))[: 1 + dtype.is_complex]:
            grad = torch.ones(5, dtype=dtype)
            grad[position] = torch.tensor(value, dtype=dtype)
            _, state = unscale_and_check(state_of(4.0), {"clean": torch.ones(2), "bad": grad})
            assert_same(state, state_of(4.0, found_inf=1.0))


@pytest.mark.parametrize("scale_value", [0.0, 2.0**-149, 2.0**-130, 2.0**-128, 0.25])
def test_overflow_by_unscaling_sets_the_flag(scale_value: float) -> None:
    grad = torch.tensor([1.0, torch.finfo(torch.float32).max])
    assert kernel(scale_value, [grad])[1] == 0.0, "torch now sees this overflow: say so in the docstring"
    unscaled, state = unscale_and_check(state_of(scale_value), grad)
    assert not torch.isfinite(unscaled).all()
    assert_same(state, state_of(scale_value, found_inf=1.0))


@pytest.mark.parametrize("flag", [1.0, 2.0, math.nan])
@pytest.mark.parametrize("grads", [torch.ones(2), {}])
def test_an_earlier_flag_stays_as_one(flag: float, grads: Any) -> None:
    assert_same(unscale_and_check(state_of(4.0, found_inf=flag), grads)[1], state_of(4.0, found_inf=1.0))


def test_a_nested_tree_keeps_its_structure() -> None:
    given = {
        "list": [torch.randn(3), None, (torch.randn(2, 2).half(),)],
        "ordered": OrderedDict(a=torch.randn(1).double(), b=torch.zeros(0, 4), c=torch.randn(())),
    }
    expected = torch.utils._pytree.tree_map_only(Tensor, lambda leaf: widened(leaf) * 0.125, given)
    assert_same(unscale_and_check(state_of(8.0), given), (expected, state_of(8.0)))


@pytest.mark.compiled
def test_scaling_and_unscaling_are_the_same_under_every_transform(transform: Transform) -> None:
    outputs = (torch.randn(()).half(), [torch.randn(3).half(), torch.randn(2, 2)])
    grads: dict[str, Any] = {
        "w": torch.randn(3, 4) * 8,
        "h": [torch.randn(5).half(), torch.randn(2).double()],
        "s": torch.randn(()),
    }

    def both_ways(state: ScalerState, outputs: Any, grads: Any) -> Any:
        return scale(state, outputs), unscale_and_check(state, grads)

    run = transform(both_ways)
    for value in (1.0, math.inf):
        grads["h"][0][2] = value
        found = run(state_of(3.7e4), outputs, grads)
        assert_same(found, both_ways(state_of(3.7e4), outputs, grads))
        assert found[1][1].found_inf == math.isinf(value)


@pytest.mark.parametrize("empty", [{}, [], (), None, {"a": None}, [torch.zeros(0)]], ids=str)
def test_empty_tree_is_finite(empty: Any) -> None:
    assert_same(unscale_and_check(state_of(4.0), empty, reduce=lambda flag: flag), (empty, state_of(4.0)))
    assert_same(all_finite(empty), torch.tensor(True))


def sparse(places: list[int], values: Any, shape: tuple[int, ...]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([places]), torch.as_tensor(values), shape, check_invariants=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("places", [[0, 2, 3], [2, 0, 2]])
def test_sparse_gradients_are_the_dense_sum_in_float32_at_least(dtype: torch.dtype, places: list[int]) -> None:
    values = torch.tensor([[6e4, -2.0], [3.0, 4.0], [6e4, 6.0]]).to(dtype)  # float16's maximum is 65504
    grad = sparse(places, values, (4, 2))
    unscaled, state = unscale_and_check(state_of(8.0), {"table": grad})
    assert unscaled["table"].is_coalesced()
    assert_same(unscaled["table"].to_dense(), grad.to(widened(values).dtype).to_dense() / 8)
    assert_same(state, state_of(8.0))
    assert all_finite(grad)


@pytest.mark.parametrize("bad", [[math.inf, -math.inf], [math.nan, 1.0], [3e38, 3e38]])
def test_a_sparse_sum_that_is_not_finite_sets_the_flag(bad: list[float]) -> None:
    grad = sparse([1, 1], bad, (3,))
    assert unscale_and_check(state_of(1.0), grad)[1].found_inf == 1.0
    assert not all_finite(grad)


def test_reduce_sees_one_flag_for_any_number_of_gradients() -> None:
    reduce = mock.Mock(side_effect=lambda flag: flag + 2)  # as if other ranks had found some
    _, state = unscale_and_check(state_of(4.0), [torch.ones(2), torch.ones(3)], reduce=reduce)
    reduce.assert_called_once_with(torch.tensor(0.0))
    assert_same(state, state_of(4.0, found_inf=1.0))


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_scale_equals_grad_scaler(dtype: torch.dtype) -> None:
    outputs = [torch.randn(shape, dtype=dtype) for shape in ((), (3,), (2, 0))]
    expected = torch.amp.GradScaler("cpu", init_scale=3.7e4).scale(outputs)
    assert_same(scale(state_of(3.7e4), {"a": outputs, "n": None}), {"a": expected, "n": None})


def test_unscale_is_differentiable() -> None:
    penalty = torch.func.grad(lambda x: unscale(state_of(8.0), {"g": x**3})["g"].sum())
    assert penalty(torch.tensor([2.0])).item() == 12.0 / 8.0


def test_all_finite_takes_integers_complex_numbers_and_float8() -> None:
    assert all_finite([torch.tensor([1, 2]), torch.tensor(True)])
    assert not all_finite(torch.tensor(complex(0.0, math.inf)))
    assert all_finite(torch.ones(2).to(torch.float8_e5m2))
    assert not all_finite(torch.tensor([1.0, math.inf]).to(torch.float8_e5m2))


@pytest.mark.parametrize("shape", [(), (4,)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_vmap_rounds_no_scale(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Beside a tensor with dimensions vmap casts a number to its dtype, in which 2^17 may be inf."""
    states, outputs = [state_of(8.0), state_of(2.0**17 + 1)], torch.full((2, *shape), 0.1, dtype=dtype)
    stacked = tree_map(lambda *leaves: torch.stack(leaves), *states)
    assert_same(torch.func.vmap(scale)(stacked, outputs), torch.stack([*map(scale, states, outputs)]))
