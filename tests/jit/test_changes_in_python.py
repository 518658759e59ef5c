"""What a loop changes in Python between steps: an eager step computes with it, and a jitted one must, or say why not.

Each program is a model, a criterion and what happens before each of six steps. `FOLLOWED` gives the eager step's
numbers, `REFUSED` is an error that names the place, and `CONSTANT` keeps the value of the first call, as the contract
says.
"""

from __future__ import annotations

import collections
import copy
import enum
import functools
import itertools
import os
import random
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from funcamp import jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same

SGD = stateless(torch.optim.SGD, lr=0.1)
STEPS = 6
#: From this step on the changed value is there.
LATE = 3
WEIGHT = 1.0
WEIGHTS = {"w": 1.0}
SETTINGS = types.SimpleNamespace(scale=1.0)
VARIABLE = "TEST_OF_CHANGES_IN_PYTHON"


class Program(NamedTuple):
    model: nn.Module
    criterion: Any = F.mse_loss
    before: Callable[[int], object] = lambda index: None
    """Called with the number of the step before it."""


def late(change: Callable[[], object]) -> Callable[[int], object]:
    """Return what happens before a step: the change, once."""
    return lambda index: change() if index == LATE else None


class Net(nn.Module):
    """A linear layer, with attributes and a forward pass of the program's."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **attributes: object) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.computes = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.computes(self, x)


def linear() -> Net:
    return Net(lambda self, x: self.layer(x))


def scaled(**attributes: object) -> Net:
    """A layer whose output is multiplied by `factor`."""
    return Net(lambda self, x: self.layer(x) * self.factor, **attributes)


class Kind(enum.Enum):
    ONE = 1.0
    TWO = 2.0


class Config:
    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    @property
    def doubled(self) -> float:
        return 2 * self.factor


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


@dataclass
class Data:
    factor: float = 1.0


class WithClassAttribute(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * self.factor


class Curriculum:
    def __init__(self) -> None:
        self.stage = 0

    def length(self) -> int:
        return [1, 2, 4][self.stage]


class Trainer:
    epoch = 0

    def weight(self) -> float:
        return 1.0 if self.epoch < 2 else 0.5

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) * self.weight()

    @staticmethod
    def by_global(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) * WEIGHTS["w"]


class Settings:
    """A class as a namespace."""

    factor = 1.0
    calls = 0
    tables: ClassVar[dict[int, Tensor]] = {}

    @staticmethod
    def scaled(value: Tensor) -> Tensor:
        return value * Settings.factor


class Dropout(nn.Dropout):
    """A user's layer made of one of torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class DropPath(nn.Module):
    rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 - self.rate)


# What is followed


def mode_of_the_whole() -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0), nn.Linear(4, 4))
    return Program(model, before=lambda index: model.train(index % 2 == 0))


def mode_of_a_part() -> Program:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4)), nn.Linear(4, 4))
    return Program(model, before=lambda index: model[1][0].train(index < LATE))


def mode_by_assignment() -> Program:
    model = Net(lambda self, x: self.layer(x) * (1.0 if self.training else 2.0))
    return Program(model, before=late(lambda: setattr(model, "training", False)))


def mode_that_another_layer_reads() -> Program:
    model = Net(lambda self, x: self.layer(x) * (1.0 if self.layer.training else 2.0))
    return Program(model, before=late(model.layer.eval))


def mode_of_a_teacher() -> Program:
    teacher = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0)).requires_grad_(False)
    return Program(linear(), lambda out, y: F.mse_loss(out, teacher(y)), lambda index: teacher.train(index < LATE))


def attribute(name: str, before: Any, after: Any, forward: Any = None, **more: object) -> Callable[[], Program]:
    """Return a program with an attribute of the model that changes."""

    def program() -> Program:
        compute = forward or (lambda self, x: self.layer(x) * getattr(self, name))
        model = Net(compute, **{name: before}, **more)
        return Program(model, before=late(lambda: setattr(model, name, after)))

    return program


def number_in_each_step() -> Program:
    model = scaled(factor=1.0)
    return Program(model, before=lambda index: setattr(model, "factor", 1.0 + index))


