"""A Python value that the step reads may change between calls: the next call computes with the new one."""

from __future__ import annotations

import enum
import functools
import logging
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcamp import jit, loss, make_train_step, module_loss, stateless
from funcamp._jit import cuda_graph
from tests.support.helpers import assert_same, clone
from tests.support.stand_in import StandIn

X, Y = torch.randn(16, 4), torch.randn(16, 1)
SGD = stateless(torch.optim.SGD, lr=0.1)

#: What the functions below read as globals.
WEIGHT = 1.0


def penalty(out: Tensor) -> Tensor:
    return out.square().mean()


class Kind(enum.Enum):
    SQUARE = 1
    ABSOLUTE = 2


@dataclass
class Config:
    factor: float
    unread: int = 0


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class WithClassAttribute(nn.Module):
    factor = 1.0

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(self.linear(x), self.factor)


class Model(nn.Module):
    """Reads values of many kinds in many places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.activation: nn.Module = nn.Identity()
        self.dropout = nn.Dropout(0.5)
        self.factor = 1.0
        self.stage = "first"
        self.mask_ratio: float | None = None
        self.is_halved = False
        self.kind = Kind.SQUARE
        self.function: Callable[[Tensor], Tensor] = torch.sin
        self.weights = (0.5, 0.5)
        self.items = [1.0, 1.0]
        self.options: dict[str, Any] = {"factor": 2.0, "inner": {"power": 1}}
        self.config = Config(1.0)
        self.namespace = types.SimpleNamespace(factor=1.0)
        self.slotted = Slotted()
        self.steps_done = 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.activation(self.dropout(self.linear(x))) * self.factor
        out = out + (1 if self.stage == "first" else 2)
        out = out if self.mask_ratio is None else out * self.mask_ratio
        out = out / 2 if self.is_halved else out
        out = out.square() if self.kind is Kind.SQUARE else out.abs()
        out = self.function(out) * self.weights[0] + self.weights[1]
        out = out * self.items[1] * self.options["factor"] ** self.options["inner"]["power"]
        out = out * self.config.factor * self.namespace.factor * self.slotted.factor
        return torch.add(out, penalty(out), alpha=WEIGHT)


def set_global(name: str, value: object) -> None:
    globals()[name] = value


#: What is changed, and how.
CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda model: setattr(model, "factor", 2.0),
    "the number of a layer": lambda model: setattr(model.dropout, "p", 0.1),
    "a text": lambda model: setattr(model, "stage", "second"),
    "None": lambda model: setattr(model, "mask_ratio", 0.25),
    "a flag": lambda model: setattr(model, "is_halved", True),
    "an enum's member": lambda model: setattr(model, "kind", Kind.ABSOLUTE),
    "a function": lambda model: setattr(model, "function", torch.cos),
    "a layer without parameters": lambda model: setattr(model, "activation", nn.Tanh()),
    "a layer": lambda model: setattr(model, "linear", Doubled(4, 1)),
    "a hook": lambda model: model.dropout.register_forward_hook(lambda module, args, out: out * 2),
    "a tuple": lambda model: setattr(model, "weights", (0.1, 0.9)),
    "an item of a list": lambda model: model.items.__setitem__(1, 3.0),
    "a list": lambda model: setattr(model, "items", [1.0, 3.0]),
    "an item of a dict": lambda model: model.options.update(factor=3.0),
    "an item of an inner dict": lambda model: model.options["inner"].update(power=0),
    "a field of a dataclass": lambda model: setattr(model.config, "factor", 3.0),
    "another dataclass": lambda model: setattr(model, "config", Config(3.0)),
    "a field of a namespace": lambda model: setattr(model.namespace, "factor", 3.0),
    "an attribute in slots": lambda model: setattr(model.slotted, "factor", 3.0),
    "a global": lambda _: set_global("WEIGHT", 3.0),
    "a global function": lambda _: set_global("penalty", lambda out: out.abs().sum()),
}


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("name", CHANGES)
def test_the_new_value_is_computed_with(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "WEIGHT", WEIGHT)  # put back afterwards
    monkeypatch.setitem(globals(), "penalty", penalty)
    model = Model()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, start = jit(step, backend="eager", donate=False), step.init()

    def both() -> Any:
        torch.manual_seed(1)
        actual = run(start, (X, Y))
        torch.manual_seed(1)
        assert_same(actual, step(clone(start), (X, Y)))
        return actual[1].loss

    before = both()
    assert_same(both(), before)
    assert run.programs == 1
    CHANGES[name](model)
    after = both()
    assert not torch.equal(before, after)
    assert_same(both(), after)
    assert run.programs == 2


def test_a_hook_can_be_removed() -> None:
    model = Model()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, start = jit(step, backend="eager", donate=False), step.init()
    torch.manual_seed(1)
    without = run(start, (X, Y))
    handle = model.linear.register_forward_hook(lambda module, args, out: out * 2)
    run(start, (X, Y))
    handle.remove()
    handle = model.linear.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(ValueError, match="parameters must have no hook on their gradients"):
        run(start, (X, Y))
    handle.remove()
    torch.manual_seed(1)
    assert_same(run(start, (X, Y)), without)
    assert run.programs == 2


@pytest.mark.parametrize("captured", [False, True])
def test_an_old_value_has_its_program(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if captured:
        monkeypatch.setattr(cuda_graph, "graphs_for", lambda device: StandIn())
    model = Model().eval()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, state, expected = jit(step, backend="eager"), step.init(), step.init()
    for factor in (1.0, 2.0, 1.0, 2.0, 1.0):
        model.factor = factor
        state, _ = run(state, (X, Y))
        expected, _ = step(expected, (X, Y))
    assert_same(state, expected)
    assert run.programs == 2


def test_a_new_object_of_an_equal_value_is_no_change() -> None:
    model = Model()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, state = jit(step, backend="eager"), step.init()
    model.factor = np.float64(0.3)
    for text in ("0.3", "0.3", "0.3"):
        model.factor = np.float64(text)
        model.weights = (float(text), float(text))
        model.function = functools.partial(torch.mul, other=float(text))
        state, _ = run(state, (X, Y))
    assert run.programs == 1
    assert len(run._executables) == 1


def test_numbers_that_are_equal_and_of_two_types_are_two() -> None:
    counts = {"factor": 2}

    def step(state: Tensor, batch: Tensor) -> Any:
        return state, batch * counts["factor"]

    run = jit(step, backend="eager")
    assert run(torch.zeros(1), torch.arange(3))[1].dtype == torch.int64
    counts["factor"] = 2.0  # type: ignore[assignment]
    assert run(torch.zeros(1), torch.arange(3))[1].dtype == torch.float32


def test_the_variable_of_a_closure_is_followed() -> None:
    beta = 1.0

    def error(params: Any, batch: Any) -> Tensor:
        x, y = batch
        return torch.mul((x @ params - y).square().mean(), beta)

    step = make_train_step(loss(error), SGD)
    run, state = jit(step, backend="eager"), step.init(torch.zeros(4, 1))
    _, first = run(clone(state), (X, Y))
    beta = 3.0
    _, second = run(clone(state), (X, Y))
    assert_same(second.loss, first.loss * 3)


def test_a_dict_that_the_model_keeps_and_another_function_reads_is_followed() -> None:
    settings = {"beta": 1.0}
    model: Any = nn.Linear(4, 1)
    model.settings = settings  # found first, and not read there

    def weighted(out: Tensor, y: Tensor) -> Tensor:
        return torch.mul(F.mse_loss(out, y), settings["beta"])

    step = make_train_step(module_loss(model, weighted), SGD)
    run, start = jit(step, backend="eager", donate=False), step.init()
    _, first = run(start, (X, Y))
    settings["beta"] = 2.0
    _, second = run(start, (X, Y))
    assert_same(second.loss, first.loss * 2)


def test_a_class_attribute_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = WithClassAttribute()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, start = jit(step, backend="eager", donate=False), step.init()
    run(start, (X, Y))
    monkeypatch.setattr(WithClassAttribute, "factor", 2.0)
    assert_same(run(start, (X, Y)), step(clone(start), (X, Y)))
    model.factor = 3.0
    assert_same(run(start, (X, Y)), step(clone(start), (X, Y)))
    assert run.programs == 3


def test_a_value_that_is_not_read_may_change() -> None:
    model: Any = Model()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, state = jit(step, backend="eager", max_signatures=1), step.init()
    for index in range(12):
        model.steps_done = index
        model.dropout.inplace_count = index  # a new attribute
        state, _ = run(state, (X, Y))
    assert run.programs == 1


EPOCH = 0


class Reports(nn.Module):
    """Has methods that no step calls, with globals that a loop changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.factor()

    def factor(self) -> float:
        return WEIGHT

    def report(self) -> str:
        return f"{type(self).__name__} at {EPOCH}"


