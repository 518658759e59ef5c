"""What is checked of a module and a criterion when their loss is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from funcamp._autograd.module_tensors import tensors_of
from funcamp._trace.python_state import Slot, survey


def has_compiled_part(model: nn.Module) -> bool:
    """Return whether torch.compile compiles the model or a part of it (recognized without importing Dynamo)."""
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in model.modules())


def trainable_besides(model: nn.Module, slots: list[Slot]) -> dict[int, tuple[str, Tensor]]:
    """Return the trainable tensors in a criterion's places that are not the model's, by id, with their paths."""
    own = set(map(id, tensors_of(model).values()))
    found: dict[int, tuple[str, Tensor]] = {}
    for slot in slots:
        value = slot.value
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf and id(value) not in own:
            found.setdefault(id(value), (slot.path.removeprefix("criterion."), value))
    return found


def check_identities(model: nn.Module, criterion: Callable[[Any, Any], Any] | None) -> None:
    """Raise ValueError if the model or the criterion knows a parameter by its identity."""
    own = {id(value): name for name, value in tensors_of(model).items()}
    for slot in survey({"model": model, "criterion": criterion}).values():
        value = slot.value
        in_a_dict = isinstance(slot.owner, dict) and isinstance(slot.key, (Tensor, int))
        in_a_set = slot.path.endswith("}") and isinstance(value, Tensor)
        keys = [id(slot.key) if isinstance(slot.key, Tensor) else slot.key] if in_a_dict else []
        if in_a_set:
            keys.append(id(value))
        if type(value) is int:
            keys.append(value)
        name = next((own[key] for key in keys if key in own), None)
        if name is not None:
            raise ValueError(
                "module_loss: model and criterion must not know a parameter by its identity (id(), a key of a dict, "
                f"in a set), because a step passes other tensors; got {name!r} in {slot.path}: use its name, or an "
                "attribute of the parameter"
            )


def kind_of(criterion: Any) -> str:
    return getattr(criterion, "__name__", type(criterion).__name__)