def number_that_is_added() -> Program:
    model = Net(lambda self, x: self.layer(x) * getattr(self, "factor", 1.0))
    return Program(model, before=late(lambda: setattr(model, "factor", 2.0)))


def number_that_is_deleted() -> Program:
    model = Net(lambda self, x: self.layer(x) * getattr(self, "factor", 1.0), factor=2.0)
    return Program(model, before=late(lambda: delattr(model, "factor")))


def held(value: Any, read: Callable[[Any], Any], change: Callable[[Any], object]) -> Callable[[], Program]:
    """Return a program with an object in an attribute of the model that is changed in place."""

    def program() -> Program:
        own = copy.deepcopy(value)
        model = Net(lambda self, x: self.layer(x) * read(self.held), held=own)
        return Program(model, before=late(lambda: change(own)))

    return program


def deep() -> Config:
    outer = Config()
    inner: Any = outer
    for _ in range(3):
        inner.next = Config()
        inner = inner.next
    return outer


def layer_of_torch(layer: nn.Module, name: str, after: object) -> Callable[[], Program]:
    """Return a program with a value of one of torch's layers that changes."""

    def program() -> Program:
        model = nn.Sequential(nn.Linear(4, 4), copy.deepcopy(layer))
        return Program(model, before=late(lambda: setattr(model[1], name, after)))

    return program


def momentum_and_mode() -> Program:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def before(index: int) -> None:
        model[1].momentum = 0.1 if index < 2 else 0.5
        model.train(index < 4)

    return Program(model, before=before)


def rates_of_parts() -> Program:
    model = nn.Sequential(nn.Linear(4, 4), DropPath(), nn.Linear(4, 4), DropPath())

    def before(index: int) -> None:
        for part in model.modules():
            if isinstance(part, DropPath):
                part.rate = 0.1 * index

    return Program(model, before=before)


def class_attribute() -> Program:
    kind = type("Own", (WithClassAttribute,), {"__module__": __name__})
    return Program(kind(), before=late(lambda: setattr(kind, "factor", 2.0)))


def depth() -> Program:
    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers[: self.depth]:
            x = layer(x)
        return x

    model = Net(forward, layers=nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), depth=3)
    return Program(model, before=late(lambda: setattr(model, "depth", 2)))


def checkpoint_flag() -> Program:
    def forward(self: Any, x: Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False) if self.saves_memory else self.layer(x) * 2

    model = Net(forward, saves_memory=True)
    return Program(model, before=late(lambda: setattr(model, "saves_memory", False)))


def criterion_with_closure() -> Program:
    weights = {"w": 1.0}
    return Program(linear(), lambda out, y: F.mse_loss(out, y) * weights["w"], late(lambda: weights.update(w=2.0)))


def criterion_with_variable() -> Program:
    weight = 1.0

    def change() -> None:
        nonlocal weight
        weight = 2.0

    return Program(linear(), lambda out, y: F.mse_loss(out, y) * weight, late(change))


def criterion_with_global() -> Program:
    def change() -> None:
        globals()["WEIGHT"] = 2.0

    return Program(linear(), lambda out, y: F.mse_loss(out, y) * WEIGHT, late(change))


def criterion_with_global_dict() -> Program:
    return Program(linear(), Trainer().by_global, late(lambda: WEIGHTS.update(w=2.0)))


def helper(out: Tensor) -> Any:
    return out * SETTINGS.scale


def criterion_with_helper() -> Program:
    return Program(linear(), lambda out, y: F.mse_loss(helper(out), y), late(lambda: setattr(SETTINGS, "scale", 2.0)))


def criterion_with_default() -> Program:
    weights = {"w": 1.0}

    def criterion(out: Tensor, y: Tensor, weights: Any = weights) -> Any:
        return F.mse_loss(out, y) * weights["w"]

    return Program(linear(), criterion, late(lambda: weights.update(w=2.0)))


def criterion_partial() -> Program:
    weights = {"w": 1.0}

    def criterion(out: Tensor, y: Tensor, weights: Any) -> Any:
        return F.mse_loss(out, y) * weights["w"]

    return Program(linear(), functools.partial(criterion, weights=weights), late(lambda: weights.update(w=2.0)))


