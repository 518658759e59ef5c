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
from torch.utils import _pytree

import funcamp
from funcamp import by_group, make_train_step, module_loss, stateless
from funcamp._storage.params import matrix_or_vector
from tests.support.helpers import assert_same, clone
from tests.support.models import Task, cnn, mlp, tied

optim = torch.optim
CONFIG = funcamp.ScalerConfig(init_scale=2.0**20, growth_interval=3)
CASES: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.05}),
    "SGD-momentum": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "SGD-dampening": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}),
    "Adam": (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adagrad": (optim.Adagrad, {"lr": 0.01}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "Adamax": (optim.Adamax, {"lr": 0.01}),
    "Adadelta": (optim.Adadelta, {"lr": 0.1}),
    "Rprop": (optim.Rprop, {"lr": 0.01}),
}


class Loop:
    """A torch loop."""

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cpu", init_scale=CONFIG.init_scale, growth_interval=CONFIG.growth_interval)

    def run(self, task: Task, numbers: range) -> None:
        for number in numbers:
            x, y = task.batch(number)
            self.optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = task.criterion(self.model(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def saved(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "model": dict(self.model.state_dict()),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
            }
        )

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])


def by_shape(model: nn.Module) -> list[dict[str, Any]]:
    groups: dict[str, list[nn.Parameter]] = {"matrix": [], "vector": []}
    for name, param in model.named_parameters():
        groups[matrix_or_vector(name, param)].append(param)
    return [{"params": groups["matrix"], "weight_decay": 0.1}, {"params": groups["vector"], "weight_decay": 0.0}]


def build(name: str, task: Task, *, grouped: bool = False) -> tuple[Loop, funcamp.TrainStep]:
    """A torch loop and a step on copies of one model."""
    cls, arguments = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the task's model may be behind the state of a former step
        model = copy.deepcopy(task.model)
    loop = Loop(model, cls(by_shape(model) if grouped else model.parameters(), **arguments))
    optimizer: Any = stateless(cls, **arguments)
    if grouped:
        decays = {"matrix": 0.1, "vector": 0.0}
        optimizer = by_group({n: stateless(cls, **{**arguments, "weight_decay": d}) for n, d in decays.items()})
    loss_fn = module_loss(task.model, task.criterion, keep_buffers=True)
    return loop, make_train_step(loss_fn, optimizer, CONFIG, policy="float16")


def common(step: funcamp.TrainStep, saved: dict[str, Any], like: Any) -> Any:
    """A state of a step with other parameters: what both have is that of the saved one, the rest begins."""
    fresh = step.state_dict(like)
    return step.load_state_dict({name: saved.get(name, fresh[name]) for name in fresh}, like=like)


def step_through(step: Any, state: Any, task: Task, numbers: range) -> Any:
    for number in numbers:
        state, _ = step(state, task.batch(number))
    return state


def assert_same_saved(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """All tensors and numbers; of the groups what is computed with."""
    assert_same(dict(actual["model"]), dict(expected["model"]))
    assert actual["scaler"] == expected["scaler"]
    state = {
        number: {name: value for name, value in entry.items() if value is not None}
        for number, entry in expected["optimizer"]["state"].items()
    }
    assert_same(actual["optimizer"]["state"], {number: entry for number, entry in state.items() if entry})
    for mine, other in zip(actual["optimizer"]["param_groups"], expected["optimizer"]["param_groups"], strict=True):
        assert mine == other


@pytest.mark.thorough(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "dict"])
@pytest.mark.parametrize(
    ("name", "grouped"),
    [(name, grouped) for name in CASES for grouped in (False, True) if not grouped or name != "Rprop"],  # no decay
)
def test_a_run_changes_hands_and_back_bit_for_bit(name: str, grouped: bool, flat: bool) -> None:
    task = mlp()
    (alone, step), (again, _) = (build(name, task, grouped=grouped) for _ in range(2))
    alone.run(task, range(5))
    saved = alone.saved()
    task.model.load_state_dict(saved["model"])
    state = step.from_torch(step.init(flat=flat), optimizer=saved["optimizer"], scaler=saved["scaler"])
    assert_same_saved(step.to_torch(state), saved)
    state = step_through(step, state, task, range(5, 9))
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
    loop, step = build("SGD-momentum", task)
    state = step_through(step, step.init(), task, range(12))
    loop.run(task, range(12))
    assert_same_saved(step.to_torch(state), loop.saved())
    assert state.opt_state.applied > 2


