"""A torch.nn.Module and a criterion as a loss function of parameters.

Read `ModuleLoss.called` first: the passed tensors are in the module while module and criterion run, and while the
caller differentiates. The first call is checked.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from funcamp import _tree, _upstream
from funcamp._autograd.differentiate import Engine
from funcamp._autograd.left_behind import LeftBehind, TensorSlot
from funcamp._autograd.loss import Loss
from funcamp._autograd.module_batch import arguments_of, inputs_and_target_of, loss_in, refuse_misfit
from funcamp._autograd.module_checks import CallCheck, check_arguments, check_hooks
from funcamp._autograd.module_tensors import ModuleTensors
from funcamp._autograd.returned import pair
from funcamp._memory import note_private, rebind
from funcamp._storage.params import Params, clone, expand
from funcamp._trace.tracing import running
from funcamp._types import Tree

_log = logging.getLogger("funcamp")
#: The context manager of which `torch.func.functional_call` is made: here the backward pass runs inside it too.
_reparametrized: Any = _upstream.find("torch.nn.utils.stateless._reparametrize_module")

#: The ids of the modules that have the values of a state while they are evaluated.
_evaluated: set[int] = set()
#: While a thread calls a module with other tensors, others wait: the tensors are put into the module itself.
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


class ModuleLoss(Loss):
    """A module and a criterion as a function of the module's parameters; made by `module_loss`.

    `(params, batch) -> loss`, or for a module with buffers `(params, buffers, batch) -> (loss, buffers)`. The module is
    not changed.
    """

    has_module = True
    param_shapes: dict[str, torch.Size]

    def __init__(
        self,
        model: nn.Module,
        criterion: Callable[[Any, Any], object] | None = None,
        *,
        has_aux: bool = False,
        keep_buffers: bool = False,
        engine: Engine | None = None,
    ) -> None:
        super().__init__(model, has_aux=has_aux, keep_buffers=keep_buffers, engine=engine)
        self.model = model
        self.criterion = criterion
        self.tensors = ModuleTensors(model)
        self.param_shapes = self.tensors.param_shapes()
        self.uncast_names = self.tensors.uncast_names
        self.has_buffers = bool(self.tensors.buffer_names)
        self._left_behind: LeftBehind | None = None
        self._has_logged_eval_mode = False
        self._recurrent_layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
        self._modes_checked: set[bool] = set()
        """The values of model.training with which a call was checked."""

    def __repr__(self) -> str:
        criterion = "" if self.criterion is None else f", {self.criterion!r}"
        return f"module_loss({type(self.model).__name__}{criterion})"

    # The call.

    def __call__(self, params: dict[str, Tensor], *buffers_and_batch: Tree) -> Tree:
        """Return the loss; for a module with buffers, the loss and the buffers after the forward pass.

        Raises:
            TypeError: the batch has another form than `module_loss` or the model accepts, or the model returns no loss.
            ValueError: the forward pass deleted a buffer, or assigned one of two that were one tensor. At the first
                call in training or eval mode, and in every trace: the module got other parameters or buffers or froze
                a parameter since the loss was made; the forward pass writes a parameter, or reads one through a tensor
                kept from before the call.
        """
        with self.called(contextlib.nullcontext(), params, *buffers_and_batch) as returned:
            return returned

    @contextlib.contextmanager
    def called(
        self, region: AbstractContextManager[object], params: dict[str, Tensor], *buffers_and_batch: Tree
    ) -> Iterator[Tree]:
        """Context manager: yield the loss as `Loss` does; the module has the tensors of the call meanwhile."""
        *passed_buffers, batch = buffers_and_batch
        if len(passed_buffers) != int(self.has_buffers):
            expected = "params, buffers and batch" if self.has_buffers else "params and batch"
            raise TypeError(f"{self!r}: must be called with {expected}; got {1 + len(buffers_and_batch)} arguments")
        buffers: dict[str, Tensor] = passed_buffers[0] if self.has_buffers else {}
        # The forward pass may write its buffers, and the caller's must stay as they are.
        buffer_copies = {name: value.clone() for name, value in buffers.items()}
        values = self.tensors.values_by_name(params, buffer_copies)
        is_traced_by_dynamo = torch.compiler.is_dynamo_compiling()
        with self.lock():
            check = None if is_traced_by_dynamo else self._check_of_call(params, values, batch)
            with self._holding(values):
                with region:
                    returned = self.evaluate(batch)
                loss, aux = pair("module_loss", "criterion", returned) if self.has_aux else (returned, ())
                if self.has_buffers:
                    after = self.tensors.buffers_after(values)
                    if not is_traced_by_dynamo:  # what the backward pass computes again may write into the module's
                        after = {name: buffer.clone() for name, buffer in after.items()}
                    returned = (loss, (after, aux) if self.has_aux else after)
                if check is not None:
                    check.after(returned)
                    if torch.is_grad_enabled() and running() is None:
                        self._modes_checked.add(self.model.training)
                yield returned

    def lock(self) -> AbstractContextManager[object]:
        """Return the lock with which no other thread has its tensors, or flags, in the module; none under Dynamo."""
        if torch.compiler.is_dynamo_compiling():
            return contextlib.nullcontext()
        return _locks.setdefault(self.model, threading.RLock())

    @contextlib.contextmanager
    def _holding(self, values: dict[str, Tensor]) -> Iterator[None]:
        """Context manager: the module has these values, by its names."""
        if torch.compiler.is_dynamo_compiling():
            with _reparametrized(self.model, dict(values)):
                yield
            return
        try:
            with self.tensors.attributes_on(values), _reparametrized(self.model, dict(values)):
                yield
        finally:
            for layer in self._recurrent_layers:  # they keep a list of the tensors of their last call
                layer.__getstate__()  # type: ignore[no-untyped-call]

    def _check_of_call(self, params: dict[str, Tensor], values: dict[str, Tensor], batch: Tree) -> CallCheck | None:
        """Return a check of this call: in a trace, and once in training and in eval mode."""
        is_traced = running() is not None
        if self.model.training in self._modes_checked and not is_traced:
            return None
        if not is_traced:
            self.tensors.check_kinds()
        return CallCheck(self.tensors.in_module(), params, _tree.tensors_in((values, batch)))

    def evaluate(self, batch: Tree) -> Tree:
        """Return the loss of a batch, and aux if the criterion returns it, by the tensors that are in the module."""
        if self.criterion is None:
            positional, by_name = arguments_of(batch)
            try:
                outputs = self.model(*positional, **by_name)
            except TypeError:
                refuse_misfit(self.model, batch)
                raise
            return loss_in(outputs)
        *inputs, target = inputs_and_target_of(batch)
        return self.criterion(self.model(*inputs), target)

    # What a step asks of a loss.

    def params(self) -> dict[str, Tensor]:
        """Return the module's trainable parameters by name, tied ones once, detached.

        Raises:
            ValueError: since the loss was made, the module got other parameters or buffers, or froze or tied one.
        """
        with self.lock():  # another thread may have the tensors of a state in the module
            self._check_unchanged()
            return {name: parameter.detach() for name, parameter in self.tensors.own_params().items()}

    def buffers(self) -> dict[str, Tensor]:
        """Return the module's buffers by name, shared ones once, detached."""
        with self.lock():
            return {name: buffer.detach() for name, buffer in self.tensors.own_buffers().items()}

    def _check_unchanged(self, *, with_ties: bool = True) -> None:
        """Raise ValueError if the module's parameters, buffers, requires_grad flags, hooks or ties have changed."""
        self.tensors.check_kinds()
        check_hooks(self.model)
        if with_ties:
            self.tensors.check_ties()

    def check_not_evaluated(self, call: str) -> None:
        """Raise RuntimeError if the module has the values of a state, in `with_values`."""
        if id(self.model) in _evaluated:
            raise RuntimeError(f"{call}: it must be called outside of `with step.evaluating(...)`; got a call inside")

    def module_parameters(self) -> dict[str, Tensor]:
        """Return the module's parameters themselves, frozen ones too, by name."""
        return dict(self.model.named_parameters())

    def python_parts(self) -> dict[str, object]:
        """Return the objects that may keep state besides the loss's arguments, by name."""
        return {"model": self.model, "criterion": self.criterion}

    def state_was_made(self, *, shares_memory: bool) -> None:
        """Watch for reads of the module outside of steps, which move the state on and not the module."""
        first_name = next(iter(self.tensors.names), None)
        # torch gives a scripted module no hooks.
        if first_name is None or isinstance(self.model, torch.jit.ScriptModule):
            return
        # BatchNorm writes these in a forward pass that has nothing to do with the step.
        statistics = ("running_mean", "running_var", "num_batches_tracked")
        slots = {name: TensorSlot.of(self.model, name) for name in self.tensors.buffer_names}
        buffers = {name: slot for name, slot in slots.items() if slot.key not in statistics}
        self._left_behind = LeftBehind.of(self.model)
        first_slot = TensorSlot.of(self.model, first_name)
        self._left_behind.state_was_made(first_slot, buffers, shares_memory=shares_memory)

    def state_moves(self) -> None:
        """Note that the state is newer than the module from now on; `jit` calls this at every run of a program."""
        if self._left_behind is None:
            return
        if not isinstance(self._left_behind, LeftBehind):  # a copy, which has a function in place of the hook
            self.state_was_made(shares_memory=True)
        self._left_behind.state_moves()

    def begin_step(self) -> None:
        """Note that the Python of a step runs. Says once that the module is in eval mode.

        Raises:
            ValueError: a parameter was added, removed, frozen or unfrozen, or got a hook, since the loss was made; in a
                trace also if one was tied.
            RuntimeError: the module is being evaluated.
        """
        with self.lock():
            self.check_not_evaluated("step")
            # In every eager step, because torch reports neither that a parameter was unfrozen, which would silently not
            # be trained, nor a new hook.
            self._check_unchanged(with_ties=running() is not None)
        if not self._has_logged_eval_mode and not self.model.training:
            self._has_logged_eval_mode = True
            _log.warning(
                "module_loss: %s is in eval mode, so that steps train without dropout and with BatchNorm's running "
                "statistics: call model.train() first, unless you want this",
                type(self.model).__name__,
            )
        self.state_moves()

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Context manager: every submodule in eval mode; the flags are restored afterwards.

        Sets the flags without calling `train` or `eval`, because a class may do more there, such as merging weights.
        """
        flags = [(module, module.training) for module in self.model.modules()]
        try:
            for module, _ in flags:
                module.training = False
            yield
        finally:
            for module, flag in flags:
                module.training = flag

    # The module's memory.

    def adopt(self, params: Tree, buffers: dict[str, Tensor]) -> None:
        """Make the module's trainable parameters and its buffers share the memory of a state's.

        Raises:
            TypeError: a parameter or buffer is a tensor subclass of several parts, whose memory cannot be replaced.
            ValueError: as in `params`.
        """
        self.check_not_evaluated("init")
        self._check_unchanged()
        self.tensors.check_memory_can_be_shared()
        torch.clear_autocast_cache()  # it contains casts of the previous memory
        values = expand(params)
        for name, parameter in self.tensors.own_params().items():
            rebind(parameter, values[name])
        self.tensors.share_buffers(buffers)
        for tensor in (*self.tensors.own_params().values(), *self.tensors.own_buffers().values()):
            note_private(tensor)

    def state_dict(self, params: Tree, buffers: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the module's own `state_dict` with these values.

        `model.load_state_dict` accepts it with strict=True.

        Args:
            params: the parameters, by stored name or as `Params` (`TrainState.params`, `TrainState.ema`).
            buffers: the buffers by stored name (`TrainState.buffers`); left out if the module saves none.

        Raises:
            KeyError: a parameter or buffer is missing.
            TypeError: params is not a mapping; buffers is left out, and the module saves some.
        """
        if not isinstance(params, Params | Mapping):
            raise TypeError(f"state_dict: params must be tensors by name, as state.params; got {_tree.brief(params)}")
        with self.lock():
            self.tensors.check_kinds()
            values = self.tensors.own_buffers() if buffers is None else buffers
            with self._holding(self.tensors.values_by_name(expand(params), values)):
                entries = self.model.state_dict()
        saved_buffers = entries.keys() & self.tensors.buffer_names.keys()
        if buffers is None and saved_buffers:
            raise TypeError(
                f"state_dict: buffers must be given for a module that saves {min(saved_buffers)!r}; got None: write "
                "state_dict(state.params, state.buffers), as its own are not the state's"
            )
        # Copies; what a module has registered as extra state may be no tensor.
        return {name: entry.clone() if isinstance(entry, Tensor) else entry for name, entry in entries.items()}

    @contextlib.contextmanager
    def with_values(self, params: Tree, buffers: dict[str, Tensor]) -> Iterator[nn.Module]:
        """Context manager: the module, in eval mode, has copies of these values; then it is as it was before."""
        with self.lock(), self.eval_mode():
            self.tensors.check_kinds()
            values = self.tensors.values_by_name(clone(expand(params)), clone(buffers))
            with self._holding(self.tensors.like_own(values)):
                is_nested = id(self.model) in _evaluated
                _evaluated.add(id(self.model))
                try:
                    yield self.model
                finally:
                    if not is_nested:
                        _evaluated.remove(id(self.model))


