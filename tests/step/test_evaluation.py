"""`step.loss` evaluates a batch, `step.evaluating` lends the module the values to evaluate; it stays as it was."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import funcamp
from funcamp import average, chain, clip_by_norm, every, jit, make_train_step, module_loss, numerics, stateless
from funcamp._autograd.module_loss import _locks
from tests.support.foreign import ScheduleFree
from tests.support.helpers import assert_same, assert_silent, clone
from tests.support.steps import compiled, eager, traced

X, Y = torch.randn(6, 4), torch.randn(6, 1)
SGD = stateless(torch.optim.SGD, lr=0.1, momentum=0.9)


class Model(nn.Module):
    """With tied weights, a frozen layer, buffers, dropout, and parts in both modes."""

    def __init__(self, recurrent: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm, self.still = nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval()
        self.rnn = nn.GRU(4, 4) if recurrent else None
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4, 1)
        self.first.weight.note = "mine"  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        x = self.still(self.norm(self.second(self.first(self.frozen(x)))))
        x = x if self.rnn is None else self.rnn(x)[0]
        out: Tensor = self.head(self.drop(x))
        return out


def flags(model: nn.Module) -> list[bool]:
    return [part.training for part in model.modules()]


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def trained(optimizer: Any, model: nn.Module, *, wrap: Any = eager, consume: bool = False, **options: Any) -> Any:
    step = make_train_step(module_loss(model, F.mse_loss), optimizer, **options)
    run, state = wrap(step), step.init(consume=consume)
    for _ in range(3):
        state, _ = run(state, (X, Y))
    return step, state


def evaluators(step: Any) -> dict[str, Callable[[Any, Any], Tensor]]:
    return {
        "eager": step.loss,
        "jit": lambda state, batch: jit(lambda s, b: (s, step.loss(s, b)), backend="eager")(clone(state), batch)[1],
        "compiled": compiled(lambda s, b: step.loss(s, b)),
    }


@pytest.mark.compiled
@pytest.mark.parametrize("how", ["eager", "jit", "compiled"])
def test_the_loss_is_that_of_the_module_in_eval_mode(how: str) -> None:
    model = Model(recurrent=False)  # Dynamo does not trace a GRU
    step, state = trained(SGD, model, policy="bfloat16")
    before, values, plain = flags(model), clone(tensors(model)), Model(recurrent=False)
    plain.load_state_dict(step.loss_fn.state_dict(state.params, state.buffers))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = F.mse_loss(plain.eval()(X), Y)
    found = evaluators(step)[how](state, (X, Y))
    assert_same(found, expected)
    assert not found.requires_grad
    tracked, drawn = make_train_step(numerics.track_scales(step.loss_fn), SGD, policy="bfloat16"), torch.get_rng_state()
    assert_same(tracked.loss(state, (X, Y)), expected)
    assert_same(torch.get_rng_state(), drawn)
    with pytest.raises(RuntimeError):
        step.loss(state, (X[:, :1], Y))
    assert flags(model) == before
    assert_same(tensors(model), values)


def test_training_leaves_the_flags() -> None:
    model = Model()
    step, state = trained(SGD, model)
    torch.manual_seed(1)
    expected = step(state, (X, Y))[1].loss
    torch.manual_seed(1)
    assert_same(step.loss(state, (X, Y), training=True), expected)
    assert step.loss(state, (X, Y)) != expected


def mean_of(state: Any) -> Any:
    """The mean that `ScheduleFree` keeps of each parameter."""
    return state.opt_state.state["mean"]


OPTIMIZERS: dict[str, Any] = {
    "plain": (SGD, {}, lambda state: state.params.tree()),
    "ema_decay": (SGD, {"ema_decay": 0.5}, lambda state: state.ema.tree()),
    "average": (chain(SGD, every(2, average(0.5))), {}, lambda state: state.ema.tree()),
    "schedule-free, clipped": (chain(clip_by_norm(1.0), stateless(ScheduleFree)), {"max_norm": 9.0}, mean_of),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_the_module_has_the_values_to_evaluate(case: str) -> None:
    optimizer, options, values_of_state = OPTIMIZERS[case]
    model = Model()
    step, state = trained(optimizer, model, **options)
    expected = Model()
    expected.load_state_dict(step.loss_fn.state_dict(values_of_state(state), state.buffers))
    with assert_silent(), step.evaluating(state) as evaluated:
        assert evaluated is model
        assert not any(flags(model))
        output = model(X)
        assert_same(dict(model.state_dict()), dict(expected.state_dict()))
    assert not output.requires_grad
    with torch.no_grad():
        assert_same(output, expected.eval()(X))
    if state.ema:
        with step.evaluating(state, average=False):
            assert_same(F.mse_loss(model(X), Y), step.loss(state, (X, Y)))
        assert_same(F.mse_loss(output, Y), step.loss(state._replace(params=state.ema), (X, Y)))


@pytest.mark.compiled
@pytest.mark.parametrize("how", [{}, {"wrap": traced, "consume": True}], ids=["eager", "consumed"])
def test_the_module_is_as_it_was_and_the_state_too(how: dict[str, Any]) -> None:
    model = Model()
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
    if how:
        assert model.head.weight.data_ptr() == state.params["head.weight"].data_ptr()


def test_what_a_user_does_inside_of_an_evaluation() -> None:
    """Steps, losses, an evaluation of another state, and gradients with respect to an input."""
    model = Model()
    step, state = trained(SGD, model)
    model.drop.eval()  # no draws
    expected_loss, expected = step.loss(state, (X, Y)), step(state, (X, Y))[0]
    with step.evaluating(state) as evaluated:
        output = evaluated(X)
        assert_same(step.loss(state, (X, Y)), expected_loss)
        with step.evaluating(expected):
            assert not torch.equal(evaluated(X), output)
        assert_same(evaluated(X), output)
        x = X.clone().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(evaluated(x).sum(), x)
    assert slope.abs().sum() > 0


class NotingLock:
    """A lock that sets an event as soon as a thread must wait for it."""

    def __init__(self, waits: threading.Event) -> None:
        self.lock, self.waits = threading.RLock(), waits

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.waits.set()
            self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_a_jitted_step_does_not_train_with_the_flags_of_an_evaluation() -> None:
    """Although it has a program for them. A step in the evaluation is refused, and that of another thread waits."""
    model, waits_or_done = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), threading.Event()
    _locks[model] = NotingLock(waits_or_done)  # type: ignore[assignment]
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, state = traced(step), step.init()
    for is_training in (True, False):
        model.train(is_training)
        state, _ = run(state, (X, Y))
    model.train()
    expected, _ = step(clone(state), (X, Y))
    with concurrent.futures.ThreadPoolExecutor() as threads, step.evaluating(clone(state)):
        with pytest.raises(RuntimeError, match=r"step: it must be called outside of `with step\.evaluating"):
            run(state, (X, Y))
        result = threads.submit(run, state, (X, Y))
        result.add_done_callback(lambda _: waits_or_done.set())
        waits_or_done.wait()
        assert not result.done()
    assert_same(result.result()[0].buffers, expected.buffers)


def test_an_evaluation_that_is_traced_and_a_step_of_another_thread_take_turns() -> None:
    model = nn.Linear(4, 1)
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run, is_tracing, is_called = traced(step), threading.Event(), threading.Event()
    run(step.init(), (X, Y))

    def error(state: Any, batch: Any) -> Any:
        is_tracing.set()
        is_called.wait(0.2)  # the other thread waits for its turn then
        return state, step.loss(state, batch)

    def call_while_tracing() -> None:
        is_tracing.wait()
        run(step.init(), (X, Y))
        is_called.set()

    calls = [lambda: run.also(error)(step.init(), (X, Y)), call_while_tracing]
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_an_inference_region_may_be_around_an_evaluation_and_a_clone() -> None:
    model = Model()
    step, state = trained(SGD, model)
    with torch.inference_mode(), step.evaluating(state) as evaluated:
        output, best = evaluated(X), funcamp.clone(state)
        evaluated.state_dict()
    with step.evaluating(best) as evaluated:
        assert_same(evaluated(X), output)
    model.drop.eval()
    assert_same(step(best, (X, Y)), step(state, (X, Y)))