def test_a_loss_of_ones_own_has_the_names_of_its_tree() -> None:
    step = make_train_step(lambda p, x: (p["a"]["w"] * x).sum(), stateless(optim.AdamW, lr=0.1))
    state, _ = step(step.init({"a": {"w": torch.ones(2)}}), torch.ones(2))
    saved = step.to_torch(state)
    assert list(saved["model"]) == ["a.w"]
    leaf = nn.Parameter(saved["model"]["a.w"])
    adamw = optim.AdamW([leaf], lr=0.1)
    adamw.load_state_dict(saved["optimizer"])
    leaf.grad = torch.ones(2)
    adamw.step()
    state, _ = step(state, torch.ones(2))
    assert_same(state.params.tree()["a"]["w"], leaf.detach())
    like = step.init(state.params.tree())
    again = step.from_torch(like, optimizer=adamw.state_dict(), scaler=saved["scaler"])
    assert_same(again.opt_state, state.opt_state)


def test_classes_that_differ_are_optimizers_that_differ() -> None:
    task = mlp()
    optimizer = by_group({"matrix": stateless(optim.Muon, lr=0.02), "vector": stateless(optim.AdamW, lr=0.01)})
    step = make_train_step(module_loss(task.model, task.criterion), optimizer, CONFIG)
    model = copy.deepcopy(task.model)
    state = step_through(step, step.init(), task, range(3))
    saved = step.to_torch(state)["optimizer"]
    muon = optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)
    muon.load_state_dict(saved["matrix"])
    adamw = optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=0.01)
    adamw.load_state_dict(saved["vector"])
    both = {"matrix": muon.state_dict(), "vector": adamw.state_dict()}
    assert_same(step.from_torch(step.init(), optimizer=both).opt_state, state.opt_state)
    with pytest.raises(ValueError, match="must have a state_dict for each of"):
        step.from_torch(step.init(), optimizer=muon.state_dict())


def test_frozen_parameters_keep_their_places() -> None:
    task = mlp()
    task.model[0].weight.requires_grad_(False)  # type: ignore[index]
    loop, step = build("AdamW", task)
    loop.run(task, range(4))
    state = step_through(step, step.init(), task, range(4))
    assert_same_saved(step.to_torch(state), loop.saved())
    trained = Loop(
        loop.model, optim.AdamW([p for p in loop.model.parameters() if p.requires_grad], **CASES["AdamW"][1])
    )
    trained.run(task, range(4, 6))
    assert step.from_torch(step.init(), optimizer=trained.optimizer.state_dict()).opt_state.applied > 0


def test_names_say_which_parameter_is_which() -> None:
    task = mlp()
    loop, step = build("AdamW", task)
    names = [name for name, _ in task.model.named_parameters()][::-1]
    params = dict(loop.model.named_parameters())
    turned = Loop(loop.model, optim.AdamW([params[name] for name in names], **CASES["AdamW"][1]))
    turned.run(task, range(4))
    saved = turned.saved()
    task.model.load_state_dict(saved["model"])
    saved["optimizer"]["param_groups"][0]["param_names"] = names
    state = step.from_torch(step.init(), optimizer=saved["optimizer"])
    in_order = step.to_torch(state)["optimizer"]["state"]
    assert_same([in_order[7 - number] for number in range(8)], [saved["optimizer"]["state"][n] for n in range(8)])
    named = optim.AdamW([(name, params[name]) for name in names], **CASES["AdamW"][1])
    named.load_state_dict(saved["optimizer"])
    assert_same(step.from_torch(step.init(), optimizer=named.state_dict()).opt_state, state.opt_state)
    split = optim.AdamW(by_shape(loop.model), **CASES["AdamW"][1])
    with pytest.raises(ValueError, match=r"it has 8 in 2 groups, the step 8 in 1.*param_names"):
        step.from_torch(step.init(), optimizer=split.state_dict())


def test_a_schedule_goes_on_where_it_was() -> None:
    task = mlp()

    def make(cls: Any) -> funcamp.TrainStep:
        optimizer = stateless(cls, lr=lambda applied: 0.1 / (1 + applied))
        return make_train_step(module_loss(task.model, task.criterion), optimizer)

    step = make(optim.AdamW)
    saved = step.to_torch(step_through(step, step.init(), task, range(3)))["optimizer"]
    assert saved["param_groups"][0]["lr"] == pytest.approx(0.1 / 4)
    assert step.from_torch(step.init(), optimizer=saved).opt_state.applied == 3
    momentum = make_train_step(
        module_loss(task.model, task.criterion), stateless(optim.SGD, lr=lambda a: 0.1 / (1 + a), momentum=0.9)
    )
    saved = momentum.to_torch(step_through(momentum, momentum.init(), task, range(3)))["optimizer"]
    with pytest.raises(ValueError, match="steps must be given"):
        momentum.from_torch(momentum.init(), optimizer=saved)
    state = momentum.from_torch(momentum.init(), optimizer=saved, steps=3)
    assert [int(count) for count in (state.opt_state.applied, state.step, state.skipped)] == [3, 3, 0]


