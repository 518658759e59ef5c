"""What is checked of a module and its criterion: once when their loss is made, and once of its graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from funcamp import _tree
from funcamp._autograd.differentiate import check_engine
from funcamp._autograd.graph import leaves_of
from funcamp._autograd.loss import Loss
from funcamp._autograd.module_tensors import tensors_of
from funcamp._autograd.returned import loss_in_front
from funcamp._check import boolean
from funcamp._memory import innermost, memory_of
from funcamp._types import Tree

#: Methods that only a module under fully_shard, DDP or FSDP has.
_DATA_PARALLEL_METHODS = ("set_requires_gradient_sync", "no_sync")


def check_arguments(model: object, criterion: object, *, has_aux: object, keep_buffers: object, engine: object) -> None:
    """Raise if these are not arguments of `module_loss`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"module_loss: model must be a torch.nn.Module; got {_tree.brief(model)}")
    _check_criterion(criterion)
    boolean("module_loss", "has_aux", has_aux)
    boolean("module_loss", "keep_buffers", keep_buffers)
    if has_aux and criterion is None:
        raise ValueError("module_loss: has_aux must be False without a criterion, which returns aux; got True")
    check_engine("module_loss", engine)
    for name, module in model.named_modules():
        _check_layer(name or "the module", module)
    for name, tensor in tensors_of(model).items():
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"module_loss: model must have its shapes; {name!r} is lazy: call the model on a batch once, before"
            )
    check_hooks(model)


def _check_criterion(criterion: object) -> None:
    """Raise TypeError if this is neither a criterion nor None."""
    if criterion is None:
        return
    if not callable(criterion):
        raise TypeError(f"module_loss: criterion must be callable; got {_tree.brief(criterion)}")
    if isinstance(criterion, type) and issubclass(criterion, nn.Module):
        name = criterion.__name__
        raise TypeError(f"module_loss: criterion must be a function or an object; got the class {name}: pass {name}()")
    if isinstance(criterion, Loss):
        raise TypeError(f"module_loss: criterion must be a plain function; pass has_aux here; got {criterion!r}")


def _check_layer(name: str, module: nn.Module) -> None:
    """Raise if a module of the model cannot be a function of its parameters."""
    if any(hasattr(module, method) for method in _DATA_PARALLEL_METHODS):
        raise TypeError(
            "module_loss: model must be the module itself, not under fully_shard, DDP or FSDP, whose hooks on own "
            f"parameters a function of parameters passes by; got {name} so. "
            "Use make_train_step(..., parallel=distributed.DataParallel(shard=True)), or their loop with GradScaler"
        )
    max_norm = getattr(module, "max_norm", None)
    if max_norm is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        raise ValueError(
            f"module_loss: model must not write its parameters in the forward pass; got max_norm={max_norm} "
            f"in {name}, which renormalizes its weight in place"
        )


def check_hooks(model: nn.Module) -> None:
    """Raise ValueError if a trained parameter has a hook on its gradient, which a step would pass by."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            raise ValueError(
                f"module_loss: model's parameters must have no hook on their gradients; got one on {name!r}: change "
                "the gradients in a part of a chain, chain(lambda update: ..., optimizer), or write max_norm= or "
                "max_value= of make_train_step to clip them"
            )


class CallCheck:
    """A check of a call: it reads no other parameters than those it was given, and writes none of these.

    Args:
        own: the module's own tensors.
        params: the parameters that the loss was given.
        given: all tensors that the loss was given.
    """

    def __init__(self, own: Mapping[str, Tensor], params: Mapping[str, Tensor], given: Iterable[Tensor]) -> None:
        self._own_names = {id(tensor): name for name, tensor in own.items()}
        self._params = params
        self._marks_before = {name: memory_of(value) for name, value in params.items()}
        self._nodes_before = {tensor.grad_fn for tensor in given}

    def after(self, returned: Tree) -> None:
        """Raise ValueError after the call, which returned this, if it was not so."""
        for name, value in self._params.items():
            if memory_of(value) != self._marks_before[name]:
                raise ValueError(
                    f"module_loss: model must not write to its parameters in the forward pass; it wrote to {name!r} or "
                    "another one in the same memory, which a skipped step could not undo: compute with a changed copy, "
                    "or write into the state between steps"
                )
        loss = loss_in_front(returned)
        if loss is None:
            return
        passed_ids = {id(innermost(value)) for value in self._params.values()}
        for leaf in leaves_of(innermost(loss), self._nodes_before):
            if isinstance(leaf, nn.Parameter) and id(leaf) not in passed_ids:
                raise self._error_of(leaf)

    def _error_of(self, leaf: nn.Parameter) -> ValueError:
        """Return the error for a parameter that the loss depends on and was not given."""
        if id(leaf) in self._own_names:
            return ValueError(
                "module_loss: model's parameters must be read of the model when the loss is called, as "
                f"model.parameters() in the criterion; got {self._own_names[id(leaf)]!r} as a tensor kept from before, "
                "whose values no step changes: read it in the call, or keep a clone() if it is a constant"
            )
        return ValueError(
            "module_loss: criterion must have no trainable parameter, which no step would train, and a forward pass "
            f"must make none; got one, {_tree.describe(leaf)}: make it a part of the model, whose forward takes the "
            "target, or freeze it, requires_grad_(False); what another step trains (a GAN's discriminator) comes in "
            "the batch, other_step.compute_params(state), for functional_call"
        )
