"""A tensor that a step reads besides its arguments, and that is replaced between calls: the step follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcamp import jit, make_train_step, module_loss, stateless
from funcamp._jit.jit_step import JitStep
from tests.support.helpers import assert_same

SGD = stateless(torch.optim.SGD, lr=0.1)
BATCH = (torch.linspace(-1, 1, 12).reshape(3, 4), torch.ones(3, 4))
TABLE = torch.ones(4)


class Table:
    """Has a table in a place that a criterion reads."""

    def __init__(self, place: str) -> None:
        self.place, self.attribute, self.pair, self.items = place, torch.ones(4), (torch.ones(4), 1), [torch.ones(4)]
        closed = torch.ones(4)

        def read() -> Tensor:
            return closed

        def write(value: Tensor) -> None:
            nonlocal closed
            closed = value

        self.read, self.write = read, write

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        places: dict[str, Callable[[], Tensor]] = {
            "attribute": lambda: self.attribute,
            "tuple": lambda: self.pair[0],
            "list": lambda: self.items[0],
            "closure": lambda: self.read(),
            "global": lambda: TABLE,
        }
        return (out - y).square().mean() * places[self.place]().sum()

    def put(self, value: Tensor) -> None:
        global TABLE
        if self.place == "attribute":
            self.attribute = value
        elif self.place == "tuple":
            self.pair = (value, 1)
        elif self.place == "list":
            self.items[0] = value
        elif self.place == "closure":
            self.write(value)
        else:
            TABLE = value


def made(criterion: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    step = make_train_step(module_loss(nn.Linear(4, 4), criterion), SGD)
    return step, step.init()


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("place", ["attribute", "tuple", "list", "closure", "global"])
def test_a_replaced_tensor_is_followed(place: str) -> None:
    results = []
    for compiled in (False, True):
        criterion = Table(place)
        criterion.put(torch.ones(4))
        step, state = made(criterion)
        run, losses = jit(step, backend="eager") if compiled else step, []
        for value in (None, None, torch.full((4,), 2.0), None, torch.full((5,), 3.0)):
            if value is not None:
                criterion.put(value)
            state, metrics = run(state, BATCH)
            losses.append(metrics.loss)
        results.append(losses)
    assert_same(results[1], results[0])


def test_a_cache_that_the_step_replaces_for_another_shape_is_no_replacement() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mask = nn.Linear(4, 4), torch.ones(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            if len(self.mask) != len(x):
                self.mask = torch.ones(len(x), 1)
            out: Tensor = self.layer(x) * self.mask
            return out

    step = make_train_step(module_loss(Cached(), nn.functional.mse_loss), SGD)
    run, state = jit(step, backend="eager"), step.init()
    assert isinstance(run, JitStep)
    for rows in (3, 2, 3, 2):
        state, _ = run(state, (torch.ones(rows, 4), torch.ones(rows, 4)))
    assert run.programs == 2
