"""`scale`, `unscale` and `unscale_and_check` against torch.amp.GradScaler and its kernel, on every kind of leaf."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from funcamp import all_finite, init, scale, unscale, unscale_and_check
from tests.conftest import Transform
from tests.support.helpers import assert_same
from tests.support.oracle import float32, state_of


class Pair(NamedTuple):
    """A NamedTuple pytree."""

    left: Any
    right: Any


@dataclass
class Layer:
    """A dataclass pytree."""

    weight: Any
    bias: Any


torch.utils._pytree.register_dataclass(Layer)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


def kernel(scale_value: float, grads: list[Tensor]) -> tuple[list[Tensor], float]:
    """torch's own check and unscale, in place on copies."""
    inv_scale = torch.tensor(scale_value, dtype=torch.float32).double().reciprocal().float()
    found_inf = torch.zeros(())
    grads = [grad.clone() for grad in grads]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    return grads, found_inf.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale_value", [1.0, 2.0**16, 3.7e4, 0.3, 2.0**-100, 2.0**100])
def test_unscale_and_check_finite_gradients_equal_the_kernel(scale_value: float, dtype: torch.dtype) -> None:
    grads = [torch.randn(37, dtype=dtype) * scale_value, torch.randn(3, 5, dtype=dtype) * scale_value]
    expected, found_inf = kernel(scale_value, grads)
    assert found_inf == 0.0
    actual, state = unscale_and_check(state_of(scale_value), grads)
    assert_same(actual, expected)
    assert_same(state, state_of(scale_value))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_unscale_narrow_gradients_come_back_as_float32(dtype: torch.dtype) -> None:
    grads = (torch.randn(64) * 1000).to(dtype)
    expected, _ = kernel(2.0**16, [grads.float()])
    assert_same(unscale(state_of(2.0**16), grads), expected[0])
    # In float16 itself most of these quotients would be subnormal or zero.
    assert unscale(state_of(2.0**16), grads).count_nonzero() == grads.count_nonzero()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unscale_and_check_non_finite_anywhere_sets_the_flag(dtype: torch.dtype, bad: float) -> None:
    for position in range(5):
        grad = torch.ones(5, dtype=dtype)
        grad[position] = bad
        _, state = unscale_and_check(state_of(4.0), {"clean": torch.ones(2), "bad": grad})
        assert_same(state, state_of(4.0, found_inf=1.0))
        if dtype.is_complex:
            imaginary = torch.complex(torch.ones(5), torch.ones(5)).to(dtype)
            imaginary[position] = torch.tensor(complex(1.0, bad))
            assert unscale_and_check(state_of(4.0), imaginary)[1].found_inf == 1.0


@pytest.mark.parametrize("scale_value", [0.0, 2.0**-149, 2.0**-130, 2.0**-128, 0.25])
def test_unscale_and_check_overflow_by_unscaling_sets_the_flag(scale_value: float) -> None:
    grad = torch.tensor([1.0, torch.finfo(torch.float32).max])
    assert kernel(scale_value, [grad])[1] == 0.0, "torch now sees this overflow: say so in the docstring"
    unscaled, state = unscale_and_check(state_of(scale_value), grad)
    assert not torch.isfinite(unscaled).all()
    assert_same(state, state_of(scale_value, found_inf=1.0))


def test_unscale_and_check_zero_gradient_at_scale_zero_sets_the_flag() -> None:
    _, state = unscale_and_check(state_of(0.0), torch.zeros(3))
    assert state.found_inf == 1.0


@pytest.mark.parametrize("flag", [1.0, 2.0, math.nan])
def test_unscale_and_check_keeps_an_earlier_flag_as_one(flag: float) -> None:
    assert_same(unscale_and_check(state_of(4.0, found_inf=flag), torch.ones(2))[1], state_of(4.0, found_inf=1.0))
    assert_same(unscale_and_check(state_of(4.0, found_inf=flag), {})[1], state_of(4.0, found_inf=1.0))


def test_unscale_and_check_unscales_with_the_scale_of_the_loss_on_a_growing_step() -> None:
    # One library updates first and halves its gradients on every step that grows the scale.
    grads, state = unscale_and_check(state_of(8.0, tracker=1999), torch.tensor([8.0]))
    assert grads.item() == 1.0
    assert state.scale == 8.0


def tree() -> dict[str, Any]:
    return {
        "list": [torch.randn(3), None, (torch.randn(2, 2).half(),)],
        "pair": Pair(torch.randn(2).bfloat16(), OrderedDict(a=torch.randn(1).double())),
        "layer": Layer(torch.randn(2, 3), None),
        "empty": torch.zeros(0, 4),
        "scalar": torch.randn(()),
    }


def test_unscale_and_check_nested_tree_keeps_its_structure() -> None:
    given = tree()
    actual, state = unscale_and_check(state_of(8.0), given)
    assert_same(state, state_of(8.0))
    expected = torch.utils._pytree.tree_map_only(
        Tensor, lambda leaf: (leaf if leaf.dtype == torch.float64 else leaf.float()) * 0.125, given
    )
    assert_same(actual, expected)


