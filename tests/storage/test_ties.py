"""Parameters and buffers that share memory: one tensor is one, as in torch's loop; anything else is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from funcamp import jit, make_train_step, module_loss, presets, ravel, stateless
from funcamp._memory import overlaps
from tests.support.helpers import assert_same, clone, together, values_of

SGD = stateless(torch.optim.SGD, lr=0.1, momentum=0.9)


@st.composite
def views(draw: Any) -> tuple[Tensor, Tensor]:
    """Two views of 40 numbers, of one size of element or of two."""
    base, found = torch.arange(40, dtype=torch.int32), []
    for _ in range(2):
        elements = base.view(draw(st.sampled_from([torch.int32, torch.int16, torch.int64])))
        size = draw(st.lists(st.integers(1, 3), max_size=2))
        stride = draw(st.lists(st.integers(0, 4), min_size=len(size), max_size=len(size)))
        found.append(elements.as_strided(size, stride, draw(st.integers(0, 3))))
    return found[0], found[1]


@given(views())
@settings(max_examples=200, deadline=None)
def test_overlap_is_a_common_byte(pair: tuple[Tensor, Tensor]) -> None:
    def bytes_of(leaf: Tensor) -> set[int]:
        offsets = [leaf.data_ptr()]
        for size, stride in zip(leaf.shape, leaf.stride()):
            offsets = [start + step * stride * leaf.itemsize for start in offsets for step in range(size)]
        return {start + byte for start in offsets for byte in range(leaf.itemsize)}

    expected = bool(bytes_of(pair[0]) & bytes_of(pair[1]))
    assert bool(list(overlaps({"a": pair[0], "b": pair[1]}))) == expected


def test_one_memory_under_two_storages_is_one_tensor() -> None:
    array = np.ones(3, dtype=np.float32)
    flat = ravel({"a": torch.from_numpy(array), "b": torch.from_numpy(array)})
    assert len(flat.layout.slots) == 1


class Pair(nn.Module):
    """Two layers, and whatever a test ties."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x)))
        return out


def transposed(model: Pair) -> None:
    model.b.weight = nn.Parameter(model.a.weight.data.t())


def twice(model: Pair) -> None:
    model.b.weight = nn.Parameter(model.a.weight.data)


def row(model: Pair) -> None:
    model.b.bias = nn.Parameter(model.a.weight.data[1])


def arrays(model: Pair) -> None:
    array = np.ones((4, 4), dtype=np.float32)
    for layer in (model.a, model.b):
        layer.weight = nn.Parameter(torch.from_numpy(array))


def frozen_view(model: Pair) -> None:
    model.b.weight = nn.Parameter(model.a.weight.data.t(), requires_grad=False)


def buffer_view(model: Pair) -> None:
    model.b.register_buffer("weight_copy", model.a.weight.data[:2])


def parameter_as_buffer(model: Pair) -> None:
    model.b.register_buffer("shadow", model.a.weight)


def buffers_that_overlap(model: Pair) -> None:
    table = torch.zeros(6)
    model.a.register_buffer("low", table[:4])
    model.b.register_buffer("high", table[2:])


def view_of_buffer(model: Pair) -> None:
    model.a.register_buffer("table", torch.zeros(2, 2))
    model.b.register_buffer("turned", model.a.get_buffer("table").t())


def attribute(model: Pair) -> None:
    model.b.kept = model.a.weight.detach()


def attribute_of_part(model: Pair) -> None:
    model.first_row = model.a.weight.data[0]


REFUSED: list[tuple[Callable[[Pair], None], str]] = [
    (transposed, "a trainable parameter 'a.weight' and a trainable parameter 'b.weight'"),
    (twice, "a trainable parameter 'a.weight' and a trainable parameter 'b.weight'"),
    (row, "a trainable parameter 'a.weight' and a trainable parameter 'b.bias'"),
    (arrays, "a trainable parameter 'a.weight' and a trainable parameter 'b.weight'"),
    (frozen_view, "a trainable parameter 'a.weight' and a frozen parameter 'b.weight'"),
    (buffer_view, "a trainable parameter 'a.weight' and a buffer 'b.weight_copy'"),
    (parameter_as_buffer, "a trainable parameter 'a.weight' and a buffer 'b.shadow'"),
    (buffers_that_overlap, "a buffer 'a.low' and a buffer 'b.high'"),
    (view_of_buffer, "a buffer 'a.table' and a buffer 'b.turned'"),
    (attribute, "a trainable parameter 'a.weight' and a plain attribute 'b.kept'"),
    (attribute_of_part, "a trainable parameter 'a.weight' and a plain attribute 'first_row'"),
]


