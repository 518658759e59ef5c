"""The smallest change with which an operation is finite, found by running it again on its inputs.

A change is proposed only if the operation, run again with it on the same inputs, is finite.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcamp import _tree, _upstream

_without_modes = _upstream.find("torch._C._DisableTorchDispatch")

#: Epsilons that are tried in place of one that float16 does not have, the smallest first.
_EPSILONS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
#: autocast casts the inputs of these to float16 again.
_CAST_BY_AUTOCAST = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "matmul", "einsum"}
_CAST_BY_AUTOCAST |= {"convolution", "mkldnn_linear", "_convolution", "mkldnn_convolution"}

#: Returns an argument of an operation, changed.
_Change: TypeAlias = Callable[[Any], Any]


class Call(NamedTuple):
    """An operation, with the arguments that it gets."""

    function: Any
    """Of torch's dispatcher."""
    arguments: Any
    keywords: Any

    @property
    def name(self) -> str:
        """Its name among torch's operators."""
        return operator_name(self.function)

    @property
    def label(self) -> str:
        """What a user calls it."""
        return "cast to float16" if self.name == "_to_copy" else self.name


class Range(NamedTuple):
    """The smallest and the largest of some numbers."""

    smallest: float
    largest: float

    def __str__(self) -> str:
        return f"from {self.smallest:.4g} to {self.largest:.4g}"

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are finite: NaN is the smallest and the largest of its tensor."""
        return math.isfinite(self.smallest) and math.isfinite(self.largest)


class Proposal(NamedTuple):
    """What to change, and what shows that it holds."""

    change: str
    """The changed line; empty if no change holds."""
    proof: str
    """What came of running the operation again."""


def operator_name(function: Any) -> str:
    """Return an operation's name among torch's operators."""
    name: str = function._schema.name.split("::")[1]
    return name


def recorded(function: Any, arguments: Any, keywords: Any) -> Call:
    """Return a call before it runs; if it writes float16 numbers in place, its tensors are copied."""
    in_float16 = any(getattr(one, "dtype", None) == torch.float16 for one in (*arguments, *keywords.values()))
    if not in_float16 or not function._schema.is_mutable:
        return Call(function, arguments, keywords)
    return copied(Call(function, arguments, keywords))


def copied(call: Call) -> Call:
    """Return a call whose tensors are copies without a graph: what follows may write into them."""

    def copy(argument: Any) -> Any:
        return argument.detach().clone() if isinstance(argument, Tensor) else argument

    with _without_modes(), torch.no_grad():
        return Call(call.function, *mapped(copy, (call.arguments, call.keywords)))


def mapped(change: _Change, nested: Any) -> Any:
    """Return nested arguments with each one changed."""
    leaves, spec = _tree.flatten(nested)
    return _tree.unflatten([change(leaf) for leaf in leaves], spec)


def range_of(tensors: Iterable[Tensor]) -> Range:
    """Return the range of the numbers of tensors; 0 to 0 without numbers. Waits for the device."""
    ranges = []
    with _without_modes(), torch.no_grad():
        for tensor in tensors:
            if tensor.numel():
                smallest, largest = torch.aminmax(tensor.detach())
                ranges.append((smallest.item(), largest.item()))
    if any(math.isnan(smallest) for smallest, _ in ranges):
        return Range(math.nan, math.nan)
    return Range(min((low for low, _ in ranges), default=0.0), max((high for _, high in ranges), default=0.0))


def run_again(call: Call, change: _Change) -> Range | None:
    """Return the range of an operation's results on changed arguments; None if it does not take them."""
    result = result_of(call, change)
    return None if result is None else range_of(_floating(result))


def result_of(call: Call, change: _Change) -> Any:
    """Return the result of an operation on changed arguments; None if it does not take them. Nothing else changes."""
    with _without_modes(), torch.no_grad(), _own_random_numbers(call):
        changed = Call(call.function, *mapped(change, (call.arguments, call.keywords)))
        if call.function._schema.is_mutable:
            changed = copied(changed)
        try:
            return changed.function(*changed.arguments, **changed.keywords)
        except (RuntimeError, TypeError, ValueError):  # two dtypes in a product, a dtype without this operation
            return None


@contextlib.contextmanager
def _own_random_numbers(call: Call) -> Iterator[None]:
    """Context manager: an operation that draws random numbers leaves torch's generators as they were."""
    if torch.Tag.nondeterministic_seeded not in call.function.tags:
        yield
        return
    devices = {tensor.device for tensor in _floating((call.arguments, call.keywords)) if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices):
        yield


