"""A module whose state has moved on says so when it is called, saved or copied, once until it follows again."""

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
BEHIND = r"Sequential has older values than the state.*step\.evaluating\(state\)"


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
    with pytest.warns(UserWarning, match=BEHIND):
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


@pytest.mark.parametrize("jitted", [False, True])
def test_a_module_that_falls_behind_again_warns_again(jitted: bool) -> None:
    module = model()
    loss_fn = module_loss(module, F.mse_loss)
    step = make_train_step(loss_fn, stateless(torch.optim.SGD, lr=0.1))
    run: Any = jit(step, backend="eager") if jitted else step
    state = step.init()
    for _ in range(3):
        with assert_silent():
            state, _ = run(state, (X, Y))
            module.load_state_dict(loss_fn.state_dict(state.params, state.buffers))
            module.eval()(X)
            module.train()
            state, _ = run(state, (X, Y))
        with pytest.warns(UserWarning, match=BEHIND), torch.no_grad():
            module(X)
        with assert_silent(), torch.no_grad():
            module(X)
            state, _ = run(state, (X, Y))
            module(X)  # not again, as nothing was written into it since


def test_a_loaded_state_leaves_the_module_behind() -> None:
    module = model().eval()
    step, state = taken(model())
    step = make_train_step(module_loss(module, F.mse_loss), stateless(torch.optim.SGD, lr=0.1))
    saved = step.state_dict(state)
    step.load_state_dict(saved, like=step.init(), consume=True)
    with assert_silent():
        module(X)
    step.load_state_dict(saved, like=step.init())
    with pytest.warns(UserWarning, match=BEHIND):
        module(X)


def pickled(value: object) -> Any:
    return pickle.loads(pickle.dumps(value))


def saved_and_loaded(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    assert b"funcamp" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(module: nn.Module) -> Any:
    return torch.optim.swa_utils.AveragedModel(module).module


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved_and_loaded, averaged])
def test_a_copy_of_a_module_that_is_behind_warns_and_has_nothing_of_it(copied: Any) -> None:
    module = model().eval()
    step, state = taken(module)
    with pytest.warns(UserWarning, match=BEHIND):
        other = copied(module)
    step(state, (X, Y))
    with assert_silent():
        copy.deepcopy(module)
        output = other(X)
        other.load_state_dict(other.state_dict())
        copied(other)
    assert_same(output, module(X))
    assert b"funcamp" not in pickle.dumps(other)


def test_a_tensor_that_has_the_address_of_one_that_is_gone_is_another() -> None:
    for _ in range(20):
        module = model()
        step, state = taken(module, steps=0)
        module.to("meta")
        state, _ = step(state, (X, Y))
        with assert_silent():
            module.to_empty(device="cpu").load_state_dict(step.loss_fn.state_dict(state.params, state.buffers))
            module.state_dict()


def test_a_copy_during_an_evaluation_is_silent() -> None:
    module = model()
    step, state = taken(module)
    with assert_silent(), step.evaluating(state) as trained:
        copies = [copy.deepcopy(trained), saved_and_loaded(trained)]
    for other in copies:
        assert_same(F.mse_loss(other(X), Y), step.loss(state, (X, Y)))


def test_a_module_of_many_losses_has_one_hook() -> None:
    module = model()
    for _ in range(3):
        taken(module)
    assert len(module._forward_pre_hooks) == len(module._state_dict_pre_hooks) == 1


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(1)
        self.register_buffer("beta", torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.layer(x)) * self.beta


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("consume", [False, True])
def test_a_buffer_that_the_caller_writes_is_right_or_warns(jitted: bool, consume: bool) -> None:
    module: Any = Weighted()
    step = make_train_step(module_loss(module, F.mse_loss), stateless(torch.optim.SGD, lr=0.1))
    run: Any = jit(step, backend="eager") if jitted else step
    state = step.init(consume=consume)
    for number in range(3):
        module(X)  # BatchNorm writes its statistics, of which nothing is said
        module.beta.fill_(0.5**number)
        if consume and (jitted or number == 0):
            with assert_silent():
                state, _ = run(state, (X, Y))
            assert_same(state.buffers["beta"], module.beta)
            continue
        with pytest.warns(UserWarning, match=r"'beta'.*changes nothing for the step.*state\.buffers\['beta'\]"):
            state, _ = run(state, (X, Y))
        assert state.buffers["beta"] == 1


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
    with pytest.warns(UserWarning, match=r"has older values than the state.*compute_params"):
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


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("consume", [False, True])
def test_a_copied_trainer_goes_on_as_the_original_does(copied: Any, jitted: bool, consume: bool) -> None:
    step, state = taken(model(), consume=consume, steps=0)
    trainer = {"model": step.loss_fn.model, "step": step, "state": state}
    other = copied(trainer)
    results = []
    for each in (trainer, other):
        run: Any = jit(each["step"], backend="eager") if jitted else each["step"]
        for _ in range(3):
            each["state"], metrics = run(each["state"], (X, Y))
        results.append((metrics.loss, each["state"].params.tree(), each["state"].buffers))
    assert_same(results[1], results[0])
    assert other["step"].loss_fn.model is other["model"]
    with pytest.warns(UserWarning, match=BEHIND):  # a copied parameter has memory of its own, also after consume
        other["model"].eval()(X)
