"""A donated step leaves in the old storage, bit for bit, what the undonated eager step returns: any aliasing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from funcamp import jit
from tests.support.generated import written
from tests.support.helpers import assert_same
from tests.support.patterns import PATTERNS, state, step_of
from tests.support.steps import assert_as_eager


def like_first(leaf: Tensor, first: Tensor) -> Tensor:
    return torch.empty_like(first, memory_format=torch.preserve_format).copy_(leaf)


def assert_same_as_eager(step: Callable[[Any, Any], Any], start: Any, backend: str, steps: int = 3) -> None:
    def eager(state: Any, batch: Tensor) -> Any:
        new, metrics = step(state, batch)
        # In the strides of the first state, as the donated one stays; and no leaf a view of another.
        return torch.utils._pytree.tree_map(like_first, new, start), metrics

    assert_as_eager(eager, jit(step, backend=backend), start, [torch.full((2,), float(n)) for n in range(steps)])


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_is_the_eager_step(name: str) -> None:
    assert_same_as_eager(step_of(PATTERNS[name]), state(), "aot_eager")


def side_by_side(steps: list[Callable[[Any, Any], Any]]) -> Callable[[Any, Any], Any]:
    """Steps with a state each, as one program: compiling costs by the program."""

    def step(states: list[Any], batch: Any) -> Any:
        new, metrics = zip(*(step(state, batch) for step, state in zip(steps, states)))
        return list(new), list(metrics)

    return step


@pytest.mark.thorough(keep=1)
@pytest.mark.inductor
@pytest.mark.parametrize("first", range(4))
def test_patterns_side_by_side_are_the_eager_step_by_inductor(first: int) -> None:
    patterns = [step_of(pattern) for pattern in list(PATTERNS.values())[first::4]]
    assert_same_as_eager(side_by_side(patterns), [state() for _ in patterns], "inductor")


LEAVES = 5
# Exact in any order of evaluation: no sums of several products.
OPERATIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a,
    lambda a, b: a,
    lambda a, b: a.clone(),
    lambda a, b: a.detach(),
    lambda a, b: a.t(),
    lambda a, b: a.reshape(9).view(3, 3),
    lambda a, b: a[:1].expand(3, 3),
    lambda a, b: a.flip(0),
    lambda a, b: torch.maximum(a, b),
    lambda a, b: torch.where(a > b, a, b.t()),
    lambda a, b: -a,
    lambda a, b: a * 2,
]
PROGRAM = st.lists(
    st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, LEAVES - 1), st.integers(0, LEAVES - 1)),
    min_size=LEAVES,
    max_size=LEAVES,
)


def random_step(program: list[tuple[int, int, int]]) -> Callable[[Any, Any], Any]:
    def step(state: list[Tensor], batch: Tensor) -> Any:
        new = [OPERATIONS[op](state[a], state[b]) for op, a, b in program]
        return new, {"before": state[0], "after": new[1][0], "batch": batch.sum()}

    return step


@pytest.mark.thorough
@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PROGRAM)
def test_random_aliasing_is_the_eager_step(program: list[tuple[int, int, int]]) -> None:
    assert_same_as_eager(random_step(program), [torch.randn(3, 3) for _ in range(LEAVES)], "aot_eager")


def double(state: Any, batch: Tensor) -> Any:
    return {name: leaf * (2 + i) + batch.sum() for i, (name, leaf) in enumerate(state.items())}, {"a": state["a"] + 0}


def test_leaves_that_share_storage_are_taken_apart() -> None:
    one = torch.arange(8.0)
    views = {"a": one, "b": one, "c": one[2:5], "d": one.view(2, 4).t(), "windows": one.unfold(0, 3, 1)}
    views |= {"expanded": torch.ones(3).expand(2, 3), "weight": torch.nn.Parameter(torch.ones(2))}
    before = one.clone()
    expected, _ = double(views, torch.ones(1))
    actual, _ = jit(double, backend="aot_eager")(views, torch.ones(1))
    assert_same(actual, expected)
    assert not torch.equal(one, before)  # the first leaf is consumed


def test_batches_with_lazy_bits_are_settled() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return {"x": state["x"] + batch.sum()}, None

    wave = torch.tensor([1.0 + 2.0j])
    assert_as_eager(step, jit(step, backend="eager"), {"x": torch.zeros(())}, [wave.imag, wave.conj().imag, wave.imag])


ROWS, TURNED = torch.tensor([0, 2]), torch.tensor([1, 2, 3, 0])
REPLACED: dict[str, Callable[[Tensor], Tensor]] = {
    "index_put": lambda leaf: leaf.index_put((ROWS,), torch.ones(2, 4)),
    "slice_scatter": lambda leaf: leaf.slice_scatter(torch.ones(2, 4), 0, 1, 3),
    "diagonal_scatter": lambda leaf: leaf.diagonal_scatter(torch.ones(4)),
    "view": lambda leaf: leaf.view(2, 2, 4).index_put((ROWS // 2,), torch.ones(2, 4)).view(4, 4),
    "after a cast": lambda leaf: leaf.double().float().index_put((ROWS,), torch.ones(2, 4)),
    "by itself": lambda leaf: leaf.index_put((TURNED,), leaf),
    "where itself says": lambda leaf: leaf.index_put((leaf[:2, 0].long().abs() % 4,), torch.ones(2, 4)),
    "twice by itself": lambda leaf: leaf.index_put((ROWS,), torch.ones(2, 4)).index_copy(0, TURNED[:3], leaf[:3]),
}


def replacing(replaced: Callable[[Tensor], Tensor]) -> list[Callable[[Any, Any], Any]]:
    """Steps that use a leaf with some rows replaced as a metric, as another leaf and as the leaf itself."""

    def metric(state: Tensor, batch: Tensor) -> Any:
        return state + 100, replaced(state)

    def other_leaf(state: tuple[Tensor, Tensor], batch: Tensor) -> Any:
        return (state[0] + 100, replaced(state[0])), state[1].clone()

    def leaf_and_metric(state: Tensor, batch: Tensor) -> Any:
        new = replaced(state)
        return new, new

    return [metric, other_leaf, leaf_and_metric]


@pytest.mark.thorough
@pytest.mark.inductor
def test_a_leaf_with_replaced_rows_is_apart_from_the_leaf() -> None:
    steps = [step for replaced in REPLACED.values() for step in replacing(replaced)]
    start = [
        (torch.randn(4, 4), torch.randn(4, 4)) if "other" in step.__name__ else torch.randn(4, 4) for step in steps
    ]
    assert_same_as_eager(side_by_side(steps), start, "inductor")


@pytest.mark.inductor
def test_rows_of_a_leaf_are_replaced_in_its_memory() -> None:
    def queue(state: Tensor, rows: Tensor) -> Any:
        return state.index_put((torch.tensor([0, 2]),), rows), rows.sum()

    code = written(jit(queue), torch.zeros(512, 4), torch.ones(2, 4))
    assert "2048L" not in code, "no loop over all elements"
