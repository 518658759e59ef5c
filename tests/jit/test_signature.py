"""A tensor of a kind that no compiled step takes is refused by its name, at the first call and at any later one."""

from __future__ import annotations

import copy
import dataclasses
import enum
import fractions
import math
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.masked import masked_tensor

from funcamp import jit
from funcamp._jit.jit_step import JitStep
from tests.support.helpers import assert_same


class Named(Tensor):
    """A subclass with memory of its own."""


class Wrapper(Tensor):
    """A subclass without: what torch.compile would have to take apart."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        unwrap = torch.utils._pytree.tree_map_only(Wrapper, lambda leaf: leaf.held, (args, kwargs or {}))
        return func(*unwrap[0], **unwrap[1])


KINDS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: torch.eye(2).to_sparse(), "must be strided; got layout torch.sparse_coo"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "must be strided; got layout torch.sparse_csr"),
    "mkldnn": (lambda: torch.eye(2).to_mkldnn(), "must be strided; got layout torch._mkldnn"),
    "masked": (lambda: masked_tensor(torch.eye(2), torch.eye(2) > 0), "must be a plain tensor; got a MaskedTensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), "must be .*; got a nested tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged),
        "must be a plain tensor; got a NestedTensor",
    ),
    "subclass": (lambda: torch.eye(2).as_subclass(Named), r"must be a plain tensor; got a Named: pass .*as_subclass"),
    "wrapper": (lambda: Wrapper(torch.eye(2)), "must be a plain tensor; got a Wrapper"),
    "quantized": (
        lambda: torch._empty_affine_quantized((2, 2), scale=1.0, zero_point=0, dtype=torch.qint8),
        "quantized",
    ),
    "meta": (lambda: torch.ones(2, 2, device="meta"), "must be a tensor of numbers; got a meta one"),
}
WARNINGS = ("ignore:.*(beta state|prototype stage|quantiz)",)


def add(state: Any, batch: Any) -> Any:
    return {"a": state["a"] + batch["x"].sum()}, None


def plain() -> dict[str, Tensor]:
    return {"a": torch.zeros(2, 2)}


@pytest.mark.filterwarnings(*WARNINGS)
@pytest.mark.parametrize("name", KINDS)
def test_a_tensor_of_another_kind_is_refused_at_any_call(name: str) -> None:
    make, message = KINDS[name]
    leaf, run = make(), jit(add, backend="aot_eager")
    state: Any = plain()
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"jit: batch\['x'\] .*{message}"):
            run(state, {"x": leaf})
        with pytest.raises(TypeError, match=rf"jit: state\['a'\] .*{message}"):
            run({"a": leaf}, {"x": torch.eye(2)})
        state, _ = run(state, {"x": torch.eye(2)})
    assert_same(state["a"], torch.full((2, 2), 4.0))
    assert run.programs == 1


@pytest.mark.parametrize("later", [False, True])
def test_a_parameter_is_a_tensor(later: bool) -> None:
    run, state = jit(add, backend="aot_eager"), plain()
    if later:
        state, _ = run(state, {"x": torch.zeros(2, 2)})
    state, _ = run(state, {"x": torch.nn.Parameter(torch.eye(2))})
    assert_same(state["a"], torch.full((2, 2), 2.0))
    assert not state["a"].requires_grad
    assert run.programs == 1 + later, "one that requires a gradient is another signature"
    run(state, {"x": torch.nn.Parameter(torch.eye(2), requires_grad=False)})
    assert run.programs == 2


def test_a_compiled_step_inside_another_says_what_to_do() -> None:
    inner = jit(add, backend="aot_eager")
    state, _ = inner(plain(), {"x": torch.eye(2)})  # compiled before, too
    for used in (inner, jit(add, backend="aot_eager")):

        def calls(state: Any, batch: Any, used: JitStep = used) -> Any:
            return used(state, batch)

        outer = jit(calls, backend="aot_eager")
        with pytest.raises(RuntimeError, match=r"jit: jit\(.*add.*\) must not be called inside another jit"):
            outer(plain(), {"x": torch.eye(2)})
    state, _ = inner(state, {"x": torch.eye(2)})
    assert_same(state["a"], torch.full((2, 2), 4.0))


def test_a_compiled_step_inside_a_transform_says_what_to_do() -> None:
    run = jit(add, backend="aot_eager")
    run(plain(), {"x": torch.ones(2)})
    with pytest.raises(RuntimeError, match=r"not be called inside .* a transform of torch\.func"):
        torch.vmap(lambda row: run(plain(), {"x": row})[0])(torch.ones(3, 2))


def test_another_thread_may_run_while_one_compiles() -> None:
    other, seen = jit(add, backend="aot_eager"), []
    state, _ = other(plain(), {"x": torch.eye(2)})

    def step(state: Any, batch: Any) -> Any:
        return add(state, batch)

    def beside(graph: Any, inputs: Any) -> Any:
        thread = threading.Thread(target=lambda: seen.append(other(state, {"x": torch.eye(2)})[0]))
        thread.start()
        thread.join()
        return graph

    torch._dynamo.register_backend(beside, name="funcamp_beside")
    jit(step, backend="funcamp_beside")(plain(), {"x": torch.eye(2)})
    assert len(seen) == 1


def test_copies_and_pickles_are_not_compiled_yet() -> None:
    run = jit(add, backend="aot_eager", donate=False)
    run(plain(), {"x": torch.eye(2)})
    for other in (pickle.loads(pickle.dumps(run)), copy.deepcopy(run)):
        assert isinstance(other, JitStep)
        assert (repr(other), other.programs) == (repr(run), 0)
        before = plain()
        other(before, {"x": torch.eye(2)})
        assert before["a"].sum() == 0  # the options too


def test_a_step_that_cannot_be_pickled_is_named() -> None:
    def local(state: Any, batch: Any) -> Any:
        return state, batch

    with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
        pickle.dumps(jit(local))


class Box:
    """A batch as an object of its own."""

    def __init__(self, x: Any) -> None:
        self.x = x


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


@dataclasses.dataclass
class Unfrozen:
    x: Any


OBJECTS = {
    "object": (Box, "a Box with some in it"),
    "frozen dataclass": (Frozen, "a Frozen with some in it"),
    "dataclass": (Unfrozen, "an? Unfrozen with some in it"),
    "empty object": (lambda _: Box(None), "a Box, equal only to itself"),
    "frozen set": (lambda x: frozenset([x]), "a frozenset with some in it"),
    "module": (lambda _: torch.nn.Linear(2, 2), "a Linear with some in it"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_with_tensors_is_no_constant_of_a_program(name: str) -> None:
    make, message = OBJECTS[name]
    run = jit(lambda state, batch: (state, None), backend="eager")
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"jit: batch\['b'\] must be .*{message}.*: pass a dict .* or register"):
            run({"a": torch.zeros(())}, {"b": make(torch.ones(2))})
    assert run.programs == 0


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "constant",
    [
        *(1, 1.5, True, 2j, None, "text", b"bytes", ..., Colour.RED, fractions.Fraction(1, 2), range(3)),
        *(torch.float16, torch.strided, torch.channels_last, torch.device("cpu"), torch.Size([2])),
        *(math.sin, add, Box, math, Frozen(("a", 1)), frozenset([1])),
    ],
    ids=lambda constant: type(constant).__name__,
)
def test_values_functions_and_classes_are_constants(constant: Any) -> None:
    seen = []

    def step(state: Any, batch: Any) -> Any:
        seen.append(batch["c"])
        return {"a": state["a"] + 1}, None

    run, state = jit(step, backend="eager"), {"a": torch.zeros(())}
    for _ in range(3):
        state, _ = run(state, {"c": constant})
    assert (state["a"].item(), seen, run.programs) == (3.0, [constant] * len(seen), 1)


def test_another_autocast_around_the_call_is_another_signature() -> None:
    linear = torch.nn.Linear(64, 64)

    def step(state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return state + 1, linear(batch)

    run, state, batch = jit(step, backend="eager", max_signatures=2), torch.zeros(()), torch.randn(2, 64)
    with torch.autocast("cpu", torch.bfloat16):
        state, half = run(state, batch)
    for _ in range(2):
        state, full = run(state, batch)
    assert (half.dtype, full.dtype, run.programs) == (torch.bfloat16, torch.float32, 2)
    changed = r"autocast around the call changed from None to .*torch.float16.*: call it without a region, and give"
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match=changed):
        run(state, batch)


@pytest.mark.inductor
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_another_default_dtype_is_another_signature(backend: str) -> None:
    def step(state: Tensor, batch: Tensor) -> tuple[Tensor, Any]:
        return state + batch, (batch / 3, batch * 1.5, torch.full((2,), 0.1))

    run, state, batch = jit(step, backend=backend, donate=False, max_signatures=2), torch.zeros(2), torch.arange(2)
    try:
        for programs, dtype in enumerate((torch.float32, torch.float64), 1):
            torch.set_default_dtype(dtype)
            for _ in range(2):
                assert_same(run(state, batch), step(state, batch))
            assert run.programs == programs
        torch.set_default_dtype(torch.bfloat16)
        with pytest.raises(ValueError, match=r"default dtype changed from torch.float64 to torch.bfloat16"):
            run(state, batch)
    finally:
        torch.set_default_dtype(torch.float32)
