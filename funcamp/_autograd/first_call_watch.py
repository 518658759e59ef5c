"""Watch the first call of a module's loss for tensors that are not the values passed.

A step calls the module with other tensors than the module's own. If the module or the criterion keeps references to
the module's own parameters and buffers (in a list, a dict, a closure, as an alias), these have the values from before
`init` at every step. A write into the tensors passed is not undone by a skipped step. The first call runs under a mode
of torch that sees what it calls. Later calls run without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from funcamp import _upstream
from funcamp._autograd.named_storages import NamedStorages, share_memory
from funcamp._autograd.scaled_grad import nodes
from funcamp._trace.schema import aliased, reads_no_value
from funcamp._trace.tracing import LetsDynamoIn
from funcamp._trace.user_line import line_in_stack
from funcamp._tree import tensors_in
from funcamp._types import Args, Kwargs, Operation, Tree

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = _upstream.find("torch.utils._python_dispatch.TorchDispatchMode")

#: The device of a tensor, which is an operation in a trace and reads nothing.
_DEVICE = torch.ops.prim.device.default

#: Methods that read values and return no tensor.
_READ_VALUES = frozenset(
    ("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__", "__float__", "__int__", "__index__")
)
#: Methods that write no values, although they are named like an operator that does (`__iadd__`) or like one in place.
_WRITE_NOTHING = frozenset(
    ("__index__", "__int__", "__invert__", "__iter__", "requires_grad_", "detach_", "share_memory_")
)


class FirstCallWatch:
    """Refuses operations that read a module's own tensors, or write the values passed as its parameters.

    Args:
        own: the module's own parameters and buffers for which values are passed.
        own_at_creation: where these were in memory when the loss was made.
        parameters: the values passed as parameters.
        buffers: the values passed as buffers, which the module may write.
    """

    def __init__(
        self,
        own: Mapping[str, Tensor],
        own_at_creation: NamedStorages,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
    ) -> None:
        self._parameters = NamedStorages(parameters)
        # With init(consume=True) the module's own tensors are in the memory of the values: only the objects differ.
        passed_storages = NamedStorages({**parameters, **buffers})
        self._own_storages = (
            own_at_creation.without_storages_of(passed_storages),
            NamedStorages(own).without_storages_of(passed_storages),
        )
        """Where own tensors were and are, without the memory of the values passed."""
        passed_ids = {id(value) for value in (*parameters.values(), *buffers.values())}
        self._own_ids = {id(tensor): name for name, tensor in own.items() if id(tensor) not in passed_ids}
        """The names of own tensors and of their views, by id."""
        self._views: list[Tensor] = []
        """The views, so that no other tensor gets their id."""
        self._empty_ids = {id(value): name for name, value in buffers.items() if not value.numel()}
        """The names of buffers without elements, by id."""

    def mode(self, *, in_trace: bool) -> contextlib.AbstractContextManager[object]:
        """Return the context manager that watches.

        A trace dispatches every operation to Python anyway. In eager code that would choose other kernels (torch takes
        other ways through its composite operations if there is a dispatch mode), so there functions are watched.
        """
        return _DispatchWatch(self) if in_trace else _FunctionWatch(self)

    def check_graph(self, returned: Tree, arguments: Tree) -> None:
        """Raise ValueError if what a compiled module returned depends on an own tensor through autograd.

        Dynamo would compile a function that runs under a mode once more, so these are not watched.

        Args:
            returned: what the loss returned.
            arguments: what it was called with, whose own graphs do not count.
        """
        outside_nodes = {tensor.grad_fn for tensor in tensors_in(arguments)}
        for result in tensors_in(returned):
            for node in nodes(result.grad_fn, outside_nodes):
                # Only the node that accumulates the gradient of a leaf has a variable: the leaf.
                name = self._own_ids.get(id(getattr(node, "variable", None)))
                if name is not None:
                    self.refuse_read(name)

    def own_name(self, arguments: Tree) -> str | None:
        """Return the name of an own tensor among the arguments, or of one whose memory they share; None for no such."""
        for tensor in tensors_in(arguments):
            name = self._own_ids.get(id(tensor))
            if name is not None:
                return name
            for storages in self._own_storages:
                name = storages.name_of(tensor)
                if name is not None:
                    return name
        return None

    def note_views(self, name: str, returned: Tree) -> None:
        """Take what an operation returned for the own tensor of this name: it is this tensor, too."""
        for view in tensors_in(returned):
            self._own_ids[id(view)] = name
            self._views.append(view)

    def refuse_read(self, name: str) -> NoReturn:
        """Raise the error for a read of an own tensor."""
        raise ValueError(
            "module_loss: model's parameters and buffers must be read of the model when the loss is called, "
            f"as model.parameters() in the criterion; got {name!r} as a tensor kept from before "
            f"by {line_in_stack()}, whose values no step changes: read it in the call, or keep a clone() if it is "
            "a constant"
        )

    def refuse_resize(self, written: Iterable[object]) -> None:
        """Raise an error if an operation writes an empty buffer: it gives it a size, which no trace sees."""
        for argument in written:
            name = self._empty_ids.get(id(argument))
            if name is not None:
                raise ValueError(
                    f"module_loss: model must have the shapes of its buffers; {name!r} is empty, and "
                    "the first call fills it: call the model on a batch once, before init (after prepare_qat, too)"
                )

    def refuse_write(self, written: Tree) -> None:
        """Raise an error if one of these is in the memory of the parameters passed."""
        for tensor in tensors_in(written):
            name = self._parameters.name_of(tensor)
            if name is not None:
                raise written_error(name, f", at {line_in_stack()}")


class _DispatchWatch(LetsDynamoIn, TorchDispatchMode):
    """Watches every operation of a trace."""

    supports_higher_order_operators = True

    def __init__(self, watch: FirstCallWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self, func: Operation, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is _DEVICE:
            return func(*args, **kwargs)
        schema = getattr(func, "_schema", None)  # a higher-order operator has none
        own_name = self._watch.own_name((args, kwargs))
        if own_name is not None and reads_no_value(schema.name if schema else ""):
            own_name = None
        if own_name is not None and not _returns_views(schema):
            self._watch.refuse_read(own_name)
        if schema is not None and schema.is_mutable:
            written = aliased(func, args, kwargs, written=True)
            self._watch.refuse_write(written)
            self._watch.refuse_resize(written)
        returned = func(*args, **kwargs)
        if own_name is not None:
            self._watch.note_views(own_name, returned)
        return returned


def _returns_views(schema: torch.FunctionSchema | None) -> bool:
    """Return whether an operation writes nothing and returns views of its arguments."""
    if schema is None or schema.is_mutable:
        return False
    return any(result.alias_info for result in schema.returns)


class _FunctionWatch(TorchFunctionMode):
    """Watches every function of torch that Python calls."""

    def __init__(self, watch: FirstCallWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Operation, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        function_name = getattr(func, "__name__", "")
        own_name = self._watch.own_name((args, kwargs))
        if _writes(function_name):
            if own_name is not None:
                self._watch.refuse_read(own_name)
            self._watch.refuse_write(args[:1])
        if "out" in kwargs:
            self._watch.refuse_write(kwargs["out"])
        returned = func(*args, **kwargs)
        if own_name is None or reads_no_value(function_name):
            return returned
        results = tensors_in(returned)
        if function_name in _READ_VALUES or not share_memory(results, tensors_in((args, kwargs))):
            self._watch.refuse_read(own_name)
        self._watch.note_views(own_name, results)
        return returned


def _writes(function_name: str) -> bool:
    """Return whether a function of this name writes its first argument."""
    if function_name in _WRITE_NOTHING:
        return False
    if function_name == "__setitem__" or function_name.startswith("__i"):
        return True
    # One underscore at the end means in place in torch; two, a method of Python.
    return function_name.endswith("_") and not function_name.endswith("__")


def written_error(name: str, where: str = "") -> ValueError:
    """Return the error for a forward pass that writes a parameter."""
    return ValueError(
        f"module_loss: model must not write to its parameters in the forward pass; it wrote to {name!r} or another one "
        f"in the same memory{where}, which a skipped step could not undo: compute with a changed copy, or write into "
        "the state between steps"
    )
