"""One call of an operation that can run again on the same inputs, with changed arguments."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._types import Args, Kwargs, Tree
from funcamp._upstream.modes import without_modes

if TYPE_CHECKING:
    from torch._ops import OpOverload

#: Returns an argument of an operation, changed or as it is.
Change: TypeAlias = Callable[[object], object]


class Call(NamedTuple):
    """A call of an operation."""

    function: OpOverload
    """The operation, as torch's dispatcher calls it."""
    arguments: Args
    keywords: Kwargs

    @property
    def name(self) -> str:
        """The operation's name among torch's operators."""
        return operator_name(self.function)

    @property
    def label(self) -> str:
        """The operation's name as a user knows it."""
        return "cast to float16" if self.name == "_to_copy" else self.name

    @property
    def floating_tensors(self) -> list[Tensor]:
        """The floating-point tensors among the arguments."""
        return floating_tensors((self.arguments, self.keywords))


class Range(NamedTuple):
    """The smallest and the largest of some numbers; NaN and NaN if one of them is NaN."""

    smallest: float
    largest: float

    def __str__(self) -> str:
        return f"from {self.smallest:.4g} to {self.largest:.4g}"

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are finite."""
        return math.isfinite(self.smallest) and math.isfinite(self.largest)


def operator_name(function: OpOverload) -> str:
    """Return an operation's name among torch's operators."""
    return function._schema.name.split("::")[1]


def recorded(function: OpOverload, arguments: Args, keywords: Kwargs) -> Call:
    """Return a call that is about to run; if it writes float16 numbers in place, its tensors are copied before."""
    call = Call(function, arguments, keywords)
    has_float16 = any(getattr(value, "dtype", None) == torch.float16 for value in (*arguments, *keywords.values()))
    return copied(call) if has_float16 and function._schema.is_mutable else call


def copied(call: Call) -> Call:
    """Return a call with copies of its tensors, without a graph: the script may write into the originals later."""

    def copy(argument: object) -> object:
        return argument.detach().clone() if isinstance(argument, Tensor) else argument

    with without_modes(), torch.no_grad():
        return Call(call.function, *mapped(copy, (call.arguments, call.keywords)))


def copied_as_leaves(call: Call) -> Call:
    """Return a call with copies of its tensors, which require gradients as the originals do."""
    copies = copied(call)
    originals, _ = _tree.flatten((call.arguments, call.keywords))
    leaves, _ = _tree.flatten((copies.arguments, copies.keywords))
    for original, leaf in zip(originals, leaves):
        if isinstance(original, Tensor) and original.requires_grad:
            leaf.requires_grad_()
    return copies


def mapped(change: Change, nested: Tree) -> Tree:
    """Return nested arguments with each one changed."""
    leaves, spec = _tree.flatten(nested)
    return _tree.unflatten([change(leaf) for leaf in leaves], spec)


def floating_tensors(nested: Tree) -> list[Tensor]:
    """Return the floating-point tensors among nested values."""
    return [tensor for tensor in _tree.tensors_in(nested) if tensor.is_floating_point()]


def range_of(tensors: Iterable[Tensor]) -> Range:
    """Return the range of the numbers of tensors; 0 to 0 without numbers. Waits for the device."""
    ranges = []
    with without_modes(), torch.no_grad():
        for tensor in tensors:
            if tensor.numel():
                values = tensor.detach()
                smallest, largest = torch.aminmax(values.float() if values.dtype.itemsize == 1 else values)  # of float8
                ranges.append((smallest.item(), largest.item()))
    if any(math.isnan(smallest) for smallest, _ in ranges):
        return Range(math.nan, math.nan)
    return Range(min((low for low, _ in ranges), default=0.0), max((high for _, high in ranges), default=0.0))


def run_again(call: Call, change: Change) -> Range | None:
    """Return the range of an operation's results with changed arguments; None if it does not take them."""
    with torch.no_grad():
        result = result_of(call, change)
    return None if result is None else range_of(floating_tensors(result))


def result_of(call: Call, change: Change) -> object:
    """Return the result of an operation with changed arguments; None if it does not take them.

    It has a graph in torch's grad mode, but not inside of an observed operation.
    Nothing of the script's changes: neither the inputs of an operation that writes in place nor random numbers.
    """
    with without_modes(), _unchanged_generators(call):
        changed = Call(call.function, *mapped(change, (call.arguments, call.keywords)))
        if call.function._schema.is_mutable:
            changed = Call(call.function, *mapped(_cloned, (changed.arguments, changed.keywords)))
        try:
            result: object = changed.function(*changed.arguments, **changed.keywords)
        except (RuntimeError, TypeError, ValueError):  # two dtypes in a product, a dtype without this operation
            return None
        return result


def _cloned(argument: object) -> object:
    return argument.clone() if isinstance(argument, Tensor) else argument


@contextlib.contextmanager
def _unchanged_generators(call: Call) -> Iterator[None]:
    """Context manager: after an operation that draws random numbers, torch's generators are as they were."""
    if torch.Tag.nondeterministic_seeded not in call.function.tags:
        yield
        return
    devices = {tensor.device for tensor in call.floating_tensors if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices):
        yield


# Changes of arguments.


def in_float32(argument: object) -> object:
    """Return a float16 tensor in float32, and torch.float32 for torch.float16; anything else as it is."""
    if isinstance(argument, Tensor) and argument.dtype == torch.float16:
        return argument.float()
    return torch.float32 if argument is torch.float16 else argument


def weights_in_float32(argument: object) -> object:
    """Return a float16 parameter, or a view of one, in float32; anything else as it is."""
    return in_float32(argument) if is_weight(argument) else argument


def is_weight(argument: object) -> bool:
    """Return whether an argument is a float16 parameter, or a view of one."""
    if not isinstance(argument, Tensor) or argument.dtype != torch.float16:
        return False
    origin = argument if argument._base is None else argument._base
    return origin.is_leaf and origin.requires_grad and origin.dim() > 0


def unchanged(argument: object) -> object:
    """Return an argument as it is."""
    return argument


def with_number(old: float, new: float) -> Change:
    """Return a change that replaces one Python number by another."""

    def change(argument: object) -> object:
        is_number = isinstance(argument, (int, float)) and not isinstance(argument, bool)
        return new if is_number and argument == old else argument

    return change
