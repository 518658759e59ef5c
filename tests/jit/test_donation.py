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
from tests.support.patterns import PATTERNS, state, step_of
from tests.support.steps import assert_as_eager


def like_first(leaf: Tensor, first: Tensor) -> Tensor:
    return torch.empty_like(first, memory_format=torch.preserve_format).copy_(leaf)


def assert_same_as_eager(step: Callable[[Any, Any], Any], start: Any, backend: str) -> None:
    def eager(state: Any, batch: Tensor) -> Any:
        new, metrics = step(state, batch)
        # In the strides of the first state, as the donated one stays; and no leaf a view of another.
        return torch.utils._pytree.tree_map(like_first, new, start), metrics

    assert_as_eager(eager, jit(step, backend=backend), start, torch.arange(3.0)[:, None].expand(3, 2))


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
    lambda a, b: a.clone(),
    lambda a, b: a.t(),
    lambda a, b: a.reshape(9).view(3, 3),
    lambda a, b: a[:1].expand(3, 3),
    lambda a, b: torch.where(a > b, a, b.t()),
    lambda a, b: a * 2,
]
PLACES = st.integers(0, LEAVES - 1)


@pytest.mark.thorough
@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), PLACES, PLACES), min_size=LEAVES, max_size=LEAVES))
def test_random_aliasing_is_the_eager_step(program: list[tuple[Any, int, int]]) -> None:
    def step(state: list[Tensor], batch: Tensor) -> Any:
        new = [operation(state[a], state[b]) for operation, a, b in program]
        return new, {"before": state[0], "after": new[1][0], "batch": batch.sum()}

    assert_same_as_eager(step, [torch.randn(3, 3) for _ in range(LEAVES)], "aot_eager")


ROWS, TURNED = torch.tensor([0, 2]), torch.tensor([1, 2, 3, 0])
REPLACED: list[Callable[[Tensor], Tensor]] = [
    lambda leaf: leaf.slice_scatter(torch.ones(2, 4), 0, 1, 3),
    lambda leaf: leaf.view(2, 2, 4).index_put((ROWS // 2,), torch.ones(2, 4)).view(4, 4),
    lambda leaf: leaf.index_put((TURNED,), leaf),
    lambda leaf: leaf.index_put((leaf[:2, 0].long().abs() % 4,), torch.ones(2, 4)),
    lambda leaf: leaf.index_put((ROWS,), torch.ones(2, 4)).index_copy(0, TURNED[:3], leaf[:3]),
]


@pytest.mark.thorough
@pytest.mark.inductor
def test_a_leaf_with_replaced_rows_is_apart_from_the_leaf() -> None:
    """Such a result is a metric, another leaf, or the leaf itself."""

    def step(states: list[list[Tensor]], batch: Tensor) -> Any:
        found = [replaced(state[0]) for replaced, state in zip(REPLACED, states)]
        own = [replaced(state[2]) for replaced, state in zip(REPLACED, states)]
        return [[state[0] + 100, new, leaf] for state, new, leaf in zip(states, found, own)], [
            (new.clone(), leaf.clone(), state[1].clone()) for state, new, leaf in zip(states, found, own)
        ]

    assert_same_as_eager(step, [[torch.randn(4, 4) for _ in range(3)] for _ in REPLACED], "inductor")


@pytest.mark.inductor
def test_rows_of_a_leaf_are_replaced_in_its_memory() -> None:
    def queue(state: Tensor, rows: Tensor) -> Any:
        return state.index_put((torch.tensor([0, 2]),), rows), rows.sum()

    code = written(jit(queue), torch.zeros(512, 4), torch.ones(2, 4))
    assert "2048L" not in code, "no loop over all elements"
