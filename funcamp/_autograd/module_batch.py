"""The batch of a module's loss: how it becomes arguments of the module, and the loss in what a model returns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from funcamp import _tree
from funcamp._types import Args, Kwargs


def inputs_and_target_of(batch: object) -> Sequence[Any]:
    """Return what a batch contains for a model and its criterion: the inputs, and the target as the last one.

    Raises:
        TypeError: the batch has another form.
    """
    if not isinstance(batch, (tuple, list)) or not batch:
        raise _wrong_form(batch, "a tuple or list (*inputs, target) with a criterion")
    return batch


def arguments_of(batch: object) -> tuple[Args, Kwargs]:
    """Return the arguments, by position and by name, that a batch contains for a model that returns its loss.

    Raises:
        TypeError: the batch has another form.
    """
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    if isinstance(batch, Mapping) and all(isinstance(name, str) for name in batch):
        return (), dict(batch)
    if isinstance(batch, Tensor):
        return (batch,), {}
    raise _wrong_form(batch, "a mapping of keyword arguments, a tuple or list of arguments, or a tensor")


def refuse_misfit(model: nn.Module, batch: object) -> None:
    """Raise TypeError if a batch does not have the arguments of a model's forward."""
    positional, by_name = arguments_of(batch)
    try:
        inspect.signature(model.forward).bind(*positional, **by_name)
    except TypeError as error:
        raise TypeError(
            f"module_loss: batch must have the arguments of {type(model).__name__}.forward if there is no criterion; "
            f"got {_tree.brief(batch)} ({error}). Pass module_loss a criterion for a batch (*inputs, target)"
        ) from None


def _wrong_form(batch: object, accepted_forms: str) -> TypeError:
    """Return the error for a batch of another form."""
    return TypeError(f"module_loss: batch must be {accepted_forms}; got {_tree.brief(batch)}")


def loss_in(outputs: object) -> Tensor:
    """Return the loss in a model's output.

    Raises:
        TypeError: there is none.
    """
    loss: object
    if isinstance(outputs, Tensor):
        loss = outputs
    elif isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    else:
        loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    got = _tree.brief(outputs)
    if loss is not outputs:
        got = f"{got}, its loss {_tree.brief(loss)}"
    raise TypeError(
        "module_loss: model must return its loss if there is no criterion: a tensor of shape (), an object with "
        f".loss or a dict with 'loss'; got {got}. Pass labels in the batch if the model wants them for it, or "
        "module_loss a criterion"
    )
