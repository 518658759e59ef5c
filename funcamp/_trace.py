"""Compile a function of a flat list of tensors once, and call it afterwards without torch.compile's front end.

Dynamo evaluates a guard for everything the function read while it was traced: half a millisecond a call for a training
step. Here the caller knows by itself what the compiled program was made for, so guards are not evaluated again: what
the function read besides its arguments stays as it was, tensors by reference.
"""

from __future__ import annotations

import itertools
import os
import shutil
import types
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Flat: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
_serial = itertools.count()


class SharedError(Exception):
    """A tensor that the function reads of its own lies in the storage of an argument that it writes."""


def trace(
    fn: Flat, args: list[Tensor], writes: int, backend: str, patches: dict[str, Any]
) -> tuple[Flat, list[Tensor]]:
    """Compile fn for arguments like these and run it on them once.

    Args:
        fn: from a list of tensors to a list of tensors; may write to the first `writes` of them, in place.
        args: distinct tensors, none an alias of another.
        writes: how many of them it writes.
        backend: "inductor", or another name that torch.compile knows.
        patches: Inductor's options.

    Returns:
        The compiled function, and its results for these arguments.

    Raises:
        SharedError: a captured tensor lies in the storage of a written one; nothing has run.
    """
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        inner = _backend(backend, patches)(graph, inputs)

        def first(*given: Any) -> Any:
            own = {id(arg) for arg in args}
            stored = {arg.untyped_storage()._cdata for arg in args[:writes] if arg.numel()}
            if any(id(t) not in own and isinstance(t, Tensor) and t.untyped_storage()._cdata in stored for t in given):
                raise SharedError
            out = inner(*given)
            calls.append((inner, given, out))
            return out

        return first

    # Dynamo keeps its programs by code object: one of its own for each trace.
    code = fn.__code__.replace(co_name=f"{fn.__code__.co_name}_{next(_serial)}")
    own = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    with torch.no_grad():
        out = torch.compile(own, fullgraph=True, backend=compiler, dynamic=False)(args)
    if not calls:  # nothing to compute: every result is an argument or a constant
        return fn, out
    inner, given, results = calls[0]
    position = {id(arg): index for index, arg in enumerate(args)}
    inputs = [position.get(id(value), value) for value in given]
    made = {id(value): index for index, value in enumerate(results)}
    outputs = [(made.get(id(value), -1), position.get(id(value), value)) for value in out]

    def run(values: list[Tensor]) -> list[Tensor]:
        got = inner(*[values[i] if type(i) is int else i for i in inputs])
        return [got[i] if i >= 0 else values[j] if type(j) is int else j for i, j in outputs]

    return run, out


def _backend(name: str, patches: dict[str, Any]) -> Callable[..., Any]:
    if name == "inductor":
        from torch._inductor.compile_fx import compile_fx

        return lambda graph, inputs: compile_fx(graph, inputs, config_patches=patches)
    from torch._dynamo.backends.registry import lookup_backend

    found: Callable[..., Any] = lookup_backend(name)
    return found


def check_compiler(backend: str, leaves: list[Tensor]) -> None:
    """Raise RuntimeError where Inductor would want a C++ compiler and there is none."""
    if backend != "inductor" or not any(leaf.device.type == "cpu" for leaf in leaves):
        return
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if not any(shutil.which(name) for name in wanted):
        raise RuntimeError(
            "jit: torch.compile needs a C++ compiler on a CPU; found none of "
            f"{', '.join(wanted)}: install g++ or clang, or pass backend='aot_eager'"
        )
