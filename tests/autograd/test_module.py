"""`module_loss` reads a module and trains its values: whatever the module does, the run is that of torch's loop."""

from __future__ import annotations

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
from torch._dynamo.testing import CompileCounter
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from funcamp import init, make_train_step, module_loss, scaled_grad_and_value, stateless
from funcamp.numerics import track_scales
from tests.support.helpers import assert_close, assert_same, clone, values_of
from tests.support.models import cnn, mlp
from tests.support.steps import build, eager, eager_and_traced, traced
from tests.support.torch_loop import Made, assert_as_torchs_loop

SGD = stateless(torch.optim.SGD, lr=0.1, momentum=0.9)
BATCHES = [(torch.randn(5, 8), torch.randn(5, 8)) for _ in range(4)]
HOW: dict[str, dict[str, Any]] = {
    "eager": {},
    "jit": {"wrap": traced},
    "float16": {"policy": "float16", "config": {"init_scale": 1024.0}},
    "bfloat16": {"policy": "bfloat16"},
    "func": {"engine": "func"},
    "tracked": {"change": track_scales},
}


class Asks(nn.Module):
    """Asks a parameter for its class, and a parameter and a buffer for an attribute that was set on them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.5))
        self.register_buffer("table", torch.ones(8))
        marked: Any = self.layer.weight, self.table
        for tensor in marked:
            tensor.gain = 2.0

    def forward(self, x: Tensor) -> Any:
        weight: Any = self.layer.weight
        out = self.layer(x) * weight.gain * self.table * self.table.gain  # type: ignore[union-attr]
        return out * (self.factor.exp() if isinstance(self.factor, nn.Parameter) else self.factor)


class Again(nn.Module):
    """A block that the backward pass computes again, which reads a buffer that the forward pass wrote before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.count

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return checkpoint(self.block, x, use_reentrant=False)


class InTwoProducts(nn.Linear):
    """Multiplies by its weight twice, and asks for its dtype."""

    def forward(self, x: Tensor) -> Any:
        out = torch.tanh(super().forward(x)) @ self.weight
        return out.to(self.weight.dtype) * 1.001


def shared() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.Tanh(), layer)


#: Modules, each with the mean squared error.
MODULES: dict[str, Callable[[], nn.Module]] = {
    "one module under two names": shared,
    "spectral norm by hook": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    "spectral norm by parametrization": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "classes and attributes": Asks,
    "a block that is computed again": Again,
    "a weight in two products": lambda: InTwoProducts(8, 8),
}


#: Criteria that read the model.
CRITERIA: dict[str, Callable[[Any], Callable[[Tensor, Tensor], Any]]] = {
    "parameters": lambda m: lambda o, t: F.mse_loss(o, t) + 2.0 * sum(p.pow(2).sum() for p in m.parameters()),
    "statistics": lambda m: lambda o, t: F.mse_loss(o, t) + m[0].running_mean.square().sum() * m[1].bias[0],
    "second pass": lambda m: lambda o, t: F.mse_loss(o, t) + (m(t) - o).square().mean(),
    "a frozen teacher": lambda m: functools.partial(distance, nn.Linear(8, 8).requires_grad_(False)),
}


def distance(teacher: nn.Module, output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, teacher(target))


def made(name: str) -> Made:
    if name in MODULES:
        return MODULES[name](), F.mse_loss
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))
    return model, CRITERIA[name](model)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *[(name, how) for name in (*MODULES, *CRITERIA) for how in ("float16", "jit")],
        *[(name, how) for name in CRITERIA for how in ("func", "tracked", "bfloat16")],
    ],
)
def test_a_step_is_torchs_loop(name: str, how: str) -> None:
    assert_as_torchs_loop(lambda: made(name), BATCHES, **HOW[how])


# Modules with a backward pass inside.


class Recomputed(torch.autograd.Function):
    """A layer that its backward pass computes again, as reversible networks do, and differentiates by backward()."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Any:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.layer(x)
        torch.autograd.backward(out, g)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return self.last(Recomputed.apply(self.first(x), self.middle)) + self.middle(x)


@eager_and_traced
def test_a_backward_pass_inside_of_the_backward_pass_is_torchs(wrap: Any) -> None:
    assert_as_torchs_loop(lambda: (Reversible(), F.mse_loss), BATCHES, wrap, relative=1e-6)


class Hooked(nn.Module):
    """A hook of the backward pass keeps a norm in a plain attribute, which the next forward pass reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), torch.zeros(())
        self.layer.register_full_backward_hook(self.look)

    def look(self, layer: nn.Module, given: Any, taken: Any) -> None:
        self.norm.copy_(taken[0].norm())

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.first(x)) * (1 + self.norm)


