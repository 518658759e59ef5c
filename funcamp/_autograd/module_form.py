"""The form of a module: which parameters and buffers it has, and which of them are trained. A loss refuses a change.

This is the one check of a loss that is made at every call: a caller may freeze a parameter between any two steps, and
no event of torch reports it. The step would go on training the parameter without a word.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from funcamp._autograd.module_walk import BUFFER, Kind, kinds_of


class ModuleForm:
    """The form that a module had when its loss was made.

    Args:
        model: the module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kinds: dict[str, Kind] = kinds_of(model)
        """What each parameter and buffer is, by name."""
        self._model = model
        self._modules = list(model.modules())
        self._fingerprint = _fingerprint(self._modules)

    def names(self) -> list[str]:
        """Return the names of all parameters, including frozen ones."""
        return [name for name, kind in self.kinds.items() if kind != BUFFER]

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

    def check_in_call_if_touched(self) -> None:
        """Do as `check_in_call`, at once if nothing was added, removed or frozen since the last call."""
        if _fingerprint(self._modules) == self._fingerprint:
            return
        self.check_in_call()
        # What changed is no matter to the loss, such as a cache or another module with the same tensors.
        self._modules = list(self._model.modules())
        self._fingerprint = _fingerprint(self._modules)

    def _compare(self, current: dict[str, Kind]) -> None:
        if current == self.kinds:
            return
        for name in {**self.kinds, **current}:
            before = self.kinds.get(name, "not in it")
            now = current.get(name, "not in it")
            if before != now:
                raise ValueError(
                    f"module_loss: model must stay as it was when the loss was made; {name!r} was {before} and is "
                    f"{now}: make the loss again, module_loss(model, ...), and the step of it"
                )


def _fingerprint(modules: Iterable[nn.Module]) -> list[object]:
    """Return what changes if one of these modules gets or loses a tensor or a module, or freezes a parameter.

    In a tenth of the time of `kinds_of`, because it makes no dotted names.
    """
    marks: list[object] = []
    for module in modules:
        parameters = module._parameters
        marks += parameters.keys()
        marks += [getattr(parameter, "requires_grad", None) for parameter in parameters.values()]
        for key, buffer in module._buffers.items():
            marks += (key, buffer is None)
        marks += map(id, module._modules.values())
    return marks
