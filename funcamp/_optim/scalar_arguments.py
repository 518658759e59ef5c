"""Functions of torch that take Python numbers, on tensors of shape () instead: the same formulas.

torch's kernels read such a tensor on the host. The formulas here compute float16 and bfloat16 in float32 and
round where the kernels do: once, and on a CPU `alpha` too. In float32 the kernels may add a product in one
rounding, so that the results can differ in the last bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcamp._types import Args, Kwargs

_NARROW = (torch.float16, torch.bfloat16)

#: What torch takes as a number only.
_Scalar: TypeAlias = float | Tensor


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in the dtype in which torch's kernels compute."""
    return tensor.float() if tensor.dtype in _NARROW else tensor


def _times(tensor: Tensor, factor: _Scalar) -> Tensor:
    """Multiply in the tensor's dtype; a tensor of shape () times float64 would become float64."""
    return tensor * (factor.to(tensor.dtype) if isinstance(factor, Tensor) else factor)


def _sum(base: Tensor, term: Tensor, in_place: bool) -> Tensor:
    """Add a term, which may be in float32 if the base is narrower."""
    if in_place:
        return base.add_(term)  # computes in the wider dtype and rounds to the base's
    total: Tensor = _wide(base) + term
    return total.to(base.dtype)


def _add(in_place: bool, base: Tensor, other: Any, *, alpha: _Scalar) -> Tensor:
    # Promotion comes before the product: Muon adds bfloat16 to float32.
    dtype = torch.result_type(base, other)
    if not isinstance(other, Tensor):
        other = torch.full((), other, dtype=dtype, device=base.device)
    if not in_place:
        base = base.to(dtype)
    other = other.to(dtype)
    if dtype not in _NARROW or base.device.type != "cpu":
        return _sum(base, _times(_wide(other), alpha), in_place)
    alpha = alpha.to(dtype) if isinstance(alpha, Tensor) else alpha
    # The kernel has other code for less than a vector: it rounds the product too.
    is_single = base.numel() == 1
    return _sum(base, _times(other if is_single else _wide(other), alpha), in_place)


def _sub(in_place: bool, base: Tensor, other: Any, *, alpha: _Scalar) -> Tensor:
    return _add(in_place, base, other, alpha=-alpha)


def _addcmul(in_place: bool, base: Tensor, left: Tensor, right: Tensor, *, value: _Scalar) -> Tensor:
    return _sum(base, _times(_wide(left), value) * _wide(right), in_place)


def _addcdiv(in_place: bool, base: Tensor, left: Tensor, right: Tensor, *, value: _Scalar) -> Tensor:
    return _sum(base, _times(_wide(left), value) / _wide(right), in_place)


def _lerp(in_place: bool, start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    wide_start = _wide(start)
    wide_result = torch.lerp(wide_start, end.to(wide_start.dtype), weight.to(wide_start.dtype))
    result = wide_result.to(start.dtype)
    return start.copy_(result) if in_place else result


def _addmm(
    in_place: bool, base: Tensor, left: Tensor, right: Tensor, *, beta: _Scalar = 1, alpha: _Scalar = 1
) -> Tensor:
    wide_product = _times(_wide(left) @ _wide(right), alpha)
    wide_result = _times(_wide(base), beta) + wide_product
    result = wide_result.to(base.dtype)
    return base.copy_(result) if in_place else result


def _clamp(
    in_place: bool,
    base: Tensor,
    min: _Scalar | None = None,  # noqa: A002  torch's names
    max: _Scalar | None = None,  # noqa: A002
) -> Tensor:
    result = torch.clamp(base, _bound(base, min), _bound(base, max))
    return base.copy_(result) if in_place else result


def _bound(base: Tensor, bound: _Scalar | None) -> Tensor | None:
    """Return a bound as a tensor of the clamped one's dtype."""
    if bound is None:
        return None
    if isinstance(bound, Tensor):
        return bound.to(base.dtype)
    return torch.full((), bound, dtype=base.dtype, device=base.device)


def _full_like(_: bool, like: Tensor, fill_value: Tensor, **options: Any) -> Tensor:
    zeros = torch.zeros_like(like, **options)
    return zeros + fill_value.to(zeros.dtype)


def _new_full(_: bool, like: Tensor, size: Any, fill_value: Tensor, **options: Any) -> Tensor:
    zeros = like.new_zeros(size, **options)
    return zeros + fill_value.to(zeros.dtype)


def _full(_: bool, size: Any, fill_value: Tensor, **options: Any) -> Tensor:
    zeros = torch.zeros(size, **options)
    return zeros + fill_value.to(zeros.dtype)


def tensor_of(
    numbers: Any, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None, **_: object
) -> Tensor:
    """Return `torch.tensor` of numbers that are tensors; its dtype is that of Python numbers."""
    if isinstance(numbers, (tuple, list)):
        return torch.stack([tensor_of(item, dtype=dtype, device=device) for item in numbers])
    if not isinstance(numbers, Tensor):
        return torch.tensor(numbers, dtype=dtype, device=device)
    return numbers.to(device=device, dtype=dtype or torch.get_default_dtype(), copy=True)


class _Formula(NamedTuple):
    """A function of torch on tensors of shape () for numbers."""

    compute: Callable[..., Tensor]
    """Takes whether the call is in place, then the arguments of torch's function."""
    number_arguments: tuple[int | str, ...]
    """The arguments that torch wants as numbers: positions, and names if they may be passed by name."""


#: The formula for each function. An in-place function has the name with an underscore.
_FORMULAS: dict[str, _Formula] = {
    "add": _Formula(_add, ("alpha",)),
    "sub": _Formula(_sub, ("alpha",)),
    "addcmul": _Formula(_addcmul, ("value",)),
    "addcdiv": _Formula(_addcdiv, ("value",)),
    "lerp": _Formula(_lerp, (2, "weight")),
    "addmm": _Formula(_addmm, ("beta", "alpha")),
    "clamp": _Formula(_clamp, (1, 2, "min", "max")),
    "full_like": _Formula(_full_like, (1, "fill_value")),
    "new_full": _Formula(_new_full, (2, "fill_value")),
    "full": _Formula(_full, (1, "fill_value")),
}


def call_on_tensors(name: str, args: Args, kwargs: Kwargs) -> Callable[[], Tensor] | None:
    """Return a call that computes a function of torch with tensors for numbers; None if it has none."""
    in_place = name.endswith("_") and not name.startswith("_")
    formula = _FORMULAS.get(name.removesuffix("_") if in_place else name)
    if formula is None:
        return None
    for argument in formula.number_arguments:
        if isinstance(argument, int):
            value = args[argument] if argument < len(args) else None
        else:
            value = kwargs.get(argument)
        if isinstance(value, Tensor) and value.dim() == 0:
            return functools.partial(formula.compute, in_place, *args, **kwargs)
    return None
