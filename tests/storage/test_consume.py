"""`init(consume=True)`: the state takes a module's place; every number is as without, and memory is held once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from funcamp import ScalerConfig, stateless
from tests.support.helpers import assert_same, clone, values_of
from tests.support.models import Task, cnn, tied
from tests.support.stand_in import StandIn
from tests.support.steps import build, eager, eager_and_traced, traced

SGD = stateless(torch.optim.SGD, lr=0.1, momentum=0.9)
FLAT = pytest.mark.parametrize("flat", [True, False])


class Mixed(nn.Module):
    """Frozen layers, ties, buffers of every kind, two dtypes, views of one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.again = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.first.requires_grad_(False)
        self.again.weight = self.last.weight
        self.narrow, self.norm = nn.Linear(8, 8).to(torch.bfloat16), nn.BatchNorm1d(8)
        memory = torch.randn(8 * 8 + 8)  # as cuDNN lays an LSTM's parameters out
        self.flat = nn.ParameterList([memory[:64].view(8, 8), memory[64:]])
        mean, variance = (self.norm.get_buffer(f"running_{name}") for name in ("mean", "var"))
        self.register_buffer("mean", mean)
        self.register_buffer("alias", variance.detach())  # another object, one memory
        self.register_buffer("order", torch.arange(8), persistent=False)
        self.register_buffer("flag", torch.ones(1, dtype=torch.bool).expand(8))
        self.register_buffer("nothing", torch.zeros(0))
        self.scale = nn.Parameter(torch.ones(1).expand(8))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(self.again(torch.tanh(self.last(self.first(x)))), *self.flat)
        x = x[:, self.get_buffer("order")] * self.get_buffer("flag")
        out: Tensor = self.norm(self.narrow(x.to(torch.bfloat16)).float()) * self.scale
        return out + self.get_buffer("alias")


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(5, 8, generator=generator), torch.randn(5, 8, generator=generator)


def small(make: Callable[[], nn.Module]) -> Task:
    torch.manual_seed(0)
    return Task(make(), F.mse_loss, batch)


MODELS: dict[str, Callable[[], Task]] = {
    "every kind": lambda: small(Mixed),
    "cnn": cnn,
    "tied": tied,
}


def step_of(task: Task, optimizer: Any = SGD, **options: Any) -> Any:
    return build(task, optimizer, **{"config": ScalerConfig(1024.0), "policy": "bfloat16", **options})


def storages(tree: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(tree) if leaf is not None and leaf.numel()}


def taken(model: nn.Module) -> list[Tensor]:
    """What a state takes over: all but frozen parameters."""
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    return [t for t in (*model.parameters(), *model.buffers()) if id(t) not in frozen]


def objects(model: nn.Module) -> list[Any]:
    return [(name, id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)]


@pytest.mark.thorough(keep=6)
@pytest.mark.compiled
@eager_and_traced
@FLAT
@pytest.mark.parametrize("name", MODELS)
def test_every_number_is_as_without(name: str, flat: bool, wrap: Any) -> None:
    task, plain = MODELS[name](), MODELS[name]()
    step, other, before = step_of(task), step_of(plain), objects(task.model)
    state, expected = step.init(flat=flat, consume=True), other.init(flat=flat)
    first = clone(dict(plain.model.state_dict()))
    assert_same((state, dict(task.model.state_dict())), (expected, first))
    run, reference = wrap(step), wrap(other)
    for number in range(3):
        state, metrics = run(state, task.batch(number))
        expected, wanted = reference(expected, task.batch(number))
        assert_same((state, metrics), (expected, wanted))
    assert objects(task.model) == before
    trained = step.loss_fn.state_dict(state.params, state.buffers)
    own = {key: value for key, value in values_of(task.model).items() if key in first}
    assert_same(own, {key: (first if wrap is eager else trained)[key] for key in own})
    task.model.load_state_dict(trained)
    plain.model.load_state_dict(other.loss_fn.state_dict(expected.params, expected.buffers), assign=True)
    assert_same(dict(task.model.state_dict()), dict(plain.model.state_dict()))


@FLAT
@pytest.mark.parametrize("name", MODELS)
def test_the_modules_memory_is_the_states(name: str, flat: bool) -> None:
    task = MODELS[name]()
    for leaf in task.model.parameters():
        leaf.grad = torch.zeros_like(leaf) if leaf.requires_grad else None
    grads = [p.grad for p in task.model.parameters() if p.grad is not None]
    former = [StorageWeakRef(leaf.untyped_storage()) for leaf in (*taken(task.model), *grads)]
    del grads, leaf
    state = step_of(task).init(flat=flat, consume=True)
    gc.collect()
    assert all(reference.expired() for reference in former)
    assert storages(taken(task.model)) <= storages((state.params, state.buffers))
    assert len(storages(state)) == len([leaf for leaf in tree_leaves(state) if leaf.numel()])


class Live(TorchDispatchMode):
    """The most bytes that operations' results have taken at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._seen = 0, dict[StorageWeakRef, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._seen[StorageWeakRef(leaf.untyped_storage())] = leaf.untyped_storage().nbytes()
        self._seen = {reference: size for reference, size in self._seen.items() if not reference.expired()}
        self.peak = max(self.peak, sum(self._seen.values()))
        return out


@FLAT
@pytest.mark.parametrize("consume", [True, False])
def test_init_takes_little_more_than_its_state(consume: bool, flat: bool) -> None:
    """In bytes of the parameters: they and two moments; where not consumed the module's too."""
    with Live() as live:
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
        size = sum(leaf.nbytes for leaf in model.parameters())
        step_of(Task(model, F.mse_loss, batch), stateless(torch.optim.AdamW)).init(flat=flat, consume=consume)
    held = 3 if consume else 4
    assert 0.99 * held * size <= live.peak <= (held + 0.1) * size


