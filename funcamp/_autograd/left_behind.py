"""Warn if a module is read after steps have moved a state on and not the module that the state began with."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping

import torch
from torch import nn

from funcamp._autograd.module_walk import TensorSlot


class LeftBehind:
    """The hook of a module before a forward pass and a `state_dict()`, which also sees a copy and a pickle.

    The module is behind from a step until the caller writes into its parameters, as a donated step does if the two
    share memory. It warns once in that time, however often it is read.

    Args:
        module: the module, which gets the hook.
        parameter: where it has one of its trainable parameters. Whoever writes new weights writes this one.
    """

    @classmethod
    def of(cls, module: nn.Module, parameter: TensorSlot) -> LeftBehind:
        """Return the hook of a module: one for all of its losses."""
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, cls):
                hook._parameter = parameter
                return hook
        return cls(module, parameter)

    def __init__(self, module: nn.Module, parameter: TensorSlot) -> None:
        self._class_name = type(module).__name__
        self._parameter = parameter
        self._mark_at_step: object = None
        """The parameter's mark when the last step moved the state on; None if the module is not behind."""
        self._mark_at_warning: object = None
        module.register_forward_pre_hook(self)
        module.register_state_dict_pre_hook(self)  # type: ignore[no-untyped-call]

    def state_was_made(self) -> None:
        """Note that a state begins with the values of the module."""
        self._mark_at_step = self._mark_at_warning = None

    def state_moves(self) -> None:
        """Note that a step moves the state on."""
        mark = self._parameter.mark()
        self._mark_at_step = None if mark == self._mark_at_warning else mark

    def __call__(self, module: nn.Module, *arguments: object) -> None:
        """Warn before a forward pass, of which a hook gets one argument, and before a `state_dict()`."""
        is_forward = len(arguments) == 1
        if torch.compiler.is_dynamo_compiling() or (is_forward and self._may_be_trained(module)):
            return
        self._warn()

    def __reduce__(self) -> tuple[object, ...]:
        """Warn before a copy or a pickle, which gets a function of Python that does nothing in place of the hook."""
        self._warn()
        return getattr, (contextlib.nullcontext(), "__exit__")

    def _may_be_trained(self, module: nn.Module) -> bool:
        """Return whether a forward pass may be that of another loop, which trains the module itself."""
        parameter = self._parameter.tensor()
        trains = module.training and torch.is_grad_enabled()
        return trains and parameter is not None and parameter.requires_grad

    def _warn(self) -> None:
        """Warn if the module is behind. In a step, or with a state's values, it has another parameter in this place."""
        if self._mark_at_step is None or self._mark_at_step != self._parameter.mark():
            return
        self._mark_at_warning, self._mark_at_step = self._mark_at_step, None
        warnings.warn(
            f"module_loss: {self._class_name} has older values than the state, as the steps changed the state and not "
            "the module: evaluate, copy and save it in `with step.evaluating(state) as model:`, or write the state's "
            "values into it after the last step, model.load_state_dict(loss_fn.state_dict(state.params, "
            "state.buffers)); another step gets them in its batch, step.compute_params(state)",
            stacklevel=3,
        )


class BuffersOfCaller:
    """Whether the caller writes into buffers of a module after `init`, when the state has its own.

    Args:
        parameter: as in `LeftBehind`: values that are written into the module as a whole are the state's.
        buffers: where the module has its buffers, by name.
        shares_memory: whether the state begins in the memory of the module.
    """

    def __init__(self, parameter: TensorSlot, buffers: Mapping[str, TensorSlot], *, shares_memory: bool) -> None:
        self._parameter = parameter
        # BatchNorm writes these in a forward pass that has nothing to do with the step.
        statistics = ("running_mean", "running_var", "num_batches_tracked")
        self._buffers = {name: slot for name, slot in buffers.items() if slot.key not in statistics}
        self._marks = None if shares_memory else self._marks_now()

    def state_moves(self) -> None:
        """Warn if the caller has written into a buffer since the last call."""
        if not self._buffers:
            return
        before, self._marks = self._marks, self._marks_now()
        if before is None or before[-1] != self._marks[-1]:
            return
        for name, mark_before, mark in zip(self._buffers, before, self._marks):
            if mark != mark_before:
                warnings.warn(
                    f"module_loss: buffer {name!r} of the module was written after init, which changes nothing for the "
                    f"step, whose buffers are in the state: write state.buffers[{name!r}].fill_(...) between steps, or "
                    "keep a number that you change in a tensor that is no buffer, self.beta = torch.tensor(1.0), "
                    "or in the batch",
                    stacklevel=5,
                )

    def _marks_now(self) -> list[object]:
        return [slot.mark() for slot in (*self._buffers.values(), self._parameter)]
