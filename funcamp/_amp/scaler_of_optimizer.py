"""What `GradScaler` holds: the scale, its rule, and how both are made, changed and saved."""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import replace as changed
from typing import Any, Literal

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState as Stage

from funcamp._amp.undo_compiled import prepare
from funcamp._scaler.config import ScalerConfig, check_config
from funcamp._scaler.state import ScalerState, tensors_of
from funcamp._scaler.state_dict import saved_count, saved_counters, saved_scale
from funcamp._scaler.update import first_counters

_INT32_MAX = torch.iinfo(torch.int32).max
_NOT_SCALED = "This may indicate your script did not use scaler.scale(loss or outputs) earlier in the iteration."


def _no_cuda() -> bool:
    return bool(torch.cuda.amp.common.amp_definitely_not_available())  # type: ignore[no-untyped-call]


def per_optimizer() -> dict[str, Any]:
    return {"stage": Stage.READY, "found_inf_per_device": {}}


class HeldScaler(torch.amp.GradScaler):
    """`GradScaler` without its iteration."""

    _takes_as_is = False
    """Whether a closure runs, whose gradients nothing will unscale."""

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        config: ScalerConfig | None = None,
        skip: Literal["select", "host"] | None = None,
        allow_fp16: bool = False,
    ) -> None:
        if skip not in (None, "select", "host"):
            raise ValueError(f'GradScaler: skip must be "select", "host" or None; got {skip!r}')
        if not isinstance(allow_fp16, bool):
            raise TypeError(f"GradScaler: allow_fp16 must be True or False; got {allow_fp16!r}")
        numbers = (init_scale, growth_factor, backoff_factor, growth_interval)
        if config is not None:
            check_config("GradScaler", config)
            if numbers != (2.0**16, 2.0, 0.5, 2000):
                raise ValueError(
                    "GradScaler: init_scale, growth_factor, backoff_factor and growth_interval must be left out where "
                    f"config is given; got {numbers}"
                )
            numbers = (config.init_scale, config.growth_factor, config.backoff_factor, config.growth_interval)
        if enabled and device == "cuda" and _no_cuda():
            warnings.warn("torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", stacklevel=2)
            enabled = False
        super().__init__(device, *numbers, enabled=enabled)
        self._skip, self._allow_fp16 = skip, allow_fp16
        if enabled:
            prepare()
            self._config = ScalerConfig(init_scale) if config is None else config
            self._configure()
            self._counters: dict[str, Tensor] = {}
            self._init_counters = first_counters(self._config)
            self._found_inf: Tensor | None = None
            self._per_optimizer_states = defaultdict(per_optimizer)

    def _configure(self, **values: Any) -> None:
        """Change what torch's class lets its users change; where a value is refused nothing changes."""
        growth = values.get("growth_factor", self._growth_factor)
        backoff = values.get("backoff_factor", self._backoff_factor)
        interval = values.get("growth_interval", self._growth_interval)
        # torch never grows at an interval of 0, nor at one that its counter cannot reach
        reached = interval if 0 < interval <= _INT32_MAX else _INT32_MAX
        self._config = changed(self._config, growth_factor=growth, backoff_factor=backoff, growth_interval=reached)
        self._growth_factor, self._backoff_factor, self._growth_interval = growth, backoff, interval

    def _read_counters(self) -> dict[str, int]:
        if self._scale is None:
            return self._init_counters
        return {name: int(counter.item()) for name, counter in self._counters.items()}

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None:
            raise AssertionError(f"Attempted {funcname} but _scale is None.  " + _NOT_SCALED)
        if self._growth_tracker is None:
            raise AssertionError(f"Attempted {funcname} but _growth_tracker is None.  " + _NOT_SCALED)
        return self._scale, self._growth_tracker

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)
        self._counters = tensors_of(self._init_counters, dev)

    def metrics(self) -> ScalerState:
        """The scale, the growth tracker and the last update's found_inf, as copies: for a `MetricReader`. No sync."""
        if not self._enabled or self._scale is None or self._growth_tracker is None:
            return ScalerState(torch.tensor(self.get_scale()), torch.tensor(0, dtype=torch.int32), torch.tensor(0.0))
        found_inf = torch.zeros_like(self._scale) if self._found_inf is None else self._found_inf.clone()
        return ScalerState(self._scale.clone(), self._growth_tracker.clone(), found_inf)

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor of growth, 1 or more."""
        self._configure(growth_factor=new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor of backoff, above 0 and at most 1."""
        self._configure(backoff_factor=new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the clean steps in a row that make the scale grow."""
        self._configure(growth_interval=new_interval)

    def state_dict(self) -> dict[str, Any]:
        """The five entries of torch's class, and the counters of another rule by their names. Reads the device."""
        saved = super().state_dict()
        return saved | self._read_counters() if self._enabled else saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, of this class or torch's. A dict that is refused changes nothing.

        Raises:
            KeyError: an entry is missing.
            RuntimeError: it is empty: a disabled scaler's.
            TypeError: an entry is no number.
            ValueError: a number in it cannot be used.
        """
        if not self._enabled:
            return
        if len(state_dict) == 0:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
            )
        call = "GradScaler.load_state_dict"
        scale = saved_scale(call, state_dict["scale"])
        rule = {name: state_dict[name] for name in ("growth_factor", "backoff_factor", "growth_interval")}
        tracker = saved_count(call, "_growth_tracker", state_dict["_growth_tracker"])
        counters = saved_counters(call, state_dict, self._config)
        self._configure(**rule)
        self._init_scale, self._init_growth_tracker, self._init_counters = scale, tracker, counters
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(scale)
            self._growth_tracker.fill_(tracker)
            for name, counter in self._counters.items():
                counter.fill_(counters[name])

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled:
            state |= {"_init_counters": self._read_counters(), "_counters": {}, "_found_inf": None}
        return state