def lstm_policy() -> str | None:
    """bfloat16, unless torch itself trains no LSTM in it here: oneDNN does not on some processors."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError:
        return None
    return "bfloat16"


def test_an_lstm_keeps_its_list_of_weights() -> None:
    model = nn.LSTM(8, 8)
    task = Task(model, lambda output, target: F.mse_loss(output[0], target), batch)
    step, expected = step_of(task, policy=lstm_policy()), model(batch(0)[0])
    state = step.init(consume=True)
    assert_same(model(batch(0)[0]), expected)
    assert storages(model._flat_weights) <= storages(state)
    after, _ = step(state, batch(0))
    model.load_state_dict(step.loss_fn.state_dict(after.params))
    assert_same(step.loss(after, batch(1)), step.loss(step.init(), batch(1)))


# The state goes on: donated, made again, loaded.


@pytest.fixture(params=["compiled", "captured"])
def donating(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    if request.param == "captured":
        StandIn().take_place(monkeypatch)
    return traced


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@FLAT
@pytest.mark.parametrize("name", ["every kind", "cnn"])
def test_donation_takes_the_state_over_as_it_is(name: str, flat: bool, donating: Callable[[Any], Any]) -> None:
    task = MODELS[name]()
    step = step_of(task)
    state, run = step.init(flat=flat, consume=True), donating(step)
    places = [leaf.data_ptr() for leaf in taken(task.model)]
    after, _ = run(state, task.batch(0))
    assert after is state
    assert [leaf.data_ptr() for leaf in taken(task.model)] == places
    assert_same(dict(task.model.state_dict()), step.loss_fn.state_dict(after.params, after.buffers))
    later = step.init(flat=flat, consume=True)  # begins with what the module has, in other memory
    assert_same((later.params, later.buffers), (after.params, after.buffers))
    assert not storages(taken(task.model)) & storages(after)


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("how", ["load_state_dict", "from_torch"])
@FLAT
@pytest.mark.parametrize("name", ["every kind", "cnn"])
def test_a_loaded_state_takes_the_modules_place(name: str, flat: bool, how: str) -> None:
    former, task = MODELS[name](), MODELS[name]()
    step, other, before = step_of(former), step_of(task), objects(task.model)
    state, _ = step(step.init(flat=flat), former.batch(0))
    first = other.init(flat=flat, consume=True)
    values = clone(first)
    for _ in range(2):  # again, of a state that the module has left
        if how == "load_state_dict":
            current = other.load_state_dict(step.state_dict(state), like=first, consume=True)
        else:
            current = other.from_torch(first, optimizer=step.to_torch(state)["optimizer"], consume=True)
        assert_same(first, values)
        assert objects(task.model) == before
        assert storages(taken(task.model)) <= storages((current.params, current.buffers))
        assert not storages(current) & storages(first)
    expected, _ = step(state, task.batch(1)) if how == "load_state_dict" else other(clone(current), task.batch(1))
    current, _ = traced(other)(current, task.batch(1))
    assert_same((current.params, current.buffers), (expected.params, expected.buffers))
    assert_same(dict(task.model.state_dict()), other.loss_fn.state_dict(current.params, current.buffers))


@pytest.mark.parametrize("how", ["init", "load_state_dict"])
@pytest.mark.parametrize("wrap", [traced, lambda step: traced(lambda state, batch: step(state, batch))])
def test_a_module_that_numpy_reads_is_trained_with_the_state(wrap: Callable[[Any], Any], how: str) -> None:
    """`.numpy()` lets memory look as if it were not torch's."""
    task = small(two_layers)
    step = step_of(task)
    state, run = step.init(consume=True), wrap(step)
    if how == "load_state_dict":
        state = step.load_state_dict(step.state_dict(state), like=state, consume=True)
    for number in range(4):
        if number % 2 == 0:
            taken(task.model)[-1].detach().numpy()
            run = wrap(step)  # takes the state over
        former, (state, _) = state, run(state, task.batch(number))
        assert state is former
        assert_same(dict(task.model.state_dict()), step.loss_fn.state_dict(state.params))


# The module goes on: it is written, differentiated, and known to others.


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    F.mse_loss(model(batch(7)[0]), batch(7)[1]).backward()
    optimizer.step()


@pytest.mark.compiled
@pytest.mark.parametrize("write", [load, train])
def test_what_is_written_into_the_module_reaches_the_loss(
    write: Callable[[nn.Module], None], donating: Callable[[Any], Any]
) -> None:
    task = small(two_layers)
    step = step_of(task)
    state, run = step.init(consume=True), donating(step)
    for number in range(3):
        write(task.model)
        fresh = step.init()
        assert_same(state.params, fresh.params)
        assert_same(step.loss(state, batch(number)), step.loss(fresh, batch(number)))
        expected, wanted = step(clone(state), batch(number))
        state, metrics = run(state, batch(number))
        assert_same((state, metrics), (expected, wanted))
        assert_same(dict(task.model.state_dict()), step.loss_fn.state_dict(state.params))


@pytest.mark.compiled
@FLAT
def test_a_graph_from_before_is_refused(flat: bool, donating: Callable[[Any], Any]) -> None:
    task = small(two_layers)
    step = step_of(task)

    def loss() -> Tensor:
        return F.mse_loss(task.model(batch(8)[0]), batch(8)[1])

    before = loss()
    state, run = step.init(flat=flat, consume=True), donating(step)
    with pytest.raises(RuntimeError, match=r"init: consume must be False if backward is called later"):
        before.backward()
    for number in range(2):
        before = loss()
        run(state, batch(number))
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
            before.backward()
    loss().backward()
