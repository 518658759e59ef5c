"""A compiled step: one program per batch signature, and the storage of the state."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._check import Fixed, one_batch
from funcamp._jit import cuda_graph
from funcamp._jit.arguments import check_batch, check_state
from funcamp._jit.captured_tensors import CapturedTensors
from funcamp._jit.compile import check_compiler, compile_graph, one_by_one_instead, target_of
from funcamp._jit.donation import Layout, Owned, arranged, layouts_for, own
from funcamp._jit.kinds import check_like, kinds
from funcamp._jit.passes.program import Flat, Target
from funcamp._jit.session import CompileSession, keeping_generators
from funcamp._jit.signature import difference, flat, key_of, padding, shapes
from funcamp._jit.training_modes import TrainingModes
from funcamp._jit.unroll import check_steps, unrolled
from funcamp._jit.written_inputs import WrittenInputs, written_inputs
from funcamp._memory import Memory
from funcamp._trace.autocast_regions import autocast_regions
from funcamp._trace.carried_state import CarriedState
from funcamp._trace.open_shapes import is_open
from funcamp._trace.trace import Graph, Outline, trace
from funcamp._trace.tracing import HostError, running
from funcamp._types import Tree
from funcamp._upstream.advice import advise

_log = logging.getLogger("funcamp")
#: Number of leaves whose memory a call of a captured step checks, at 0.15 µs each.
_WATCHED = 16


class Options(NamedTuple):
    """The arguments of `jit`, checked."""

    donate: bool
    capture: bool
    unroll: int | None
    exact: bool
    backend: str
    compile_after: int
    max_signatures: int
    without: frozenset[str]
    explain: bool


class _Program(NamedTuple):
    """A step compiled for one batch signature."""

    run: Flat
    outline: Outline
    layouts: list[Layout]
    written: WrittenInputs | None
    """The inputs that it writes, besides giving the state its new values; None for most."""


class JitStep(Fixed):
    """A compiled step `(state, batch) -> (state, metrics)`; made by `jit`."""

    _instead = "Call jit with {name}={value!r}"

    def __init__(self, step: Callable[[Any, Any], Any], options: Options) -> None:
        self._step, self._options = step, options
        self._programs: dict[Any, _Program] = {}
        self._owned: Owned | None = None
        self._like: Tree = None
        self._captured = CapturedTensors()
        #: The checks that a TrainStep makes of its arguments.
        self._check_call = getattr(step, "check_call", None)
        self._carried = CarriedState(_python_parts(step))
        self._modes = TrainingModes()
        self._graphs: cuda_graph.CudaGraphs | None = None
        self._last: Any = None
        self._replacements = 0
        """The number of the last calls that each found a captured tensor replaced."""
        self._turn = threading.Lock()

    def __repr__(self) -> str:
        return f"jit({self._step!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle or copy the step, which must be picklable, and the options; a copy compiles again."""
        return JitStep, (self._step, self._options)

    if not TYPE_CHECKING:  # a type checker refuses unknown names itself

        def __getattr__(self, name: str) -> Any:
            step = vars(self).get("_step")
            fix = f": it is the step's that it was made of, step.{name}" if hasattr(step, name) else ""
            raise AttributeError(f"jit({step!r}): has no {name!r}{fix}")

    @property
    def programs(self) -> int:
        """Return the number of batch signatures traced so far."""
        return len(self._programs)

    def __call__(self, state: Tree, batch: Tree, *more: NoReturn) -> tuple[Any, Any]:
        """Take one step, or `unroll` steps. Compiles at the first call for a batch signature. No sync.

        Threads take turns: each gets the successor of the state that it passed.

        Args:
            state: the last call's, or any with its structure, shapes, dtypes and devices. Consumed if donated.
            batch: a pytree; its tensors may have any values, its other leaves are constants of the program. With
                capture, tensors on the host are copied to the state's device, without waiting if their memory is
                pinned.
            *more: nothing; a batch is one argument.

        Raises:
            TypeError: a leaf of state is not a tensor; step does not return a pair; a constant of the batch is not
                hashable, or cannot be compared part by part.
            ValueError: state is unlike the first one; there are more batch signatures than `max_signatures`; an input
                that step writes shares memory with another one.
            RuntimeError: step cannot be compiled or captured, or reads the host; there is no compiler; a tensor that
                step reads besides its arguments has another shape, dtype or device than before.
            Exception: any error of step itself during tracing.
        """
        if running() is not None or _upstream.transforms_active():
            raise RuntimeError(
                f"jit: {self!r} must not be called inside another jit or a transform of "
                "torch.func (vmap, grad): use the function it was made of there, and jit the result"
            )
        if more:
            one_batch("jit", batch, *more)
        with self._turn:
            return self._call(state, batch)

    def _call(self, state: Tree, batch: Tree) -> tuple[Any, Any]:
        path = self._carried.replaced()
        if path is not None:
            self._begin_again(path)
        elif self._replacements:
            self._replacements = 0
        batch, leaves, spec = flat(batch)
        try:
            if not self._programs:
                self._modes.watch(_code_parts(self._step))
            key = (
                spec,
                tuple([key_of(leaf) for leaf in leaves]),
                autocast_regions(),
                torch.get_default_dtype(),
                self._modes.number(),
            )
            program = self._programs.get(key)
        except Exception:  # what cannot be hashed
            check_batch(batch)
            raise
        if program is None:
            check_batch(batch)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self._captured.tensors and not self._captured.are_as_before():
            self._follow()
        self._carried.follow()
        owned = self._owned
        known = owned is not None and owned.is_of(state)
        if not known:
            if self._check_call is not None:
                self._check_call("step", state, batch)
            check_state(state)
        if program is not None and program.written is not None:
            self._check_written(program.written, state, batch, known=known)
        if owned is None or not known:
            if owned is not None and self._graphs is not None:  # before another state is copied into that memory
                given = [leaf.detach().clone() if owned.memory.meets(leaf) else leaf for leaf in given]
            owned = self._own(state)
        if program is None:
            program, results = self._compile(key, owned, state, batch, given)
            owned = self._owned or owned
        else:
            results = self._run(program, owned, given, arranged(given, program.layouts, owned.memory))
        self._last = key
        metrics, first = list(program.outline.constants), len(results) - len(program.outline.tensors)
        for index, value in zip(program.outline.tensors, results[first:]):
            metrics[index] = value
        if first:  # not donated
            owned = Owned(owned.filled(results[:first]), owned.strides, written=False)
            if self._graphs is None:
                self._owned = owned
        return owned.tree, _tree.unflatten(metrics, program.outline.spec)

    def _run(self, program: _Program, owned: Owned, given: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        """Run a program on the state and the batch's tensors; `inputs` are those as it needs them."""
        results = program.run([*owned.leaves, *inputs])
        if program.written is not None:
            with torch.no_grad():
                program.written.copy_back(given, inputs)
        return results

    def _check_written(self, written: WrittenInputs, state: Tree, batch: Tree, *, known: bool) -> None:
        donated = self._owned is not None and known and self._options.donate
        written.check(state, batch, self._owned.memory if self._owned else Memory(), owned=donated)

    def _own(self, state: Tree) -> Owned:
        """Return the state's leaves in memory that this step may write; with graphs, in their static memory."""
        with torch.inference_mode(False), torch.no_grad():
            if self._owned is not None and self._graphs is not None:
                self._owned.refill(state, self._like)
                return self._owned
            if self._owned is None and self._options.capture:
                places = [leaf.device for leaf in _tree.leaves(state) if isinstance(leaf, Tensor)]
                self._graphs = cuda_graph.graphs_for(places)
            donate, graphs = self._options.donate, self._graphs is not None
            avoid = Memory(self._captured.tensors)
            owned = own(state, self._like, avoid, copy=graphs and not donate, written=graphs or donate)
        if self._owned is None:
            self._like = kinds(owned.tree)
        self._owned = owned
        return owned

    def _begin_again(self, path: str) -> None:
        """Drop all programs, because a tensor that they read besides their arguments was replaced by another.

        Raises:
            RuntimeError: this happens at every call.
        """
        self._replacements += 1
        if self._replacements > self._options.max_signatures:
            raise RuntimeError(
                f"jit: {path} must stay the tensor that step was compiled with; each of the last {self._replacements} "
                f"calls found another there, and compiled again (max_signatures={self._options.max_signatures}): "
                "write into it with copy_, or pass it in the batch"
            )
        _log.warning(
            "jit: %s is another tensor than the one that the step was compiled with, so that it is compiled again; "
            "write into it with copy_, or pass it in the batch, to save this",
            path,
        )
        self._programs.clear()
        self._captured = CapturedTensors()
        self._carried.forget()

    def _follow(self) -> None:
        """Adopt captured tensors that were given other memory; drop the state's memory if it is now theirs.

        Raises:
            RuntimeError: a graph reads the former memory, or a program the former kind of tensor.
        """
        self._captured.follow(may_move=self._graphs is None)
        for program in self._programs.values():
            if program.written is not None:
                program.written.forget()
        owned = self._owned
        if owned is not None and any(map(owned.memory.meets, self._captured.tensors)):
            self._owned = None

    def _compile(
        self, key: Any, owned: Owned, state: Tree, batch: Tree, given: list[Tensor]
    ) -> tuple[_Program, list[Tensor]]:
        options = self._options
        try:
            if len(self._programs) >= options.max_signatures:
                raise ValueError(
                    f"jit: batch must have at most {options.max_signatures} signatures in all (max_signatures); "
                    f"{difference(batch, self._last, key)}{padding(self._last, key)}"
                )
            asks_compiler = options.backend == "inductor" and _on_cpu(owned)
            with CompileSession(self._task(batch, key), headers_ahead=asks_compiler) as session:
                made = self._program(key, owned, state, batch, given, session)
        except BaseException as error:
            if not self._programs:  # a state that no program used must not constrain later ones
                self._owned = self._graphs = self._like = None
                self._captured = CapturedTensors()
            if isinstance(error, RuntimeError):
                advise("jit", error)
            raise
        self._programs[key] = made[0]
        return made

    def _task(self, batch: Tree, key: Any) -> str:
        name = getattr(self._step, "__name__", type(self._step).__name__)
        task = f"{name} for a batch of {shapes(batch)}"
        return task if self._last is None else f"{task}; {difference(batch, self._last, key)}"

    def _program(
        self, key: Any, owned: Owned, state: Tree, batch: Tree, given: list[Tensor], session: CompileSession
    ) -> tuple[_Program, list[Tensor]]:
        options, graphs = self._options, self._graphs
        if options.unroll is not None:
            check_steps(batch, options.unroll)
        inputs = given if graphs is None else [leaf.to(owned.leaves[0].device) for leaf in given]
        check_compiler(options.backend, owned.leaves + inputs)
        layouts = layouts_for(inputs)
        inputs = arranged(inputs, layouts, owned.memory)
        example = inputs if options.unroll is None else [leaf[0] for leaf in inputs]
        graph = self._trace(owned, batch, example)
        arguments = [*owned.leaves, *example]
        written = written_inputs(graph, arguments, len(owned.leaves), donated=options.donate)
        if written is not None:  # the state as it was passed, of which `owned` may be a copy
            self._check_written(written, state, batch, known=owned.tree is state)
        if any(map(owned.memory.meets, graph.captured)):
            owned = self._owned = own(owned.tree, self._like, Memory(), copy=True)
        self._captured.add(graph.captured)
        # Not `owned` itself: a program that is compiled later must not keep this state alive.
        state_count, metrics_count = len(owned.leaves), len(graph.rest.tensors)
        devices = frozenset(leaf.device.type for leaf in owned.leaves)
        gpus = frozenset(leaf.device for leaf in owned.leaves if leaf.device.type == "cuda")

        target = target_of(graph, options.backend, devices, exact=options.exact)

        def compiled(target: Target, session: CompileSession) -> Flat:
            with keeping_generators(gpus):
                one = self._compile_graph(graph, target, session)
            return one if options.unroll is None else unrolled(one, state_count, metrics_count, options.unroll)

        is_late = self._programs and graphs is None and options.compile_after and target.backend != "eager"
        session.progress.phase("running operation by operation" if is_late else "compiling")
        if is_late:
            traced = compiled(target._replace(backend="eager"), session)
            run = self._late(key, traced, lambda later: compiled(target, later), session.progress.task)
        else:
            run = compiled(target, session)
            session.progress.phase("running")
        if graphs is not None:
            owned.watch(_WATCHED)
            run = cuda_graph.Captured(graphs, run, owned.leaves, inputs, metrics_count, written)
        program = _Program(run, graph.rest, layouts, written)
        return program, self._run(program, owned, given, inputs)

    def _late(self, key: Any, traced: Flat, compiled: Callable[[CompileSession], Flat], task: str) -> Flat:
        """Return a function that runs the traced operations one by one, and compiles them after enough calls."""
        left = self._options.compile_after

        def run(values: list[Tensor]) -> list[Tensor]:
            nonlocal left
            left -= 1
            if left >= 0:
                return traced(values)
            with CompileSession(task) as session:
                session.progress.phase("compiling")
                now = compiled(session)
            self._programs[key] = self._programs[key]._replace(run=now)
            return now(values)

        return run

    def _trace(self, owned: Owned, batch: Tree, given: list[Tensor]) -> Graph:
        options, step, like = self._options, self._step, self._like
        count, filled = len(owned.leaves), owned.filled
        leaves, spec = _tree.flatten(batch)
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def body(values: list[Tensor]) -> tuple[list[Tensor], Tree]:
            whole = list(leaves)
            for place, value in zip(places, values[count:]):
                whole[place] = value.detach().requires_grad_() if leaves[place].requires_grad else value
            out = step(filled(values[:count]), _tree.unflatten(whole, spec))
            if not isinstance(out, tuple) or len(out) != 2:
                raise TypeError(f"jit: step must return the pair (state, metrics); got {type(out).__name__}")
            new, metrics = out
            check_like(("state", "the step's new state"), like, new)
            fresh = [leaf for leaf in _tree.leaves(new) if leaf is not None]
            numbers, rest = _tree.flatten(metrics)
            if options.unroll is not None and (row := next(filter(is_open, numbers), None)) is not None:
                raise HostError(
                    "return metrics of fixed shapes with unroll, which stacks those of several steps; got "
                    f"{_tree.describe(row)}"
                )
            kept = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in numbers]
            if not options.donate:
                # A leaf of the old state or of the batch is copied: a later donated step writes the new state's memory.
                return [leaf.detach().clone() for leaf in fresh], _tree.unflatten(kept, rest)
            # Compute all values before the first write; a clone of a computed value costs nothing.
            changed = [(leaf.detach().clone(), old) for leaf, old in zip(fresh, values) if leaf is not old]
            for leaf, old in changed:
                old.copy_(leaf)
            return [], _tree.unflatten(kept, rest)

        try:
            home = {leaf.device.type for leaf in owned.leaves}
            return trace(
                body,
                [*owned.leaves, *given],
                home,
                fixed_shapes=self._graphs is not None,
                carried=self._carried,
                state_count=count,
            )
        except HostError as error:
            raise RuntimeError(f"jit: step must {error}") from None
        except RuntimeError as error:
            advise("jit", error)
            raise

    def _compile_graph(self, graph: Graph, target: Target, session: CompileSession) -> Flat:
        options = self._options
        try:
            return compile_graph(graph, target, options.without, explained=options.explain, headers=session.headers)
        except Exception as error:
            if target.backend == "eager":  # nothing is compiled
                raise
            if target.by_inductor and target.is_open:
                one_by_one_instead(f"Inductor raises {type(error).__name__}")
                return self._compile_graph(graph, target._replace(backend="eager"), session)
            advise("jit", error)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RuntimeError(f"jit: step was traced, but cannot be compiled: {reason}") from error


def _python_parts(step: Any) -> dict[str, Any]:
    """Return the model and criterion of a TrainStep; a function of a user has its state in its arguments."""
    parts = getattr(step, "python_parts", None)
    return {} if parts is None else parts()


def _code_parts(step: Any) -> dict[str, Any]:
    """Return the objects whose Python a TrainStep runs; for any other step, itself."""
    parts = getattr(step, "code_parts", None)
    return {"step": step} if parts is None else parts()


def _on_cpu(owned: Owned) -> bool:
    return {leaf.device.type for leaf in owned.leaves} == {"cpu"}
