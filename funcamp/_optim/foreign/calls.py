"""torch's calls while a class's step runs.

What it reads of a tensor is a `Number`. Where it gives torch a `Number`, the tensor behind it computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from funcamp._optim.arithmetic import NARROW, like
from funcamp._optim.foreign.number import Number, RefusedError, location, value_of

_READS = {"__float__", "__int__", "__index__", "__complex__", "tolist", "__array__", "numpy"}
_OF_UNKNOWN_SIZE = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
#: Questions about tensors.
_CONDITIONS: dict[str, Callable[..., Tensor]] = {
    "__bool__": lambda x: x != 0,
    "equal": lambda x, y: (x == y).all(),
    "allclose": lambda *args, **options: torch.isclose(*args, **options).all(),
}
#: torch's functions that take a number only, as formulas of tensors.
_FORMULAS: dict[str, Callable[..., Tensor]] = {
    "add": lambda x, other, *, alpha: x + alpha * other,
    "sub": lambda x, other, *, alpha: x - alpha * other,
    "addcmul": lambda x, tensor1, tensor2, *, value: x + value * tensor1 * tensor2,
    "addcdiv": lambda x, tensor1, tensor2, *, value: x + value * tensor1 / tensor2,
    "addmm": lambda x, mat1, mat2, *, beta=1, alpha=1: beta * x + alpha * (mat1 @ mat2),
    "lerp": lambda x, end, weight: torch.lerp(x, end, weight),
    "clamp": lambda x, *bounds, **named: torch.clamp(x, *_bounds(x, bounds), **_bounds(x, named)),
    "full_like": lambda x, fill_value, **options: torch.zeros_like(x, **options) + fill_value,
    "full": lambda size, fill_value, **options: torch.zeros(size, **options) + fill_value,
    "fill": lambda x, value: torch.zeros_like(x) + value,
    "where": lambda condition, x, y: torch.where(condition, _like(y, x), _like(x, y)),
}
#: In old code the factor comes first: x.add_(number, y).
_FACTORS = {"add": "alpha", "sub": "alpha", "addcmul": "value", "addcdiv": "value"}
#: Functions that raise for a matrix that is not finite, which a skipped step has.
_DECOMPOSITIONS = {"eigh", "eigvalsh", "eig", "eigvals", "svd", "svdvals", "lstsq", "pinv", "cholesky", "svd_lowrank"}


class Calls(TorchFunctionMode):
    """torch's calls in one run of a step.

    Args:
        name: the class's, for errors.
        answers: the answers to the first questions of this run.
        asks_divisors: whether a division by 0 is a question.
    """

    def __init__(self, name: str, answers: tuple[bool, ...], *, asks_divisors: bool) -> None:
        super().__init__()
        self.asks_divisors = asks_divisors
        self.conditions: list[Tensor] = []
        self.path: list[bool] = []
        """The answers that this run got."""
        self.refusal: RefusedError | None = None
        """The first refusal, which the class may have caught."""
        self._name = name
        self._answers = answers
        self._known: list[tuple[tuple[object, ...], bool]] = []

    def refuse(self, what: str) -> NoReturn:
        """Raise the error for what a class does."""
        error = RefusedError(f"stateless: {self._name} cannot be made pure: its step {what} ({location()})")
        self.refusal = self.refusal or error
        raise error

    def ask(self, condition: Tensor, *numbers: object) -> bool:
        """Return the answer to a question; the same one to the same question about the same numbers."""
        for known, answer in self._known:
            if len(known) == len(numbers) and all(_is_same(*pair) for pair in zip(known, numbers)):
                return answer
        index = len(self.path)
        answer = self._answers[index] if index < len(self._answers) else True
        self.conditions.append(condition.reshape(()))
        self.path.append(answer)
        if numbers:
            self._known.append((numbers, answer))
        return answer

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "item" or (name == "tolist" and args[0].dim() == 0):
            return Number(args[0].clone(), self)
        if name in _CONDITIONS:
            return self.ask(_CONDITIONS[name](*args, **kwargs))
        if name in _READS:
            self.refuse("reads a tensor in Python")
        if name in _OF_UNKNOWN_SIZE or (name == "__getitem__" and _selects(args[1])):
            self.refuse("selects elements by their values")
        if name == "__setitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            return _masked(*args)
        if name.removeprefix("linalg_") in _DECOMPOSITIONS and isinstance(args[0], Tensor) and args[0].dim() >= 2:
            args = (_finite(args[0]), *args[1:])
        if not _has_number(args) and not _has_number(kwargs.values()):
            return func(*args, **kwargs)
        if name.startswith("_foreach"):
            self.refuse(f"gives torch.{name} a number that changes in training; pass foreach=False")
        return _with_numbers(func, name, args, kwargs)


def _with_numbers(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return the result of a call with numbers among its arguments, rounded as torch rounds beside numbers."""
    if name in ("tensor", "as_tensor", "scalar_tensor"):
        values = _map(value_of, args[0])
        if isinstance(values, list):
            values = torch.stack([torch.as_tensor(value) for value in values])
        return values.to(kwargs.get("device"), kwargs.get("dtype") or torch.get_default_dtype(), copy=True)
    is_in_place = name.startswith("__i") or (name.endswith("_") and not name.startswith("_"))
    base = name.strip("_")
    if name.startswith("__i"):
        base = base[1:]
    factor = _FACTORS.get(base)
    if factor and len(args) > 2 and not isinstance(args[1], Tensor) and factor not in kwargs:
        args, kwargs = (args[0], *args[2:]), {**kwargs, factor: args[1]}
    tensors = [item for item in _leaves((args, kwargs)) if isinstance(item, Tensor)]
    if not tensors and base not in _FORMULAS:  # torch.sqrt(number)
        return func(*_map(value_of, args), **_map(value_of, kwargs))
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype()
    if base in _FORMULAS and (factor is None or factor in kwargs):
        result = _by_formula(base, args, kwargs, dtype)
    else:
        if is_in_place:
            func = getattr(Tensor, f"__{base}__" if name.startswith("__") else base)
        is_decided = dtypes and base not in _COMPARISONS
        result = _beside_tensors(
            func, args, kwargs, tensors, torch.float64 if is_decided or dtype.is_complex else dtype
        )
    return args[0].copy_(result) if is_in_place else result


