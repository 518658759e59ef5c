"""What a function of the user's counts is refused by the place that it is found in, wherever the function is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import funcamp
from funcamp import jit, make_train_step, stateless

SGD = stateless(torch.optim.SGD, lr=0.5)


def weighted(params: Any, batch: Tensor) -> Tensor:
    loss: Tensor = (params["w"] * batch).sum()
    return loss


def loss() -> Any:
    count = [0]

    def loss(params: Any, batch: Tensor) -> Tensor:
        count[0] += 1
        return weighted(params, batch) * min(1.0, count[0] / 4)

    return make_train_step(loss, SGD)


def weight() -> Any:
    count = [0]

    def weight(batch: Tensor) -> float:
        count[0] += 1
        return count[0]

    return make_train_step(weighted, SGD, accumulate=2, weight=weight)


def part() -> Any:
    count = [0]

    def part(update: Any) -> Any:
        count[0] += 1
        gradients = {name: gradient * count[0] for name, gradient in update.gradients.tree().items()}
        return update._replace(gradients=update.gradients.ravel(gradients))

    return make_train_step(weighted, funcamp.chain(part, SGD))


NAMES: dict[Callable[[], Any], str] = {
    loss: "loss.count[0]",
    weight: "weight.count[0]",
    part: "optimizer[0].count[0]",
}


@pytest.mark.parametrize("make", NAMES, ids=lambda make: make.__name__)
def test_a_number_that_a_function_of_a_step_counts_is_refused_by_name(make: Callable[[], Any]) -> None:
    step = make()
    with pytest.raises(RuntimeError) as raised:
        jit(step, backend="eager")(step.init({"w": torch.ones(2)}), torch.ones(2, 2))
    assert f"{NAMES[make]} (from " in str(raised.value)


def test_a_number_that_the_jitted_function_counts_is_refused_by_name() -> None:
    calls = 0
    step = make_train_step(weighted, SGD)

    def both(states: Any, batch: Tensor) -> Any:
        nonlocal calls
        critic, actor = states
        critic, metrics = step(critic, batch)
        if calls % 2 == 1:
            actor, _ = step(actor, batch)
        calls += 1
        return (critic, actor), metrics

    states = step.init({"w": torch.ones(2)}), step.init({"w": torch.ones(2)})
    with pytest.raises(RuntimeError, match=r"step\.calls \(from "):
        jit(both, backend="eager")(states, torch.ones(2))
