"""`module_loss` on modules that share, tie, freeze, hook or subclass: they are only read, and train as in torch."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao import quantization
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from funcamp import ScalerConfig, jit, make_train_step, module_loss, stateless
from funcamp._types import name_of
from funcamp.numerics import track_scales
from tests.support.helpers import assert_same, clone, values_of
from tests.support.models import cnn, mlp

SGD = stateless(torch.optim.SGD, lr=0.1, momentum=0.9)


class Standardized(nn.Conv2d):
    """A convolution that computes with its weight in float32 before the operation that autocast casts."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        out: Tensor = self._conv_forward(x, weight, self.bias)
        return out


class TwoInputs(nn.Module):
    """Bilinear, which autocast leaves alone on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(8, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.both(x, x)
        return out


class Frozen(nn.Module):
    """A frozen layer before a trainable one, whose weight stands under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.first.requires_grad_(False)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.again(self.norm(self.last(self.first(x))))
        return out


def shared() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.Tanh(), layer)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one module under two names": shared,
    "forward of its own": lambda: nn.Sequential(nn.Unflatten(1, (2, 2, 2)), Standardized(2, 8, 2), nn.Flatten()),
    "spectral norm by hook": lambda: torch.nn.utils.spectral_norm(nn.Linear(8, 8)),
    "Bilinear": TwoInputs,
    "frozen and tied": Frozen,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_module_is_trained_as_by_torch_and_left_as_it_was(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    x, y = torch.randn(5, 8), torch.randn(5, 8)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss_fn = module_loss(model, F.mse_loss)
    step = make_train_step(loss_fn, SGD, ScalerConfig(1024.0), policy=name_of(dtype))
    state, before = step.init(), clone(values_of(model))
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = F.mse_loss(eager(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        state, metrics = step(state, (x, y))
        assert metrics.found_inf == 0
        assert_same(metrics.loss, loss.detach())
    step.loss(state, (x, y))
    assert_same(values_of(model), before)
    assert all(isinstance(value, nn.Parameter) for value in model.parameters())
    model.load_state_dict(loss_fn.state_dict(state.params, state.buffers))
    assert_same(values_of(model), values_of(eager))


@pytest.mark.compiled
@pytest.mark.parametrize("transform", ["eager", "jit"])
def test_a_modules_own_tensors_are_not_needed_after_init(transform: str) -> None:
    task = cnn()
    loss_fn = module_loss(task.model, task.criterion)
    step = make_train_step(loss_fn, SGD, ScalerConfig(1024.0), policy="bfloat16")
    state, expected = step.init(), step.init()
    expected, _ = step(expected, task.batch(0))
    task.model.to("meta")
    run = jit(step, backend="eager") if transform == "jit" else step
    state, _ = run(state, task.batch(0))
    assert_same(state, expected)
    task.model.to_empty(device="cpu").load_state_dict(loss_fn.state_dict(state.params, state.buffers))
    assert_same(dict(task.model.state_dict()), loss_fn.state_dict(state.params, state.buffers))


@pytest.mark.compiled
def test_a_module_under_two_names_compiles() -> None:
    step = make_train_step(module_loss(shared(), F.mse_loss), SGD)
    state, batch = step.init(), (torch.randn(5, 8), torch.randn(5, 8))
    expected = step(state, batch)
    assert_same(torch.compile(step, fullgraph=True, backend="aot_eager")(state, batch), expected)


def test_a_buffer_of_two_modules_stays_one() -> None:
    first, second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    second.running_mean = first.running_mean
    model = nn.Sequential(first, second)
    eager = copy.deepcopy(model)
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    x = torch.randn(8, 4) + 5
    state, _ = step(step.init(), (x, x))
    eager(x)
    assert_same(first.running_mean, torch.zeros(4))
    assert_same(state.buffers["0.running_mean"], eager[0].running_mean)
    assert "1.running_mean" not in state.buffers
    state, _ = step(state, (x * torch.nan, x))
    assert_same(state.buffers["0.running_mean"], eager[0].running_mean)


def test_module_loss_writes_nothing_in_a_parametrized_module() -> None:
    model = torch.nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 3)))
    before = clone(dict(model.named_buffers()))
    module_loss(model, torch.nn.functional.mse_loss)
    assert_same(clone(dict(model.named_buffers())), before)