def test_a_global_of_a_method_that_is_not_called_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Reports()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, start = jit(step, backend="eager", donate=False), step.init()
    for epoch in range(3):
        monkeypatch.setitem(globals(), "EPOCH", epoch)
        _, first = run(start, (X, Y))
    assert run.programs == 1
    monkeypatch.setitem(globals(), "WEIGHT", 2.0)
    _, second = run(start, (X, Y))
    assert not torch.equal(first.loss, second.loss)


def test_a_method_in_a_branch_of_cond_can_be_called() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.cond(x.sum() > 0, self.doubled, lambda y: y * 1.0, (x,))

        def doubled(self, x: Tensor) -> Tensor:
            return x * self.factor()

        def factor(self) -> float:
            return 2.0

    model = Branches()
    run = jit(lambda state, batch: (state, model(batch)), backend="eager")
    assert run(torch.zeros(1), torch.ones(2))[1].tolist() == [2.0, 2.0]


class Logs(nn.Module):
    """Reads a count for its log only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.epoch = 0
        self.lines: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.epoch % 5 == 0:
            logging.getLogger("tests").info("epoch %d", self.epoch)
        out: Tensor = self.linear(x)
        return out * 2 if self.epoch >= 30 else out


def test_a_value_that_changes_nothing_needs_no_program(caplog: pytest.LogCaptureFixture) -> None:
    model = Logs()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, start = jit(step, backend="eager", max_signatures=2, donate=False), step.init()
    for epoch in range(32):
        model.epoch = epoch
        assert_same(run(start, (X, Y)), step(clone(start), (X, Y)))
        assert run.programs == (1 if epoch < 30 else 2)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "2 times now the step was traced again" in warnings[0]
    assert "model.epoch changed from 1 to 2" in warnings[0]


def test_programs_of_a_value_that_changes_often_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.dropout.p = 0.0
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, start = jit(step, backend="eager", max_signatures=3, donate=False), step.init()
    for factor in (1.0, 2.0, 3.0, 1.0, 4.0, 1.0, 4.0):
        model.factor = factor
        assert_same(run(start, (X, Y)), step(clone(start), (X, Y)))
        assert run.programs <= 3
    (dropped,) = [record.getMessage() for record in caplog.records if "at most 3 programs" in record.getMessage()]
    assert "model.factor changed from 1.0 to 4.0" in dropped
    assert run.programs == 2


def test_the_log_names_the_place_whose_programs_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, state = jit(step, backend="eager", max_signatures=2), step.init()
    for factor in (1.0, 2.0, 3.0, 4.0):
        model.factor = factor
        state, _ = run(state, (X, Y))
    assert run.programs == 2
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "at most 2 programs are kept" in warning
    assert "model.factor changed from 2.0 to 3.0: keep it in a tensor" in warning
    state, _ = run(state, (X[:4], Y[:4]))  # another size of batches drops the programs of the values
    assert run.programs == 1


def test_what_the_step_itself_counts_is_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            out: Tensor = self.linear(x)
            return out

    model = Counts()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, state = jit(step, backend="eager"), step.init()
    for rows in (16, 8, 16, 8, 16):
        state, _ = run(state, (X[:rows], Y[:rows]))
    assert run.programs == 2


def test_a_parameter_that_is_frozen_is_noticed() -> None:
    model = Model()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, state = jit(step, backend="eager"), step.init()
    state, _ = run(state, (X, Y))
    model.linear.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="bias' was a trainable parameter and is a frozen parameter"):
        step(state, (X, Y))
    with pytest.raises(ValueError, match="bias' was a trainable parameter and is a frozen parameter"):
        run(state, (X, Y))
    model.linear.bias.requires_grad_(True)
    run(state, (X, Y))


@pytest.mark.parametrize("way", ["scalar", "vector", "as_tensor"])
def test_a_count_in_a_constant_is_refused(way: str) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            count = float(self.calls)
            constants = {"scalar": torch.tensor(count), "vector": torch.tensor([count])}
            out: Tensor = self.linear(x)
            return out * constants.get(way, torch.as_tensor(count))

    step = make_train_step(module_loss(Counts(), F.mse_loss), SGD)
    with pytest.raises(RuntimeError, match=r"model\.calls \(from \d to \d\)"):
        jit(step, backend="eager")(step.init(), (X, Y))


def test_a_draw_that_nothing_needs_makes_another_program() -> None:
    settings = {"drawn": 0}

    def step(state: Tensor, batch: Tensor) -> Any:
        if settings["drawn"]:
            torch.rand(settings["drawn"])
        return state, batch + torch.rand(3)

    run = jit(step, backend="eager")
    for drawn in (0, 3, 0):
        settings["drawn"] = drawn
        torch.manual_seed(1)
        _, found = run(torch.zeros(1), torch.zeros(3))
        torch.manual_seed(1)
        assert_same(found, step(torch.zeros(1), torch.zeros(3))[1])
    assert run.programs == 2


def test_values_in_a_captured_constant_are_two() -> None:
    model = nn.Linear(4, 1)
    settings = {"factor": 1.0}

    def scaled_error(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) * torch.tensor([settings["factor"]]).sum()

    step = make_train_step(module_loss(model, scaled_error), SGD)
    run, start = jit(step, backend="eager", donate=False), step.init()
    for factor in (1.0, 2.0, 1.0):
        settings["factor"] = factor
        assert_same(run(start, (X, Y)), step(clone(start), (X, Y)))
    assert run.programs == 2


def test_a_constant_among_the_metrics_makes_another_program() -> None:
    settings = {"epoch": 0}

    def step(state: Tensor, batch: Tensor) -> Any:
        return state + batch, {"epoch": settings["epoch"]}

    run = jit(step, backend="eager")
    state, metrics = run(torch.zeros(1), torch.ones(1))
    assert metrics == {"epoch": 0}
    settings["epoch"] = 1
    _, metrics = run(state, torch.ones(1))
    assert metrics == {"epoch": 1}


def test_a_value_in_a_branch_of_cond_is_followed() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.is_tripled = False

        def forward(self, x: Tensor) -> Any:
            return torch.cond(x.sum() > 0, lambda y: y * (3 if self.is_tripled else 2), lambda y: y * 1.0, (x,))

    model = Branches()
    assert model(torch.ones(2)).tolist() == [2.0, 2.0]  # Dynamo knows the branches from now on
    run = jit(lambda state, batch: (state, model(batch)), backend="eager")
    state, before = run(torch.zeros(1), torch.ones(2))
    model.is_tripled = True
    _, after = run(state, torch.ones(2))
    assert before.tolist() == [2.0, 2.0]
    assert after.tolist() == [3.0, 3.0]


def test_classes_are_as_before_after_a_trace() -> None:
    model = Model()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    before = {kind: dict(vars(kind)) for kind in (Model, nn.Dropout, nn.Module, Config, Slotted)}
    jit(step, backend="eager")(step.init(), (X, Y))
    assert all(dict(vars(kind)) == attributes for kind, attributes in before.items())


def test_an_attribute_can_be_set_and_deleted_in_a_trace() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)
            self.temporary = 1.0
            self.weight_scale: Any = 2.0

        def forward(self, x: Tensor) -> Tensor:
            del self.temporary
            assert not hasattr(self, "temporary")
            self.temporary = 1.0
            assert getattr(self, "absent", None) is None
            self.weight_scale, former = 3.0, self.weight_scale
            self.weight_scale = former
            return torch.mul(self.linear(x), self.temporary * self.weight_scale)

    model = Writes()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, start = jit(step, backend="eager", donate=False), step.init()
    for scale in (2.0, 4.0):
        model.weight_scale = scale
        assert_same(run(start, (X, Y)), step(clone(start), (X, Y)))
    assert vars(model)["temporary"] == 1.0


def test_a_value_that_the_first_call_sets_is_followed() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)
            self.scale: float | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.scale is None:
                self.scale = 2.0
            return torch.mul(self.linear(x), self.scale)

    model = Lazy()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, start = jit(step, backend="eager", donate=False), step.init()
    for scale in (None, None, 3.0):
        model.scale = scale if scale is not None else model.scale
        assert_same(run(start, (X, Y)), step(clone(start), (X, Y)))
    assert model.scale == 3.0


def test_a_cache_that_is_emptied_has_its_own_program() -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)
            self.factor, self.cached = 2.0, 2.0

        def forward(self, x: Tensor) -> Tensor:
            if self.cached == 0.0:
                self.cached = self.factor
            return torch.mul(self.linear(x), self.cached)

    model = Caches()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, start = jit(step, backend="eager", donate=False), step.init()
    run(start, (X, Y))
    model.factor, model.cached = 3.0, 0.0
    for _ in range(3):
        assert_same(run(start, (X, Y)), step(clone(start), (X, Y)))


@pytest.mark.parametrize("name", ["weight", "pos_weight"])
def test_a_buffer_that_was_none_is_followed(name: str) -> None:
    model = nn.Linear(4, 1)
    criterion = nn.BCEWithLogitsLoss()
    target = (Y > 0).float()
    step = make_train_step(module_loss(model, criterion), SGD)
    run, start = jit(step, backend="eager", donate=False), step.init()
    run(start, (X, target))
    setattr(criterion, name, torch.tensor([3.0]))
    assert_same(run(start, (X, target)), step(clone(start), (X, target)))


class Derived(WithClassAttribute):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + 1


def test_the_default_of_a_base_class_beside_a_value_of_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Derived(4), Derived(4)
    second.factor = 5.0
    wrapped = second.forward
    monkeypatch.setattr(second, "forward", lambda x: wrapped(x) * 2)  # as a client wraps it
    model = nn.Sequential(WithClassAttribute(4), first, second, nn.Linear(4, 1))
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, start = jit(step, backend="eager", donate=False), step.init()
    run(start, (X, Y))
    monkeypatch.setattr(WithClassAttribute, "factor", 2.0)
    assert_same(run(start, (X, Y)), step(clone(start), (X, Y)))
    assert run.programs == 2


def test_tensors_with_attributes_of_their_own_can_be_in_a_module() -> None:
    model: Any = nn.Linear(4, 1)
    model.scale = nn.Buffer(torch.ones(1))
    model.scale.note = "mine"
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    jit(step, backend="eager")(step.init(), (X, Y))
    assert "persistent" not in vars(Tensor)
    assert "note" not in vars(Tensor)


def test_many_changes_take_no_memory() -> None:
    model = Logs()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, start = jit(step, backend="eager", donate=False), step.init()
    for epoch in range(200):
        model.epoch = epoch % 29
        model.config = Config(float(epoch))  # type: ignore[assignment]
        run(start, (X, Y))
    assert run.programs == 1
    assert len(run._executables) <= 65


def test_what_is_read_of_the_dict_of_an_object_is_followed() -> None:
    class Settings:
        def __init__(self) -> None:
            self.factor, self.power = 1.0, 2.0

    settings = Settings()

    def scaled(x: Tensor, factor: float, power: float) -> Tensor:
        return torch.mul(x, factor) ** power

    run = jit(lambda state, x: (state, scaled(x, **vars(settings))), backend="eager")
    state, first = run(torch.zeros(1), torch.full((1,), 3.0))
    settings.factor = 2.0
    _, second = run(state, torch.full((1,), 3.0))
    assert [first.item(), second.item()] == [9.0, 36.0]


def test_what_a_schedule_reads_is_followed() -> None:
    settings = {"rate": 0.1}
    sgd = stateless(torch.optim.SGD, lr=lambda count: torch.ones(()) * settings["rate"])
    step = make_train_step(module_loss(nn.Linear(4, 1), F.mse_loss), sgd)
    run, start = jit(step, backend="eager", donate=False), step.init()
    run(start, (X, Y))
    settings["rate"] = 0.01
    assert_same(run(start, (X, Y)), step(clone(start), (X, Y)))


@pytest.mark.parametrize("kept", [lambda loss: loss, lambda loss: loss.item()])
def test_a_list_that_only_the_loop_uses_is_not_looked_at(kept: Callable[[Tensor], Any]) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)
            self.losses: list[Any] = []
            self.traces = 0

        def forward(self, x: Tensor) -> Tensor:
            self.traces += 1
            out: Tensor = self.linear(x)
            return out

    model = Keeps()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, state = jit(step, backend="eager"), step.init()
    for _ in range(4):
        state, metrics = run(state, (X, Y))
        model.losses.append(kept(metrics.loss))
    assert model.traces == 2  # a count moved on, so the first call ran twice
