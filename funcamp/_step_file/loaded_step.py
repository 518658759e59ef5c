"""`LoadedStep`: a compiled step from a file."""

from __future__ import annotations

import os
from typing import NoReturn

from torch import Tensor

from funcamp import _tree
from funcamp._jit.executable import Executable
from funcamp._jit.jit_step import JitStep
from funcamp._jit.session import compile_session
from funcamp._jit.signature import Key, difference, shapes, shown
from funcamp._jit.state_memory import StateMemory
from funcamp._step.parallel import Parallel
from funcamp._step.state import TrainState
from funcamp._step.state_dict import export, restore
from funcamp._step_file.file import read, runnable
from funcamp._types import Tree


class _NoPython:
    """The step of a file, of which only the programs are there."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __repr__(self) -> str:
        return f"load_step({self.__name__!r})"

    def __call__(self, *_: object) -> NoReturn:
        raise AssertionError("a step from a file has no Python")

    def python_parts(self) -> dict[str, object]:
        """Return the objects that may keep state besides its arguments: none."""
        return {}


class LoadedStep(JitStep):
    """A compiled step from a file: called like the `JitStep` that was saved, for the same batch signatures.

    Args:
        path: the file.
        also: a step on the same state.
    """

    example_state: Tree
    """The state that was saved with the programs; None if there was none."""

    def __init__(self, path: str | os.PathLike[str], also: JitStep | None = None) -> None:
        description = read(path)
        super().__init__(_NoPython(os.fspath(path)), description.options, None if also is None else also._sharing)
        self.example_state = description.example_state
        self._state_metadata = description.state_metadata
        number = self._python_values.number()
        self._in_file: dict[Key, Executable] = {}
        # Loading replaces a method of torch's, so threads take turns.
        with compile_session(f"a step of {path}"):
            for program in description.programs:
                *fields, _ = program.key
                self._in_file[(*fields, number)] = runnable(program)  # type: ignore[index]

    def __repr__(self) -> str:
        return repr(self._step)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r}: it must be loaded again instead of pickled or copied")

    def save(self, path: str | os.PathLike[str], *, example_state: Tree = None) -> NoReturn:  # noqa: ARG002
        """Raise RuntimeError: the step is in a file."""
        raise RuntimeError(f"save: step must be one that jit has made; got {self!r}: copy its file")

    def state_dict(self, state: TrainState) -> dict[str, Tensor]:
        """Return every tensor of a state by a dotted name, as `TrainStep.state_dict` does. No sync."""
        return export("state_dict", state)

    def load_state_dict(self, saved: dict[str, Tensor], like: TrainState) -> TrainState:
        """Return the state that `state_dict` saved, laid out as like, such as `example_state`.

        Raises:
            TypeError: like is not a `TrainState`, or saved not a dict.
            ValueError: as `TrainStep.load_state_dict`.
        """
        return restore("load_state_dict", saved, like, Parallel())

    def _make(self, key: Key, memory: StateMemory, batch: Tree, task: str) -> Executable:  # noqa: ARG002
        """Return the program of a signature from the file.

        Raises:
            ValueError: there is none.
        """
        if _tree.flatten(memory.metadata) != _tree.flatten(self._state_metadata):
            raise ValueError(
                f"{self!r}: a step on the same state must have it in the memory layout of the file: call the step of "
                "the file first"
            )
        if key not in self._in_file:
            signatures = "; ".join(f"({', '.join(map(shown, leaves))})" for _, leaves, *_ in self._in_file)
            nearest = max(self._in_file, key=lambda known: known[:2] == key[:2])  # with such a batch, if there is one
            raise ValueError(
                f"{self!r}: batch must be like one of those in the file: {signatures}; got {shapes(batch)}, where "
                f"{difference(batch, nearest, key)}: call the step with such a batch before save"
            )
        return self._in_file[key]
