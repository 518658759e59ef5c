"""Calls of torch in an optimizer's step, made pure: equal ones that read no tensor on the host.

Where a class reads a tensor (`step.item()`) it gets a number that is a tensor (`Number`), and if it branches on one,
the run gets an answer (`Decisions`). Where it gives torch such a number, the result is that with a number of Python, to
the rounding: tests/optim/test_number.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from funcamp import _upstream
from funcamp._optim.decisions import Decisions
from funcamp._optim.number import Number, as_number, has_number, numbers_to_tensors
from funcamp._optim.scalar_arguments import call_on_tensors, tensor_of
from funcamp._scaler.precision import widen
from funcamp._tree import settled
from funcamp._types import Args, Kwargs, Operation

#: In-place calls of torch.optim without a batching rule; tests/upstream/test_upstream.py fails when one gets a rule.
_UNBATCHED = ("addcdiv_", "addcmul_", "clamp_", "lerp_", "square_")

#: Operations whose scalar results are worth storing; none of them returns a view.
_ARITHMETIC = {
    "add", "sub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "norm", "clamp", "maximum", "minimum", "reciprocal",
    "__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rtruediv__", "__rpow__",
}  # fmt: skip

#: Operators on tensors and numbers, without the underscores of a method's name and of one in place.
_OPERATORS = {"add", "sub", "mul", "div", "truediv", "pow", "floordiv", "mod"}
_OPERATORS |= {f"{side}{name}" for side in "ri" for name in _OPERATORS}
_OPERATORS |= {"true_divide", "floor_divide", "remainder", "fmod"}

#: For each function of lists the method that computes the same of one tensor.
_METHODS_OF_ONE = {
    name: name for name in ("add", "sub", "mul", "div", "pow", "lerp", "addcmul", "addcdiv", "clamp_min", "clamp_max")
}
_METHODS_OF_ONE |= {"maximum": "clamp_min", "minimum": "clamp_max"}

_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"} | {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}

#: Functions that raise for infinite and NaN arguments, which a step has that is skipped, and a path that is not taken.
_DECOMPOSITIONS = {"eigh", "eigvalsh", "eig", "eigvals", "svd", "svdvals", "pca_lowrank", "svd_lowrank", "lstsq"}
_DECOMPOSITIONS |= {"pinv", "cholesky", "cond"}
#: Functions that make a tensor of one number, such as a counter of shape (1,).
_FILLED = {"zeros", "ones", "empty", "full"}
#: Functions whose result has as many elements as values decide.
_OF_UNKNOWN_SIZE = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"}
#: Functions that raise for a probability or a rate that is no number.
_DRAWS_BY_NUMBERS = {"bernoulli", "multinomial", "poisson"}


def _are_equal(tensor: Tensor, other: Tensor) -> Tensor:
    """Return what `torch.equal` does, as a tensor."""
    if tensor.shape != other.shape:
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    return (tensor == other).all()


def _are_close(*args: Any, **options: Any) -> Tensor:
    """Return what `torch.allclose` does, as a tensor."""
    return torch.isclose(*args, **options).all()


#: Functions that return a bool of Python, and what computes it as a tensor: the condition of a question.
_CONDITIONS: dict[str, Callable[..., Tensor]] = {"equal": _are_equal, "allclose": _are_close}
#: Methods by which Python reads a tensor's value as its own.
_READS = {"__float__", "__int__", "__index__", "__complex__", "tolist", "__array__", "numpy"}
#: Calls that return a value of Python.
_PYTHON_VALUES = _READS | {"item", "__bool__"} | _CONDITIONS.keys()
#: Calls that read or set an attribute of a tensor.
_ATTRIBUTES = {"__get__", "__set__", "requires_grad_"}
#: What reads and sets `requires_grad`, and reads `data`.
_GETS_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_SETS_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_GETS_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]

#: Stands for the result of a call that torch makes as it is.
_AS_IN_TORCH = object()


class PureCalls(TorchFunctionMode):
    """Replaces torch.optim calls that are not pure or not traceable by equal ones.

    `item` returns a number whose value is a float64 tensor: the same arithmetic, without a read. Numbers among a call's
    arguments may be tensors, which torch's kernels would read (`scalar_arguments`). An in-place call or one with out=
    that has no batching rule becomes its functional twin; otherwise vmap would loop or fail. With `settle`, scalars
    (bias corrections) are computed once instead of once per element of a parameter.
    """

    def __init__(self, settle: bool, params: list[Tensor], batched: list[Tensor], decisions: Decisions) -> None:
        super().__init__()
        self._settle = settle
        self._param_ids = frozenset(map(id, params))
        self._has_no_values = bool(params) and params[0].device.type == "meta"
        self._batched = batched
        self._decisions = decisions

    def __torch_function__(self, func: Operation, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        result = self._run(func, args, dict(kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        is_new = not any(isinstance(arg, Tensor) for arg in args)
        is_filled = getattr(func, "__name__", "") in _FILLED and "device" not in (kwargs or {})
        if is_filled and self._has_no_values and result.dim():
            result = result.to("meta")  # on the CPU, as parameters may be that stand behind those without values
        if is_new and self._batched:
            result = batched_like(self._batched, result)  # a new counter
        if self._settle and getattr(func, "__name__", "") in _ARITHMETIC and result.dim() == 0:
            return settled(result)
        return result

    def _run(self, func: Operation, args: Args, kwargs: Kwargs) -> Any:
        """Return the result of a call of torch, from an equal call that reads nothing on the host."""
        name = getattr(func, "__name__", "")
        result: Any = _AS_IN_TORCH
        if name in _PYTHON_VALUES:
            result = self._python_value(name, args, kwargs)
        elif name in _ATTRIBUTES and args:
            result = self._attribute(func, args[0])
        elif name in ("tensor", "as_tensor") and has_number(args[0]):
            if _are_whole(args[0]):
                kwargs.setdefault("dtype", torch.int64)
            result = tensor_of(numbers_to_tensors(args[0]), **kwargs)
        elif name in _OF_UNKNOWN_SIZE or (name == "__getitem__" and _selects_by_mask(args[1])):
            self._decisions.refuse_class(
                "its step selects elements by their values (x[mask], nonzero), so that their number is not known; use "
                "torch.where"
            )
        elif name in ("__getitem__", "__setitem__") and isinstance(args[1], Number):
            result = _at_place(*args)
        if result is not _AS_IN_TORCH:
            return result
        args = _safe_arguments(name, args, kwargs)
        if has_number(args) or any(has_number(value) for value in kwargs.values()):
            return self._with_numbers(func, name, args, kwargs)
        call = call_on_tensors(name, args, kwargs)
        if call is not None:
            return call()
        return _with_batching_rule(func, name, args, kwargs)

    def _with_numbers(self, func: Operation, name: str, args: Args, kwargs: Kwargs) -> Any:
        """Return the result of a call with numbers among its arguments."""
        args, kwargs = _named_numbers(name, args, kwargs)
        if name.startswith("_foreach_"):
            return self._of_each(name, args, kwargs)
        if name.strip("_") in _OPERATORS and not kwargs and _are_scalars_of_one_device(args):
            return _on_scalars(func, name, args)
        call = call_on_tensors(name, numbers_to_tensors(args), numbers_to_tensors(kwargs))
        if call is not None:
            return call()
        return _with_batching_rule(func, name, *_with_tensors(args, kwargs))

    def _of_each(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """Return the results of a function of lists with a number, which it would read: of one tensor after another.

        Raises:
            TypeError: it is not known which method of a tensor computes the same.
        """
        name_of_one = name.removeprefix("_foreach_")
        is_in_place = name_of_one.endswith("_")
        method = _METHODS_OF_ONE.get(name_of_one.removesuffix("_"))
        if method is None or not isinstance(args[0], (list, tuple)):
            self._decisions.refuse_class(
                f"its step gives torch.{name} a number that changes in training; call the function of one tensor"
            )
        function = getattr(torch.Tensor, method + "_" * is_in_place)
        results = []
        for index in range(len(args[0])):
            arguments = [arg[index] if isinstance(arg, (list, tuple)) else arg for arg in args]
            options = dict(kwargs)
            if method in ("addcmul", "addcdiv") and len(arguments) == 4:
                options["value"] = arguments.pop()
            results.append(self._run(function, tuple(arguments), options))
        return None if is_in_place else tuple(results)

    def _python_value(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """Return what a call returns to Python: a number, or the answer to a question.

        Raises:
            TypeError: it reads a tensor in another way.
        """
        if name in _CONDITIONS:
            return self._decisions.ask(self._decisions.new_key(), lambda: _CONDITIONS[name](*args, **kwargs), True)
        tensor = args[0]
        if name in ("item", "tolist") and tensor.is_complex():
            self._decisions.refuse_class("its step reads a complex number in Python; compute with the tensor, x.real")
        if name == "item" or (name == "tolist" and tensor.dim() == 0):
            example = self._decisions.unknown_example
            return as_number("a tensor's item()", example, widen(tensor).clone(), self._decisions)
        if name == "__bool__" and tensor.numel() == 1:
            return self._decisions.ask(self._decisions.new_key(), lambda: (tensor != 0).reshape(()), True)
        is_truthful_answer = name == "numpy" and tensor.dtype == torch.bool  # `Decisions` reads a bool in a trial
        if name not in _READS or is_truthful_answer:
            return _AS_IN_TORCH
        return self._decisions.refuse_class(
            f"its step reads a tensor in Python ({name.strip('_')}); use it in an ordinary loop with funcamp.GradScaler"
        )

    def _attribute(self, func: Operation, tensor: Tensor) -> Any:
        """Return the result of a call that reads or sets an attribute, if it is another one here than in torch.

        Raises:
            TypeError: it sets requires_grad of a parameter.
        """
        if func == _GETS_DATA:
            return tensor.detach()  # the same, but writing into it shows (`versions_of`)
        if id(tensor) not in self._param_ids:
            return _AS_IN_TORCH
        if func == _GETS_REQUIRES_GRAD:
            return True  # as of a user's parameters; here they are tensors that nothing differentiates
        if func == _SETS_REQUIRES_GRAD or getattr(func, "__name__", "") == "requires_grad_":
            self._decisions.refuse_class(
                "its step sets requires_grad of a parameter; use it in an ordinary loop with funcamp.GradScaler"
            )
        return _AS_IN_TORCH


def _are_whole(numbers: object) -> bool:
    """Return whether numbers, also in lists, are whole numbers in Python."""
    if isinstance(numbers, (tuple, list)):
        return all(map(_are_whole, numbers))
    return numbers.is_integral if isinstance(numbers, Number) else isinstance(numbers, int)


def _selects_by_mask(index: object) -> bool:
    """Return whether an index selects the elements at which a tensor of bools is True."""
    if isinstance(index, tuple):
        return any(map(_selects_by_mask, index))
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _at_place(tensor: Tensor, place: Number, *values: Any) -> Tensor | None:
    """Return what a tensor has at a place, or put a value there; as an index torch would read the number."""
    index = place.tensor.long().remainder(tensor.shape[0]).reshape(1)
    if not values:
        return tensor.index_select(0, index).squeeze(0)
    value = torch.as_tensor(values[0], dtype=tensor.dtype, device=tensor.device)
    tensor.index_copy_(0, index, value.expand(tensor.shape[1:]).unsqueeze(0))
    return None


def _decomposes(name: str, arguments: Sequence[object]) -> bool:
    """Return whether a function raises for a matrix that is not finite."""
    if name.removeprefix("linalg_") in _DECOMPOSITIONS:
        return True
    singular_values = (2, -2, "nuc") if name in ("linalg_norm", "linalg_matrix_norm") else ("nuc",)
    is_norm = name.endswith("norm")
    return is_norm and any(
        isinstance(argument, (int, float, str)) and argument in singular_values for argument in arguments
    )


def _safe_arguments(name: str, args: Args, kwargs: Kwargs) -> Args:
    """Return the arguments of a call, changed if it would compare in a wider dtype or raise for infinite values."""
    if name in _COMPARISONS and args[0].is_floating_point() and isinstance(args[1], Number):
        # As torch rounds a Python number. Under vmap, and for two tensors of shape (), it would compare in
        # float64: Rprop finds no element that it has set to etaminus.
        return (args[0], args[1].tensor.to(args[0].dtype))
    if _decomposes(name, [*args[1:2], kwargs.get("ord"), kwargs.get("p")]) and args[0].dim() >= 2:
        matrix = args[0]
        identity = torch.eye(*matrix.shape[-2:], dtype=matrix.dtype, device=matrix.device)
        return (torch.where(matrix.isfinite().all(), matrix, identity), *args[1:])
    if name in _DRAWS_BY_NUMBERS:
        return (torch.where(args[0].isfinite(), args[0], 1), *args[1:])
    return args


def _named_numbers(name: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return arguments in which a factor has its name: torch takes it as the second one, too, in old code."""
    argument = {"add": "alpha", "sub": "alpha", "addcmul": "value", "addcdiv": "value"}.get(name.removesuffix("_"))
    if argument is None or len(args) < 3 or isinstance(args[1], Tensor) or argument in kwargs:
        return args, kwargs
    tensor, factor, *others = args
    return (tensor, *others), {**kwargs, argument: factor}


