"""Compile a function of a flat list of tensors once, and call it afterwards without torch.compile's front end.

Dynamo evaluates a guard for everything the function read while it was traced: half a millisecond a call for a training
step. Here the caller knows by itself what the compiled program was made for, so guards are not evaluated again: what
the function read besides its arguments stays as it was, tensors by reference.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import types
from collections.abc import Callable, Set
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._grad import put_leaves_in_graphs
from funcamp._owned import storage_of
from funcamp._types import Tree
from funcamp._user_line import INSTEAD, READS, in_text
from funcamp._whole import whole_functions

Flat: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
_serial = itertools.count()

#: Operations in a graph above which C++ calls its kernels from a file of their own. One file takes longer than linearly
#: to compile (128 s for 85 at 48 blocks, 3,300 operations); of two, small steps take longer (0.75 ms for 0.52).
LONG = 1500


class SharedError(Exception):
    """A tensor that the function reads of its own lies in a storage that will be written."""


class HostError(Exception):
    """The function leaves the arguments' type of device, or reads a value on the host."""


class Outline(NamedTuple):
    """A pytree without its tensors."""

    spec: _tree.TreeSpec
    constants: list[Any]
    """Its leaves, with None in place of every tensor."""
    tensors: list[int]
    """The places of the tensors."""


class Traced(NamedTuple):
    """A compiled function."""

    run: Flat
    """From arguments to results, flat."""
    results: list[Tensor]
    """Those of the first call."""
    rest: Outline
    """The pytree that the function returned beside its list, whose tensors are the last results."""
    captured: list[Tensor]
    """What it reads of its own."""


def trace(
    fn: Callable[[list[Tensor]], tuple[list[Tensor], Tree]],
    args: list[Tensor],
    home: Set[str],
    written: Set[int],
    backend: str,
    patches: dict[str, Any],
) -> Traced:
    """Compile fn for arguments like these and run it on them once.

    Args:
        fn: from a list of tensors to a list of tensors and a pytree; may write to its arguments.
        args: distinct tensors, none an alias of another.
        home: types of device that it must not leave.
        written: storages that will be written.
        backend: "inductor", or another name that torch.compile knows.
        patches: Inductor's options.

    Raises:
        HostError: an operation takes a tensor from home elsewhere, or reads it; nothing has run.
        SharedError: a captured tensor lies in a written storage; nothing has run.
    """
    # Dynamo keeps the compiler, with all that it refers to, as long as the program: no tensor may be among that.
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = []
    failed: list[Exception] = []
    own, kinds = {id(arg) for arg in args}, sorted({arg.device.type for arg in args})

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        _check_graph(graph, home)
        inner = _at_rest(_backend(backend, patches)(graph, inputs), backend, kinds)

        def first(*given: Any) -> Any:
            if any(id(t) not in own and isinstance(t, Tensor) and storage_of(t) in written for t in given):
                raise SharedError
            try:
                out = inner(*given)
            except Exception as error:
                failed.append(error)
                raise
            calls.append((inner, given, out))
            return out

        return first

    # Dynamo keeps its programs by code object: one of its own for each trace.
    code = fn.__code__.replace(co_name=f"{fn.__code__.co_name}_{next(_serial)}")
    alone = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    put_leaves_in_graphs()
    tape: Any = torch._C._autograd
    hooks = tape._saved_tensors_hooks_is_enabled()
    try:
        # A step may differentiate by torch.autograd.grad, and have custom functions under torch.func.
        with torch.no_grad(), whole_functions(), torch._dynamo.config.patch(trace_autograd_ops=True):
            first, rest = torch.compile(alone, fullgraph=True, backend=compiler, dynamic=False)(args)
    except Exception as error:
        if hooks:  # a graph of torch.func turns them off, and does not turn them on again where it fails
            tape._saved_tensors_hooks_enable()
        if failed:  # it was compiled, and failed at work: no matter of compilation
            raise failed[0] from None
        raise getattr(error, "inner_exception", error) from error.__cause__
    leaves, spec = _tree.flatten(rest)
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    outline = Outline(spec, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], tensors)
    out = [*first, *[leaves[index] for index in tensors]]
    # Where there is nothing to compute, every result is an argument or a tensor of the function's own.
    inner, given, results = calls.pop() if calls else (lambda *_: (), (), ())
    position = {id(arg): index for index, arg in enumerate(args)}
    inputs = [position.get(id(value), value) for value in given]
    made = {id(value): index for index, value in enumerate(results)}
    outputs: list[tuple[int, Any]] = [
        (made[id(value)], None) if id(value) in made else (-1, position.get(id(value), value)) for value in out
    ]

    def run(values: list[Tensor]) -> list[Tensor]:
        got = inner(*[values[i] if type(i) is int else i for i in inputs])
        return [got[i] if i >= 0 else values[j] if type(j) is int else j for i, j in outputs]

    return Traced(run, out, outline, [t for t in given if isinstance(t, Tensor) and id(t) not in own])


