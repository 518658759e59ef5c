"""`load_step`: bring a saved step to run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from funcamp import _tree

if TYPE_CHECKING:
    from funcamp._jit.jit_step import JitStep
    from funcamp._step_file.loaded_step import LoadedStep


def load_step(path: str | os.PathLike[str], *, also: JitStep | None = None) -> LoadedStep:
    """Load a step that `run.save(path)` wrote, and call it as before: nothing is traced.

    No Python of the model, the loss or the optimizer is needed. The same state and batch give the same bits as the step
    that was saved. On a CPU nothing is compiled. On CUDA Triton compiles kernels that its cache lacks, and may choose
    other configurations of a sum than before; the first call captures. Everything that was a constant of the step is
    one of the file, and so are the tensors that it read besides its arguments.

    The file contains compiled code, which runs in this process: load only a file from someone whose programs you would
    run. Nothing else in it is executed. No sync.

    Args:
        path: the file.
        also: a step on whose state it works too, as `also.also(...)` would: an evaluation that was saved separately.

    Returns:
        The step. Its `example_state` is the state that was saved with it, or None. A batch of a signature that is not
        in the file is an error that lists those that are.

    Raises:
        TypeError: path is not a path; also is not a step of `jit` or `load_step`.
        ValueError: path is not such a file, or it was made with another funcamp, torch, Python or system, for a GPU of
            another architecture, or for a processor with instructions that this one lacks.
        FileNotFoundError: there is no file.

    Example:
        >>> run = load_step("step.pt")  # doctest: +SKIP
        >>> state, metrics = run(run.example_state, batch)  # doctest: +SKIP
    """
    from funcamp._jit.jit_step import JitStep  # imports torch's compiler, which takes seconds
    from funcamp._step_file.loaded_step import LoadedStep

    if also is not None and not isinstance(also, JitStep):
        raise TypeError(f"load_step: also must be a step of jit or load_step; got {_tree.brief(also)}")
    return LoadedStep(path, also)
