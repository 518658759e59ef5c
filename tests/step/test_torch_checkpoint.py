"""A run changes hands between a torch loop and a step, and within a run the learning rate and the parameters change.

The oracle is one torch loop that is never interrupted: parameters, buffers, optimizer and scaler must be its bits.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from funcamp import ScalerConfig, TrainState, TrainStep, by_group, make_train_step, stateless
from tests.support.helpers import assert_same
from tests.support.models import Task, cnn, mlp, tied
from tests.support.steps import build, train
from tests.support.torch_loop import AmpLoop

optim = torch.optim
CONFIG = ScalerConfig(init_scale=2.0**20, growth_interval=3)
CASES: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD-momentum": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "SGD": (optim.SGD, {"lr": 0.05}),
    "SGD-dampening": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}),
    "Adam": (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "Adagrad": (optim.Adagrad, {"lr": 0.01}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "Adamax": (optim.Adamax, {"lr": 0.01}),
    "Adadelta": (optim.Adadelta, {"lr": 0.1}),
    "Rprop": (optim.Rprop, {"lr": 0.01}),
}
FLAT = pytest.mark.parametrize("flat", [True, False], ids=["flat", "dict"])


class Loop(AmpLoop):
    """torch's loop, which is saved and loaded."""

    def run(self, task: Task, numbers: range) -> None:
        for number in numbers:
            self.step(task.batch(number))

    def saved(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        return copy.deepcopy({name: dict(part.state_dict()) for name, part in parts.items()})

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])


def by_shape(model: nn.Module) -> list[dict[str, Any]]:
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == large] for large in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def step_of(name: str, task: Task, *, grouped: bool = False, **changed: Any) -> TrainStep:
    """A step of a task with an optimizer."""
    cls, arguments = CASES[name]
    arguments = {**arguments, **changed}
    optimizer: Any = stateless(cls, **arguments)
    if grouped:
        decays = {"matrix": 0.1, "vector": 0.0}
        optimizer = by_group({n: stateless(cls, **{**arguments, "weight_decay": d}) for n, d in decays.items()})
    step: TrainStep = build(task, optimizer, keep_buffers=True, config=CONFIG, policy="float16")
    return step


def pair(name: str, task: Task, *, grouped: bool = False) -> tuple[Loop, TrainStep]:
    """A torch loop and a step on copies of one model."""
    cls, arguments = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the task's model may be behind the state of a former step
        model = copy.deepcopy(task.model)
    optimizer = cls(by_shape(model) if grouped else model.parameters(), **arguments)
    return Loop(model, task.criterion, optimizer, CONFIG), step_of(name, task, grouped=grouped)


def common(step: TrainStep, saved: dict[str, Any], like: Any) -> TrainState:
    """A state of a step with other parameters: what both have is that of the saved one, the rest begins."""
    fresh = step.state_dict(like)
    return step.load_state_dict({name: saved.get(name, fresh[name]) for name in fresh}, like=like)


