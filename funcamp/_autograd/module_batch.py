"""The batch of a module's loss: how it becomes arguments of the module, and the loss in what a model returns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from funcamp import _tree


def form(has_target: bool) -> str:
    if has_target:
        return "a tuple or list (*inputs, target) with a criterion"
    return "a mapping of keyword arguments, a tuple or list of arguments, or a tensor"


def arguments_of(batch: Any, *, has_target: bool) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the model's positional and keyword arguments from a batch, and the target."""
    if isinstance(batch, (tuple, list)) and (batch or not has_target):
        return (tuple(batch[:-1]), {}, batch[-1]) if has_target else (tuple(batch), {}, None)
    if not has_target and isinstance(batch, Mapping) and all(isinstance(name, str) for name in batch):
        return (), dict(batch), None
    if not has_target and isinstance(batch, Tensor):
        return (batch,), {}, None
    also = ""
    if has_target and isinstance(batch, Mapping):
        also = "; module_loss(model) without a criterion passes a mapping on, for a model that returns its loss"
    raise TypeError(f"module_loss: batch must be {form(has_target)}; got {_tree.brief(batch)}{also}")


def fits(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> bool:
    try:
        inspect.signature(model.forward).bind(*inputs, **named)
    except TypeError:
        return False
    return True


def loss_in(outputs: Any) -> Tensor:
    """Return the loss in a model's output.

    Raises:
        TypeError: there is none.
    """
    if isinstance(outputs, Tensor):
        loss: Any = outputs
    elif isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    else:
        loss = getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor) or loss.dim():
        raise TypeError(
            "module_loss: model must return its loss if there is no criterion: a tensor of shape (), an object with "
            f".loss or a dict with 'loss'; got {_tree.brief(outputs)}{_loss_of(outputs, loss)}. Pass labels in the "
            "batch if the model wants them for it, or module_loss a criterion"
        )
    return loss


def _loss_of(outputs: Any, loss: Any) -> str:
    return "" if loss is outputs else f", its loss {_tree.brief(loss)}"