def test_what_a_hook_of_the_backward_pass_keeps_is_as_in_torchs_loop() -> None:
    assert_as_torchs_loop(lambda: (Hooked(), F.mse_loss), BATCHES)
    with pytest.raises(RuntimeError, match=r"it writes into model\.norm"):
        assert_as_torchs_loop(lambda: (Hooked(), F.mse_loss), BATCHES, traced)


def test_a_layer_that_is_computed_again_may_be_called_by_another_thread() -> None:
    layer = nn.Linear(8, 8)

    def loss(params: Any, x: Tensor) -> Any:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(layer, x).result()
        return checkpoint(functional_call, layer, params, x, use_reentrant=False).tanh().sum()

    params: dict[str, Tensor] = {name: value.detach() for name, value in layer.named_parameters()}
    (grads, _), _ = scaled_grad_and_value(loss)(init(), params, BATCHES[0][0])
    expected = torch.func.grad(lambda params: functional_call(layer, params, BATCHES[0][0]).tanh().sum())(params)
    assert_close(grads, expected, 1e-6)


# The module itself.


@eager_and_traced
def test_a_modules_own_tensors_are_not_needed_after_init(wrap: Any) -> None:
    task = cnn()
    loss_fn = module_loss(task.model, task.criterion)
    step = make_train_step(loss_fn, SGD, policy="bfloat16")
    state, expected = step.init(), step(step.init(), task.batch(0))
    task.model.to("meta")
    assert_same(wrap(step)(clone(state), task.batch(0)), expected)
    task.model.to_empty(device="cpu").load_state_dict(loss_fn.state_dict(state.params, state.buffers))
    assert_same(values_of(task.model), {**state.params.tree(), **state.buffers})


def test_the_callers_tensors_get_no_attributes() -> None:
    model = Asks()
    loss_fn = module_loss(model, F.mse_loss)
    values, buffers = clone(dict(model.named_parameters())), loss_fn.buffers()
    loss_fn(values, buffers, BATCHES[0])
    assert not any(vars(value) for value in (*values.values(), *buffers.values()))


class Paused(nn.Module):
    """Lets other threads run while it has its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.is_called = nn.Linear(8, 8), threading.Event()
        self.barrier: threading.Barrier | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.pause()
        out: Tensor = self.layer(x)
        self.pause()
        return out

    def pause(self) -> None:
        if self.barrier is None:
            return
        self.is_called.set()
        try:
            self.barrier.wait(1)  # until all threads are here, if nothing keeps one out
        except threading.BrokenBarrierError:
            return


def test_threads_step_and_evaluate_with_values_of_their_own() -> None:
    model = Paused()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    before = clone(values_of(model))
    one, two = (step.init({name: value * factor for name, value in before.items()}) for factor in (1.0, 2.0))
    calls: list[Callable[[], Any]] = [lambda: step.loss(one, BATCHES[0])]
    calls += [lambda: step(one, BATCHES[0]), lambda: step(two, BATCHES[0])]
    alone = [call() for call in calls]
    model.barrier = threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        evaluated = pool.submit(calls[0])
        assert model.is_called.wait(60)  # the evaluation has its values in the module now
        others = [pool.submit(call) for call in calls[1:]]
        assert_same([evaluated.result(), *[other.result() for other in others]], alone)
    assert_same(values_of(model), before)


class Part(nn.Linear):
    """A layer whose forward is not torch's own, which Dynamo would leave alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.compiled
def test_a_part_of_a_model_may_be_compiled_by_torch() -> None:
    count = CompileCounter()

    def make() -> Made:
        part: Any = torch.compile(Part(8, 8), backend=count)
        return nn.Sequential(part, nn.Tanh()), F.mse_loss

    assert_as_torchs_loop(make, BATCHES)
    assert count.frame_count == 2  # once for the loop, once for the step


# What the criterion returns besides.


@pytest.mark.compiled
@pytest.mark.parametrize("how", ["eager", "jit", "func", "tracked"])
@pytest.mark.parametrize("make", [cnn, mlp])
def test_aux_of_a_criterion_is_in_the_metrics(make: Any, how: str) -> None:
    """With buffers and without. Those of a window are stacked: tests/step/test_step.py."""
    task, options = make(), HOW[how]

    def with_hits(output: Tensor, target: Tensor) -> Any:
        return task.criterion(output, target), {"hits": (output.argmax(-1) == target).sum(), "output": output}

    change = options.get("change", eager)
    loss_fn = change(module_loss(task.model, with_hits, has_aux=True, engine=options.get("engine")))
    step, alone = make_train_step(loss_fn, SGD), build(task, SGD)
    batch, wrap = task.batch(0), options.get("wrap", eager)
    output = copy.deepcopy(task.model)(batch[0]).detach()
    (state, metrics), (expected, wanted) = wrap(step)(step.init(), batch), alone(alone.init(), batch)
    assert_same(metrics.aux, {"hits": (output.argmax(-1) == batch[1]).sum(), "output": output})
    assert_same((state, metrics._replace(aux=(), records={})), (expected, wanted))
