"""Compile a traced graph: passes, then torch.compile's compiler."""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx

from funcamp import _upstream
from funcamp._jit.cache_name import cache_name
from funcamp._jit.compiled_program import Code, CompiledProgram, Surroundings
from funcamp._jit.explain import explain
from funcamp._jit.passes import run_passes
from funcamp._jit.passes.graph_pass import Unchanged
from funcamp._jit.passes.program import Program, Steps, Target, TensorFunction
from funcamp._jit.session import deep_recursion
from funcamp._trace.autocast_regions import without_autocast
from funcamp._trace.description import written_inputs
from funcamp._trace.trace import Graph

_log = logging.getLogger("funcamp")
#: A graph whose Python torch writes when it is first called, not after each change.
_GraphModule: Any = _upstream.find("torch.fx._lazy_graph_module._LazyGraphModule", fx.GraphModule)


def target_of(graph: Graph, backend: str, devices: frozenset[str], *, exact: bool) -> Target:
    """Return what a graph is compiled for.

    Before torch 2.15 Inductor computes some operations wrongly whose shape follows from values, so it gets no program
    with such shapes: its operations run one by one.
    """
    is_open = graph.open_operation is not None
    if is_open and backend == "inductor" and _upstream.WRONG_ROWS:
        one_by_one_instead(graph, f"torch {torch.__version__} cannot be trusted with it (2.15 can)")
        backend = "eager"
    return Target(
        backend=backend,
        devices=devices,
        exact=exact,
        is_open=is_open,
        is_distributed=torch.distributed.is_available() and torch.distributed.is_initialized(),
    )


def one_by_one_instead(graph: Graph, why: str) -> None:
    """Log that a program with open shapes is not compiled."""
    _log.warning(
        "jit: a shape follows from values, that of %s (such as x[mask]), and %s, so that the operations of this step "
        "run one by one, as in eager mode: a fixed shape (torch.where, a mask in the loss) is faster",
        graph.open_operation,
        why,
    )


def compile_graph(
    graph: Graph,
    target: Target,
    without: frozenset[str] = frozenset(),
    *,
    steps: Steps | None = None,
    explained: bool = False,
) -> CompiledProgram:
    """Compile a graph; return a function from the arguments to the results of the traced function.

    With `steps` its batch and its metrics are stacked, those of all steps.

    Args:
        graph: from `trace`; not changed.
        target: what it is compiled for.
        without: the names of passes to leave out.
        steps: those of a call; None if it is one.
        explained: whether to print what is done to the program, and why.
    """
    # The passes change the graph, which another program may still be made of: without a pass, or without a compiler.
    module = _GraphModule(graph.module, copy.deepcopy(graph.module.graph))
    # The parts of a distributed tensor are views along its first dimension only as a whole: its loop is in Python.
    steps_for_passes = None if graph.has_subclasses else steps
    program = Program(
        module,
        graph.examples,
        graph.mode,
        target,
        cache_name(exact=target.exact, without=without, steps=steps),
        options={},
        steps=steps_for_passes,
    )
    if explained:
        explain(target, without)
    with without_autocast(), torch.no_grad():
        program = run_passes(program, without)
        program.module.recompile()
        try:
            compiled, code = _compiled(program)
        except Exception as error:
            if not program.may_fail:
                raise
            name = program.may_fail[-1]
            _log.info("jit: compiling again without %s: %s: %s", name, type(error).__name__, error)
            # What is done to the program was printed above.
            return compile_graph(graph, target, without | {name}, steps=steps)
    # What torch puts around Inductor's function costs 6 us at every call. On a GPU it aligns the batch's tensors.
    if code is not None and target.on_cpu:
        compiled = code.run
    has_loop = steps_for_passes is not None and program.steps is None
    surroundings = Surroundings(
        program.around,
        graph.captured,
        written=written_inputs(graph),
        wrappers=graph.wrappers if graph.has_subclasses else None,
        calls_torch=not (target.by_inductor and target.on_cpu),
        steps=None if has_loop else steps,
        outputs=graph.outputs,
    )
    return CompiledProgram(compiled, surroundings, code)


def _compiled(program: Program) -> tuple[TensorFunction, Code | None]:
    """Return a function from the inputs of a program to its results, and what Inductor has made of it."""
    backend = program.target.backend
    code: Code | None = None
    if backend == "inductor":
        with deep_recursion():
            compiled, code = _by_inductor(program)
        if code is None and program.needs_code:
            raise RuntimeError("Inductor's code is not found")
    elif backend == "eager":
        compiled = program.module
    else:
        from torch._dynamo.backends.registry import lookup_backend

        compiled = lookup_backend(backend)(program.module, program.examples)
    return lambda inputs: compiled(*inputs), code


def _by_inductor(program: Program) -> tuple[Any, Code | None]:
    """Return what Inductor makes of a program, and its code, if it is in one module."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    # Inductor's cache sees no correction, and nothing that a pass does while Inductor compiles.
    named = Unchanged(program.cache_name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch({**program.options, "joint_custom_post_pass": named}))
        for context in program.while_compiled:
            stack.enter_context(context())
        constants = [*program.module.parameters(), *program.module.buffers()]
        modules_before = len(_modules_of_inductor())
        compiled = compile_fx(program.module, program.examples, decompositions=program.table)
    modules = [module for module in _modules_of_inductor()[modules_before:] if hasattr(module, "call")]
    return compiled, Code(modules[0], constants) if len(modules) == 1 else None


def _modules_of_inductor() -> list[ModuleType]:
    """Return the modules that Inductor has written and imported, in this order."""
    cache = _upstream.find("torch._inductor.codecache.PyCodeCache")
    return cache.modules if _upstream.usable(cache) else []


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
    for name in names:
        if path := shutil.which(name):
            return path
    raise RuntimeError(
        f"{need}; found no {' or '.join(names)}: install it, name another in $CXX before Python starts, or pass "
        "backend='eager'"
    )
