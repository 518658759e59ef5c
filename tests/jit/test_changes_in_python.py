"""What a loop changes in Python between steps: an eager step computes with it, and a jitted one must, or say why not.

Each program is a model, a criterion and what happens before each of six steps. `FOLLOWED` gives the eager step's
numbers, `REFUSED` is an error that names the place, and `CONSTANT` keeps the value of the first call, as the contract
says.
"""

from __future__ import annotations

import copy
import enum
import functools
import itertools
import os
import random
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcamp import ScalerConfig, ScalerState, chain, jit, make_train_step, module_loss, presets, rules
from tests.support.helpers import assert_same
from tests.support.steps import SGD

STEPS = 6
#: From this step on the changed value is there.
LATE = 3
WEIGHT = 1.0
THIS_MODULE: Any = sys.modules[__name__]
SETTINGS = types.SimpleNamespace(scale=1.0)
VARIABLE = "TEST_OF_CHANGES_IN_PYTHON"
Forward = Callable[[Any, Tensor], Any]


class Program(NamedTuple):
    model: nn.Module
    criterion: Any = F.mse_loss
    before: Callable[[int], object] = lambda index: None
    """Called with the number of the step before it."""


Make = Callable[[], Program]


def late(change: Callable[[], object]) -> Callable[[int], object]:
    """Return what happens before a step: the change, once."""
    return lambda index: change() if index == LATE else None


class Net(nn.Module):
    """A linear layer, with attributes and a forward pass of the program's."""

    factor = 1.0

    def __init__(self, forward: Forward, **attributes: object) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.bend = torch.sin
        self.computes = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.computes(self, x)


def linear() -> Net:
    return Net(lambda self, x: self.layer(x))


def scaled(self: Any, x: Tensor) -> Any:
    return self.layer(x) * self.factor


# What is followed


def layers(*more: nn.Module, before: Callable[[Any, int], object]) -> Make:
    """Return a program of a linear layer and more, and of what happens to this sequence before a step."""

    def program() -> Program:
        model = nn.Sequential(nn.Linear(4, 4), *copy.deepcopy(more))
        return Program(model, before=lambda index: before(model, index))

    return program


def changed(change: Callable[[Any], object], forward: Forward = scaled, **attributes: object) -> Make:
    """Return a program whose model has these attributes, of which one is changed late."""

    def program() -> Program:
        model = Net(forward, **copy.deepcopy(attributes))
        return Program(model, before=late(lambda: change(model)))

    return program


def unchanged(forward: Forward, **attributes: object) -> Make:
    return lambda: Program(Net(forward, **copy.deepcopy(attributes)))


def put(container: Any, key: Any, value: Any) -> Any:
    container[key] = value
    return container


def attribute(before: object, after: object, forward: Forward = scaled) -> Make:
    """Return a program of which an attribute is replaced."""
    return changed(lambda model: setattr(model, "factor", after), forward, factor=before)


def held(value: Any, read: Callable[[Any], Any], change: Callable[[Any], object]) -> Make:
    """Return a program with an object in an attribute of the model that is changed in place."""
    return changed(lambda model: change(model.held), lambda self, x: self.layer(x) * read(self.held), held=value)


def object_of_a_closure() -> Program:
    box = types.SimpleNamespace(value=1.0)
    return Program(linear(), lambda out, y: F.mse_loss(out, y) * box.value, late(lambda: setattr(box, "value", 2.0)))


def teacher(change: Callable[[Any], object], *more: nn.Module) -> Make:
    """Return a program with a teacher in a variable, which is changed."""

    def program() -> Program:
        layers = nn.Sequential(nn.Linear(4, 4), *copy.deepcopy(more)).requires_grad_(False)
        box = types.SimpleNamespace(teacher=layers)
        return Program(linear(), lambda out, y: F.mse_loss(out, box.teacher(y)), late(lambda: change(box)))

    return program


class Kind(enum.Enum):
    ONE = 1.0
    TWO = 2.0


class Config:
    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    @property
    def doubled(self) -> float:
        return 2 * self.factor


class Described:
    """An attribute in another one, whose name no code has."""

    def __set_name__(self, _: Any, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, holder: Any, _: Any = None) -> Any:
        return getattr(holder, self.name)

    def __set__(self, holder: Any, value: float) -> None:
        setattr(holder, self.name, value)


class Loss:
    scale = Described()

    class Options:
        weight = 1.0

    def __init__(self) -> None:
        self.scale = 1.0


