"""`Executable`: a step that is compiled for one signature, ready to run; and how it is made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._jit.compile import check_compiler, compile_graph, one_by_one_instead, target_of
from funcamp._jit.compiled_program import CompiledProgram
from funcamp._jit.constants import constant_key, structure_key
from funcamp._jit.cuda_graph import CudaGraphedProgram
from funcamp._jit.jit_options import JitOptions
from funcamp._jit.passes.program import Steps, Target, TensorFunction
from funcamp._jit.python_values import PythonValues
from funcamp._jit.session import compile_session, with_large_stack
from funcamp._jit.state_memory import StateMemory
from funcamp._jit.strides import BatchStrides, strides_for
from funcamp._jit.trace_step import trace_step
from funcamp._jit.unroll import check_steps
from funcamp._trace.description import description_of, written_inputs
from funcamp._trace.interface import Outputs
from funcamp._trace.trace import Graph
from funcamp._types import Step, Tree
from funcamp._upstream.advice import advise

_log = logging.getLogger("funcamp")


class Executable(NamedTuple):
    """A step that is compiled for one signature."""

    run: TensorFunction
    """From the state's leaves and the batch's tensors, in these strides, to the results."""
    outputs: Outputs
    strides: BatchStrides
    captured: list[Tensor]
    """The tensors that it reads besides its arguments."""
    outside_state: list[Tensor]
    """Those of them whose memory no state may have."""
    description: Hashable
    """What it computes: an equal one is the same program."""

    def as_cuda_graph(self, memory: StateMemory, inputs: list[Tensor]) -> Executable:
        """Return the executable as a CUDA graph on the state, which then stays where it is; itself if it needs none.

        Args:
            memory: where the state is.
            inputs: tensors like those of every later call.

        Raises:
            RuntimeError: the capture failed.
        """
        if memory.graphs is None or isinstance(self.run, CudaGraphedProgram):
            return self
        run = CudaGraphedProgram(memory.graphs, self.run, memory.current.leaves, inputs)
        memory.pin()
        return self._replace(run=run)

    def compiled_program(self) -> CompiledProgram | None:
        """Compile the program if that was put off, and return what the compiler made; None without a compiler."""
        run = self.run
        if isinstance(run, CompiledLater):
            run.compile()
        while isinstance(run, (CudaGraphedProgram, CompiledLater)):
            run = run.inner
        return run if isinstance(run, CompiledProgram) else None


class CompiledLater:
    """Runs the traced operations one by one, and compiles them once it has been called often enough.

    Args:
        one_by_one: runs them.
        compile_traced: compiles them.
        calls: the number of calls before that.
        task: what is compiled, for the report.
    """

    def __init__(
        self, one_by_one: TensorFunction, compile_traced: Callable[[], TensorFunction], calls: int, task: str
    ) -> None:
        self.inner = one_by_one
        #: None once they are compiled.
        self._compile_traced: Callable[[], TensorFunction] | None = compile_traced
        self._calls_left = calls
        self._task = f"{task}; it ran one by one before (compile_after={calls})"

    def __call__(self, values: list[Tensor]) -> list[Tensor]:
        """Return the results of the step."""
        if self._calls_left:
            self._calls_left -= 1
        elif self._compile_traced:
            self.compile()
        return self.inner(values)

    def compile(self) -> None:
        """Compile the operations, if they are not."""
        if self._compile_traced:
            with compile_session(self._task):
                self.inner = with_large_stack(self._compile_traced)
            self._compile_traced = None


def make_executable(
    step: Step,
    options: JitOptions,
    memory: StateMemory,
    batch: Tree,
    values: PythonValues,
    task: str,
    *,
    known: Sequence[Executable],
    compile_at_once: bool,
) -> Executable:
    """Trace a step and compile it. The program does not run.

    If the trace is that of a known program, return that.

    Args:
        step: the step.
        options: those of `jit`.
        memory: where the state is.
        batch: that of the call that it is made for.
        values: what is looked at in Python at every call.
        task: what is compiled, for the report.
        known: the programs for the same batch and other values in Python.
        compile_at_once: whether not to wait for `compile_after` calls.

    Raises:
        Exception: any error of the step or of the compiler.
    """
    owned = memory.current

    # The batch's tensors as the program will read them.
    if options.unroll is not None:
        check_steps(batch, options.unroll)
    tensors = _tree.tensors_in(batch)
    if memory.graphs is not None:
        tensors = [tensor.to(owned.leaves[0].device) for tensor in tensors]
    check_compiler(options.backend, owned.leaves + tensors)
    strides = strides_for(tensors)
    inputs = strides.as_read(tensors, owned.memory)

    # The operations of one step, which may be those of a known program.
    of_one_step = inputs if options.unroll is None else [tensor[0] for tensor in inputs]
    graph = trace_step(step, options, memory, batch, of_one_step, values.roots)
    values.follow_trace(graph.changed_places, graph.captured)
    description = _description_of(graph)
    for executable in known:
        if executable.description == description:
            return executable

    # What it reads besides its arguments is outside of the state, if it writes that. An evaluation may read a module
    # whose memory is the state's, and follow it.
    outside_state = graph.captured
    if graph.outputs.next_state_count or written_inputs(graph):
        memory.move_away_from(outside_state)
    else:
        outside_state = [tensor for tensor in graph.captured if not memory.meets(tensor)]

    compile_at_once = compile_at_once or memory.graphs is not None
    run = _compiled(graph, options, memory.current.leaves, task, compile_at_once=compile_at_once)
    return Executable(run, graph.outputs, strides, graph.captured, outside_state, description)


def _description_of(graph: Graph) -> Hashable:
    """Return what a program of a traced step computes, reads and returns."""
    captured_ids = tuple(map(id, graph.captured))
    metric_leaves, metric_spec = _tree.flatten(graph.outputs.metrics_like)
    try:
        constants = tuple(map(constant_key, metric_leaves))
        return description_of(graph), captured_ids, structure_key(metric_spec), constants
    except TypeError:  # a constant that cannot be hashed: no other program is the same
        return object()


def _compiled(
    graph: Graph, options: JitOptions, leaves: list[Tensor], task: str, *, compile_at_once: bool
) -> TensorFunction:
    """Return a function from the leaves of the state and the batch's tensors to the results."""
    # What is compiled later must not keep this state alive, so no function below refers to `leaves`.
    steps: Steps | None = None
    if options.unroll is not None:
        steps = Steps(options.unroll, len(leaves), graph.roles.count("batch"), options.donate)
    gpus = frozenset(leaf.device for leaf in leaves if leaf.device.type == "cuda")
    devices = frozenset(leaf.device.type for leaf in leaves)
    target = target_of(graph, options.backend, devices, exact=options.exact)

    def compiled_for(target: Target) -> TensorFunction:
        # Inductor draws the operands of the products that it times on a GPU.
        with torch.random.fork_rng(gpus, enabled=bool(gpus)):
            return compile_traced(graph, target, options, steps)

    # Ranks round alike: none runs operation by operation what another one has compiled.
    compile_at_once = compile_at_once or target.is_distributed or not options.compile_after
    if compile_at_once or target.backend == "eager":
        return compiled_for(target)
    one_by_one = compiled_for(target._replace(backend="eager"))
    calls = options.compile_after
    _log.info(
        "jit: this program's operations run one by one, as in eager mode, for its first %d calls; it is compiled at "
        "the next one. jit(step, compile_after=0) compiles each program at its first call: %s",
        calls,
        task,
    )
    return CompiledLater(one_by_one, lambda: compiled_for(target), calls, task)


def compile_traced(graph: Graph, target: Target, options: JitOptions, steps: Steps | None) -> TensorFunction:
    """Compile a traced step, or several in a call.

    One with open shapes that Inductor cannot compile runs operation by operation.

    Raises:
        RuntimeError: it cannot be compiled.
    """
    try:
        return compile_graph(graph, target, options.without, steps=steps, explained=options.explain)
    except Exception as error:
        if target.backend == "eager":  # nothing is compiled
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if target.by_inductor and target.is_open:
            one_by_one_instead(graph, f"Inductor raises {reason}")
            return compile_traced(graph, target._replace(backend="eager"), options, steps)
        advise("jit", error)
        raise RuntimeError(
            f"jit: step was traced, but cannot be compiled: {reason}. backend='eager' runs its operations "
            "without a compiler; explain=True names the passes and options, and without=(...) leaves out those it is "
            "given"
        ) from error
