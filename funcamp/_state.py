"""The scaler's state, tensors only, and its configuration, Python values only."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

_FLOAT32_MAX = torch.finfo(torch.float32).max
_FLOAT32_LEAST = 2.0**-149
_INT32_MAX = torch.iinfo(torch.int32).max


class ScalerState(NamedTuple):
    """What the scaler carries from one step to the next; immutable, a pytree of three tensors on one device.

    Under `torch.func.vmap` each field may carry leading batch dimensions: a batch of scalers.
    """

    scale: Tensor
    """float32, shape (): what the loss is multiplied by."""
    growth_tracker: Tensor
    """int32, shape (): clean steps since the scale last changed."""
    found_inf: Tensor
    """float32, shape (): 1.0 if a non-finite gradient was seen since the last update, else 0.0."""


_DTYPES = {"scale": torch.float32, "growth_tracker": torch.int32, "found_inf": torch.float32}


def check_state(call: str, state: object) -> ScalerState:
    """Return the state if it is one: a NamedTuple whose first fields are ScalerState's, each of its dtype, shape ().

    Raises:
        TypeError: it is no scaler state, or a field is no tensor or of another dtype.
        ValueError: a field has a shape other than ().
    """
    if not isinstance(state, tuple) or getattr(type(state), "_fields", ())[:3] != ScalerState._fields:
        raise TypeError(f"{call}: state must be a ScalerState, as init makes it; got {state!r}")
    known = cast(ScalerState, state)
    for name, dtype in _DTYPES.items():
        value = getattr(known, name)
        if not isinstance(value, Tensor):
            raise TypeError(f"{call}: state.{name} must be a {dtype} tensor of shape (); got {value!r}")
        if value.dtype != dtype:
            raise TypeError(f"{call}: state.{name} must be {dtype}; got {value.dtype}")
        if value.dim() != 0:
            raise ValueError(
                f"{call}: state.{name} must have shape (); got {tuple(value.shape)} "
                "(a batch of scalers goes through torch.func.vmap)"
            )
    return known


def replace(state: ScalerState, **changes: Tensor) -> ScalerState:
    """A state with some fields changed, of the same type.

    `NamedTuple._replace` under torch.compile gives an empty tuple on torch 2.11; tests/test_upstream.py tells when this
    can go.
    """
    return type(state)(*[changes.get(name, value) for name, value in zip(state._fields, state)])


def _real(name: str, value: object) -> float:
    """A Python or NumPy real number as a float; a tensor is refused, for it would be read on the host."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"ScalerConfig: {name} must be a Python number; got {value!r} of type {type(value).__name__}")
    return float(value)


def _scale_value(name: str, value: object) -> float:
    """A positive number that float32 holds."""
    number = _real(name, value)
    if not _FLOAT32_LEAST <= number <= _FLOAT32_MAX:
        raise ValueError(
            f"ScalerConfig: {name} must be positive and finite in float32, from 2**-149 to {_FLOAT32_MAX}; got {value}"
        )
    return number


