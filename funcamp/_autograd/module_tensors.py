"""The parameters and buffers of a module when a loss was made of it: which there are, and which names are one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple

import torch
from torch import Size, Tensor, nn

from funcamp._autograd.left_behind import TensorSlot
from funcamp._memory import identity, overlaps

#: What a tensor is in its module, in the words of error messages.
Kind = Literal["a trainable parameter", "a frozen parameter", "a buffer", "a plain attribute"]
TRAINED: Kind = "a trainable parameter"
FROZEN: Kind = "a frozen parameter"
BUFFER: Kind = "a buffer"
ATTRIBUTE: Kind = "a plain attribute"

#: The flag by which torch takes a tensor that is not of the class Parameter for one.
_IS_PARAMETER = "_is_param"


class Entry(NamedTuple):
    """A parameter or buffer of a module."""

    tensor: Tensor
    kind: Kind


class ModuleTensors:
    """The parameters and buffers of a module for which a loss passes other tensors.

    Args:
        model: the module.

    Raises:
        ValueError: two parameters or buffers share memory without being one tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        entries = _entries_of(model)
        self._kinds = {name: entry.kind for name, entry in entries.items()}
        self._trained_shapes = {name: entry.tensor.shape for name, entry in entries.items() if entry.kind == TRAINED}
        self.names, self.buffer_names = _ties(model)
        """The name of every trainable parameter, with the name under which it is stored, the first of tied ones; and
        the same for buffers."""
        self.uncast_names = _uncast_names(model, self.names)
        """The stored names of the parameters that autocast does not cast, such as those of embeddings."""
        self._attributes = {name: vars(entries[name].tensor) for name in (*self.names, *self.buffer_names)}
        """The attributes that a user has set on the module's own tensors."""

    def in_module(self) -> dict[str, Tensor]:
        """Return the tensors that the module has now, by name."""
        tensors = tensors_of(self._model)
        return {name: tensors[name] for name in (*self.names, *self.buffer_names) if name in tensors}

    def own_params(self) -> dict[str, Tensor]:
        """Return the module's trainable parameters by their stored names."""
        tensors = tensors_of(self._model)
        return {stored_name: tensors[stored_name] for stored_name in self.names.values()}

    def own_buffers(self) -> dict[str, Tensor]:
        """Return the module's buffers by their stored names."""
        tensors = tensors_of(self._model)
        return {stored_name: tensors[stored_name] for stored_name in self.buffer_names.values()}

    def param_shapes(self) -> dict[str, Size]:
        """Return the shape of every trainable parameter by its stored name."""
        return {stored_name: self._trained_shapes[stored_name] for stored_name in self.names.values()}

    def values_by_name(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors for the module by its names, in which a tied one has several.

        Args:
            params: by stored name; what has another name (a frozen parameter) is returned too.
            buffers: by stored name.

        Raises:
            KeyError: a parameter or buffer is missing.
        """
        values = dict(params)
        for name, stored_name in self.names.items():
            values[name] = params[stored_name]
        for name, stored_name in self.buffer_names.items():
            values[name] = buffers[stored_name]
        return values

    def buffers_after(self, passed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers after a forward pass, which may have assigned some, by stored name.

        Args:
            passed: what the module was called with, by its names.

        Raises:
            ValueError: a buffer is gone, or one of two that were one tensor was assigned.
        """
        tensors = tensors_of(self._model)
        for name, stored_name in self.buffer_names.items():
            if name not in tensors:
                slot = TensorSlot.of(self._model, name)
                slot.owner[slot.key] = passed[name]  # a place for the module's own, which functional_call puts back
                raise ValueError(
                    f"module_loss: model must keep its buffers; the forward pass deleted {name!r}, set it to None or "
                    "registered it as another kind: assign a tensor of the same kind"
                )
            if tensors[name] is not tensors[stored_name]:
                raise ValueError(
                    f"module_loss: buffers that are one tensor must stay one; got {stored_name!r} and {name!r}, and "
                    "the forward pass assigned another tensor to one of them: register a clone() for the other"
                )
        return {stored_name: tensors[stored_name] for stored_name in self.buffer_names.values()}

    @contextlib.contextmanager
    def attributes_on(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Context manager: values have the attributes of the module's own tensors, and are parameters as they are.

        `torch.func.functional_call` does not pass these on: a penalty that leaves out parameters marked by
        `p.no_decay = True`, or by `isinstance(p, nn.Parameter)`, would silently be another one.
        """
        added: list[tuple[dict[str, object], set[str]]] = []
        for name, own_attributes in self._attributes.items():
            attributes = vars(values[name])
            if attributes is own_attributes:
                continue
            new = {key: item for key, item in own_attributes.items() if key not in attributes}
            if name in self.names and not isinstance(values[name], nn.Parameter):
                new.setdefault(_IS_PARAMETER, True)
            attributes.update(new)
            added.append((attributes, set(new)))
        try:
            yield
        finally:
            # A caller or a state may have these tensors.
            for attributes, keys in added:
                for key in keys:
                    attributes.pop(key, None)

    # The memory of a state.

    def check_memory_can_be_shared(self) -> None:
        """Raise TypeError if a tensor of the module consists of several, or is in a scripted layer.

        Their memory cannot be replaced: the C++ of a scripted layer keeps the tensors that it was made with.
        """
        for name, tensor in self.in_module().items():
            if hasattr(type(tensor), "__tensor_flatten__"):
                raise TypeError(
                    "init: consume must be False if a parameter or buffer of the module is a DTensor or another "
                    f"tensor subclass; got True, and {name!r} is a {type(tensor).__name__}"
                )
        for name, layer in self._model.named_modules():
            if isinstance(layer, torch.jit.ScriptModule):
                raise TypeError(
                    "init: consume must be False if a layer of the module is scripted; got True, and "
                    f"{name or 'the module'!r} is a {type(layer).__name__}"
                )

    def share_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Make buffers share the memory of values, which are by stored name."""
        # New objects, as Module.to creates: a buffer that is a view would keep its base's memory alive.
        new_buffers = {stored_name: value.detach() for stored_name, value in values.items()}
        own_tensors = self.in_module()
        new_buffers_by_id: dict[int, Tensor] = {}
        for name, stored_name in self.buffer_names.items():
            own_tensor = own_tensors[name]
            new_buffer = new_buffers[stored_name]
            new_buffer.__dict__.update(own_tensor.__dict__)  # attributes that a user set
            new_buffers_by_id[id(own_tensor)] = new_buffer
        for module in self._model.modules():
            for key, buffer in list(module._buffers.items()):
                if id(buffer) in new_buffers_by_id:
                    module._buffers[key] = new_buffers_by_id[id(buffer)]

    def like_own(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return values as tensors like the module's own: parameters as parameters, tied ones as one.

        values: by the module's names.
        """
        own_tensors = self.in_module()
        likes: dict[int, Tensor] = {}
        for name, own in own_tensors.items():
            if id(own) not in likes:
                likes[id(own)] = _like(own, values[name])
        return {name: likes[id(own)] for name, own in own_tensors.items()}

    # What must stay as it was.

    def check_kinds(self) -> None:
        """Raise ValueError if a parameter was added, removed, frozen, unfrozen or replaced by one of another shape.

        A new buffer is accepted, because a forward pass may have cached one.
        """
        current = _entries_of(self._model)
        for name in {**self._kinds, **current}:
            before = self._kinds.get(name, "not in it")
            now = current[name].kind if name in current else "not in it"
            is_new_buffer = before == "not in it" and now == BUFFER
            if before != now and not is_new_buffer:
                raise _changed(f"{name!r} was {before} and is {now}")
        for name, shape in self._trained_shapes.items():
            shape_now = current[name].tensor.shape
            if shape_now != shape:
                raise _changed(f"{name!r} had the shape {tuple(shape)} and has {tuple(shape_now)}")

    def check_ties(self) -> None:
        """Raise ValueError if tensors that were one are two now, or the reverse."""
        names, buffer_names = _ties(self._model)
        known_buffers = {name: stored for name, stored in buffer_names.items() if name in self.buffer_names}
        if (names, known_buffers) != (self.names, self.buffer_names):
            raise ValueError(
                "module_loss: model must have the ties it had when the loss was made; tensors were tied or parted "
                "since (Module.to may part them): make the loss again, module_loss(model, ...), and the step of it"
            )


def _like(own: Tensor, value: Tensor) -> Tensor:
    """Return a value as a tensor of the kind and with the attributes of a module's own tensor."""
    like = value.detach()
    if isinstance(own, nn.Parameter):
        like = nn.Parameter(like, requires_grad=own.requires_grad)
    like.__dict__.update(own.__dict__)
    return like


def _changed(what: str) -> ValueError:
    """Return the error for a module that has other tensors than before."""
    return ValueError(
        f"module_loss: model must stay as it was when the loss was made; {what}: make the loss again, "
        "module_loss(model, ...), and the step of it"
    )


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by name, those of a shared module once."""
    return {name: entry.tensor for name, entry in _entries_of(model).items()}


def _entries_of(model: nn.Module) -> dict[str, Entry]:
    """Return every parameter and buffer with its kind, by name, those of a shared module once."""
    # functional_call is wrong if one place is given under two names, hence named_modules without duplicates.
    entries: dict[str, Entry] = {}
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                entries[_join(prefix, key)] = Entry(parameter, TRAINED if parameter.requires_grad else FROZEN)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                entries[_join(prefix, key)] = Entry(buffer, BUFFER)
    return entries


def _join(prefix: str, key: str) -> str:
    """Return the dotted name of a module's entry."""
    return f"{prefix}.{key}" if prefix else key


def _ties(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Return each name with the first name of the same tensor: of trained parameters, and of buffers.

    Raises:
        ValueError: two tensors share memory and are not one.
    """
    entries = _entries_of(model)
    first_names: dict[object, str] = {}
    stored_names: dict[str, str] = {}
    for name, (tensor, kind) in entries.items():
        # Two Parameters on one memory are two for an optimizer; for buffers only memory counts.
        key = identity(tensor) if kind == BUFFER else id(tensor)
        stored_names[name] = first_names.setdefault((kind, key), name)
    _refuse_common_memory(model, {name: entries[name] for name in first_names.values()})
    names = {name: stored_name for name, stored_name in stored_names.items() if entries[name].kind == TRAINED}
    buffer_names = {name: stored_name for name, stored_name in stored_names.items() if entries[name].kind == BUFFER}
    return names, buffer_names


def _refuse_common_memory(model: nn.Module, entries: Mapping[str, Entry]) -> None:
    """Raise ValueError if two tensors share memory without being one, so that a step of one would change the other."""
    attributes = {name: Entry(tensor, ATTRIBUTE) for name, tensor in _plain_attributes(model).items()}
    all_entries = {**entries, **attributes}
    for first, second in overlaps({name: entry.tensor for name, entry in all_entries.items()}):
        first_kind, second_kind = all_entries[first].kind, all_entries[second].kind
        if _may_share_memory({first_kind, second_kind}):
            continue
        raise ValueError(
            "module_loss: parameters and buffers must be one tensor or share no memory; got "
            f"{first_kind} {first!r} and {second_kind} {second!r}: assign the one to the other "
            "(layer.weight = other.weight), compute it in forward, or clone() it"
        )


def _plain_attributes(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that modules have as plain attributes, without those that hooks recompute."""
    attributes: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            # An attribute that requires a gradient is found in the graph.
            if not isinstance(value, Tensor) or value.requires_grad:
                continue
            # torch's prune and older spectral_norm leave `weight` next to `weight_orig` until the next forward pass.
            if f"{key}_orig" in module._parameters:
                continue
            attributes[_join(prefix, key)] = value
    return attributes


def _may_share_memory(kinds: AbstractSet[Kind]) -> bool:
    """Return whether two tensors of these kinds may share memory."""
    # No step changes frozen parameters.
    if kinds == {FROZEN}:
        return True
    # A constant may have two names, as a buffer and an attribute; a step changes what is trained.
    return ATTRIBUTE in kinds and TRAINED not in kinds


def _uncast_names(model: nn.Module, names: Mapping[str, str]) -> frozenset[str]:
    """Return the stored names of parameters that autocast does not cast, also if another layer has them too.

    These are the parameters of embeddings, and those of a module with further layers, such as its positions.
    """
    layers = dict(model.named_modules(remove_duplicate=False))
    stored_names: set[str] = set()
    for name, stored_name in names.items():
        layer = layers[name.rpartition(".")[0]]
        has_layers = bool(layer._modules) and not isinstance(layer, nn.MultiheadAttention)
        if has_layers or isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
            stored_names.add(stored_name)
    return frozenset(stored_names)
