"""`JitStep`: a compiled step, with one program for each signature and the memory of its state."""

from __future__ import annotations

import gc
import logging
import operator
import os
import threading
import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._autograd.loss import Loss
from funcamp._check import Fixed, integer
from funcamp._jit.arguments import check_batch, check_state
from funcamp._jit.captured_tensors import CapturedTensors
from funcamp._jit.executable import Executable, make_executable
from funcamp._jit.jit import check_step
from funcamp._jit.jit_options import JitOptions
from funcamp._jit.known_calls import KnownCalls
from funcamp._jit.python_values import PythonValues
from funcamp._jit.session import compile_session, with_large_stack
from funcamp._jit.signature import Key, difference, flattened, frame_of, key_of, shapes
from funcamp._jit.state_memory import StateMemory
from funcamp._layers import layer
from funcamp._trace.tracing import running
from funcamp._types import Step, Tree
from funcamp._upstream.advice import advise

_log = logging.getLogger("funcamp")


class Sharing:
    """What the steps on one state share: its memory, and the turns of threads."""

    def __init__(self, loss: Loss | None) -> None:
        self.memory: StateMemory | None = None
        """None until a first program has run."""
        self.steps: weakref.WeakSet[JitStep] = weakref.WeakSet()
        self.turn: AbstractContextManager[object] = threading.Lock() if loss is None else loss.lock()
        """That of the module, if there is one: it has other training flags while another thread evaluates it."""


