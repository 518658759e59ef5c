"""Turn the calls of a run into events: functions of torch are replaced for the time of the run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from funcamp import _upstream
from funcamp._audit import events
from funcamp._audit.autograd_graph import Scaling, mark_scaled, read_graph
from funcamp._audit.events import Event, Key, Reduction
from funcamp._audit.lines import calling_line, calling_lines, is_called_by_torch
from funcamp._audit.operations import Operations, all_finite
from funcamp._audit.replicas import Replicas
from funcamp._audit.tracked import Tracked, address_of
from funcamp._upstream.replaced import replaced

_current_node = _upstream.find("torch._C._current_autograd_node")
_without_modes = _upstream.find("torch._C._DisableTorchDispatch")

#: Gets a function and the arguments of its call, and calls it.
_Handler = Callable[..., Any]


class Observer:
    """Watches a run.

    Args:
        emit: gets each event.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        _upstream.check(_current_node)
        self._emit_now = emit
        self._in_hook = False
        """Whether a hook of a parameter runs, within a backward pass."""
        self._deferred: list[Event] = []
        """The events of hooks, until their backward pass has ended."""
        self._hooks_called: set[tuple[int, Key]] = set()
        """The hooks, and their parameters, that were called in this backward pass: the report may repeat the pass."""
        self._tracked = Tracked()
        self._updates: dict[Key, int] = {}
        """How many updates each scaler has had."""
        self._scales: dict[Key, float] = {}
        """The scale that each scaler's `get_scale` returned last."""
        self._loaded_numbers: set[float] = set()
        """The numbers in files that were loaded."""
        self._has_scaled = False
        """Whether a scaler has scaled a loss."""
        self._outer_scaling: Scaling | None = None
        """Of the backward pass that runs now."""
        self._replicas = Replicas(self._tracked)
        self._is_quiet = False
        """Whether an observed call runs, whose inner calls are its own."""
        self._differentiates = False
        """Whether a backward pass runs, in which DDP and FSDP write gradients."""
        self._stepping: set[Key] = set()
        """The optimizers whose own step runs now."""
        self._applied: set[Key] = set()
        """The optimizers whose own step has run since the scaler's step was called."""
        self._scaler_steps = False
        """Whether a scaler's step runs."""
        self._operations = Operations(self._emit, self._tracked, self._hides_operations)
        self._passes = 0
        self._first_loss_is_finite = True

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Context manager: calls of torch are events."""
        with contextlib.ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._begin_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._end_step).remove)
            for owner, name, handler in list(self._handlers()):
                stack.enter_context(replaced(owner, **{name: self._observed(vars(owner)[name], handler)}))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._operations)
            # What the run imported from torch by name stays an observed function in its own modules.
            stack.callback(setattr, self, "_is_quiet", True)
            yield

    def _emit(self, event: Event) -> None:
        """Report an event; one of a hook after its backward pass, which made the gradient what it is."""
        if self._in_hook:
            self._deferred.append(event)
        else:
            self._emit_now(event)

    def _hides_operations(self) -> bool:
        """Return whether operations that run now are torch's or an optimizer's own."""
        if self._is_quiet or self._stepping:
            return True
        return not self._in_hook and (self._differentiates or _current_node() is not None)

    def _handlers(self) -> Iterator[tuple[Any, str, _Handler]]:
        """Yield what is observed: an owner, a name in it, and what handles a call."""
        scaler_calls: dict[str, _Handler] = {
            "__init__": self._make_scaler,
            "scale": self._scale,
            "unscale_": self._unscale,
            "step": self._step,
            "update": self._update,
            "get_scale": self._get_scale,
            "state_dict": self._save_scaler,
            "__getstate__": self._save_scaler,
            "load_state_dict": self._load_scaler,
        }
        for scaler_class in _classes_from(torch.amp.GradScaler):
            for name in scaler_calls.keys() & vars(scaler_class).keys():
                yield scaler_class, name, scaler_calls[name]
        for scheduler_class in _classes_from(LRScheduler):
            if "step" in vars(scheduler_class):
                yield scheduler_class, "step", self._step_scheduler
        yield Tensor, "register_hook", self._register_hook
        yield Tensor, "register_post_accumulate_grad_hook", self._register_hook_after
        yield torch.autograd, "backward", self._backward
        yield torch.autograd, "grad", self._grad
        yield Optimizer, "__init__", self._make_optimizer
        yield Optimizer, "zero_grad", self._clear_optimizer
        yield Optimizer, "load_state_dict", self._load_optimizer
        yield nn.Module, "zero_grad", self._clear_module
        yield nn.Module, "half", self._halve
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            yield owner, "clip_grad_norm_", self._clip
            yield owner, "clip_grad_value_", self._clip
            if hasattr(owner, "clip_grads_with_norm_"):
                yield owner, "clip_grads_with_norm_", self._clip
        for owner in (torch, torch.serialization):
            yield owner, "save", self._save
            yield owner, "load", self._load
        if torch.distributed.is_available():
            for name in ("all_reduce", "all_reduce_coalesced", "reduce"):
                yield torch.distributed, name, self._reduce
            yield nn.parallel.DistributedDataParallel, "__init__", self._make_replica
            yield torch.distributed.Reducer, "prepare_for_backward", self._prepare_reducer  # type: ignore[attr-defined]

    def _observed(self, function: Callable[..., Any], handler: _Handler) -> Callable[..., Any]:
        """Wrap a function: its handler gets each call that is not made by an observed one."""

        @functools.wraps(function)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if self._is_quiet:
                return function(*args, **kwargs)
            return handler(function, *args, **kwargs)

        return observed

    def _quietly(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function whose inner calls are no events."""
        with replaced(self, _is_quiet=True):
            return function(*args, **kwargs)

    # Scalers.

    def _make_scaler(self, function: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        self._quietly(function, scaler, *args, **kwargs)
        key = self._tracked.key(scaler)
        self._emit(events.ScalerMade(calling_line(), key))
        if scaler.is_enabled() and scaler._init_scale in self._loaded_numbers:  # loaded by hand
            self._emit(events.ScalerLoaded(calling_line(), key))

    def _scale(self, function: Any, scaler: Any, outputs: Any) -> Any:
        if not self._passes and isinstance(outputs, Tensor):
            self._first_loss_is_finite = all_finite(outputs)
        result = self._quietly(function, scaler, outputs)
        losses = list(result) if isinstance(result, Iterator) else result
        if scaler.is_enabled():
            key = self._tracked.key(scaler)
            scaling = Scaling(key, self._updates.get(key, 0))
            self._has_scaled = True
            for loss in _tensors_in(losses):
                self._tracked.keep_loss(loss, scaling)
                if loss.grad_fn is not None:
                    mark_scaled(loss.grad_fn, scaling)
        return iter(losses) if isinstance(result, Iterator) else result

    def _unscale(self, function: Any, scaler: Any, optimizer: Any) -> None:
        self._emit(events.Unscaled(calling_line(), **self._call_for(optimizer, scaler)))
        self._quietly(function, scaler, optimizer)

    def _step(self, function: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        line = calling_line()
        self._emit(events.StepCalled(line, **self._call_for(optimizer, scaler)))
        key = self._tracked.key(optimizer)
        self._applied.clear()
        with replaced(self, _scaler_steps=True):
            result = self._quietly(function, scaler, optimizer, *args, **kwargs)
        # An optimizer that wraps another may have no hooks of its own.
        is_seen = hasattr(getattr(type(optimizer), "step", None), "hooked")
        self._emit(events.StepEnded(line, key, bool(self._applied) or not is_seen))
        return result

    def _update(self, function: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        key = self._tracked.key(scaler)
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        sets_scale = bool(given)
        if any(isinstance(value, (int, float)) and value in self._loaded_numbers for value in given):
            self._emit(events.ScalerLoaded(calling_line(), key))
        self._emit(events.Updated(calling_line(), key, sets_scale, scaler.is_enabled()))
        self._quietly(function, scaler, *args, **kwargs)
        self._updates[key] = self._updates.get(key, 0) + scaler.is_enabled()

    def _get_scale(self, function: Any, scaler: Any) -> Any:
        if scaler.is_enabled():  # otherwise it is a number of Python
            self._emit(events.ScaleRead(calling_line(), self._tracked.key(scaler)))
        scale = self._quietly(function, scaler)
        if scaler.is_enabled():
            self._note_scale(scaler, scale)
        return scale

    def _note_scale(self, scaler: Any, scale: float) -> None:
        """Remember a scale that the loop has in its hands: it may unscale by it, or save it."""
        self._tracked.scales.add(scale)
        self._scales[self._tracked.key(scaler)] = scale

    def _save_scaler(self, function: Any, scaler: Any) -> Any:
        self._emit(events.ScalerSaved(calling_line(), self._tracked.key(scaler)))
        return self._quietly(function, scaler)

    def _load_scaler(self, function: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        self._emit(events.ScalerLoaded(calling_line(), self._tracked.key(scaler)))
        self._quietly(function, scaler, *args, **kwargs)

    # Optimizers and schedulers.

    def _make_optimizer(self, function: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._quietly(function, optimizer, *args, **kwargs)
        parameters = self._tracked.parameters_of(optimizer)
        self._emit(events.OptimizerMade(calling_line(), self._tracked.key(optimizer), parameters))

    def _begin_step(self, optimizer: Any, *_: object) -> None:
        """Before an optimizer's own step."""
        if not self._scaler_steps:
            self._emit(events.StepCalled(calling_line(), **self._call_for(optimizer, None)))
        self._stepping.add(self._tracked.key(optimizer))

    def _end_step(self, optimizer: Any, *_: object) -> None:
        """After an optimizer's own step."""
        key = self._tracked.key(optimizer)
        self._stepping.discard(key)
        self._applied.add(key)
        if not self._scaler_steps:
            self._emit(events.StepEnded(calling_line(), key, True))

    def _call_for(self, optimizer: Any, scaler: Any) -> dict[str, Any]:
        """Return the fields of a call for an optimizer's gradients; report those that the loop replaced before."""
        written = self._tracked.replaced_gradients(optimizer)
        if written:
            self._emit(events.GradientWritten(calling_line(), written))
        return {
            "optimizer": self._tracked.key(optimizer),
            "scaler": None if scaler is None else self._tracked.key(scaler),
            "parameters": self._tracked.parameters_of(optimizer),
            "enabled": scaler is not None and scaler.is_enabled(),
            "has_refused_float16": _refuses_float16(scaler) and _has_float16_gradient(optimizer),
            "lines": calling_lines(),
        }

    def _clear_optimizer(self, function: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        parameters = self._tracked.parameters_of(optimizer)
        self._emit(events.Cleared(calling_line(), parameters, self._tracked.key(optimizer)))
        self._quietly(function, optimizer, *args, **kwargs)

    def _load_optimizer(self, function: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._emit(events.OptimizerLoaded(calling_line(), self._tracked.key(optimizer)))
        self._quietly(function, optimizer, *args, **kwargs)

    def _step_scheduler(self, function: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is not None:
            self._emit(events.SchedulerStepped(calling_line(), self._tracked.key(optimizer)))
        return self._quietly(function, scheduler, *args, **kwargs)

    # Gradients.

    def _register_hook(self, function: Any, tensor: Any, hook: Any) -> Any:
        return function(tensor, self._watched(hook, tensor, _gradient_returned))

    def _register_hook_after(self, function: Any, tensor: Any, hook: Any) -> Any:
        return function(tensor, self._watched(hook, tensor, _gradient_added))

    def _watched(self, hook: Any, tensor: Any, gradient_of: Callable[[Any, Any], Any]) -> Any:
        """Return a hook of a parameter, watched; any other tensor's hook, and torch's own, as it is.

        gradient_of: returns the gradient, of what the hook gets and what it has returned.
        """
        if not tensor.is_leaf or is_called_by_torch():
            return hook
        key = self._tracked.key(tensor)

        @functools.wraps(hook)
        def watched(argument: Any) -> Any:
            if self._is_quiet or (id(hook), key) in self._hooks_called:
                return self._quietly(hook, argument)
            self._hooks_called.add((id(hook), key))
            before = gradient_of(argument, None)
            with replaced(self, _in_hook=True), self._tracked.hooked(before, key):
                result = hook(argument)
                after = gradient_of(argument, result)
                is_other = address_of(after) not in (0, address_of(before))
                if is_other and not self._tracked.is_multiple(after):
                    self._emit(events.GradientWritten(calling_line(), (key,)))
            return result

        return watched

    def _emit_deferred(self) -> None:
        """Report what hooks did in a backward pass that is reported."""
        if not self._in_hook:
            deferred, self._deferred = self._deferred, []
            for event in deferred:
                self._emit_now(event)

    def _backward(self, function: Any, tensors: Any, *args: Any, inputs: Any = None, **kwargs: Any) -> Any:
        if isinstance(tensors, Iterator):
            tensors = list(tensors)
        outputs = _tensors_in(tensors)
        graph = read_graph(outputs)
        is_nested = _current_node() is not None  # in a checkpoint whose forward pass runs again
        if not is_nested:  # what is left is of `torch.autograd.grad`, or of a pass that raised
            self._deferred.clear()
            self._hooks_called.clear()
            self._tracked.drop_powers()  # what is left of earlier gradients may have been unscaled
        scaling = self._outer_scaling if is_nested else graph.scaling
        synced = self._replicas.synced()
        leaves = graph.leaves if inputs is None else _tensors_in(inputs)
        keys = self._tracked.parameters(leaves)
        empty = frozenset(key for key, leaf in zip(keys, leaves) if _is_zero(leaf.grad))
        not_finite = "" if is_nested or self._passes else self._find_not_finite(outputs, leaves, graph.scaling)
        with replaced(self, _outer_scaling=scaling, _differentiates=True):
            result = function(tensors, *args, inputs=inputs, **kwargs)
        self._passes += not is_nested
        self._tracked.note_gradients(leaves)
        self._replicas.end_pass(keys)
        self._emit(
            events.Backward(
                calling_line(),
                parameters=keys,
                empty=empty,
                scaler=None if scaling is None else scaling.scaler,
                dtypes=graph.dtypes,
                reduction=Reduction.OTHER if is_nested else graph.reduction,
                autocast_dtype=None if is_nested else _autocast_dtype(outputs),
                lines=calling_lines(),
                not_finite=not_finite,
                nonfinite_input=self._operations.nonfinite_input,
                retains_graph=bool(args[1] if len(args) > 1 else kwargs.get("retain_graph")),
                synced=synced,
                unsynced=self._replicas.parameters().intersection(keys) - synced,
            )
        )
        self._emit_deferred()
        return result

    def _grad(self, function: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(outputs, Iterator):
            outputs = list(outputs)
        if _current_node() is None:
            scaling = read_graph(_tensors_in(outputs)).scaling if self._has_scaled else None
            self._emit(events.GradientsTaken(calling_line(), None if scaling is None else scaling.scaler))
        return function(outputs, *args, **kwargs)

    def _find_not_finite(self, outputs: list[Tensor], leaves: list[Tensor], scaling: Scaling | None) -> str:
        """Return what is not finite in the first pass: "parameter", "loss" or ""."""
        if not all(all_finite(leaf) for leaf in leaves):
            return "parameter"
        is_finite = all(map(all_finite, outputs)) if scaling is None else self._first_loss_is_finite
        return "" if is_finite else "loss"

    def _clear_module(self, function: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        parameters = self._tracked.parameters(module.parameters())
        self._emit(events.Cleared(calling_line(), parameters, None))
        self._quietly(function, module, *args, **kwargs)

    def _halve(self, function: Any, module: nn.Module) -> Any:
        result = self._quietly(function, module)
        self._emit(events.CastToFloat16(calling_line(), self._tracked.parameters(module.parameters())))
        return result

    def _clip(self, function: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        clipped = _tensors_in(parameters)  # a generator can be read once
        self._emit(events.Clipped(calling_line(), self._tracked.parameters(clipped)))
        return self._quietly(function, clipped, *args, **kwargs)

    def _reduce(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        reduced = args[0] if args else kwargs.get("tensor", kwargs.get("tensors", ()))
        for tensor in _tensors_in(reduced):
            keys = self._tracked.gradients_among([tensor])
            if keys:
                self._emit(events.Reduced(calling_line(), keys))
            else:
                self._tracked.keep_reduced(tensor, calling_line())
        return self._quietly(function, *args, **kwargs)

    def _make_replica(self, function: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        function(model, *args, **kwargs)
        self._replicas.add(model)

    def _prepare_reducer(self, function: Any, reducer: Any, *args: Any, **kwargs: Any) -> None:
        self._replicas.prepare(reducer)
        function(reducer, *args, **kwargs)

    # Files.

    def _save(self, function: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        line = calling_line()
        self._emit(events.FileSaved(line, _has_optimizer(obj)))
        numbers = set(_numbers_in(obj))
        for scaler, scale in self._scales.items():
            if scale in numbers:  # saved by hand
                self._emit(events.ScalerSaved(line, scaler))
        return function(obj, *args, **kwargs)  # not quietly: a scaler in it is pickled

    def _load(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self._emit(events.FileLoaded(calling_line()))
        obj = function(*args, **kwargs)
        self._loaded_numbers |= set(_numbers_in(obj))
        return obj


def _classes_from(base: type) -> list[type]:
    """Return a class and all its subclasses."""
    classes = [base]
    for one in classes:
        subclasses: list[type] = one.__subclasses__()
        classes += [subclass for subclass in subclasses if subclass not in classes]
    return classes


def _gradient_returned(gradient: Any, result: Any) -> Any:
    """Return the gradient after a hook that may return another one."""
    return gradient if result is None else result


def _gradient_added(parameter: Any, _: Any) -> Any:
    """Return the gradient that a hook finds in its parameter."""
    return parameter.grad


def _tensors_in(nested: Any) -> list[Tensor]:
    """Return a tensor, or the tensors of iterables."""
    if isinstance(nested, Tensor):
        return [nested]
    if not isinstance(nested, Iterable) or isinstance(nested, Iterator):
        return list(nested) if isinstance(nested, Iterator) else []
    return [tensor for one in nested for tensor in _tensors_in(one)]


def _autocast_dtype(outputs: list[Tensor]) -> torch.dtype | None:
    """Return the dtype of the autocast region that runs now on the device of some losses; None outside of one."""
    for output in outputs:
        device = output.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def _is_zero(gradient: Tensor | None) -> bool:
    """Return whether there is no gradient, or a plain one of zeros, however it was cleared."""
    if gradient is None:
        return True
    if not address_of(gradient):
        return False
    with _without_modes(), torch.no_grad():
        return not gradient.any()


def _refuses_float16(scaler: Any) -> bool:
    """Return whether a scaler refuses float16 gradients: torch's own classes do, except FSDP's."""
    module = type(scaler).__module__
    return module.startswith("torch.") and "fsdp" not in module


def _has_float16_gradient(optimizer: Any) -> bool:
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return any(gradient is not None and gradient.dtype == torch.float16 for gradient in gradients)


def _has_optimizer(obj: Any, depth: int = 4) -> bool:
    """Return whether an object that is saved contains an optimizer, or the state of one."""
    if isinstance(obj, Optimizer):
        return True
    if not depth or not isinstance(obj, (dict, list, tuple)):
        return False
    if isinstance(obj, dict) and {"state", "param_groups"} <= obj.keys():
        return True
    parts = obj.values() if isinstance(obj, dict) else obj
    return any(_has_optimizer(part, depth - 1) for part in parts)


def _numbers_in(obj: Any, depth: int = 4) -> Iterator[float]:
    """Yield the Python numbers of an object that is saved or loaded."""
    if isinstance(obj, float):
        yield obj
    elif depth and isinstance(obj, (dict, list, tuple)):
        for part in obj.values() if isinstance(obj, dict) else obj:
            yield from _numbers_in(part, depth - 1)
