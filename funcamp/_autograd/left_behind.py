"""Warn once if a module is evaluated or saved outside of a step after steps have changed the state and not it."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

import torch
from torch import nn

from funcamp._autograd.module_walk import TensorSlot

#: What to do if the module is called outside of a step, if it is saved, and if the step of another module calls it.
_FIX_OUTSIDE = (
    "validate with step.loss(state, batch), or call "
    "model.load_state_dict(loss_fn.state_dict(state.params, state.buffers)) first"
)
_FIX_SAVING = (
    "save step.state_dict(state), or what torch's loop would save, step.to_torch(state), or call "
    "model.load_state_dict(loss_fn.state_dict(state.params, state.buffers)) first"
)
_FIX_IN_OTHER_STEP = (
    "pass its parameters to this step in the batch, step.compute_params(state), and call it by functional_call"
)


class _ThisThread(threading.local):
    #: What the current step trains: a module, or a loss without a module. None outside of a step.
    trained: object | None = None


_this_thread = _ThisThread()


@contextlib.contextmanager
def in_step_of(trained: object) -> Iterator[None]:
    """Context manager: this thread takes a step that trains this module, or this loss if it has no module."""
    trained_by_outer_step = _this_thread.trained
    _this_thread.trained = trained
    try:
        yield
    finally:
        _this_thread.trained = trained_by_outer_step


class LeftBehind:
    """The hooks before a forward pass and a `state_dict()` of a module that `init` made a state of.

    It is silent while a module that shares the state's memory follows a donated step, which counts as a write into its
    parameters, and after the caller has written other values into them. A copy of the module does not get it.

    Args:
        module: the module.
        slot: where it has one of its trainable parameters.
    """

    def __init__(self, module: nn.Module, slot: TensorSlot) -> None:
        parameter = slot.tensor()
        assert parameter is not None
        self._slot = slot
        self._parameter = parameter
        self._version = parameter._version
        self.a_step_was_taken = False
        self._before_forward = module.register_forward_pre_hook(self)
        self._before_saving = module.register_state_dict_pre_hook(self.saved)  # type: ignore[no-untyped-call]
        self._is_over = False
        """Whether it has warned, or the module has the caller's values."""
        module.register_load_state_dict_post_hook(self.loaded)  # type: ignore[no-untyped-call]

    def __call__(self, module: nn.Module, args: object) -> None:  # noqa: ARG002
        """Warn if a step was taken and nothing was written into the module since `init`."""
        if torch.compiler.is_dynamo_compiling() or not self.a_step_was_taken:
            return
        if module is _this_thread.trained or self._has_other_values():
            return
        # The criterion of another step may call it: a generator's its discriminator.
        in_other_step = _this_thread.trained is not None
        if not in_other_step and _is_trained_itself(module):
            return
        self.remove()
        self._warn(module, _FIX_IN_OTHER_STEP if in_other_step else _FIX_OUTSIDE)

    def saved(self, module: nn.Module, *_: object) -> None:
        """Warn as for a forward pass, before the caller gets a `state_dict()` of the module."""
        if torch.compiler.is_dynamo_compiling() or not self.a_step_was_taken or self._is_over:
            return
        if _this_thread.trained is None and not self._has_other_values():
            self._is_over = True
            self._before_forward.remove()  # not that of saving, over which torch iterates now
            self._warn(module, _FIX_SAVING)

    def _warn(self, module: nn.Module, fix: str) -> None:
        """Warn, unless the caller has put other values into the module, which the version counts."""
        if self._parameter._version == self._version:
            warnings.warn(
                f"module_loss: {type(module).__name__} has the values that it had at init, as the steps changed the "
                f"state and not the module: {fix}",
                stacklevel=3,
            )

    def __reduce__(self) -> tuple[object, ...]:
        return _OfACopy, ()

    def _has_other_values(self) -> bool:
        """Return whether the module is part of a model whose step has put its values there."""
        return self._slot.tensor() is not self._parameter

    def remove(self) -> None:
        """Take the hooks off the module. That of `load_state_dict` stays: torch may be iterating over its kind."""
        self._is_over = True
        self._before_forward.remove()
        self._before_saving.remove()

    def loaded(self, *_: object) -> None:
        """Follow `load_state_dict`, after which the module has the caller's values."""
        self.remove()


def _is_trained_itself(module: nn.Module) -> bool:
    """Return whether another loop may train the module that is called."""
    return torch.compiler.is_compiling() or (module.training and torch.is_grad_enabled())


# The names of this class and of its methods are in files of saved modules.
class _OfACopy:
    """Stands for the hook in a copied, saved or unpickled module, and does nothing."""

    a_step_was_taken = False

    def __call__(self, *_: object) -> None:
        pass

    def saved(self, *_: object) -> None:
        pass

    def remove(self) -> None:
        pass

    def loaded(self, *_: object) -> None:
        pass