def _by_formula(name: str, args: Any, kwargs: Any, dtype: torch.dtype) -> Tensor:
    """Compute in float32 what is narrower, and round once, as torch's kernels do."""
    computed_in = torch.float32 if dtype in NARROW else dtype

    def widened(item: Any) -> Any:
        if isinstance(item, Number):
            if name in ("add", "sub") and dtype in NARROW and args[0].device.type == "cpu":
                return item.tensor.to(dtype).to(computed_in)  # as torch's kernel for a CPU
            return item.tensor if computed_in.is_complex else item.tensor.to(computed_in)
        return item.float() if isinstance(item, Tensor) and item.dtype in NARROW else item

    result = _FORMULAS[name](*_map(widened, args), **_map(widened, kwargs))
    return result.to(dtype) if result.dtype == computed_in else result


def _beside_tensors(func: Any, args: Any, kwargs: Any, tensors: list[Tensor], number_dtype: torch.dtype) -> Any:
    """Return the result of a call with tensors for numbers.

    Args:
        func: the function.
        args: its arguments, with numbers.
        kwargs: those by name.
        tensors: the tensors among them.
        number_dtype: the dtype of a tensor for a number; beside one with dimensions it does not decide.
    """

    def tensor_of(item: Any) -> Any:
        return item.tensor.to(number_dtype) if isinstance(item, Number) else item

    args, kwargs = _map(tensor_of, args), _map(tensor_of, kwargs)
    if any(tensor.dim() for tensor in tensors) or kwargs or not all(isinstance(arg, Tensor) for arg in args):
        return func(*args, **kwargs)
    # Beside another of shape () a tensor would decide the dtype.
    vectors = [arg.unsqueeze(0) if any(arg is tensor for tensor in tensors) else arg for arg in args]
    result = func(*vectors)
    return result.squeeze(0).clone() if isinstance(result, Tensor) and result.dim() else result


def _like(tensor: Any, bound: Any) -> Any:
    if bound is None or not isinstance(tensor, Tensor):
        return bound
    return like(bound, tensor)


def _bounds(tensor: Tensor, bounds: Any) -> Any:
    return _map(lambda bound: _like(tensor, bound), bounds)


def _finite(matrix: Tensor) -> Tensor:
    identity = torch.eye(*matrix.shape[-2:], dtype=matrix.dtype, device=matrix.device)
    return torch.where(matrix.isfinite().all(), matrix, identity)


def _masked(target: Tensor, mask: Tensor, value: Any) -> Tensor:
    """Write a value where a mask of the first dimensions is True."""
    mask = mask.reshape((*mask.shape, *[1] * (target.dim() - mask.dim())))
    return target.copy_(torch.where(mask, _like(target, value_of(value)), target))


def _selects(index: Any) -> bool:
    if isinstance(index, tuple):
        return any(map(_selects, index))
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _has_number(values: Iterable[Any]) -> bool:
    return any(
        isinstance(value, Number) or (isinstance(value, (tuple, list)) and _has_number(value)) for value in values
    )


def _is_same(one: object, other: object) -> bool:
    return one is other or (isinstance(one, (int, float)) and type(one) is type(other) and one == other)


def _map(fn: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_map(fn, item) for item in value])
    if isinstance(value, dict):
        return {name: _map(fn, item) for name, item in value.items()}
    return fn(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