@pytest.mark.parametrize(("tie", "text"), REFUSED, ids=[tie.__name__ for tie, _ in REFUSED])
def test_memory_that_two_share_is_refused_by_name(tie: Any, text: str) -> None:
    model = Pair()
    tie(model)
    with pytest.raises(ValueError, match=f"must be one tensor or share no memory; got {text}: assign the one"):
        module_loss(model, F.mse_loss)


def interleaved(model: nn.Module) -> None:
    base = torch.randn(4, 4, 2)
    model.a.weight, model.b.weight = nn.Parameter(base[..., 0]), nn.Parameter(base[..., 1])  # type: ignore[union-attr]


def one_storage(model: nn.Module) -> None:
    """As cuDNN lays the weights of an LSTM out."""
    base = torch.randn(32)
    for start, layer in ((0, model.a), (16, model.b)):
        layer.weight = nn.Parameter(base[start : start + 16].view(4, 4))  # type: ignore[union-attr]


def frozen_both(model: nn.Module) -> None:
    model.table = nn.Parameter(torch.randn(4), requires_grad=False)
    model.part = nn.Parameter(model.table.data[:2], requires_grad=False)


def attributes(model: nn.Module) -> None:
    """As transformers' rotary embeddings and torch's older spectral_norm keep them, and a copy."""
    model.register_buffer("table", torch.randn(4))
    model.original_table = model.table
    model.start = model.a.weight.detach().clone()  # type: ignore[union-attr,operator]
    model.a.requires_grad_(False)
    model.still = model.a.weight.detach()  # type: ignore[union-attr,operator]
    nn.utils.spectral_norm(model.b)  # type: ignore[type-var]


@pytest.mark.parametrize("lay_out", [interleaved, one_storage, frozen_both, attributes])
def test_memory_that_is_not_shared_or_not_written_is_taken(lay_out: Any) -> None:
    torch.manual_seed(0)
    model = Pair()
    lay_out(model)
    eager, x = copy.deepcopy(model), torch.randn(3, 4)
    optimizer = torch.optim.SGD((p for p in eager.parameters() if p.requires_grad), lr=0.1, momentum=0.9)
    step = make_train_step(module_loss(model, F.mse_loss), SGD, presets.disabled())
    state = step.init()
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(eager(x), x)
        loss.backward()
        optimizer.step()
        state, metrics = step(state, (x, x))
        assert_same(metrics.loss, loss.detach())


