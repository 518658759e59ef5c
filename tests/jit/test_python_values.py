"""How many programs a step has when Python values change between its calls, and what its log says of them."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcamp import jit, make_train_step, module_loss, stateless
from funcamp._jit import python_values
from funcamp._trace.places import Survey
from tests.support.stand_in import StandIn
from tests.support.steps import SGD, assert_as_eager

X, Y = torch.randn(16, 4), torch.randn(16, 1)


class Model(nn.Module):
    """Reads a number and a function, a dropout's mode, and a count of which little depends."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 1), nn.Dropout(0.5)
        self.factor, self.pair = 1.0, (0.5, 0.5)
        self.function: Callable[[Tensor], Tensor] = torch.sin
        self.epoch = 0
        self.losses: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        if self.epoch % 5 == 0:
            logging.getLogger("tests").info("epoch %d", self.epoch)
        out = self.dropout(self.linear(x)) * self.factor * (2 if self.epoch >= 30 else 1)
        return self.function(out) * self.pair[0] + self.pair[1]


def made(**options: Any) -> tuple[Any, Any, Any, Any]:
    """Return a model, a step and its jit, and a state."""
    model: Any = Model()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    return model, step, jit(step, backend="eager", **options), step.init()


def assert_right(step: Any, run: Any, state: Any, rows: int = 16) -> Any:
    """Compare an eager step with a jitted one."""
    assert_as_eager(step, run, state, [(X[:rows], Y[:rows])])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_what_is_equal_or_is_not_read_may_change() -> None:
    model, step, run, state = made(max_signatures=1, donate=False)
    for index in range(4):
        model.factor = np.float64("0.3")
        model.pair = (float("0.3"), 0.5)
        model.function = functools.partial(torch.mul, other=float("0.3"))
        model.dropout.steps_done = index  # a new attribute
        model.losses.append(torch.ones(()))
        assert_right(step, run, state)
    assert run.programs == 1


def test_a_value_that_changes_nothing_needs_no_program(caplog: pytest.LogCaptureFixture) -> None:
    model, step, run, state = made(max_signatures=2, donate=False)
    for epoch in (0, 1, 2, 5, 29, 30):  # at 0, 5 and 30 the model writes to its logger
        model.epoch = epoch
        assert_right(step, run, state)
        assert run.programs == (1 if epoch < 30 else 2)
    (warning,) = [text for text in warnings_of(caplog) if "3 times now the step was traced" in text]
    assert "model.epoch changed from 1 to 2" in warning


@pytest.mark.parametrize("captured", [False, True])
def test_an_old_value_has_its_program_and_the_oldest_is_dropped_with_a_warning(
    captured: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if captured:
        StandIn().take_place(monkeypatch)
    model, step, run, state = made(max_signatures=3)
    for factor in (1.0, 2.0, 3.0, 4.0):
        model.factor = factor
        assert_right(step, run, state)
    assert run.programs == 3
    (warning,) = [text for text in warnings_of(caplog) if "at most 3 programs are kept" in text]
    assert "model.factor changed from" in warning
    assert "keep it in a tensor" in warning
    for factor in (2.0, 3.0, 4.0):  # the others are there
        model.factor = factor
        assert_right(step, run, state)
    assert run._traces == 4
    assert_right(step, run, state, rows=4)  # another size drops another value's program
    assert run.programs == 3


def test_only_hooks_of_the_step_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, step, run, state = made(donate=False)
    assert_right(step, run, state)
    surveys: list[Any] = []

    def survey(roots: Any) -> Any:
        surveys.append(roots)
        return Survey(roots)

    monkeypatch.setattr(python_values, "Survey", survey)
    for _ in range(3):
        torch.ones(2, requires_grad=True).register_hook(lambda gradient: gradient)
        assert_right(step, run, state)
    assert not surveys, "a hook of the loop's own tensor needs no look at the model"
    model.dropout.register_forward_hook(lambda module, inputs, output: output * 2)
    assert_right(step, run, state)
    assert surveys, "the hook of a layer is seen"


#: Has the name of an attribute of the model, and of a key of its batch.
linear = 0.0


def test_a_global_with_the_name_of_an_attribute_may_change() -> None:
    global linear
    step = make_train_step(module_loss(Model(), lambda out, target: F.mse_loss(out, target["linear"])), SGD)
    run, state = jit(step, backend="eager", max_signatures=1, donate=False), None
    state = step.init()
    for _ in range(3):
        run(state, (X, {"linear": Y}))
        linear += 1.0
    assert run.programs == 1
    assert run._traces == 1


CHANGES: dict[str, tuple[Any, str]] = {
    "a shape": ({"x": torch.ones(4)}, r"batch\['x'\] changed from .*\(3,\) on cpu to .*\(4,\)"),
    "a structure": ([torch.ones(3)], "its structure changed"),
    "a default dtype": ({"x": torch.ones(3)}, "default dtype changed from torch.float32 to torch.float64"),
    "an autocast": ({"x": torch.ones(3)}, "autocast around the call changed from None to .*: call it without a region"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_log_line_names_what_changed_when_a_program_is_dropped(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch, text = CHANGES[name]
    run, state = jit(lambda state, batch: (state + 1, None), backend="eager", max_signatures=2), torch.zeros(())
    for size in (2, 3):
        state, _ = run(state, {"x": torch.ones(size)})
    if name == "a default dtype":
        monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    with torch.autocast("cpu", torch.float16, enabled=name == "an autocast"):
        run(state, batch)
    (warning,) = warnings_of(caplog)
    assert re.search(f"at most 2 programs are kept .*pad batches.*{text}", warning)
    assert run.programs == 2


def test_what_a_schedule_reads_is_followed() -> None:
    rates, momenta = {"now": 0.1}, {"now": 0.5}
    adam = stateless(
        torch.optim.Adam,
        lr=lambda count: torch.ones(()) * rates["now"],
        betas=(lambda count: torch.ones(()) * momenta["now"], 0.999),
    )
    step = make_train_step(module_loss(nn.Linear(4, 1), F.mse_loss), adam)
    run, state = jit(step, backend="eager", donate=False), step(step.init(), (Y.expand(16, 4), Y))[0]
    for rates["now"], momenta["now"] in ((0.1, 0.5), (0.01, 0.5), (0.01, 0.9)):
        assert_right(step, run, state)


def test_a_step_in_eval_mode_says_so_once_and_an_evaluation_does_not(caplog: pytest.LogCaptureFixture) -> None:
    model, step, run, state = made(donate=False)
    step.loss(state, (X, Y))
    run(state, (X, Y))
    assert "eval mode" not in caplog.text
    model.eval()
    for _ in range(2):
        run(state, (X, Y))
        step(state, (X, Y))
    assert caplog.text.count("is in eval mode") == 1
