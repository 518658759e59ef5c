"""A torch.nn.Module and a criterion as a loss function of parameters.

Read `ModuleLoss.__call__` first: it checks that the module is unchanged since the loss was made, gives the passed
tensors the hooks of the module's own tensors, puts them into the module, calls module and criterion, and returns the
loss with the new buffers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from funcamp import _tree
from funcamp._autograd.first_calls import FirstCalls
from funcamp._autograd.left_behind import LeftBehind
from funcamp._autograd.loss import Loss
from funcamp._autograd.module_batch import arguments_of, check_fit, loss_in
from funcamp._autograd.module_checks import check_arguments, check_identities, trainable_tensors_of
from funcamp._autograd.module_form import ModuleForm
from funcamp._autograd.module_memory import (
    check_memory_can_be_shared,
    share_buffers,
    share_params,
    tensors_replaced,
)
from funcamp._autograd.module_tensors import describe
from funcamp._autograd.named_storages import NamedStorages
from funcamp._autograd.passed_values import with_hooks
from funcamp._autograd.scaled_grad import Engine, pair
from funcamp._autograd.tensor_swap import Holder, TensorSwap
from funcamp._autograd.ties import check_ties, find_ties
from funcamp._storage.params import clone, expand
from funcamp._trace.python_state import survey
from funcamp._types import Tree

_Returned = TypeVar("_Returned")
_log = logging.getLogger("funcamp")


class ModuleLoss(Loss):
    """A module and a criterion as a function of the module's parameters; made by `module_loss`.

    `(params, batch) -> loss`, or for a module with buffers `(params, buffers, batch) -> (loss, buffers)`. The module is
    not changed.
    """

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
        criterion_slots = list(survey({"criterion": criterion}).values())
        check_identities(model, criterion_slots)
        self.made_of = model
        """The module that the loss was made of. `model` is the one that it calls: the same, or a copy with taps."""
        self.criterion = criterion
        self.tensors = describe(model)
        self.has_buffers = bool(self.tensors.buffer_names)
        self._form = ModuleForm(model)
        self._left_behind: LeftBehind | None = None
        self._has_logged_eval_mode = False
        self._set_model(model)
        self._first_calls = FirstCalls(
            self.tensors,
            NamedStorages(self.tensors.in_module()),
            trainable_tensors_of(criterion_slots, model),
            self.python_parts(),
        )

    def _set_model(self, model: nn.Module) -> None:
        """Set the module that is called."""
        self.model = model
        self._swap = TensorSwap(model, self.made_of, self.tensors)

    def call_copy(self, model: nn.Module) -> None:
        """From now on call a copy of the module, which has the same tensors under the same names."""
        self._set_model(model)
        self._first_calls = self._first_calls.restarted(self.python_parts())

    @property
    def holder(self) -> Holder:
        """The modules of the loss as one."""
        return self._swap.holder

    @property
    def names(self) -> dict[str, str]:
        """The name of every trainable parameter, to the name under which it is stored (different for tied ones)."""
        return self.tensors.names

    @property
    def uncast_names(self) -> frozenset[str]:
        """The stored names of the parameters that autocast does not cast, such as those of embeddings."""
        return self.tensors.uncast_names

    def __repr__(self) -> str:
        criterion = "" if self.criterion is None else f", {self.criterion!r}"
        return f"module_loss({type(self.model).__name__}{criterion})"

    # The call.

    def __call__(self, params: dict[str, Tensor], *buffers_and_batch: Tree) -> Tree:
        """Return the loss; for a module with buffers, the loss and the buffers after the forward pass.

        Raises:
            TypeError: the batch has another form than `module_loss` accepts, or the model returns no loss.
            ValueError: since the loss was made, the module got other parameters or buffers or froze a parameter; its
                forward pass deleted a buffer, or assigned one of two that were one tensor. At the first call in
                training or eval mode, and in every trace: the forward pass writes a parameter, or reads a parameter or
                buffer through a tensor kept from before the call.
        """
        *passed_buffers, batch = buffers_and_batch
        if len(passed_buffers) != int(self.has_buffers):
            expected = "params, buffers and batch" if self.has_buffers else "params and batch"
            raise TypeError(f"{self!r}: must be called with {expected}; got {1 + len(buffers_and_batch)} arguments")
        buffers: dict[str, Tensor] = passed_buffers[0] if self.has_buffers else {}
        # The forward pass may write its buffers, and the caller's must stay as they are.
        buffer_copies = {name: value.clone() for name, value in buffers.items()}
        values = self.tensors.values_by_name(params, buffer_copies)
        passed_values = dict(values)
        if torch.compiler.is_dynamo_compiling():
            self._form.check_in_call()
            returned = self._evaluate(values, batch)
        else:
            with self._swap.lock():
                self._check_form()
                values = with_hooks(values, self.tensors.in_module())
                returned = self._evaluate_checked(params, values, batch)
        loss, aux = pair("module_loss", "criterion", returned) if self.has_aux else (returned, ())
        if not self.has_buffers:
            return returned
        self.tensors.check_buffers_are_tied(values, passed_values)
        new_buffers = {name: values[name] for name in buffers}
        if self.has_aux:
            return loss, (new_buffers, aux)
        return loss, new_buffers

    def _check_form(self) -> None:
        """Raise ValueError if the module's parameters or buffers have changed; follow any other change of the module.

        At every call, because nothing reports that a parameter is frozen.
        """
        if self._form.is_touched():
            self._form.check_in_call()
            # Not while an outer call has put other tensors there. Of the buffers none is compared, because a forward
            # pass may have cached new ones.
            has_own_parameters = all(isinstance(parameter, nn.Parameter) for parameter in self.made_of.parameters())
            if has_own_parameters:
                check_ties(find_ties(self.made_of).names, self.tensors.names)
            self._form.accept()
            self.tensors.slots.find()
            self._swap.find_slots()

    def _evaluate_checked(self, params: dict[str, Tensor], values: dict[str, Tensor], batch: Tree) -> Tree:
        """Return the loss of a batch as `_evaluate` does, with the checks of a first call if it is one."""
        if self._first_calls.forward_is_checked(training=self.holder.model.training):
            return self._evaluate(values, batch)
        return self._first_calls.check_forward(
            self.holder, lambda: self._evaluate(values, batch), params, values, batch
        )

    def _evaluate(self, values: dict[str, Tensor], batch: Tree) -> Tree:
        """Return the loss of a batch, and aux if the criterion returns it; write assigned buffers into values."""
        has_target = self.criterion is not None
        arguments = arguments_of(batch, has_target=has_target)

        def call() -> Tree:
            try:
                outputs = self.holder.model(*arguments.positional, **arguments.by_name)
            except TypeError as error:
                check_fit(self.model, batch, arguments, error, has_target=has_target)
                raise
            return self._criterion_of(outputs, arguments.target) if has_target else loss_in(outputs)

        return self._swap.run(values, call)

    def _criterion_of(self, outputs: object, target: object) -> Tree:
        """Return what the criterion returns."""
        criterion: Any = self.criterion
        if torch.compiler.is_dynamo_compiling():
            return criterion(outputs, target)
        try:
            return criterion(outputs, target)
        except NotImplementedError as error:  # of a kernel for floats that got the integers of a target
            raise TypeError(
                "module_loss: criterion is called with the model's output and the target, in this order; got "
                f"{_tree.brief(outputs)} and {_tree.brief(target)}, for which torch says: {error}"
            ) from error

    def run_backward(self, params: dict[str, Tensor], after: Tree, run: Callable[[], _Returned]) -> _Returned:
        """Call run while the module has these parameters and copies of the buffers after its forward pass.

        For a backward pass that calls the module again (`torch.utils.checkpoint`): recomputation needs the same values
        as in torch's own loop, and may write into buffers that are discarded.

        Args:
            params: the parameters of the forward pass.
            after: what the loss function returned besides the loss.
            run: runs the backward pass.
        """
        buffers: dict[str, Tensor] = {}
        if self.has_buffers:
            buffers = after[0] if self.has_aux else after
        buffer_copies = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        values = self.tensors.values_by_name(params, buffer_copies)
        with self._swap.lock():
            is_checked = self._first_calls.backward_is_checked(training=self.holder.model.training)
            if is_checked or not buffers or torch.compiler.is_dynamo_compiling():
                return self._swap.run(values, run)
            return self._first_calls.check_backward(self.holder, lambda: self._swap.run(values, run), values)

    # What a step asks of a loss.

    def params(self) -> dict[str, Tensor]:
        """Return the module's trainable parameters by name, tied ones once, detached.

        Raises:
            ValueError: since the loss was made, the module got other parameters or buffers, or froze or tied one.
        """
        with self._swap.lock():  # another thread may have the tensors of a state in the module
            self._check_unchanged()
            return {name: parameter.detach() for name, parameter in self.tensors.own_params().items()}

    def buffers(self) -> dict[str, Tensor]:
        """Return the module's buffers by name, shared ones once, detached."""
        with self._swap.lock():
            return {name: buffer.detach() for name, buffer in self.tensors.own_buffers().items()}

    def _check_unchanged(self) -> None:
        """Raise ValueError if the module's parameters, buffers, requires_grad flags or ties have changed."""
        self._form.check()
        ties = find_ties(self.made_of)
        check_ties(ties.names, self.tensors.names)
        check_ties(ties.buffer_names, self.tensors.buffer_names)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the module's parameters and buffers, by name."""
        return self.tensors.shapes()

    def fresh(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers as they are: a call copies them."""
        return buffers

    def why_empty(self) -> str:
        """Return why there are no parameters, for an error message."""
        has_parameters = next(self.made_of.parameters(), None) is not None
        if has_parameters:
            return ": every parameter of the module is frozen"
        return ": the module has no parameter"

    def python_parts(self) -> dict[str, object]:
        """Return the objects that may keep state besides the loss's arguments, by name."""
        parts: dict[str, object] = {"model": self.model, "criterion": self.criterion}
        if self.made_of is not self.model:
            parts["made_of"] = self.made_of
        return parts

    def check_accumulation(self) -> None:
        """Raise ValueError if a parameter has a hook that gets the sum of the micro-batches' gradients."""
        own_tensors = self.tensors.in_module()
        for name in self.tensors.names:
            if own_tensors[name]._post_accumulate_grad_hooks:
                key = name.rpartition(".")[2]
                raise ValueError(
                    "module_loss: model's parameters must have no hook of register_post_accumulate_grad_hook with "
                    f"accumulate above 1, because it gets the gradient of one micro-batch; got one on {key!r}: "
                    "use register_hook, or accumulate=1"
                )

    def state_was_made(self, *, shares_memory: bool) -> None:
        """Watch for reads of the module outside of steps, which move the state on and not the module."""
        first_name = next(iter(self.tensors.names), None)
        # torch gives a scripted module no hooks.
        if first_name is None or isinstance(self.made_of, torch.jit.ScriptModule):
            return
        slots = self.tensors.slots.by_name
        # BatchNorm writes these in a forward pass that has nothing to do with the step.
        statistics = ("running_mean", "running_var", "num_batches_tracked")
        buffers = {name: slots[name] for name in self.tensors.buffer_names if slots[name].key not in statistics}
        self._left_behind = LeftBehind.of(self.made_of)
        self._left_behind.state_was_made(slots[first_name], buffers, shares_memory=shares_memory)

    def state_moves(self) -> None:
        """Note that a step moves a state on, also if a program takes it."""
        if self._left_behind is not None:
            self._left_behind.state_moves()

    def begin_step(self) -> None:
        """Note that the Python of a step runs. Says once that the module is in eval mode."""
        if not self._has_logged_eval_mode and not self.holder.model.training:
            self._has_logged_eval_mode = True
            _log.warning(
                "module_loss: %s is in eval mode, so that steps train without dropout and with BatchNorm's running "
                "statistics: call model.train() first, unless you want this",
                type(self.made_of).__name__,
            )
        self.state_moves()

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Context manager: every submodule in eval mode; the flags are restored afterwards.

        Sets the flags without calling `train` or `eval`, because a class may do more there, such as merging weights.
        """
        flags = [(module, module.training) for module in self.holder.modules()]
        try:
            for module, _ in flags:
                module.training = False
            yield
        finally:
            for module, flag in flags:
                module.training = flag

    # The module's memory.

    def own_params(self) -> dict[str, Tensor]:
        """Return the module's trainable parameters themselves, for a state that replaces their memory.

        Raises:
            TypeError: a parameter or buffer is a tensor subclass of several parts, whose memory cannot be replaced.
            ValueError: as in `params`.
        """
        self._check_unchanged()
        check_memory_can_be_shared(self.tensors)
        torch.clear_autocast_cache()  # it contains casts of the previous memory
        return self.tensors.own_params()

    def take_buffers(self) -> dict[str, Tensor]:
        """Return copies of the module's buffers by name, and make the module's buffers share their memory."""
        copies = {name: buffer.clone() for name, buffer in self.buffers().items()}
        share_buffers(self.holder, self.tensors, copies)
        return copies

    def adopt(self, params: Tree, buffers: dict[str, Tensor]) -> None:
        """Make the module's trainable parameters and its buffers share the memory of a state's.

        Raises:
            TypeError, ValueError: as in `own_params`.
        """
        share_params(self.own_params(), expand(params))
        share_buffers(self.holder, self.tensors, buffers)

    def state_dict(self, params: Tree, buffers: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the module's own `state_dict` with these values.

        `model.load_state_dict` accepts it with strict=True.

        Args:
            params: the parameters, by stored name or as `Params` (`TrainState.params`, `TrainState.ema`).
            buffers: the buffers by stored name; None for the module's own.

        Raises:
            KeyError: a parameter or buffer is missing.
        """
        with self._swap.lock():
            self._check_form()
            if buffers is None:
                buffers = self.tensors.own_buffers()
            with tensors_replaced(self.tensors.slots.by_name, self._values(params, buffers)):
                entries = self.made_of.state_dict()
        # Copies; what a module has registered as extra state may be no tensor.
        return {name: entry.clone() if isinstance(entry, Tensor) else entry for name, entry in entries.items()}

    @contextlib.contextmanager
    def with_values(self, params: Tree, buffers: dict[str, Tensor]) -> Iterator[nn.Module]:
        """Context manager: the module, in eval mode, has copies of these values; then it is as it was before."""
        with self._swap.lock(), self.eval_mode():
            self._check_form()
            values = self._values(clone(expand(params)), clone(buffers))
            with tensors_replaced(self.tensors.slots.by_name, values):
                yield self.made_of

    def _values(self, params: Tree, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return values by all of the module's names, of which tied tensors have several."""
        params_by_name = expand(params)
        stored = {stored_name: params_by_name[stored_name] for stored_name in self.tensors.names.values()}
        return self.tensors.values_by_name(stored, buffers)


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
    `model.parameters()`, in full precision. These values are instances of `nn.Parameter`, have the attributes of the
    module's own tensors, and the hooks of `register_hook` and `register_post_accumulate_grad_hook`, which get the
    scaled gradient; the latter may only change it. The module's `.grad` has no effect, nor has a hook on the node of a
    parameter in torch's graph (`get_gradient_edge(p).node.register_prehook`), which cannot be seen. No sync.

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
            plain attribute (`self.w = layer.weight.detach()`); the criterion has
            trainable parameters, in itself or in what it reaches (attributes, a closure, globals that it names); model
            or criterion know a parameter by its identity (`id`, a key of a dict).

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
