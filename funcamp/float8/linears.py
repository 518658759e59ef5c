"""The linear layers of a module in float8: each gets a stand-in while a loss and its backward pass run.

`functional_call` puts other parameters into a module for a call; this puts other layers into it. A stand-in shares
everything with its layer, parameters and hooks too, and has another forward.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from funcamp._autograd.tape import Tape
from funcamp._types import Tree
from funcamp.float8.config import Float8Config
from funcamp.float8.product import Operands, Scales, product

_LAYER = "_funcamp_layer"


class StandInPlace(NamedTuple):
    """Where a stand-in goes."""

    modules: dict[str, nn.Module | None]
    """The submodules of a module."""
    name: str
    """The layer's name among them."""
    stand_in: nn.Module


class StandIns:
    """The stand-ins of a module's linear layers, made once."""

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        self.running: list[Float8Linears] = []
        """The context that runs, if there is one; the stand-ins share this list."""
        stand_ins = {id(layer): _make_stand_in(layer, self.running) for layer in layers}
        self.places: list[StandInPlace] = []
        for module in model.modules():
            for name, child in module._modules.items():
                if id(child) in stand_ins:
                    self.places.append(StandInPlace(module._modules, name, stand_ins[id(child)]))


def _make_stand_in(layer: nn.Module, running: list[Float8Linears]) -> nn.Module:
    stand_in: Any = copy.copy(layer)
    stand_in.__class__ = type(type(layer).__name__, (_InFloat8, type(layer)), {})
    stand_in._funcamp_running = running
    # A plain attribute: the copy shares the dict of submodules with the layer.
    object.__setattr__(stand_in, _LAYER, layer)
    module: nn.Module = stand_in
    return module


def layer_of(module: nn.Module) -> nn.Module:
    """Return the layer that a stand-in replaces; any other module as it is."""
    layer: nn.Module = vars(module).get(_LAYER, module)
    return layer


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
        weight_operands: the operands of all weights.
        input_numbers: the numbers of the weights among the inputs of a forward pass.
        tape: amaxes to differentiate with respect to; without records for current scaling.
    """

    def __init__(
        self,
        stand_ins: StandIns,
        config: Float8Config,
        delayed: Scales | None,
        weight_operands: Sequence[Operands],
        input_numbers: Sequence[int],
        tape: Tape,
    ) -> None:
        self._stand_ins = stand_ins
        self._config = config
        self._delayed = delayed
        self._weight_operands = weight_operands
        self._input_numbers = input_numbers
        self.tape = tape
        self._weights: Sequence[Tensor] = ()
        self._amaxes: list[Tensor | None] = []
        self._replaced: list[nn.Module | None] = []
        """What was in each place before the stand-in."""

    def begin(self, inputs: Sequence[Tensor], zeros: Tree) -> None:
        """Take the weights among the inputs of a forward pass, and the amaxes to differentiate with respect to."""
        self._weights = [inputs[number] for number in self._input_numbers]
        self._amaxes = list(zeros.unbind()) if isinstance(zeros, Tensor) else []

    def __enter__(self) -> None:
        places = self._stand_ins.places
        self._replaced = [place.modules[place.name] for place in places]
        self._stand_ins.running.append(self)
        for place in places:
            place.modules[place.name] = place.stand_in

    def __exit__(self, *_: object) -> None:
        self._stand_ins.running.pop()
        for place, module in zip(self._stand_ins.places, self._replaced):
            place.modules[place.name] = module

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return what torch.nn.functional.linear does, in float8 if the weight is among those of `begin`."""
        index = next((index for index, known in enumerate(self._weights) if known is weight), None)
        if index is None:
            return F.linear(x, weight, bias)
        weight_operands = self._weight_operands[index]
        if self._delayed is None:
            y, _ = product(x, weight, weight_operands, self._config, None, None)
        else:
            delayed = self._delayed.at(index)
            # That of this use: a scan takes no two views of one tensor from outside.
            weight_operands = weight_operands._replace(inverse=delayed.inverse[1])
            # The next use of this weight takes the amaxes of this one.
            y, self._amaxes[index] = product(x, weight, weight_operands, self._config, delayed, self._amaxes[index])
        return y if bias is None else y + bias.to(y.dtype)
