"""`CompiledProgram`: what a compiler returns, and what is around it: everything that a file needs of a program."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp._jit.passes.program import Around, Steps, TensorFunction
from funcamp._jit.unroll import unrolled
from funcamp._memory import overlaps
from funcamp._trace.autocast_regions import without_autocast
from funcamp._trace.interface import Outputs
from funcamp._trace.tensor_subclass import Wrapper, unwrap_all, wrap


class Surroundings(NamedTuple):
    """What is around a compiled function, from the inside to the outside."""

    around: tuple[Around, ...]
    """What passes put there."""
    captured: list[Tensor]
    """The tensors that the program reads besides its arguments: its last inputs."""
    written: list[int]
    """The numbers of the inputs that it writes."""
    wrappers: Sequence[Wrapper | None] | None
    """Those of the results, if some tensors are DTensors."""
    calls_torch: bool
    """Whether it calls torch's operations in Python, which look at autocast and record derivatives: on a GPU some."""
    steps: Steps | None
    """Those of a call, if their loop is in Python."""
    outputs: Outputs

    def put_around(self, compiled: TensorFunction) -> TensorFunction:
        """Return a function from the arguments to the results of the traced function, which share no memory.

        Args:
            compiled: a function from the arguments and the captured tensors to the results.
        """
        for around in self.around:
            compiled = around(compiled)
        run = self._with_captured(compiled)
        # Only a captured tensor may require gradients.
        if self.calls_torch or self.captured:
            run = _outside_autograd(run)
        if self.wrappers is not None:
            run = _with_wrapped(run, self.wrappers)
        return run if self.steps is None else unrolled(run, self.steps, self.outputs)

    def _with_captured(self, compiled: TensorFunction) -> TensorFunction:
        captured_tensors = self.captured
        written = self.written
        # The numbers of the results that need a copy, found at the first call: a program returns the same ones in the
        # memory of others at every call.
        copies_needed: list[int] | None = None

        def run(values: list[Tensor]) -> list[Tensor]:
            nonlocal copies_needed
            inputs = [*values, *captured_tensors]
            results = list(compiled(inputs))
            # A backward pass elsewhere that saved one of them is an error, as after an operation in place.
            torch.autograd.graph.increment_version([inputs[number] for number in written])
            if copies_needed is None:
                copies_needed = in_shared_memory(results, inputs)
            for number in copies_needed:
                results[number] = results[number].clone()
            return results

        return run


def _outside_autograd(run: TensorFunction) -> TensorFunction:
    def run_as_eager(values: list[Tensor]) -> list[Tensor]:
        # Casts and derivatives are already in the trace. A captured tensor may require gradients: since torch 2.14
        # make_fx records alias instead of detach, which lets it through.
        with without_autocast(), torch.no_grad():
            return run(values)

    return run_as_eager


def _with_wrapped(run: TensorFunction, wrappers: Sequence[Wrapper | None]) -> TensorFunction:
    def run_on_wrapped(values: list[Tensor]) -> list[Tensor]:
        """Take the parts of distributed tensors out, and put the results into such tensors."""
        plain_results = iter(run(unwrap_all(values)))
        return [wrap(wrapper, plain_results) for wrapper in wrappers]

    return run_on_wrapped


def in_shared_memory(results: list[Tensor], inputs: list[Tensor]) -> list[int]:
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


class Code(NamedTuple):
    """What Inductor has made of a program."""

    module: ModuleType
    """Its Python, which has loaded the kernels. Its function `call` is the program."""
    constants: list[Tensor]
    """The graph's own tensors, such as that of `x[0] = 7`: the first inputs of `call`."""

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return the results, without what torch puts around `call`: for a CPU, or inputs that are aligned."""
        results: list[Tensor] = self.module.call([*self.constants, *inputs])
        return results


class CompiledProgram:
    """A function from the arguments of a step to its results.

    Args:
        compiled: a function from the arguments and the captured tensors to the results.
        surroundings: what is around it.
        code: what Inductor has made; None if its operations run one by one.
    """

    def __init__(self, compiled: TensorFunction, surroundings: Surroundings, code: Code | None) -> None:
        self.surroundings = surroundings
        self.code = code
        self._run = surroundings.put_around(compiled)

    def __call__(self, values: list[Tensor]) -> list[Tensor]:
        """Return the results."""
        return self._run(values)
