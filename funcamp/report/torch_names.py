"""What the report uses of torch beyond its public names, and how it replaces functions of torch for a time."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

#: The arguments of an operation, by position and by name.
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]


def _of_torch(name: str) -> Any:
    """Return a private object of torch."""
    try:
        return operator.attrgetter(name)(torch)
    except AttributeError as error:
        raise RuntimeError(
            f"funcamp: torch {torch.__version__} has no torch.{name}, so the report does not work; "
            "install a torch that funcamp is tested with, 2.11 to 2.15"
        ) from error


if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode

    DispatchMode = TorchDispatchMode
else:
    DispatchMode = _of_torch("utils._python_dispatch.TorchDispatchMode")

#: The modes that operations of this thread go through.
dispatch_modes: Callable[[], list[DispatchMode]] = _of_torch("utils._python_dispatch._get_current_dispatch_mode_stack")
#: The node of autograd that runs now; None outside of a backward pass.
current_node: Callable[[], Node | None] = _of_torch("_C._current_autograd_node")
#: The sequence number of the next node that autograd creates.
sequence_number: Callable[[], int] = _of_torch("autograd._get_sequence_nr")
#: Starts every backward pass.
run_engine: Callable[..., Any] = _of_torch("autograd._engine_run_backward")
is_tracing: Callable[[], bool] = _of_torch("_C._is_tracing")
#: Whether a transform of torch.func surrounds this call.
transforms_active: Callable[[], bool] = _of_torch("_C._are_functorch_transforms_active")
#: Whether a tensor is a wrapper of torch.func.
is_wrapped: Callable[[Tensor], bool] = _of_torch("_C._functorch.is_functorch_wrapped_tensor")

tree_leaves: Callable[[Any], list[Any]] = _of_torch("utils._pytree.tree_leaves")
tree_map: Callable[[Callable[[Any], Any], Any], Any] = _of_torch("utils._pytree.tree_map")

_without_function_modes = _of_torch("_C.DisableTorchFunction")
_without_dispatch_modes = _of_torch("_C._DisableTorchDispatch")


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Context manager: no mode sees the operations, neither the report's nor the script's."""
    with _without_function_modes(), _without_dispatch_modes():
        yield


def forget_replaced_functions() -> None:
    """Let torch.compile look at torch's functions anew: it keeps a table of those that it found, once per process."""
    trace_rules = sys.modules.get("torch._dynamo.trace_rules")
    if trace_rules is not None:
        trace_rules.clear_lru_cache()


_ABSENT = object()


@contextlib.contextmanager
def replaced(owner: object, **values: object) -> Iterator[None]:
    """Context manager: attributes of an object have these values, and afterwards the former ones.

    An attribute that the object only inherits is its own meanwhile, and inherited again afterwards.
    """
    before = {name: vars(owner).get(name, _ABSENT) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def with_subclasses(base: type) -> list[type]:
    """Return a class and all its subclasses, each once: a method is replaced in all that override it."""
    classes = [base]
    for known_class in classes:
        subclasses: list[type] = known_class.__subclasses__()
        classes += [subclass for subclass in subclasses if subclass not in classes]
    return classes


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module: float16."""
    return str(dtype).removeprefix("torch.")
