"""A step of a small model, and the comparison of two forms of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from funcamp import jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_close, clone
from tests.support.models import Task

SGD = stateless(torch.optim.SGD, lr=0.1)


def build(task: Task, optimizer: object = SGD, *, keep_buffers: bool = False, **options: Any) -> Any:
    """A step of a task."""
    return make_train_step(module_loss(task.model, task.criterion, keep_buffers=keep_buffers), optimizer, **options)


def eager(step: object) -> Any:
    """A step that is called as it is."""
    return step


def traced(step: Any) -> Any:
    """A step that is traced and donates its state, whose operations run one by one: nothing is compiled."""
    return jit(step, backend="eager")


def compiled(function: Any) -> Any:
    """A function that torch.compile takes as one graph, of which no code is generated."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")


#: Runs a test with a step as it is, and traced.
eager_and_traced = pytest.mark.parametrize(
    "wrap", [pytest.param(eager, id="eager"), pytest.param(traced, id="jit", marks=pytest.mark.compiled)]
)


def train(step: Any, state: Any, task: Task, numbers: Iterable[int]) -> Any:
    """The state after steps on these batches of a task."""
    for number in numbers:
        state, _ = step(state, task.batch(number))
    return state


def assert_as_eager(
    step: Callable[[Any, Any], Any],
    run: Callable[[Any, Any], Any],
    state: Any,
    batches: Iterable[Any],
    relative: float = 0.0,
) -> list[Any]:
    """Compare what two forms of a step return for each batch; return the metrics of the second.

    Both begin with a clone of the state, and draw the same random numbers. They are compared bit for bit, or within a
    fraction of each leaf's norm. In the end the metrics of all calls must still be what they were.
    """
    expected, found, rows = clone(state), clone(state), []
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        expected, expected_metrics = step(expected, batch)
        drawn = torch.get_rng_state()
        torch.manual_seed(number)
        found, metrics = run(found, batch)
        rows.append((metrics, clone(expected_metrics)))
        assert_close((found, metrics), (expected, expected_metrics), relative)
        assert relative or torch.equal(torch.get_rng_state(), drawn), "other counts of random numbers are drawn"
    for row in rows:
        assert_close(*row, relative)
    return [metrics for metrics, _ in rows]
