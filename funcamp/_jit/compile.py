"""Compile a traced graph: passes, then torch.compile's compiler."""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
from typing import Any

import torch
from torch import Tensor, fx

from funcamp import _upstream
from funcamp._jit.cache_name import cache_name
from funcamp._jit.explain import explain
from funcamp._jit.one_by_one import one_by_one
from funcamp._jit.passes import changed
from funcamp._jit.passes.graph_pass import Unchanged
from funcamp._jit.passes.program import Flat, Program, Steps, Target
from funcamp._jit.session import deep_recursion
from funcamp._jit.unroll import unrolled
from funcamp._memory import overlaps
from funcamp._trace.autocast_regions import without_autocast
from funcamp._trace.tensor_subclass import unwrap_all, wrap
from funcamp._trace.trace import Graph

_log = logging.getLogger("funcamp")


def target_of(graph: Graph, backend: str, devices: frozenset[str], *, exact: bool) -> Target:
    """Return what a graph is compiled for.

    Before torch 2.15 Inductor computes some operations wrongly whose shape follows from values, so it gets no program
    with such shapes: its operations run one by one.
    """
    if graph.is_open and backend == "inductor" and _upstream.WRONG_ROWS:
        one_by_one_instead(f"torch {torch.__version__} cannot be trusted with it (2.15 can)")
        backend = "eager"
    return Target(
        backend=backend,
        devices=devices,
        exact=exact,
        is_open=graph.is_open,
        is_distributed=torch.distributed.is_available() and torch.distributed.is_initialized(),
    )


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
) -> Flat:
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
    module = _copied(graph.module)
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
        program = changed(program, without)
        for changed_module in program.graph_modules():
            changed_module.recompile()
        try:
            compiled = _compiled(program)
        except Exception as error:
            if not program.may_fail:
                raise
            name = program.may_fail[-1]
            _log.info("jit: compiling again without %s: %s: %s", name, type(error).__name__, error)
            # What is done to the program was printed above.
            return compile_graph(graph, target, without | {name}, steps=steps)
    for around in program.around:
        compiled = around(compiled)
    run = _with_captured(graph, compiled, as_eager=not target.by_inductor)
    has_loop = steps_for_passes is not None and program.steps is None
    return run if steps is None or has_loop else unrolled(run, steps, graph.outputs)


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return a module whose graph, and those inside it, such as a branch of torch.cond, are copies."""
    copied = fx.GraphModule(module, copy.deepcopy(module.graph))
    for name, child in list(copied.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, _copied(child))
    return copied


def _with_captured(graph: Graph, compiled: Flat, *, as_eager: bool) -> Flat:
    """Return a function of the arguments only, whose results share no memory.

    Args:
        graph: the traced step.
        compiled: a function from the arguments and the captured tensors to the results.
        as_eager: whether it calls torch's operations in Python, which look at autocast and record derivatives.
    """
    captured_tensors = graph.captured
    wrappers = graph.wrappers
    # The numbers of the results that need a copy, found at the first call: a program returns the same ones in the
    # memory of others at every call.
    copies_needed: list[int] | None = None

    def run(values: list[Tensor]) -> list[Tensor]:
        nonlocal copies_needed
        inputs = [*values, *captured_tensors]
        results = list(compiled(inputs))
        if copies_needed is None:
            copies_needed = _in_shared_memory(results, inputs)
        for number in copies_needed:
            results[number] = results[number].clone()
        return results

    def run_as_eager(values: list[Tensor]) -> list[Tensor]:
        # Casts and derivatives are already in the trace. A captured tensor may require gradients, and since torch 2.14
        # make_fx records alias instead of detach, which lets them through.
        with without_autocast(), torch.no_grad():
            return run(values)

    run_on_parts = run_as_eager if as_eager else run
    if not graph.has_subclasses:
        return run_on_parts

    def run_on_wrapped(values: list[Tensor]) -> list[Tensor]:
        """Take the parts of distributed tensors out, and put the results into such tensors."""
        plain_results = iter(run_on_parts(unwrap_all(values)))
        return [wrap(wrapper, plain_results) for wrapper in wrappers]

    return run_on_wrapped


def _in_shared_memory(results: list[Tensor], inputs: list[Tensor]) -> list[int]:
    """Return the numbers of results that share memory with an input or with an earlier result.

    Inductor removes a clone of a value that is also another result. What a caller or a later call writes into one of
    them must not show in the other.
    """
    tensors_by_number = {str(number): tensor for number, tensor in enumerate([*results, *inputs])}
    shared_results: set[int] = set()
    for pair in overlaps(tensors_by_number):
        first, second = map(int, pair)
        # The inputs follow the results. Of two results one copy is enough.
        if second < len(results):
            shared_results.add(second)
        elif first < len(results):
            shared_results.add(first)
    return sorted(shared_results)


def _compiled(program: Program) -> Flat:
    """Return a function from the inputs of a program to its results."""
    backend = program.target.backend
    if backend == "inductor":
        with deep_recursion():
            compiled = _by_inductor(program)
    elif backend == "eager":
        compiled = one_by_one(program.module)
    else:
        from torch._dynamo.backends.registry import lookup_backend

        compiled = lookup_backend(backend)(program.module, program.examples)
    return lambda inputs: compiled(*inputs)


def _by_inductor(program: Program) -> Any:
    """Return what Inductor makes of a program."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    # Inductor's cache sees no correction, and nothing that a pass does while Inductor compiles.
    named = Unchanged(program.cache_name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch({**program.options, "joint_custom_post_pass": named}))
        for context in program.while_compiled:
            stack.enter_context(context())
        return compile_fx(program.module, program.examples, decompositions=program.table)


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
        path = shutil.which(name)
        if path:
            return path
    raise RuntimeError(
        f"{need}; found no {' or '.join(names)}: install it, name another in $CXX before Python starts, or pass "
        "backend='eager'"
    )
