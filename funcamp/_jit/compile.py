"""Compile a traced graph: passes, then torch.compile's compiler."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from funcamp import _upstream
from funcamp._jit.cache_name import cache_name
from funcamp._jit.explain import explain
from funcamp._jit.one_by_one import one_by_one
from funcamp._jit.options import options_for
from funcamp._jit.passes import changed, steps_in_cpp
from funcamp._jit.passes.graph_pass import Unchanged
from funcamp._jit.passes.program import Flat, NotInCppError, Program, Steps, Target
from funcamp._jit.session import deep_recursion
from funcamp._jit.sources import sources_changed
from funcamp._jit.unroll import unrolled
from funcamp._memory import overlaps
from funcamp._trace.autocast_regions import without_autocast
from funcamp._trace.tensor_subclass import unwrap_all, wrap
from funcamp._trace.trace import Graph
from funcamp._upstream.bugs import corrected

_log = logging.getLogger("funcamp")


def target_of(graph: Graph, backend: str, devices: frozenset[str], *, exact: bool) -> Target:
    """Return what a graph is compiled for.

    Before torch 2.15 Inductor computes some operations wrongly whose shape follows from values, so it gets no program
    with such shapes: its operations run one by one.
    """
    if graph.is_open and backend == "inductor" and not _upstream.RIGHT_OPEN_SHAPES:
        one_by_one_instead(f"torch {torch.__version__} cannot be trusted with it (2.15 can)")
        backend = "eager"
    ranks = torch.distributed
    is_distributed = ranks.is_available() and ranks.is_initialized()
    return Target(backend, devices, exact, graph.is_open, is_distributed)


def one_by_one_instead(why: str) -> None:
    """Log that a program with open shapes is not compiled."""
    _log.warning(
        "jit: a shape follows from values, such as that of x[mask], and %s, so that the operations of this step run "
        "one by one, as in eager mode: a fixed shape (torch.where, a mask in the loss) is faster",
        why,
    )


def compile_graph(
    graph: Graph,
    target: Target,
    without: frozenset[str] = frozenset(),
    *,
    steps: Steps | None = None,
    explained: bool = False,
    headers: Callable[[], object] | None = None,
) -> Flat:
    """Compile a graph; return a function from the arguments to the results of the traced function.

    With `steps` its batch and its metrics are stacked, those of all steps.

    Args:
        graph: from `trace`; not changed.
        target: what it is compiled for.
        without: the names of passes, options and corrections to leave out.
        steps: those of a call; None if it is one.
        explained: whether to print what is done to the program, and why.
        headers: if given, requests the headers of a program ahead of time.
    """
    module = fx.GraphModule(graph.module, copy.deepcopy(graph.module.graph))
    name = cache_name(exact=target.exact, without=without, steps=steps)
    # The parts of a distributed tensor are views along its first dimension only as a whole.
    plain_steps = None if graph.wrapped else steps
    program = Program(module, graph.examples, graph.mode, target, name, options={}, steps=plain_steps)
    if explained:
        explain(target, without)
    with without_autocast(), torch.no_grad():
        program = changed(program, without)
        program.module.recompile()
        try:
            inner = _compiled(program, without, headers)
        except NotInCppError as error:
            _log.info("jit: compiling again, with the steps of a call in Python: %s", error)
            without |= {steps_in_cpp.PASS.name}
            return compile_graph(graph, target, without, steps=steps, headers=headers)
    for around in program.around:
        inner = around(inner)
    run = _with_captured(graph, inner, as_eager=not target.by_inductor)
    if steps is None or program.only_in_cpp:
        return run
    return unrolled(run, steps, graph.outputs)


def _with_captured(graph: Graph, inner: Flat, *, as_eager: bool) -> Flat:
    """Return a function of the arguments alone, whose results share no memory."""
    captured, wrappers = graph.captured, graph.wrappers
    # The results that need a copy; a program returns the same ones in the memory of others at every call.
    shared: list[int] | None = None

    def run(values: list[Tensor]) -> list[Tensor]:
        nonlocal shared
        inputs = [*values, *captured]
        results = list(inner(inputs))
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

    call = interpreted if as_eager else run
    if not graph.wrapped:
        return call

    def unwrapped(values: list[Tensor]) -> list[Tensor]:
        plain = iter(call(unwrap_all(values)))
        return [wrap(wrapper, plain) for wrapper in wrappers]

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


def _compiled(program: Program, without: frozenset[str], headers: Callable[[], object] | None) -> Flat:
    """Return a function from the inputs of a program to its results."""
    backend = program.target.backend
    if backend == "inductor":
        with corrected(exact=program.target.exact, without=without), deep_recursion():
            compiled = _by_inductor(program, without, headers)
    elif backend == "eager":
        compiled = one_by_one(program.module)
    else:
        from torch._dynamo.backends.registry import lookup_backend

        compiled = lookup_backend(backend)(program.module, program.examples)
    return lambda inputs: compiled(*inputs)


def _by_inductor(program: Program, without: frozenset[str], headers: Callable[[], object] | None) -> Any:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    options = options_for(program, without) | program.options
    # Inductor sees no changes of the C++, and not what corrects itself.
    options["joint_custom_post_pass"] = Unchanged(program.cache_name)

    def compiled() -> Any:
        return compile_fx(program.module, program.examples, decompositions=program.table)

    if not options.get("cpp_wrapper"):
        if program.only_in_cpp:
            raise NotInCppError("the option cpp_wrapper is left out")
        with config.patch(options):
            return compiled()
    try:
        with config.patch(options), sources_changed(program.source_changes):
            if headers:
                headers()
            return compiled()
    except Exception as error:
        if program.only_in_cpp:
            raise NotInCppError(f"{type(error).__name__}: {error}") from error
        # Python may be able to call what C++ cannot; else its error is the familiar one.
        _log.info("jit: compiling again, to be called from Python: %s: %s", type(error).__name__, error)
    with config.patch({**options, "cpp_wrapper": False}):
        return compiled()


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