def assert_same_saved(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """All tensors and numbers; an entry that torch saves as None is none."""
    assert_same(dict(actual["model"]), dict(expected["model"]))
    assert actual["scaler"] == expected["scaler"]
    entries = {
        number: {name: value for name, value in entry.items() if value is not None}
        for number, entry in expected["optimizer"]["state"].items()
    }
    assert_same(actual["optimizer"]["state"], {number: entry for number, entry in entries.items() if entry})
    assert actual["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]


@pytest.mark.thorough(keep=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "grouped", "flat"),
    [
        ("AdamW", True, True),
        ("SGD-dampening", False, False),
        ("SGD-momentum", True, False),
        *((name, False, True) for name in CASES),
        *((name, False, False) for name in ("AdamW", "SGD-momentum", "RMSprop")),
    ],
)
def test_a_run_changes_hands_and_back_bit_for_bit(name: str, grouped: bool, flat: bool) -> None:
    task = mlp()
    (alone, step), (again, _) = (pair(name, task, grouped=grouped) for _ in range(2))
    alone.run(task, range(5))
    saved = alone.saved()
    task.model.load_state_dict(saved["model"])
    state = step.from_torch(step.init(flat=flat), optimizer=saved["optimizer"], scaler=saved["scaler"])
    assert_same_saved(step.to_torch(state), saved)
    state = train(step, state, task, range(5, 9))
    alone.run(task, range(5, 9))
    assert_same_saved(step.to_torch(state), alone.saved())
    again.load(step.to_torch(state))
    again.run(task, range(9, 12))
    alone.run(task, range(9, 12))
    assert_same_saved(again.saved(), alone.saved())
    assert 0 < alone.scaler.get_scale() < CONFIG.init_scale


@pytest.mark.parametrize("make", [cnn, tied])
def test_buffers_and_tied_weights_go_along(make: Any) -> None:
    task = make()
    loop, step = pair("SGD-momentum", task)
    state = train(step, step.init(), task, range(12))
    loop.run(task, range(12))
    assert_same_saved(step.to_torch(state), loop.saved())
    assert state.opt_state.applied > 2


def test_classes_that_differ_are_optimizers_that_differ() -> None:
    task = mlp()
    optimizer = by_group({"matrix": stateless(optim.Muon, lr=0.02), "vector": stateless(optim.AdamW, lr=0.01)})
    step = build(task, optimizer, config=CONFIG)
    matrices, vectors = (group["params"] for group in by_shape(mlp().model))
    state = train(step, step.init(), task, range(3))
    both = {"matrix": optim.Muon(matrices, lr=0.02), "vector": optim.AdamW(vectors, lr=0.01)}
    for label, saved in step.to_torch(state)["optimizer"].items():
        both[label].load_state_dict(saved)
    again = step.from_torch(step.init(), optimizer={label: one.state_dict() for label, one in both.items()})
    assert_same(again.opt_state, state.opt_state)
    with pytest.raises(ValueError, match="must have a state_dict for each of"):
        step.from_torch(step.init(), optimizer=both["matrix"].state_dict())


@pytest.mark.parametrize("name", CASES)
def test_a_first_state_goes_to_torch_and_back(name: str) -> None:
    step = step_of(name, mlp())
    start = step.init()
    back = step.from_torch(start, optimizer=step.to_torch(start)["optimizer"])
    assert_same(step.state_dict(back), step.state_dict(start))


def test_a_momentum_that_torch_leaves_out_is_zero() -> None:
    task = mlp()
    optimizer = optim.RMSprop(task.model.parameters(), lr=0.01, centered=True)
    for param in task.model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    step = step_of("RMSprop", task, momentum=torch.tensor(0.0))
    state: Any = step.from_torch(step.init(), optimizer=optimizer.state_dict())
    assert all(group.any() for group in state.opt_state.state["square_avg"].groups)
    assert not any(group.any() for group in state.opt_state.state["momentum_buffer"].groups)


def test_frozen_parameters_keep_their_places() -> None:
    task = mlp()
    task.model.get_parameter("0.weight").requires_grad_(False)
    loop, step = pair("AdamW", task)
    loop.run(task, range(4))
    state = train(step, step.init(), task, range(4))
    assert_same_saved(step.to_torch(state), loop.saved())
    cls, arguments = CASES["AdamW"]
    loop.optimizer = cls([p for p in loop.model.parameters() if p.requires_grad], **arguments)
    loop.run(task, range(4, 6))
    assert step.from_torch(step.init(), optimizer=loop.optimizer.state_dict()).opt_state.applied > 0


def test_names_say_which_parameter_is_which() -> None:
    task = mlp()
    loop, step = pair("AdamW", task)
    cls, arguments = CASES["AdamW"]
    loop.optimizer = cls(list(loop.model.named_parameters())[::-1], **arguments)
    loop.run(task, range(4))
    saved = loop.saved()
    task.model.load_state_dict(saved["model"])
    state = step.from_torch(step.init(), optimizer=saved["optimizer"])
    in_order = step.to_torch(state)["optimizer"]["state"]
    assert_same([in_order[7 - number] for number in range(8)], [saved["optimizer"]["state"][n] for n in range(8)])
    split = cls(by_shape(loop.model), **arguments)
    with pytest.raises(ValueError, match=r"it has 8 in 2 groups, the step 8 in 1.*param_names"):
        step.from_torch(step.init(), optimizer=split.state_dict())


@pytest.mark.parametrize("name", ["AdamW", "SGD-momentum"])
def test_a_schedule_goes_on_where_it_was(name: str) -> None:
    task = mlp()
    step = step_of(name, task, lr=lambda applied: 0.1 / (1 + applied))
    state = train(step, step.init(), task, range(8))
    applied = int(state.opt_state.applied)
    saved = step.to_torch(state)["optimizer"]
    assert applied > 0
    assert saved["param_groups"][0]["lr"] == pytest.approx(0.1 / (1 + applied))
    count = None
    if name == "SGD-momentum":  # torch's counts nothing
        count = applied
        with pytest.raises(ValueError, match="steps must be given"):
            step.from_torch(step.init(), optimizer=saved)
    again = step.from_torch(step.init(), optimizer=saved, steps=count)
    assert [int(number) for number in (again.opt_state.applied, again.step, again.skipped)] == [applied, applied, 0]
    assert step.from_torch(step.init(), steps=applied).opt_state.applied == applied  # with a new optimizer


# Within a run.


@FLAT
def test_layers_are_frozen_and_unfrozen_in_mid_run(flat: bool) -> None:
    """As torch's loop, whose optimizer leaves alone what has no gradient; momenta stay for later."""
    task = mlp()
    loop, step = pair("SGD-momentum", task)
    state = train(step, step.init(flat=flat), task, range(4))
    loop.run(task, range(4))
    first = [model.get_submodule("0") for model in (task.model, loop.model)]

    saved = step.state_dict(state)
    task.model.load_state_dict(step.to_torch(state)["model"])
    for layer in first:
        layer.requires_grad_(False)
    step = step_of("SGD-momentum", task)
    state = common(step, saved, step.init(flat=flat))
    assert "0.weight" not in state.params.tree()
    loop.run(task, range(4, 7))
    state = train(step, state, task, range(4, 7))

    saved |= step.state_dict(state)
    for layer in first:
        layer.requires_grad_(True)
    step = step_of("SGD-momentum", task)
    state = step.load_state_dict(saved, like=step.init(flat=flat))
    loop.run(task, range(7, 10))
    state = train(step, state, task, range(7, 10))
    assert_same_saved(step.to_torch(state), loop.saved())


@pytest.mark.parametrize(("name", "flat"), [("SGD-momentum", True), ("AdamW", False)])
def test_parameters_are_added_in_mid_run(name: str, flat: bool) -> None:
    """As `Optimizer.add_param_group` does it: the old ones keep their state, the new ones begin."""
    task = mlp()
    loop, step = pair(name, task)
    state = train(step, step.init(flat=flat), task, range(4))
    loop.run(task, range(4))

    task.model.load_state_dict(step.to_torch(state)["model"])
    torch.manual_seed(1)
    head = nn.Linear(4, 4)
    loop.model.append(copy.deepcopy(head))
    task.model.append(head)  # type: ignore[operator]
    loop.optimizer.add_param_group({"params": loop.model[-1].parameters()})

    larger = step_of(name, task)
    with pytest.raises(ValueError, match="it lacks"):
        larger.load_state_dict(step.state_dict(state), like=larger.init(flat=flat))
    state = common(larger, step.state_dict(state), larger.init(flat=flat))
    state = train(larger, state, task, range(4, 6))
    half = larger.state_dict(state)
    state = larger.load_state_dict(half, like=larger.init(flat=flat))  # AdamW's counts differ now
    assert_same(larger.state_dict(state), half)
    state = train(larger, state, task, range(6, 8))
    loop.run(task, range(4, 8))
    saved, expected = larger.to_torch(state), loop.saved()
    assert_same(saved["model"], expected["model"])
    assert_same(saved["optimizer"]["state"], expected["optimizer"]["state"])
    if name == "AdamW":
        again = larger.from_torch(larger.init(flat=flat), optimizer=saved["optimizer"])
        assert_same(again.opt_state, state.opt_state)


def test_flat_storage_has_one_count_a_group() -> None:
    # contract: "one step count for a group of flat storage"
    def of(*names: str) -> tuple[TrainStep, dict[str, torch.Tensor]]:
        step = make_train_step(lambda p, x: sum((p[name] * x).sum() for name in names), stateless(optim.AdamW))
        return step, {name: torch.ones(2) for name in names}

    (small, params), (large, more) = of("a"), of("a", "b")
    saved = small.state_dict(small(small.init(params), torch.ones(2))[0])
    with pytest.raises(ValueError, match=r"got 0 for 'opt_state.state.step.b' and 1 for another.*init\(flat=False\)"):
        common(large, saved, large.init(more))
    for fitting in (large.init(more, flat=False), large.init(more, group=lambda name, _: name)):
        assert large.state_dict(common(large, saved, fitting))["opt_state.state.step.a"] == 1
