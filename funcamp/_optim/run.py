"""Run one step of a torch.optim class as a pure function, without reading a tensor on the host.

The class's own constructor and `step` run on clones, in an instance created for the call, with the state put into it.
Numbers that change in training are tensors that the class takes for numbers (`Number`). Where it reads a tensor
(`step.item()`) it gets such a number, and if it branches on one, the run gets an answer (`Decisions`). `_Pure` does
this, for the current thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from funcamp import _upstream
from funcamp._optim.class_state import ClassState, Entries, Form
from funcamp._optim.decisions import Decisions
from funcamp._optim.hyperparameters import Hyper, map_items
from funcamp._optim.instance import (
    Change,
    begin_recording,
    changes_between,
    first_values,
    instance_of,
    put_state,
    set_in_group,
    step_of,
    versions_of,
)
from funcamp._optim.instance_state import InstanceState, read_state
from funcamp._optim.number import Number, as_number, has_number, numbers_to_tensors
from funcamp._optim.python_names import names_for_numbers
from funcamp._optim.scalar_arguments import call_on_tensors, tensor_of
from funcamp._scaler.precision import widen
from funcamp._trace.as_compiled import as_eager
from funcamp._tree import settled
from funcamp._types import Args, Kwargs, Operation

#: In-place calls of torch.optim without a batching rule; tests/upstream/test_upstream.py fails when one gets a rule.
_UNBATCHED = ("addcdiv_", "addcmul_", "clamp_", "lerp_", "square_")

#: With more tensors than _FEW_TENSORS, scalars are left to the compiler, because one buffer for each would be too many.
#: Except on a CPU with at least _MANY_ELEMENTS on average, where a power would be recomputed for every 16 of them.
_FEW_TENSORS = 16
_MANY_ELEMENTS = 1024

#: Devices on which torch.optim supports capturable=True and so keeps counters there. On others `_Pure` does.
_CAPTURABLE = ("cuda", "xpu", "hpu")

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


class _Pure(TorchFunctionMode):
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
        self._batched = batched
        self._decisions = decisions

    def __torch_function__(self, func: Operation, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        result = self._run(func, args, dict(kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        if self._batched and not any(isinstance(arg, Tensor) for arg in args):
            result = _batched_like(self._batched, result)  # a new counter
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
            result = tensor_of(numbers_to_tensors(args[0]), **kwargs)
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
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        are_scalars = all(tensor.dim() == 0 for tensor in tensors)
        if name.strip("_") in _OPERATORS and tensors and are_scalars and not kwargs:
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
        target, mask, value = args  # in Rprop, with a mask of the same shape
        return target.copy_(torch.where(mask, value, target))
    if name in _UNBATCHED and _upstream.is_batched(args[0]):
        functional = getattr(torch.Tensor, name.removesuffix("_"))
        return args[0].copy_(functional(*args, **kwargs))
    out = kwargs.get("out")
    if isinstance(out, Tensor) and _upstream.is_batched(out):
        del kwargs["out"]
        return out.copy_(func(*args, **kwargs))
    return func(*args, **kwargs)


def refuse_differentiation(tensors: Iterable[Tensor]) -> None:
    """Raise ValueError if torch.func differentiates a tensor: the gradient would silently be zero."""
    for tensor in tensors:
        inner = tensor
        while _upstream.is_wrapped(inner):
            if _upstream.is_differentiated(inner):
                raise ValueError(
                    "update: params and grads must not be differentiated, as no gradient flows through a torch.optim "
                    f"step; detach them, or write the inner update by hand; got {type(tensor).__name__} under "
                    "torch.func.grad, vjp or jacrev"
                )
            inner = _upstream.unwrapped(inner)


def _settles_scalars(params: list[Tensor]) -> bool:
    """Return whether scalars are computed once, each in a buffer, instead of at each use."""
    if len(params) <= _FEW_TENSORS:
        return True
    element_count = sum(param.numel() for param in params)
    return params[0].device.type == "cpu" and element_count >= _MANY_ELEMENTS * len(params)


def _numbers(arguments: Kwargs, hyper: Hyper, decisions: Decisions) -> tuple[Kwargs, list[Tensor]]:
    """Return the hyperparameters as the class gets them, and those of their tensors that vmap batches."""
    batched: list[Tensor] = []

    def number(label: str, value: object, example: float) -> object:
        if not isinstance(value, Tensor):
            return value
        if _upstream.is_batched(value):
            batched.append(value)
        return as_number(
            label, example, value, decisions, decisions.key(("hyperparameter", label)), is_hyperparameter=True
        )

    numbers = {name: map_items(number, name, value, arguments.get(name)) for name, value in hyper.items()}
    return numbers, batched


def _batched_like(batched: list[Tensor], value: Tensor) -> Tensor:
    """Batch a value over the dimensions of these tensors, because vmap writes in place only into batched tensors."""
    for tensor in batched:
        value = torch.where(torch.ones_like(tensor, dtype=torch.bool), value, value)
    return value


class StepRun(NamedTuple):
    """The results of one run of a class's step."""

    params: list[Tensor]
    """The new parameters."""
    state: InstanceState
    """What the instance keeps after the step."""
    first_values: InstanceState
    """The first value of each part of that; nothing if a state was given."""
    changed: dict[str, Change]
    """What the step has changed of what all share and is not in the form, by name."""