def _floating(nested: Any) -> list[Tensor]:
    return [leaf for leaf in _tree.leaves(nested) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


# Changes of arguments.


def widened(argument: Any) -> Any:
    """Return an argument in float32 if it is a float16 tensor, or that dtype itself."""
    if isinstance(argument, Tensor) and argument.dtype == torch.float16:
        return argument.float()
    return torch.float32 if argument is torch.float16 else argument


def with_number(old: float, new: float) -> _Change:
    """Return a change of one number."""

    def change(argument: Any) -> Any:
        is_number = isinstance(argument, (int, float)) and not isinstance(argument, bool)
        return new if is_number and argument == old else argument

    return change


def _with_weights_widened(argument: Any) -> Any:
    return widened(argument) if _is_weight(argument) else argument


def _is_weight(argument: Any) -> bool:
    """Return whether an argument is a float16 parameter, or a view of one."""
    if not isinstance(argument, Tensor) or argument.dtype != torch.float16:
        return False
    origin = argument if argument._base is None else argument._base
    return origin.is_leaf and origin.requires_grad and origin.dim() > 0


def _unchanged(argument: Any) -> Any:
    return argument


# Proposals.


def propose(call: Call, name_of_weight: Callable[[Tensor], str]) -> Proposal:
    """Return the smallest change with which an operation that overflowed is finite.

    name_of_weight: returns a parameter's name.
    """
    reason = _why_not_again(call)
    if reason:
        return Proposal("", reason)
    for change, tried_call, changed in _candidates(call, name_of_weight):
        found = run_again(tried_call, changed)
        if found is not None and found.is_finite:
            return Proposal(change, _finite(call, found))
    return Proposal("", _why_none_holds(call))


def _candidates(call: Call, name_of_weight: Callable[[Tensor], str]) -> Iterator[tuple[str, Call, _Change]]:
    """Yield changes, the smallest first: the changed line, the call and how its arguments change."""
    if call.name == "_to_copy":
        yield "leave it in float32  # no cast; under autocast: autocast(enabled=False) around the line", call, widened
        return
    weights = [tensor for tensor in _floating((call.arguments, call.keywords)) if _is_weight(tensor)]
    if weights:
        names = ", ".join(f'"{name_of_weight(weight)}"' for weight in weights)
        yield f"Policy(torch.float16, keep=({names},))  # the weight in float32", call, _with_weights_widened
    if _takes_dtype(call):
        with_dtype = call._replace(keywords={**call.keywords, "dtype": torch.float32})
        yield f"{call.name}(..., dtype=torch.float32)", with_dtype, _unchanged
    yield _cast(call), call, widened


def _takes_dtype(call: Call) -> bool:
    """Return whether an operation has an argument for the dtype of its result, which was not given."""
    names = [argument.name for argument in call.function._schema.arguments]
    is_given = call.keywords.get("dtype") is not None or len(call.arguments) == len(names)
    return "dtype" in names and not is_given and call.name in ("sum", "mean", "prod", "cumsum", "cumprod")


def _cast(call: Call) -> str:
    if call.name in _CAST_BY_AUTOCAST:
        return "with torch.autocast(device, enabled=False):  # around the line, with x.float() of each input"
    if call.name.endswith("_"):
        return f"x = x.float()  # of each input; {call.name.rstrip('_')} in place of {call.name}, which writes float16"
    return f"x.float()  # of each input, before {call.name}"


def propose_for_constant(call: Call, value: float) -> Proposal:
    """Return the smallest change with which an operation is finite that got a constant beyond float16."""
    reason = _why_not_again(call)
    if reason:
        return Proposal("", reason)
    if value < 0:  # a mask
        limit = torch.finfo(torch.float16).min
        found = run_again(call, with_number(value, limit))
        if found is not None and found.is_finite:
            return Proposal(f"torch.finfo(torch.float16).min  # in place of {value:g}", _finite(call, found))
    found = run_again(call, widened)
    if found is not None and found.is_finite:
        return Proposal(_cast(call), _finite(call, found))
    return Proposal("", _why_none_holds(call))


def propose_for_epsilon(call: Call, run: Callable[[float, _Change], Any], epsilon: float) -> Proposal:
    """Return the smallest change with which a division by a lost epsilon is finite.

    Args:
        call: the division.
        run: returns its result with an epsilon and a change of all float16 inputs, or None.
        epsilon: the one that float16 does not have.
    """
    for larger in _EPSILONS:
        found = range_of(_floating(run(larger, _unchanged)))
        if found.is_finite:
            return Proposal(f"an epsilon of {larger:g} in place of {epsilon:g}", _finite(call, found))
    found = range_of(_floating(run(epsilon, widened)))
    if found.is_finite:
        return Proposal(f"x.float() + {epsilon:g}  # and the division in float32", _finite(call, found))
    return Proposal("", _why_none_holds(call))


def _why_not_again(call: Call) -> str:
    """Return why an operation must not run again; empty if it may."""
    if call.function.namespace != "aten":
        return f"not run again: {call.name} is no operation of torch's own"
    return ""


def _finite(call: Call, found: Range) -> str:
    limit = torch.finfo(torch.float16).max
    proof = f"{call.label}, run again on the same inputs with this change, is finite: {found}"
    is_beyond = max(abs(found.smallest), abs(found.largest)) > limit
    return f"{proof}; float16 ends at {limit:.0f}, so its result stays in float32" if is_beyond else proof


def _why_none_holds(call: Call) -> str:
    """Return why an operation is not finite with any change."""
    for tensor in _floating((call.arguments, call.keywords)):
        if not range_of([tensor]).is_finite:
            return f"no change of policy holds: an input of {call.label} is inf or NaN already"
    found = run_again(call, widened)
    if found is None:
        return f"no change of policy was found: {call.label} does not run in float32"
    return f"no change of policy holds: {call.label} is inf or NaN in float32 too; make its inputs smaller"
