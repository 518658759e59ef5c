"""torch's calls while a class's step runs.

What it reads of a tensor is a `ChangingNumber`. Where it gives torch a `ChangingNumber`, the tensor behind it computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from funcamp import _tree
from funcamp._optim.arithmetic import NARROW, add, addcdiv, addcmul, lerp, plus
from funcamp._optim.foreign.number import ChangingNumber, Run, value_of

_READS = {"__float__", "__int__", "__index__", "tolist", "__array__", "numpy"}
#: torch's functions that take no tensor in place of a number, with the keyword for it.
_TAKES_A_FLOAT: dict[tuple[str, str], Callable[..., Tensor]] = {
    ("add", "alpha"): lambda x, other, *, alpha: add(x, other, alpha),
    ("sub", "alpha"): lambda x, other, *, alpha: add(x, other, -alpha),
    ("addcmul", "value"): lambda x, tensor1, tensor2, *, value: addcmul(x, tensor1, tensor2, value),
    ("addcdiv", "value"): lambda x, tensor1, tensor2, *, value: addcdiv(x, tensor1, tensor2, value),
    ("lerp", ""): lambda x, end, weight: lerp(x, end, weight),
    ("full_like", ""): lambda x, fill_value, **options: plus(torch.zeros_like(x, **options), fill_value),
    ("full", ""): lambda size, fill_value, **options: plus(torch.zeros(size, **options), fill_value),
}
#: Functions that raise for a matrix that is not finite, which a skipped step has.
_DECOMPOSITIONS = {"eigh", "eigvalsh", "eig", "eigvals", "svd", "svdvals", "lstsq", "pinv", "cholesky", "svd_lowrank"}


class Calls(Run, TorchFunctionMode):
    """torch's calls in one run of a step."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = dict(kwargs or {})
        if name == "item":
            return ChangingNumber(args[0].clone(), self)
        if name == "__bool__":
            return self.ask(args[0] != 0)
        if name in _READS:
            self.refuse("reads a tensor in Python")
        if name.removeprefix("linalg_") in _DECOMPOSITIONS:
            args = (_finite(args[0]), *args[1:])
        if not _has_number(args) and not _has_number(kwargs.values()):  # most calls: a pytree would take as long
            return func(*args, **kwargs)
        if name.startswith("_foreach"):
            self.refuse(f"gives torch.{name} a number that changes in training; pass foreach=False")
        return _with_numbers(func, name, args, kwargs)


def _with_numbers(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return the result of a call with numbers among its arguments, rounded as torch rounds beside numbers."""
    leaves, spec = _tree.flatten((args, kwargs))
    floats = [leaf for leaf in leaves if _is_float(leaf)]
    with_dims = [leaf for leaf in floats if leaf.dim()]
    dtypes = [leaf.dtype for leaf in with_dims or floats]
    dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype()
    base = name.rstrip("_")
    keyword = next((each for each in ("alpha", "value") if each in kwargs), "")
    if (base, keyword) in _TAKES_A_FLOAT:
        promoted = [leaf.to(dtype) if _is_float(leaf) else value_of(leaf) for leaf in leaves]
        new_args, new_kwargs = _tree.unflatten(promoted, spec)
        result = _TAKES_A_FLOAT[base, keyword](*new_args, **new_kwargs)
        return result if base == name else args[0].copy_(result)
    # Beside a tensor with dimensions a number decides no dtype; beside others it is as wide as torch computes.
    computed_in = torch.float32 if dtype in NARROW else dtype.to_real()
    number_dtype = torch.float64 if with_dims else computed_in
    values = [leaf.tensor.to(number_dtype) if isinstance(leaf, ChangingNumber) else leaf for leaf in leaves]
    new_args, new_kwargs = _tree.unflatten(values, spec)
    result = func(*new_args, **new_kwargs)
    is_wider = dtype in NARROW and isinstance(result, Tensor) and result.dtype == computed_in
    return result.to(dtype) if is_wider and not with_dims else result


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _finite(matrix: Tensor) -> Tensor:
    identity = torch.eye(*matrix.shape[-2:], dtype=matrix.dtype, device=matrix.device)
    return torch.where(matrix.isfinite().all(), matrix, identity)


def _has_number(values: Iterable[Any]) -> bool:
    return any(
        isinstance(value, ChangingNumber) or (isinstance(value, (tuple, list)) and _has_number(value))
        for value in values
    )
