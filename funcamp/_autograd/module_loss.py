"""A torch.nn.Module and a criterion as a loss function of parameters."""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_pre_hook

from funcamp import _tree
from funcamp._autograd.cast_names import cast_by_autocast, linear_weights
from funcamp._autograd.first_call_watch import FirstCallWatch, written_error
from funcamp._autograd.left_behind import LeftBehind, in_step_of
from funcamp._autograd.loss import Loss
from funcamp._autograd.module_batch import arguments_of, fits, form, loss_in
from funcamp._autograd.module_checks import check_identities, has_compiled_part, kind_of, trainable_besides
from funcamp._autograd.module_tensors import form_of, join, names_among, parts_of, slots_of, tensors_of, ties_of
from funcamp._autograd.named_storages import NamedStorages, memory_of
from funcamp._autograd.passed_values import has_hooks, like_own_tensors, with_hooks
from funcamp._autograd.scaled_grad import Engine, check_engine, nodes, pair
from funcamp._check import boolean
from funcamp._memory import rebind
from funcamp._trace.python_state import survey
from funcamp._trace.tracing import running

_log = logging.getLogger("funcamp")


#: While a thread calls a module with other tensors, others wait: torch puts the tensors into the module itself.
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


class ModuleLoss(Loss):
    """A module and a criterion as a function of the module's parameters; made by `module_loss`.

    `(params, batch) -> loss`, or for a module with buffers `(params, buffers, batch) -> (loss, buffers)`. The module is
    not changed.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Callable[[Any, Any], Any] | None = None,
        *,
        has_aux: bool = False,
        keep_buffers: bool = False,
        engine: Engine | None = None,
    ) -> None:
        super().__init__(model, has_aux=has_aux, keep_buffers=keep_buffers, engine=engine)
        self.model, self.criterion = model, criterion
        self._made_of = model
        self.holder = Holder(model, model)
        reached = list(survey({"criterion": criterion}).values())
        self._untrained = trainable_besides(model, reached)
        """Tensors that the first call must not find in the loss's graph, because no step trains them."""
        self._watched: set[bool] = set()
        """The values of model.training with which an eager call was watched."""
        self._kept: dict[str, Tensor] = {}
        """Tensors in the memory of the last call's parameters, which the next call must not read."""
        self._watched_backward: set[bool] = set()
        """The same for a backward pass."""
        self._parts = parts_of(model)
        self._recurrent = [part for part in model.modules() if isinstance(part, nn.RNNBase)]
        self.names: dict[str, str] = {}
        """The name of every trainable parameter, to the name under which it is stored (different for tied ones)."""
        self.buffer_names: dict[str, str] = {}
        """The same for buffers, and for frozen parameters that share memory with a buffer."""
        self.names, self.buffer_names = ties_of(model)
        self.cast_names = frozenset(
            join(prefix, name) for prefix, module in model.named_modules() for name in cast_by_autocast(module)
        ) - names_among(model, reached)
        """The names of the parameters that torch.autocast would cast.

        Without those that the criterion reaches: a penalty reads them in full precision, and its gradient must not be
        rounded.
        """
        self.hooked_names = frozenset(
            name for name, own in tensors_of(model).items() if name in self.names and has_hooks(own)
        )
        self.linear_names = frozenset(linear_weights(model)) - self.hooked_names
        """The names of the weights that only a linear layer's own forward multiplies by."""
        self.has_buffers = bool(self.buffer_names)
        self._own_slots = slots_of(model, self.names.keys() | self.buffer_names.keys())
        self._trained_at = [(held, key) for name, held, key in self._own_slots if name in self.names]
        self._form = form_of(model)
        self._own_places = NamedStorages(self._own_tensors())
        self._left_behind: LeftBehind | None = None
        self._told_of_eval_mode = False

    def __repr__(self) -> str:
        criterion = "" if self.criterion is None else f", {self.criterion!r}"
        return f"module_loss({type(self.model).__name__}{criterion})"

    def __call__(self, params: dict[str, Tensor], *buffers_and_batch: Any) -> Any:
        """Return the loss; for a module with buffers, the loss and the buffers after the forward pass.

        Raises:
            TypeError: the batch has another form than `module_loss` accepts, or the model returns no loss.
            ValueError: since the loss was made, the module got other parameters or buffers or froze a parameter; its
                forward pass assigned one of two buffers that were one tensor. At the first call in training or eval
                mode, and in every trace: the forward pass writes a parameter, or reads a parameter or buffer through
                a tensor kept from before the call.
        """
        *given, batch = buffers_and_batch
        if len(given) != self.has_buffers:
            wanted = "params, buffers and batch" if self.has_buffers else "params and batch"
            raise TypeError(f"{self!r}: must be called with {wanted}; got {1 + len(buffers_and_batch)} arguments")
        if torch.compiler.is_dynamo_compiling():
            self._check_unchanged(called=True)
        elif (form := form_of(self._made_of)) != self._form:
            self._check_unchanged(called=True)
            self._form = form
        values = dict(params)
        for name, stored in self.names.items():
            if name not in params and stored in params:
                values[name] = params[stored]
        if self.has_buffers:
            fresh = {name: value.clone() for name, value in given[0].items()}
            values |= {name: fresh[stored] for name, stored in self.buffer_names.items()}
        if not torch.compiler.is_dynamo_compiling() and any(has_hooks(held[key]) for held, key in self._trained_at):
            values = with_hooks(values, self._own_tensors())
        returned = self._watched_loss(values, params, batch)
        loss, aux = pair("module_loss", "criterion", returned) if self.has_aux else (returned, ())
        if not self.has_buffers:
            return returned
        after = self._after(values, given[0])
        return loss, ((after, aux) if self.has_aux else after)

    def _own_tensors(self) -> dict[str, Tensor]:
        """Return the module's own parameters and buffers for which values are passed, by name."""
        found: dict[str, Tensor] = {}
        for name, held, key in self._own_slots:
            if key in held and held[key] is not None:
                found[name] = held[key]
        return found

    def _watched_loss(self, values: dict[str, Tensor], params: dict[str, Tensor], batch: Any) -> Any:
        """Return the loss of a batch; watch the first call in training or eval mode, and every trace."""
        if torch.compiler.is_dynamo_compiling():
            return self._loss(values, batch)
        training = self.holder.model.training
        if training in self._watched and running() is None and not self._kept:
            return self._loss(values, batch)
        buffers = {name: values[name] for name in self.buffer_names}
        before = {name: memory_of(value) for name, value in params.items()}
        trained = [name for name, value in params.items() if value.requires_grad]
        watch = FirstCallWatch({**self._own_tensors(), **self._kept}, self._own_places, params, buffers)
        if running() is None and has_compiled_part(self.holder):
            returned = self._loss(values, batch)
            watch.check_graph(returned, (values, batch))
        else:
            with watch.mode(in_trace=running() is not None):
                returned = self._loss(values, batch)
        frozen = next((name for name in trained if not params[name].requires_grad), None)
        if frozen is not None:
            raise ValueError(
                "module_loss: model must not freeze a parameter in the forward pass, because the step trains it; got "
                f"requires_grad=False on {frozen!r}: freeze it before module_loss is called, or take p.detach() in "
                "the forward pass"
            )
        self._refuse_untrained(returned[0] if isinstance(returned, tuple) else returned)
        for name, value in params.items():
            version, storage = memory_of(value)
            # flatten_parameters gives a recurrent layer's parameters other memory with the same values.
            if version != before[name][0] or (storage != before[name][1] and not self._recurrent):
                raise written_error(name)  # inside of a function of torch, or by `.data = value`
        if running() is None:
            self._kept = {} if training in self._watched else self._kept_of(params)
            self._watched.add(training)
        return returned

    def _kept_of(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors, by path, that model and criterion have kept in the memory of the values passed.

        They are the parameters of one call. In torch's loop they would follow the parameters, so the next call is
        watched for reading them.
        """
        places, own = NamedStorages(params), set(map(id, self._own_tensors().values()))
        return {
            path: slot.value
            for path, slot in survey(self.python_parts()).items()
            if isinstance(slot.value, Tensor) and id(slot.value) not in own and places.name_of(slot.value) is not None
        }

    def _refuse_untrained(self, loss: Any) -> None:
        """Raise ValueError if a loss depends on a trainable tensor of the criterion, through autograd."""
        if not self._untrained:
            return
        for node in nodes(getattr(loss, "grad_fn", None)):
            path, _ = self._untrained.get(id(getattr(node, "variable", None)), (None, None))
            if path is not None:
                raise ValueError(
                    f"module_loss: criterion must have no trainable parameter, which no step would train; got {path!r} "
                    f"in {kind_of(self.criterion)}: make it a part of the model, whose forward takes the target, or "
                    "freeze it, requires_grad_(False); what another step trains (a GAN's discriminator) comes in the "
                    "batch, other_step.compute_params(state), for functional_call"
                )

    def _loss(self, values: dict[str, Tensor], batch: Any) -> Any:
        """Return the loss of a batch; write buffers that the module assigned into values."""
        inputs, named, target = arguments_of(batch, has_target=self.criterion is not None)

        def run() -> Any:
            try:
                outputs = self.holder.model(*inputs, **named)
            except TypeError as error:
                if fits(self.model, inputs, named):
                    raise
                raise TypeError(
                    f"module_loss: batch must be {form(self.criterion is not None)}, as "
                    f"{type(self.model).__name__}.forward{inspect.signature(self.model.forward)} takes them; "
                    f"got {_tree.brief(batch)}: {error}"
                ) from error
            return loss_in(outputs) if self.criterion is None else self._criterion_of(outputs, target)

        return self._with(values, run)

    def _criterion_of(self, outputs: Any, target: Any) -> Any:
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

    def _with(self, values: dict[str, Tensor], run: Callable[[], Any]) -> Any:
        """Call run while the module has these tensors; write tensors that run assigned there into values."""
        held = {f"model.{name}": value for name, value in values.items()}
        if self.model is not self._made_of:  # the criterion may read the original module
            both = self.names.keys() | self.buffer_names.keys()
            held |= {f"made_of.{name}": value for name, value in values.items() if name in both}
        # Without torch's tying, which would replace the two precisions of a tied tensor by one.
        if torch.compiler.is_dynamo_compiling():
            out = functional_call(self.holder, held, (run,), tie_weights=False)
        else:
            with _locks.setdefault(self._made_of, threading.RLock()):
                try:
                    with like_own_tensors(values, self._own_tensors()):
                        out = functional_call(self.holder, held, (run,), tie_weights=False)
                finally:
                    for layer in self._recurrent:  # an RNN keeps a list of its last tensors; __getstate__ resets it
                        layer.__getstate__()  # type: ignore[no-untyped-call]
        values |= {name: held[f"model.{name}"] for name in values}
        return out

    def _after(self, values: dict[str, Tensor], before: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, stored in self.buffer_names.items():
            if values[name] is not values[stored]:
                raise ValueError(
                    f"module_loss: buffers that are one tensor must stay one; got {stored!r} and {name!r}, and the "
                    "forward pass assigned another tensor to one of them: register a clone() for the other"
                )
        return {name: values[name] for name in before}

    def _check_unchanged(self, *, called: bool = False) -> None:
        """Raise ValueError if the module's parameters, buffers or requires_grad flags have changed."""
        now = parts_of(self._made_of)
        if called:  # a new buffer may be a cache that the forward pass registered
            now = {name: part for name, part in now.items() if name in self._parts or part != "a buffer"}
        if now == self._parts:
            return
        name = next(name for name in {**self._parts, **now} if now.get(name) != self._parts.get(name))
        was, found = (parts.get(name, "not in it") for parts in (self._parts, now))
        raise ValueError(
            f"module_loss: model must stay as it was when the loss was made; {name!r} was {was} and is {found}: make "
            "the loss again, module_loss(model, ...), and the step of it"
        )

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager: every submodule in eval mode; the flags are restored afterwards.

        Sets the flags without calling `train` or `eval`, because a class may do more there, such as merging weights.
        """
        flags = [(part, part.training) for part in self.holder.modules()]
        try:
            for part, _ in flags:
                part.training = False
            yield
        finally:
            for part, flag in flags:
                part.training = flag

    def state_was_made(self) -> None:
        """Watch for a call of the module outside of steps, which move the state on and not the module."""
        if self._left_behind is not None:
            self._left_behind.remove()
        can_be_watched = self._trained_at and not isinstance(self._made_of, torch.jit.ScriptModule)
        self._left_behind = LeftBehind(self._made_of, *self._trained_at[0]) if can_be_watched else None

    def taking_step(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: the state moves on. Says once that the module is in eval mode."""
        if self._left_behind is not None:
            self._left_behind.a_step_was_taken = True
        if not self._told_of_eval_mode and not self.holder.model.training:
            self._told_of_eval_mode = True
            _log.warning(
                "module_loss: %s is in eval mode, so that steps train without dropout and with BatchNorm's running "
                "statistics: call model.train() first, unless you want this",
                type(self._made_of).__name__,
            )
        return in_step_of(self._made_of)

    def check_accumulation(self) -> None:
        """Raise ValueError if a parameter has a hook that gets the sum of the micro-batches' gradients."""
        for held, key in self._trained_at:
            if held[key]._post_accumulate_grad_hooks:
                raise ValueError(
                    "module_loss: model's parameters must have no hook of register_post_accumulate_grad_hook with "
                    f"accumulate above 1, because it gets the gradient of one micro-batch; got one on {key!r}: use "
                    "register_hook, or accumulate=1"
                )

    def code_parts(self) -> dict[str, Any]:
        """Return the objects whose Python the loss runs, by name."""
        return self.python_parts()

    def python_parts(self) -> dict[str, Any]:
        """Return the objects that may keep state besides the loss's arguments, by name."""
        parts = {"model": self.model, "criterion": self.criterion, "made_of": self._made_of}
        return {name: part for name, part in parts.items() if name != "made_of" or part is not self.model}

    def holding(self, params: dict[str, Tensor], after: Any, run: Callable[[], Any]) -> Any:
        """Call run while the module has these parameters and copies of the buffers after its forward pass.

        For a backward pass that calls the module again (`torch.utils.checkpoint`): recomputation needs the same values
        as in torch's own loop, and may write into buffers that are discarded.
        """
        values = {name: params[name if name in params else stored] for name, stored in self.names.items()}
        buffers = (after[0] if self.has_aux else after) if self.has_buffers else {}
        fresh = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        values |= {name: fresh[stored] for name, stored in self.buffer_names.items()}
        values |= {name: value for name, value in params.items() if name not in self.names}  # read by taps
        known = torch.compiler.is_dynamo_compiling() or self.holder.model.training in self._watched_backward
        if (known and running() is None) or not fresh:
            return self._with(values, run)
        given = {stored: (value, memory_of(value)) for stored, value in fresh.items()}
        calls: list[nn.Module] = []
        handle = register_module_forward_pre_hook(lambda module, _: calls.append(module))
        try:
            out = self._with(values, run)
        finally:
            handle.remove()
        for name, stored in self.buffer_names.items():
            value, memory = given[stored]
            # A checkpoint calls modules again, which write their buffers as in the forward pass.
            if not calls and (values[name] is not value or memory_of(value) != memory):
                raise ValueError(
                    "module_loss: model must not write its buffers in the backward pass, because the step's buffers "
                    f"are those after the forward pass; a hook wrote {name!r}: keep it in a tensor that is a plain "
                    "attribute and not a buffer"
                )
        if running() is None:
            self._watched_backward.add(self.holder.model.training)
        return out

    def fresh(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers as they are: a call copies them."""
        return buffers

    def all_names(self, params: Any) -> list[str]:  # noqa: ARG002
        """Return the names of all parameters, including frozen ones."""
        return [name for name, part in self._parts.items() if part != "a buffer"]

    def params(self) -> dict[str, Tensor]:
        """Return the module's trainable parameters by name, tied ones once, detached.

        Raises:
            ValueError: since the loss was made, the module got other parameters or buffers, or froze or tied one.
        """
        self._check_unchanged()
        if (self.names, self.buffer_names) != ties_of(self._made_of):
            raise ValueError(
                "module_loss: model must have the ties it had when the loss was made; tensors were tied or parted "
                "since (Module.to may part them): make the loss again, module_loss(model, ...), and the step of it"
            )
        return {name: value.detach() for name, value in self._trained().items()}

    def _trained(self) -> dict[str, Tensor]:
        # Not get_parameter, which a scripted module does not have.
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        return {stored: parameters[stored] for stored in dict.fromkeys(self.names.values())}

    def why_empty(self) -> str:
        """Return why there are no parameters, for an error message."""
        frozen = any(True for _ in self._made_of.parameters())
        return f": {'every parameter of the module is frozen' if frozen else 'the module has no parameter'}"

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the module's parameters and buffers, by name."""
        return {name: value.shape for name, value in self._own_tensors().items()}

    def own_params(self) -> dict[str, Tensor]:
        """Return the module's trainable parameters themselves, for a state that replaces their memory.

        Raises:
            TypeError: a parameter or buffer is a tensor subclass of several parts, whose memory cannot be replaced.
            ValueError: as in `params`.
        """
        for name, value in (*self.params().items(), *self.buffers().items()):
            if hasattr(type(value), "__tensor_flatten__"):
                raise TypeError(
                    "init: consume must be False if a parameter or buffer of the module is a DTensor or another "
                    f"tensor subclass; got True, and {name!r} is a {type(value).__name__}"
                )
        torch.clear_autocast_cache()  # it contains casts of the previous memory
        return self._trained()

    def take_buffers(self) -> dict[str, Tensor]:
        """Return copies of the module's buffers by name, and make the module's buffers share their memory."""
        fresh = {name: value.clone() for name, value in self.buffers().items()}
        self._set_buffers(fresh)
        return fresh

    def _set_buffers(self, values: dict[str, Tensor]) -> None:
        """Make buffers, by stored name, and frozen parameters that are tied to them, share the memory of values."""
        held = {name: value.detach() for name, value in values.items()}
        tensors = tensors_of(self._made_of)
        now = {id(tensors[name]): held[stored] for name, stored in self.buffer_names.items()}
        for name, stored in self.buffer_names.items():
            if held[stored] is not tensors[name]:
                held[stored].__dict__.update(tensors[name].__dict__)  # attributes that a user set
        # New objects, as Module.to creates: a buffer that is a view would keep its base's memory alive.
        for part in (*self._made_of.modules(), *self.model.modules()):
            part._buffers.update({name: now.get(id(value), value) for name, value in part._buffers.items()})
            for value in part._parameters.values():
                if value is not None and id(value) in now:
                    rebind(value, now[id(value)])

    def adopt(self, params: Any, buffers: dict[str, Tensor]) -> None:
        """Make the module's trainable parameters and its buffers share the memory of a state's.

        Raises:
            TypeError, ValueError: as in `own_params`.
        """
        stored = _tree.expand(params)
        for name, value in self.own_params().items():
            rebind(value, stored[name])
        self._set_buffers(buffers)

    def buffers(self) -> dict[str, Tensor]:
        """Return the module's buffers by name, shared ones once, detached."""
        held = dict(self.model.named_buffers(remove_duplicate=False))  # get_buffer is not for scripted modules
        return {stored: held[stored].detach() for stored in dict.fromkeys(self.buffer_names.values())}

    def state_dict(self, params: Any, buffers: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the module's own `state_dict` with these values.

        `model.load_state_dict` accepts it with strict=True.

        Args:
            params: the parameters, by stored name or as a `FlatParams` (`TrainState.params`, `TrainState.ema`).
            buffers: the buffers by stored name; None for the module's own.

        Raises:
            KeyError: a parameter or buffer is missing.
        """
        tree = _tree.expand(params)
        values = {name: tree[stored] for name, stored in self.names.items()}
        if buffers is not None:
            values |= {name: buffers[stored] for name, stored in self.buffer_names.items()}
        held = {id(value): values[name] for name, value in tensors_of(self.model).items() if name in values}
        own = self.model.state_dict(keep_vars=True)
        return {
            name: held.get(id(value), value).detach().clone() if isinstance(value, Tensor) else value
            for name, value in own.items()
        }


class Holder(nn.Module):
    """Calls a function inside `functional_call`, without running a hook."""

    def __init__(self, model: nn.Module, made_of: nn.Module) -> None:
        super().__init__()
        self.model, self.made_of = model, made_of

    def __call__(self, run: Callable[[], Any]) -> Any:
        return run()


def module_loss(
    model: nn.Module,
    criterion: Callable[[Any, Any], Any] | None = None,
    *,
    has_aux: bool = False,
    keep_buffers: bool = False,
    engine: Engine | None = None,
) -> ModuleLoss:
    """Return a loss function for `make_train_step` from a module and a criterion.

    loss = criterion(model(*inputs), target) for a batch `(*inputs, target)`, a tuple or a list.

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
    if not isinstance(model, nn.Module):
        fix = ""
        if isinstance(criterion, nn.Module) or callable(model):
            made = f" with {model.__name__}(...)" if isinstance(model, type) else ""
            fix = f": write module_loss(model, criterion){made}"
        raise TypeError(f"module_loss: model must be a torch.nn.Module; got {_tree.brief(model)}{fix}")
    if criterion is not None and not callable(criterion):
        raise TypeError(f"module_loss: criterion must be callable; got {_tree.brief(criterion)}")
    if isinstance(criterion, type) and issubclass(criterion, nn.Module):
        name = criterion.__name__
        raise TypeError(f"module_loss: criterion must be a function or an object; got the class {name}: pass {name}()")
    if isinstance(criterion, Loss):
        raise TypeError(f"module_loss: criterion must be a plain function; pass has_aux here; got {criterion!r}")
    for name, flag in (("has_aux", has_aux), ("keep_buffers", keep_buffers)):
        boolean("module_loss", name, flag)
    if has_aux and criterion is None:
        raise ValueError("module_loss: has_aux must be False without a criterion, which returns aux; got True")
    check_engine("module_loss", engine)
    for name, module in model.named_modules():
        if hasattr(module, "set_requires_gradient_sync") or hasattr(module, "no_sync"):
            raise TypeError(
                "module_loss: model must be the module itself, not under fully_shard, DDP or FSDP, whose hooks on own "
                f"parameters a function of parameters passes by; got {name or 'the module'} so. "
                "Use make_train_step(..., parallel=distributed.DataParallel(shard=True)), or their loop with GradScaler"
            )
        if getattr(module, "max_norm", None) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"module_loss: model must not write its parameters in the forward pass; got max_norm={module.max_norm} "
                f"in {name or 'the module'}, which renormalizes its weight in place"
            )
    for name, value in tensors_of(model).items():
        if nn.parameter.is_lazy(value):
            raise ValueError(
                f"module_loss: model must have its shapes; {name!r} is lazy: call the model on a batch once, before"
            )
    check_identities(model, criterion)
    return ModuleLoss(model, criterion, has_aux=has_aux, keep_buffers=keep_buffers, engine=engine)
