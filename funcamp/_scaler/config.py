"""The scaler's configuration: Python values only, and a preset for the rule of every library."""

from __future__ import annotations

from dataclasses import dataclass, fields

from funcamp._scaler.presets import Presets


@dataclass(frozen=True)
class ScalerConfig(Presets):
    """The constants of the scale's rule: Python values, checked when made, hashable, baked into a compiled graph.

    Args:
        init_scale: the scale before the first step; positive, finite in float32.
        growth_factor: what the scale is multiplied by after `growth_interval` clean steps; finite, 1 or more.
        backoff_factor: what the scale is multiplied by after a step with a non-finite gradient; in (0, 1]. The rules of
            apex, DeepSpeed, jmp, TensorFlow and fairseq divide by growth_factor: there it is 1 / growth_factor.
        growth_interval: clean steps in a row that make the scale grow; an integer from 1 to 2**31 - 1.
        min_scale: the scale is never below it; None for no bound. Without one repeated backoff reaches 0, as in torch.
        max_scale: the scale is never above it; None for no bound but float32's.
        rule: "dynamic", the rule of `update`; another is best asked for by its preset, which says what it does.
        hysteresis: overflows that one backoff takes, in the rules that count them; an integer from 1 to 2**31 - 1.
        tolerance: the part of the steps since the last change that must overflow for a backoff (fairseq); in [0, 1].
        stop_scale: a backoff to it or below is undone, and the scale is `exhausted` (fairseq); None elsewhere.

    Raises:
        TypeError: a value is no number of the kind said above.
        ValueError: a value is out of the range said above, or init_scale is outside [min_scale, max_scale].

    Example:
        >>> ScalerConfig(init_scale=2.0**10, min_scale=1.0)  # doctest: +ELLIPSIS
        ScalerConfig(init_scale=1024.0, ..., min_scale=1.0, ..., rule='dynamic', ...)

    References:
        Names and defaults: torch/amp/grad_scaler.py, PyTorch 2.13.
    """

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
    def warm_start(
        cls,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        max_scale: float | None = None,
    ) -> ScalerConfig:
        """Torch's rule, after a search for the scale at the start.

        Overflows divide the scale by 2, 4, 16, 256, ... until a step is clean; clean steps double it, up to about a
        quarter of what overflowed last, to the first overflow (then it is quartered), to max_scale, or to 2**24. From
        there on the rule is torch's. Worth it where init_scale may be far off: beside torch's rule it loses a step or
        two more where init_scale is right, and a third of the steps where it is 2**15 too high.

        Example:
            >>> ScalerConfig.warm_start(init_scale=2.0**24).rule
            'warm_start'

        References:
            benchmarks/warm_start.py has the comparison.
        """
        return cls(init_scale, growth_factor, backoff_factor, growth_interval, None, max_scale, "warm_start")

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