def run_step(
    cls: type[torch.optim.Optimizer],
    arguments: Kwargs,
    hyper: Hyper,
    params: list[Tensor],
    grads: Sequence[Tensor | None],
    state: ClassState | None,
    form: Form | None,
    decisions: Decisions,
    *,
    writes_grads: bool = True,
    wide_counters: bool = True,
    constructs_with_numbers: bool = False,
    method: str | None = None,
    observe: Callable[[torch.optim.Optimizer], None] | None = None,
) -> StepRun:
    """Take one step of `cls(params, **arguments)` from a given state.

    Args:
        cls: the optimizer's class.
        arguments: Python values for its constructor; examples if a hyperparameter is a tensor.
        hyper: what is set in the parameter group of an instance, as a scheduler of torch does: the hyperparameters that
            are tensors of shape (), or tuples with such tensors.
        params: parameters, at least one.
        grads: their gradients, of the same shapes, or None; cast to the parameter's dtype.
        state: the state; None to start without one and record the first values.
        form: how the class stores it.
        decisions: the answers to its questions.
        writes_grads: whether the class writes into gradients, which are then cloned.
        wide_counters: whether to use float64 step counters inside, on a CPU.
        constructs_with_numbers: whether the constructor gets tensors for numbers, too: of a first state.
        method: the name of another method of the class to call, without arguments.
        observe: called with the instance before the step and after it: in a trial.
    """
    numbers, batched = _numbers(arguments, hyper, decisions)
    with torch.no_grad():
        new_params = _clones_with_grads(params, grads, batched, clone_grads=writes_grads)
        if "capturable" in arguments:
            arguments = arguments | {"capturable": new_params[0].device.type in _CAPTURABLE}
        pure = _Pure(_settles_scalars(new_params), new_params, batched, decisions)
        with names_for_numbers(cls, decisions), pure, as_eager(), decisions.raising_refusals():
            if constructs_with_numbers:
                arguments = arguments | {name: value for name, value in numbers.items() if name in arguments}
            optimizer = instance_of(cls, new_params, arguments)
            decisions.is_constructing = False
            set_in_group(optimizer, numbers)
            if state is None:
                begin_recording(optimizer)
            else:
                assert form is not None
                state_to_change = _clones_of(state, batched, wide_counters=wide_counters)
                put_state(optimizer, new_params, state_to_change, form, decisions)
            before = versions_of(optimizer, new_params)
            if observe is not None:
                observe(optimizer)
            (step_of(optimizer) if method is None else getattr(optimizer, method))()
            if observe is not None:
                observe(optimizer)
            after = versions_of(optimizer, new_params)
    for param in new_params:
        param.grad = None
    first = first_values(optimizer, new_params) if state is None else InstanceState([], {})
    return StepRun(new_params, read_state(optimizer, new_params), first, changes_between(before, after, form))


def constructed_state(
    cls: type[torch.optim.Optimizer],
    arguments: Kwargs,
    hyper: Hyper,
    params: list[Tensor],
    decisions: Decisions,
) -> InstanceState:
    """Return what a new instance keeps. Arguments as in `run_step`."""
    numbers, batched = _numbers(arguments, hyper, decisions)
    pure = _Pure(_settles_scalars(params), params, batched, decisions)
    with torch.no_grad(), names_for_numbers(cls, decisions), pure, as_eager(), decisions.raising_refusals():
        return read_state(instance_of(cls, params, arguments | numbers), params)


def _clones_with_grads(
    params: list[Tensor], grads: Sequence[Tensor | None], batched: list[Tensor], *, clone_grads: bool
) -> list[Tensor]:
    """Return clones of parameters, with the gradients in `grad`; without clone_grads these may be the caller's."""
    clones = [_batched_like(batched, param.detach().clone()) for param in params]
    for param, grad in zip(clones, grads):
        if grad is None:
            continue
        grad = _batched_like(batched, grad.detach().to(param.dtype))
        param.grad = grad.clone() if clone_grads else grad
    return clones


def _clones_of(state: ClassState, batched: list[Tensor], *, wide_counters: bool) -> ClassState:
    """Return a state that a class may write into."""

    def clones(entries: Entries) -> Entries:
        copies = {name: _batched_like(batched, value.clone()) for name, value in entries.items()}
        return {name: _widened_counter(name, value) for name, value in copies.items()} if wide_counters else copies

    return ClassState(list(map(clones, state.per_param)), clones(state.shared))


def _widened_counter(name: str, value: Tensor) -> Tensor:
    """Return a step counter in float64 on a CPU, any other entry of a state as it is.

    torch.optim takes powers of the step in Python floats, with capturable=True in float32.
    """
    # Not done in `item`, because torch.optim does not call it under torch.compile.
    if name == "step" and value.dim() == 0 and value.device.type == "cpu" and value.is_floating_point():
        return value.double()
    return value
