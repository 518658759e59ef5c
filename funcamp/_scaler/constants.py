"""The constants of a rule, and what they may be."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import torch

_FLOAT32_MAX = torch.finfo(torch.float32).max
_FLOAT32_LEAST = 2.0**-149
_INT32_MAX = torch.iinfo(torch.int32).max

#: The rules there are; funcamp._rulebook has the functions.
RULES = (
    "dynamic", "static", "warm_start", "apex", "apex_hysteresis", "deepspeed", "deepspeed_consecutive",
    "deepspeed_old", "deepspeed_old_consecutive", "deepspeed_fp16", "fairseq", "flax", "fsdp_cpu", "jmp", "keras",
    "megatron", "paddle", "paddle_dygraph", "tensorflow",
)  # fmt: skip

_DIVIDES = (
    "apex", "deepspeed", "deepspeed_consecutive", "deepspeed_old", "deepspeed_old_consecutive", "deepspeed_fp16",
    "fairseq", "jmp", "tensorflow",
)  # fmt: skip


def _real(name: str, value: object) -> float:
    """A Python or NumPy real number as a float; a tensor is refused, for it would be read on the host."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"ScalerConfig: {name} must be a Python number; got {value!r} of type {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def inverse(name: str, factor: object) -> float:
    """1 / factor, for a library that divides by the factor that it multiplies with.

    Raises:
        TypeError: factor is no number.
        ValueError: factor is not above 1.
    """
    number = _real(name, factor)
    if not number > 1.0:
        raise ValueError(f"ScalerConfig: {name} must be above 1; got {factor}")
    return 1.0 / number


def _scale_value(name: str, value: object) -> float:
    """A positive number that float32 holds."""
    number = _real(name, value)
    if not _FLOAT32_LEAST <= number <= _FLOAT32_MAX:
        raise ValueError(
            f"ScalerConfig: {name} must be positive and finite in float32, from 2**-149 to {_FLOAT32_MAX}; got {value}"
        )
    return number


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"ScalerConfig: {name} must be an integer; got {value!r}")
    number = int(value)
    if not 1 <= number <= _INT32_MAX:
        raise ValueError(f"ScalerConfig: {name} must be from 1 to 2**31 - 1; got {value}")
    return number


@dataclass(frozen=True)
class Constants:
    """The fields of `ScalerConfig`, checked."""

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float | None = None
    max_scale: float | None = None
    rule: str = "dynamic"
    hysteresis: int = 1
    tolerance: float = 0.0
    stop_scale: float | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {"init_scale": _scale_value("init_scale", self.init_scale)}
        growth, backoff = _real("growth_factor", self.growth_factor), _real("backoff_factor", self.backoff_factor)
        if not 1.0 <= growth <= _FLOAT32_MAX:
            raise ValueError(
                f"ScalerConfig: growth_factor must be 1 or more and finite in float32; got {self.growth_factor}"
            )
        if not 0.0 < backoff <= 1.0:
            raise ValueError(f"ScalerConfig: backoff_factor must be above 0 and at most 1; got {self.backoff_factor}")
        if self.rule in _DIVIDES and backoff != 1.0 / growth:
            raise ValueError(
                f"ScalerConfig: backoff_factor must be 1 / growth_factor for the rule {self.rule!r}, which divides by "
                f"it; got {self.backoff_factor} with growth_factor {self.growth_factor}"
            )
        checked |= {"growth_factor": growth, "backoff_factor": backoff}
        for name in ("growth_interval", "hysteresis"):
            checked[name] = _count(name, getattr(self, name))
        for name in ("min_scale", "max_scale", "stop_scale"):
            value = getattr(self, name)
            checked[name] = None if value is None else _scale_value(name, value)
        if checked["stop_scale"] is None and self.rule == "fairseq":
            raise ValueError("ScalerConfig: stop_scale must be given for the rule 'fairseq'; got None")
        tolerance = _real("tolerance", self.tolerance)
        if not 0.0 <= tolerance <= 1.0:
            raise ValueError(f"ScalerConfig: tolerance must be from 0 to 1; got {self.tolerance}")
        checked["tolerance"] = tolerance
        if self.rule not in RULES:
            raise ValueError(f"ScalerConfig: rule must be one of {', '.join(RULES)}; got {self.rule!r}")
        low, high = checked["min_scale"], checked["max_scale"]
        if low is not None and high is not None and low > high:
            raise ValueError(f"ScalerConfig: min_scale must not be above max_scale; got {low} and {high}")
        if not (low or 0.0) <= checked["init_scale"] <= (math.inf if high is None else high):
            raise ValueError(
                f"ScalerConfig: init_scale must be within [min_scale, max_scale]; "
                f"got {checked['init_scale']} with min_scale {low} and max_scale {high}"
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)
