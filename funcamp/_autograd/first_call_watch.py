"""Watch the first call of a module's loss for tensors that are not the values passed.

A step calls the module with other tensors than its own. What the module or the criterion keeps of its own parameters
and buffers (in a list, a dict, a closure, as an alias) has the values of before `init` at every step, and a write into
the tensors passed is neither undone by a skipped step nor seen by an optimizer that reads the full precision. The first
call runs under a mode of torch that sees what it calls. Later calls run without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from funcamp import _tree, _upstream
from funcamp._autograd.low_copies import LowCopies
from funcamp._autograd.named_storages import NamedStorages, shares_memory
from funcamp._autograd.scaled_grad import nodes
from funcamp._trace.schema import aliased, reads_no_value
from funcamp._trace.tracing import LetsDynamoIn
from funcamp._trace.user_line import in_stack

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = _upstream.find("torch.utils._python_dispatch.TorchDispatchMode")

_DEVICE = torch.ops.prim.device.default


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
        own_places: NamedStorages,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
    ) -> None:
        self._parameters = NamedStorages(parameters)
        passed = NamedStorages({**parameters, **buffers})
        # With init(consume=True) the module's own tensors are in the memory of the values: only the objects differ.
        self._own_places = [places.without_storages_of(passed) for places in (own_places, NamedStorages(own))]
        passed_objects = {id(value) for value in (*parameters.values(), *buffers.values())}
        self._own_objects = {id(value): name for name, value in own.items() if id(value) not in passed_objects}
        self.copies = LowCopies(own, parameters)
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
        if called in _READS or not shares_memory(results, (args, kwargs)):
            self._watch.refuse_read(name)
        self._watch.note_views(name, results)
        return out


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


def written_error(name: str, where: str = "") -> ValueError:
    """Return the error for a forward pass that writes a parameter."""
    return ValueError(
        f"module_loss: model must not write to its parameters in the forward pass; it wrote to {name!r} or another one "
        f"in the same memory{where}, which a skipped step could not undo: compute with a changed copy, or write into "
        "the state between steps"
    )
