"""`Program`: what is compiled; `Pass`: the only form in which it is changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, fx

from funcamp._jit.passes.table import Extension, Table

#: The dtypes to which autocast casts, and which eager operations round to.
NARROW = (torch.float16, torch.bfloat16)
#: A function from the tensors of a program to its results.
TensorFunction: TypeAlias = Callable[[list[Tensor]], list[Tensor]]


class Around(Protocol):
    """What is put around a compiled program: a NamedTuple, because a file of a step contains it."""

    def __call__(self, inner: TensorFunction, /) -> TensorFunction:
        """Return the function that is called instead."""


class Target(NamedTuple):
    """What a program is compiled for."""

    backend: str
    devices: frozenset[str]
    """The types of device of the state."""
    exact: bool = False
    """Whether roundings and random numbers are those of eager mode."""
    is_open: bool = False
    """Whether shapes or strides in it follow from values."""
    is_distributed: bool = False
    """Whether this process is one of several ranks."""

    @property
    def by_inductor(self) -> bool:
        """Return whether torch's own compiler compiles it."""
        return self.backend == "inductor"

    @property
    def on_cpu(self) -> bool:
        """Return whether it runs on a CPU only."""
        return self.devices == {"cpu"}


class Steps(NamedTuple):
    """The steps of a call, whose batches are stacked along a first dimension."""

    number: int
    state_leaves: int
    """The number of a program's first inputs: its state."""
    batch_leaves: int
    """The number of those after them."""
    donated: bool
    """Whether a step writes its state, instead of returning the next."""


class Program(NamedTuple):
    """A traced graph on its way to the compiler. A pass may change the graph in place; all else is immutable."""

    module: fx.GraphModule
    """From the tensors of the state, of the batch, and those captured, to the results; not recompiled.

    Its graph has operations that write in place. With donation it ends with a `copy_` into each leaf of the state that
    is new. Every result is a clone (`_jit/trace_step.py` makes both).
    """
    examples: list[Tensor]
    """Tensors without values like its inputs."""
    mode: AbstractContextManager[Any]
    """The mode of the examples, in which operations compute shapes only."""
    target: Target
    cache_name: bytes
    """What it depends on besides the graph and Inductor's options."""
    options: dict[str, Any]
    """Those of Inductor's options that passes ask for, by name."""
    extensions: tuple[Extension, ...] = ()
    """What adds entries to the compiler's table of decompositions."""
    around: tuple[Around, ...] = ()
    """What is put around the compiled program, the first one innermost."""
    while_compiled: tuple[Callable[[], AbstractContextManager[object]], ...] = ()
    """Context managers that are entered, in order, while Inductor compiles it."""
    may_fail: tuple[str, ...] = ()
    """The names of passes that Inductor may not take: after an error it is compiled again without the last one."""
    needs_code: bool = False
    """Whether a pass has changed the inputs of Inductor's code, so that it must be called itself."""
    steps: Steps | None = None
    """Those of a call; None if it is one, or if a pass has put the loop into the program."""

    @property
    def table(self) -> Table:
        """Return what Inductor takes instead of some operations."""
        return Table(self.extensions, self.target.exact)

    def extended(self, extension: Extension) -> Program:
        """Return the program with more entries in the compiler's table."""
        return self._replace(extensions=(*self.extensions, extension))


class Pass(NamedTuple):
    """A change of a program: leaving it out changes roundings at most, unless its reason is a defect of torch."""

    name: str
    why: str
    """One line; printed by `jit(..., explain=True)` and by `doctor`."""
    evidence: str
    """The test or the issue of torch that shows the need, or the result file that shows this pass's own gain."""
    where: Callable[[Target], bool]
    """Whether a program for this target needs it. Also called without a compiler: see `Target.by_inductor`."""
    run: Callable[[Program], Program]
    defect: bool = False
    """Whether its reason is a defect of torch, so that numbers may be wrong without it."""