@pytest.mark.compiled
def test_unscale_and_check_every_transform_agrees(transform: Transform) -> None:
    grads: dict[str, Any] = {
        "w": torch.randn(3, 4) * 8,
        "h": [torch.randn(5).half(), torch.randn(2).double()],
        "s": torch.randn(()),
    }
    run = transform(lambda state, grads: unscale_and_check(state, grads))
    assert_same(run(state_of(3.7e4), grads), unscale_and_check(state_of(3.7e4), grads))
    grads["h"][0][2] = math.inf
    assert_same(run(state_of(3.7e4), grads), unscale_and_check(state_of(3.7e4), grads))
    assert run(state_of(3.7e4), grads)[1].found_inf == 1.0


@pytest.mark.parametrize("empty", [{}, [], (), None, {"a": None}, [torch.zeros(0)]], ids=str)
def test_empty_tree_is_finite(empty: Any) -> None:
    unscaled, state = unscale_and_check(state_of(4.0), empty, reduce=lambda flag: flag)  # another rank may have some
    assert_same(unscaled, empty)
    assert_same(state, state_of(4.0))
    assert_same(all_finite(empty), torch.tensor(True))
    if empty not in (None, {"a": None}):
        assert_same(unscale_and_check(state_of(4.0), empty), (empty, state_of(4.0)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("coalesced", [True, False])
def test_unscale_and_check_sparse_equals_the_dense_sum(dtype: torch.dtype, coalesced: bool) -> None:
    indices = torch.tensor([[0, 2, 3]]) if coalesced else torch.tensor([[2, 0, 2]])
    values = torch.tensor([[1.0, -2.0], [3.0, 4.0], [5.0, 6.0]]).to(dtype)
    grad = torch.sparse_coo_tensor(indices, values, (4, 2), check_invariants=True, is_coalesced=coalesced)
    unscaled, state = unscale_and_check(state_of(8.0), {"table": grad})
    assert unscaled["table"].is_coalesced()
    wide = dtype if dtype.itemsize >= 4 else torch.float32
    assert_same(unscaled["table"].to_dense(), grad.to(wide).to_dense() / 8)
    assert_same(state, state_of(8.0))


def test_unscale_and_check_sparse_float16_duplicates_are_summed_in_float32() -> None:
    indices, values = torch.tensor([[1, 1]]), torch.tensor([6e4, 6e4]).half()
    grad = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True)
    unscaled, state = unscale_and_check(state_of(8.0), grad)
    assert_same(unscaled.to_dense(), torch.tensor([0.0, float(values.float().sum()) / 8, 0.0]))
    assert state.found_inf == 0.0
    assert all_finite(grad)


@pytest.mark.parametrize("bad", [[math.inf, -math.inf], [math.nan, 1.0], [3e38, 3e38]])
def test_unscale_and_check_sparse_non_finite_sum_sets_the_flag(bad: list[float]) -> None:
    grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor(bad), (3,), check_invariants=True)
    assert unscale_and_check(state_of(1.0), grad)[1].found_inf == 1.0
    assert not all_finite(grad)


def test_reduce_sees_one_flag_for_any_number_of_gradients() -> None:
    seen: list[Tensor] = []

    def reduce(flag: Tensor) -> Tensor:
        seen.append(flag)
        return flag + 1  # as if another rank had found one

    _, state = unscale_and_check(state_of(4.0), [torch.ones(2), torch.ones(3)], reduce=reduce)
    assert [flag.item() for flag in seen] == [0.0]
    assert_same(state, state_of(4.0, found_inf=1.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0)])
def test_scale_equals_grad_scaler(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=3.7e4)
    output = torch.randn(shape, dtype=dtype)
    assert_same(scale(state_of(3.7e4), output), scaler.scale(output))
    assert_same(
        scale(state_of(3.7e4), [output, {"b": output, "n": None}]), [a := scaler.scale(output), {"b": a, "n": None}]
    )


@pytest.mark.compiled
def test_scale_every_transform_agrees(transform: Transform) -> None:
    outputs = (torch.randn(()).half(), [torch.randn(3).half(), torch.randn(2, 2)])
    assert_same(transform(scale)(state_of(3.7e4), outputs), scale(state_of(3.7e4), outputs))


def test_unscale_is_differentiable() -> None:
    penalty = torch.func.grad(lambda x: unscale(state_of(8.0), {"g": x**3})["g"].sum())
    assert penalty(torch.tensor([2.0])).item() == 12.0 / 8.0


def test_inverse_scale_is_rounded_once_from_float64() -> None:
    value = 3.7e4 / 7
    unscaled = unscale(state_of(value), torch.ones(()))
    assert unscaled.item() == float32(1.0 / float32(value))


def test_all_finite_integers_are_finite_and_complex_parts_both_count() -> None:
    assert all_finite([torch.tensor([1, 2]), torch.tensor(True)])
    assert not all_finite(torch.tensor(complex(0.0, math.inf)))
    assert all_finite(torch.ones(2).to(torch.float8_e5m2))
    assert not all_finite(torch.tensor([1.0, math.inf]).to(torch.float8_e5m2))


def test_init_is_on_the_device_asked_for() -> None:
    assert {leaf.device.type for leaf in init(device="meta")} == {"meta"}