class Items(dict[str, float]):
    """Options by name or as attributes, as many projects write them. One that is not there raises KeyError."""

    __getattr__ = dict.__getitem__

    def __deepcopy__(self, _: Any) -> Items:
        return Items(self)


class Trainer:
    epoch = 0

    def weight(self) -> float:
        return 1.0 if self.epoch < 2 else 0.5

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) * self.weight()


def class_attribute() -> Program:
    base = type("Base", (Net,), {"__module__": __name__})
    kind = type("Derived", (base,), {"__module__": __name__})
    return Program(kind(scaled), before=late(lambda: setattr(base, "factor", 2.0)))


def variable_of_the_criterion() -> Program:
    weight = 1.0

    def change() -> None:
        nonlocal weight
        weight = 2.0

    return Program(linear(), lambda out, y: F.mse_loss(out, y) * weight, late(change))


def global_of_the_criterion() -> Program:
    return Program(linear(), lambda out, y: F.mse_loss(out, y) * WEIGHT, late(lambda: globals().update(WEIGHT=2.0)))


def variable_of_a_module() -> Program:
    def criterion(out: Tensor, y: Tensor) -> Any:
        return THIS_MODULE.WEIGHT * F.mse_loss(out, y)

    return Program(linear(), criterion, late(lambda: globals().update(WEIGHT=2.0)))


class Weighing:
    @staticmethod
    def weighed(out: Tensor) -> Tensor:
        return out * WEIGHT


def global_of_a_class() -> Program:
    model = Net(lambda self, x: self.kind.weighed(self.layer(x)), kind=Weighing)
    return Program(model, before=late(lambda: globals().update(WEIGHT=2.0)))


def helper(out: Tensor) -> Any:
    return out * SETTINGS.scale


def criterion_with_helper() -> Program:
    return Program(linear(), lambda out, y: F.mse_loss(helper(out), y), late(lambda: setattr(SETTINGS, "scale", 2.0)))


def criterion_partial() -> Program:
    weights = {"w": 1.0}

    def criterion(out: Tensor, y: Tensor, weights: Any) -> Any:
        return F.mse_loss(out, y) * weights["w"]

    return Program(linear(), functools.partial(criterion, weights=weights), late(lambda: weights.update(w=2.0)))


def criterion_method() -> Program:
    trainer = Trainer()
    return Program(linear(), trainer.loss, lambda index: setattr(trainer, "epoch", index // 2))


def criterion_of_a_nested_class() -> Program:
    return Program(
        linear(),
        lambda out, y: F.mse_loss(out, y) * Loss.Options.weight,
        late(lambda: setattr(Loss.Options, "weight", 2.0)),
    )


def criterion_of_torch() -> Program:
    used = nn.MSELoss()
    return Program(linear(), used, late(lambda: setattr(used, "reduction", "sum")))


def other_padding(model: Any, index: int) -> None:
    model[2].padding_mode = "circular" if index >= LATE else "zeros"


def hook(register: Callable[[Any], Any]) -> Make:
    """Return a program with a hook that is registered, and later removed."""
    handles: list[Any] = []

    def before(model: Any, index: int) -> None:
        if index == 2:
            handles.append(register(model))
        if index == 4:
            handles.pop().remove()

    return layers(nn.Linear(4, 4), before=before)


def doubled(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return outputs * 2


# What a first call makes, and later calls read


def lazy(make: Callable[[Any], Any], change: Callable[[Any], object] = lambda model: None) -> Make:
    """Return a program whose model makes something in its first call."""

    def forward(self: Any, x: Tensor) -> Any:
        if self.made is None:
            self.made = make(self)
        return self.layer(x) * self.made

    return changed(change, forward, made=None)


def lazy_buffer() -> Program:
    program = lazy(lambda self: torch.arange(4.0))()
    del program.model.made
    program.model.register_buffer("made", None, persistent=False)
    return program


def left_behind() -> Program:
    def forward(self: Any, x: Tensor) -> Any:
        out = self.layer(x)
        self.penalty = out.square().mean()
        return out

    model: Any = Net(forward)
    return Program(model, lambda out, y: F.mse_loss(out, y) + model.penalty)


def lazy_by_size(self: Any, x: Tensor) -> Any:
    if len(x) not in self.tables:
        self.tables[len(x)] = torch.arange(4.0)
    return self.layer(x) * self.tables[len(x)]


def lazy_function() -> Program:
    @functools.lru_cache
    def table(size: int) -> Tensor:
        return torch.arange(float(size))

    return Program(Net(lambda self, x: self.layer(x) * table(4)))


def keeps_output(self: Any, x: Tensor) -> Any:
    out = self.layer(x) + self.hidden
    self.hidden = out.detach().mean(0)
    return out


class Weighted:
    """A term of a loss with an object as a default, in a tuple that no other object has."""

    def __init__(self) -> None:
        self.settings = types.SimpleNamespace(scale=1.0)

    def term(self) -> Callable[[Tensor, Tensor], Tensor]:
        def weighted(out: Tensor, y: Tensor, *, settings: Any = self.settings) -> Tensor:
            error: Tensor = F.mse_loss(out, y) * settings.scale
            return error

        return weighted


def many_terms() -> Program:
    weights = [Weighted() for _ in range(12)]
    terms = [weight.term() for weight in weights]
    return Program(
        linear(),
        lambda out, y: torch.stack([term(out, y) for term in terms]).sum(),
        late(lambda: setattr(weights[-1].settings, "scale", 2.0)),
    )


def with_options() -> Program:
    class Configured(Net):
        options = Items(scale=2.0)

    return Program(Configured(lambda self, x: self.layer(x) * self.options.scale))


def with_hook_of_torch() -> Program:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)))
    return Program(model, before=late(model.eval))


