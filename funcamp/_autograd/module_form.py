"""The form of a module: which parameters and buffers it has, and which of them are trained. A loss refuses a change.

This check runs at every call, like the check for hooks: a caller may freeze a parameter between any two steps, and
torch reports no such event. Without the check the step would silently continue to train the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Size, nn

from funcamp._autograd.module_walk import BUFFER, Kind, kinds_of, tensors_of


class ModuleForm:
    """The form that a module had when its loss was made.

    Args:
        model: the module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kinds: dict[str, Kind] = kinds_of(model)
        """What each parameter and buffer is, by name."""
        self._shapes = _trained_shapes(model)
        self._model = model
        self.accept()

    def check(self) -> None:
        """Raise ValueError if the module has another form."""
        self._compare(kinds_of(self._model))

    def check_in_call(self) -> None:
        """Raise ValueError if the module has another form, except new buffers: a forward pass may have cached them."""
        current: dict[str, Kind] = {}
        for name, kind in kinds_of(self._model).items():
            if kind != BUFFER or name in self.kinds:
                current[name] = kind
        self._compare(current)

    def is_touched(self) -> bool:
        """Return whether something was added, removed, replaced, frozen or tied since the last `accept`."""
        return _fingerprint(self._modules) != self._fingerprint

    def accept(self) -> None:
        """Accept the module as it is now: its changes do not affect the loss, such as a cache in a buffer."""
        self._modules = list(self._model.modules())
        self._fingerprint = _fingerprint(self._modules)

    def _compare(self, current: dict[str, Kind]) -> None:
        """Raise ValueError, for the first name that differs, if these are not the kinds and shapes that there were."""
        if current == self.kinds:
            self._compare_shapes()
            return
        for name in {**self.kinds, **current}:
            before = self.kinds.get(name, "not in it")
            now = current.get(name, "not in it")
            if before != now:
                raise ValueError(
                    f"module_loss: model must stay as it was when the loss was made; {name!r} was {before} and is "
                    f"{now}: make the loss again, module_loss(model, ...), and the step of it"
                )

    def _compare_shapes(self) -> None:
        """Raise ValueError if a trained parameter has another shape, as one of another layer of the same name has."""
        tensors = tensors_of(self._model)
        for name, shape in self._shapes.items():
            if name in tensors and tensors[name].shape != shape:
                raise ValueError(
                    f"module_loss: model must stay as it was when the loss was made; {name!r} had the shape "
                    f"{tuple(shape)} and has {tuple(tensors[name].shape)}: make the loss again, "
                    "module_loss(model, ...), and the step of it"
                )


def _trained_shapes(model: nn.Module) -> dict[str, Size]:
    """Return the shape of every trainable parameter by name."""
    return {name: tensor.shape for name, tensor in tensors_of(model).items() if tensor.requires_grad}


def _fingerprint(modules: Iterable[nn.Module]) -> list[object]:
    """Return what changes if one of these modules gets or loses a tensor or a module, or freezes or ties a parameter.

    In half of the time of `kinds_of`, because it makes no dotted names.
    """
    marks: list[object] = []
    first_places: dict[int, int] = {}
    for module in modules:
        # A dict that is replaced is no longer where `TensorSlots` found it. A module of TorchScript has none.
        attributes = vars(module)
        marks += (id(attributes.get("_parameters")), id(attributes.get("_buffers")))
        # Most modules have nothing in one or two of these.
        parameters = module._parameters
        if parameters:
            marks += parameters.keys()  # a module of TorchScript iterates otherwise
            marks += [None if parameter is None else parameter.requires_grad for parameter in parameters.values()]
            marks += [None if parameter is None else parameter.shape for parameter in parameters.values()]
            # Which of them are one tensor.
            marks += [first_places.setdefault(id(parameter), len(first_places)) for parameter in parameters.values()]
        buffers = module._buffers
        if buffers:
            marks += buffers.keys()
            marks += [buffer is None for buffer in buffers.values()]
        children = module._modules
        if children:
            marks += map(id, children.values())
        marks.append(None)  # so that nothing can move from one module to the next
    return marks