class Counting(nn.Module):
    """Buffers of one tensor: `how` says what the forward pass does with them."""

    def __init__(self, how: str, second: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how
        start = torch.zeros(4)
        self.register_buffer("first", start)
        self.register_buffer("second", second(start))

    first: Tensor
    second: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.second += 1
        elif self.how == "both":
            self.first = self.second = self.first + 1
        elif self.how == "first":
            self.first = self.first + 1
        elif self.how == "second":
            self.second = self.second + 1
        out: Tensor = self.layer(x) + self.first + 10 * self.second
        return out


@pytest.mark.compiled
@pytest.mark.parametrize("second", [lambda t: t, lambda t: t.data], ids=["one object", "one memory"])
@pytest.mark.parametrize("how", ["in place", "both"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_two_buffers_of_one_tensor_are_one(how: str, second: Any, compiled: bool) -> None:
    torch.manual_seed(0)
    model, x = Counting(how, second), torch.randn(3, 4)
    eager = Counting(how, second)
    eager.load_state_dict(model.state_dict())
    loss_fn = module_loss(model, F.mse_loss)
    step = make_train_step(loss_fn, stateless(torch.optim.SGD, lr=0.1), presets.disabled())
    run, state, before = (
        jit(step, backend="eager") if compiled else step,
        step.init(),
        clone(values_of(model)),
    )
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(eager(x), x)
        loss.backward()
        optimizer.step()
        state, metrics = run(state, (x, x))
        assert_same(metrics.loss, loss.detach())
    assert_same(values_of(model), before)
    assert_same(loss_fn.state_dict(state.params, state.buffers), clone(dict(eager.state_dict())))


@pytest.mark.compiled
@pytest.mark.parametrize("how", ["first", "second"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_two_buffers_of_one_tensor_of_which_one_is_assigned(how: str, compiled: bool) -> None:
    step = make_train_step(module_loss(Counting(how, lambda t: t), F.mse_loss), SGD)
    run, x = jit(step, backend="eager") if compiled else step, torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"buffers that are one tensor must stay one; got 'first' and 'second'.*clone"):
        run(step.init(), (x, x))


class Table(nn.Module):
    """A frozen embedding over the memory of a buffer that the forward pass writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(3, 4))
        self.words = nn.Embedding.from_pretrained(self.table, freeze=True)
        self.layer = nn.Linear(4, 4)

    table: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        self.table += 1
        out: Tensor = self.layer(self.words(tokens))
        return out


def test_a_frozen_parameter_over_a_buffer_follows_it() -> None:
    torch.manual_seed(0)
    model, tokens, target = Table(), torch.tensor([0, 2]), torch.ones(2, 4)
    eager = Table()
    eager.load_state_dict(model.state_dict())
    loss_fn = module_loss(model, F.mse_loss)
    step = make_train_step(loss_fn, SGD, presets.disabled())
    state = step.init()
    optimizer = torch.optim.SGD(eager.layer.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(eager(tokens), target)
        loss.backward()
        optimizer.step()
        state, metrics = step(state, (tokens, target))
        assert_same(metrics.loss, loss.detach())
    assert_same(loss_fn.state_dict(state.params, state.buffers), clone(dict(eager.state_dict())))
    assert model.table.sum() == 0
    assert dict(model.named_buffers()).keys() == {"table"}


class AssignedTable(Table):
    def forward(self, tokens: Tensor) -> Tensor:
        self.table = self.table + 1
        out: Tensor = self.layer(self.words(tokens))
        return out


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_a_buffer_that_is_assigned_leaves_a_frozen_parameter_behind(compiled: bool) -> None:
    step = make_train_step(module_loss(AssignedTable(), F.mse_loss), SGD)
    run = jit(step, backend="eager") if compiled else step
    with pytest.raises(ValueError, match=r"buffers that are one tensor must stay one; got 'table' and 'words.weight'"):
        run(step.init(), (torch.tensor([0, 2]), torch.ones(2, 4)))


class Deletes(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        del self.running_mean
        return out


def test_a_buffer_that_the_forward_pass_deletes_is_named() -> None:
    model, x = Deletes(4), torch.randn(3, 4)
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    with pytest.raises(ValueError, match=r"must keep its buffers; .* deleted 'running_mean'"):
        step(step.init(), (x, x))
    assert dict(model.named_buffers()).keys() == {"running_mean", "running_var", "num_batches_tracked"}


def freeze(model: Pair) -> None:
    model.a.weight.requires_grad_(False)


def thaw(model: Pair) -> None:
    model.requires_grad_(True)


def add(model: Pair) -> None:
    model.add_module("c", nn.Linear(4, 4))


def remove(model: Pair) -> None:
    model.b.bias = None  # type: ignore[assignment]


CHANGES: list[tuple[Callable[[Pair], None], str]] = [
    (freeze, "'a.weight' was a trainable parameter and is a frozen parameter"),
    (thaw, "'b.bias' was a frozen parameter and is a trainable parameter"),
    (add, "'c.weight' was not in it and is a trainable parameter"),
    (remove, "'b.bias' was a frozen parameter and is not in it"),
]


@pytest.mark.parametrize(("change", "text"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_a_module_that_changed_after_its_loss_was_made(change: Any, text: str) -> None:
    model, x = Pair(), torch.ones(2, 4)
    model.b.bias.requires_grad_(False)
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    state = step.init()
    step(state, (x, x))
    change(model)
    runs: list[Callable[[], Any]] = [
        lambda: step(state, (x, x)),
        lambda: jit(step, backend="eager")(clone(state), (x, x)),
        lambda: step.loss(state, (x, x)),
        step.init,
    ]
    for run in runs:
        with pytest.raises(
            ValueError, match=f"must stay as it was when the loss was made; {text}: make the loss again"
        ):
            run()
    again = make_train_step(module_loss(model, F.mse_loss), SGD)
    if change is not remove:  # whose place in the model is now empty
        again(again.init(), (x, x))


def test_a_module_that_is_frozen_for_a_while() -> None:
    """A discriminator in the generator's turn."""
    model, x = Pair(), torch.ones(2, 4)
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="must stay as it was"):
        step.init()
    model.requires_grad_(True)
    step(step.init(), (x, x))


def test_a_tie_made_after_the_loss() -> None:
    model = Pair()
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    model.b.weight = model.a.weight
    with pytest.raises(ValueError, match="must have the ties it had when the loss was made"):
        step.init()


class Caches(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None)

    mask: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(4)
        return super().forward(x) * self.mask


def test_a_buffer_that_the_forward_pass_registers_is_used() -> None:
    x, trained = torch.ones(2, 4), []
    for make in (Caches, Pair):  # the buffer's numbers are ones
        torch.manual_seed(0)
        step = make_train_step(module_loss(make(), F.mse_loss), SGD)
        state = step.init()
        for _ in range(2):
            state, _ = step(state, (x, x))
        trained.append(dict(state.params.tree()))
    assert_same(*trained)


def test_a_lazy_module_and_a_criterion_with_parameters() -> None:
    with pytest.raises(ValueError, match=r"model must have its shapes; '0.weight' is lazy: call the model on a batch"):
        module_loss(nn.Sequential(nn.LazyLinear(3)), F.mse_loss)
    loss_fn = module_loss(Pair(), nn.Bilinear(4, 4, 1))
    params = {name: value.requires_grad_() for name, value in loss_fn.params().items()}
    with pytest.raises(ValueError, match=r"must have no trainable parameter, .*; got one, a torch.float32"):
        loss_fn(params, (torch.ones(2, 4), torch.ones(2, 4)))


def test_a_module_without_values_and_one_of_fake_tensors() -> None:
    with torch.device("meta"):
        model = Pair()
    assert len(module_loss(model, F.mse_loss).names) == 4
    with torch._subclasses.FakeTensorMode():
        assert len(module_loss(Pair(), F.mse_loss).names) == 4


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "parted"])
def test_a_tie_that_changes_between_steps_is_named_by_init_and_in_a_trace(tie: bool) -> None:
    model = Pair()
    if not tie:
        model.b.weight = model.a.weight
    step, x = make_train_step(module_loss(model, F.mse_loss), SGD), torch.ones(2, 4)
    state, _ = step(step.init(), (x, x))
    expected, _ = step(state, (x, x))
    model.b.weight = model.a.weight if tie else nn.Parameter(model.a.weight.detach().clone())
    # An eager step goes on with the ties of before; a state and a trace are made with none that differ.
    assert_same(step(state, (x, x))[0].params, expected.params)
    for later in (step.init, lambda: jit(step, backend="eager", donate=False)(state, (x, x))):
        with pytest.raises(ValueError, match="model must have the ties it had when the loss was made"):
            later()


def test_a_state_is_made_of_the_modules_own_values_while_another_thread_steps() -> None:
    model, x = Pair(), torch.ones(2, 4)
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    own = step.init()
    other = own._replace(params=own.params.ravel({name: value + 1 for name, value in own.params.tree().items()}))

    def work(index: int) -> None:
        for _ in range(100):
            if index:
                step.loss(other, (x, x))
            else:
                assert_same(step.init().params, own.params)

    together(work, 2)
