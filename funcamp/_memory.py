"""Memory that tensors share, by address, because storages may share memory (`from_numpy`)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._dtensor import local

_swap: Any = _upstream.find("torch._C._swap_tensor_impl")


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
        start, size = storage.data_ptr(), storage.nbytes()
        if not (start and size and tensor.numel()):
            return
        low, high = bisect_left(self._edges, start), bisect_right(self._edges, start + size)
        self._edges[low:high] = [start] * (not low % 2) + [start + size] * (not high % 2)

    def meets(self, tensor: Tensor) -> bool:
        """Return whether any byte of a tensor is in this memory."""
        tensor = local(tensor)
        return tensor.numel() > 0 and not self.is_free(tensor.data_ptr(), extent(tensor))

    def are_free(self, starts: Iterable[int], sizes: Iterable[int]) -> bool:
        """Return whether none of the ranges of `sizes` bytes from `starts` has a byte in this memory."""
        edges = self._edges
        for start, size in zip(starts, sizes):
            place = bisect_right(edges, start)
            if place % 2 or (place < len(edges) and edges[place] < start + size):
                return False
        return True

    def is_free(self, start: int, size: int) -> bool:
        """Return whether none of `size` bytes from an address is in this memory."""
        return self.are_free((start,), (size,))


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two elements of a tensor may have one place in memory, as those of an expanded one do."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def extent(tensor: Tensor) -> int:
    """Return the number of bytes from the first to the last of a tensor."""
    if not tensor.numel():
        return 0
    return (sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape)) + 1) * tensor.element_size()


def is_private(tensor: Tensor) -> bool:
    """Return whether torch allocated a tensor's memory, for this process only.

    Other memory may be read-only (a memory map, a Python bytes object) or have a second address (a file mapped twice),
    which comparing addresses does not show.
    """
    storage = local(tensor).untyped_storage()
    return storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared())


def identity(leaf: Tensor) -> object:
    """Return a key that two names of one tensor share: the object, or address, shape, strides and dtype."""
    if not _has_memory(leaf):
        return id(leaf)
    return *_start(leaf), leaf.shape, leaf.stride(), leaf.dtype


def overlaps(named: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield every pair of names whose tensors share a byte, in their order; reads no value."""
    names, leaves = list(named), list(named.values())
    spaces: dict[object, list[tuple[int, int, int]]] = {}
    for number, leaf in enumerate(leaves):
        if _has_memory(leaf):
            space, first = _start(leaf)
            spaces.setdefault(space, []).append((first, first + extent(local(leaf)), number))
    for spans in spaces.values():
        before: list[tuple[int, int, int]] = []
        for start, end, number in sorted(spans):
            before = [span for span in before if span[1] > start]
            for first, _, other in before:
                if _have_common_byte(leaves[other], leaves[number], start - first):
                    yield names[min(other, number)], names[max(other, number)]
            before.append((start, end, number))


def _has_memory(leaf: Tensor) -> bool:
    if _upstream.is_wrapped(leaf) or leaf.layout != torch.strided:
        return False
    return bool(leaf.numel())


def _start(leaf: Tensor) -> tuple[Any, int]:
    """Return the memory that a tensor is in, and its first byte there."""
    leaf = local(leaf)
    storage, offset = leaf.untyped_storage(), int(leaf.storage_offset()) * leaf.itemsize
    # Meta and fake tensors have no address, and fake tensors warn if asked for it.
    address = 0 if storage.device.type == "meta" else storage.data_ptr()
    return (leaf.device, address + offset) if address else (storage._cdata, offset)


def _have_common_byte(first: Tensor, second: Tensor, distance: int) -> bool:
    """Return whether two tensors share a byte; the second begins `distance` bytes after the first."""
    marks = torch.zeros(max(extent(local(first)), distance + extent(local(second))), dtype=torch.bool, device="cpu")
    _bytes_of(local(first), marks, 0).fill_(True)
    return bool(_bytes_of(local(second), marks, distance).any())


def _bytes_of(leaf: Tensor, marks: Tensor, start: int) -> Tensor:
    strides = [stride * leaf.itemsize for stride in leaf.stride()]
    return marks.as_strided([*leaf.shape, leaf.itemsize], [*strides, 1], start)


def rebind(tensor: Tensor, place: Tensor) -> None:
    """Give a module's tensor the memory and the values of another tensor; its gradient is dropped.

    Afterwards they share a version counter, so a write into one counts as a write into the other. `.data` would not
    share it; hence the swap, which keeps the Python object with its attributes and hooks.
    """
    former = place.detach().requires_grad_(tensor.requires_grad)
    _swap(tensor, former)
    former.grad = None
    # A graph that still exists would accumulate into a tensor that nothing refers to.
    if former.requires_grad and not former.is_inference():
        torch.autograd.graph.get_gradient_edge(former).node.register_prehook(_refuse)
    hooks: Any = tensor
    hooks._backward_hooks = hooks._backward_hooks  # reattaches them to the new tensor
    hooks._post_accumulate_grad_hooks = hooks._post_accumulate_grad_hooks


def _refuse(_: object) -> NoReturn:
    raise RuntimeError(
        "init: consume must be False if backward is called later on a loss from before; got True, and the module's "
        "parameters became views of a state's tensors: call backward before init and load_state_dict, or compute the "
        "loss again"
    )
