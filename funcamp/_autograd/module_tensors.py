"""The parameters and buffers of a module: their names, where they are, and which of them are one tensor."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import Tensor, nn

from funcamp._memory import identity, overlaps
from funcamp._trace.python_state import Slot


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by name, a shared module once."""
    # functional_call is wrong if one place is given under two names, hence named_modules without duplicates.
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                found[join(prefix, name)] = value
    return found


def names_among(model: nn.Module, slots: list[Slot]) -> frozenset[str]:
    """Return the names of the model's tensors that are in these places."""
    there = {id(slot.value) for slot in slots}
    return frozenset(name for name, value in tensors_of(model).items() if id(value) in there)


def form_of(model: nn.Module) -> list[Any]:
    """Return what changes if a module gets or loses a parameter or buffer, or freezes one: `parts_of` in less time."""
    form: list[Any] = []
    left, seen = [model], {id(model)}
    while left:
        module = left.pop()
        form += module._parameters.keys()  # a module of TorchScript iterates otherwise
        form += [None if value is None else value.requires_grad for value in module._parameters.values()]
        for name, value in module._buffers.items():
            form += (name, value is None)
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                left.append(child)
    return form


def slots_of(model: nn.Module, names: Set[str]) -> list[tuple[str, dict[str, Any], str]]:
    """Return, for each of these names, the dict of a module that has the tensor, and the key in it."""
    found: list[tuple[str, dict[str, Any], str]] = []
    for prefix, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            found += [(join(prefix, key), held, key) for key in held.keys() if join(prefix, key) in names]  # noqa: SIM118  of TorchScript
    return found


def _attributes(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that modules have as plain attributes, without those that hooks recompute."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            # torch's prune and older spectral_norm leave `weight` beside `weight_orig` until the next forward pass. An
            # attribute that requires a gradient is found in the graph.
            if isinstance(value, Tensor) and not value.requires_grad and f"{name}_orig" not in module._parameters:
                found[join(prefix, name)] = value
    return found


def parts_of(model: nn.Module) -> dict[str, str]:
    """Return every parameter and buffer by name, and whether it is trained."""
    parts = {}
    for prefix, module in model.named_modules():
        for name, value in module._parameters.items():
            if value is not None:
                parts[join(prefix, name)] = "a trainable parameter" if value.requires_grad else "a frozen parameter"
        parts |= {join(prefix, name): "a buffer" for name, value in module._buffers.items() if value is not None}
    return parts


def ties_of(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Return the stored names of trainable parameters, and of buffers with frozen parameters tied to them.

    Raises:
        ValueError: two of them share memory and are not one tensor.
    """
    parts, tensors = parts_of(model), tensors_of(model)
    # Two Parameters on one memory are two for an optimizer; for the others only memory counts.
    keys = {name: id(t) if parts[name] == "a trainable parameter" else identity(t) for name, t in tensors.items()}
    buffers = [name for name, part in parts.items() if part == "a buffer"]
    trained = [name for name, part in parts.items() if part == "a trainable parameter"]
    distinct = set({key: name for name, key in reversed(keys.items())}.values())
    attributes = {name: value for name, value in _attributes(model).items() if name not in tensors}
    parts |= dict.fromkeys(attributes, "a plain attribute")
    held = {name: tensor for name, tensor in tensors.items() if name in distinct} | attributes
    for one, other in overlaps(held):
        kinds = {parts[one], parts[other]}
        # A constant may have two names, as a buffer and an attribute; a step changes what is trained.
        if kinds != {"a frozen parameter"} and ("a plain attribute" not in kinds or "a trainable parameter" in kinds):
            raise ValueError(
                f"module_loss: parameters and buffers must be one tensor or share no memory; got {parts[one]} {one!r} "
                f"and {parts[other]} {other!r}: assign the one to the other (layer.weight = other.weight), compute it "
                "in forward, or clone() it"
            )
    first_trained = {keys[name]: name for name in reversed(trained)}
    first_kept = {keys[name]: name for name in reversed(buffers)}
    frozen = [name for name, part in parts.items() if part == "a frozen parameter" and keys[name] in first_kept]
    return (
        {name: first_trained[keys[name]] for name in trained},
        {name: first_kept[keys[name]] for name in (*buffers, *frozen)},
    )


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