class JitStep(Fixed):
    """A compiled step `(state, batch) -> (state, metrics)`; made by `jit`.

    Args:
        step: the step.
        options: the arguments of `jit`.
        sharing: that of a step on the same state.
    """

    _instead = "Call jit with {name}={value!r}"

    def __init__(self, step: Step, options: JitOptions, sharing: Sharing | None = None) -> None:
        self._step = step
        self._options = options
        loss = getattr(step, "loss_fn", None)
        self._loss = loss if isinstance(loss, Loss) else None
        """That of a TrainStep."""
        self._sharing = Sharing(self._loss) if sharing is None else sharing
        self._sharing.steps.add(self)
        self._turn = self._sharing.turn
        self._executables: dict[Key, Executable] = {}
        self._known_calls = KnownCalls()
        self._captured = CapturedTensors()
        """The tensors that its programs read besides their arguments."""
        #: The checks that a TrainStep makes of its arguments; it returns the state.
        self._check_call = getattr(step, "check_call", None)
        self._python_values = PythonValues(_python_parts(step))
        self._traces = 0
        """How often the step was traced."""
        self._last: Executable | None = None
        """That of the last call."""
        self._state_metadata: Tree = None
        """That of the state's leaves for which programs were compiled in another process."""

    def __repr__(self) -> str:
        return f"jit({self._step!r})"

    def __reduce__(self) -> tuple[type[JitStep], tuple[Step, JitOptions]]:
        """Pickle or copy the step, which must be picklable, and the options; a copy compiles again."""
        return JitStep, (self._step, self._options)

    if not TYPE_CHECKING:  # a type checker refuses unknown names itself

        def __getattr__(self, name: str) -> NoReturn:
            step = vars(self).get("_step")
            fix = f": it is the step's that it was made of, step.{name}" if hasattr(step, name) else ""
            raise AttributeError(f"jit({step!r}): has no {name!r}{fix}")

    @property
    def programs(self) -> int:
        """Return the number of programs that are kept: for each batch signature, and values that its Python reads."""
        return len({*map(id, self._executables.values())})

    def __call__(self, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        """Take one step, or `unroll` steps. Compiles as `compile_after` says. No sync.

        Threads take turns: each gets the successor of the state that it passed.

        Args:
            state: the last call's, or any with its structure, shapes, dtypes and devices. Consumed if donated.
            batch: a pytree; its tensors may have any values, its other leaves are constants of the program. With
                capture, tensors on the host are copied to the state's device, without waiting if their memory is
                pinned.

        Raises:
            TypeError: a leaf of state is not a tensor; step does not return a pair; a constant of the batch is not
                hashable.
            ValueError: state is unlike the first one.
            RuntimeError: step cannot be compiled or captured, reads the host, writes something else than its state, or
                depends on what its Python keeps from call to call; there is no compiler; a tensor that step reads
                besides its arguments has another shape, dtype or device than before.
            Exception: any error of step itself during tracing.
        """
        if running() is not None or _upstream.transforms_active():
            raise RuntimeError(
                f"jit: {self!r} must not be called inside another jit or a transform of "
                "torch.func (vmap, grad): use the function it was made of there, and jit the result"
            )
        with self._turn:
            return self._call(state, batch)

    def also(self, step: Step, *, unroll: int | None = None) -> JitStep:
        """Compile another step on the same state: an evaluation, another loss, the other half of a GAN.

        The two share the memory of the state, so that a state goes from one to the other without a copy, also on CUDA.
        An evaluation returns the state that it got, `(state, metrics)`; its program writes no state. No sync.

        Args:
            step: `(state, batch) -> (state, metrics)`, as for `jit`, on a state like this step's.
            unroll: number of steps in a call. All other options are those of this step.

        Raises:
            TypeError: step is not callable, or is a module, a loss or a class; unroll is not an integer.
            ValueError: unroll is below 1.

        Example:
            >>> def count(state, batch):
            ...     return {"total": state["total"] + batch.sum()}, None
            >>> run = jit(count, backend="eager")
            >>> report = run.also(lambda state, batch: (state, state["total"] - batch.sum()))
            >>> state, _ = run({"total": torch.zeros(())}, torch.ones(4))
            >>> state, left = report(state, torch.ones(3))
            >>> left
            tensor(1.)
        """
        check_step("also", step)
        if unroll is not None:
            integer("also", "unroll", unroll, 1)
        with self._turn:
            return JitStep(step, self._options._replace(unroll=unroll), self._sharing)

    def save(self, path: str | os.PathLike[str], *, example_state: Tree = None) -> None:
        """Write the compiled programs of this step to a file, which `funcamp.load_step` reads in another process.

        That process traces and compiles nothing, and needs no code of the model, the loss or the optimizer. The file
        has the program of every batch signature that was called with the values that the step's Python has now, and the
        tensors that it reads besides its arguments. It is for the same funcamp, torch, Python, and kind of processor or
        GPU. Syncs: reads tensors.

        Args:
            path: the file, in a folder that exists.
            example_state: a state for `load_step(path).example_state`, so that the file alone can train. Not changed.

        Raises:
            RuntimeError: no call has compiled the step yet; a program is not compiled by Inductor, runs on several
                ranks, or reads a module in the memory of the state; its code is gone from Inductor's cache folder.
            TypeError: the state, the batch or the metrics contain an object of a class that is neither Python's nor
                funcamp's; path is not a path.
            ValueError: example_state is unlike the state; path ends in `.safetensors`.

        Example:
            >>> run = jit(step)  # doctest: +SKIP
            >>> state, metrics = run(state, batch)  # doctest: +SKIP
            >>> run.save("step.pt", example_state=state)  # doctest: +SKIP
        """
        with self._turn:
            number = self._python_values.number()
            executables = {key: executable for key, executable in self._executables.items() if key[-1] == number}
            memory = self._sharing.memory
            state_metadata = None if memory is None else memory.metadata
            layer("_step_file.file").write(path, self._options, executables, state_metadata, example_state)

    def release(self) -> None:
        """Free the programs, CUDA graphs and memory of this step, and of all steps on the same state.

        Call it before `torch.distributed.destroy_process_group()`: with NCCL that waits forever while a CUDA graph that
        contains collectives exists. The state stays valid. A later call compiles and captures again. Syncs with CUDA
        graphs, whose replays must end first.
        """
        with self._turn:
            memory = self._sharing.memory
            if memory is not None and memory.graphs is not None:
                memory.graphs.wait()
            del memory
            self._sharing.memory = None
            for step in self._sharing.steps:
                step._forget_programs()
            gc.collect()  # graphs and results may be in cycles, as programs of torch.fx are

    def _call(self, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        """Take one step, in this thread's turn. Every call of Python takes time here."""
        if self._loss is not None:
            self._loss.check_not_evaluated("step")

        # Find the program: by a comparison with an earlier call, else by the signature.
        structure, leaves = flattened(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        try:
            frame = frame_of(structure, leaves, tensors, self._python_values.number())
            known_program = self._known_calls.find(frame, tensors)
            executable = known_program or self._executables.get(key_of(frame, leaves))
        except Exception:  # what cannot be hashed
            check_batch(_tree.plain(batch))
            raise
        if executable is None:
            batch = _tree.plain(batch)
            check_batch(batch)

        # Put the state where programs read it.
        memory, tensors = self._take_state(state, batch, tensors)
        if self._loss is not None:
            self._loss.state_moves()

        # Run the program.
        owned = memory.current
        if executable is None:
            executable, inputs, results = with_large_stack(
                lambda: self._first_run(key_of(frame, leaves), memory, batch, tensors)
            )
            owned = memory.current  # a new program may have moved it
        else:
            is_as_noted = known_program is not None and executable.strides.are_outside(tensors, owned.memory)
            inputs = tensors if is_as_noted else executable.strides.as_read(tensors, owned.memory)
            try:
                results = executable.run([*owned.leaves, *inputs])
            except RuntimeError as error:
                advise("jit", error)
                raise
        if executable is not self._last:  # every assignment to a `Fixed` object calls Python
            self._last = executable
        # Tensors of a known call are read as they are, so only a call that did so is noted.
        if known_program is None and all(map(operator.is_, inputs, tensors)):
            self._known_calls.add(frame, tensors, executable)

        # Return its results.
        outputs = executable.outputs
        next_state = memory.keep(outputs.state_of(results)) if outputs.next_state_count else owned.tree
        return next_state, outputs.metrics_of(results)

    def _take_state(self, state: Tree, batch: Tree, tensors: list[Tensor]) -> tuple[StateMemory, list[Tensor]]:
        """Return the memory with this state in it, and the batch's tensors, copied if they were there.

        The state of the last call is there already. Any other is checked.

        Raises:
            TypeError: a leaf is not a tensor.
            ValueError: it is unlike the first state.
            Exception: any error that a TrainStep raises for its arguments.
        """
        memory = self._sharing.memory
        if memory is not None:
            # Python may have given tensors that programs read other memory.
            if self._captured.tensors and not self._captured.are_as_before():
                memory.follow(self._captured)
            if self._executables and memory.has(state):
                return memory, tensors
        if self._check_call is not None:
            state = self._check_call("step", state, batch)
        check_state(state)
        if memory is None:  # stored by the first run, if that succeeds
            donate, capture = self._options.donate, self._options.capture
            return StateMemory(state, donate=donate, capture=capture, like=self._state_metadata), tensors
        if not memory.has(state):
            if memory.graphs is not None:  # the state is copied into their memory
                tensors = [leaf.detach().clone() if memory.meets(leaf) else leaf for leaf in tensors]
            memory.take(state)
        return memory, tensors

    def _first_run(
        self, key: Key, memory: StateMemory, batch: Tree, tensors: list[Tensor]
    ) -> tuple[Executable, list[Tensor], list[Tensor]]:
        """Make a program for a new signature and run it; keep it, and the memory, if both succeed.

        Returns:
            The program, the batch's tensors as it read them, and its results.

        Raises:
            Exception: any error of the step, of the compiler or of the first run.
        """
        task = self._task(batch, key)
        try:
            with compile_session(task):
                executable = self._make(key, memory, batch, task)
                owned = memory.current  # where it is now: it may have been moved
                inputs = executable.strides.as_read(tensors, owned.memory)
                executable = executable.as_cuda_graph(memory, inputs)
                results = executable.run([*owned.leaves, *inputs])
        except RuntimeError as error:
            advise("jit", error)
            raise
        self._note_trace(task)
        # By identity: two programs would be compared field by field.
        if not any(executable is known for known in self._executables.values()):
            if self.programs >= self._options.max_signatures:
                self._drop_oldest()
            self._captured.add(executable.captured, executable.outside_state)
        memory.captured.add(self._captured)
        self._sharing.memory = memory
        self._executables[key] = executable
        return executable, inputs, results

    def _make(self, key: Key, memory: StateMemory, batch: Tree, task: str) -> Executable:
        """Return a program for a new signature: compiled, or one of those that differ in values of Python only."""
        return make_executable(
            self._step,
            self._options,
            memory,
            batch,
            self._python_values,
            task,
            known=[executable for other_key, executable in self._executables.items() if other_key[:-1] == key[:-1]],
            compile_at_once=not self._executables,
        )

    def _note_trace(self, task: str) -> None:
        """Count a trace; log the first one for which a program may have to be dropped."""
        self._traces += 1
        if self._traces == self._options.max_signatures + 1:
            _log.warning(
                "jit: %d times now the step was traced: at most %d programs are kept (max_signatures), and the oldest "
                "is dropped, and compiled again if it comes back; if this is at every call, it is slow: pad batches to "
                "a few lengths, read what changes outside of the step, or raise max_signatures; %s",
                self._traces,
                self._options.max_signatures,
                task,
            )

    def _drop_oldest(self) -> None:
        """Drop the oldest program, but not that of the last call."""
        oldest = min(self._executables.values(), key=lambda executable: executable is self._last)
        self._executables = {known: kept for known, kept in self._executables.items() if kept is not oldest}
        self._known_calls = KnownCalls()
        self._captured = CapturedTensors()
        for executable in self._executables.values():
            self._captured.add(executable.captured, executable.outside_state)

    def _task(self, batch: Tree, key: Key) -> str:
        """Return what is compiled, for reports; for a later signature, with what changed since the last call."""
        name = getattr(self._step, "__name__", type(self._step).__name__)
        task = f"{name} for a batch of {shapes(batch)}"
        if not self._executables:
            return task
        last_key = next(key for key, executable in reversed(self._executables.items()) if executable is self._last)
        change = difference(batch, last_key, key) or self._python_values.change(last_key[-1], key[-1])
        return f"{task}; {change}"

    def _forget_programs(self) -> None:
        self._executables = {}
        self._last = None
        self._known_calls = KnownCalls()
        self._captured = CapturedTensors()
        self._python_values = PythonValues(_python_parts(self._step))


def _python_parts(step: object) -> dict[str, object]:
    """Return the objects that may keep state besides a step's arguments: of a TrainStep, or the step itself."""
    parts = getattr(step, "python_parts", None)
    return {"step": step} if parts is None else parts()
