"""Gradients by torch.autograd: the same as by torch.func, with recomputation, and what torch cannot compile of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import funcamp
from tests.recipes import advance, example, scaler_for, values
from tests.support.helpers import assert_close, assert_same, clone, values_of
from tests.support.models import cnn, mlp
from tests.support.steps import eager

RECIPE = example("checkpointing")
CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=5)
Wrap = Callable[[Any], Any]


pytestmark = pytest.mark.usefixtures("one_thread")


def compiled(step: Any) -> Any:
    return funcamp.jit(step, backend="eager")


def kept(step: Any) -> Any:
    return funcamp.jit(step, backend="eager", donate=False)


WRAPS = pytest.mark.parametrize("wrap", [eager, compiled])


def run(step: Any, wrap: Wrap, batch: Callable[[int], Any], steps: int = 20) -> tuple[Any, list[Any]]:
    state, call, history = step.init(), wrap(step), []
    for index in range(steps):
        state, metrics = call(state, batch(index))
        history.append(metrics)
    return state, history


def sgd(lr: float = 0.05) -> Any:
    return funcamp.stateless(torch.optim.SGD, lr=lr, momentum=0.9)


# One engine against the other.


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("wrap", [eager, compiled, kept])
@pytest.mark.parametrize("make", [mlp, cnn])  # not tied: torch.func casts a weight at each use, and adds in float32
def test_engines_give_the_same_bits(make: Any, wrap: Wrap) -> None:
    results = []
    for engine, how in (("func", eager), ("autograd", wrap)):
        task = make()
        loss_fn = funcamp.module_loss(task.model, task.criterion, engine=engine)  # type: ignore[arg-type]
        step = funcamp.make_train_step(loss_fn, sgd(), CONFIG, policy="float16", max_norm=1.0)
        results.append(run(step, how, task.batch))
    (state, history), (expected, expected_history) = results
    assert 4 <= history[-1].skipped < 20
    assert_same(history, expected_history)
    assert_same(state, expected)


@pytest.mark.compiled
@WRAPS
def test_accumulation_gives_the_same_bits(wrap: Wrap) -> None:
    task = cnn()
    results = []
    for engine, how in (("func", eager), ("autograd", wrap)):
        loss_fn = funcamp.module_loss(task.model, task.criterion, engine=engine)  # type: ignore[arg-type]
        step = funcamp.make_train_step(loss_fn, sgd(), CONFIG, policy="float16", accumulate=3)

        def batch(index: int) -> Any:
            return tuple(torch.stack(column) for column in zip(*(task.batch(3 * index + part) for part in range(3))))

        results.append(run(step, how, batch))
    assert_same(*results)


@pytest.mark.compiled
@WRAPS
def test_parameter_that_the_loss_does_not_use_has_a_zero_gradient(wrap: Wrap) -> None:
    decay = funcamp.stateless(torch.optim.SGD, lr=0.5, weight_decay=0.5)
    step = funcamp.make_train_step(funcamp.loss(lambda p, x: (p["used"] * x).sum(), engine="autograd"), decay)
    state, metrics = wrap(step)(step.init({"used": torch.ones(2), "unused": torch.ones(2)}), torch.ones(2))
    assert metrics.found_inf == 0
    assert state.params.tree()["unused"].tolist() == [0.75, 0.75]


@pytest.mark.compiled
@WRAPS
@pytest.mark.parametrize("ambient", [torch.no_grad, torch.enable_grad])
def test_nothing_that_comes_out_requires_grad(wrap: Wrap, ambient: Any) -> None:
    def loss_fn(params: Any, buffers: Any, batch: Tensor) -> Any:
        hidden = params["w"] * batch
        return hidden.square().sum(), ({"mean": hidden.mean(), "last": hidden}, {"hidden": hidden, "given": batch})

    loss = funcamp.loss(loss_fn, engine="autograd", has_aux=True, has_buffers=True)
    step = funcamp.make_train_step(loss, sgd(), CONFIG, accumulate=2, ema_decay=0.9)
    state = step.init({"w": torch.ones(3)}, {"mean": torch.zeros(()), "last": torch.zeros(3)})
    call = wrap(step)
    with ambient():
        for _ in range(3):
            state, metrics = call(state, torch.ones(2, 3))
        assert not any(leaf.requires_grad for leaf in _pytree.tree_leaves((state, metrics)) if torch.is_tensor(leaf))
        assert_same(clone(state), state)
    assert metrics.aux["hidden"].shape == (2, 3)
    assert not torch.equal(state.params.tree()["w"], torch.ones(3))


def test_module_and_batch_are_left_alone() -> None:
    task = cnn()
    before = clone(values_of(task.model))
    step = funcamp.make_train_step(funcamp.module_loss(task.model, task.criterion, engine="autograd"), sgd(), CONFIG)
    run(step, eager, task.batch, 3)
    assert_same(values_of(task.model), before)
    assert all(p.grad is None for p in task.model.parameters())


# Checkpointed modules.


class Checkpointed(nn.Module):
    """A body under torch.utils.checkpoint, or not."""

    def __init__(self, *layers: nn.Module, on: bool = True) -> None:
        super().__init__()
        self.body, self.on = nn.Sequential(*layers), on

    def forward(self, x: Tensor) -> Any:
        out = checkpoint(self.body, x, use_reentrant=False) if self.on else self.body(x)
        return out.float()


def body(middle: nn.Module, on: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return Checkpointed(nn.Linear(8, 16, bias=False), middle, nn.Linear(16, 1), on=on)


def step_for(model: nn.Module, **options: Any) -> funcamp.TrainStep:
    loss_fn = funcamp.module_loss(model, nn.functional.mse_loss, engine="autograd")
    options = {"policy": "float16", **options}
    return funcamp.make_train_step(loss_fn, sgd(0.02), CONFIG, **options)


def batch_of(index: int) -> Any:
    return RECIPE.batch(index, "cpu")


@pytest.mark.compiled
@WRAPS
@pytest.mark.parametrize("middle", [nn.Tanh, lambda: nn.BatchNorm1d(16)], ids=["tanh", "batch_norm"])
def test_checkpointed_step_is_the_step_without(middle: Callable[[], nn.Module], wrap: Wrap) -> None:
    model = body(middle())
    before = clone(values_of(model))
    state, history = run(step_for(model), wrap, batch_of)
    expected, expected_history = run(step_for(body(middle(), on=False)), eager, batch_of)
    assert_same(history, expected_history)
    assert_same(state, expected)  # the running statistics too: torch's loop updates them twice
    assert_same(values_of(model), before)


@pytest.mark.compiled
@WRAPS
def test_step_with_dropout_in_a_checkpointed_block_is_the_loop(wrap: Wrap) -> None:
    model = body(nn.Dropout(0.5))
    torch.manual_seed(1)
    state, history = run(step_for(model), wrap, batch_of)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler, trace = scaler_for(CONFIG, "cpu"), []
    torch.manual_seed(1)
    for index in range(20):
        x, y = batch_of(index)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        trace.append(advance(scaler))
    assert [(metrics.scale.item(), metrics.found_inf.item()) for metrics in history] == trace
    assert_same(state.params.tree(), values(model))


@pytest.mark.compiled
@WRAPS
def test_loss_of_ones_own_gives_a_block_its_parameters(wrap: Wrap) -> None:
    """functional_call puts a module's own parameters back before the backward pass calls the block again."""
    model = body(nn.Tanh()).get_submodule("body")
    assert isinstance(model, nn.Sequential)
    params = {name: value.detach() for name, value in model.named_parameters()}

    def plain(params: Any, batch: Any) -> Tensor:
        return nn.functional.mse_loss(functional_call(model, params, batch[0]), batch[1])

    def checkpointed(params: Any, batch: Any) -> Tensor:
        out = checkpoint(functional_call, model, params, batch[0], use_reentrant=False)
        return nn.functional.mse_loss(out, batch[1])

    ends = []
    for loss_fn, how in ((plain, eager), (checkpointed, wrap)):
        step = funcamp.make_train_step(funcamp.loss(loss_fn, engine="autograd"), sgd(0.02))
        state, call = step.init(params), how(step)
        for index in range(10):
            state, _ = call(state, batch_of(index))
        ends.append(state.params.tree())
    assert_same(*ends)


