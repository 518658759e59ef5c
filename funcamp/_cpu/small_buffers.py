"""Give the small buffers of a program in C++ places in one block of memory, instead of a tensor each.

A tensor takes about 0.3 microseconds to allocate and to free, and Inductor's C++ makes one for every value between two
kernels: a step of two networks of 64 units has fifty, most of a scalar. A kernel needs an address only.

The C++ that Inductor has written is changed as text, in one kind of statement: the one that allocates a buffer. The
buffer then is a `Part`, for which the functions that such buffers meet have overloads: a view, a move, an address. A
buffer stays a tensor if it, or what shares its memory, occurs in any other statement, such as a result or an argument
of a library's function. So a statement that is not foreseen costs time only; and if one were overlooked, the program
would not compile, as no `Part` is a tensor. No place is used twice, so there is no order to be wrong about.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import NamedTuple

import torch

from funcamp._cpu.sources import ENTRY, TAKE_OVER, source_changed
from funcamp._jit.passes.program import Pass, Program

#: The largest buffer, in bytes, that gets a place: a kernel that writes more takes much longer than the allocation.
SMALL = 2**16
#: The largest size of the block, in bytes.
BLOCK = 2**20
#: What a place is aligned to, as a tensor's memory is.
_ALIGNED = 64

_ALLOCATION = re.compile(
    r"AtenTensorHandle (?P<name>\w+)_handle;\s*"
    r"AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_empty_strided\((?P<dims>\d+), (?P<shape>\w+), (?P<strides>\w+), "
    r"cached_torch_dtype_(?P<dtype>\w+), cached_torch_device_type_cpu,\s+0, &(?P=name)_handle\)\);\s*"
    r"RAIIAtenTensorHandle (?P=name)\((?P=name)_handle\);"
)
_MOVE = re.compile(r"auto (\w+) = std::move\((\w+)\);")
_VIEW = re.compile(
    r"auto (\w+) = wrap_with_raii_handle_if_needed\(reinterpret_tensor_wrapper\((\w+), \d+, \w+, \w+, \d+L?\)\);"
)
_RESET = re.compile(r"\b\w+\.reset\(\);")
_ADDRESS = re.compile(r"\((?:const )?[\w:]+\s?\*\)\(\w+\.data_ptr\(\)\)")
_ARRAY = re.compile(r"static constexpr int64_t (\w+)\[\] = \{([\d, L]*)\};")


_OVERLOADS = """
namespace {
struct Part {
    char* first;
    int64_t item_size;
    void* data_ptr() const { return first; }
    void reset() {}
};
inline Part reinterpret_tensor_wrapper(const Part& part, int64_t, const int64_t*, const int64_t*, int64_t offset) {
    return Part{part.first + offset * part.item_size, part.item_size};
}
inline Part wrap_with_raii_handle_if_needed(const Part& part) { return part; }
}
"""
_MAKE_BLOCK = """
    static constexpr int64_t small_buffers_size[] = {%d};
    static constexpr int64_t small_buffers_stride[] = {1};
    AtenTensorHandle small_buffers_handle;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, small_buffers_size, small_buffers_stride,
        aoti_torch_dtype_uint8(), aoti_torch_device_type_cpu(), 0, &small_buffers_handle));
    RAIIAtenTensorHandle small_buffers(small_buffers_handle);
    char* const small_buffers_first = static_cast<char*>(small_buffers.data_ptr());