def _are_scalars_of_one_device(args: Args) -> bool:
    """Return whether there are tensors of shape (), and they and the numbers are on one device."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    devices = {tensor.device for tensor in numbers_to_tensors(args) if isinstance(tensor, Tensor)}
    return bool(tensors) and len(devices) == 1 and all(tensor.dim() == 0 for tensor in tensors)


def _on_scalars(func: Operation, name: str, args: Args) -> Tensor:
    """Return the result of an operator on tensors of shape () and numbers.

    torch rounds a number of Python to the dtype of no tensor, and so it does with a tensor of shape () beside one that
    has elements; beside another of shape () it would.
    """
    dtype = _dtype_beside_whole_numbers(args)
    vectors = [arg.unsqueeze(0) if isinstance(arg, Tensor) else numbers_to_tensors(arg, dtype) for arg in args]
    is_in_place = name.startswith("__i") or (name.endswith("_") and not name.startswith("__"))
    if not is_in_place:
        result: Tensor = func(*vectors)
        return result.squeeze(0).clone()  # no view: a class may write into it
    functional = getattr(torch.Tensor, name.strip("_").removeprefix("i"))
    new_value: Tensor = functional(*vectors)
    base: Tensor = args[0]
    return base.copy_(new_value.squeeze(0))


def _with_tensors(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return arguments with tensors for numbers, which do not widen the result, as Python's numbers do not."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    dtype = _dtype_beside_whole_numbers(args)
    floating_dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if len(floating_dtypes) == 1 and all(tensor.dim() == 0 for tensor in tensors):
        (dtype,) = floating_dtypes
    return numbers_to_tensors(args, dtype), numbers_to_tensors(kwargs, dtype)


def _dtype_beside_whole_numbers(args: Args) -> torch.dtype | None:
    """Return the dtype that torch gives numbers of Python if all tensors beside them are whole numbers; else None."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if not tensors or any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
        return None
    are_whole = all(arg.is_integral for arg in args if isinstance(arg, Number))
    return torch.int64 if are_whole else torch.get_default_dtype()


def _with_batching_rule(func: Operation, name: str, args: Args, kwargs: Kwargs) -> Any:
    """Return the result of a call of torch; of its functional twin, if it writes and has no batching rule."""
    if name == "__setitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
        target, mask, value = args
        of_elements = mask.reshape((*mask.shape, *[1] * (target.dim() - mask.dim())))  # a mask may be one of rows
        return target.copy_(torch.where(of_elements, value, target))
    if name in _UNBATCHED and _upstream.is_batched(args[0]):
        functional = getattr(torch.Tensor, name.removesuffix("_"))
        return args[0].copy_(functional(*args, **kwargs))
    out = kwargs.get("out")
    if isinstance(out, Tensor) and _upstream.is_batched(out):
        del kwargs["out"]
        return out.copy_(func(*args, **kwargs))
    return func(*args, **kwargs)


def batched_like(batched: list[Tensor], value: Tensor) -> Tensor:
    """Batch a value over the dimensions of these tensors, because vmap writes in place only into batched tensors."""
    for tensor in batched:
        value = torch.where(torch.ones_like(tensor, dtype=torch.bool), value, value)
    return value