FOLLOWED: dict[str, Make] = {
    "one of many terms": many_terms,
    "options as a class variable": with_options,
    "the mode that a hook of torch's reads": with_hook_of_torch,
    "the padding of a convolution": layers(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 1, 3, padding="same"), nn.Flatten(), before=other_padding
    ),
    "the mode of the whole": layers(nn.Dropout(1.0), before=lambda model, index: model.train(index % 2 == 0)),
    "the mode of a part": layers(nn.BatchNorm1d(4), before=lambda model, index: model[1].train(index < LATE)),
    "the mode that another layer reads": changed(
        lambda model: model.layer.eval(), lambda self, x: self.layer(x) * (2 - self.layer.training)
    ),
    "the mode of a teacher": teacher(lambda box: box.teacher.eval(), nn.Dropout(1.0)),
    "an attribute that is named hooks": changed(
        lambda model: setattr(model, "hooks", 2.0), lambda self, x: self.layer(x) * self.hooks, hooks=1.0
    ),
    "the mode of a scripted layer": layers(
        torch.jit.script(nn.Sequential(nn.Dropout(1.0))), before=lambda model, index: model.train(index % 2 == 0)
    ),
    "an enum": attribute(Kind.ONE, Kind.TWO, lambda self, x: self.layer(x) * self.factor.value),
    "a function": attribute(torch.relu, torch.tanh, lambda self, x: self.factor(self.layer(x))),
    "a tensor": attribute(torch.tensor(1.0), torch.tensor(2.0)),
    "a text that names an attribute": attribute(
        "layer", "bend", lambda self, x: self.layer(x) + getattr(self, self.factor)(x)
    ),
    "a tensor that is added": held(
        [torch.ones(())], lambda held: sum(held), lambda held: held.append(torch.tensor(2.0))
    ),
    "an inner item": held({"a": {"b": [1.0]}}, lambda held: held["a"]["b"][0], lambda held: held["a"].update(b=[2.0])),
    "an item with a default": held(defaultdict(float), lambda held: held["a"], lambda held: held.update(a=2.0)),
    "an item with a default that is gone": held(
        defaultdict(float, a=2.0), lambda held: held["a"], lambda held: held.pop("a")
    ),
    "a property": held(Config(), lambda held: held.doubled, lambda held: setattr(held, "factor", 2.0)),
    "a descriptor": held(Loss(), lambda held: held.scale, lambda held: setattr(held, "scale", 2.0)),
    "a class attribute": class_attribute,
    "an attribute of a nested class": criterion_of_a_nested_class,
    "a class in an attribute": held(Loss.Options, lambda held: held.weight, lambda held: setattr(held, "weight", 2.0)),
    "the rate of a dropout": layers(nn.Dropout(0.0), before=lambda model, i: setattr(model[1], "p", float(i >= LATE))),
    "an object of a closure": object_of_a_closure,
    "a variable of a closure": variable_of_the_criterion,
    "a global": global_of_the_criterion,
    "a variable of a module": variable_of_a_module,
    "a global of a class in an attribute": global_of_a_class,
    "a global of a function that it calls": criterion_with_helper,
    "a partial": criterion_partial,
    "items of a set": held({1}, lambda held: sum(held), lambda held: (held.add(2), held.remove(1))),
    "an object whose attributes are items": attribute(
        Items(w=1.0), Items(w=2.0), lambda self, x: self.layer(x) * self.factor.w
    ),
    "the object of a method": criterion_method,
    "the reduction of a loss of torch's": criterion_of_torch,
    "another layer": layers(nn.ReLU(), before=lambda model, index: put(model, 1, (nn.ReLU, nn.Tanh)[index >= LATE]())),
    "the function of the model": changed(lambda model: setattr(model, "forward", lambda x: model.layer(x) * 2)),
    "a hook": hook(lambda model: model.register_forward_hook(doubled)),
    "a layer in an empty list": changed(
        lambda model: model.more.append(nn.Tanh()),
        lambda self, x: functools.reduce(lambda out, layer: layer(out), self.more, self.layer(x)),
        more=nn.ModuleList(),
    ),
    "a hook of a layer in an empty list": changed(
        lambda model: model.more.append(nn.Tanh()) or model.more[0].register_forward_hook(doubled),
        lambda self, x: functools.reduce(lambda out, layer: layer(out), self.more, self.layer(x)),
        more=nn.ModuleList(),
    ),
    "another teacher": teacher(lambda box: setattr(box, "teacher", nn.Linear(4, 4).requires_grad_(False))),
    "what a call leaves behind": left_behind,
    "a table": lazy(lambda self: torch.arange(4.0)),
    "a table in a buffer": lazy_buffer,
    "tables by size": unchanged(lazy_by_size, tables={}),
    "a function's cache": lazy_function,
    "a cache that is emptied": lazy(lambda self: self.factor, lambda model: vars(model).update(factor=3.0, made=None)),
    "a hidden state in a buffer": unchanged(keeps_output, hidden=nn.Buffer(torch.zeros(4))),
}