"""


class _Place(NamedTuple):
    """Where a buffer is in the block."""

    first: int
    """In bytes."""
    item_size: int


def in_one_block(source: str) -> str:
    """Return the C++ of a program whose small buffers are parts of one block; the same if there are none."""
    before_entry, entry, body = source.partition(ENTRY)
    first_statement = TAKE_OVER.search(body)
    if first_statement is None:
        return source
    places, block_size = _places(body)
    if not places:
        return source

    def as_part(allocation: re.Match[str]) -> str:
        name = allocation["name"]
        if name not in places:
            return allocation[0]
        place = places[name]
        return f"Part {name}{{small_buffers_first + {place.first}, {place.item_size}}};"

    before_block = body[: first_statement.end()]
    after_block = _ALLOCATION.sub(as_part, body[first_statement.end() :])
    return before_entry + _OVERLOADS + entry + before_block + _MAKE_BLOCK % block_size + after_block


def _places(body: str) -> tuple[dict[str, _Place], int]:
    """Return the places of all buffers that can be parts, by name, and the size of the block."""
    allocations = list(_ALLOCATION.finditer(body))
    allocation_counts = Counter(allocation["name"] for allocation in allocations)
    arrays = _arrays(body)
    memory = _SharedMemory(body)
    # One buffer that must be a tensor makes all those in its memory tensors.
    memory_of_tensors = {memory.of(name) for name in _words_elsewhere(body)}
    places: dict[str, _Place] = {}
    block_size = 0
    for allocation in allocations:
        name = allocation["name"]
        size = _size(allocation, arrays)
        if size is None or size > min(SMALL, BLOCK - block_size):
            continue
        # Places are given by name, so a name that is allocated twice has none.
        if allocation_counts[name] > 1 or memory.of(name) in memory_of_tensors:
            continue
        places[name] = _Place(block_size, _item_size(allocation))
        aligned_units = -(-size // _ALIGNED)
        block_size += aligned_units * _ALIGNED
    return places, block_size


def _arrays(body: str) -> dict[str, list[int]]:
    """Return the arrays of constants by name; none whose name has several."""
    definitions = _ARRAY.findall(body)
    definition_counts = Counter(name for name, _ in definitions)
    arrays: dict[str, list[int]] = {}
    for name, items in definitions:
        if definition_counts[name] == 1:
            arrays[name] = [int(item) for item in re.findall(r"\d+", items)]
    return arrays


def _item_size(allocation: re.Match[str]) -> int:
    """Return the size of an element of a buffer in bytes."""
    dtype: torch.dtype = getattr(torch, allocation["dtype"])
    return dtype.itemsize


def _size(allocation: re.Match[str], arrays: dict[str, list[int]]) -> int | None:
    """Return the size of a buffer in bytes; None if it is not known when it is compiled."""
    item_size = _item_size(allocation)
    if allocation["dims"] == "0":
        return item_size
    shape = arrays.get(allocation["shape"])
    strides = arrays.get(allocation["strides"])
    if shape is None or strides is None:
        return None
    if 0 in shape:
        return 0
    last_item = sum((length - 1) * stride for length, stride in zip(shape, strides))
    return (last_item + 1) * item_size


def _words_elsewhere(body: str) -> set[str]:
    """Return all words of the statements, and parts of statements, in which a buffer must be a tensor."""
    for harmless in (_ALLOCATION, _MOVE, _VIEW, _RESET, _ADDRESS):
        body = harmless.sub("", body)
    return set(re.findall(r"\w+", body))


class _SharedMemory:
    """Which buffers are in the memory of which: by moves and views.

    Args:
        body: C++ statements.
    """

    def __init__(self, body: str) -> None:
        #: The buffer that another one was moved from, or is a view of.
        self._former: dict[str, str] = {}
        for name, former in _MOVE.findall(body) + _VIEW.findall(body):
            self._former[self.of(name)] = self.of(former)

    def of(self, name: str) -> str:
        """Return one name for all buffers in the memory of this one."""
        while name in self._former and self._former[name] != name:
            name = self._former[name]
        return name


def _run(program: Program) -> Program:
    change = functools.partial(source_changed, in_one_block)
    return program._replace(while_compiled=(*program.while_compiled, change))


PASS = Pass(
    name="small_buffers",
    why="a tensor for every value between two kernels takes a fifth of a small step's time",
    evidence="benchmarks/passes.py",
    where=lambda target: target.by_inductor and target.on_cpu,
    run=_run,
)