def criterion_of_functions() -> Program:
    weights = {"w": 1.0}
    parts: Any = {"main": lambda out, y: F.mse_loss(out, y) * weights["w"]}

    def criterion(out: Tensor, y: Tensor) -> Any:
        return sum(part(out, y) for part in parts.values())

    return Program(linear(), criterion, late(lambda: weights.update(w=2.0)))


def criterion_method() -> Program:
    trainer = Trainer()
    return Program(linear(), trainer.loss, lambda index: setattr(trainer, "epoch", index // 2))


def criterion_of_torch() -> Program:
    criterion = nn.MSELoss()
    return Program(linear(), criterion, late(lambda: setattr(criterion, "reduction", "sum")))


def criterion_with_smoothing() -> Program:
    criterion = nn.CrossEntropyLoss()
    return Program(
        linear(),
        lambda out, y: criterion(out, y.softmax(1)),
        late(lambda: setattr(criterion, "label_smoothing", 0.2)),
    )


def criterion_with_curriculum() -> Program:
    stages = Curriculum()

    def criterion(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out[:, : stages.length()], y[:, : stages.length()])

    return Program(linear(), criterion, lambda index: setattr(stages, "stage", index // 2))


def layer_without_parameters() -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return Program(model, before=late(lambda: model.__setitem__(1, nn.Tanh())))


def layer_that_is_added() -> Program:
    model = nn.Sequential(nn.Linear(4, 4))
    return Program(model, before=late(lambda: model.append(nn.ReLU())))


def forward_of_a_layer() -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return Program(model, before=late(lambda: setattr(model[1], "forward", torch.tanh)))


def forward_of_the_model() -> Program:
    model = linear()
    return Program(model, before=late(lambda: setattr(model, "forward", lambda x: model.layer(x) * 2)))


def hook(register: Callable[[Any], Any]) -> Callable[[], Program]:
    """Return a program with a hook that is registered, and later removed."""

    def program() -> Program:
        model = Net(lambda self, x: self.head(self.layer(x)), head=nn.Linear(4, 4))
        handles: list[Any] = []

        def before(index: int) -> None:
            if index == 2:
                handles.append(register(model))
            if index == 4:
                handles.pop().remove()

        return Program(model, before=before)

    return program


def doubled_gradients(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if gradient is None else gradient * 2 for gradient in inputs)


def table_that_is_replaced() -> Program:
    model = scaled(factor=torch.ones(4))
    return Program(model, before=lambda index: setattr(model, "factor", torch.full((4,), 1.0 + index)))


def table_that_is_written() -> Program:
    table = torch.ones(4)
    return Program(scaled(factor=table), before=late(lambda: table.fill_(2.0)))


def teacher(change: Callable[[Any], object]) -> Callable[[], Program]:
    """Return a program with a teacher in a variable, which is changed."""

    def program() -> Program:
        box = types.SimpleNamespace(teacher=nn.Linear(4, 4).requires_grad_(False))
        return Program(linear(), lambda out, y: F.mse_loss(out, box.teacher(y)), late(lambda: change(box)))

    return program


def average_of_teacher(box: Any) -> None:
    for parameter in box.teacher.parameters():
        parameter.data.mul_(0.9)


# What a first call makes, and later calls read


def left_behind() -> Program:
    def forward(self: Any, x: Tensor) -> Any:
        out = self.layer(x)
        self.penalty = out.square().mean()
        return out

    model: Any = Net(forward)
    return Program(model, lambda out, y: F.mse_loss(out, y) + model.penalty)


def lazy(make: Callable[[Any], Tensor], **attributes: object) -> Callable[[], Program]:
    """Return a program whose model makes a table in its first call."""

    def forward(self: Any, x: Tensor) -> Any:
        if self.table is None:
            self.table = make(self)
        return self.layer(x) * self.table

    return lambda: Program(Net(forward, **(attributes or {"table": None})))


def lazy_buffer() -> Program:
    program = lazy(lambda self: torch.arange(4.0), other=None)()
    program.model.register_buffer("table", None, persistent=False)
    return program


def lazy_of_a_buffer() -> Program:
    program = lazy(lambda self: self.frequencies.cos())()
    program.model.register_buffer("frequencies", torch.arange(4.0))
    return program


def lazy_by_size() -> Program:
    def forward(self: Any, x: Tensor) -> Any:
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(4.0)
        return self.layer(x) * self.tables[len(x)]

    return Program(Net(forward, tables={}))


def lazy_function() -> Program:
    @functools.lru_cache
    def table(size: int) -> Tensor:
        return torch.arange(float(size))

    return Program(Net(lambda self, x: self.layer(x) * table(4)))


def lazy_number() -> Program:
    def forward(self: Any, x: Tensor) -> Any:
        if self.factor is None:
            self.factor = 2.0
        return self.layer(x) * self.factor

    model = Net(forward, factor=None)
    return Program(model, before=late(lambda: setattr(model, "factor", 3.0)))


def hidden_state_in_a_buffer() -> Program:
    def forward(self: Any, x: Tensor) -> Any:
        out = self.layer(x) + self.hidden
        self.hidden = out.detach().mean(0)
        return out

    model = Net(forward)
    model.register_buffer("hidden", torch.zeros(4))
    return Program(model)


def class_as_namespace() -> Program:
    Settings.factor = 1.0
    return Program(
        linear(), lambda out, y: Settings.scaled(F.mse_loss(out, y)), late(lambda: setattr(Settings, "factor", 2.0))
    )


def table_in_a_class() -> Program:
    Settings.tables.clear()

    def criterion(out: Tensor, y: Tensor) -> Any:
        if len(y) not in Settings.tables:
            Settings.tables[len(y)] = torch.arange(4.0)
        return F.mse_loss(out, y * Settings.tables[len(y)])

    return Program(linear(), criterion)


def attribute_of_a_function() -> Program:
    def criterion(out: Tensor, y: Tensor) -> Any:
        function: Any = criterion
        return F.mse_loss(out, y) * function.factor

    setattr(criterion, "factor", 1.0)  # noqa: B010  mypy knows no attributes of functions
    return Program(linear(), criterion, late(lambda: setattr(criterion, "factor", 2.0)))


def tensor_that_is_added() -> Program:
    anchors: list[Tensor] = []
    return Program(
        linear(),
        lambda out, y: F.mse_loss(out, y) + sum(anchors),
        late(lambda: anchors.append(torch.tensor(2.0))),
    )


FOLLOWED: dict[str, Callable[[], Program]] = {
    "the mode of the whole": mode_of_the_whole,
    "the mode of a part": mode_of_a_part,
    "the mode, by assignment": mode_by_assignment,
    "the mode that another layer reads": mode_that_another_layer_reads,
    "the mode of a teacher": mode_of_a_teacher,
    "a number": attribute("factor", 1.0, 2.0),
    "a number in each step": number_in_each_step,
    "a number that is added": number_that_is_added,
    "a number that is deleted": number_that_is_deleted,
    "a number of numpy": attribute("factor", np.float64(1.0), np.float64(2.0)),
    "a flag": attribute("flag", True, False, lambda self, x: self.layer(x) if self.flag else -self.layer(x)),
    "a text": attribute("text", "a", "b", lambda self, x: self.layer(x) * len(self.text.strip("b"))),
    "None": attribute("rate", None, 2.0, lambda self, x: self.layer(x) * (self.rate or 1.0)),
    "an enum": attribute("kind", Kind.ONE, Kind.TWO, lambda self, x: self.layer(x) * self.kind.value),
    "a function": attribute("act", torch.relu, torch.tanh, lambda self, x: self.act(self.layer(x))),
    "a tuple": attribute("pair", (1.0, 1), (2.0, 1), lambda self, x: self.layer(x) * self.pair[0]),
    "a tensor": attribute("factor", torch.tensor(1.0), torch.tensor(2.0)),
    "a text that names an attribute": attribute(
        "which",
        "a",
        "b",
        lambda self, x: self.layer(x) * getattr(self, f"factor_{self.which}"),
        factor_a=1.0,
        factor_b=2.0,
    ),
    "an attribute that a text names": attribute(
        "factor_a", 1.0, 2.0, lambda self, x: self.layer(x) * getattr(self, f"factor_{self.which}"), which="a"
    ),
    "an item of a list": held([1.0], lambda held: held[0], lambda held: held.__setitem__(0, 2.0)),
    "a longer list": held([1], len, lambda held: held.append(1)),
    "an item of a dict": held({"k": 1.0}, lambda held: held["k"], lambda held: held.update(k=2.0)),
    "an item that is added": held({}, lambda held: held.get("k", 1.0), lambda held: held.update(k=2.0)),
    "all items": held({"a": 1.0}, lambda held: sum(held.values()), lambda held: held.update(k=2.0)),
    "an inner item": held({"a": {"b": [1.0]}}, lambda held: held["a"]["b"][0], lambda held: held["a"].update(b=[2.0])),
    "a set": held(set(), lambda held: 2.0 if "k" in held else 1.0, lambda held: held.add("k")),
    "a namespace": held(types.SimpleNamespace(k=1.0), lambda held: held.k, lambda held: setattr(held, "k", 2.0)),
    "an object": held(Config(), lambda held: held.factor, lambda held: setattr(held, "factor", 2.0)),
    "a property": held(Config(), lambda held: held.doubled, lambda held: setattr(held, "factor", 2.0)),
    "slots": held(Slotted(), lambda held: held.factor, lambda held: setattr(held, "factor", 2.0)),
    "a dataclass": held(Data(), lambda held: held.factor, lambda held: setattr(held, "factor", 2.0)),
    "the dict of an object": held(
        Config(), lambda held: sum(vars(held).values()), lambda held: setattr(held, "factor", 2.0)
    ),
    "a deep object": held(
        deep(), lambda held: held.next.next.next.factor, lambda held: setattr(held.next.next.next, "factor", 2.0)
    ),
    "another object": attribute("config", Data(1.0), Data(2.0), lambda self, x: self.layer(x) * self.config.factor),
    "a class attribute": class_attribute,
    "the rate of a dropout": layer_of_torch(nn.Dropout(0.0), "p", 1.0),
    "the rate of a user's dropout": layer_of_torch(Dropout(0.0), "p", 1.0),
    "the eps of a layer": layer_of_torch(nn.LayerNorm(4, elementwise_affine=False), "eps", 10.0),
    "a class": class_as_namespace,
    "a default of an object's class": held(
        Settings(), lambda held: held.factor, lambda held: setattr(held, "factor", 2.0)
    ),
    "an attribute of a function": attribute_of_a_function,
    "a tensor that is added": tensor_that_is_added,
    "a table in a class": table_in_a_class,
    "the slope of a layer": layer_of_torch(nn.LeakyReLU(0.1), "negative_slope", 0.5),
    "the dimension of a softmax": layer_of_torch(nn.Softmax(0), "dim", 1),
    "the form of an activation": layer_of_torch(nn.GELU(), "approximate", "tanh"),
    "the statistics of a norm": layer_of_torch(nn.BatchNorm1d(4).eval(), "track_running_stats", False),
    "the momentum and the mode of a norm": momentum_and_mode,
    "the rates of parts": rates_of_parts,
    "the number of layers": depth,
    "whether to save memory": checkpoint_flag,
    "a dict of a closure": criterion_with_closure,
    "a variable of a closure": criterion_with_variable,
    "a global": criterion_with_global,
    "a global dict": criterion_with_global_dict,
    "a global of a function that it calls": criterion_with_helper,
    "a default": criterion_with_default,
    "a partial": criterion_partial,
    "functions in a dict": criterion_of_functions,
    "the object of a method": criterion_method,
    "the reduction of a loss of torch's": criterion_of_torch,
    "the smoothing of a loss of torch's": criterion_with_smoothing,
    "a curriculum": criterion_with_curriculum,
    "another layer": layer_without_parameters,
    "a further layer": layer_that_is_added,
    "the function of a layer": forward_of_a_layer,
    "the function of the model": forward_of_the_model,
    "a hook": hook(lambda model: model.register_forward_hook(lambda module, args, out: out * 2)),
    "a hook of a layer": hook(lambda model: model.layer.register_forward_hook(lambda module, args, out: out * 2)),
    "a hook of a gradient": hook(lambda model: model.head.register_full_backward_hook(doubled_gradients)),
    "a table that is replaced": table_that_is_replaced,
    "a table that is written": table_that_is_written,
    "another teacher": teacher(lambda box: setattr(box, "teacher", nn.Linear(4, 4).requires_grad_(False))),
    "a copied teacher": teacher(lambda box: setattr(box, "teacher", copy.deepcopy(box.teacher))),
    "an averaged teacher": teacher(average_of_teacher),
    "a teacher that is loaded": teacher(
        lambda box: box.teacher.load_state_dict({"weight": torch.eye(4), "bias": torch.ones(4)})
    ),
    "what a call leaves behind": left_behind,
    "a table": lazy(lambda self: torch.arange(4.0)),
    "a table in a buffer": lazy_buffer,
    "a table of a buffer": lazy_of_a_buffer,
    "tables by size": lazy_by_size,
    "a function's cache": lazy_function,
    "a number that the first call sets": lazy_number,
    "a hidden state in a buffer": hidden_state_in_a_buffer,
}


# What is refused


def counting(weight: Callable[[int], float]) -> Callable[[], Program]:
    """Return a program whose model counts its calls."""

    def forward(self: Any, x: Tensor) -> Any:
        self.calls += 1
        return self.layer(x) * weight(self.calls)

    return lambda: Program(Net(forward, calls=0))


def counting_in_a_list() -> Program:
    seen: list[int] = []

    def criterion(out: Tensor, y: Tensor) -> Tensor:
        seen.append(1)
        return F.mse_loss(out, y) * len(seen)

    return Program(linear(), criterion)


def counting_in_a_class() -> Program:
    Settings.calls = 0

    def criterion(out: Tensor, y: Tensor) -> Tensor:
        Settings.calls += 1
        return F.mse_loss(out, y) * Settings.calls

    return Program(linear(), criterion)


def drawing(draw: Callable[[], float]) -> Callable[[], Program]:
    return lambda: Program(linear(), lambda out, y: F.mse_loss(out, y) * draw())


def own_generator() -> Program:
    return drawing(random.Random(0).random)()


def iterating(values: Callable[[], Any]) -> Callable[[], Program]:
    def program() -> Program:
        iterator = values()
        return Program(linear(), lambda out, y: F.mse_loss(out, y) * next(iterator))

    return program


def hidden(first: Any, read: Callable[[Any], Tensor], pack: Callable[[Any, Tensor], Any]) -> Callable[[], Program]:
    """Return a program whose model keeps the last output."""

    def forward(self: Any, x: Tensor) -> Any:
        out = self.layer(x) + read(self.hidden)
        self.hidden = pack(self.hidden, out.detach().mean(0))
        return out

    return lambda: Program(Net(forward, hidden=copy.deepcopy(first)))


def put(container: Any, key: Any, value: Tensor) -> Any:
    container[key] = value
    return container


def appended(container: Any, value: Tensor) -> Any:
    container.append(value)
    return container


def first_weight() -> Program:
    def forward(self: Any, x: Tensor) -> Any:
        if self.start is None:
            self.start = self.layer.weight.detach().clone()
        return self.layer(x) + (self.layer.weight - self.start).square().sum()

    return Program(Net(forward, start=None))


def first_batch() -> Program:
    def forward(self: Any, x: Tensor) -> Any:
        if self.first is None:
            self.first = x
        return self.layer(x - self.first)

    return Program(Net(forward, first=None))


def some_calls_before() -> Program:
    def forward(self: Any, x: Tensor) -> Any:
        oldest = self.kept[0]
        self.kept = [*self.kept[1:], x.detach().mean(0)]
        return self.layer(x if oldest is None else x + oldest)

    return Program(Net(forward, kept=[None, None, None]))


def table_that_counts() -> Program:
    def forward(self: Any, x: Tensor) -> Any:
        if self.table is None:
            self.table = torch.zeros(())
        self.table += 1
        return self.layer(x) * self.table

    return Program(Net(forward, table=None))


class Center(nn.Module):
    """A criterion with a running center."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.center: Tensor
        self.register_buffer("center", torch.zeros(4))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(out - self.center, y)
        mean = out.detach().mean(0)
        if self.how == "in place":
            self.center.mul_(0.9).add_(mean, alpha=0.1)
        else:
            self.center = 0.9 * self.center + 0.1 * mean
        return loss


def memory_bank() -> Program:
    def criterion(out: Tensor, y: Tensor) -> Any:
        bank.rows[bank.next : bank.next + 8] = out.detach()
        bank.next = (bank.next + 8) % 16
        return F.mse_loss(out, y) + bank.rows.mean()

    bank = types.SimpleNamespace(rows=torch.zeros(16, 4), next=0)
    return Program(linear(), criterion)


def teacher_in_training() -> Program:
    teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    return Program(linear(), lambda out, y: F.mse_loss(out, teacher(y)))


def changing_places(width: int) -> Callable[[], Program]:
    def forward(self: Any, x: Tensor) -> Any:
        self.one, self.other = self.other, self.one
        return self.layer(x) * self.one.sum()

    return lambda: Program(Net(forward, one=torch.ones(4), other=torch.ones(width)))


ZEROS = torch.zeros(4)
_FIX = "register_buffer"
REFUSED: dict[str, tuple[Callable[[], Program], str]] = {
    "a count": (counting(float), rf"Python changes model\.calls \(from \d to \d\).*{_FIX}"),
    "a count that ends": (counting(lambda calls: min(calls / 4, 1.0)), r"model\.calls"),
    "a count in a list": (counting_in_a_list, r"criterion\.seen\[\d\] \(from nothing to 1\)"),
    "a count in a class": (counting_in_a_class, r"Settings\.calls \(from \d to \d\)"),
    "Python's generator": (drawing(random.random), "compute the same at every call"),
    "numpy's generator": (drawing(np.random.rand), "compute the same at every call"),
    "a generator of its own": (own_generator, "what no attribute shows, such as an iterator"),
    "an iterator": (iterating(lambda: itertools.cycle([1.0, 2.0])), "what no attribute shows, such as an iterator"),
    "a hidden state": (hidden(ZEROS, lambda held: held, lambda _, new: new), r"not replace .* model\.hidden"),
    "a hidden state in place": (
        hidden(ZEROS, lambda held: held, lambda held, new: held.copy_(new)),
        r"writes into model\.hidden",
    ),
    "a hidden state in a dict": (
        hidden({"a": ZEROS}, lambda held: held["a"], lambda held, new: put(held, "a", new)),
        r"model\.hidden\['a'\]",
    ),
    "a hidden state in a list": (
        hidden([ZEROS], lambda held: held[0], lambda held, new: put(held, 0, new)),
        r"model\.hidden\[0\]",
    ),
    "a hidden state in a tuple": (
        hidden((ZEROS,), lambda held: held[0], lambda _, new: (new,)),
        "not keep a tensor in Python",
    ),
    "a hidden state in a deque": (
        hidden(collections.deque([ZEROS], maxlen=1), lambda held: held[0], appended),
        r"model\.hidden\[0\]",
    ),
    "a hidden state that is None": (
        hidden(None, lambda held: 0.0 if held is None else held, lambda _, new: new),  # type: ignore[arg-type,return-value]
        r"model\.hidden",
    ),
    "the first weight": (first_weight, r"not keep a tensor in Python .* model\.start"),
    "the first batch": (first_batch, r"not keep a tensor in Python .* model\.first"),
    "a table that counts": (table_that_counts, r"writes into model\.table"),
    "a criterion's center": (lambda: Program(linear(), Center("replaced")), r"not replace .* criterion\.center"),
    "a criterion's center in place": (lambda: Program(linear(), Center("in place")), r"writes into criterion\.center"),
    "a memory bank": (memory_bank, r"criterion\.bank\.(next|rows)"),
    "a teacher in training": (teacher_in_training, r"criterion\.teacher\.1\..*eval mode"),
    "tensors that change places": (changing_places(4), r"model\.(one|other)"),
    "tensors of two shapes that change places": (changing_places(3), r"model\.(one|other)"),
}


# What stays as in the first call


def environment_variable() -> Program:
    return Program(
        linear(),
        lambda out, y: F.mse_loss(out, y) * float(os.environ[VARIABLE]),
        late(lambda: os.environ.update({VARIABLE: "2"})),
    )


CONSTANT: dict[str, Callable[[], Program]] = {
    "an environment variable": environment_variable,
    "a defaultdict": held(
        collections.defaultdict(float), lambda held: 1.0 + held["k"], lambda held: held.update(k=1.0)
    ),
    "an array of numpy": held(np.ones(2), lambda held: float(held[0]), lambda held: held.fill(2.0)),
    "an item of a long list": held([1.0] * 300, lambda held: held[299], lambda held: held.__setitem__(299, 2.0)),
    "a batch of some calls before": some_calls_before,
    "a later count": counting(lambda calls: 1.0 if calls < 4 else 2.0),
    "an iterator that goes on as it began": iterating(lambda: itertools.chain([1.0] * 3, itertools.repeat(2.0))),
}


@pytest.fixture(autouse=True)
def first_values(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that puts back what programs change outside of themselves; so it is after a test."""
    variable = VARIABLE

    def put_back() -> None:
        monkeypatch.setitem(globals(), "WEIGHT", 1.0)
        monkeypatch.setitem(WEIGHTS, "w", 1.0)
        monkeypatch.setattr(SETTINGS, "scale", 1.0)
        monkeypatch.setenv(variable, "1")

    put_back()
    return put_back


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(STEPS)]


def losses_of(make: Callable[[], Program], *, jitted: bool, policy: str | None = None, **options: Any) -> list[Tensor]:
    """Train a few steps; return the losses, and the parameters at the end."""
    torch.manual_seed(0)
    model, criterion, before = make()
    step = make_train_step(module_loss(model, criterion), SGD, policy=policy)
    run, state, found = jit(step, backend="eager", **options) if jitted else step, step.init(), []
    for index, batch in enumerate(batches()):
        before(index)
        state, metrics = run(state, batch)
        found.append(metrics.loss)
    return [*found, *state.params.tree().values()]


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_change_is_followed(name: str, first_values: Callable[[], None]) -> None:
    expected = losses_of(FOLLOWED[name], jitted=False)
    first_values()
    assert_same(losses_of(FOLLOWED[name], jitted=True), expected)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("policy", [None, "float16"])
def test_a_table_of_a_buffer_that_no_step_changes_is_kept(policy: str | None, donate: bool) -> None:
    expected = losses_of(lazy_of_a_buffer, jitted=False, policy=policy)
    assert_same(losses_of(lazy_of_a_buffer, jitted=True, policy=policy, donate=donate), expected)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(RuntimeError, match=rf"jit: step must .*{message}"):
        losses_of(make, jitted=True)


@pytest.mark.parametrize("name", CONSTANT)
def test_what_lies_deeper_stays_as_in_the_first_call(name: str, first_values: Callable[[], None]) -> None:
    found = losses_of(CONSTANT[name], jitted=True)
    first_values()
    followed = losses_of(CONSTANT[name], jitted=False)
    assert_same(found[: LATE - 1], followed[: LATE - 1])
    assert not torch.equal(found[STEPS - 1], followed[STEPS - 1])


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_draw_on_which_little_depends_is_refused_if_no_other_thread_may_have_drawn(
    draw: Callable[[], float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = drawing(lambda: 2.0 if draw() < 1e-12 else 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
        with pytest.raises(RuntimeError, match=r"jit: step must not draw from .*random.*draw from torch's generator"):
            losses_of(make, jitted=True)
        caplog.clear()
        patch.setattr(threading, "enumerate", lambda: [threading.current_thread(), threading.Thread()])
        losses_of(make, jitted=True)
    assert "another thread, or the step, drew from" in caplog.text
