"""What `jit` refuses: what is called, and words that the error must have. A refused call changes nothing.

What a step keeps in Python, which is refused by its name, is in test_changes_in_python.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.masked import masked_tensor

from funcamp import jit
from tests.support.helpers import assert_same, clone

Step = Callable[[Any, Any], Any]
Call = Callable[[], object]


def add(state: Any, batch: Any) -> Any:
    """Adds the batch to the state."""
    return {**state, "w": state["w"] + batch["x"].sum()}, None


def start() -> dict[str, Any]:
    return {"w": torch.zeros(()), "rest": [torch.ones(2)]}


X = {"x": torch.ones(2)}


def called(step: Step, state: Any = None, batch: Any = None, **options: Any) -> Call:
    """Return the first call of a jitted step."""
    return lambda: jit(step, backend="eager", **options)(
        start() if state is None else state, X if batch is None else batch
    )


def constant(value: Any) -> Call:
    """Return a call with a constant in its batch."""
    return called(lambda state, batch: (state, None), batch={"x": value})


class Box:
    """A batch as an object of its own."""

    def __init__(self, x: Any) -> None:
        self.x = x


ANY: Any = None
#: What is called, the error, and its words.
ARGUMENTS: dict[str, tuple[Call, type[Exception], str]] = {
    "no function": (lambda: jit(ANY), TypeError, "step must be callable; got None"),
    "unroll": (lambda: jit(add, unroll=0), ValueError, "unroll must be 1 or more; got 0"),
    "half a step": (lambda: jit(add, unroll=1.5), TypeError, "unroll must be an integer; got 1.5"),  # type: ignore[arg-type]
    "backend": (lambda: jit(add, backend=ANY), TypeError, "backend must be a string; got None"),
    "a typo": (lambda: jit(add, backend="eagr"), ValueError, "backend must be 'inductor', .*; got 'eagr'"),
    "jit of jit": (lambda: jit(jit(add)), TypeError, "compiled already"),
    "without a text": (lambda: jit(add, without="views"), TypeError, "without must be a collection of names"),
    "an unknown pass": (lambda: jit(add, without=["layout"]), ValueError, "without must have names of .*; got 'layout'"),
    "an array": (constant([numpy.zeros(2)]), TypeError, r"batch\['x'\]\[0\] must be a tensor, or a constant"),
    "an object": (constant(Box(torch.ones(2))), TypeError, r"batch\['x'\] must be .* without tensors in it; got a Box: pass a dict"),
    "a number in the state": (called(add, {"w": 1.0}), TypeError, r"state\['w'\] must be a tensor or None; got 1.0"),
    "no pair": (called(lambda state, _: state), TypeError, r"must return the pair \(state, metrics\).*; got a dict"),
    "another dtype": (
        called(lambda state, _: ({**state, "w": state["w"].double()}, None)),
        *(ValueError, r"new state must have .* at \['w'\] it has a torch.float64 .* for a torch.float32"),
    ),
    "a lost leaf": (called(lambda state, _: ({"w": state["w"]}, None)), ValueError, "one tree structure"),
    "too few steps": (called(add, unroll=3), ValueError, r"batch\['x'\] must hold 3 steps along its first dimension"),
    "a shape from values": (
        called(lambda state, batch: ({**state, "rest": [batch["x"][batch["x"] > 0]]}, None)),
        *(ValueError, "the step's new state must have the shapes"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_argument_is_named_with_the_rule_and_the_value(name: str) -> None:
    call, error, text = ARGUMENTS[name]
    with pytest.raises(error, match=f"(?s)(jit|also): .*{text}"):
        call()


class Named(Tensor):
    """A subclass with memory of its own."""


KINDS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: torch.eye(2).to_sparse(), "must be a strided tensor .* got .* in layout torch.sparse_coo"),
    "masked": (lambda: masked_tensor(torch.eye(2), torch.eye(2) > 0), "must be a plain tensor; got a MaskedTensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), "must be .*; got a nested one"),
    "subclass": (lambda: torch.eye(2).as_subclass(Named), "must be a plain tensor; got a Named: pass .*as_subclass"),
    "meta": (lambda: torch.ones(2, 2, device="meta"), "must be a strided tensor of numbers; got .* on meta"),
}


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage|quantiz)")
@pytest.mark.parametrize("name", KINDS)
def test_a_tensor_of_another_kind_is_refused_at_any_call(name: str) -> None:
    make, text = KINDS[name]
    leaf, run = make(), jit(add, backend="eager")
    state: Any = {"w": torch.zeros(2, 2)}
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"jit: batch\['x'\] .*{text}"):
            run(state, {"x": leaf})
        with pytest.raises(TypeError, match=rf"jit: state\['w'\] .*{text}"):
            run({"w": leaf}, {"x": torch.eye(2)})
        state, _ = run(state, {"x": torch.eye(2)})
    assert_same(state["w"], torch.full((2, 2), 4.0))
    assert run.programs == 1


# What a step's Python does


OWN, WEIGHT, BARE = torch.ones(6), torch.ones(6, requires_grad=True), torch.ones(6, device="meta")
SPARSE, GENERATOR, NORM = torch.eye(6).to_sparse(), torch.Generator().manual_seed(0), nn.BatchNorm1d(2)


def branch(w: Tensor, x: Tensor) -> Any:
    return x if w > 1 else -x


def seeds(w: Tensor, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return torch.rand(2)


def set_back(w: Tensor, x: Tensor) -> Any:
    before = torch.get_rng_state()
    one = torch.rand_like(x)
    torch.set_rng_state(before)
    return one, torch.randn_like(x)


def set_back_for_others(w: Tensor, x: Tensor) -> Any:
    before = torch.get_rng_state()
    one = torch.bernoulli(x.abs())
    torch.set_rng_state(before)
    return one, torch.bernoulli(1 - x.abs())


def assigns(w: Tensor, x: Tensor) -> None:
    """Torch does not dispatch this."""
    OWN.data = OWN.data * 2


def casts(w: Tensor, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.float16):
        return torch.linalg.pinv(x.view(2, 3))


def packed(w: Tensor, x: Tensor) -> Any:
    lengths = torch.tensor([2, 3])
    return nn.utils.rnn.pack_padded_sequence(x.view(2, 3, 1), lengths, batch_first=True, enforce_sorted=False).data


def ctc(w: Tensor, x: Tensor) -> Tensor:
    lengths = torch.tensor([3])
    leaf = x.view(3, 1, 2).clone().requires_grad_()
    loss = F.ctc_loss(leaf.log_softmax(-1), torch.ones(1, 1, dtype=torch.int64), lengths, lengths // 3)
    return torch.autograd.grad(loss, leaf)[0]


READ = "must not read a tensor's value"
OPEN = "must not read .* or a size that follows from values"
SEED = "must not seed torch's generator"
BACK = "must not set the generator back .*draw once"
DATA = r"must not assign to \.data, "
BATCH = r"must not write into its batch.*torch.float32.*\(6,\).*clone"
CAST = r"under autocast, which casts inside .*test_refusals\.py.*call it in `with torch"
#: A function of a number of the state and of six numbers, the words of its error, and of the line that is named.
PYTHON: dict[str, tuple[Callable[[Tensor, Tensor], Any], str, str]] = {
    "item": (lambda w, x: w.item(), READ, r"item\(\)"),
    "a branch": (branch, READ, "if w > 1"),
    "item of what it reads": (lambda w, x: x * (OWN.sum() * 2).item(), READ, "OWN"),
    "backward of the state": (lambda w, x: (w * x).sum().backward(), "tensors do not require gradients", ""),
    "another device": (lambda w, x: w.to("meta"), "one type of device", 'to."meta"'),
    "no values": (lambda w, x: BARE + x.to("meta"), "must (read tensors with values only|.*one type of device)", ""),
    "a sparse tensor": (lambda w, x: SPARSE @ x, "read strided tensors only, .*make it dense", ""),
    "a new sparse tensor": (
        # contract: "It makes no sparse tensor"
        lambda w, x: x.to_sparse().sum() * w,
        "make no sparse tensor, .*index_add",
        "",
    ),
    "branches": (
        # contract: "`jit` of `torch.cond`"
        lambda w, x: torch.cond(w > 1, lambda: x + 1, lambda: x - OWN, ()),
        "not call torch.cond or a relative",
        "",
    ),
    "nested tensors": (lambda w, x: torch.nested.nested_tensor([x], layout=torch.jagged), "not make nested", "nested"),
    "packed sequences": (packed, "must not pack sequences, whose lengths are values", "pack_padded"),
    "a CTC loss": (
        # contract: "`jit` of a CTC loss"
        ctc,
        "take a shape from values .*ctc_loss.* call the step without jit",
        "",
    ),
    "a size in a branch": (lambda w, x: x if x[x > 0].numel() > 2 else -x, OPEN, "numel"),
    "dropout of such a size": (lambda w, x: F.dropout(x[x > 0]), OPEN, "dropout"),
    "a seed": (seeds, SEED, r"torch.rand\(2\)"),
    "its own generator": (
        # contract: "`jit` of draws with `generator=torch.default_generator`"
        lambda w, x: torch.rand(2, generator=GENERATOR),
        "default generator",
        "GENERATOR",
    ),
    "set back for another kind": (
        # contract: "of draws after the generator was set back, except in a backward pass"
        set_back,
        BACK,
        "",
    ),
    "set back for other probabilities": (set_back_for_others, BACK, ""),
    "data of what it reads": (
        # contract: "`jit` of a step that assigns to `tensor.data`"
        assigns,
        DATA,
        "OWN.data = ",
    ),
    "a write into the batch": (
        # contract: "for a jitted one that is an error"
        # contract: "`jit` of a step that writes into its batch"
        lambda w, x: x.add_(1),
        BATCH,
        "",
    ),
    "a write into what it reads": (lambda w, x: OWN.add_(x), "must write into nothing but its state.*OWN", ""),
    "a batch norm in training": (lambda w, x: NORM(x.view(3, 2)), "NORM.num_batches_tracked.*in eval mode", ""),
    "a cast inside of pinv": (
        # contract: "`torch.linalg.pinv` under autocast"
        casts,
        CAST,
        "",
    ),
}


@pytest.mark.parametrize("name", PYTHON)
def test_what_a_step_must_not_do_is_refused_with_its_line(name: str) -> None:
    function, text, line = PYTHON[name]
    state, x, generator = {"w": torch.ones(())}, torch.linspace(-1, 1, 6), torch.get_rng_state()
    own = [OWN, NORM.num_batches_tracked, NORM.running_mean]
    before = clone((state, x, own))
    place = rf".*test_refusals\.py:\d+ \(.*{line}" if line else ""
    with pytest.raises(RuntimeError, match=rf"(?s)jit: .*{text}{place}"):
        jit(lambda state, x: ({"w": state["w"] + 1}, function(state["w"], x)), backend="eager")(state, x)
    assert_same((state, x, own), before)
    assert_same(torch.get_rng_state(), generator)
    assert WEIGHT.grad is None
    assert "data" not in vars(Tensor)
    assert not torch.compiler.is_compiling()


def test_an_error_of_shapes_comes_without_torchs_log(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="reduction dim"):
        called(lambda state, _: (state, torch.ones(2, 5) @ torch.ones(4, 1)))()
    assert not caplog.records
