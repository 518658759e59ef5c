"""The batch of a module's loss: how it becomes arguments of the module, and the loss in what a model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from funcamp import _tree
from funcamp._types import Args, Kwargs


class Arguments(NamedTuple):
    """What a module and its criterion are called with."""

    positional: Args
    by_name: Kwargs
    target: object
    """The criterion's second argument; None without a criterion."""


def arguments_of(batch: object, *, has_target: bool) -> Arguments:
    """Return the arguments of model and criterion that a batch contains.

    Args:
        batch: what the loss is called with.
        has_target: whether there is a criterion, which takes the batch's last entry.

    Raises:
        TypeError: the batch has another form.
    """
    if has_target:
        if not isinstance(batch, (tuple, list)) or not batch:
            raise _wrong_form(batch, "a tuple or list (*inputs, target) with a criterion")
        return Arguments(tuple(batch[:-1]), {}, batch[-1])
    if isinstance(batch, (tuple, list)):
        return Arguments(tuple(batch), {}, None)
    if isinstance(batch, Mapping) and all(isinstance(name, str) for name in batch):
        return Arguments((), dict(batch), None)
    if isinstance(batch, Tensor):
        return Arguments((batch,), {}, None)
    raise _wrong_form(batch, "a mapping of keyword arguments, a tuple or list of arguments, or a tensor")


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
