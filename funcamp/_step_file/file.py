"""The compiled programs of a step in one file: how they are written, read, and brought to run.

The file is one of `torch.save`: a dict that `torch.load(weights_only=True)` reads.

| key | |
|---|---|
| `format` | the number of this format |
| `made_for` | the versions, the processor's instructions and the GPU that the code was compiled for |
| `description` | the pickle of a `Description`, with numbers in the place of tensors |
| `tensors` | these tensors |

The code of a program is Python that Inductor has written and the libraries that it loads, and runs as it is. All else
is data: the pickle makes NamedTuples of funcamp and plain values, and nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import os
import pickle
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._io.checkpoint import load, name_of_file, save
from funcamp._jit.compiled_program import Code, CompiledProgram, Surroundings
from funcamp._jit.executable import Executable
from funcamp._jit.jit_options import JitOptions
from funcamp._jit.metadata import TensorMetadata, check_like
from funcamp._jit.passes.program import TensorFunction
from funcamp._jit.signature import Key
from funcamp._jit.strides import BatchStrides
from funcamp._step_file.machine import check_machine, this_machine
from funcamp._types import Tree

FORMAT = 1


class SavedProgram(NamedTuple):
    """A program of a step."""

    key: Key
    """Its signature."""
    strides: BatchStrides
    python: str
    """What Inductor has written."""
    libraries: list[Tensor]
    """The bytes of the libraries that it loads, in this order."""
    module_tensors: dict[str, Tensor]
    """The tensors that it names."""
    constants: list[Tensor]
    """Its first inputs."""
    surroundings: Surroundings


class Description(NamedTuple):
    """All of a file that is not a tensor."""

    options: JitOptions
    state_metadata: Tree
    programs: list[SavedProgram]
    example_state: Tree
    """None if none was saved."""


def write(
    path: str | os.PathLike[str],
    options: JitOptions,
    executables: Mapping[Key, Executable],
    state_metadata: Tree,
    example_state: Tree,
) -> None:
    """Write the programs of a step into a file.

    Args:
        path: the file.
        options: those of `jit`.
        executables: the programs by their signatures.
        state_metadata: that of the state's leaves.
        example_state: a state; None for none.

    Raises:
        RuntimeError: there are no programs, or one cannot be in a file.
        TypeError: something in them is of a class that `read` does not make; path is not a path.
        ValueError: the example is unlike the state.
    """
    if not executables:
        raise RuntimeError(
            "save: step must have been called, which compiles it, and with the values that its Python has now (the "
            "model's mode, numbers); got no program for them: call it once, then save it"
        )
    if example_state is not None:
        check_like(("state", "example_state"), state_metadata, example_state)
    programs = [_saved(key, executable) for key, executable in executables.items()]
    tensors: list[Tensor] = []
    pickled = _pickled(Description(options, state_metadata, programs, example_state), tensors)
    devices = {leaf.device.type for leaf in _tree.leaves(state_metadata) if isinstance(leaf, TensorMetadata)}
    saved = {
        "format": FORMAT,
        "made_for": this_machine(has_gpu="cuda" in devices),
        "description": _as_tensor(pickled),
        "tensors": tensors,
    }
    save(saved, path)


def read(path: str | os.PathLike[str]) -> Description:
    """Return what is in a file.

    Raises:
        TypeError: path is not a path.
        ValueError: it is not a file of a step, or this machine cannot run its code.
        FileNotFoundError: there is no file.
    """
    _check_file(path)
    try:
        saved = load(path)
    except pickle.UnpicklingError:  # such as a whole module
        saved = {}
    found_format = saved.get("format") if isinstance(saved, dict) else None
    if found_format != FORMAT:
        raise ValueError(f"load_step: {_RULE}, in format {FORMAT}; got {str(path)!r} in format {found_format}")
    check_machine(saved["made_for"])
    description: Description = _Unpickler(_as_bytes(saved["description"]), saved["tensors"]).load()
    return description


_RULE = "path must be a file that run.save(path) wrote"


def _check_file(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if a file is not one of torch.save, or is damaged: torch.load looks at no checksum."""
    with open(name_of_file("load_step", path), "rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError(f"load_step: {_RULE}; got {str(path)!r}, which is another file, or incomplete")
        damaged = zipfile.ZipFile(file).testzip()
    if damaged is not None:
        raise ValueError(f"load_step: {_RULE}; got {str(path)!r}, of which {damaged} is damaged: copy it again")


# A program.


def _saved(key: Key, executable: Executable) -> SavedProgram:
    """Return what a file has of a program for a signature.

    Raises:
        RuntimeError: it cannot be in a file.
    """
    program = executable.compiled_program()
    if program is None or program.code is None:
        raise RuntimeError(
            "save: step must be compiled by Inductor, for every batch; got a program whose operations run one by one: "
            "call jit with backend='inductor', on a step whose shapes do not follow from values"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RuntimeError("save: step must run in one process; got one of several ranks")
    if len(executable.outside_state) < len(executable.captured):
        raise RuntimeError(
            "save: step must read parameters from the state; got one that reads a module in the memory of the state"
        )
    module = program.code.module
    try:
        python = Path(str(module.__file__)).read_text()
        libraries = [_as_tensor(library.read_bytes()) for library in _libraries(module)]
    except FileNotFoundError as error:
        raise RuntimeError(
            f"save: step's code must still be in Inductor's cache folder; {error.filename} is gone: set "
            "TORCHINDUCTOR_CACHE_DIR to a folder that stays, and compile again"
        ) from None
    return SavedProgram(
        key,
        executable.strides,
        python,
        libraries,
        {name: value for name, value in vars(module).items() if isinstance(value, Tensor)},
        program.code.constants,
        program.surroundings,
    )


def _libraries(module: ModuleType) -> list[Path]:
    """Return the libraries that Python of Inductor's has loaded, in the order of its lines."""
    # Each is a module with one function, which has a global name. Other names are of torch's own library.
    owners = [getattr(value, "__self__", None) for value in vars(module).values()]
    libraries: list[Path] = []
    for owner in owners:
        if isinstance(owner, ModuleType) and hasattr(owner, "__file__") and not owner.__name__.startswith("torch."):
            libraries.append(Path(str(owner.__file__)))
    return libraries


def runnable(saved: SavedProgram) -> Executable:
    """Return a program of a file, ready to run."""
    # What is loaded needs its files no longer, except on Windows.
    with tempfile.TemporaryDirectory(prefix="funcamp_", ignore_cleanup_errors=True) as folder:
        libraries: list[Path] = []
        for number, content in enumerate(saved.libraries):
            library = Path(folder, f"library_{number}.so")
            library.write_bytes(_as_bytes(content).getvalue())
            libraries.append(library)
        # A file of Python too: Triton reads the source of a kernel there.
        file = Path(folder, "program.py")
        file.write_text(saved.python)
        spec: Any = importlib.util.spec_from_file_location(Path(folder).name, file)
        module = importlib.util.module_from_spec(spec)
        with _loaded_instead(libraries):
            spec.loader.exec_module(module)
    vars(module).update(saved.module_tensors)
    surroundings = saved.surroundings
    code = Code(module, saved.constants)
    # A file has programs of Inductor only, and those for a CPU call no operation of torch from Python.
    is_for_gpu = surroundings.calls_torch
    run = _on_aligned(code.run, frozenset(surroundings.written)) if is_for_gpu else code.run
    program = CompiledProgram(run, surroundings, code)
    captured = surroundings.captured
    return Executable(program, surroundings.outputs, saved.strides, captured, captured, description=None)


def _on_aligned(run: TensorFunction, written: frozenset[int]) -> TensorFunction:
    """Return a function whose inputs begin at a multiple of 16 bytes, as the kernels of a GPU assume.

    Those that are written are the state, which begins there (`take_over`).
    """

    def run_on_aligned(inputs: list[Tensor]) -> list[Tensor]:
        aligned: list[Tensor] = []
        for number, value in enumerate(inputs):
            is_aligned = number in written or value.data_ptr() % 16 == 0
            aligned.append(value if is_aligned else value.clone())
        return run(aligned)

    return run_on_aligned


@contextlib.contextmanager
def _loaded_instead(libraries: Sequence[Path]) -> Iterator[None]:
    """Context manager: where Python of Inductor's compiles C++, it gets the functions of these libraries, in order."""
    remaining = iter(libraries)
    thread = threading.get_ident()

    def load_pybinding_async(cls: Any, /, *args: object, **options: object) -> Any:
        if threading.get_ident() != thread:  # torch.compile of another one
            return compile_async(cls, *args, **options)
        library = next(remaining)
        name = f"{library.parent.name}_{library.stem}"
        cls._load_library_inner(str(library), name)
        function = getattr(sys.modules[f"{name}.{cls.entry_function}"], cls.entry_function)
        return lambda: function

    compiler = _upstream.find("torch._inductor.codecache.CppPythonBindingsCodeCache")
    compile_async = compiler.load_pybinding_async.__func__
    with patch.object(compiler, "load_pybinding_async", classmethod(load_pybinding_async)):
        yield


# Objects and bytes.


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _as_bytes(content: Tensor) -> io.BytesIO:
    return io.BytesIO(ctypes.string_at(content.data_ptr(), content.nbytes))  # numpy may not be there


def _pickled(description: Description, tensors: list[Tensor]) -> bytes:
    """Return the pickle of a description, and append its tensors to a list.

    Raises:
        TypeError: `_Unpickler` could not read it.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, tensors).dump(description)
        buffer.seek(0)
        _Unpickler(buffer, tensors).load()
    except (pickle.PickleError, AttributeError) as error:
        raise TypeError(
            "save: the state, the batch and the metrics must be dicts, lists, tuples, numbers, texts, tensors and "
            f"NamedTuples of funcamp; got {error}"
        ) from None
    return buffer.getvalue()


#: It has no name that a pickle could have.
_CLASS_OF_NONE = type(None)


class _Pickler(pickle.Pickler):
    """Writes the numbers of tensors, and appends the tensors to a list."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: object) -> tuple[object, ...] | None:
        """Return what is written for a tensor, and for the class of None."""
        if obj is _CLASS_OF_NONE:
            return ("class of None",)
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self._tensors)
            self._tensors.append(obj.detach())
        return "tensor", self._numbers[id(obj)], str(obj.device)


_BUILTINS = (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
#: What a pickle may name, besides NamedTuples of funcamp and torch's dtypes and layouts.
_NAMES = {
    *(f"builtins.{kind.__name__}" for kind in _BUILTINS),
    *("collections.OrderedDict", "collections.defaultdict", "collections.deque"),
    *("torch.Size", "torch.device", "torch.Tensor", "torch.serialization._get_layout"),
    *("funcamp._storage.layout._restore", "funcamp._storage.params.Params", "funcamp._jit.metadata.TensorMetadata"),
    "funcamp._trace.interface.outputs_of",
}


class _Unpickler(pickle.Unpickler):
    """Reads a description, and runs no other code than the constructors of what it may name."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._placed: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> object:
        """Return a tensor on its device, or the class of None."""
        if len(pid) == 1:
            return _CLASS_OF_NONE
        _, number, device = pid
        if number not in self._placed:
            self._placed[number] = self._tensors[number].to(device)
        return self._placed[number]

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return what the pickle may name; raise UnpicklingError for the rest."""
        name = f"{module_name}.{global_name}"
        if name in _NAMES:
            return super().find_class(module_name, global_name)
        if module_name == "torch":
            found = getattr(torch, global_name, None)
            if isinstance(found, (torch.dtype, torch.layout)):
                return found
        if module_name.startswith("funcamp.") and "." not in global_name:
            found = super().find_class(module_name, global_name)
            if isinstance(found, type) and _tree.is_named_tuple(found):
                return found
        raise pickle.UnpicklingError(name)
