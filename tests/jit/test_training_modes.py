"""A change of a module's training flag after a program was made is noticed at the next call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcamp import jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same, clone

X, Y = torch.randn(16, 4), torch.randn(16, 1)
SGD = stateless(torch.optim.SGD, lr=0.1)


class Custom(nn.Module):
    """Reads the flag of a part that ignores its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out * 2 if self.training else out


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))


#: What changes the mode of a part, and the model.
CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "the whole": (normed, lambda model: model.eval()),
    "a part": (normed, lambda model: model[1].eval()),
    "another part": (normed, lambda model: model[2].eval()),
    "a part that was in eval mode": (lambda: normed().eval(), lambda model: model[1].train()),
    "an assignment": (normed, lambda model: setattr(model[1], "training", False)),
    "a class of the user": (Custom, lambda model: model.eval()),
    "a scripted module": (scripted, lambda model: model.eval()),
}


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
def test_steps_follow_the_mode(name: str) -> None:
    make, change = CHANGES[name]
    model = make()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, start = jit(step, backend="eager", donate=False), step.init()

    def both() -> Any:
        torch.manual_seed(1)
        new, metrics = run(start, (X, Y))
        torch.manual_seed(1)
        assert_same((new, metrics), step(clone(start), (X, Y)))
        return metrics.loss

    before = both()
    change(model)
    after = both()
    assert run.programs == 2
    assert not torch.equal(before, after)
    model.train()
    both()
    model.train(not model.training)
    both()
    assert run.programs <= 4


def test_an_old_mode_has_its_program() -> None:
    model = normed()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run = jit(step, backend="eager")
    state = step.init()
    for mode in (True, False, True, False, True):
        state, _ = run(state, (X, Y))
        model.train(mode)
    assert run.programs == 2


def test_the_reason_for_another_trace_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = normed()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run = jit(step, backend="eager", max_signatures=1)
    state, _ = run(step.init(), (X, Y))
    model.eval()
    run(state, (X, Y))
    assert "modules changed between training and eval mode" in caplog.text


def test_a_module_in_a_function_is_found() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    names = dict(model.named_parameters())

    def step(state: dict[str, Tensor], batch: Tensor) -> Any:
        return state, torch.func.functional_call(model, state, (batch,))

    run = jit(step, backend="eager")
    state = {name: value.detach().clone() for name, value in names.items()}
    state, _ = run(state, X)
    model.eval()
    state, first = run(state, X)
    _, second = run(state, X)
    assert_same(first, second)
    assert run.programs == 2


@pytest.mark.parametrize("jitted", [False, True])
def test_a_step_in_eval_mode_says_so_once(jitted: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = normed().eval()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, state = jit(step, backend="eager") if jitted else step, step.init()
    for _ in range(2):
        state, _ = run(state, (X, Y))
    assert caplog.text.count("is in eval mode") == 1


def test_evaluation_and_training_mode_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    step = make_train_step(module_loss(normed(), F.mse_loss), SGD)
    state = step.init()
    step.loss(state, (X, Y))
    step(state, (X, Y))
    step.loss(state, (X, Y))
    assert "eval mode" not in caplog.text


class ReadsAPart(nn.Module):
    """Reads the flag of a layer that does not read it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.encoder(x)
        out: Tensor = self.head(features if self.encoder.training else features.detach() * 0.5)
        return out


def steps_of(model: nn.Module, where: str) -> tuple[Any, Any, Any]:
    """A step, a function to jit that calls it from somewhere, and the first state."""
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    if where == "itself":
        return step, step, step.init()
    if where == "a closure":
        return step, lambda state, batch: step(state, batch), step.init()

    class Trainer:
        def __init__(self) -> None:
            self.parts = [{"step": step}]

        def update(self, state: Any, batch: Any) -> Any:
            return self.parts[0]["step"](state, batch)

    return step, Trainer().update, step.init()


@pytest.mark.parametrize("where", ["itself", "a closure", "a method"])
@pytest.mark.parametrize("make", [ReadsAPart, normed])
def test_every_flag_that_python_reads_is_followed(make: Callable[[], Any], where: str) -> None:
    model = make()
    step, function, state = steps_of(model, where)
    run = jit(function, backend="eager", donate=False)
    run(state, (X, Y))
    for part in model.children():
        part.train(False)
    torch.manual_seed(1)
    actual = run(state, (X, Y))
    torch.manual_seed(1)
    assert_same(actual, step(clone(state), (X, Y)))
    assert run.programs == 2


def test_an_evaluation_that_sets_the_flags_follows_none() -> None:
    model = normed()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run = jit(step, backend="eager")
    evaluate = run.also(lambda state, batch: (state, step.loss(state, batch)))
    trained = run.also(lambda state, batch: (state, step.loss(state, batch, training=True)))
    state, _ = run(step.init(), (X, Y))
    _, expected = evaluate(state, (X, Y))
    trained(state, (X, Y))
    model.eval()
    assert_same(evaluate(state, (X, Y))[1], expected)
    assert_same(trained(state, (X, Y))[1], expected)
    assert evaluate.programs == 1
    assert trained.programs == 2