# What is refused


def counting(weight: Callable[[int], Any]) -> Make:
    """Return a program whose model counts its calls."""

    def forward(self: Any, x: Tensor) -> Any:
        self.calls += 1
        return self.layer(x) * weight(self.calls)

    return unchanged(forward, calls=0)


def counting_in_a_list() -> Program:
    seen: list[int] = []

    def criterion(out: Tensor, y: Tensor) -> Tensor:
        seen.append(1)
        return F.mse_loss(out, y) * len(seen)

    return Program(linear(), criterion)


def drawing(draw: Callable[[], float]) -> Make:
    return lambda: Program(linear(), lambda out, y: F.mse_loss(out, y) * draw())


def iterating(values: Callable[[], Any]) -> Make:
    def program() -> Program:
        iterator = values()
        return Program(linear(), lambda out, y: F.mse_loss(out, y) * next(iterator))

    return program


def keeps_the_first_batch(self: Any, x: Tensor) -> Any:
    if self.first is None:
        self.first = x
    return self.layer(x - self.first[0])


class Center(nn.Module):
    """A criterion with a running center."""

    def __init__(self) -> None:
        super().__init__()
        self.center: Tensor = nn.Buffer(torch.zeros(4))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(out - self.center, y)
        self.center.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return loss


def memory_bank() -> Program:
    def criterion(out: Tensor, y: Tensor) -> Any:
        bank.rows[bank.next : bank.next + 8] = out.detach()
        bank.next = (bank.next + 8) % 16
        return F.mse_loss(out, y) + bank.rows.mean()

    bank = types.SimpleNamespace(rows=torch.zeros(16, 4), next=0)
    return Program(linear(), criterion)