def module_loss(
    model: nn.Module,
    criterion: Callable[[Any, Any], object] | None = None,
    *,
    has_aux: bool = False,
    keep_buffers: bool = False,
    engine: Engine | None = None,
) -> ModuleLoss:
    """Return a loss function for `make_train_step` from a module and a criterion.

    loss = criterion(model(*inputs), target) for a batch `(*inputs, target)`, a tuple or a list. An input or the target
    may be any pytree: with a dict as target, `(batch["x"], batch)`, a criterion reads several entries.

    Without a criterion the model must return its loss: a tensor of shape (), an object with `.loss`, or a dict with
    "loss". The batch is then a mapping, passed as keyword arguments (the form of every Hugging Face model, with
    `labels` in it), or a tuple or list of positional arguments, or a single tensor.

    The module provides the code, its training flags and its frozen parameters; the values come from the parameters and
    buffers passed. While model and criterion run, the module has these values, so a penalty in the criterion may read
    `model.parameters()`, in full precision. These values are instances of `nn.Parameter` and have the attributes of the
    module's own tensors. The module's `.grad` has no effect, nor has a hook on the node of a parameter in torch's graph
    (`get_gradient_edge(p).node.register_prehook`), which cannot be seen. No sync.

    Args:
        model: the module. Modules that write buffers (BatchNorm in training) work: the new buffers are returned. A
            parameter or buffer with several names is one. Freeze, tie and add parameters first: later the module must
            keep its parameters, its buffers and which of them require a gradient.
        criterion: `(output, target) -> loss`, a floating-point tensor of shape (): `torch.nn.functional.cross_entropy`.
        has_aux: criterion returns `(loss, aux)`; aux, a pytree of tensors (hits, logits), is in the step's metrics.
        keep_buffers: keep buffers written by the forward pass of a skipped step (BatchNorm's running statistics), as
            torch's loop does; they may be non-finite. By default they are reverted with the rest.
        engine: "autograd", "func" or None, as in `loss`.

    Returns:
        A `ModuleLoss`.

    Raises:
        TypeError: model is not a Module, or is under fully_shard, DDP or FSDP; criterion is not callable; a flag is not
            a bool.
        ValueError: engine is another string; has_aux is set without a criterion; an embedding has max_norm, which
            writes its weight in the forward pass; a parameter is lazy; two parameters or buffers share memory without
            being one tensor, so that a step of one would change the other; a trainable parameter shares memory with a
            plain attribute (`self.w = layer.weight.detach()`); a trainable parameter has a hook on its gradient, which
            belongs into a part of a `chain`. When called first: the loss depends on a parameter of the criterion, or
            on one kept from before the call; the forward pass writes a parameter.

    Example:
        >>> loss_fn = module_loss(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss)
        >>> zeros = {name: torch.zeros_like(value) for name, value in loss_fn.params().items()}
        >>> loss_fn(zeros, (torch.ones(3, 2), torch.ones(3, 1)))
        tensor(1.)
        >>> class Own(torch.nn.Linear):
        ...     def forward(self, x, labels):
        ...         return {"loss": torch.nn.functional.mse_loss(super().forward(x), labels)}
        >>> module_loss(Own(2, 1))(zeros, {"x": torch.ones(3, 2), "labels": torch.ones(3, 1)})
        tensor(1.)
    """
    check_arguments(model, criterion, has_aux=has_aux, keep_buffers=keep_buffers, engine=engine)
    return ModuleLoss(model, criterion, has_aux=has_aux, keep_buffers=keep_buffers, engine=engine)
