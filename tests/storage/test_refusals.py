"""What storage refuses: what is called, and words that the error must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from funcamp import make_train_step, module_loss, ravel
from tests.support.helpers import assert_refused, assert_same, clone, values_of
from tests.support.steps import SGD

Call = Callable[[], object]
W, X = {"w": torch.ones(2, 2)}, torch.ones(2, 2)
MODEL = nn.Linear(2, 2)
STEP: Any = make_train_step(lambda params, x: (params["w"] * x).sum(), SGD)
MODULE: Any = make_train_step(module_loss(MODEL, mse_loss), SGD)


class Deletes(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        del self.running_mean
        return out


def called(model: nn.Module, criterion: Any) -> Call:
    def call() -> None:
        step = make_train_step(module_loss(model, criterion), SGD)
        step(step.init(), (X, X))

    return call


#: What is called, the error, and its words.
REFUSED: dict[str, tuple[Call, type[Exception], str]] = {
    "no such parameter": (lambda: ravel([X, {"b": X}])[2], IndexError, r"2 must be in .tree\(\), a list of a torch.float32 tensor"),
    "a tree of a batch of states": (lambda: torch.func.vmap(STEP.init)({"w": torch.ones(3, 2)}).params.tree(), ValueError, r"no batch dimension; got \(3, \d+\): take the tree under vmap"),
    "a lazy module": (lambda: module_loss(nn.Sequential(nn.LazyLinear(3)), mse_loss), ValueError, "model must have its shapes; '0.weight' is lazy: call the model on a batch"),
    "a buffer that is deleted": (called(Deletes(2), mse_loss), ValueError, "must keep its buffers; .* deleted 'running_mean'"),
    "consume a number": (lambda: MODULE.init(consume=1), TypeError, "init: consume must be True or False; got 1"),
    "consume without a module": (lambda: STEP.init(W, consume=True), TypeError, "init: consume must be False for a loss that module_loss did not make"),
    "consume what is given": (lambda: MODULE.init(MODULE.loss_fn.params(), consume=True), ValueError, "init: consume must be False if .*got True and params="),
    "consume with buffers": (lambda: MODULE.init(buffers={}, consume=True), ValueError, "init: consume must be False if .*got True and buffers="),
    "load without a module": (lambda: STEP.load_state_dict(STEP.state_dict(STEP.init(W)), STEP.init(W), consume=True), TypeError, "load_state_dict: consume must be False for a loss that"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_the_rule_and_the_value(name: str) -> None:
    before = clone(values_of(MODEL))
    assert_refused(*REFUSED[name])
    assert_same(values_of(MODEL), before)
