"""A module whose state has moved on says so when it is called, saved or copied, once until it follows again."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from funcamp import make_train_step, module_loss
from tests.support.helpers import assert_same, assert_silent
from tests.support.steps import SGD, eager, eager_and_traced, traced

X, Y = torch.randn(16, 4), torch.randn(16, 1)
BEHIND = r"Sequential has older values than the state.*step\.evaluating\(state\)"


def taken(module: nn.Module, wrap: Any = eager, *, consume: bool = False, steps: int = 2) -> tuple[Any, Any]:
    """A step and its state after some steps."""
    step = make_train_step(module_loss(module, F.mse_loss), SGD)
    run, state = wrap(step), step.init(consume=consume)
    for _ in range(steps):
        state, _ = run(state, (X, Y))
    return step, state


def model() -> Any:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def saved_and_loaded(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


READS: dict[str, Callable[[Any], object]] = {
    "called in training mode": lambda module: module(X),  # such as the generator whose images a critic's step gets
    "evaluated": lambda module: module.eval()(X),
    "saved": lambda module: nn.ModuleDict({"part": module}).state_dict(),
    "copied": copy.deepcopy,
    "pickled": pickle.dumps,
}


@pytest.mark.compiled
@pytest.mark.parametrize(("wrap", "options"), [(eager, {}), (traced, {}), (eager, {"consume": True, "steps": 1})])
@pytest.mark.parametrize("read", READS)
def test_the_first_read_warns(read: str, wrap: Any, options: Any) -> None:
    # contract: "A module behind its state warns"
    module = model()
    step, state = taken(module, wrap, **options)
    with assert_silent():
        step.loss_fn.state_dict(state.params, state.buffers)
        step.to_torch(state)
    with pytest.warns(UserWarning, match=BEHIND):
        READS[read](module)
    with assert_silent():
        for again in READS.values():
            again(module)


def loaded(module: nn.Module, step: Any, state: Any) -> None:
    module.load_state_dict(step.loss_fn.state_dict(state.params, state.buffers))


@pytest.mark.compiled
def test_a_module_that_leaves_the_memory_of_the_state_warns_after_the_next_step() -> None:
    module = model()
    step = make_train_step(module_loss(module, F.mse_loss), SGD)
    run, state = traced(step), step.init(consume=True)
    state, _ = run(state, (X, Y))
    module.double().float()
    state, _ = run(state, (X, Y))
    with pytest.warns(UserWarning, match=BEHIND):
        module.state_dict()


FOLLOWS: dict[str, Callable[[nn.Module], object]] = {
    "no step": lambda module: taken(module, steps=0),
    "in the memory of a donated state": lambda module: taken(module, traced, consume=True),
    "the values of that memory": lambda module: taken(module, traced, consume=True) and module.double().float(),
    "the state's values loaded": lambda module: loaded(module, *taken(module)),
}


@pytest.mark.compiled
@pytest.mark.parametrize("name", FOLLOWS)
def test_a_module_that_follows_is_silent(name: str) -> None:
    module = model()
    FOLLOWS[name](module)
    with assert_silent():
        for read in READS.values():
            read(module)


@eager_and_traced
def test_a_module_that_falls_behind_again_warns_again(wrap: Any) -> None:
    module = model()
    step, state = taken(module, steps=0)
    run = wrap(step)
    for _ in range(3):
        with assert_silent():
            state, _ = run(state, (X, Y))
            loaded(module, step, state)
            copy.deepcopy(module)
            state, _ = run(state, (X, Y))
        with pytest.warns(UserWarning, match=BEHIND):
            copy.deepcopy(module)
        with assert_silent():
            state, _ = run(state, (X, Y))
            copy.deepcopy(module)  # not again, as nothing was written into it since


@eager_and_traced
def test_parameters_that_the_caller_writes_after_init_warn_at_the_first_step(wrap: Any) -> None:
    module = model()
    step, state = taken(module, steps=0)
    module.load_state_dict(model().state_dict())
    run = wrap(step)
    with pytest.warns(UserWarning, match=r"Sequential were written after init.*before step\.init\(\)"):
        state, _ = run(state, (X, Y))
    with assert_silent():
        run(state, (X, Y))


def test_a_copy_of_a_module_that_is_behind_has_nothing_of_it() -> None:
    module = model().eval()
    taken(module)
    with pytest.warns(UserWarning, match=BEHIND):
        other = saved_and_loaded(module)
    with assert_silent():
        assert_same(other(X), module(X))
        other.load_state_dict(other.state_dict())
        copy.deepcopy(other)
    assert b"funcamp" not in pickle.dumps(other)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 1), nn.BatchNorm1d(1)
        self.beta: torch.Tensor
        self.register_buffer("beta", torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.layer(x)) * self.beta


@pytest.mark.parametrize(("wrap", "consume"), [(eager, False), (traced, False), (traced, True)])
def test_a_buffer_that_the_caller_writes_is_right_or_warns(wrap: Any, consume: bool) -> None:
    module, message = Weighted(), r"'beta'.*changes nothing for the step.*state\.buffers\['beta'\]"
    step = make_train_step(module_loss(module, F.mse_loss), SGD)
    run, state = wrap(step), step.init(consume=consume)
    for number in range(3):
        module.norm(Y)
        with assert_silent():  # of the statistics that BatchNorm writes nothing is said
            state, _ = run(state, (X, Y))
        module.beta.fill_(0.5**number)
        with assert_silent() if consume else pytest.warns(UserWarning, match=message):
            state, _ = run(state, (X, Y))
        assert_same(state.buffers["beta"], module.beta if consume else torch.ones(()))


@pytest.mark.compiled
def test_a_module_that_a_compiler_runs_goes_on_working() -> None:
    module = model().eval()
    taken(module)
    with assert_silent():
        compiled = torch.compile(module, backend="eager", fullgraph=True)(X)
        exported = torch.export.export(module, (X,)).module()(X)
    with pytest.warns(UserWarning, match=BEHIND):
        expected = module(X)
    assert_same([compiled, exported], [expected] * 2)


@eager_and_traced
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_module_that_begins_with_a_scripted_layer_trains_and_warns_as_another(wrap: Any) -> None:
    plain, module = model(), model()
    module.load_state_dict(plain.state_dict())
    module[0] = torch.jit.script(module[0])
    _, expected = taken(plain, wrap)
    _, found = taken(module, wrap)
    assert_same(found.params.tree(), expected.params.tree())
    with pytest.warns(UserWarning, match=BEHIND):
        module(X)


@eager_and_traced
def test_a_module_in_the_criterion_of_another_step(wrap: Any) -> None:
    critic = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    step = make_train_step(module_loss(critic, F.mse_loss), SGD)
    step(step.init(), (Y, Y))
    critic.requires_grad_(False)
    generator = make_train_step(module_loss(nn.Linear(4, 1), lambda out, _: -critic(out).mean()), SGD)
    with pytest.warns(UserWarning, match=r"has older values than the state.*compute_params"):
        wrap(generator)(generator.init(), (X, Y))


@eager_and_traced
def test_a_copied_trainer_goes_on_as_the_original_does(wrap: Any) -> None:
    step, state = taken(model(), consume=True, steps=0)
    trainer = {"model": step.loss_fn.model, "step": step, "state": state}
    other, results = copy.deepcopy(trainer), []
    for each in (trainer, other):
        run = wrap(each["step"])
        for _ in range(3):
            each["state"], metrics = run(each["state"], (X, Y))
        results.append((metrics.loss, each["state"].params.tree(), each["state"].buffers))
    assert_same(results[1], results[0])
    with pytest.warns(UserWarning, match=BEHIND):  # a copied parameter has memory of its own, also after consume
        other["model"].eval()(X)