class Penalized(nn.Module):
    """A criterion that holds the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + 2.0 * sum(p.pow(2).sum() for p in self.model.parameters())


def statistics(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: F.mse_loss(output, target) + model[0].running_mean.square().sum() * model[1].bias[0]


CRITERIA: dict[str, Callable[[Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "closure": lambda m: lambda o, t: F.mse_loss(o, t) + 2.0 * sum(p.pow(2).sum() for p in m.parameters()),
    "attribute": lambda m: lambda o, t: F.mse_loss(o, t) + m[1].weight.abs().sum(),
    "module": Penalized,
    "buffers": statistics,
    "second pass": lambda m: lambda o, t: F.mse_loss(o, t) + (m(t[:, :4]) - o).square().mean(),
}


@pytest.mark.compiled
@pytest.mark.parametrize("how", ["eager", "jit", "func", "tracked", "policy"])
@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_that_reads_the_model_sees_what_is_trained(name: str, how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    expected, x, y = copy.deepcopy(model), torch.randn(8, 4), torch.randn(8, 4)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    loss_fn = module_loss(model, CRITERIA[name](model), engine="func" if how == "func" else None)
    step = make_train_step(
        track_scales(loss_fn) if how == "tracked" else loss_fn,
        SGD,
        ScalerConfig(1.0),
        policy="bfloat16" if how == "policy" else None,
    )
    run: Any = jit(step, backend="eager") if how == "jit" else step
    state, criterion, before = step.init(), CRITERIA[name](expected), clone(values_of(model))
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "policy"):
            loss = criterion(expected(x), y)
        loss.backward()
        optimizer.step()
        state, metrics = run(state, (x, y))
        assert_same(metrics.loss, loss.detach())
    assert_same(loss_fn.state_dict(state.params, state.buffers), dict(expected.state_dict()))
    assert_same(values_of(model), before)
    expected.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "policy"):
        assert_same(step.loss(state, (x, y)), criterion(expected(x), y).detach())


@pytest.mark.thorough(keep=1)
@pytest.mark.compiled
@pytest.mark.parametrize("wrapped", [False, True], ids=["eager", "jit"])
def test_a_parameter_kept_from_before_the_call_is_refused(wrapped: bool) -> None:
    model = nn.Linear(2, 2)
    kept = list(model.parameters())

    def step_of(read: Callable[[], Any]) -> Any:
        loss_fn = module_loss(model, lambda o, t: F.mse_loss(o, t) + sum(p.square().sum() for p in read()))
        step = make_train_step(loss_fn, SGD)
        return (jit(step, backend="eager") if wrapped else step), step.init()

    batch = (torch.ones(2, 2), torch.ones(2, 2))
    reads: list[Callable[[], Any]] = [
        lambda: kept,
        lambda: [kept[0].exp().mul(2)],
        lambda: [kept[0].T],
    ]
    for read in reads:
        run, state = step_of(read)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"must be read of the model .* got '\w+' as a tensor kept"):
                run(state, batch)
    constants = [part.detach().clone() for part in kept]
    for fine in (lambda: constants, lambda: list(model.parameters()), lambda: [kept[0].new_ones(2)]):
        run, state = step_of(fine)
        run(state, batch)


def test_a_loss_may_be_given_the_models_own_parameters() -> None:
    model = nn.Linear(2, 2)
    x, y = model(torch.ones(1, 2)), torch.ones(1, 2)
    own: dict[str, Tensor] = dict(model.named_parameters())
    for params in (own, {name: part * 2 for name, part in own.items()}):
        value = module_loss(model, F.mse_loss)(params, (x, y))
        expected = F.mse_loss(functional_call(model, params, x), y)
        gradients, expected_gradients = (
            torch.autograd.grad(loss, list(own.values()), retain_graph=True) for loss in (value, expected)
        )
        assert_same((value.detach(), gradients), (expected.detach(), expected_gradients))


def hits(criterion: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Any]:
    """The criterion's loss with what a loop would log."""

    def with_hits(output: Tensor, target: Tensor) -> Any:
        return criterion(output, target), {"hits": (output.argmax(-1) == target).sum(), "output": output}

    return with_hits


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("wrapped", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("engine", ["func", "autograd", None])
@pytest.mark.parametrize("tracked", [False, True], ids=["plain", "tracked"])
@pytest.mark.parametrize("make", [cnn, mlp])
def test_aux_of_a_criterion_is_in_the_metrics(make: Any, tracked: bool, engine: Any, wrapped: bool) -> None:
    """With buffers and without: numbers are those of the step without aux, and aux is the model's own output."""
    task = make()
    alone = make_train_step(module_loss(task.model, task.criterion, engine=engine), SGD, policy="bfloat16")
    loss_fn = module_loss(task.model, hits(task.criterion), has_aux=True, engine=engine)
    step = make_train_step(track_scales(loss_fn) if tracked else loss_fn, SGD, policy="bfloat16")
    run: Any = jit(step, backend="eager") if wrapped else step
    state, expected = step.init(), alone.init()
    model = copy.deepcopy(task.model)
    for number in range(3):
        x, y = task.batch(number)
        model.load_state_dict(loss_fn.state_dict(expected.params, expected.buffers))
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x).detach()
        state, metrics = run(state, (x, y))
        expected, wanted = alone(expected, (x, y))
        assert_same(metrics.aux, {"hits": (output.argmax(-1) == y).sum(), "output": output})
        assert_same(state, expected)
        assert_same(metrics._replace(aux=(), records={}), wanted)
        assert bool(metrics.records) == tracked
    assert_same(step.loss(state, (x, y)), alone.loss(expected, (x, y)))
    assert bool(state.buffers) == (make is cnn)


