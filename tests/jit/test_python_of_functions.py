"""What the Python of a user's functions keeps or reads is followed or refused under jit, wherever the function is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import funcamp
from funcamp import jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same

SGD = stateless(torch.optim.SGD, lr=0.5)
X, Y = torch.linspace(-1, 1, 8).reshape(2, 4), torch.ones(2, 1)


def weighted(params: Any, batch: Tensor) -> Tensor:
    loss: Tensor = (params["w"] * batch).sum()
    return loss


def counting_loss() -> tuple[Any, Any, Any]:
    count = [0]

    def loss(params: Any, batch: Tensor) -> Tensor:
        count[0] += 1
        return weighted(params, batch) * min(1.0, count[0] / 4)

    step = make_train_step(loss, SGD)
    return step, step.init({"w": torch.ones(2)}), torch.ones(2)


def counting_function() -> tuple[Any, Any, Any]:
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

    return both, (step.init({"w": torch.ones(2)}), step.init({"w": torch.ones(2)})), torch.ones(2)


def counting_weight() -> tuple[Any, Any, Any]:
    count = [0]

    def weight(batch: Tensor) -> float:
        count[0] += 1
        return count[0]

    step = make_train_step(weighted, SGD, accumulate=2, weight=weight)
    return step, step.init({"w": torch.ones(2)}), torch.ones(2, 2)


def counting_part() -> tuple[Any, Any, Any]:
    count = [0]

    def part(update: Any) -> Any:
        count[0] += 1
        gradients = {name: gradient * count[0] for name, gradient in update.gradients.tree().items()}
        return update._replace(gradients=update.gradients.ravel(gradients))

    step = make_train_step(weighted, funcamp.chain(part, SGD))
    return step, step.init({"w": torch.ones(2)}), torch.ones(2)


def counting_observation() -> tuple[Any, Any, Any]:
    count = [0]

    def observed(gradients: Any) -> Any:
        count[0] += 1
        return {"times": gradients["w"] * count[0]}

    step = make_train_step(weighted, SGD, observe={"gradients": observed})
    return step, step.init({"w": torch.ones(2)}), torch.ones(2)


class Counter(nn.Linear):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def counting_model() -> tuple[Any, Any, Any]:
    step = make_train_step(module_loss(Counter(4, 1), F.mse_loss), SGD)
    return lambda state, batch: step(state, batch), step.init(), (X, Y)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (counting_loss, "loss.count[0]"),
        (counting_function, "step.calls"),
        (counting_weight, "weight.count[0]"),
        (counting_part, "optimizer[0].count[0]"),
        (counting_observation, "observe['gradients'].count[0]"),
        (counting_model, "step.step.model.calls"),
    ],
)
def test_a_number_that_a_function_counts_is_refused_by_name(make: Callable[[], Any], name: str) -> None:
    step, state, batch = make()
    with pytest.raises(RuntimeError) as raised:
        jit(step, backend="eager")(state, batch)
    assert f"{name} (from " in str(raised.value)


class Reading(nn.Module):
    """Reads tensors that are in other objects."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.tables, self.listed = {"a": torch.zeros(1)}, [torch.zeros(1)]
        self.frozen = nn.Linear(4, 1).requires_grad_(False)
        self.unregistered = [nn.Linear(4, 1).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + self.tables["a"] + self.listed[0] + self.frozen(x) + self.unregistered[0](x)
        return out


REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "a dict": lambda model: setattr(model, "tables", {"a": torch.ones(1)}),
    "a list": lambda model: setattr(model, "listed", [torch.ones(1)]),
    "a frozen layer": lambda model: setattr(model, "frozen", nn.Linear(4, 1).requires_grad_(False)),
    "a layer in a list": lambda model: model.unregistered.__setitem__(0, nn.Linear(4, 1).requires_grad_(False)),
}


@pytest.mark.parametrize("where", ["itself", "a function"])
@pytest.mark.parametrize("name", REPLACEMENTS)
def test_what_is_replaced_together_with_what_it_is_in_is_followed(name: str, where: str) -> None:
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Reading()
        step = make_train_step(module_loss(model, F.mse_loss), SGD)
        function: Any = step if where == "itself" else lambda state, batch, step=step: step(state, batch)
        run, state = jit(function, backend="eager") if compiled else function, step.init()
        state, _ = run(state, (X, Y))
        REPLACEMENTS[name](model)
        losses.append(run(state, (X, Y))[1].loss)
    assert_same(losses[1], losses[0])
