"""The linear layers of a module in float8: each gets a stand-in while a loss and its backward pass run.

`functional_call` puts other parameters into a module for a call; this puts other layers into it. A stand-in shares
everything with its layer, parameters and hooks too, and has another forward.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from funcamp._autograd.tape import Tape
from funcamp._types import Tree
from funcamp.float8.config import Float8Config
from funcamp.float8.product import Operands, Scales, product

_LAYER = "_funcamp_layer"


class StandIns:
    """The stand-ins of a module's linear layers, made once."""

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        self.running: list[Float8Linears] = []
        """The context that runs, if there is one; the stand-ins share this list."""
        made = {id(layer): _stand_in(layer, self.running) for layer in layers}
        self.places: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []
        """Where each one goes: a module's dict, and the name in it."""
        for part in model.modules():
            for name, child in part._modules.items():
                if id(child) in made:
                    self.places.append((part._modules, name, made[id(child)]))


def _stand_in(layer: nn.Module, running: list[Float8Linears]) -> nn.Module:
    found: Any = copy.copy(layer)
    found.__class__ = type(type(layer).__name__, (_InFloat8, type(layer)), {})
    found._funcamp_running = running
    object.__setattr__(found, _LAYER, layer)  # a plain attribute: the dict of submodules is the layer's own
    own: nn.Module = found
    return own


def layer_of(module: nn.Module) -> nn.Module:
    """Return the layer that a stand-in stands for; any other module as it is."""
    found: nn.Module = vars(module).get(_LAYER, module)
    return found


class _InFloat8(nn.Module):
    """The forward of a stand-in."""

    _funcamp_running: list[Float8Linears]
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        linear = self._funcamp_running[-1].linear if self._funcamp_running else F.linear
        return linear(x, self.weight, self.bias)


class Float8Linears:
    """Context manager: the linear layers of a module multiply in float8 if their weight is one of those of `begin`.

    Around the forward and the backward pass, because activation checkpoints call layers again in the latter. The
    operands of the weights are made before, once for both passes of all micro-batches.

    Args:
        stand_ins: those of the module.
        config: the configuration.
        delayed: the scales of delayed scaling, of all weights.
        made: the operands of all weights.
        places: the places of the weights among the inputs of a forward pass.
        tape: amaxes to differentiate with respect to; without records for current scaling.
    """

    def __init__(
        self,
        stand_ins: StandIns,
        config: Float8Config,
        delayed: Scales | None,
        made: Sequence[Operands],
        places: Sequence[int],
        tape: Tape,
    ) -> None:
        self._stand_ins, self._config, self._delayed, self._operands = stand_ins, config, delayed, made
        self._places, self.tape = places, tape
        self._weights: Sequence[Tensor] = ()
        self._amaxes: list[Tensor] = []
        self._before: list[nn.Module | None] = []

    def begin(self, inputs: Sequence[Tensor], zeros: Tree) -> None:
        """Take the weights among the inputs of a forward pass, and the amaxes to differentiate with respect to."""
        self._weights = [inputs[place] for place in self._places]
        self._amaxes = list(zeros.unbind()) if isinstance(zeros, Tensor) else []

    def __enter__(self) -> None:
        self._before = [modules[name] for modules, name, _ in self._stand_ins.places]
        self._stand_ins.running.append(self)
        for modules, name, stand_in in self._stand_ins.places:
            modules[name] = stand_in

    def __exit__(self, *_: object) -> None:
        self._stand_ins.running.pop()
        for place, before in zip(self._stand_ins.places, self._before):
            place[0][place[1]] = before

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return what torch.nn.functional.linear does, in float8 if the weight is among those of `begin`."""
        place = next((place for place, known in enumerate(self._weights) if known is weight), None)
        if place is None:
            return F.linear(x, weight, bias)
        made = self._operands[place]
        if self._delayed is None:
            y: Tensor = product(x, weight, made, self._config, None, None)
        else:
            delayed = self._delayed.at(place)
            # That of this use: a scan takes no two views of one tensor from outside.
            made = made._replace(inverse=delayed.inverse[1])
            # The next use of this weight takes the amaxes of this one.
            y, self._amaxes[place] = product(x, weight, made, self._config, delayed, self._amaxes[place])
        return y if bias is None else y + bias.to(y.dtype)