@pytest.mark.slow
@pytest.mark.parametrize("make", [cnn, mlp])
def test_aux_of_a_window_is_stacked(make: Any) -> None:
    task = make()
    loss_fn = module_loss(task.model, hits(task.criterion), has_aux=True)
    step = make_train_step(loss_fn, SGD, accumulate=2)
    pieces = [task.batch(number) for number in range(2)]
    window = tuple(torch.stack(column) for column in zip(*pieces))
    results = [run(step.init(), window) for run in (step, jit(step, backend="eager"))]
    assert_same(results[1], results[0])
    assert_same(results[0][1].aux["output"][0], task.model(pieces[0][0]).detach())
    assert results[0][1].aux["hits"].shape == (2,)


@pytest.mark.parametrize("has_aux", [False, True])
def test_keep_buffers_of_a_module_keeps_those_of_a_skipped_step(has_aux: bool) -> None:
    """torch's loop does; by default they go back."""
    task = cnn()
    criterion = hits(task.criterion) if has_aux else task.criterion
    for keep in (False, True):
        loss_fn = module_loss(task.model, criterion, has_aux=has_aux, keep_buffers=keep)
        for made in (loss_fn, track_scales(loss_fn)):
            step = make_train_step(made, SGD, parallel=torch.ones_like)
            state, metrics = step(step.init(), task.batch(0))
            assert metrics.found_inf == 1
            assert state.buffers["1.num_batches_tracked"] == int(keep)


class Paused(nn.Module):
    """Lets another thread run while it has its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.barrier = nn.Linear(4, 4), threading.Barrier(1)
        self.is_called = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.pause()
        out: Tensor = self.layer(x)
        self.pause()
        return out

    def pause(self) -> None:
        self.is_called.set()
        with contextlib.suppress(threading.BrokenBarrierError):
            self.barrier.wait(1)  # until both threads are here, if nothing keeps one out


def test_threads_call_one_module_with_parameters_of_their_own() -> None:
    model = Paused()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = [step.init({name: value * factor for name, value in model.named_parameters()}) for factor in (1.0, 2.0)]
    batch = torch.ones(2, 4), torch.zeros(2, 4)
    alone = [step(state, batch) for state in states]
    model.barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda state: step(state, batch), states))
    assert_same(together, alone)
    assert_same(values_of(model), before)


def test_a_thread_steps_while_another_evaluates() -> None:
    """The evaluation's values require no gradient, which is no change of the module."""
    model = Paused()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    state, batch = step.init(), (torch.ones(2, 4), torch.zeros(2, 4))
    alone = step.loss(state, batch), step(state, batch)
    model.barrier = threading.Barrier(2)
    model.is_called.clear()
    with ThreadPoolExecutor(2) as pool:
        evaluated = pool.submit(step.loss, state, batch)
        assert model.is_called.wait(60)  # its forward pass waits for another one now
        trained = pool.submit(step, state, batch)
        together = evaluated.result(), trained.result()
    assert_same(together, alone)


def _replace_module(model: nn.Sequential) -> None:
    model[1] = nn.Linear(4, 4)


def _replace_dict(model: nn.Sequential) -> None:
    vars(model[1])["_parameters"] = dict(model[1]._parameters)


