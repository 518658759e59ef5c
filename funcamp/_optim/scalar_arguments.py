"""Functions of torch that take Python numbers, on tensors of shape () instead: the same formulas.

torch's kernels read such a tensor on the host. The formulas here compute float16 and bfloat16 in float32 and
round once, as the kernels do. In float32 the kernels may add a product in one rounding, so that the results
can differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NARROW = (torch.float16, torch.bfloat16)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _NARROW else tensor


def _times(tensor: Tensor, factor: Any) -> Tensor:
    """Multiply in the tensor's dtype; a tensor of shape () times float64 would become float64."""
    product: Tensor = tensor * factor
    return product.to(tensor.dtype)


def _sum(base: Tensor, term: Tensor, in_place: bool) -> Tensor:
    """Add a term that is in float32 if the base is narrower."""
    if in_place:
        return base.add_(term)  # computes in the wider dtype and rounds to the base's
    total: Tensor = _wide(base) + term
    return total.to(base.dtype)


def _add(in_place: bool, base: Tensor, other: Any, *, alpha: Any) -> Tensor:
    if not isinstance(other, Tensor):
        return _sum(base, other * alpha, in_place)
    # Promotion comes before the product: Muon adds bfloat16 to float32.
    dtype = torch.result_type(base, other)
    base = base if in_place else base.to(dtype)
    return _sum(base, _times(_wide(other.to(dtype)), alpha), in_place)


def _sub(in_place: bool, base: Tensor, other: Any, *, alpha: Any) -> Tensor:
    return _add(in_place, base, other, alpha=-alpha)


def _addcmul(in_place: bool, base: Tensor, left: Tensor, right: Tensor, *, value: Any) -> Tensor:
    return _sum(base, _times(_wide(left), value) * _wide(right), in_place)


def _addcdiv(in_place: bool, base: Tensor, left: Tensor, right: Tensor, *, value: Any) -> Tensor:
    return _sum(base, _times(_wide(left), value) / _wide(right), in_place)


def _lerp(in_place: bool, start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    wide = _wide(start)
    result = torch.lerp(wide, end.to(wide.dtype), weight.to(wide.dtype)).to(start.dtype)
    return start.copy_(result) if in_place else result


def _addmm(in_place: bool, base: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    product = _times(_wide(left) @ _wide(right), alpha)
    result = (_times(_wide(base), beta) + product).to(base.dtype)
    return base.copy_(result) if in_place else result


def _clamp(in_place: bool, base: Tensor, min: Any = None, max: Any = None) -> Tensor:  # noqa: A002  torch's names
    bounds = []
    for bound in (min, max):
        if bound is not None and not isinstance(bound, Tensor):
            bound = torch.full((), bound, dtype=base.dtype, device=base.device)
        bounds.append(bound.to(base.dtype) if isinstance(bound, Tensor) else None)
    result = torch.clamp(base, *bounds)
    return base.copy_(result) if in_place else result


def _full_like(_: bool, like: Tensor, fill_value: Tensor, **options: Any) -> Tensor:
    zeros = torch.zeros_like(like, **options)
    return zeros + fill_value.to(zeros.dtype)


def _new_full(_: bool, like: Tensor, size: Any, fill_value: Tensor, **options: Any) -> Tensor:
    zeros = like.new_zeros(size, **options)
    return zeros + fill_value.to(zeros.dtype)


def _full(_: bool, size: Any, fill_value: Tensor, **options: Any) -> Tensor:
    zeros = torch.zeros(size, **options)
    return zeros + fill_value.to(zeros.dtype)


def tensor_of(numbers: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    """Return `torch.tensor` of numbers that are tensors; its dtype is that of Python numbers."""
    if isinstance(numbers, (tuple, list)):
        return torch.stack([tensor_of(item, dtype=dtype, device=device) for item in numbers])
    if not isinstance(numbers, Tensor):
        return torch.tensor(numbers, dtype=dtype, device=device)
    return numbers.to(device=device, dtype=dtype or torch.get_default_dtype(), copy=True)


#: The formula for each function, and the arguments that torch wants as numbers. An in-place function has the
#: name with an underscore.
_FORMULAS: dict[str, tuple[Callable[..., Any], tuple[int | str, ...]]] = {
    "add": (_add, ("alpha",)),
    "sub": (_sub, ("alpha",)),
    "addcmul": (_addcmul, ("value",)),
    "addcdiv": (_addcdiv, ("value",)),
    "lerp": (_lerp, (2, "weight")),
    "addmm": (_addmm, ("beta", "alpha")),
    "clamp": (_clamp, (1, 2, "min", "max")),
    "full_like": (_full_like, (1, "fill_value")),
    "new_full": (_new_full, (2, "fill_value")),
    "full": (_full, (1, "fill_value")),
}


def formula(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return a call that computes a function of torch with tensors for numbers; None if it has none."""
    in_place = name.endswith("_") and not name.startswith("_")
    compute, places = _FORMULAS.get(name[:-1] if in_place else name, (None, ()))
    if compute is None:
        return None
    for place in places:
        if isinstance(place, int):
            value = args[place] if place < len(args) else None
        else:
            value = kwargs.get(place)
        if isinstance(value, Tensor) and value.dim() == 0:
            return lambda: compute(in_place, *args, **kwargs)
    return None