def test_what_does_not_fit_is_refused_by_name() -> None:
    task = mlp()
    loop, step = build("AdamW", task)
    loop.run(task, range(4))
    saved, like = loop.saved(), step.init()
    before = clone(like)
    other = copy.deepcopy(saved["optimizer"])
    other["param_groups"][0]["lr"] = 0.5
    foreign = copy.deepcopy(saved["optimizer"])
    foreign["state"][0]["max_exp_avg_sq"] = torch.zeros(16, 8)
    named = copy.deepcopy(saved["optimizer"])
    named["param_groups"][0]["param_names"] = ["other", *[name for name, _ in task.model.named_parameters()][1:]]
    smaller, other_scaler = optim.AdamW([nn.Parameter(torch.ones(1))]), saved["scaler"] | {"growth_interval": 7}
    for error, message, arguments in (
        (ValueError, "optimizer must have the step's lr, 0.01; got 0.5 for '0.weight'", {"optimizer": other}),
        (ValueError, "optimizer must be of the step's class.* got 'max_exp_avg_sq'", {"optimizer": foreign}),
        (TypeError, r"optimizer must be the state_dict\(\) of a torch.optim.Optimizer; got", {"optimizer": {"lr": 1}}),
        (ValueError, r"must have the step's parameters; .*param_names are \(other, 0.bias, ", {"optimizer": named}),
        (ValueError, "must have the step's parameters; it has 1 in 1 groups", {"optimizer": smaller.state_dict()}),
        (ValueError, r"scaler must have .*growth_interval=3.*; got .*growth_interval=7", {"scaler": other_scaler}),
        (ValueError, "saved must have 'scale'; it is empty", {"scaler": {}}),
        (ValueError, r"saved\['scaler.scale'\] must be above 0", {"scaler": saved["scaler"] | {"scale": 0.0}}),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            step.from_torch(like, **arguments)
    with pytest.raises(TypeError, match="from_torch: like must be a TrainState, as init makes it"):
        step.from_torch(like.params, optimizer=saved["optimizer"])  # type: ignore[arg-type]
    assert_same(like, before)


# Within a run.


@pytest.mark.compiled
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", ["SGD-momentum", "AdamW"])
def test_a_learning_rate_in_a_tensor_is_changed_in_mid_run(name: str, jitted: bool) -> None:
    task = mlp()
    cls, arguments = CASES[name]
    loop, _ = build(name, task)
    lr = torch.tensor(arguments["lr"], dtype=torch.float64)
    step: Any = make_train_step(
        module_loss(task.model, task.criterion), stateless(cls, **arguments | {"lr": lr}), CONFIG, policy="float16"
    )
    run = funcamp.jit(step, backend="eager") if jitted else step
    state = step.init()
    for numbers, value in ((range(5), arguments["lr"]), (range(5, 9), 0.003)):
        lr.fill_(value)
        loop.optimizer.param_groups[0]["lr"] = value
        state = step_through(run, state, task, numbers)
        loop.run(task, numbers)
    torch.testing.assert_close(
        step.to_torch(state)["model"], dict(loop.model.state_dict()), rtol=1e-5 if jitted else 1e-6, atol=1e-6
    )
    assert step.to_torch(state)["optimizer"]["param_groups"][0]["lr"] == 0.003


def test_another_optimizer_with_another_rate_goes_on_from_the_same_state() -> None:
    task = mlp()
    loop, first = build("AdamW", task)
    second = make_train_step(
        first.loss_fn, stateless(optim.AdamW, lr=0.003, weight_decay=0.1), CONFIG, policy="float16"
    )
    state = step_through(second, step_through(first, first.init(), task, range(5)), task, range(5, 9))
    loop.run(task, range(5))
    loop.optimizer.param_groups[0]["lr"] = 0.003
    loop.run(task, range(5, 9))
    assert_same_saved(second.to_torch(state), loop.saved())


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "dict"])
def test_layers_are_frozen_and_unfrozen_in_mid_run(flat: bool) -> None:
    """As torch's loop, whose optimizer leaves alone what has no gradient; momenta stay for later."""
    task = mlp()
    loop, step = build("SGD-momentum", task)
    state = step_through(step, step.init(flat=flat), task, range(4))
    loop.run(task, range(4))
    first: Any = (task.model[0], loop.model[0])  # type: ignore[index]

    saved = step.state_dict(state)
    task.model.load_state_dict(step.to_torch(state)["model"])
    for layer in first:
        layer.requires_grad_(False)
    _, step = build("SGD-momentum", task)
    state = common(step, saved, step.init(flat=flat))
    assert "0.weight" not in state.params.tree()
    loop.run(task, range(4, 7))
    state = step_through(step, state, task, range(4, 7))

    saved |= step.state_dict(state)
    for layer in first:
        layer.requires_grad_(True)
    _, step = build("SGD-momentum", task)
    state = step.load_state_dict(saved, like=step.init(flat=flat))
    loop.run(task, range(7, 10))
    state = step_through(step, state, task, range(7, 10))
    assert_same_saved(step.to_torch(state), loop.saved())


