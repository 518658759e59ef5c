"""How other libraries scale tensors into float8, in plain Python: what `funcamp.float8` is measured against.

A class is the state of one tensor, under the library's names; `update` is one step. Numbers are float32 unless it
says otherwise: every result is rounded. What does not bear on the rule (streams, process groups) is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tests.support.oracle import float32

FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127

#: The largest numbers of E4M3 and E5M2.
E4M3_MAX, E5M2_MAX = 448.0, 57344.0


@dataclass
class TransformerEngine:
    """`DelayedScaling`: `kernel_bulk`, common/recipe/delayed_scaling.cu, NVIDIA/TransformerEngine at d0067d0.

    The quantizer writes the amax of a step into slot 0. After the step the history rolls, so that this amax becomes the
    last entry, and slot 0 is cleared; with an amax of 0 (a module that was not used) nothing rolls.
    """

    fp8_max: float
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scale: float = 1.0
    amax_history: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.amax_history = [0.0] * self.amax_history_len

    def update(self, last_amax: float) -> None:
        self.amax_history[0] = last_amax
        amax = 0.0
        if last_amax != 0.0:
            rolled = [*self.amax_history[1:], last_amax]
            for a in rolled:
                amax = _fmaxf(amax, a)
            self.amax_history = [0.0, *rolled[1:]]
        if self.amax_compute_algo == "most_recent":
            amax = last_amax
        scaled_max = float32(self.fp8_max * 2.0**-self.margin)
        if math.isfinite(amax) and amax > 0:
            self.scale = float32(scaled_max / amax)
        if math.isinf(self.scale):
            self.scale = FLOAT32_MAX

    def newest_first(self, slot: float) -> list[float]:
        """The history in the order of `Float8State`: slot 0 as the oldest entry, which it replaced."""
        return [*reversed(self.amax_history[1:]), slot]


def _fmaxf(a: float, b: float) -> float:
    """C's fmaxf, which ignores a NaN."""
    return b if math.isnan(a) or b > a else a


class Megatron(TransformerEngine):
    """Megatron-LM's defaults for it: megatron/core/transformer/transformer_config.py."""

    def __init__(self, fp8_max: float) -> None:
        super().__init__(fp8_max, 0, 1, "most_recent")


@dataclass
class Flax:
    """`qdq_and_return` of `Fp8DotGeneralOp`, flax/linen/fp8_ops.py, flax 0.12.

    `scale` is the reciprocal, which multiplies on the way back. A step computes it from the history, quantizes with it,
    and then enters its own amax.
    """

    fp8_max: float
    amax_history_length: int = 1024
    scale: float = 1.0
    amax_history: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.amax_history = [0.0] * self.amax_history_length

    def update(self, amax: float) -> None:
        self.scale = self._compute_scale(max(self.amax_history))
        self.amax_history = [amax, *self.amax_history[2:], self.amax_history[0]][: self.amax_history_length]

    def _compute_scale(self, amax: float) -> float:
        scale = _div32(1.0, self.scale)
        sf = _div32(self.fp8_max, amax) if amax > 0.0 and math.isfinite(amax) else scale
        return _div32(1.0, sf)

    def newest_first(self) -> list[float]:
        """The history in the order of `Float8State`."""
        return [self.amax_history[0], *reversed(self.amax_history[1:])]


def _div32(a: float, b: float) -> float:
    """A float32 quotient; a double's rounding before it changes nothing."""
    return float32(a / b) if b else math.inf


def torchao_scale(amax: float, fp8_max: float, round_scales_to_power_of_2: bool = False) -> float:
    """`amax_to_scale`, torchao/float8/float8_utils.py, pytorch/ao at 36027d8: float64, then rounded.

    There the power of two is exp2(floor(log2(scale))) in float32: within one bit of a power of two its logarithm may
    round up, and the scale is then that power. Here it is the power of two at or below the scale.
    """
    scale = float32(fp8_max / (amax if amax > 1e-12 or math.isnan(amax) else 1e-12))
    if round_scales_to_power_of_2 and scale > 0:
        return math.ldexp(1.0, math.frexp(scale)[1] - 1)
    return scale
