"""Run code while a module has other tensors than its own, in a forward or a backward pass."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from funcamp._autograd.module_tensors import ModuleTensors
from funcamp._autograd.passed_values import like_own_tensors

#: While a thread calls a module with other tensors, others wait: the tensors are put into the module itself.
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


class Holder(nn.Module):
    """The modules of a loss as one. Calls a function inside `functional_call`, without running a hook.

    Args:
        model: the module that the loss calls.
        made_of: the module that the loss was made of: the same, or that of which `model` is a copy with taps.
    """

    def __init__(self, model: nn.Module, made_of: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.made_of = made_of

    def __call__(self, run: Callable[[], Any]) -> Any:
        return run()


class TensorSwap:
    """Puts tensors into the modules of a loss for the time of one call.

    Args:
        model: the module that the loss calls.
        made_of: the module that the loss was made of.
        tensors: its tensors.
    """

    def __init__(self, model: nn.Module, made_of: nn.Module, tensors: ModuleTensors) -> None:
        self.holder = Holder(model, made_of)
        self._made_of = made_of
        self._is_of_copy = model is not made_of
        self._tensors = tensors
        self._recurrent_layers = recurrent_layers(self.holder)

    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context manager in which no other thread has its tensors in the module."""
        if torch.compiler.is_dynamo_compiling():
            return contextlib.nullcontext()
        return _locks.setdefault(self._made_of, threading.RLock())

    def run(self, values: dict[str, Tensor], call: Callable[[], Any]) -> Any:
        """Return what `call` returns while the modules have these values. Needs the lock.

        Args:
            values: parameters and buffers by the module's names. Afterwards it has the tensors that the modules had at
                the end, because a forward pass may assign a buffer.
            call: takes no argument.
        """
        passed = {f"model.{name}": value for name, value in values.items()}
        if self._is_of_copy:
            # The criterion may read the module that the loss was made of, which has no taps.
            for name in (*self._tensors.names, *self._tensors.buffer_names):
                if name in values:
                    passed[f"made_of.{name}"] = values[name]
        if torch.compiler.is_dynamo_compiling():
            returned = self._call(passed, call)
        else:
            try:
                with like_own_tensors(values, self._tensors.own()):
                    returned = self._call(passed, call)
            finally:
                self._reset_recurrent_layers()
        for name in values:
            values[name] = passed[f"model.{name}"]
        return returned

    def _call(self, passed: dict[str, Tensor], call: Callable[[], Any]) -> Any:
        # Without torch's tying, which would replace the two precisions of a tied tensor by one.
        return functional_call(self.holder, passed, (call,), tie_weights=False)

    def _reset_recurrent_layers(self) -> None:
        """Remove the call's tensors from the lists that recurrent layers keep of their last ones."""
        for layer in self._recurrent_layers:
            layer.__getstate__()  # type: ignore[no-untyped-call]


def recurrent_layers(model: nn.Module) -> list[nn.RNNBase]:
    """Return the layers that keep a list of the tensors of their last call."""
    return [module for module in model.modules() if isinstance(module, nn.RNNBase)]
