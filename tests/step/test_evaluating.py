"""`step.evaluating` lends the module the values to evaluate, and leaves it as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import average, by_group, chain, clip_by_norm, every, jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same, assert_silent, clone

X, Y = torch.randn(6, 4), torch.randn(6, 1)
SGD = stateless(torch.optim.SGD, lr=0.1, momentum=0.9)


class ScheduleFree(torch.optim.Optimizer):
    """Evaluates with a mean of its parameters, as schedule-free classes do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "train_mode": False})

    def train(self) -> None:
        self.param_groups[0]["train_mode"] = True

    def eval(self) -> None:
        for p in self.param_groups[0]["params"]:
            if "mean" in self.state[p]:
                p.data.copy_(self.state[p]["mean"])
        self.param_groups[0]["train_mode"] = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            mean = self.state[p].setdefault("mean", p.clone())
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
            mean.lerp_(p, 0.25)


class Tied(nn.Module):
    """With tied weights, a frozen layer, buffers, and parts in both modes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.rnn = nn.GRU(4, 4)
        self.drop = nn.Dropout(0.5).eval()
        self.head = nn.Linear(4, 1)
        self.first.weight.note = "mine"  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        x = self.rnn(self.norm(self.second(self.first(self.frozen(x)))))[0]
        out: Tensor = self.head(self.drop(x))
        return out


def flags(model: nn.Module) -> list[bool]:
    return [part.training for part in model.modules()]


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def trained(optimizer: Any, model: nn.Module, *, jitted: bool = False, consume: bool = False, **options: Any) -> Any:
    step = make_train_step(module_loss(model, F.mse_loss), optimizer, **options)
    run: Any = jit(step, backend="eager") if jitted else step
    state = step.init(consume=consume)
    for _ in range(3):
        state, _ = run(state, (X, Y))
    return step, state


def mean_of(state: Any) -> Any:
    """The mean that `ScheduleFree` keeps of each parameter."""
    return state.opt_state.state["mean"]


OPTIMIZERS: dict[str, Any] = {
    "plain": (SGD, {}, lambda state: state.params.tree()),
    "ema_decay": (SGD, {"ema_decay": 0.5}, lambda state: state.ema.tree()),
    "average": (chain(SGD, every(2, average(0.5))), {}, lambda state: state.ema.tree()),
    "schedule-free": (stateless(ScheduleFree), {}, mean_of),
    "schedule-free, clipped": (chain(clip_by_norm(1.0), stateless(ScheduleFree)), {"max_norm": 9.0}, mean_of),
}


@pytest.mark.compiled
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_the_module_has_the_values_to_evaluate(case: str, jitted: bool) -> None:
    optimizer, options, values_of_state = OPTIMIZERS[case]
    model = Tied()
    step, state = trained(optimizer, model, jitted=jitted, **options)
    expected = copy.deepcopy(Tied())
    expected.load_state_dict(step.loss_fn.state_dict(values_of_state(state), state.buffers))
    with assert_silent(), step.evaluating(state) as evaluated:
        assert evaluated is model
        assert not any(flags(model))
        output = model(X)
        assert_same(dict(model.state_dict()), dict(expected.state_dict()))
    assert not output.requires_grad
    with torch.no_grad():
        assert_same(output, expected.eval()(X))


def test_the_loss_is_of_the_parameters_and_the_module_of_their_average() -> None:
    step, state = trained(SGD, Tied(), ema_decay=0.5)
    averaged = state._replace(params=state.ema)
    for takes_average, state_of_loss in ((True, averaged), (False, state)):
        with step.evaluating(state, average=takes_average) as model:
            assert_same(F.mse_loss(model(X), Y), step.loss(state_of_loss, (X, Y)))
    assert step.loss(state, (X, Y)) != step.loss(averaged, (X, Y))


def test_a_group_of_parameters_may_be_schedule_free() -> None:
    model = nn.Linear(4, 1)
    step, state = trained(by_group({"matrix": stateless(ScheduleFree), "vector": SGD}), model)
    with step.evaluating(state):
        weight, bias = model.weight.clone(), model.bias.clone()
    assert_same(weight, state.opt_state["matrix"].state["mean"]["weight"])
    assert_same(bias, state.params["bias"])


@pytest.mark.parametrize("flat", [True, False])
def test_the_parameters_to_evaluate_of_a_steps_state(flat: bool) -> None:
    optimizer = stateless(ScheduleFree)
    step = make_train_step(module_loss(nn.Linear(4, 1), F.mse_loss), optimizer)
    state = step.init(flat=flat)
    for _ in range(2):
        state, _ = step(state, (X, Y))
    evaluated = optimizer.evaluation_params(state.params, state.opt_state)
    assert_same(evaluated.tree(), mean_of(state))
    assert not torch.equal(evaluated["weight"], state.params["weight"])


@pytest.mark.compiled
@pytest.mark.parametrize("how", [{}, {"consume": True}, {"jitted": True, "consume": True}, {"jitted": True}], ids=str)
def test_the_module_is_as_it_was_and_the_state_too(how: dict[str, Any]) -> None:
    model = Tied()
    step, state = trained(SGD, model, **how)
    own, values, flags_before, state_before = tensors(model), clone(tensors(model)), flags(model), clone(state)
    with step.evaluating(state) as evaluated:
        assert evaluated.first.weight is evaluated.second.weight
        assert evaluated.first.weight.note == "mine"
        assert isinstance(evaluated.first.weight, nn.Parameter)
        assert evaluated.first.weight.requires_grad
        assert evaluated.frozen.weight is own["frozen.weight"]
        evaluated.train()
        evaluated(X)  # BatchNorm writes its statistics
        evaluated.first.weight.zero_()
    with pytest.raises(RuntimeError, match="shapes"), step.evaluating(state):
        model(X[:, :1])
    assert flags(model) == flags_before
    assert all(tensor is own[name] for name, tensor in tensors(model).items())
    assert_same(tensors(model), values)
    assert_same(state, state_before)
    if how.get("consume") and how.get("jitted"):
        assert model.head.weight.data_ptr() == state.params["head.weight"].data_ptr()


def test_steps_and_losses_inside_of_an_evaluation() -> None:
    model = Tied()
    step, state = trained(SGD, model)
    expected_loss, expected = step.loss(state, (X, Y)), step(state, (X, Y))[0]
    model.train()
    with step.evaluating(state) as evaluated:
        output = evaluated(X)
        assert_same(step.loss(state, (X, Y)), expected_loss)
        with step.evaluating(expected):
            assert not torch.equal(evaluated(X), output)
        assert_same(evaluated(X), output)


def test_gradients_with_respect_to_an_input() -> None:
    step, state = trained(SGD, nn.Linear(4, 1))
    x = X.clone().requires_grad_()
    with step.evaluating(state) as model, torch.enable_grad():
        (slope,) = torch.autograd.grad(model(x).sum(), x)
    assert_same(slope, state.params["weight"].expand(6, 4))


def test_a_loss_without_a_module_has_none_to_evaluate() -> None:
    step = make_train_step(lambda p, x: (p["w"] * x).sum(), SGD)
    state = step.init({"w": torch.ones(2)})
    with pytest.raises(TypeError, match="evaluating: the step must have a loss of module_loss"), step.evaluating(state):
        pass
    with pytest.raises(TypeError, match="evaluating: state must be a TrainState"), step.evaluating(state.params):  # type: ignore[arg-type]
        pass