@pytest.mark.parametrize(("name", "flat"), [("SGD-momentum", True), ("SGD-momentum", False), ("AdamW", False)])
def test_parameters_are_added_in_mid_run(name: str, flat: bool) -> None:
    """As `Optimizer.add_param_group` does it: the old ones keep their state, the new ones begin."""
    cls, arguments = CASES[name]
    task = mlp()
    loop, step = build(name, task)
    state = step_through(step, step.init(flat=flat), task, range(4))
    loop.run(task, range(4))

    task.model.load_state_dict(step.to_torch(state)["model"])
    torch.manual_seed(1)
    head = nn.Linear(4, 4)
    task.model.append(head)  # type: ignore[operator]
    loop.model.append(copy.deepcopy(head))  # type: ignore[operator]
    loop.optimizer.add_param_group({"params": loop.model[-1].parameters()})  # type: ignore[index]
    loss_fn = module_loss(task.model, task.criterion)

    larger = make_train_step(loss_fn, stateless(cls, **arguments), CONFIG, policy="float16")
    like = larger.init(flat=flat)
    with pytest.raises(ValueError, match="it lacks"):
        larger.load_state_dict(step.state_dict(state), like=like)
    state = common(larger, step.state_dict(state), like)
    state = step_through(larger, state, task, range(4, 6))
    half = larger.state_dict(state)
    state = larger.load_state_dict(half, like=larger.init(flat=flat))  # AdamW's counts differ now
    assert_same(larger.state_dict(state), half)
    state = step_through(larger, state, task, range(6, 8))
    loop.run(task, range(4, 8))
    if name == "AdamW":
        saved = loop.saved()["optimizer"]
        names = iter([name for name, _ in loop.model.named_parameters()])
        for group in saved["param_groups"]:
            group["param_names"] = [next(names) for _ in group["params"]]
        again = larger.from_torch(larger.init(flat=flat), optimizer=saved)
        assert_same(again.opt_state.state, state.opt_state.state)
    saved, expected = larger.to_torch(state), loop.saved()
    assert_same(saved["model"], expected["model"])
    assert_same(saved["optimizer"]["state"], expected["optimizer"]["state"])


def test_flat_storage_has_one_count_a_group() -> None:
    def step_of(*names: str) -> tuple[funcamp.TrainStep, dict[str, torch.Tensor]]:
        params = {name: torch.ones(2) for name in names}
        step = make_train_step(lambda p, x: sum((p[name] * x).sum() for name in names), stateless(optim.AdamW))
        return step, params

    (small, params), (large, more) = step_of("a"), step_of("a", "b")
    state, _ = small(small.init(params), torch.ones(2))
    saved = small.state_dict(state)
    like = large.init(more)
    with pytest.raises(ValueError, match=r"got 0 for 'opt_state.state.step.b' and 1 for another.*init\(flat=False\)"):
        common(large, saved, like)
    apart = large.init(more, group=lambda name, _: name)
    for fitting in (large.init(more, flat=False), apart):
        loaded = common(large, saved, fitting)
        assert large.state_dict(loaded)["opt_state.state.step.a"] == 1


@pytest.mark.parametrize("flat", [True, False])
def test_a_number_that_is_nan_is_restored(flat: bool) -> None:
    step = make_train_step(lambda p, x: (p["w"] * x).sum() + torch.nan_to_num(p["g"]), stateless(optim.SGD))
    state = step.init({"w": torch.ones(2), "g": torch.tensor(float("nan"))}, flat=flat)
    assert_same(step.load_state_dict(step.state_dict(state), like=state).params, state.params)


class Negated:
    """An optimizer of a user's own, whose state is not an OptState and has negative numbers."""

    def init(self, params: Any) -> Any:
        return _pytree.tree_map(torch.zeros_like, params)

    def update(self, params: Any, grads: Any, momentum: Any) -> Any:
        momentum = _pytree.tree_map(lambda old, grad: old - grad, momentum, grads)
        return _pytree.tree_map(lambda param, step: param + 0.1 * step, params, momentum), momentum


@pytest.mark.parametrize("ema_decay", [None, 0.5])
def test_the_state_of_an_optimizer_of_ones_own_is_no_count(ema_decay: float | None) -> None:
    step = make_train_step(lambda p, x: (p["w"] * x).sum(), Negated(), ema_decay=ema_decay)
    state, _ = step(step.init({"w": torch.ones(2)}), torch.ones(2))
    assert_same(step.load_state_dict(step.state_dict(state), like=step.init({"w": torch.ones(2)})), state)
