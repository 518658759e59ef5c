"""torch.amp.GradScaler's interface on the pure core, for loops and frameworks that own an optimizer."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState as Stage

from funcamp import _upstream
from funcamp._amp.arguments import check_saved, checked_device, checked_numbers
from funcamp._amp.fused_step import fused_step
from funcamp._amp.nonfinite import describe_nonfinite
from funcamp._amp.skips_in_a_row import SkipsInARow
from funcamp._amp.undo import Flags, combine_flags, is_watched, obstacle, read_any, select, with_grads
from funcamp._amp.unscale import by_device, unscale
from funcamp._amp.write_scale import apply_rule, set_scale
from funcamp._check import boolean, integer
from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.state import ScalerState, reciprocal, tensors_of
from funcamp._types import Args, Kwargs, StateDict

_INT32_MAX = torch.iinfo(torch.int32).max

F = TypeVar("F", bound=Callable[..., Any])


def _untraced(method: F) -> F:
    """Return a method at which Dynamo breaks its graph, as at those of torch.amp."""
    # torch's own decorator: unlike torch.compiler.disable, it imports torch._dynamo at the first call.
    disable = _upstream.find("torch._disable_dynamo", torch.compiler.disable)
    return cast(F, disable(method))


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` without host syncs: the same calls, scales, skips, errors and `state_dict`.

    `scale(loss).backward()`, `step(optimizer)`, `update()`; `unscale_(optimizer)` before clipping.

    A fused optimizer (`fused=True`) skips inside its kernel. For another class of torch.optim the scaler copies
    parameters and state, takes the step, and restores the copies on the device if the step must be skipped. This costs
    memory traffic and a launch per tensor, but no synchronization: prefer fused=True, or skip="host". If a step cannot
    be restored this way, the flag is read on the host, as torch does: an optimizer of another class; hooks, or a `step`
    that replaces the class's (unless skip="select" allows them to see a step that is restored); a closure; parameters
    that are tensor subclasses or sparse; counters on the host (Adam on a GPU without capturable=True); a momentum of
    sparse gradients.

    Compile the model, not the loop: as with torch's class, `torch.compile` breaks its graph at the scaler's calls. To
    compile the whole step, use `make_train_step` and `jit`.

    Safe in cases in which torch's class is not:

    - A gradient that is finite before unscaling and not after (a scale below 1, or 0) skips the step.
    - A fused optimizer gets a found_inf of 1.0 with any number of devices. torch adds their flags, and a kernel
      that gets 2.0 takes the step and changes its count by -1.
    - A fused SGD with momentum may skip its first step; torch then leaves its momentum uninitialized.
    - A backoff_factor of 0 or below, from which no scale recovers, raises ValueError; so does an init_scale of 0 or
      infinity.

    Args:
        device: "cuda", "cpu" or another device type with a scaler.
        init_scale: the first scale.
        growth_factor: multiplies the scale after `growth_interval` clean steps.
        backoff_factor: multiplies the scale after a step with a non-finite gradient.
        growth_interval: clean steps in a row after which the scale grows.
        enabled: if False, every call except `step` does nothing; as in torch, the setters set what the getters return.
        config: another rule, or bounds; replaces the four numbers. `state_dict` then includes the rule's counters.
        skip: "select" restores a skipped step on the device; "host" reads the flag and does not call `step` if it is
            set, as torch does. By default "select", but "host" on a CPU, where the read is free, and under Accelerate.
        allow_fp16: unscale float16 gradients, multiplied in float32 and rounded back; torch raises for them.

    Raises:
        AssertionError: growth_factor is not above 1, or backoff_factor not below 1.
        TypeError: device is not a string, or one of the four numbers is not a number; config is not a `ScalerConfig`,
            or allow_fp16 not a bool.
        ValueError: config is given with one of the four numbers; skip is neither; a number cannot be used.

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

    _takes_as_is = False
    """Whether a closure is running, whose gradients are not unscaled."""

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
        self._skip = skip
        self._skips = _skips_in_a_row()
        self._allow_fp16 = allow_fp16
        if enabled:
            self._config = ScalerConfig(init_scale) if config is None else config
            self._configure()
            self._counters: dict[str, Tensor] = {}
            self._init_counters = self._config.rule.first_counters()
            self._found_inf: Tensor | None = None

    @_untraced
    def scale(self, outputs: object) -> Any:
        """Multiply a tensor, or every tensor of nested iterables, by the scale. No sync.

        Raises:
            ValueError: outputs is neither a tensor nor an iterable of them.
        """
        if not self._enabled:
            return outputs
        if self._takes_as_is:
            warnings.warn(
                "GradScaler.scale: it is called in the closure of step(), whose gradients are taken as they are: "
                "unscale them in the closure, or return the unscaled loss from it",
                stacklevel=4,  # two frames are those of `_untraced`
            )
        if isinstance(outputs, Tensor):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            return outputs * cast(Tensor, self._scale).to(device=outputs.device, non_blocking=True)
        if isinstance(outputs, abc.Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    @_untraced
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Multiply an optimizer's gradients by 1 / scale in place and record non-finite ones. No sync.

        Optional: for clipping or inspecting gradients between `backward` and `step`. Sparse float16 gradients are
        replaced by coalesced ones.

        Raises:
            AssertionError: `scale` was not called before.
            RuntimeError: it was called for this optimizer since the last `update`, or after `step`.
            ValueError: a gradient is float16, without allow_fp16.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        noted = self._per_optimizer_states[id(optimizer)]
        if noted["stage"] is Stage.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if noted["stage"] is Stage.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        noted["found_inf_per_device"] = self._unscale_grads_(
            optimizer, reciprocal(scale), torch.zeros_like(scale), self._allow_fp16
        )
        noted["stage"] = Stage.UNSCALED

    @_untraced
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients, unless `unscale_` did, and take the optimizer's step if all are finite.

        No sync with a device, with these exceptions. On a CPU, unless skip="select", the scale is read, and the flag if
        the optimizer is not fused. The flag is also read with skip="host", for an optimizer with Python numbers or
        tensors on the host or of your own class, and at a step that makes the state of a parameter: the first one.

        Pass a closure by position; it is not called in a skipped step. Its gradients are used as they are, so `scale`
        warns if it is called in it. Those of a fused optimizer are divided by the scale, unless `unscale_` was called,
        and are not checked.

        If the flag is read and 20 steps in a row are skipped, one warning names the first parameter whose gradient is
        not finite.

        Returns the result of `optimizer.step(*args, **kwargs)`, or None if it was not called.

        Raises:
            AssertionError: `scale` was not called before; no parameter has a gradient, or none had one at `unscale_`.
            RuntimeError: it was called for this optimizer since the last `update`; closure is passed by name.
            ValueError: a gradient is float16, without allow_fp16.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._check_scale_growth_tracker("step")
        noted = self._per_optimizer_states[id(optimizer)]
        if noted["stage"] is Stage.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        has_closure = _has_argument(args, kwargs)
        if has_closure:
            # A fused kernel divides by the scale whatever the closure computes, unless `unscale_` was called.
            self._takes_as_is = not is_fused or noted["stage"] is Stage.UNSCALED
        try:
            if is_fused:
                result = self._fused_step(optimizer, noted, args, kwargs)
            else:
                if noted["stage"] is Stage.READY:
                    self.unscale_(optimizer)
                if len(noted["found_inf_per_device"]) == 0:
                    raise AssertionError("No inf checks were recorded for this optimizer.")
                result = self._maybe_opt_step(optimizer, noted, *args, **kwargs)
        finally:
            if has_closure:
                self._takes_as_is = False
        noted["stage"] = Stage.STEPPED
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

    # Overrides of methods that torch's class provides for subclasses.

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> Flags:
        flags = self._flags(by_device(optimizer, allow_fp16), inv_scale.reshape(()))
        return {device: torch.maximum(found_inf.to(device), flag) for device, flag in flags.items()}

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
        """Unscale gradients, or only check them for this scale; return the flags."""
        may_grow = self._may_grow(inv_scale)
        flags = {}
        with torch.no_grad():
            for device, device_grads in grads.items():
                scale = None if only_check_scale is None else only_check_scale.to(device)
                flags[device] = unscale(device_grads, inv_scale.to(device), may_grow=may_grow, only_check_scale=scale)
        return flags

    def _may_grow(self, inv_scale: Tensor) -> bool:
        """Return whether unscaling may multiply by more than 1; False only for a readable scale on a CPU."""
        if self._skip == "select" or inv_scale.device.type != "cpu":
            return True
        return not inv_scale.item() <= 1.0  # also if it is NaN

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Take the step of an optimizer that is not fused, unless a flag is set."""
        flags: Flags = optimizer_state["found_inf_per_device"]
        has_closure = _has_argument(args, kwargs)
        if self._reads_flag(optimizer, flags, has_closure):
            is_skipped = read_any(flags)
            self._skips.note(id(optimizer), skipped=is_skipped, describe=lambda: describe_nonfinite(optimizer))
            return None if is_skipped else optimizer.step(*args, **kwargs)
        reason = "step is given a closure, which a skipped step must not call" if has_closure else None
        return select(optimizer, flags, lambda: optimizer.step(*args, **kwargs), reason)

    def _reads_flag(self, optimizer: torch.optim.Optimizer, flags: Flags, has_closure: bool) -> bool:
        """Return whether the flag is read on the host without a warning: by choice, or by default if that is better."""
        if self._skip is not None:
            return self._skip == "host"
        if all(device.type == "cpu" for device in flags):  # a read is free there
            return True
        # What would observe a step that is undone. With an obstacle `select` reads the flag too, and warns.
        return obstacle(optimizer) is None and (is_watched(optimizer) or has_closure)

    def _fused_step(self, optimizer: Any, noted: dict[str, Any], args: Args, kwargs: Kwargs) -> object:
        """Step an optimizer whose step takes grad_scale and found_inf, or the scaler itself."""
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            return super().step(optimizer, *args, **kwargs)
        scale, _ = self._check_scale_growth_tracker("step")
        is_unscaled = noted["stage"] is Stage.UNSCALED
        if not is_unscaled:
            self._check_inf_per_device(optimizer)
        flags: Flags = noted["found_inf_per_device"]
        if not flags and (with_grads(optimizer) or _has_argument(args, kwargs)):
            raise AssertionError(
                "No inf checks were recorded for this optimizer: unscale_() or step() must be called after backward(); "
                "there was no gradient when it was called, so those that are there now would be taken scaled."
            )
        return fused_step(optimizer, scale, flags, is_unscaled=is_unscaled, args=args, kwargs=kwargs)

    def _configure(self, **values: Any) -> None:
        """Change constants that torch's class lets users change; if a value is invalid, change none."""
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
    return SkipsInARow("GradScaler.step", depth=5)


def _has_argument(args: Args, kwargs: Kwargs) -> bool:
    """Return whether a step gets an argument; None does not count, because Accelerate passes it."""
    return any(value is not None for value in (*args, *kwargs.values()))
