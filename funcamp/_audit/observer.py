"""Turn the calls of a run into events: functions of torch are replaced for the time of the run.

To observe another function, add it to `Observer._handlers`, with a method that handles its calls. A handler gets the
function and the arguments of the call; it emits events, and returns what the function returns.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from funcamp import _upstream
from funcamp._audit import events
from funcamp._audit.autograd_graph import Graph, Scaling, is_scaled, mark_scaled, nonfinite_node_of, read_graph
from funcamp._audit.events import Event, Key, Reduction
from funcamp._audit.file_contents import contains_optimizer, numbers_in
from funcamp._audit.hooks import Hook, ParameterHooks
from funcamp._audit.lines import calling_line, calling_places, goes_into, has_literal, is_factor, is_subscripted
from funcamp._audit.nesting import Nesting, current_node
from funcamp._audit.operations import Operations
from funcamp._audit.powers import Power, combined
from funcamp._audit.replicas import Replicas
from funcamp._audit.tensors import all_finite, is_zero, tensors_in
from funcamp._audit.tracked import Tracked
from funcamp._audit.weight_names import name_of_parameter
from funcamp._upstream.modes import without_modes
from funcamp._upstream.replaced import replaced, with_subclasses

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.hooks import RemovableHandle

#: The number of arguments of `torch.autograd.backward` between the tensors and `inputs`.
_PLACE_OF_INPUTS = 4
#: The functions of torch.distributed whose results are numbers of all ranks. The last two are new in torch 2.13.
_GATHERING = {"all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"}
_GATHERING |= {"all_gather_single", "reduce_scatter_single"}
#: The names of functions that compute a statistic of numbers, or log one.
_STATISTICS = {"norm", "hist", "histogram", "mean", "median", "std", "var", "percentile", "quantile"}
_STATISTICS |= {"add_histogram", "add_scalar", "log_histogram"}
#: The first scale of a scaler whose script passes none.
_DEFAULT_SCALE = 2.0**16
#: After as many skipped steps in a row, the operation that makes inf or NaN is searched.
_SKIPS_BEFORE_SEARCH = 7
#: A function of torch that is replaced.
_Function: TypeAlias = Callable[..., object]
#: Gets a function of torch and the arguments of its call, and calls it.
_Handler: TypeAlias = Callable[..., object]


class _Observed(NamedTuple):
    """A function of torch whose calls are observed."""

    owner: object
    """The module or class that has it."""
    name: str
    handler: _Handler


class _Pass(NamedTuple):
    """What is known about a backward pass before it runs."""

    outputs: list[Tensor]
    """The losses."""
    leaves: list[Tensor]
    """The tensors to whose gradients it adds."""
    empty: frozenset[Key]
    """The leaves that have no gradient, or zeros."""
    graph: Graph
    scaling: Scaling | None
    is_nested: bool
    """Whether it runs inside another pass."""
    has_one_as_initial: bool
    """Whether it begins with gradients of 1, as that of a loss does."""
    not_finite: str
    """For the first pass of the run: "loss" or "parameter" if that is not finite."""
    retains_graph: bool
    synced: frozenset[Key]
    """The parameters of DDP models whose gradients it will sum over ranks."""


class Observer:
    """Watches a run.

    Args:
        emit: gets each event.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        _upstream.check(current_node)
        self._emit_now = emit
        self._nesting = Nesting()
        self._quietly = self._nesting.quietly
        self._tracked = Tracked()
        self._replicas = Replicas(self._tracked)
        self._operations = Operations(self._emit, self._tracked, self._nesting.hides_operations)
        report_new_gradient = self._operations.report_new_gradient
        self._hooks = ParameterHooks(self._emit, self._tracked, self._nesting, report_new_gradient)
        self._updates: dict[Key, int] = {}
        """How many updates each scaler has had."""
        self._scales: dict[Key, float] = {}
        """The scale that each scaler's `get_scale` returned last."""
        self._loaded_numbers: set[float] = set()
        """The numbers in files that were loaded."""
        self._has_scaled = False
        """Whether a scaler has scaled a loss."""
        self._applied: set[Key] = set()
        """The optimizers that have taken their own step since the scaler's step was called."""
        self._last_hooks: dict[Key, RemovableHandle] = {}
        """For each optimizer whose step runs: the hook that runs after its own hooks, before the step."""
        self._outer_scaling: Scaling | None = None
        """The scaling of the backward pass that runs now."""
        self._last_scaling: Scaling | None = None
        """The scaling of the last backward pass that had one."""
        self._factor_scaling: Scaling | None = None
        """The scaling of a tensor without a graph: the loop multiplies losses by it."""
        self._passes = 0
        """The number of backward passes, without those inside another one."""
        self._has_taken_overflow = False
        """Whether `torch.autograd.grad` of a scaled loss made inf or NaN before the first pass."""
        self._loss_is_finite = True
        """Whether the loss was finite that a scaler scaled last."""
        self._skips: dict[Key, int] = {}
        """For each optimizer, how many of its last steps were skipped."""
        self._nonfinite_node = ""
        """The first node of the last backward pass that made inf or NaN; it is searched after several skipped steps."""
        self._threads: dict[int, bool] = {}
        """For each thread that differentiates, whether it was the first one."""

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Context manager: calls of torch are events."""
        with contextlib.ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._begin_hooks).remove)
            stack.callback(register_optimizer_step_post_hook(self._end_step).remove)
            # A function that two modules have stays one function: pickle looks it up in the module that it names.
            wrapped: dict[int, _Function] = {}  # by the function's id: some of torch's have no hash
            # A class that the script defines or imports later: FSDP's scaler is one.
            observe_later = functools.partial(self._observe_class, stack)
            stack.enter_context(replaced(torch.amp.GradScaler, __init_subclass__=classmethod(observe_later)))
            for observed in list(self._handlers()):
                function = vars(observed.owner).get(observed.name) or getattr(observed.owner, observed.name)
                if id(function) not in wrapped:
                    wrapped[id(function)] = self._wrap(function, observed.handler)
                stack.enter_context(replaced(observed.owner, **{observed.name: wrapped[id(function)]}))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._operations)
            # What the run imported from torch by name stays a wrapped function in its own modules.
            stack.callback(setattr, self._nesting, "is_quiet", True)
            yield

    def _observe_class(self, stack: contextlib.ExitStack, scaler_class: type) -> None:
        """Observe the methods of a class of scalers that was just defined, for the time of the run."""
        calls = self._scaler_calls()
        for name in calls.keys() & vars(scaler_class).keys():
            wrapped = self._wrap(vars(scaler_class)[name], calls[name])
            stack.enter_context(replaced(scaler_class, **{name: wrapped}))

    def _emit(self, event: Event) -> None:
        """Report an event; the event of a hook waits for the end of its backward pass."""
        if self._nesting.in_hook:
            self._hooks.defer(event)
        else:
            self._emit_now(event)

    def _scaler_calls(self) -> dict[str, _Handler]:
        """Return the handlers of a scaler's methods, by their names."""
        return {
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

    def _handlers(self) -> Iterator[_Observed]:
        """Yield the functions that are observed, with the handlers of their calls."""
        scaler_calls = self._scaler_calls()
        # A subclass may override a method, so its own are replaced too.
        for scaler_class in with_subclasses(torch.amp.GradScaler):
            for name in scaler_calls.keys() & vars(scaler_class).keys():
                yield _Observed(scaler_class, name, scaler_calls[name])
        for scheduler_class in with_subclasses(LRScheduler):
            if "step" in vars(scheduler_class):
                yield _Observed(scheduler_class, "step", self._step_scheduler)
        yield _Observed(Tensor, "numpy", self._read_as_numbers)
        yield _Observed(Tensor, "tolist", self._read_as_numbers)
        yield _Observed(Tensor, "register_hook", self._register_hook)
        yield _Observed(Tensor, "register_post_accumulate_grad_hook", self._register_hook_after)
        yield _Observed(torch.autograd, "backward", self._backward)
        yield _Observed(torch.autograd, "grad", self._grad)
        yield _Observed(Optimizer, "__init__", self._make_optimizer)
        yield _Observed(Optimizer, "zero_grad", self._clear_optimizer)
        yield _Observed(Optimizer, "load_state_dict", self._load_optimizer)
        yield _Observed(nn.Module, "zero_grad", self._clear_module)
        yield _Observed(nn.Module, "half", self._cast_to_float16)
        yield _Observed(nn.Module, "to", self._cast_to_float16)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            yield _Observed(owner, "clip_grad_norm_", self._clip)
            yield _Observed(owner, "clip_grad_value_", self._clip)
            if hasattr(owner, "clip_grads_with_norm_"):
                yield _Observed(owner, "clip_grads_with_norm_", self._clip)
        for owner in (torch, torch.serialization):
            yield _Observed(owner, "save", self._save)
            yield _Observed(owner, "load", self._load)
        if torch.distributed.is_available():
            for owner in (torch.distributed, torch.distributed.distributed_c10d):
                for name in ("all_reduce", "all_reduce_coalesced", "reduce"):
                    yield _Observed(owner, name, self._reduce)
                for name in vars(owner).keys() & _GATHERING:
                    yield _Observed(owner, name, self._gather)
            yield _Observed(nn.parallel.DistributedDataParallel, "__init__", self._make_replica)
            reducer_class = torch.distributed.Reducer  # type: ignore[attr-defined]
            yield _Observed(reducer_class, "prepare_for_backward", self._prepare_reducer)

    def _wrap(self, function: _Function, handler: _Handler) -> _Function:
        """Wrap a function: its handler gets each call that is not made inside an observed one."""

        @functools.wraps(function)
        def observed(*args: object, **kwargs: object) -> object:
            if self._nesting.is_quiet or self._is_in_other_loop(begins=handler in (self._scale, self._backward)):
                return function(*args, **kwargs)
            return handler(function, *args, **kwargs)

        return observed

    def _is_in_other_loop(self, *, begins: bool = False) -> bool:
        """Return whether a second loop runs, in a thread beside that of the first one: it is not watched.

        begins: whether a loss is scaled or differentiated now, which only the thread of a loop does.
        """
        thread = threading.get_ident()
        if begins and current_node() is None:  # a backward pass has threads of its own
            self._threads.setdefault(thread, not self._threads)
        return not self._threads.get(thread, True)

    # Scalers.

    def _make_scaler(self, function: _Function, scaler: GradScaler, *args: object, **kwargs: object) -> None:
        self._quietly(function, scaler, *args, **kwargs)
        key = self._tracked.key(scaler)
        self._emit(events.ScalerMade(calling_line(), key, calling_places()))
        if scaler.is_enabled() and self._is_scale_of_file(scaler._init_scale, [*args, *kwargs.values()]):
            self._emit(events.ScalerLoaded(calling_line(), key))

    def _is_scale_of_file(self, scale: float, arguments: list[object]) -> bool:
        """Return whether a new scaler got its first scale from a file, without `load_state_dict`.

        A file may have the same scale by chance. Then the script has a number in its source, or passes none.
        """
        is_default = scale == _DEFAULT_SCALE and scale not in [one for one in arguments if isinstance(one, float)]
        return scale in self._loaded_numbers and not is_default and not has_literal("init_scale", calling_line())

    def _scale(self, function: _Function, scaler: GradScaler, outputs: object) -> object:
        if isinstance(outputs, Tensor):
            self._loss_is_finite = all_finite(outputs)
        if isinstance(outputs, Tensor) and scaler.is_enabled():
            power = self._tracked.power_of(outputs)
            grows = power is not None and power.degree > 0
            self._emit(events.LossScaled(calling_line(), is_scaled(outputs), grows))
        result = self._quietly(function, scaler, outputs)
        if isinstance(result, Iterator):
            losses = list(result)
            self._remember_losses(scaler, losses)
            return iter(losses)
        self._remember_losses(scaler, result)
        return result

    def _remember_losses(self, scaler: GradScaler, losses: object) -> None:
        """Remember scaled losses, and write into their graphs how they were scaled."""
        if not scaler.is_enabled():
            return
        key = self._tracked.key(scaler)
        scale = scaler._scale
        if isinstance(scale, Tensor):  # before the scale is made, there is none
            with without_modes():
                self._tracked.scales.add(scale.item())
        scaling = Scaling(key, self._updates.get(key, 0))
        self._has_scaled = True
        for loss in tensors_in(losses):
            self._tracked.remember_loss(loss, scaling)
            if loss.grad_fn is not None:
                mark_scaled(loss.grad_fn, scaling)
            elif not loss.requires_grad:
                self._factor_scaling = scaling

    def _unscale(self, function: _Function, scaler: GradScaler, optimizer: Optimizer) -> None:
        self._emit_for_optimizer(events.Unscaled, optimizer, scaler)
        self._quietly(function, scaler, optimizer)

    def _step(
        self, function: _Function, scaler: GradScaler, optimizer: Optimizer, *args: object, **kwargs: object
    ) -> object:
        self._emit_for_optimizer(events.StepCalled, optimizer, scaler)
        key = self._tracked.key(optimizer)
        self._applied.clear()
        with replaced(self._nesting, in_scaler_step=True):
            result = self._quietly(function, scaler, optimizer, *args, **kwargs)
        # An optimizer that wraps another may have no hooks of its own; then its step is taken as applied.
        has_hooks = hasattr(getattr(type(optimizer), "step", None), "hooked")
        is_applied = (bool(self._applied) or not has_hooks) and not _skips_itself(scaler, optimizer)
        self._skips[key] = 0 if is_applied else self._skips.get(key, 0) + 1
        nonfinite = self._describe_nonfinite(optimizer) if self._skips[key] > _SKIPS_BEFORE_SEARCH else ""
        self._emit(events.StepEnded(calling_line(), key, is_applied, _scale_of(scaler), nonfinite))
        return result

    def _describe_nonfinite(self, optimizer: Optimizer) -> str:
        """Return which gradient of an optimizer is inf or NaN, and what made it; empty if there is none now."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not all_finite(parameter.grad):
                    name = name_of_parameter(parameter)
                    loss = f"the loss is {'finite' if self._loss_is_finite else 'inf or NaN'}"
                    node = f"; {self._nonfinite_node} makes the first inf or NaN" if self._nonfinite_node else ""
                    return f"the gradient of {name} is not finite; {loss}{node}"
        return ""

    def _update(self, function: _Function, scaler: GradScaler, *args: object, **kwargs: object) -> None:
        key = self._tracked.key(scaler)
        new_scales = [value for value in (*args, *kwargs.values()) if value is not None]
        if any(isinstance(value, (int, float)) and value in self._loaded_numbers for value in new_scales):
            self._emit(events.ScalerLoaded(calling_line(), key))
        self._emit(events.Updated(calling_line(), key, bool(new_scales), scaler.is_enabled()))
        self._quietly(function, scaler, *args, **kwargs)
        self._updates[key] = self._updates.get(key, 0) + scaler.is_enabled()

    def _get_scale(self, function: Callable[..., float], scaler: GradScaler) -> float:
        if not scaler.is_enabled():  # the scale is a Python number, which needs no host synchronization
            return self._quietly(function, scaler)
        key = self._tracked.key(scaler)
        self._emit(events.ScaleRead(calling_line(), key, is_factor("get_scale", calling_places())))
        scale = self._quietly(function, scaler)
        self._tracked.scales.add(scale)
        self._scales[key] = scale
        return scale

    def _save_scaler(self, function: _Function, scaler: GradScaler) -> object:
        if not is_subscripted("state_dict", calling_line()):  # to log the scale is not to save it
            self._emit(events.ScalerSaved(calling_line(), self._tracked.key(scaler)))
        return self._quietly(function, scaler)

    def _load_scaler(self, function: _Function, scaler: GradScaler, *args: object, **kwargs: object) -> None:
        self._emit(events.ScalerLoaded(calling_line(), self._tracked.key(scaler)))
        self._quietly(function, scaler, *args, **kwargs)

    # Optimizers and schedulers.

    def _make_optimizer(self, function: _Function, optimizer: Optimizer, *args: object, **kwargs: object) -> None:
        self._quietly(function, optimizer, *args, **kwargs)
        parameters = self._tracked.parameters_of(optimizer)
        name = type(optimizer).__name__
        self._emit(events.OptimizerMade(calling_line(), self._tracked.key(optimizer), parameters, name))

    def _begin_hooks(self, optimizer: Optimizer, *_: object) -> None:
        """Before the hooks of an optimizer that run before its own step: they may unscale.

        A hook that is registered now is the optimizer's last one.
        """
        key = self._tracked.key(optimizer)
        self._drop_last_hook(key)  # of a step that raised
        self._last_hooks[key] = optimizer.register_step_pre_hook(self._begin_step)

    def _drop_last_hook(self, optimizer: Key) -> None:
        """Take back the hook that `_begin_hooks` has registered."""
        if optimizer in self._last_hooks:
            self._last_hooks.pop(optimizer).remove()

    def _begin_step(self, optimizer: Optimizer, *_: object) -> None:
        """Before an optimizer's own step, after its hooks."""
        if self._is_in_other_loop():
            return
        if not self._nesting.in_scaler_step:
            self._emit_for_optimizer(events.StepCalled, optimizer, None)
        self._nesting.stepping.add(self._tracked.key(optimizer))

    def _end_step(self, optimizer: Optimizer, *_: object) -> None:
        """After an optimizer's own step."""
        key = self._tracked.key(optimizer)
        self._drop_last_hook(key)
        if self._is_in_other_loop():
            return
        self._nesting.stepping.discard(key)
        self._applied.add(key)
        if not self._nesting.in_scaler_step:
            self._emit(events.StepEnded(calling_line(), key, True))

    def _emit_for_optimizer(
        self, event_type: type[events.OptimizerEvent], optimizer: Optimizer, scaler: GradScaler | None
    ) -> None:
        """Report a call that uses an optimizer's gradients, and before it the gradients that the loop has replaced."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._report_replaced_gradients(parameters)
        read_ids = self._tracked.reads_in_gradients(optimizer)
        if read_ids:
            self._emit(events.ReadsCancelled(calling_line(), read_ids))
        event = event_type(
            calling_line(),
            optimizer=self._tracked.key(optimizer),
            scaler=None if scaler is None else self._tracked.key(scaler),
            parameters=self._tracked.parameters_of(optimizer),
            has_enabled_scaler=scaler is not None and scaler.is_enabled(),
            has_refused_float16=_refuses_float16(scaler) and _has_float16_gradient(optimizer),
            places=calling_places(),
        )
        self._emit(event)

    def _report_replaced_gradients(self, parameters: list[Tensor]) -> None:
        """Report the gradients of parameters that the loop has replaced since the backward pass."""
        if self._nesting.in_backward:  # the pass replaces them
            return
        for key, scaling in self._tracked.assigned_gradients(parameters):
            self._emit(events.GradientsAssigned(calling_line(), (key,), scaling.scaler))
        for key, gradient in self._tracked.replaced_gradients(parameters):
            self._operations.report_new_gradient(key, gradient)

    def _clear_optimizer(self, function: _Function, optimizer: Optimizer, *args: object, **kwargs: object) -> None:
        parameters = self._tracked.parameters_of(optimizer)
        self._emit(events.Cleared(calling_line(), parameters, self._tracked.key(optimizer)))
        self._quietly(function, optimizer, *args, **kwargs)

    def _load_optimizer(self, function: _Function, optimizer: Optimizer, *args: object, **kwargs: object) -> None:
        self._emit(events.OptimizerLoaded(calling_line(), self._tracked.key(optimizer)))
        self._quietly(function, optimizer, *args, **kwargs)

    def _step_scheduler(self, function: _Function, scheduler: LRScheduler, *args: object, **kwargs: object) -> object:
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is not None:
            self._emit(events.SchedulerStepped(calling_line(), self._tracked.key(optimizer)))
        return self._quietly(function, scheduler, *args, **kwargs)

    # Backward passes.

    def _register_hook(self, function: _Function, tensor: Tensor, hook: Hook) -> object:
        return function(tensor, self._hooks.wrap_hook(hook, tensor))

    def _register_hook_after(self, function: _Function, tensor: Tensor, hook: Hook) -> object:
        return function(tensor, self._hooks.wrap_hook_after(hook, tensor))

    def _backward(
        self, function: _Function, tensors: object, *args: object, inputs: object = None, **kwargs: object
    ) -> object:
        if len(args) > _PLACE_OF_INPUTS:
            inputs = args[_PLACE_OF_INPUTS]
            args = args[:_PLACE_OF_INPUTS]
        if isinstance(tensors, Iterator):  # it can be read once
            tensors = list(tensors)
        backward = self._begin_pass(
            outputs=tensors_in(tensors),
            inputs=None if inputs is None else tensors_in(inputs),
            initial_gradients=tensors_in(args[0] if args else kwargs.get("grad_tensors")),
            retains_graph=bool(args[1] if len(args) > 1 else kwargs.get("retain_graph")),
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(self, _outer_scaling=backward.scaling))
            stack.enter_context(replaced(self._nesting, in_backward=True))
            is_searched = max(self._skips.values(), default=0) >= _SKIPS_BEFORE_SEARCH and not backward.is_nested
            nodes = stack.enter_context(nonfinite_node_of(backward.outputs)) if is_searched else []
            result = function(tensors, *args, inputs=inputs, **kwargs)
        if is_searched:
            self._nonfinite_node = nodes[0] if nodes else ""
        self._end_pass(backward)
        return result

    def _begin_pass(
        self,
        *,
        outputs: list[Tensor],
        inputs: list[Tensor] | None,
        initial_gradients: list[Tensor],
        retains_graph: bool,
    ) -> _Pass:
        """Return what is known about a backward pass before it runs.

        Args:
            outputs: the losses.
            inputs: the tensors to whose gradients it adds; None for all leaves of the graph.
            initial_gradients: those of the losses; none for 1.
            retains_graph: whether the graph is kept.
        """
        graph = read_graph(outputs)
        leaves = graph.leaves if inputs is None else inputs
        is_nested = current_node() is not None  # in a checkpoint whose forward pass runs again
        scaling = self._outer_scaling if is_nested else graph.scaling
        if not is_nested:
            scaling = scaling or self._indirect_scaling([*outputs, *initial_gradients])
            self._last_scaling = scaling or self._last_scaling
            self._hooks.forget()
            self._tracked.forget_powers()  # the loop may have unscaled earlier gradients since
        is_first = not is_nested and not self._passes
        return _Pass(
            outputs=outputs,
            leaves=leaves,
            empty=frozenset(self._tracked.key(leaf) for leaf in leaves if is_zero(leaf.grad)),
            graph=graph,
            scaling=scaling,
            is_nested=is_nested,
            has_one_as_initial=not is_nested and all(map(_is_one, initial_gradients)),
            not_finite=self._find_not_finite(outputs, leaves, graph.scaling) if is_first else "",
            retains_graph=retains_graph,
            synced=self._replicas.synced(),
        )

    def _end_pass(self, backward: _Pass) -> None:
        """Report a backward pass that has ended, and then what hooks did in it."""
        views = [*self._tracked.views_of_gradients(backward.leaves)]
        leaves = [*backward.leaves, *[parameter for parameter, _ in views]]
        keys = self._tracked.parameters(leaves)
        empty = {self._tracked.key(parameter) for parameter, leaf in views if self._tracked.key(leaf) in backward.empty}
        self._passes += not backward.is_nested
        self._tracked.remember_gradients(leaves)
        self._replicas.end_pass(keys)
        scaling, graph = backward.scaling, backward.graph
        self._emit(
            events.Backward(
                calling_line(),
                parameters=keys,
                empty=backward.empty | empty,
                scaler=None if scaling is None else scaling.scaler,
                dtypes=graph.dtypes,
                reduction=graph.reduction if backward.has_one_as_initial else Reduction.OTHER,
                autocast_dtype=None if backward.is_nested else _autocast_dtype(backward.outputs),
                has_products=graph.has_products,
                places=calling_places(),
                not_finite=backward.not_finite,
                nonfinite_input=self._operations.nonfinite_input,
                retains_graph=backward.retains_graph,
                synced=backward.synced,
                unsynced=self._replicas.parameters().intersection(keys) - backward.synced,
            )
        )
        self._hooks.emit_deferred()

    def _indirect_scaling(self, tensors: list[Tensor]) -> Scaling | None:
        """Return the scaling of a pass whose loss no scaler has scaled; None if nothing else did.

        The loss, or its initial gradient, is computed from scaled gradients; or a scaler has scaled a factor of it.
        """
        powers = [power for power in map(self._tracked.power_of, tensors) if power is not None and power.degree == 1]
        if powers:
            self._emit(events.ReadsCancelled(calling_line(), combined(powers, 1.0).read_ids))
            return self._last_scaling
        return self._factor_scaling

    def _grad(self, function: _Function, outputs: object, *args: object, **kwargs: object) -> object:
        if isinstance(outputs, Iterator):  # it can be read once
            outputs = list(outputs)
        if current_node() is None:
            scaling = read_graph(tensors_in(outputs)).scaling if self._has_scaled else None
            self._emit(events.GradientsTaken(calling_line(), None if scaling is None else scaling.scaler))
            if scaling is not None:
                return self._take_gradients(function, scaling, outputs, *args, **kwargs)
        return function(outputs, *args, **kwargs)

    def _take_gradients(
        self, function: _Function, scaling: Scaling, outputs: object, *args: object, **kwargs: object
    ) -> object:
        """Call `torch.autograd.grad` for a scaled loss, and remember what it returns."""
        inputs = args[0] if args else kwargs.pop("inputs", ())
        leaves = tensors_in(inputs)  # a generator can be read once
        result = function(outputs, leaves if isinstance(inputs, Iterator) else inputs, *args[1:], **kwargs)
        if isinstance(result, tuple):
            pairs = [(gradient, leaf) for gradient, leaf in zip(result, leaves) if isinstance(gradient, Tensor)]
            self._tracked.remember_taken([pair[0] for pair in pairs], [pair[1] for pair in pairs], scaling)
            self._last_scaling = scaling
            if not self._passes:
                self._has_taken_overflow |= not all(all_finite(gradient) for gradient, _ in pairs)
        return result

    def _find_not_finite(self, outputs: list[Tensor], leaves: list[Tensor], scaling: Scaling | None) -> str:
        """Return what is not finite in the first pass: "parameter", "loss" or "".

        A loss of which scaled gradients are a part, as of a penalty, may only have met a scale that is too high.
        """
        if not all(all_finite(leaf) for leaf in leaves):
            return "parameter"
        if self._has_taken_overflow:
            return ""
        # The product with the scale may overflow, so a scaled loss was checked before.
        is_finite = all(map(all_finite, outputs)) if scaling is None else self._loss_is_finite
        return "" if is_finite else "loss"

    # Gradients.

    def _clear_module(self, function: _Function, module: nn.Module, *args: object, **kwargs: object) -> None:
        parameters = self._tracked.parameters(module.parameters())
        self._emit(events.Cleared(calling_line(), parameters, None))
        self._quietly(function, module, *args, **kwargs)

    def _cast_to_float16(self, function: _Function, module: nn.Module, *args: object, **kwargs: object) -> object:
        before = {parameter for parameter in module.parameters() if parameter.dtype == torch.float16}
        result = self._quietly(function, module, *args, **kwargs)
        cast = [parameter for parameter in module.parameters() if parameter.dtype == torch.float16]
        keys = self._tracked.parameters(parameter for parameter in cast if parameter not in before)
        if keys:
            self._emit(events.CastToFloat16(calling_line(), keys))
        return result

    def _read_as_numbers(self, function: _Function, tensor: Tensor, *args: object, **kwargs: object) -> object:
        is_of_gradients = self._tracked.power_of(tensor) is not None
        if is_of_gradients and goes_into(function.__name__, _STATISTICS, calling_places()):
            self._operations.report_host_read(tensor)
        return function(tensor, *args, **kwargs)

    def _clip(self, function: _Function, parameters: object, *args: object, **kwargs: object) -> object:
        clipped = tensors_in(parameters)  # a generator can be read once
        self._report_replaced_gradients(clipped)
        keys = self._tracked.parameters(clipped)
        bound = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
        if bound != math.inf:
            self._emit(events.Clipped(calling_line(), keys, function.__name__ == "clip_grad_value_"))
            norm = self._quietly(function, clipped, *args, **kwargs)
            for tensor in tensors_in(norm):  # a loop may look for inf in it
                self._tracked.remember_power(tensor, Power(keys, 0.0))
            return norm
        norm = self._quietly(function, clipped, *args, **kwargs)  # to log it
        self._operations.report_norm(norm, keys)
        return norm

    def _reduce(self, function: _Function, *args: object, **kwargs: object) -> object:
        reduced = args[0] if args else kwargs.get("tensor", kwargs.get("tensors", ()))
        for tensor in tensors_in(reduced):
            keys = self._tracked.gradients_among([tensor])
            if keys:
                self._emit(events.Reduced(calling_line(), keys))
            else:
                self._tracked.remember_reduced(tensor, calling_line())
        return self._quietly(function, *args, **kwargs)

    def _gather(self, function: _Function, *args: object, **kwargs: object) -> object:
        outputs, tensors = args[:2] if len(args) > 1 else ((), ())  # only if both are positional
        power = self._tracked.power_of(tensors)
        result = self._quietly(function, *args, **kwargs)
        if power is not None:
            for output in tensors_in(outputs):
                self._tracked.remember_power(output, power._replace(reduced_line=calling_line()))
        return result

    def _make_replica(
        self, function: _Function, model: DistributedDataParallel, *args: object, **kwargs: object
    ) -> None:
        function(model, *args, **kwargs)
        self._replicas.add(model)

    def _prepare_reducer(self, function: _Function, reducer: object, *args: object, **kwargs: object) -> None:
        self._replicas.prepare(reducer)
        function(reducer, *args, **kwargs)

    # Files.

    def _save(self, function: _Function, obj: object, *args: object, **kwargs: object) -> object:
        line = calling_line()
        self._emit(events.FileSaved(line, contains_optimizer(obj)))
        numbers = set(numbers_in(obj))
        for scaler, scale in self._scales.items():
            if scale in numbers:  # saved without state_dict
                self._emit(events.ScalerSaved(line, scaler))
        return function(obj, *args, **kwargs)  # not quietly: it may pickle a scaler, which is an event

    def _load(self, function: _Function, *args: object, **kwargs: object) -> object:
        obj = function(*args, **kwargs)
        self._emit(events.FileLoaded(calling_line(), contains_optimizer(obj)))
        self._loaded_numbers |= set(numbers_in(obj))
        return obj


def _autocast_dtype(outputs: list[Tensor]) -> torch.dtype | None:
    """Return the dtype of the autocast region around this call, for the device of a loss; None outside of autocast."""
    for output in outputs:
        device = output.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def _scale_of(scaler: GradScaler) -> float:
    """Return the scale of a scaler, without a call of `get_scale`; 1 if it has none."""
    scale = getattr(scaler, "_scale", None)  # a disabled one has none
    if not isinstance(scale, Tensor):
        return 1.0
    with without_modes():
        return float(scale.item())


def _is_one(initial_gradient: Tensor) -> bool:
    """Return whether an initial gradient is 1, as that of a loss is."""
    with without_modes():
        return initial_gradient.dim() == 0 and bool(initial_gradient == 1)


def _skips_itself(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Return whether an optimizer has skipped its step itself, as fused ones do, which get the scaler's flag."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or not scaler.is_enabled():
        return False
    flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
    with without_modes():
        return any(flag.item() for flag in flags)


def _refuses_float16(scaler: GradScaler | None) -> bool:
    """Return whether a scaler refuses float16 gradients, as torch's own classes do, except FSDP's."""
    module = type(scaler).__module__
    return module.startswith("torch.") and "fsdp" not in module


def _has_float16_gradient(optimizer: Optimizer) -> bool:
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return any(gradient is not None and gradient.dtype == torch.float16 for gradient in gradients)
