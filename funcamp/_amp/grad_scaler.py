"""torch.amp.GradScaler's interface on the pure core, for loops and frameworks that own an optimizer."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._amp.arguments import check_saved, checked_device, checked_numbers
from funcamp._amp.nonfinite import describe_nonfinite
from funcamp._amp.skips_in_a_row import SkipsInARow
from funcamp._amp.unscale import Flags, by_device, combine_flags, unscale
from funcamp._amp.write_scale import apply_rule, set_scale
from funcamp._check import boolean, integer
from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.state import ScalerState, reciprocal, tensors_of
from funcamp._types import StateDict

_INT32_MAX = torch.iinfo(torch.int32).max

F = TypeVar("F", bound=Callable[..., Any])


def _untraced(method: F) -> F:
    """Return a method at which Dynamo breaks its graph, as at those of torch.amp."""
    # torch's own decorator: unlike torch.compiler.disable, it imports torch._dynamo at the first call.
    disable = _upstream.find("torch._disable_dynamo", torch.compiler.disable)
    return cast(F, disable(method))


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, the same calls, scales and skips, without a host sync for fused optimizers.

    `scale(loss).backward()`, `step(optimizer)`, `update()`; `unscale_(optimizer)` before clipping.

    A fused optimizer (`fused=True`) skips inside its kernel: prefer it. For any other the flag is read on the host, and
    `step` is called or not, as torch does.

    Compile the model, not the loop: as with torch's class, `torch.compile` breaks its graph at the scaler's calls. To
    compile the whole step, use `make_train_step` and `jit`.

    Safe in cases in which torch's class is not:

    - A gradient that is finite before unscaling and not after (a scale below 1, or 0) skips the step.
    - A fused optimizer gets a found_inf of 1.0 with any number of devices. torch adds their flags, and a kernel
      that gets 2.0 takes the step and changes its count by -1.
    - A fused SGD with momentum may skip its first step; torch then leaves its momentum uninitialized.
    - A backoff to 0 or below, from which no scale recovers, raises ValueError; so does an init_scale of 0 or infinity.

    Args:
        device: "cuda", "cpu" or another device type with a scaler.
        init_scale: the first scale.
        growth_factor: multiplies the scale after `growth_interval` clean steps.
        backoff_factor: multiplies the scale after a step with a non-finite gradient.
        growth_interval: clean steps in a row after which the scale grows.
        enabled: if False, every call except `step` does nothing; as in torch, the setters set what the getters return.
        config: another rule, or bounds; replaces the four numbers. `state_dict` then includes the rule's counters.
        allow_fp16: unscale float16 gradients, multiplied in float32 and rounded back; torch raises for them.

    Raises:
        AssertionError: growth_factor is not above 1, or backoff_factor not below 1.
        TypeError: device is not a string, or one of the four numbers is not a number; config is not a `ScalerConfig`,
            or allow_fp16 not a bool.
        ValueError: config is given with one of the four numbers; a number cannot be used.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> sgd, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler("cpu", init_scale=8.0)
        >>> scaler.scale(weight.sum()).backward()
        >>> scaler.step(sgd)
        >>> scaler.update()
        >>> weight.data, scaler.get_scale()
        (tensor([0.5000, 0.5000]), 8.0)

    References:
        torch/amp/grad_scaler.py, PyTorch 2.11 to 2.15.
    """

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
        allow_fp16: bool = False,
    ) -> None:
        boolean("GradScaler", "allow_fp16", allow_fp16)
        device = checked_device(device)
        numbers = init_scale, growth_factor, backoff_factor, growth_interval
        no_cuda = device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available()  # type: ignore[no-untyped-call]
        if enabled and no_cuda:
            warnings.warn("torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", stacklevel=2)
            enabled = False
        if enabled or config is not None:  # without it a disabled one takes any numbers, as torch's does
            numbers = checked_numbers(numbers, config)
        super().__init__(device, *numbers, enabled=enabled)
        self._skips = _skips_in_a_row()
        self._allow_fp16 = allow_fp16
        if enabled:
            self._config = ScalerConfig(init_scale) if config is None else config
            self._configure()
            self._counters: dict[str, Tensor] = {}
            self._init_counters = self._config.rule.first_counters()
            self._found_inf: Tensor | None = None

    if TYPE_CHECKING:  # torch's returns a Tensor, whose `backward` strict type checkers refuse

        def scale(self, outputs: object) -> Any: ...

    @_untraced
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients, unless `unscale_` did, and take the optimizer's step if all are finite.

        No sync with a device if the optimizer is fused, but for the steps in which SGD begins its momentum. For any
        other optimizer the flag is read; on a CPU the scale is read, too.

        Pass a closure by position, as torch's class takes it: it is not called in a skipped step, and its gradients are
        used as they are; those of a fused optimizer are divided by the scale, unless `unscale_` was called, and are not
        checked.

        If 20 steps in a row of an optimizer that is not fused are skipped, one warning names the first parameter whose
        gradient is not finite.

        Returns the result of `optimizer.step(*args, **kwargs)`, or None if it was not called.

        Raises:
            AssertionError: `scale` was not called before; no parameter has a gradient.
            RuntimeError: it was called for this optimizer since the last `update`; closure is passed by name.
            ValueError: a gradient is float16, without allow_fp16.
        """
        momenta_before = _fused_momenta(optimizer)
        try:
            result = super().step(optimizer, *args, **kwargs)
        except Exception:
            for name in ("grad_scale", "found_inf"):  # torch leaves them, and the next step would multiply by them
                if hasattr(optimizer, name):
                    delattr(optimizer, name)
            raise
        begun = _fused_momenta(optimizer) - momenta_before
        if begun and self._enabled and _is_any_set(self._per_optimizer_states[id(optimizer)]):
            for param in begun:
                del optimizer.state[param]["momentum_buffer"]
        return result

    @_untraced
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Back off or grow the scale by its rule, or set it. No sync.

        Raises:
            AssertionError: `scale` was not called before; no optimizer was stepped; new_scale is neither a Python
                number nor a tensor, or a tensor of several elements, on another type of device, or requires grad.
        """
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        self._configure()  # numbers may have been assigned to the attributes of torch's class
        flags = self._flags_of_step()
        if flags:
            self._found_inf = combine_flags(flags, scale.device)
        if new_scale is not None:
            set_scale(scale, new_scale, self._device, self._config)
        elif not flags:
            raise AssertionError("No inf checks were recorded prior to update.")
        else:
            state = ScalerState(scale, tracker, cast(Tensor, self._found_inf))
            apply_rule(state, self._counters, self._config)
        self._per_optimizer_states.clear()

    def _flags_of_step(self) -> list[Tensor]:
        """Return the flags of all optimizers and devices since the last update."""
        flags: list[Tensor] = []
        for noted in self._per_optimizer_states.values():
            flags += noted["found_inf_per_device"].values()
        return flags

    def metrics(self) -> ScalerState:
        """Return copies of the scale, the growth tracker and found_inf, as a state. No sync.

        found_inf is this step's after `unscale_` or `step`, and the last step's after `update`.
        """
        if not self._enabled or self._scale is None or self._growth_tracker is None:
            scale, tracker = (self._init_scale, self._init_growth_tracker) if self._enabled else (1.0, 0)
            return ScalerState(
                torch.tensor(scale, dtype=torch.float32),
                torch.tensor(tracker, dtype=torch.int32),
                torch.tensor(0.0, dtype=torch.float32),
            )
        flags = self._flags_of_step()
        if flags:
            found_inf = combine_flags(flags, self._scale.device).clone()
        else:
            found_inf = torch.zeros_like(self._scale) if self._found_inf is None else self._found_inf.clone()
        return ScalerState(self._scale.clone(), self._growth_tracker.clone(), found_inf)

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, 1 or more."""
        self._configure(growth_factor=new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, above 0 and at most 1."""
        self._configure(backoff_factor=new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of clean steps in a row after which the scale grows."""
        self._configure(growth_interval=new_interval)

    def state_dict(self) -> StateDict:
        """Return torch's five entries, and the counters of another rule by name. Reads the device."""
        saved = super().state_dict()
        return saved | self._read_counters() if self._enabled else saved

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the `state_dict` of this class or torch's, also as tensors. If it raises, nothing has changed.

        Raises:
            KeyError: an entry is missing.
            RuntimeError: it is empty, because a disabled scaler saved it.
            TypeError: it is not a dict, or an entry is neither a number nor a tensor of shape ().
            ValueError: a number in it cannot be used.
        """
        if not self._enabled:
            return
        # Everything is checked before anything is changed.
        saved = check_saved(state_dict, self._config)
        self._configure(**saved.constants)
        self._init_scale = saved.scale
        self._init_growth_tracker = saved.growth_tracker
        self._init_counters = saved.counters
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(saved.scale)
            self._growth_tracker.fill_(saved.growth_tracker)
            for name, counter in self._counters.items():
                counter.fill_(saved.counters[name])

    def __getstate__(self) -> StateDict:
        state = super().__getstate__()
        if self._enabled:
            # As torch's class saves the scale and the tracker: numbers, and no tensors.
            state |= {"_init_counters": self._read_counters(), "_counters": {}, "_found_inf": None}
        return state

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__({"_skips": _skips_in_a_row()} | state)  # an older one has none

    # Overrides of methods that torch's class provides for subclasses.

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> Flags:
        flags = self._flags(by_device(optimizer, allow_fp16 or self._allow_fp16), inv_scale.reshape(()))
        return {device: torch.maximum(found_inf, flag) for device, flag in flags.items()}

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        if type(self)._unscale_grads_ is GradScaler._unscale_grads_:
            flags = self._flags(by_device(optimizer, allow_fp16=True), reciprocal(scale), only_check_scale=scale)
        else:  # torch calls it here, too: a subclass may reduce the flags over ranks
            flags = self._unscale_grads_(optimizer, torch.ones_like(scale), torch.zeros_like(scale), True)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        return flags

    def _flags(
        self, grads: dict[torch.device, list[Tensor]], inv_scale: Tensor, only_check_scale: Tensor | None = None
    ) -> Flags:
        """Unscale gradients, or only check them for this scale; return the flag of all devices, on the scale's."""
        may_grow = self._may_grow(inv_scale)
        flags = []
        with torch.no_grad():
            for device, device_grads in grads.items():
                scale = None if only_check_scale is None else only_check_scale.to(device)
                flags.append(unscale(device_grads, inv_scale.to(device), may_grow=may_grow, only_check_scale=scale))
        # torch adds the flags of several devices, and a fused kernel that gets 2.0 takes the step.
        return {inv_scale.device: combine_flags(flags, inv_scale.device)} if flags else {}

    def _may_grow(self, inv_scale: Tensor) -> bool:
        """Return whether unscaling may multiply by more than 1; False only for a readable scale on a CPU."""
        return inv_scale.device.type != "cpu" or not inv_scale.item() <= 1.0  # also if it is NaN

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Take the step of an optimizer that is not fused, unless a flag is set, which the host reads."""
        is_skipped = _is_any_set(optimizer_state)
        self._skips.note(id(optimizer), skipped=is_skipped, describe=lambda: describe_nonfinite(optimizer))
        return None if is_skipped else optimizer.step(*args, **kwargs)

    def _configure(self, **values: Any) -> None:
        """Change constants that torch's class lets users change; if a value is invalid, change none."""
        if not self._enabled:  # has no configuration; as in torch, the getters return what was set
            for name, value in values.items():
                setattr(self, f"_{name}", value)
            return
        growth_factor = values.get("growth_factor", self._growth_factor)
        backoff_factor = values.get("backoff_factor", self._backoff_factor)
        growth_interval = values.get("growth_interval", self._growth_interval)
        integer("GradScaler", "growth_interval", growth_interval, least=-sys.maxsize - 1)
        # torch never grows with an interval of 0, nor with one that its counter cannot reach.
        interval_of_rule = growth_interval if 0 < growth_interval <= _INT32_MAX else _INT32_MAX
        numbers = growth_factor, backoff_factor, interval_of_rule
        config = self._config
        if numbers != (config.growth_factor, config.backoff_factor, config.growth_interval):
            self._config = replace(
                config,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=interval_of_rule,
            )
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval

    def _read_counters(self) -> dict[str, int]:
        """Return the counters of the rule by name; reads the device."""
        if self._scale is None:
            return self._init_counters
        return {name: int(counter.item()) for name, counter in self._counters.items()}

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._counters = tensors_of(self._init_counters, dev)


def _skips_in_a_row() -> SkipsInARow:
    return SkipsInARow("GradScaler.step", depth=6)


def _is_any_set(optimizer_state: dict[str, Any]) -> bool:
    """Return on the host whether a flag is set of what torch's class notes of an optimizer; waits for the device."""
    return any(bool(flag != 0) for flag in optimizer_state["found_inf_per_device"].values())


def _fused_momenta(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    """Return the parameters for which a fused SGD keeps a momentum. It begins one in a step that it skips, too."""
    if not isinstance(optimizer, torch.optim.SGD) or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return set()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {param for param in params if optimizer.state.get(param, {}).get("momentum_buffer") is not None}
