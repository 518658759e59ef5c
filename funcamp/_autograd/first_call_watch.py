"""Watch the first call of a module's loss for tensors that are not the values passed.

A step calls the module with other tensors than its own. What the module or the criterion keeps of its own parameters
and buffers (in a list, a dict, a closure, as an alias) has the values of before `init` at every step, and a write into
the tensors passed is neither undone by a skipped step nor seen by an optimizer that reads the full precision. The first
call runs under a mode of torch that sees what it calls. Later calls run without it.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from funcamp import _tree, _upstream
from funcamp._autograd.scaled_grad import nodes
from funcamp._memory import extent
from funcamp._trace.schema import aliased, reads_no_value
from funcamp._trace.tracing import LetsDynamoIn
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
                self._storages.setdefault(storage._cdata, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
                self._places.setdefault(storage._cdata, []).append(Place(*_bytes_in_storage(tensor), name))

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor that shares memory with this one, if there is one."""
        tensor = _without_transforms(tensor)
        storage = _storage_of(tensor)
        places = () if storage is None else self._places.get(storage, ())
        start, end = _bytes_in_storage(tensor) if places else (0, 0)
        return next((place.name for place in places if place.start < end and start < place.end), None)

    def without_storages_of(self, other: Places) -> Places:
        """Return these places without the storages that others are in too."""
        left = Places({})
        for cdata in self._storages.keys() - other._storages.keys():
            left._storages[cdata], left._places[cdata] = self._storages[cdata], self._places[cdata]
        return left


