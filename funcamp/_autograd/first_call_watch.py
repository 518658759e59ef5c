"""Watch the first call of a module's loss for tensors that are not the values passed.

A step calls the module with other tensors than its own. What the module or the criterion keeps of its own parameters
and buffers (in a list, a dict, a closure, as an alias) has the values of before `init` at every step, and a write into
the tensors passed is neither undone by a skipped step nor seen by an optimizer that reads the full precision. The first
call runs under a mode of torch that sees every operation. Later calls run without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from funcamp import _tree, _upstream
from funcamp._memory import extent
from funcamp._trace.schema import aliased
from funcamp._trace.user_line import in_stack

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    FakeTensor = _upstream.find("torch._subclasses.fake_tensor.FakeTensor")
    TorchDispatchMode = _upstream.find("torch.utils._python_dispatch.TorchDispatchMode")

_DEVICE = torch.ops.prim.device.default
_WITH_STORAGE = (Tensor, nn.Parameter, FakeTensor)


class Place(NamedTuple):
    """The bytes of a tensor in its storage."""

    start: int
    end: int
    name: str


class Places:
    """Where named tensors are in memory, by storage; finds the name of a tensor that shares bytes with one of them.

    A weak reference to each storage keeps its address from being used again, and does not keep its memory alive.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._storages: dict[int, StorageWeakRef] = {}
        self._places: dict[int, list[Place]] = {}
        for name, tensor in tensors.items():
            tensor = _without_transforms(tensor)
            if type(tensor) in _WITH_STORAGE and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                self._storages.setdefault(storage._cdata, StorageWeakRef(storage))
                self._places.setdefault(storage._cdata, []).append(Place(*_bytes_in_storage(tensor), name))

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor that shares memory with this one, if there is one."""
        if type(tensor) not in _WITH_STORAGE or tensor.layout != torch.strided:
            return None
        places = self._places.get(tensor.untyped_storage()._cdata, ())
        start, end = _bytes_in_storage(tensor) if places else (0, 0)
        return next((place.name for place in places if place.start < end and start < place.end), None)

    def without_storages_of(self, other: Places) -> Places:
        """Return these places without the storages that others are in too."""
        left = Places({})
        for cdata in self._storages.keys() - other._storages.keys():
            left._storages[cdata], left._places[cdata] = self._storages[cdata], self._places[cdata]
        return left

    def storages(self) -> list[int]:
        """Return the storages, for a comparison with later."""
        return list(self._places)


class FirstCallWatch(TorchDispatchMode):
    """Refuses operations that read a module's own tensors, or write the values passed as its parameters.

    Args:
        own: the module's own parameters and buffers for which values are passed.
        own_places: where these were in memory when the loss was made.
        parameters: the values passed as parameters.
        buffers: the values passed as buffers, which the module may write.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        own: Mapping[str, Tensor],
        own_places: Places,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._written = Places(parameters)
        passed = Places({**parameters, **buffers})
        # With init(consume=True) the module's own tensors are in the memory of the values: only the objects differ.
        self._read = [places.without_storages_of(passed) for places in (own_places, Places(own))]
        passed_objects = {id(value) for value in (*parameters.values(), *buffers.values())}
        self._own_objects = {id(value): name for name, value in own.items() if id(value) not in passed_objects}
        self._views: list[Any] = []
        """Views of own tensors, kept so that no other tensor gets their id."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return func(*args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)
        name = self._name_of_own(args, kwargs)
        if name is not None and not _reads_no_value(func):
            if schema is None or schema.is_mutable or not any(result.alias_info for result in schema.returns):
                raise ValueError(
                    "module_loss: model's parameters and buffers must be read of the model when the loss is called, "
                    f"as model.parameters() in the criterion; got {name!r} as a tensor kept from before "
                    f"by {in_stack()}, whose values no step changes: read it in the call, or keep a clone() if it is a "
                    "constant"
                )
        if schema is not None and schema.is_mutable:
            for leaf in aliased(func, args, kwargs or {}, written=True):
                written = self._written.name_of(leaf) if isinstance(leaf, Tensor) else None
                if written is not None:
                    raise written_error(written, f", at {in_stack()}")
        out = func(*args, **(kwargs or {}))
        if name is not None and not _reads_no_value(func):  # a view
            for leaf in _tree.leaves(out):
                self._own_objects[id(leaf)] = name
                self._views.append(leaf)
        return out

    def _name_of_own(self, args: Any, kwargs: Any) -> str | None:
        for leaf in _tree.leaves((args, kwargs)):
            if not isinstance(leaf, Tensor):
                continue
            found = self._own_objects.get(id(leaf)) or next(filter(None, (at.name_of(leaf) for at in self._read)), None)
            if found is not None:
                return found
        return None


def written_error(name: str, where: str = "") -> ValueError:
    """Return the error for a forward pass that writes a parameter."""
    return ValueError(
        f"module_loss: model must not write to its parameters in the forward pass; it wrote to {name!r} or another one "
        f"in the same memory{where}, which a skipped step could not undo: compute with a changed copy, or write into "
        "the state between steps"
    )


def _reads_no_value(func: Any) -> bool:
    """Return whether an operation takes only shape, dtype and device of a tensor (new_zeros, zeros_like)."""
    name = getattr(getattr(func, "_schema", None), "name", "").removeprefix("aten::")
    return name.startswith("new_") or name.endswith("_like") or name in ("sym_size", "sym_stride", "is_same_size")


def _bytes_in_storage(tensor: Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + extent(tensor)


def _without_transforms(tensor: Tensor) -> Tensor:
    while _upstream.is_wrapped(tensor):
        tensor = _upstream.unwrapped(tensor)
    return tensor