@dataclass(frozen=True)
class ScalerConfig:
    """The constants of the scale's rule: Python values, checked when made, hashable, baked into a compiled graph.

    Args:
        init_scale: the scale before the first step; positive, finite in float32.
        growth_factor: what the scale is multiplied by after `growth_interval` clean steps; finite, above 1.
        backoff_factor: what the scale is multiplied by after a step with a non-finite gradient; in (0, 1).
        growth_interval: clean steps in a row that make the scale grow; an integer from 1 to 2**31 - 1.
        min_scale: the scale is never below it; None for no bound. Without one repeated backoff reaches 0, as in torch.
        max_scale: the scale is never above it; None for no bound but float32's.
        rule: "dynamic", the rule of `update`, or "static", a scale that never changes by itself.

    Raises:
        TypeError: a value is no number of the kind said above.
        ValueError: a value is out of the range said above, or init_scale is outside [min_scale, max_scale].

    Example:
        >>> ScalerConfig(init_scale=2.0**10, min_scale=1.0)  # doctest: +ELLIPSIS
        ScalerConfig(init_scale=1024.0, ..., min_scale=1.0, max_scale=None, rule='dynamic')

    References:
        Names and defaults: torch/amp/grad_scaler.py, PyTorch 2.13.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float | None = None
    max_scale: float | None = None
    rule: str = "dynamic"

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {"init_scale": _scale_value("init_scale", self.init_scale)}
        growth, backoff = _real("growth_factor", self.growth_factor), _real("backoff_factor", self.backoff_factor)
        if not (math.isfinite(growth) and growth > 1.0):
            raise ValueError(f"ScalerConfig: growth_factor must be finite and above 1; got {self.growth_factor}")
        if not 0.0 < backoff < 1.0:
            raise ValueError(f"ScalerConfig: backoff_factor must be above 0 and below 1; got {self.backoff_factor}")
        interval = self.growth_interval
        if isinstance(interval, bool) or not isinstance(interval, numbers.Integral):
            raise TypeError(f"ScalerConfig: growth_interval must be an integer; got {interval!r}")
        if not 1 <= interval <= _INT32_MAX:
            raise ValueError(f"ScalerConfig: growth_interval must be from 1 to 2**31 - 1; got {interval}")
        checked |= {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": int(interval)}
        for name in ("min_scale", "max_scale"):
            value = getattr(self, name)
            checked[name] = None if value is None else _scale_value(name, value)
        if self.rule not in ("dynamic", "static"):
            raise ValueError(f"ScalerConfig: rule must be 'dynamic' or 'static'; got {self.rule!r}")
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

    @classmethod
    def torch(
        cls,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> ScalerConfig:
        """The configuration that `torch.amp.GradScaler` would have with the same arguments.

        `enabled=False` gives `disabled()`.

        Example:
            >>> ScalerConfig.torch(init_scale=1024.0).init_scale
            1024.0

        References:
            torch/amp/grad_scaler.py, PyTorch 2.13.
        """
        if not enabled:
            return cls.disabled()
        return cls(init_scale, growth_factor, backoff_factor, growth_interval)

    @classmethod
    def static(cls, scale: float) -> ScalerConfig:
        """A scale that never changes; a step with a non-finite gradient is still skipped.

        Args:
            scale: the scale; positive, finite in float32.

        Example:
            >>> ScalerConfig.static(128.0).rule
            'static'
        """
        return cls(init_scale=scale, rule="static")

    @classmethod
    def disabled(cls) -> ScalerConfig:
        """A scale of 1 that never changes, for bfloat16 or float32 runs of the same program.

        Gradients are still checked and a step on a non-finite one is still skipped, where
        `torch.amp.GradScaler(enabled=False)` would take it.

        Example:
            >>> ScalerConfig.disabled().init_scale
            1.0
        """
        return cls.static(1.0)


def check_config(call: str, config: object) -> ScalerConfig:
    """Return the configuration if it is one; raise TypeError otherwise."""
    if not isinstance(config, ScalerConfig):
        names = ", ".join(f.name for f in fields(ScalerConfig))
        raise TypeError(f"{call}: config must be a ScalerConfig ({names}); got {config!r}")
    return config


def init(config: ScalerConfig = ScalerConfig(), *, device: torch.device | str | None = None) -> ScalerState:
    """Make the state before the first step.

    scale = init_scale, growth_tracker = 0, found_inf = 0. Nothing is lazy. Pure; no sync.

    Args:
        config: the configuration; the same one goes to `update`.
        device: where the state lives: the device of the gradients. None for torch's default device.

    Returns:
        A `ScalerState`.

    Raises:
        TypeError: config is no `ScalerConfig`.

    Example:
        >>> init(ScalerConfig(init_scale=8.0)).scale
        tensor(8.)

    References:
        `GradScaler._lazy_init_scale_growth_tracker`, torch/amp/grad_scaler.py, PyTorch 2.13.
    """
    config = check_config("init", config)
    return ScalerState(
        scale=torch.full((), config.init_scale, dtype=torch.float32, device=device),
        growth_tracker=torch.zeros((), dtype=torch.int32, device=device),
        found_inf=torch.zeros((), dtype=torch.float32, device=device),
    )