def momentum_encoder(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        self.slow.weight.mul_(0.9).add_(self.layer.weight, alpha=0.1)
    return self.layer(x) + self.slow(x)


def teacher_in_training() -> Program:
    norm = nn.BatchNorm1d(4).requires_grad_(False)
    return Program(linear(), lambda out, y: F.mse_loss(out, norm(y)))


def changing_places(self: Any, x: Tensor) -> Any:
    self.one, self.other = self.other, self.one
    return self.layer(x) * self.one.sum()


def filled_from_the_first_batch() -> Program:
    def forward(self: Any, x: Tensor) -> Any:
        if not self.is_ready:
            self.mean.copy_(x.detach().mean(0))
            self.is_ready = True
        return self.layer(x - self.mean)

    model = Net(forward, is_ready=False)
    model.register_buffer("mean", torch.zeros(4))
    return Program(model)


def layer_made_late(self: Any, x: Tensor) -> Any:
    if not hasattr(self, "last"):
        self.last = nn.Linear(4, 4)
    return self.last(self.layer(x))


PLACES = r"model\.(one|other)"
REFUSED: dict[str, tuple[Make, str]] = {
    "a count": (
        # contract: "a count, an iterator or a generator of random numbers on which the results depend is an error"
        counting(float),
        r"Python changes model\.calls \(from \d to \d\).*register_buffer",
    ),
    "a count in a list": (counting_in_a_list, r"criterion\.seen\[\d\] \(from nothing to 1\)"),
    "a generator of the model": (
        unchanged(lambda self, x: self.layer(x) * (1 + (self.draws.random() < 0.01)), draws=random.Random(0)),
        "not draw from a Random",
    ),
    "numpy's of the model": (
        unchanged(lambda self, x: self.layer(x) * (1 + (self.draws.random() < 0.01)), draws=np.random.default_rng(0)),
        "not draw from a Generator",
    ),
    "a buffer filled once": (
        # contract: "and so is a buffer that only the first run fills"
        filled_from_the_first_batch,
        r"change the same parts of its state .*model\.is_ready \(from False to True\).*before init",
    ),
    "an iterator": (iterating(lambda: itertools.cycle([1.0, 2.0])), "what no attribute shows, such as an iterator"),
    "a hidden state": (
        # contract: "A tensor that it reads is not replaced by it"
        # contract: "a step that replaces or writes tensors in Python"
        unchanged(keeps_output, hidden=torch.zeros(4)),
        r"not replace .* model\.hidden",
    ),
    "the first batch": (
        unchanged(keeps_the_first_batch, first=None),
        r"read tensors with values only, .*register_buffer",
    ),
    "a criterion's center": (lambda: Program(linear(), Center()), r"writes into criterion\.center"),
    "a memory bank": (memory_bank, r"criterion\.bank\.(next|rows)"),
    "a momentum encoder": (
        unchanged(momentum_encoder, slow=nn.Linear(4, 4).requires_grad_(False)),
        r"writes into model\.slow\.weight.*register_buffer",
    ),
    "a teacher in training": (teacher_in_training, r"criterion\.norm\..*eval mode"),
    "tensors that change places": (
        unchanged(changing_places, one=torch.ones(4), other=torch.zeros(4)),
        PLACES,
    ),
}


# What stays as in the first call


def environment_variable() -> Program:
    return Program(
        linear(),
        lambda out, y: F.mse_loss(out, y) * float(os.environ[VARIABLE]),
        late(lambda: os.environ.update({VARIABLE: "2"})),
    )


CONSTANT: dict[str, Make] = {
    "an environment variable": environment_variable,
    "an array of numpy": held(np.ones(2), lambda held: float(held[0]), lambda held: held.fill(2.0)),
    "a later count": counting(lambda calls: 1.0 if calls < 4 else 2.0),
}


@pytest.fixture(autouse=True)
def first_values(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that puts back what programs change outside of themselves; so it is after a test."""

    def put_back() -> None:
        monkeypatch.setitem(globals(), "WEIGHT", 1.0)
        monkeypatch.setattr(SETTINGS, "scale", 1.0)
        monkeypatch.setattr(Loss.Options, "weight", 1.0)
        monkeypatch.setenv(VARIABLE, "1")

    put_back()
    return put_back


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(STEPS)]


class Caller:
    """Has a step in a list of dicts, as a trainer may."""

    def __init__(self, step: Any) -> None:
        self.parts = [{"step": step}]

    def update(self, state: Any, batch: Any) -> Any:
        return self.parts[0]["step"](state, batch)


WHERE: dict[str, Callable[[Any], Any]] = {
    "itself": lambda step: step,
    "a function": lambda step: lambda state, batch: step(state, batch),
    "a method": lambda step: Caller(step).update,
}


def losses_of(make: Make, *, jitted: bool, where: str = "itself") -> list[Tensor]:
    """Train a few steps; return the losses, and the parameters at the end."""
    torch.manual_seed(0)
    model, criterion, before = make()
    step = make_train_step(module_loss(model, criterion), SGD)
    function = WHERE[where](step)
    run, state, found = jit(function, backend="eager") if jitted else function, step.init(), []
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


@pytest.mark.parametrize("where", ["a function", "a method"])
@pytest.mark.parametrize("name", ["the mode that another layer reads", "an inner item", "another teacher"])
def test_a_change_in_a_step_that_something_calls_is_followed(name: str, where: str) -> None:
    expected = losses_of(FOLLOWED[name], jitted=False)
    assert_same(losses_of(FOLLOWED[name], jitted=True, where=where), expected)


class CachedTable(Net):
    @functools.lru_cache  # noqa: B019
    def table(self, size: int) -> Tensor:
        return torch.arange(float(size))


def test_a_cache_on_a_method_keeps_no_tensor_of_a_trace() -> None:
    model = CachedTable(lambda self, x: self.layer(x) * self.table(4))
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    jit(step, backend="eager")(step.init(), batches()[0])
    assert model.table(4).tolist() == [0, 1, 2, 3]


def test_a_layer_of_the_first_forward_pass_is_refused_as_by_the_eager_step() -> None:
    for jitted in (False, True):
        with pytest.raises(ValueError, match="no trainable parameter, which no step would train, and a forward pass"):
            losses_of(unchanged(layer_made_late), jitted=jitted)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(RuntimeError, match=rf"jit: step must .*{message}"):
        losses_of(make, jitted=True)


COUNTS = {
    "loss": r"loss\.of_loss",
    "weight": r"weight\.of_weight",
    "part": r"optimizer\[0\]\.of_part",
    "rule": r"rule\.outcome\.of_rule",
    "caller": r"step\.of_caller",
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_of_any_function_of_a_step_is_refused_by_name(name: str) -> None:
    of_loss, of_weight, of_part, of_rule, of_caller = [1], [1], [1], [1], [1]

    def loss(params: Any, batch: Tensor) -> Tensor:
        of_loss[0] += name == "loss"
        weighted: Tensor = (params["w"] * batch).sum() * of_loss[0]
        return weighted

    def weight(batch: Tensor) -> float:
        of_weight[0] += name == "weight"
        return 1.0 + of_weight[0]

    def part(update: Any) -> Any:
        of_part[0] += name == "part"
        gradients = {key: gradient * of_part[0] for key, gradient in update.gradients.items()}
        return update._replace(gradients=gradients)

    class Own(rules.Rule):
        def outcome(self, state: ScalerState, config: ScalerConfig) -> rules.Outcome:
            of_rule[0] += name == "rule"
            outcome = presets.torch().rule.outcome(state, config)
            return outcome._replace(scale=outcome.scale * of_rule[0])

    def caller(state: Any, batch: Tensor) -> Any:
        of_caller[0] += 1
        return step(step(state, batch)[0] if of_caller[0] % 2 else state, batch)

    step = make_train_step(loss, chain(part, SGD), ScalerConfig(rule=Own()), accumulate=2, weight=weight)
    with pytest.raises(RuntimeError, match=rf"step must .*{COUNTS[name]}\[0\] \(from "):
        jit(caller if name == "caller" else step, backend="eager")(step.init({"w": torch.ones(2)}), torch.ones(2, 2))


@pytest.mark.parametrize("name", CONSTANT)
def test_what_lies_deeper_stays_as_in_the_first_call(name: str, first_values: Callable[[], None]) -> None:
    found = losses_of(CONSTANT[name], jitted=True)
    first_values()
    followed = losses_of(CONSTANT[name], jitted=False)
    assert_same(found[: LATE - 1], followed[: LATE - 1])
    assert not torch.equal(found[STEPS - 1], followed[STEPS - 1])


DRAWS = pytest.mark.parametrize("draw", [random.random, np.random.rand])


@DRAWS
def test_a_draw_on_which_little_depends_is_refused(draw: Callable[[], float]) -> None:
    make = drawing(lambda: 2.0 if draw() < 1e-12 else 1.0)
    with pytest.raises(RuntimeError, match=r"jit: step must not draw from .*random.*draw from torch's generator"):
        losses_of(make, jitted=True)


@DRAWS
def test_a_draw_in_one_run_may_be_that_of_another_thread(draw: Callable[[], float]) -> None:
    def program() -> Program:
        draws = iter([draw])

        def criterion(out: Tensor, y: Tensor) -> Tensor:
            for draw_once in draws:
                draw_once()
            return F.mse_loss(out, y)

        return Program(linear(), criterion)

    assert_same(losses_of(program, jitted=True), losses_of(program, jitted=False))
