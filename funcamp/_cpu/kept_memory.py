"""Keep the memory of a large program from call to call.

Inductor plans places for the values between two kernels in one block (its option memory_planning), which is allocated
at every call. The C library returns so large a block to the system when it is freed, and at the next call the system
clears each of its pages again: a third of the time of a large step. Here the block is one more input of the program. It
is empty at first, and grows in the call that needs more. The programs that a thread calls have one block, because only
one of them runs at a time, and none reads what another one left there.

The C++ that Inductor has written is changed as text: it takes over one more input, and one statement, which allocates
the block, is another one. If that statement is not there, the input is not used. Results are planned outside of the
block; one that is in it all the same is copied.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp._cpu.sources import ENTRY, TAKE_OVER, can_change_sources, source_changed
from funcamp._jit.compiled_program import in_shared_memory
from funcamp._jit.passes.program import Pass, Program, TensorFunction

#: Number of elements of a tensor from which on a program is large: the C library keeps smaller ones itself.
LARGE = 2**18
#: And that number for each operation. Inductor's planning takes time with the square of the number of values: of a GPT
#: with 48 blocks of width 64 a quarter of the first call, while the steps are 1 % shorter.
LARGE_FOR_EACH = 2**9

_BLOCK = re.compile(
    r"AtenTensorHandle (?P<name>pool\d+)_handle;\s*"
    r"AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_empty_strided\(1, (?P<shape>\w+), \w+, "
    r"cached_torch_dtype_uint8, cached_torch_device_type_cpu,\s+0, &(?P=name)_handle\)\);\s*"
    r"RAIIAtenTensorHandle (?P=name)\((?P=name)_handle\);"
)
_INPUT = re.compile(r"\binputs\[(\d+)\]")
_TAKE_OVER_MORE = """auto inputs = steal_from_raw_handles_to_raii_handles(input_handles, %d);
    RAIIAtenTensorHandle kept_memory(std::move(inputs[%d]));"""
_GROW = """AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_resize_(kept_memory, %(shape)s, 1, nullptr));
    RAIIAtenTensorHandle %(name)s(std::move(kept_memory));"""

#: A weak reference to the memory of the programs that a thread calls; none while one of them runs.
_of_thread = threading.local()


def in_kept_memory(input_count: int, source: str) -> str:
    """Return the C++ of a program that has a block of memory as an input.

    Args:
        input_count: the number of the other inputs, after which it comes.
        source: the C++ of the program.

    Raises:
        RuntimeError: it takes over its inputs otherwise.
    """
    before_entry, entry, body = source.partition(ENTRY)
    take_over = TAKE_OVER.search(body)
    if take_over is None:
        raise RuntimeError("the inputs in C++ are not the program's")

    def moved(place: re.Match[str]) -> str:
        """Make room for the block: Inductor's own constants are after the inputs."""
        number = int(place[1])
        return f"inputs[{number + 1 if number >= input_count else number}]"

    before, after = body[: take_over.start()], _INPUT.sub(moved, body[take_over.end() :])
    after = _BLOCK.sub(lambda block: _GROW % block.groupdict(), after, count=1)
    return before_entry + entry + before + _TAKE_OVER_MORE % (int(take_over[1]) + 1, input_count) + after


class KeptMemory(NamedTuple):
    """Gives a program memory after its inputs."""

    def __call__(self, inner: TensorFunction) -> TensorFunction:
        """Return the function of the inputs without the memory."""
        # As long as a program exists, so does the memory of its last call.
        memory: Tensor | None = None
        # The numbers of the results in it, found at the first call: they are the same ones at every call.
        copies_needed: list[int] | None = None

        def run(inputs: list[Tensor]) -> list[Tensor]:
            nonlocal memory, copies_needed
            memory = _take_memory()
            results = list(inner([*inputs, memory]))
            if copies_needed is None:
                copies_needed = in_shared_memory(results, [memory])
            for number in copies_needed:
                results[number] = results[number].clone()
            _of_thread.memory = weakref.ref(memory)
            return results

        return run


def _take_memory() -> Tensor:
    """Take this thread's memory, so that a program that is called meanwhile finds none; make it if there is none."""
    reference = vars(_of_thread).pop("memory", None)
    memory: Tensor | None = None if reference is None else reference()
    if memory is None:
        with torch.inference_mode(False):
            memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    return memory


def _run(program: Program) -> Program:
    values = [node.meta.get("val") for node in program.module.graph.nodes]
    tensors = [value for value in values if isinstance(value, Tensor)]
    least = max(LARGE, LARGE_FOR_EACH * len(values))
    is_large = any(value.numel() >= least for value in tensors)
    # Inductor's C++ makes no complex tensor of a part of a block.
    if not is_large or any(value.is_complex() for value in tensors):
        return program
    if not program.options.get("cpp_wrapper") or not can_change_sources():
        return program
    constants = [*program.module.parameters(), *program.module.buffers()]
    change = functools.partial(in_kept_memory, len(constants) + len(program.examples))
    return program._replace(
        options={**program.options, "memory_planning": True},
        while_compiled=(*program.while_compiled, functools.partial(source_changed, change)),
        may_fail=(*program.may_fail, PASS.name),
        needs_code=True,
        # Innermost: the inputs of other passes come before it.
        around=(KeptMemory(), *program.around),
    )


PASS = Pass(
    name="kept_memory",
    why="the system clears every page of a large block of memory that a step allocates anew",
    evidence="benchmarks/passes.py",
    where=lambda target: target.by_inductor and target.on_cpu and not target.is_open,
    run=_run,
)
