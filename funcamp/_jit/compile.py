"""Compile a traced graph with torch.compile's compiler."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from funcamp._jit.ahead import Request
from funcamp._jit.decompositions import decompositions
from funcamp._jit.eager_layouts import keep_layouts, one_by_one
from funcamp._jit.open_parts import closed_decompositions, inner_compile
from funcamp._jit.part_inputs import FlatInput, further_inputs, part_inputs, write_back
from funcamp._memory import overlaps
from funcamp._trace.autocast_regions import without_autocast
from funcamp._trace.trace import Graph, parts, with_parts
from funcamp._upstream.permutations import index_without_check

_log = logging.getLogger("funcamp")

Flat: TypeAlias = Callable[[list[Tensor]], list[Tensor]]

#: Number of operations above which the C++ that calls the kernels gets a separate file. The compile time of one file
#: grows faster than linearly (128 s instead of 85 at 48 blocks, 3,300 operations); with two, small steps are slower
#: (0.75 ms instead of 0.52). The calling code is then not optimized: it compiles in 5 s instead of 43, and 3,000 calls
#: take the same time.
LONG = 1500

#: Recursion limit for Inductor: planning the arena recurses deeper with every buffer that is alive at the same time (at
#: 48 blocks of a GPT beyond Python's default of 1,000).
DEEP = 20_000


def compile_graph(graph: Graph, backend: str, patches: dict[str, Any], headers: Request | None = None) -> Flat:
    """Compile a graph; return a function from the arguments to the results of the traced function.

    Args:
        graph: from `trace`.
        backend: "inductor", or another name that torch.compile knows.
        patches: Inductor's options.
        headers: if given, requests the headers of a program ahead of time.
    """
    module, examples = graph.module, graph.examples
    flats: list[FlatInput] = []
    with without_autocast(), torch.no_grad():
        if backend == "inductor":
            keep_layouts(module, graph.mode, decompositions(patches.get("fallback_random", False)))
            index_without_check(module)
            if not graph.is_open:
                module, examples, flats = part_inputs(module, examples, graph.mode)
        module.recompile()
        if backend == "inductor":
            inner = _inductor(module, examples, patches, headers, is_open=graph.is_open)
        elif backend == "eager":
            inner = one_by_one(module)
        else:
            from torch._dynamo.backends.registry import lookup_backend

            inner = lookup_backend(backend)(module, examples)
    captured, wrappers = graph.captured, graph.wrappers
    # The results that need a copy; a program returns the same ones in the memory of others at every call.
    shared: list[int] | None = None

    def run(values: list[Tensor]) -> list[Tensor]:
        nonlocal shared
        inputs = [*values, *captured]
        results = write_back(flats, inputs, list(inner(*inputs, *further_inputs(flats, inputs))))
        if shared is None:
            shared = _in_shared_memory(results, inputs)
        for number in shared:
            results[number] = results[number].clone()
        return results

    def interpreted(values: list[Tensor]) -> list[Tensor]:
        # Casts and derivatives are already in the trace. A captured tensor may require gradients, and since torch 2.14
        # make_fx records alias instead of detach, which lets them through.
        with without_autocast(), torch.no_grad():
            return run(values)

    call = run if backend == "inductor" and not graph.is_open else interpreted
    if not graph.wrapped:
        return call

    def unwrapped(values: list[Tensor]) -> list[Tensor]:
        out = iter(call([part for value in values for part in parts(value)]))
        return [with_parts(wrapper, out) for wrapper in wrappers]

    return unwrapped


def _in_shared_memory(results: list[Tensor], inputs: list[Tensor]) -> list[int]:
    """Return the numbers of results that share memory with an input or with an earlier result.

    Inductor removes a clone of a value that is also another result. What a caller or a later call writes into one of
    them must not show in the other.
    """
    found: set[int] = set()
    for first, second in overlaps({str(number): tensor for number, tensor in enumerate([*results, *inputs])}):
        if int(second) < len(results):
            found.add(int(second))
        elif int(first) < len(results):
            found.add(int(first))
    return sorted(found)


def _inductor(
    graph: fx.GraphModule, inputs: list[Tensor], patches: dict[str, Any], headers: Request | None, *, is_open: bool
) -> Any:
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    exact = patches.get("fallback_random", False)
    how: dict[str, Any] = {"decompositions": decompositions(exact)}
    caches = functorch_config.enable_autograd_cache
    if is_open:  # AOTAutograd's cache keeps what Inductor's own inner_compile returns
        how, caches = {"decompositions": closed_decompositions(exact), "inner_compile": inner_compile}, False
    with functorch_config.patch(enable_autograd_cache=caches):
        if patches.get("memory_planning"):
            if patches["cpp_wrapper"] and sum(node.op == "call_function" for node in graph.graph.nodes) > LONG:
                patches = {**patches, "cpp_wrapper_build_separate": True}
                patches["aot_inductor.compile_wrapper_opt_level"] = "O0"
            try:
                with _deep(), config.patch(patches):
                    if headers:
                        headers()
                    return compile_fx(graph, inputs, **how)
            except Exception as error:  # Python may be able to call what C++ cannot; else its error is the familiar one
                _log.info("jit: compiling again, to be called from Python: %s: %s", type(error).__name__, error)
                patches = {**patches, "cpp_wrapper": False, "memory_planning": False}
        return compile_fx(graph, inputs, config_patches=patches, **how)


@contextlib.contextmanager
def _deep() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, DEEP))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def check_compiler(backend: str, leaves: list[Tensor]) -> None:
    """Raise RuntimeError if Inductor needs a C++ compiler and there is none."""
    if backend == "inductor" and any(leaf.device.type == "cpu" for leaf in leaves):
        cpp_compiler("jit: torch.compile needs a C++ compiler on a CPU")


def cpp_compiler(need: str) -> str:
    """Return the path of the compiler that Inductor uses: $CXX, or the platform's own.

    Raises:
        RuntimeError: there is none.
    """
    from torch._inductor import config

    names = [name for name in config.cpp.cxx if name]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise RuntimeError(
            f"{need}; found no {' or '.join(names)}: install it, name another in $CXX before Python starts, or pass "
            "backend='eager'"
        )
    return found
