"""Memory that tensors share, by address, because storages may share memory (`from_numpy`); and what a write changes."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from funcamp import _upstream
from funcamp._dtensor import local

#: Tensors by the address of their storage.
_private: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
_swap = _upstream.find("torch._C._swap_tensor_impl")


class Memory:
    """The memory of some tensors: the address ranges of their storages.

    Addresses of different devices are compared too. If they are equal by chance, the only cost is a copy.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        # Start and end of disjoint ranges, alternating and ascending: an address is inside if an odd number precedes
        # it.
        self._edges: list[int] = []
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        """Add the storage of a tensor; for a DTensor the storage of this rank's part."""
        tensor = local(tensor)
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        end = start + storage.nbytes()
        if not start or start == end or not tensor.numel():
            return
        edges_before = bisect_left(self._edges, start)
        edges_up_to_end = bisect_right(self._edges, end)
        # The edges between start and end go. The new ones are edges only if they are in no range that is there already.
        new_edges: list[int] = []
        if edges_before % 2 == 0:
            new_edges.append(start)
        if edges_up_to_end % 2 == 0:
            new_edges.append(end)
        self._edges[edges_before:edges_up_to_end] = new_edges

    def meets(self, tensor: Tensor) -> bool:
        """Return whether any byte of a tensor is in this memory."""
        tensor = local(tensor)
        return tensor.numel() > 0 and not self.is_free(tensor.data_ptr(), extent(tensor))

    def are_free(self, starts: Iterable[int], sizes: Iterable[int]) -> bool:
        """Return whether none of the ranges of `sizes` bytes from `starts` has a byte in this memory."""
        edges = self._edges
        for start, size in zip(starts, sizes):
            next_edge = bisect_right(edges, start)
            # An odd number of edges before: start is inside of a range. Else the next range may begin before the end.
            if next_edge % 2 or (next_edge < len(edges) and edges[next_edge] < start + size):
                return False
        return True

    def is_free(self, start: int, size: int) -> bool:
        """Return whether none of `size` bytes from an address is in this memory."""
        return self.are_free((start,), (size,))


def extent(tensor: Tensor) -> int:
    """Return the number of bytes from the first to the last of a tensor."""
    if not tensor.numel():
        return 0
    last_element = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape))
    return (last_element + 1) * tensor.element_size()


def is_private(tensor: Tensor) -> bool:
    """Return whether torch allocated a tensor's memory, for this process only.

    Other memory may be read-only (a memory map, a Python bytes object) or have a second address (a file mapped twice),
    which comparing addresses does not show.
    """
    storage = local(tensor).untyped_storage()
    noted = _private.get(storage._cdata)
    # Another storage may have the address of one that is gone.
    is_noted = noted is not None and noted.untyped_storage()._cdata == storage._cdata
    is_torchs = storage.resizable() or is_noted
    return is_torchs and not (storage.device.type == "cpu" and storage.is_shared())


def note_private(tensor: Tensor) -> None:
    """Note, as long as a module's tensor lives, that torch allocated its memory: `.numpy()` hides it later."""
    if is_private(tensor):
        _private[tensor.untyped_storage()._cdata] = tensor


def identity(leaf: Tensor) -> object:
    """Return a key that two names of one tensor share: the object, or address, shape, strides and dtype."""
    if not _has_memory(leaf):
        return id(leaf)
    return *_start(leaf), leaf.shape, leaf.stride(), leaf.dtype


class _Span(NamedTuple):
    """The bytes of a tensor in the memory that it is in."""

    start: int
    end: int
    number: int
    """Which tensor it is."""


def overlaps(named: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield every pair of names whose tensors' ranges of bytes overlap, in their order; reads no value.

    Two columns of a matrix overlap too, although they share no byte.
    """
    names = list(named)
    spans_by_memory: dict[object, list[_Span]] = {}
    for number, tensor in enumerate(named.values()):
        if _has_memory(tensor):
            memory, start = _start(tensor)
            span = _Span(start, start + extent(local(tensor)), number)
            spans_by_memory.setdefault(memory, []).append(span)
    for spans in spans_by_memory.values():
        # From the first to the last start: only spans that have not ended can meet the next one.
        not_ended: list[_Span] = []
        for span in sorted(spans):
            not_ended = [earlier for earlier in not_ended if earlier.end > span.start]
            for earlier in not_ended:
                first, second = sorted((earlier.number, span.number))
                yield names[first], names[second]
            not_ended.append(span)


def _has_memory(leaf: Tensor) -> bool:
    if _upstream.is_wrapped(leaf) or leaf.layout != torch.strided:
        return False
    return bool(leaf.numel())


def _start(leaf: Tensor) -> tuple[object, int]:
    """Return the memory that a tensor is in, and its first byte there."""
    leaf = local(leaf)
    storage = leaf.untyped_storage()
    offset = int(leaf.storage_offset()) * leaf.itemsize
    # Meta and fake tensors have no address, and fake tensors warn if asked for it.
    address = 0 if storage.device.type == "meta" else storage.data_ptr()
    if address:
        return leaf.device, address + offset
    return storage._cdata, offset


class MemoryMark(NamedTuple):
    """What changes if a tensor is written in place, or is given other memory."""

    version: int
    storage: int | None


def memory_of(tensor: Tensor) -> MemoryMark:
    """Return what changes if a tensor is written in place, or is given other memory by `.data = value`."""
    tensor = innermost(tensor)
    # A subclass may have several storages, or none.
    has_storage = type(tensor) in (Tensor, nn.Parameter)
    storage = int(tensor.untyped_storage()._cdata) if has_storage else None
    return MemoryMark(version_of(tensor), storage)


def version_of(tensor: Tensor) -> int:
    """Return the number of writes into a tensor; 0 for one of an inference region, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version


def innermost(tensor: Tensor) -> Tensor:
    """Return the tensor that the wrappers of torch.func contain."""
    while _upstream.is_wrapped(tensor):
        tensor = _upstream.unwrapped(tensor)
    return tensor


def rebind(tensor: Tensor, target: Tensor) -> None:
    """Give a module's tensor the memory and the values of another tensor; its gradient is dropped.

    Afterwards they share a version counter, so a write into one counts as a write into the other. `.data` would not
    share it; hence the swap, which keeps the Python object with its attributes and hooks.
    """
    alias = target.detach().requires_grad_(tensor.requires_grad)
    _swap(tensor, alias)
    former = alias  # after the swap this object is the tensor as it was
    former.grad = None
    # A graph that still exists would accumulate into a tensor that nothing refers to.
    if former.requires_grad and not former.is_inference():
        torch.autograd.graph.get_gradient_edge(former).node.register_prehook(_refuse)
    hooked: Any = tensor
    # Assigning them attaches them to the new tensor.
    hooked._backward_hooks = hooked._backward_hooks
    hooked._post_accumulate_grad_hooks = hooked._post_accumulate_grad_hooks


def _refuse(_: object) -> NoReturn:
    raise RuntimeError(
        "init: consume must be False if backward is called later on a loss from before; got True, and the module's "
        "parameters became views of a state's tensors: call backward before init and load_state_dict, or compute the "
        "loss again"
    )
