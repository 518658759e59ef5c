"""Parameters and buffers that share memory: one tensor is one, as in torch's loop; anything else is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same
from tests.support.steps import eager_and_traced
from tests.support.torch_loop import assert_as_torchs_loop

SGD = stateless(torch.optim.SGD, lr=0.1, momentum=0.9)
X = torch.linspace(-1, 1, 12).reshape(3, 4)
BATCHES = [(X, torch.ones(3, 4))] * 3


class Pair(nn.Module):
    """Two layers, and whatever a test ties."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x)))
        return out


def put(model: nn.Module, name: str, value: Any) -> None:
    """Assign a tensor to a place in the module, as a buffer if it is no parameter."""
    part, _, attribute = name.rpartition(".")
    owner = model.get_submodule(part)
    if isinstance(value, nn.Parameter):
        setattr(owner, attribute, value)
    else:
        owner.register_buffer(attribute, value)


W, ROWS = "a trainable parameter 'a.weight'", torch.zeros(6)
#: What is assigned, and the two that share memory.
REFUSED: dict[str, tuple[Callable[[Any], dict[str, Tensor]], str]] = {
    "transposed": (lambda w: {"b.weight": nn.Parameter(w.data.t())}, f"{W} and a trainable parameter 'b.weight'"),
    "frozen": (
        lambda w: {"b.weight": nn.Parameter(w.data.t(), requires_grad=False)},
        f"{W} and a frozen parameter 'b.weight'",
    ),
    "a buffer": (lambda w: {"b.rows": w.data[:2]}, f"{W} and a buffer 'b.rows'"),
    "a frozen one and a buffer": (
        lambda w: {"a.bias": nn.Parameter(ROWS[:4], requires_grad=False), "b.rows": ROWS[:4]},
        "a frozen parameter 'a.bias' and a buffer 'b.rows'",
    ),
    "buffers": (lambda w: {"a.low": ROWS[:4], "b.high": ROWS[2:]}, "a buffer 'a.low' and a buffer 'b.high'"),
    "columns": (
        # contract: "and so are two columns of a matrix"
        lambda w: {"a.low": ROWS.view(2, 3)[:, 0], "b.high": ROWS.view(2, 3)[:, 1]},
        "a buffer 'a.low' and a buffer 'b.high'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_memory_that_two_share_is_refused_by_name(name: str) -> None:
    # contract: "that share memory without being one tensor are an error"
    model, (tie, text) = Pair(), REFUSED[name]
    for place, value in tie(model.a.weight).items():
        put(model, place, value)
    with pytest.raises(ValueError, match=f"must be one tensor or share no memory; got {text}: assign the one"):
        module_loss(model, F.mse_loss)


def test_a_plain_attribute_that_shares_memory_is_refused_by_name() -> None:
    model = Pair()
    model.b.kept = model.a.weight.detach()
    with pytest.raises(ValueError, match=f"got {W} and a plain attribute 'b.kept'"):
        module_loss(model, F.mse_loss)


def one_storage() -> Pair:
    """As cuDNN lays the weights of an LSTM out."""
    model, base = Pair(), torch.randn(2, 4, 4)
    model.a.weight, model.b.weight = (nn.Parameter(part) for part in base)
    return model


def attributes() -> Pair:
    """As transformers' rotary embeddings and torch's older spectral_norm keep them, a copy, and frozen ones."""
    model = Pair()
    model.register_buffer("table", torch.randn(4))
    model.original_table = model.table
    model.start = model.a.weight.detach().clone()
    model.a.requires_grad_(False)
    model.still = model.a.weight.detach()
    model.part = nn.Parameter(model.still[:2], requires_grad=False)
    nn.utils.spectral_norm(model.b)
    return model


class Cached(Pair):
    """Fills a buffer in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None, persistent=False)

    mask: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.full((4,), 2.0)
        return super().forward(x) * self.mask


@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
@pytest.mark.parametrize("make", [one_storage, attributes, Cached])
def test_memory_that_is_not_shared_or_not_written_is_taken(make: Any) -> None:
    assert_as_torchs_loop(lambda: (make(), F.mse_loss), BATCHES)


class Counting(nn.Module):
    """Buffers of one tensor: `how` says what the forward pass does with them."""

    first: Tensor
    second: Tensor

    def __init__(self, how: str, second: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how
        start = torch.zeros(4)
        self.register_buffer("first", start)
        self.register_buffer("second", second(start))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.second += 1
        elif self.how == "both":
            self.first = self.second = self.first + 1
        else:
            self.first = self.first + 1
        out: Tensor = self.layer(x) + self.first + 10 * self.second
        return out


@pytest.mark.compiled
@pytest.mark.parametrize("second", [lambda t: t, lambda t: t.data], ids=["one object", "one memory"])
@pytest.mark.parametrize("how", ["in place", "both"])
@eager_and_traced
def test_two_buffers_of_one_tensor_are_one(how: str, second: Any, wrap: Any) -> None:
    assert_as_torchs_loop(lambda: (Counting(how, second), F.mse_loss), BATCHES, wrap)


@pytest.mark.compiled
@eager_and_traced
def test_two_buffers_of_one_tensor_of_which_one_is_assigned(wrap: Any) -> None:
    step = make_train_step(module_loss(Counting("one", lambda t: t), F.mse_loss), SGD)
    with pytest.raises(ValueError, match=r"buffers that are one tensor must stay one; got 'first' and 'second'.*clone"):
        wrap(step)(step.init(), (X, X))


# A module that changes after its loss was made.

CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "freeze": (
        lambda model: model.a.weight.requires_grad_(False),
        "as it was when the loss was made; 'a.weight' was a trainable parameter and is a frozen parameter: make",
    ),
    "add": (
        lambda model: model.add_module("c", nn.Linear(4, 4)),
        "as it was .*; 'c.weight' was not in it and is a trainable parameter",
    ),
    "remove": (
        lambda model: setattr(model.b, "bias", None),
        "as it was .*; 'b.bias' was a frozen parameter and is not in it",
    ),
}


@pytest.mark.compiled
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_changed_after_its_loss_was_made(change: str) -> None:
    # contract: "Later is an error"
    # contract: "To freeze a parameter, or to add a layer with parameters, between two calls is an error"
    model, (make, text) = Pair(), CHANGES[change]
    model.b.bias.requires_grad_(False)
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    state, run = step.init(), jit(step, backend="eager", donate=False)
    step(state, (X, X))
    run(state, (X, X))
    make(model)
    # A program that was compiled before does not see a parameter that is set to None.
    later = jit(step, backend="eager", donate=False) if change == "remove" else run
    for call in (step, later, step.loss, lambda *_: step.init()):
        with pytest.raises(ValueError, match=f"must stay {text}"):
            call(state, (X, X))


@pytest.mark.compiled
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "parted"])
def test_a_tie_that_changes_between_steps_is_named_by_init_and_in_a_trace(tie: bool) -> None:
    model = Pair()
    if not tie:
        model.b.weight = model.a.weight
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    state, _ = step(step.init(), (X, X))
    expected, _ = step(state, (X, X))
    model.b.weight = model.a.weight if tie else copy.deepcopy(model.a.weight)
    # An eager step goes on with the ties of before; a state and a trace are made with none that differ.
    assert_same(step(state, (X, X))[0].params, expected.params)
    for later in (lambda *_: step.init(), jit(step, backend="eager", donate=False)):
        with pytest.raises(ValueError, match="model must have the ties it had when the loss was made"):
            later(state, (X, X))
