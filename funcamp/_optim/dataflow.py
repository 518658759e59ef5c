"""Which elements and which parameters a step brings together, from the operations that it calls.

A trial on a few numbers does not show it: a norm that is clipped at 1 has no effect on small gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._types import Args, Kwargs

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = _upstream.find("torch.utils._python_dispatch.TorchDispatchMode")

_Result = TypeVar("_Result")
#: An operation, and its arguments that are no tensors and no sizes.
OperationCall: TypeAlias = tuple[object, ...]

#: Operations that torch does not call pointwise, though each element of their result is of the same element of theirs.
_ALSO_POINTWISE = frozenset(
    (
        *("clone", "copy_", "copy", "detach", "detach_", "alias", "lift_fresh", "lift_fresh_copy", "_to_copy", "to"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "zero_", "fill_", "zeros", "ones", "full"),
        *(
            "empty",
            "scalar_tensor",
            "new_zeros",
            "new_ones",
            "new_full",
            "new_empty",
            "_local_scalar_dense",
            "nan_to_num",
        ),
        *("addcmul", "addcmul_", "addcdiv", "addcdiv_", "lerp", "lerp_", "where", "masked_fill", "masked_fill_"),
        *("view_as_real", "view_as_complex", "empty_strided", "resolve_conj", "is_same_size"),
    )
)
#: Elements of a constant whose bytes are compared.
_LARGEST_CONSTANT = 64
#: Functions of lists of tensors that join the elements of each.
_FOREACH_REDUCTIONS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


class Dataflow:
    """Which parameters each tensor depends on, and whether an operation mixes the elements of one.

    Args:
        groups: for each parameter its tensors: itself, its gradient, and its state.
        is_known: whether operations can be followed. If not, everything may depend on everything.
    """

    def __init__(self, groups: list[list[Tensor]], *, is_known: bool = True) -> None:
        self.is_pointwise = is_known
        """Whether each operation computes an element of its result from the same elements of its arguments."""
        self.draws = not is_known
        """Whether an operation draws random numbers."""
        self.has_nan = False
        """Whether an argument is NaN: what C takes out of a `Number`."""
        self.operations: list[OperationCall] = []
        """The operations, in order."""
        self.wrote_gradients = not is_known
        """Whether the step wrote into the gradients that it was given."""
        self._is_known = is_known
        self._sources: dict[int, frozenset[int]] = {}
        """The numbers of the parameters on which the memory of a tensor depends."""
        self._kept: list[Tensor] = []  # so that no other tensor gets the same memory
        for number, tensors in enumerate(groups):
            for tensor in tensors:
                self._add(tensor, frozenset([number]))

    def sources(self, tensor: Tensor) -> frozenset[int]:
        """Return the numbers of the parameters on which a tensor depends; -1 stands for others."""
        return self._sources.get(_memory(tensor), frozenset()) if self._is_known else frozenset([-1])

    def is_separable(self, groups: Iterable[Iterable[Tensor]]) -> bool:
        """Return whether the tensors of each parameter, in order, depend on no other parameter."""
        return not any(self.sources(tensor) - {number} for number, group in enumerate(groups) for tensor in group)

    def _add(self, tensor: Tensor, sources: frozenset[int]) -> None:
        self._kept.append(tensor)
        self._sources[_memory(tensor)] = self.sources(tensor) | sources

    def note(self, func: OpOverload, args: Args, kwargs: Kwargs, result: object) -> None:
        """Note an operation."""
        arguments = _tree.tensors_in((args, kwargs))
        sources: frozenset[int] = frozenset().union(*map(self.sources, arguments))
        name = func._schema.name.removeprefix("aten::")
        has_elements = any(argument.numel() > 1 for argument in arguments)
        if has_elements and not _is_pointwise(func, name):
            self.is_pointwise = False
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws = True
        constants = _constants((args, kwargs))
        if name == "lift_fresh":  # of torch.tensor
            constants += _contents(arguments[0])
        self.operations.append((func, *constants))
        self.has_nan = self.has_nan or any(
            isinstance(constant, float) and constant != constant for constant in constants
        )
        is_list = name.startswith("_foreach_")
        for written in (*_written(func, args), *_tree.tensors_in(result)):
            self._add(written, self.sources(written) if is_list else sources)
        if is_list:
            self._add_of_lists(args, _tree.tensors_in(result))

    def _add_of_lists(self, args: Args, results: list[Tensor]) -> None:
        """Follow a function of lists: the numbers in each list belong together."""
        lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]
        others = frozenset[int]().union(*[self.sources(arg) for arg in args if isinstance(arg, Tensor)])
        for index, tensor in enumerate(lists[0]):
            sources = others.union(*[self.sources(tensors[index]) for tensors in lists if index < len(tensors)])
            self._add(tensor, sources)
            if index < len(results):
                self._add(results[index], sources)


def _memory(tensor: Tensor) -> int:
    try:
        address: int = tensor.untyped_storage()._cdata
        return address
    except NotImplementedError:  # torch.func wraps it
        return id(tensor)


def _constants(value: object) -> list[object]:
    """Return the arguments that are no tensors and no sizes, dtypes and devices: what distinguishes two equal calls."""
    if isinstance(value, dict):
        return [constant for item in value.values() for constant in _constants(item)]
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(item, int) for item in value):
            return []  # a size
        return [constant for item in value for constant in _constants(item)]
    return [value] if isinstance(value, (bool, int, float, complex, str, type(None))) else []


def _contents(tensor: Tensor) -> list[object]:
    """Return the bytes of a small constant: a mode of the step would take its `tolist` for a read of the class."""
    has_values = tensor.numel() <= _LARGEST_CONSTANT and tensor.device.type == "cpu"
    return list(tensor.untyped_storage()) if has_values else []


def _written(func: OpOverload, args: Args) -> list[Tensor]:
    """Return the arguments that an operation writes into."""
    names = zip(func._schema.arguments, args)
    return [
        arg
        for argument, arg in names
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(arg, Tensor)
    ]


def _is_pointwise(func: OpOverload, name: str) -> bool:
    if name.startswith("_foreach_"):
        return not name.startswith(_FOREACH_REDUCTIONS)
    return name in _ALSO_POINTWISE or torch.Tag.pointwise in func.tags


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation in a flow."""

    def __init__(self, flow: Dataflow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flow = flow

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self._flow.note(func, args, kwargs or {}, result)
        return result


def can_follow() -> bool:
    """Return whether this torch has the mode that sees every operation."""
    return _upstream.usable(TorchDispatchMode)


def followed(groups: list[list[Tensor]], run: Callable[[], _Result]) -> tuple[Dataflow, _Result]:
    """Return the flow of data in a call, and its result. Groups as in `Dataflow`."""
    if not can_follow():
        return Dataflow(groups, is_known=False), run()
    flow = Dataflow(groups)
    with _Watch(flow):
        return flow, run()
