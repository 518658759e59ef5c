"""`tensor.data = value` in a jitted step is refused, since torch does not dispatch it, unless it changes nothing."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from funcamp import jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same, values_of

STEPS = 4


class Net(nn.Module):
    """Two layers, a frozen one and a buffer; subclasses say what `change` writes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.slow = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(4))
        self.table = torch.ones(4)

    def change(self, hidden: Tensor) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.change(hidden)
        out: Tensor = self.last(torch.tanh(hidden - self.mean) + self.slow(x) * self.table)
        return out


class Buffer(Net):
    def change(self, hidden: Tensor) -> None:
        self.mean.data = self.mean * 0.5 + hidden.detach().mean(0) * 0.5


class Activation(Net):
    def change(self, hidden: Tensor) -> None:
        hidden.data = hidden.data.clamp(-0.3, 0.3)


class Constant(Net):
    def change(self, hidden: Tensor) -> None:
        hidden.data = self.table.expand(len(hidden), 4) * 0.3


class Averaged(Net):
    """MoCo's second network, written in place."""

    def change(self, hidden: Tensor) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.first.parameters()):
                slow.mul_(0.9).add_(fast, alpha=0.1)


class Moved(Net):
    """`Module.to` assigns the tensors that are there already."""

    def change(self, hidden: Tensor) -> None:
        self.slow(hidden)
        self.slow.to(hidden.device)
        self.first.to(hidden.device)


CHANGES: list[type[Net]] = [Moved]
RUNS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda step: step,
    "traced": lambda step: jit(step, backend="eager"),
    "undonated": lambda step: jit(step, backend="eager", donate=False),
    "aot": lambda step: jit(step, backend="aot_eager"),
}


def batch(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**values_of(model), "table": model.table}


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", CHANGES)
def test_numbers_are_those_of_torchs_loop(kind: type[Net], run: str) -> None:
    model = kind()
    twin = copy.deepcopy(model)
    sgd = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.3, foreach=False)
    loss_fn = module_loss(model, mse_loss)
    step = make_train_step(loss_fn, stateless(torch.optim.SGD, lr=0.3))
    call, state = RUNS[run](step), step.init()
    for index in range(STEPS):
        x, y = batch(index)
        state, metrics = call(state, (x, y))
        sgd.zero_grad()
        expected = mse_loss(twin(x), y)
        expected.backward()
        sgd.step()
        assert_same(metrics.loss, expected.detach())
    model.load_state_dict(loss_fn.state_dict(state.params, state.buffers))
    assert_same(tensors(model), tensors(twin))


class Momentum(Net):
    """MoCo's second network."""

    def change(self, hidden: Tensor) -> None:
        for slow, fast in zip(self.slow.parameters(), self.first.parameters()):
            slow.data = slow.data * 0.9 + fast.data * 0.1


class Attribute(Net):
    def change(self, hidden: Tensor) -> None:
        self.table.data = self.table * 0.9


class Restored(Net):
    """What was kept is the memory that a write would change."""

    def change(self, hidden: Tensor) -> None:
        kept = self.slow.weight.data
        self.slow.weight.data = kept * 0.5
        self.slow.weight.data = kept


class Augmented(Net):
    def forward(self, x: Tensor) -> Tensor:
        x.data = x.data * 2
        return super().forward(x)


@pytest.mark.parametrize("kind", [Buffer, Activation, Constant, Momentum, Attribute, Restored, Augmented])
def test_other_memory_is_refused(kind: type[Net]) -> None:
    model = kind()
    before, data = copy.deepcopy(tensors(model)), batch(0)
    step = make_train_step(module_loss(model, mse_loss), stateless(torch.optim.SGD))
    with pytest.raises(RuntimeError, match=r"not assign to \.data, .*\.data = "):
        jit(step, backend="eager")(step.init(), data)
    assert_same(tensors(model), before)
    assert_same(data, batch(0))
    assert "data" not in vars(Tensor)


def test_a_write_into_frozen_parameters_is_refused() -> None:
    model = Averaged()
    before = copy.deepcopy(tensors(model))
    step = make_train_step(module_loss(model, mse_loss), stateless(torch.optim.SGD))
    with pytest.raises(RuntimeError, match=r"it writes into model\.slow\.weight.*register_buffer"):
        jit(step, backend="eager")(step.init(), batch(0))
    assert_same(tensors(model), before)


def test_other_memory_for_a_leaf_of_the_state_is_refused() -> None:
    def step(state: Any, x: Tensor) -> Any:
        state["w"].data = state["w"] + 1
        return {"w": state["w"] * x}, None

    with pytest.raises(RuntimeError, match=r"not assign to \.data, which"):
        jit(step, backend="eager")({"w": torch.ones(3)}, torch.ones(3))


def test_another_thread_assigns_as_ever_while_a_step_is_traced() -> None:
    other = torch.zeros(2)

    class Waits(Net):
        def change(self, hidden: Tensor) -> None:
            def assign() -> None:
                other.data = torch.ones(3)

            thread = threading.Thread(target=assign)
            thread.start()
            thread.join()

    step = make_train_step(module_loss(Waits(), mse_loss), stateless(torch.optim.SGD))
    jit(step, backend="eager")(step.init(), batch(0))
    assert other.tolist() == [1.0, 1.0, 1.0]