@pytest.mark.parametrize("replace", [_replace_module, _replace_dict])
@pytest.mark.parametrize("tracked", [False, True], ids=["plain", "tracked"])
def test_a_layer_that_another_one_replaces_has_the_states_values(replace: Any, tracked: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    loss_fn = module_loss(model, lambda out, y: F.mse_loss(out, y) + model[1].weight.square().sum())
    step = make_train_step(track_scales(loss_fn) if tracked else loss_fn, SGD)
    batch = (torch.randn(2, 4), torch.randn(2, 4))
    state, _ = step(step.init(), batch)
    expected = step(state, batch)
    replace(model)
    assert_same(step(state, batch), expected)


def test_a_tensor_that_is_no_part_of_the_module_is_its_attribute_during_a_call() -> None:
    model = nn.Linear(4, 4)
    as_any: Any = model
    loss_fn = module_loss(model, lambda out, y: F.mse_loss(out, y) * as_any.factor)
    values = {**loss_fn.params(), "factor": torch.tensor(2.0)}
    batch = (torch.ones(2, 4), torch.zeros(2, 4))
    expected = 2 * F.mse_loss(model(batch[0]), batch[1])
    for _ in range(2):
        assert_same(loss_fn(values, batch), expected.detach())
    assert not hasattr(model, "factor")


def _prepared_for_quantization(fake_quantize: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(quantization.QuantStub(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).train()
    observer = quantization.MovingAverageMinMaxObserver
    weight = {"observer": observer, "quant_min": -128, "quant_max": 127, "dtype": torch.qint8}
    model.qconfig = quantization.QConfig(  # type: ignore[assignment]
        activation=fake_quantize.with_args(observer=observer),
        weight=fake_quantize.with_args(**weight, qscheme=torch.per_tensor_symmetric),
    )
    quantization.prepare_qat(model, inplace=True)
    model(torch.ones(3, 4))  # its buffers get their shapes
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*reduce_range:UserWarning")
@pytest.mark.parametrize("fused", [False, True])
def test_quantization_aware_training_equals_torchs_loop(fused: bool) -> None:
    kind = quantization.FusedMovingAvgObsFakeQuantize if fused else quantization.FakeQuantize
    model = _prepared_for_quantization(kind)
    batches = [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(3)]
    step = make_train_step(module_loss(model, F.mse_loss), stateless(torch.optim.SGD, lr=0.1))
    state, jitted_state, jitted = step.init(), step.init(), jit(step, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        state, metrics = step(state, batch)
        if fused:
            jitted_state, _ = jitted(jitted_state, batch)
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        assert metrics.loss.item() == loss.item()
    assert_same(dict(state.params.tree()), {name: value.detach() for name, value in model.named_parameters()})
    if fused:
        assert_same(dict(jitted_state.params.tree()), dict(state.params.tree()))
    else:
        with pytest.raises(RuntimeError, match="not read a tensor's value"):
            jitted(jitted_state, batches[0])


class Learned:
    """A criterion with a weight that nothing trains."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(1))

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output * self.weight, target)

    def method(self, output: Tensor, target: Tensor) -> Tensor:
        return self(output, target)


class InSlots(Learned):
    __slots__ = ("weight",)


_GLOBAL = nn.Linear(1, 1)


def with_a_global(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(_GLOBAL(output), target)


def in_a_closure(held: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: F.mse_loss(held[0](output), target)


def with_a_default(output: Tensor, target: Tensor, head: Any = _GLOBAL) -> Tensor:
    return F.mse_loss(head(output), target)


HOLDING: dict[str, Callable[[], Any]] = {
    "object": Learned,
    "slots": InSlots,
    "bound method": lambda: Learned().method,
    "closure": lambda: in_a_closure([nn.Linear(1, 1)]),
    "partial": lambda: functools.partial(lambda learned, output, target: learned(output, target), Learned()),
    "global": lambda: with_a_global,
    "default": lambda: with_a_default,
}


@pytest.mark.parametrize("name", HOLDING)
def test_a_criterion_that_holds_something_to_train_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"criterion must have no trainable parameter, .* got one, a torch.float32 .+: make"
    ):
        call(nn.Linear(1, 1), HOLDING[name]())


def call(model: nn.Module, criterion: Any) -> Tensor:
    """The loss of the model on a batch of ones."""
    loss_fn = module_loss(model, criterion)
    params = {name: value.requires_grad_() for name, value in loss_fn.params().items()}
    value: Tensor = loss_fn(params, (torch.ones(2, 1), torch.ones(2, 1)))
    return value


def test_a_frozen_part_or_the_model_itself_in_a_criterion_is_fine() -> None:
    model, teacher = nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False)
    expected = F.mse_loss(teacher(model(torch.ones(2, 1))), torch.ones(2, 1))
    assert_same(call(model, in_a_closure([teacher, model])), expected)


def test_an_unfrozen_teacher_without_a_gradient_is_fine() -> None:
    model, teacher = nn.Linear(1, 1), nn.Linear(1, 1)

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(target)
        return F.mse_loss(output, wanted)

    assert_same(call(model, criterion), criterion(model(torch.ones(2, 1)), torch.ones(2, 1)))


def test_the_tensors_are_in_the_module_once_for_forward_and_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is computed again in the backward pass sees the parameters of the forward pass."""
    seen: list[int] = []
    calls: list[str] = []

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def inner(self, x: Tensor) -> Tensor:
            seen.append(id(self.layer.weight))
            out: Tensor = self.layer(x).tanh()
            return out

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append("functional_call")
        return functional_call(*arguments, **options)

    monkeypatch.setattr("funcamp._autograd.module_loss.functional_call", counted)
    model = Recomputed()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    step(step.init(), (torch.ones(3, 2), torch.zeros(3, 2)))
    assert calls == ["functional_call"]
    assert len(seen) == 2
    assert seen[0] == seen[1] != id(model.layer.weight)