class FirstCallWatch:
    """Refuses operations that read a module's own tensors, or write the values passed as its parameters.

    Args:
        own: the module's own parameters and buffers for which values are passed.
        own_places: where these were in memory when the loss was made.
        parameters: the values passed as parameters.
        buffers: the values passed as buffers, which the module may write.
    """

    def __init__(
        self,
        own: Mapping[str, Tensor],
        own_places: Places,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
    ) -> None:
        self._parameters = Places(parameters)
        passed = Places({**parameters, **buffers})
        # With init(consume=True) the module's own tensors are in the memory of the values: only the objects differ.
        self._own_places = [places.without_storages_of(passed) for places in (own_places, Places(own))]
        passed_objects = {id(value) for value in (*parameters.values(), *buffers.values())}
        self._own_objects = {id(value): name for name, value in own.items() if id(value) not in passed_objects}
        self.copies = _LowCopies(own, parameters)
        self._empty = {id(value): name for name, value in buffers.items() if not value.numel()}
        self._views: list[Any] = []
        """Views of own tensors, kept so that no other tensor gets their id."""

    def mode(self, *, in_trace: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context manager that watches.

        A trace dispatches every operation to Python anyway. In eager code that would choose other kernels (torch takes
        other ways through its composite operations if there is a dispatch mode), so there functions are watched.
        """
        stack = contextlib.ExitStack()
        stack.enter_context(_DispatchWatch(self) if in_trace else _FunctionWatch(self))
        if self.copies.exist:
            stack.enter_context(self.copies)
        return stack

    def check_graph(self, returned: Any, given: Any) -> None:
        """Raise ValueError if what a compiled module returned depends on an own tensor through autograd.

        Dynamo would compile a function that runs under a mode once more, so these are not watched.
        """
        outside = {leaf.grad_fn for leaf in _tree.leaves(given) if isinstance(leaf, Tensor)}
        for leaf in _tree.leaves(returned):
            for node in nodes(getattr(leaf, "grad_fn", None), outside):
                name = self._own_objects.get(id(getattr(node, "variable", None)))
                if name is not None:
                    self.refuse_read(name)

    def own_name(self, arguments: Any) -> str | None:
        """Return the name of an own tensor among the arguments, if there is one."""
        for leaf in _tree.leaves(arguments):
            if isinstance(leaf, Tensor):
                names = (places.name_of(leaf) for places in self._own_places)
                found = self._own_objects.get(id(leaf)) or next(filter(None, names), None)
                if found is not None:
                    return found
        return None

    def note_views(self, name: str, out: Any) -> None:
        """Take what an operation returned for the own tensor of this name."""
        for leaf in _tree.leaves(out):
            if isinstance(leaf, Tensor):
                self._own_objects[id(leaf)] = name
                self._views.append(leaf)

    def refuse_read(self, name: str) -> NoReturn:
        """Raise the error for a read of an own tensor."""
        raise ValueError(
            "module_loss: model's parameters and buffers must be read of the model when the loss is called, "
            f"as model.parameters() in the criterion; got {name!r} as a tensor kept from before "
            f"by {in_stack()}, whose values no step changes: read it in the call, or keep a clone() if it is a constant"
        )

    def refuse_resize(self, written: Any) -> None:
        """Raise an error if an operation writes an empty buffer: it gives it a size, which no trace sees."""
        for leaf in written:
            if id(leaf) in self._empty:
                raise ValueError(
                    f"module_loss: model must have the shapes of its buffers; {self._empty[id(leaf)]!r} is empty, and "
                    "the first call fills it: call the model on a batch once, before init (after prepare_qat, too)"
                )

    def refuse_write(self, written: Any) -> None:
        """Raise an error if one of these is in the memory of the parameters passed."""
        for leaf in _tree.leaves(written):
            name = self._parameters.name_of(leaf) if isinstance(leaf, Tensor) else None
            if name is not None:
                raise written_error(name, f", at {in_stack()}")


class _LowCopies(TorchFunctionMode):
    """The parameters that are passed in low precision, for a layer that autocast would cast them for.

    Other code that reads such a parameter, such as a penalty in the forward pass of a model, gets rounded values, and
    in torch's loop the full ones. Code that casts it to low precision itself gets the same.
    """

    def __init__(self, own: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []
        self._told: set[str] = set()
        for name, value in parameters.items():
            if name in own and value.dtype != own[name].dtype:
                self._note(name, value)

    @property
    def exist(self) -> bool:
        """Return whether there are any."""
        return bool(self._names)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        called = getattr(func, "__name__", "")
        if called in _CASTS and isinstance(out, Tensor):
            self._names.pop(id(out), None)  # a cast to the precision that it has
        if called in _PRODUCTS or called in _CASTS or reads_no_value(called):
            return out
        read = [leaf for leaf in _tree.leaves((args, kwargs)) if isinstance(leaf, Tensor) and id(leaf) in self._names]
        for name in {self._names[id(leaf)] for leaf in read}:
            results = [leaf for leaf in _tree.leaves(out) if isinstance(leaf, Tensor)]
            if _shares_memory(results, (args, kwargs)):
                for leaf in results:
                    self._note(name, leaf)
            elif name not in self._told and not _in_layer_of(name):
                self._told.add(name)
                warnings.warn(
                    f"module_loss: model reads {name!r} outside of the layer that multiplies by it, at {in_stack()}: "
                    "there a step has its low-precision copy, and torch's loop the full values: keep it, "
                    f"policy='...,keep={name}'",
                    stacklevel=2,
                )
        return out

    def _note(self, name: str, value: Tensor) -> None:
        self._names[id(value)] = name
        self._kept.append(value)  # so that no other tensor gets its id


#: Casts: what they return is in the precision that the code asks for.
_CASTS = frozenset(("to", "type", "type_as", "half", "bfloat16"))
#: Operations for which autocast casts, and functions that call them.
_PRODUCTS = frozenset(
    (
        *("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "einsum"),
        *("chain_matmul", "multi_head_attention_forward", "tensordot"),
    )
)


def _in_layer_of(name: str) -> bool:
    """Return whether the innermost module that is being called has a parameter of this name."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module):
            return name.rpartition(".")[2] in module._parameters
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _DispatchWatch(LetsDynamoIn, TorchDispatchMode):
    """Watches every operation of a trace."""

    supports_higher_order_operators = True

    def __init__(self, watch: FirstCallWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:
            return func(*args, **kwargs)
        schema = getattr(func, "_schema", None)
        name = self._watch.own_name((args, kwargs))
        if name is not None and reads_no_value(schema.name if schema else ""):
            name = None
        is_view = schema is not None and not schema.is_mutable and any(one.alias_info for one in schema.returns)
        if name is not None and not is_view:
            self._watch.refuse_read(name)
        if schema is not None and schema.is_mutable:
            written = aliased(func, args, kwargs, written=True)
            self._watch.refuse_write(written)
            self._watch.refuse_resize(written)
        out = func(*args, **kwargs)
        if name is not None:
            self._watch.note_views(name, out)
        return out


class _FunctionWatch(TorchFunctionMode):
    """Watches every function of torch that Python calls."""

    def __init__(self, watch: FirstCallWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        called = getattr(func, "__name__", "")
        name = self._watch.own_name((args, kwargs))
        if _writes(called):
            if name is not None:
                self._watch.refuse_read(name)
            self._watch.refuse_write(args[:1])
        if "out" in kwargs:
            self._watch.refuse_write(kwargs["out"])
        out = func(*args, **kwargs)
        if name is None or reads_no_value(called):
            return out
        results = [leaf for leaf in _tree.leaves(out) if isinstance(leaf, Tensor)]
        if called in _READS or not _shares_memory(results, (args, kwargs)):
            self._watch.refuse_read(name)
        self._watch.note_views(name, results)
        return out


def _shares_memory(results: list[Tensor], arguments: Any) -> bool:
    """Return whether all results are in the memory of arguments: views, or none at all."""
    sources = [leaf for leaf in _tree.leaves(arguments) if isinstance(leaf, Tensor)]
    storages = {storage for storage in map(_storage_of, sources) if storage is not None}
    return all(_storage_of(result) in storages for result in results)


#: Methods that read values and return no tensor.
_READS = frozenset(
    ("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__", "__float__", "__int__", "__index__")
)


def _writes(called: str) -> bool:
    """Return whether a function of this name writes its first argument."""
    if called.startswith("__i") and called not in ("__index__", "__int__", "__invert__", "__iter__"):
        return True
    in_place = called.endswith("_") and not called.endswith("__")
    return called == "__setitem__" or (in_place and called not in ("requires_grad_", "detach_", "share_memory_"))


def memory_of(value: Tensor) -> tuple[int, int | None]:
    """Return what changes if a tensor is written in place or is given other memory."""
    value = _without_transforms(value)
    return 0 if value.is_inference() else value._version, _storage_of(value)


def written_error(name: str, where: str = "") -> ValueError:
    """Return the error for a forward pass that writes a parameter."""
    return ValueError(
        f"module_loss: model must not write to its parameters in the forward pass; it wrote to {name!r} or another one "
        f"in the same memory{where}, which a skipped step could not undo: compute with a changed copy, or write into "
        "the state between steps"
    )


def _storage_of(tensor: Tensor) -> int | None:
    tensor = _without_transforms(tensor)
    if type(tensor) not in _WITH_STORAGE or tensor.layout != torch.strided:
        return None
    return int(tensor.untyped_storage()._cdata)


def _bytes_in_storage(tensor: Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + extent(tensor)


def _without_transforms(tensor: Tensor) -> Tensor:
    while _upstream.is_wrapped(tensor):
        tensor = _upstream.unwrapped(tensor)
    return tensor
