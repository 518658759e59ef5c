"""`init(consume=True)`: the state takes a module's place; every number is as without, and memory is held once."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from funcamp import ScalerConfig, jit, make_train_step, module_loss, numerics, stateless
from funcamp._jit import cuda_graph
from tests.support.helpers import assert_same, clone, values_of
from tests.support.models import cnn, lstm_policies, mlp, tied
from tests.support.stand_in import StandIn

SGD = stateless(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS = 3


class Mixed(nn.Module):
    """Frozen layers, ties, buffers of every kind, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.again = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.first.requires_grad_(False)
        self.again.weight = self.last.weight
        self.narrow, self.norm = nn.Linear(8, 8).to(torch.bfloat16), nn.BatchNorm1d(8)
        mean, variance = (self.norm.get_buffer(f"running_{name}") for name in ("mean", "var"))
        self.register_buffer("mean", mean)
        self.register_buffer("alias", variance.detach())  # another object, one memory
        self.kept = nn.Parameter(variance.detach(), requires_grad=False)
        self.register_buffer("order", torch.arange(8), persistent=False)
        self.register_buffer("flag", torch.ones(1, dtype=torch.bool).expand(8))
        self.register_buffer("turn", torch.zeros(2, dtype=torch.complex64).conj())
        self.register_buffer("mask", torch.ones(64).view(8, 8))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("absent", None)
        self.scale = nn.Parameter(torch.ones(1).expand(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(torch.tanh(self.last(self.first(x))))[:, self.get_buffer("order")] * self.get_buffer("flag")
        out: Tensor = self.norm(self.narrow(x.to(torch.bfloat16)).float()) * self.scale
        return out + self.get_buffer("alias") + self.kept


class Flattened(nn.Module):
    """Parameters that are views of one buffer, as cuDNN lays an LSTM's out."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(8 * 8 + 8)
        self.weight, self.bias = nn.Parameter(memory[:64].view(8, 8)), nn.Parameter(memory[64:])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def channels_last() -> nn.Module:
    model = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 8, 2), nn.Flatten())
    for leaf in model.parameters():
        leaf.data = leaf.data.contiguous(memory_format=torch.channels_last) if leaf.dim() == 4 else leaf.data
    return model


def normed() -> nn.Module:
    return nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))


SMALL: dict[str, Callable[[], nn.Module]] = {
    "every kind": Mixed,
    "views of one buffer": Flattened,
    "channels_last": channels_last,
    "parametrized": normed,
}


def made(name: str) -> tuple[nn.Module, Any, Callable[[int], Any]]:
    torch.manual_seed(0)
    if name in SMALL:
        return SMALL[name](), F.mse_loss, batch
    task = {"mlp": mlp, "cnn": cnn, "tied": tied}[name]()
    return task.model, task.criterion, task.batch


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(5, 8, generator=generator), torch.randn(5, 8, generator=generator)


MODELS = [*SMALL, "mlp", "cnn", "tied"]


def step_of(model: nn.Module, criterion: Any, **options: Any) -> Any:
    options = {"policy": "bfloat16", "optimizer": SGD, **options}
    return make_train_step(module_loss(model, criterion), options.pop("optimizer"), ScalerConfig(1024.0), **options)


def storages(tree: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(tree) if leaf is not None and leaf.numel()}


def taken(model: nn.Module) -> list[Tensor]:
    """What a state takes over: all but frozen parameters."""
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    return [t for t in (*model.parameters(), *model.buffers()) if id(t) not in frozen]


RUNS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda step: step,
    "donated": lambda step: jit(step, backend="eager"),
    "undonated": lambda step: jit(step, backend="eager", donate=False),
}


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(
    ("name", "run"), [(name, run) for name in MODELS for run in RUNS if run != "undonated" or name in ("mlp", "cnn")]
)
def test_every_number_is_as_without(name: str, flat: bool, run: str) -> None:
    (model, criterion, batches), (plain, _, _) = made(name), made(name)
    step, other = step_of(model, criterion), step_of(plain, criterion)
    objects = [(name, id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)]
    before = dict(model.state_dict())
    state, expected = step.init(flat=flat, consume=True), other.init(flat=flat)
    first = clone(dict(plain.state_dict()))
    assert_same(state, expected)
    assert_same(dict(model.state_dict()), first)
    assert before.keys() == first.keys()
    call, reference = RUNS[run](step), RUNS[run](other)
    for number in range(STEPS):
        state, metrics = call(state, batches(number))
        expected, wanted = reference(expected, batches(number))
        assert_same((state, metrics), (expected, wanted))
    assert [(n, id(p), p.requires_grad) for n, p in model.named_parameters(remove_duplicate=False)] == objects
    trained = step.loss_fn.state_dict(state.params, state.buffers)
    own = {name: value for name, value in values_of(model).items() if name in first}
    assert_same(own, {name: (trained if run == "donated" else first)[name] for name in own})
    model.load_state_dict(trained)
    plain.load_state_dict(other.loss_fn.state_dict(expected.params, expected.buffers), assign=True)
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    assert_same(model.eval()(batches(0)[0]), plain.eval()(batches(0)[0]))


@pytest.mark.thorough
@pytest.mark.inductor
def test_every_number_is_as_without_under_inductor() -> None:
    model, criterion, batches = made("cnn")
    other, step = step_of(made("cnn")[0], criterion), step_of(model, criterion)
    state, expected = step.init(consume=True), other.init()
    call, reference = jit(step), jit(other)
    for number in range(STEPS):
        state, metrics = call(state, batches(number))
        expected, wanted = reference(expected, batches(number))
        assert_same((state, metrics), (expected, wanted))
    assert_same(dict(model.state_dict()), step.loss_fn.state_dict(state.params, state.buffers))


@pytest.mark.thorough(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_modules_memory_is_the_states(name: str, flat: bool) -> None:
    model, criterion, _ = made(name)
    for leaf in model.parameters():
        leaf.grad = torch.zeros_like(leaf) if leaf.requires_grad else None
    grads = [StorageWeakRef(p.grad.untyped_storage()) for p in model.parameters() if p.grad is not None]
    former = [StorageWeakRef(leaf.untyped_storage()) for leaf in taken(model)]
    state = step_of(model, criterion).init(flat=flat, consume=True)
    gc.collect()
    assert all(reference.expired() for reference in former + grads)
    assert storages(taken(model)) <= storages((state.params, state.buffers))
    assert len(storages(state)) == len([leaf for leaf in tree_leaves(state) if leaf.numel()])


@pytest.fixture(params=["compiled", "captured"])
def donating(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    if request.param == "captured":
        monkeypatch.setattr(cuda_graph, "graphs_for", lambda device: StandIn())
    return lambda step: jit(step, backend="eager")


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_donation_takes_the_state_over_as_it_is(name: str, flat: bool, donating: Callable[[Any], Any]) -> None:
    model, criterion, batches = made(name)
    step = step_of(model, criterion)
    state = step.init(flat=flat, consume=True)
    places = [leaf.data_ptr() for leaf in taken(model)]
    after, _ = donating(step)(state, batches(0))
    assert after is state
    assert [leaf.data_ptr() for leaf in taken(model)] == places
    assert_same(dict(model.state_dict()), step.loss_fn.state_dict(after.params, after.buffers))


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


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("consume", [True, False])
def test_init_takes_little_more_than_its_state(consume: bool, flat: bool) -> None:
    """In bytes of the parameters: they and two moments; where not consumed the module's too."""
    with Live() as live:
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
        size = sum(leaf.nbytes for leaf in model.parameters())
        adamw = stateless(torch.optim.AdamW)
        assert len(storages(taken(model))) == 4
        state = step_of(model, F.mse_loss, optimizer=adamw).init(flat=flat, consume=consume)
    assert len(tree_leaves(state.params)) == (1 if flat else 4)
    held = 3 if consume else 4
    assert 0.99 * held * size <= live.peak <= (held + 0.1) * size


def test_a_tracked_loss_takes_the_modules_place_too() -> None:
    model, criterion, batches = made("cnn")
    plain = step_of(model, criterion)
    step = make_train_step(numerics.track_scales(plain.loss_fn), SGD, ScalerConfig(1024.0), policy="bfloat16")
    expected, _ = plain(plain.init(), batches(0))
    state = step.init(consume=True)
    assert storages(taken(model)) <= storages(state)
    assert_same(step(state, batches(0))[0], expected)


def test_an_lstm_keeps_its_list_of_weights() -> None:
    model = nn.LSTM(8, 8)
    step = step_of(model, lambda output, target: F.mse_loss(output[0], target), policy=lstm_policies()[-1])
    expected, (state, _) = model(batch(0)[0]), (step.init(consume=True), None)
    assert_same(model(batch(0)[0]), expected)
    assert storages(model._flat_weights) <= storages(state)
    after, _ = step(state, batch(0))
    model.load_state_dict(step.loss_fn.state_dict(after.params))
    assert_same(step.loss(after, batch(1)), step.loss(step.init(), batch(1)))


def test_a_later_init_begins_with_what_the_module_has() -> None:
    model, criterion, batches = made("cnn")
    step = step_of(model, criterion)
    state, _ = jit(step, backend="eager")(step.init(consume=True), batches(0))
    other = step.init(consume=True)
    assert_same((other.params, other.buffers), (state.params, state.buffers))
    assert not storages(taken(model)) & storages(state)


def trained(name: str, flat: bool) -> tuple[Any, Any]:
    """A step, and a state of it after some steps."""
    model, criterion, batches = made(name)
    step = step_of(model, criterion)
    state, call = step.init(flat=flat), jit(step, backend="eager")
    for number in range(STEPS):
        state, _ = call(state, batches(number))
    return step, state


def loaded(step: Any, state: Any, other: Any, like: Any, how: str) -> Any:
    """A trained state as another step's, by either call."""
    if how == "load_state_dict":
        return other.load_state_dict(step.state_dict(state), like=like, consume=True)
    return other.from_torch(like, optimizer=step.to_torch(state)["optimizer"], consume=True)


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("how", ["load_state_dict", "from_torch"])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_state_takes_the_modules_place(
    name: str, flat: bool, how: str, donating: Callable[[Any], Any]
) -> None:
    step, state = trained(name, flat)
    model, criterion, batches = made(name)
    other = step_of(model, criterion)
    objects = [id(p) for p in model.parameters()]
    first = other.init(flat=flat, consume=True)
    before = clone(first)
    current = loaded(step, state, other, first, how)
    assert_same(first, before)
    assert [id(p) for p in model.parameters()] == objects
    assert storages(taken(model)) <= storages((current.params, current.buffers))
    assert not storages(current) & storages(first)
    assert_same(dict(model.state_dict()), other.loss_fn.state_dict(current.params, current.buffers))
    expected, _ = step(state, batches(STEPS)) if how == "load_state_dict" else other(clone(current), batches(STEPS))
    current, _ = donating(other)(current, batches(STEPS))
    assert_same((current.params, current.buffers), (expected.params, expected.buffers))
    assert_same(dict(model.state_dict()), other.loss_fn.state_dict(current.params, current.buffers))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("flat", [True, False])
def test_a_module_stays_with_its_state_when_another_one_is_loaded_without(flat: bool, before: bool) -> None:
    step, state = trained("cnn", flat)
    model, criterion, _ = made("cnn")
    other = step_of(model, criterion)
    first = other.init(flat=flat, consume=before)
    values = clone(dict(model.state_dict()))
    current = other.load_state_dict(step.state_dict(state), like=first)
    with pytest.warns(UserWarning, match="has older values than the state"):
        assert_same(dict(model.state_dict()), values)
    assert bool(storages(taken(model)) & storages(first)) == before
    for number in range(2):  # again, and of a state that the module has left
        current = other.load_state_dict(step.state_dict(state), like=first, consume=True)
        assert storages(taken(model)) <= storages(current), number
    assert_same(dict(model.state_dict()), step.loss_fn.state_dict(state.params, state.buffers))


def test_loading_for_a_module_needs_one() -> None:
    step = make_train_step(lambda p, x: (p["w"] * x).sum(), SGD)
    state = step.init({"w": torch.ones(2)})
    with pytest.raises(TypeError, match="load_state_dict: consume must be False for a loss that"):
        step.load_state_dict(step.state_dict(state), like=state, consume=True)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("when", "consume", "run"),
    # Not after init(consume=True) in an eager step: there an alias is in the memory of the values that the loss gets.
    [
        case
        for case in itertools.product(["before", "after"], [True, False], ["eager", "donated"])
        if case != ("after", True, "eager")
    ],
)
def test_an_alias_of_a_parameter_is_no_constant(when: str, consume: bool, run: str) -> None:
    # In torch's loop it has the parameter's new values after each step.
    model = nn.Linear(8, 8)
    start = [model.weight.detach()]
    step = step_of(model, lambda output, target: F.mse_loss(output, target) + (output * start[0][0]).sum())
    state = step.init(consume=consume)
    if when == "after":
        start[0] = model.weight.detach()
    with pytest.raises(ValueError, match=r"got 'weight' as a tensor kept from before .* keep a clone\(\) if it is a"):
        RUNS[run](step)(state, batch(0))
    start[0] = start[0].clone()
    RUNS[run](step)(state, batch(0))


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for leaf in model.parameters():
            leaf.clamp_(-0.1, 0.1)


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    F.mse_loss(model(batch(7)[0]), batch(7)[1]).backward()
    optimizer.step()


@pytest.mark.compiled
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("write", [load, clamp, train])
def test_what_is_written_into_the_module_reaches_the_loss(
    write: Callable[[nn.Module], None], flat: bool, donating: Callable[[Any], Any]
) -> None:
    model = two_layers()
    step = step_of(model, F.mse_loss)
    state, call = step.init(flat=flat, consume=True), donating(step)
    for number in range(STEPS):
        write(model)
        fresh = step.init(flat=flat)
        assert_same((state.params, step.compute_params(state)), (fresh.params, step.compute_params(fresh)))
        assert_same(step.loss(state, batch(number)), step.loss(fresh, batch(number)))
        expected, wanted = step(clone(state), batch(number))
        state, metrics = call(state, batch(number))
        assert_same((state, metrics), (expected, wanted))
        assert_same(dict(model.state_dict()), step.loss_fn.state_dict(state.params))


def backward_after(call: Callable[[], Any], model: nn.Module) -> None:
    loss = F.mse_loss(model(batch(8)[0]), batch(8)[1])
    call()
    loss.backward()


@pytest.mark.compiled
@pytest.mark.parametrize("flat", [True, False])
def test_a_graph_from_before_a_step_is_refused(flat: bool, donating: Callable[[Any], Any]) -> None:
    model = two_layers()
    step = step_of(model, F.mse_loss)
    state, call = step.init(flat=flat, consume=True), donating(step)
    for number in range(2):
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
            backward_after(lambda number=number: call(state, batch(number)), model)  # type: ignore[misc]
    model(batch(0)[0]).sum().backward()


@pytest.mark.inductor
def test_a_graph_from_before_a_step_is_refused_under_inductor() -> None:
    model = two_layers()
    step = step_of(model, F.mse_loss)
    state, call = step.init(consume=True), jit(step)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
            backward_after(lambda: call(state, batch(0)), model)


@pytest.mark.parametrize("flat", [True, False])
def test_a_graph_from_before_init_is_refused(flat: bool) -> None:
    model = two_layers()
    step = step_of(model, F.mse_loss)
    with pytest.raises(RuntimeError, match=r"init: consume must be False if backward is called later"):
        backward_after(lambda: step.init(flat=flat, consume=True), model)


@pytest.mark.parametrize("flat", [True, False])
def test_the_modules_parameters_stay_what_they_are_to_others(flat: bool) -> None:
    class Own(nn.Parameter):
        pass

    layer = nn.Linear(8, 8)
    layer.weight = weight = Own(layer.weight.detach())
    weight.note = "mine"  # type: ignore[attr-defined]
    model = nn.Sequential(layer, nn.Linear(8, 8))
    calls: list[str] = []
    weight.register_hook(lambda grad: calls.append("gradient") or 2 * grad)  # type: ignore[func-returns-value]
    seen, optimizer = weakref.ref(weight), torch.optim.SGD(model.parameters(), lr=1.0)
    state = step_of(model, F.mse_loss).init(flat=flat, consume=True)
    assert seen() is weight is next(model.parameters()) is optimizer.param_groups[0]["params"][0]
    assert (type(weight), vars(weight), weight.is_leaf, weight.grad) == (Own, {"note": "mine"}, True, None)
    before = weight.detach().clone()
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    weight.register_hook(lambda _: calls.append("later"))
    weight.sum().backward()
    optimizer.step()
    assert calls == ["gradient", "later", "accumulated"]
    assert_same(state.params["0.weight"], before - 2)
    assert_same(weight.detach(), before - 2)


def test_init_consumes_under_autocast_and_in_inference_mode() -> None:
    model = two_layers()
    step = step_of(model, F.mse_loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(batch(0)[0])  # whose casts torch keeps
        state = step.init(consume=True)
    assert storages(taken(model)) <= storages(state)
    with torch.inference_mode():
        model = two_layers()
        step = step_of(model, F.mse_loss)
        state = step.init(consume=True)
    clamp(model)
    assert_same(step.compute_params(state), step.compute_params(step.init()))
    model(batch(0)[0]).sum().backward()


def test_what_cannot_be_consumed_is_refused() -> None:
    model = nn.Linear(2, 2)
    step = step_of(model, F.mse_loss)
    own = make_train_step(lambda params, x: params["w"].sum(), SGD)
    with pytest.raises(TypeError, match=r"init: consume must be True or False; got 1"):
        step.init(consume=1)
    with pytest.raises(TypeError, match=r"init: consume must be False for a loss that module_loss did not make"):
        own.init({"w": torch.ones(2)}, consume=True)
    given: dict[str, Any]
    for given in ({"params": step.loss_fn.params()}, {"buffers": {}}):
        with pytest.raises(ValueError, match=rf"init: consume must be False if .*got True and {next(iter(given))}="):
            step.init(**given, consume=True)
    model.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"module_loss: model must stay as it was when the loss was made"):
        step.init(consume=True)
