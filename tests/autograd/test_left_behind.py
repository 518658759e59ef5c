"""A module whose state has moved on says so at its first call outside of a step."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from funcamp import jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same, assert_silent

X, Y = torch.randn(16, 4), torch.randn(16, 1)
BEHIND = "Sequential has the values that it had at init.*step.loss"


def taken(
    model: nn.Module, *, consume: bool = False, jitted: bool = False, donate: bool = True, steps: int = 2
) -> tuple[Any, Any]:
    """A step and its state after some steps."""
    step = make_train_step(module_loss(model, F.mse_loss), stateless(torch.optim.SGD, lr=0.1))
    run = jit(step, backend="eager", donate=donate) if jitted else step
    state = step.init(consume=consume)
    for _ in range(steps):
        state, _ = run(state, (X, Y))
    return step, state


def model() -> Any:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


@pytest.mark.compiled
@pytest.mark.parametrize(
    "how",
    [{}, {"jitted": True}, {"consume": True}, {"consume": True, "jitted": True, "donate": False}, {"steps": 1}],
    ids=str,
)
def test_the_first_call_warns(how: dict[str, Any]) -> None:
    module = model()
    taken(module, **how)
    module(X)  # another loop may train the module itself
    with pytest.warns(UserWarning, match=BEHIND), torch.no_grad():
        module(X)
    module.eval()
    module(X)  # once


@pytest.mark.parametrize("jitted", [False, True])
def test_saving_the_module_warns_once(jitted: bool) -> None:
    module = model()
    step, state = taken(module, jitted=jitted)
    with assert_silent():
        step.loss_fn.state_dict(state.params, state.buffers)
        step.to_torch(state)
        step.state_dict(state)
    whole = nn.ModuleDict({"part": module})
    with pytest.warns(UserWarning, match=r"Sequential has the values that it had at init.*step.to_torch\(state\)"):
        whole.state_dict()
    with assert_silent(), torch.no_grad():
        module.state_dict()
        module(X)


def test_saving_a_module_that_follows_is_silent() -> None:
    for how in ({"steps": 0}, {"consume": True, "jitted": True}):
        module = model()
        taken(module, **how)
        with assert_silent():
            module.state_dict()
    module = model()
    step, state = taken(module)
    module.load_state_dict(step.loss_fn.state_dict(state.params, state.buffers))
    with assert_silent():
        module.state_dict()


def test_a_module_that_follows_is_silent() -> None:
    module = model()
    step, state = taken(module, consume=True, jitted=True)
    module.eval()
    assert torch.equal(F.mse_loss(module(X), Y), step.loss(state, (X, Y)))


def test_a_module_that_no_step_left_behind_is_silent() -> None:
    module = model().eval()
    taken(module, steps=0)
    with assert_silent():
        module(X)


def test_a_module_with_the_states_values_is_silent() -> None:
    module = model().eval()
    step, state = taken(module)
    module.load_state_dict(step.loss_fn.state_dict(state.params, state.buffers))
    with assert_silent():
        module(X)
    taken(module)
    with torch.no_grad():
        module[0].weight.copy_(state.params["0.weight"])
    with assert_silent():
        module(X)


def test_copies_are_silent_and_can_be_saved() -> None:
    module = model().eval()
    taken(module)
    file = io.BytesIO()
    with assert_silent():
        copied = copy.deepcopy(module)
        pickled = pickle.loads(pickle.dumps(module))
        torch.save(module, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        outputs = [copied(X), pickled(X), loaded(X)]
        saved = pickled.state_dict()
        copied.load_state_dict(saved)
        loaded.load_state_dict(saved)
    with pytest.warns(UserWarning, match=BEHIND):
        expected = module(X)
    assert_same(outputs, [expected] * 3)


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


def test_each_loss_of_a_module_watches_its_own_state() -> None:
    module = model().eval()
    taken(module)
    step, state = taken(module)
    step.init()  # from now on the module is not behind the second loss's state
    with pytest.warns(UserWarning, match=BEHIND) as of_the_first:
        module(X)
    step(state, (X, Y))
    with pytest.warns(UserWarning, match=BEHIND) as of_the_second:
        module(X)
    assert len(of_the_first) == len(of_the_second) == 1


@pytest.mark.parametrize("jitted", [False, True])
def test_a_module_in_the_criterion_of_another_step(jitted: bool) -> None:
    critic = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    critic_step = make_train_step(module_loss(critic, F.mse_loss), stateless(torch.optim.SGD, lr=0.1))
    critic_step(critic_step.init(), (Y, Y))
    critic.requires_grad_(False)
    generator = make_train_step(
        module_loss(nn.Linear(4, 1), lambda out, _: -critic(out).mean()), stateless(torch.optim.SGD, lr=0.1)
    )
    run: Any = jit(generator, backend="eager") if jitted else generator
    with pytest.warns(UserWarning, match=r"has the values that it had at init.*compute_params"):
        run(generator.init(), (X, Y))


def test_a_new_step_of_a_module_that_was_left_behind_is_silent() -> None:
    module = model()
    taken(module)
    module[0].weight.requires_grad_(False)  # it is in its place during the new step, too
    with assert_silent():
        taken(module)


def test_a_module_that_two_steps_left_behind_loads_a_state_dict() -> None:
    module = model()
    taken(module)
    step, state = taken(module)
    module.load_state_dict(step.loss_fn.state_dict(state.params, state.buffers))
    module.eval()
    assert torch.equal(F.mse_loss(module(X), Y), step.loss(state, (X, Y)))
