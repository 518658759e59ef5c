"""Warn if a module is read after steps have moved a state on and not the module that the state began with."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcamp._memory import version_of

#: Its method `__exit__` does nothing, whatever it is called with: copies have it in the place of the hook.
_NULL = contextlib.nullcontext()


class TensorSlot(NamedTuple):
    """Where a module has a parameter or buffer."""

    owner: dict[str, Tensor | None]
    """The dict of parameters or of buffers of one module."""
    key: str
    """Its name there."""

    @classmethod
    def of(cls, module: nn.Module, name: str) -> TensorSlot:
        """Return where a module has the parameter or buffer of a dotted name."""
        path, _, key = name.rpartition(".")
        layer = module.get_submodule(path)
        owner: Any = layer._parameters if key in layer._parameters else layer._buffers
        return cls(owner, key)

    def tensor(self) -> Tensor | None:
        """Return the tensor that is there now."""
        if self.key not in self.owner:  # those of a scripted layer have no `get`
            return None
        found: Tensor | None = self.owner[self.key]
        return found

    def mark(self, *, with_version: bool = True) -> object:
        """Return what changes if another tensor comes here, or, with the version, if the tensor is written."""
        tensor = self.tensor()
        if tensor is None:
            return None
        # A later tensor may have the id of one that is gone, and not the reference to it.
        return id(tensor), version_of(tensor) if with_version else None, weakref.ref(tensor)


class LeftBehind:
    """The hook of a module before a forward pass and a `state_dict()`, which also sees a copy and a pickle.

    The module is behind from a step until the caller writes into its parameters, as a donated step does if the two
    share memory. It warns once in that time, however often it is read.
    """

    def __init__(self, module: nn.Module) -> None:
        self._class_name = type(module).__name__
        module.register_forward_pre_hook(self)
        module.register_state_dict_pre_hook(self)  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, module: nn.Module) -> LeftBehind:
        """Return the hook of a module: one for all of its losses."""
        own_hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, cls)]
        return own_hooks[0] if own_hooks else cls(module)

    def state_was_made(self, parameter: TensorSlot, buffers: Mapping[str, TensorSlot], *, shares_memory: bool) -> None:
        """Note that a state begins with the values of the module.

        Args:
            parameter: where the module has a trainable parameter. Whoever writes new weights writes this one.
            buffers: where it has the buffers that the step has in the state, by name.
            shares_memory: whether the state begins in the memory of the module.
        """
        self._parameter = parameter
        self._buffers = buffers
        self._is_behind = False
        self._has_warned = False
        tensor = parameter.tensor()
        self._shared_address = tensor.data_ptr() if shares_memory and tensor is not None else None
        """Where the parameter is in the memory of the state; None if it is elsewhere."""
        self._has_version = True
        """Whether the version of the parameter tells who wrote it."""
        self._parameter_mark = None if shares_memory else parameter.mark()
        self._buffer_marks = self._marks_of_buffers()

    def values_are_back(self) -> None:
        """Note that the tensors of the module were written, and that each has its former values again."""
        if self._parameter_mark is not None:
            self._parameter_mark = self._mark_of_parameter()
        self._buffer_marks = self._marks_of_buffers()

    def state_moves(self) -> None:
        """Note that a step moves the state on; warn if the caller has written what the step does not read."""
        tensor = self._parameter.tensor()
        if self._shared_address is not None and tensor is not None and tensor.data_ptr() != self._shared_address:
            # It got other memory (`Module.half`), but counts its versions with the state's, which each step writes.
            self._shared_address, self._has_version = None, False
        parameter_mark, buffer_marks = self._mark_of_parameter(), self._marks_of_buffers()
        if parameter_mark != self._parameter_mark:
            if not self._is_behind and self._parameter_mark is not None:
                self._warn_of_parameters()
            self._has_warned = False  # new values were written into the module: the state's, or those of a donated step
        elif buffer_marks != self._buffer_marks:
            changes = zip(self._buffers, self._buffer_marks, buffer_marks)
            self._warn_of_buffer(next(name for name, before, now in changes if now != before))
        self._is_behind = True
        self._parameter_mark = parameter_mark
        self._buffer_marks = buffer_marks

    def __call__(self, *_: object) -> None:
        """Warn before a forward pass and before a `state_dict()`."""
        if not torch.compiler.is_dynamo_compiling():
            self._warn()

    def __reduce__(self) -> tuple[object, ...]:
        """Warn before a copy or a pickle, which gets a function of Python that does nothing in place of the hook."""
        self._warn()
        return getattr, (_NULL, "__exit__")

    def _warn(self) -> None:
        """Warn if the module is behind. In a step, or with a state's values, it has another parameter in this place."""
        if not self._is_behind or self._has_warned or self._mark_of_parameter() != self._parameter_mark:
            return
        self._has_warned = True
        warnings.warn(
            f"module_loss: {self._class_name} has older values than the state, as the steps changed the state and not "
            "the module: evaluate, copy and save it in `with step.evaluating(state) as model:`, or write the state's "
            "values into it after the last step, model.load_state_dict(loss_fn.state_dict(state.params, "
            "state.buffers)); another step gets them in its batch, step.compute_params(state)",
            stacklevel=3,
        )

    def _mark_of_parameter(self) -> object:
        return self._parameter.mark(with_version=self._has_version)

    def _marks_of_buffers(self) -> list[object]:
        return [slot.mark() for slot in self._buffers.values()]

    def _warn_of_parameters(self) -> None:
        warnings.warn(
            f"module_loss: parameters of {self._class_name} were written after init, which changes nothing for the "
            "step, whose parameters are in the state: load them before step.init()",
            stacklevel=5,
        )

    def _warn_of_buffer(self, name: str) -> None:
        warnings.warn(
            f"module_loss: buffer {name!r} of {self._class_name} was written after init, which changes nothing for the "
            f"step, whose buffers are in the state: write state.buffers[{name!r}].fill_(...) between steps, or keep a "
            "number that you change in a tensor that is no buffer, self.beta = torch.tensor(1.0), or in the batch",
            stacklevel=5,
        )