# That it saves memory.


class Calls(TorchDispatchMode):
    """How often an operation was called."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.name in str(func)
        return func(*args, **(kwargs or {}))


def calls(wrap: Wrap, checkpointed: bool) -> int:
    """How often the blocks of the recipe's model compute their activation in a step."""
    step = step_for(RECIPE.make_model(checkpointed))
    state, call = step.init(), wrap(step)
    state, _ = call(state, batch_of(0))
    with Calls("aten.gelu.default") as counted:
        call(state, batch_of(1))
    count: int = counted.count
    return count


@pytest.mark.compiled
@WRAPS
def test_checkpointed_blocks_are_computed_twice(wrap: Wrap) -> None:
    assert calls(wrap, False) == 3
    assert calls(wrap, True) == 6


@pytest.mark.compiled
@WRAPS
def test_dropout_in_a_checkpointed_block_has_the_masks_of_the_forward_pass(wrap: Wrap) -> None:
    ends = []
    for on, how in ((False, eager), (True, wrap)):
        torch.manual_seed(1)
        ends.append(run(step_for(body(nn.Dropout(0.5), on)), how, batch_of))
    assert_same(*ends)


@pytest.mark.compiled
@WRAPS
def test_accumulation_over_checkpointed_blocks(wrap: Wrap) -> None:
    def batch(index: int) -> Any:
        return tuple(torch.stack(column) for column in zip(batch_of(2 * index), batch_of(2 * index + 1)))

    ends = [run(step_for(body(nn.Tanh(), on), accumulate=2), wrap if on else eager, batch) for on in (True, False)]
    assert_same(*ends)


@pytest.mark.thorough
@pytest.mark.inductor
def test_inductor_follows() -> None:
    expected, _ = run(step_for(RECIPE.make_model(), policy=None), eager, batch_of, 5)
    state, _ = run(step_for(RECIPE.make_model(), policy=None), funcamp.jit, batch_of, 5)
    assert_close(state.params.tree(), expected.params.tree(), 1e-5)