def _check_graph(graph: torch.fx.GraphModule, home: Set[str]) -> None:
    for node in graph.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if any(_follows_from_values(value) for value in _values([node])):
            raise HostError(f"{READS}; {in_text(node.stack_trace or '')} does: {INSTEAD}")
        away = _devices([node]) - home
        if away and _devices(node.all_input_nodes) & home:
            line = in_text(node.stack_trace or "")
            raise HostError(f"stay on one type of device; {line} moves a tensor to {away.pop()}")


def _values(nodes: list[torch.fx.Node]) -> list[Any]:
    return _tree.leaves([node.meta.get("example_value") for node in nodes])


def _devices(nodes: list[torch.fx.Node]) -> set[str]:
    return {value.device.type for value in _values(nodes) if isinstance(value, Tensor)}


def _follows_from_values(value: object) -> bool:
    """Whether a number, or a size of a tensor, is one that no shape tells."""
    numbers = value.shape if isinstance(value, Tensor) else (value,)
    return any(isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) for number in numbers)


def _at_rest(inner: Callable[..., Any], backend: str, kinds: list[str]) -> Callable[..., Any]:
    """The same, out of reach of an autocast around the call: what it casts was settled in the trace."""
    if backend == "inductor":
        return inner

    def run(*given: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for kind in kinds:
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return inner(*given)

    return run


def _backend(name: str, patches: dict[str, Any]) -> Callable[..., Any]:
    if name == "inductor":
        return lambda graph, inputs: _inductor(graph, inputs, patches)
    from torch._dynamo.backends.registry import lookup_backend

    found: Callable[..., Any] = lookup_backend(name)
    return found


def _inductor(graph: torch.fx.GraphModule, inputs: list[Tensor], patches: dict[str, Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    if patches.get("cpp_wrapper"):
        if sum(node.op == "call_function" for node in graph.graph.nodes) > LONG:
            patches = {**patches, "cpp_wrapper_build_separate": True}
        try:
            return compile_fx(graph, inputs, config_patches=patches)
        except Exception:  # what C++ cannot call, Python may; if it cannot either, its error is the familiar one
            patches = {**patches, "cpp_wrapper": False}
    return compile_fx(graph, inputs, config_patches=patches)


def check_compiler(backend: str, leaves: list[Tensor]) -> None:
    """Raise RuntimeError where Inductor would want a C++ compiler and there is none."""
    if backend == "inductor" and any(leaf.device.type == "cpu" for leaf in leaves):
        cpp_compiler("jit: torch.compile needs a C++ compiler on a CPU")


def cpp_compiler(need: str) -> str:
    """The path of the compiler that Inductor uses: $CXX, or the platform's own.

    Raises:
        RuntimeError: there is none.
    """
    from torch._inductor import config

    names = [name for name in config.cpp.cxx if name]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise RuntimeError(
            f"{need}; found no {' or '.join(names)}: install it, name another in $CXX before Python starts, or pass "
            "backend='aot_eager'"
        )
    return found
