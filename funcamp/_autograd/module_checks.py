"""What is checked of a module and its criterion once, when their loss is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node

from funcamp import _tree
from funcamp._autograd.loss import Loss
from funcamp._autograd.module_walk import tensors_of
from funcamp._autograd.scaled_grad import check_engine
from funcamp._check import boolean
from funcamp._trace.python_state import Slot, survey

#: Methods that only a module under fully_shard, DDP or FSDP has.
_DATA_PARALLEL_METHODS = ("set_requires_gradient_sync", "no_sync")


class CriterionTensor(NamedTuple):
    """A trainable tensor that a criterion reaches and no step trains."""

    path: str
    tensor: Tensor
    """It is stored so that no other tensor gets its id."""


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


def check_identities(model: nn.Module, criterion_slots: Iterable[Slot]) -> None:
    """Raise ValueError if the model or the criterion knows a parameter by its identity.

    Args:
        model: the module.
        criterion_slots: what the criterion reaches.
    """
    names_by_id = {id(tensor): name for name, tensor in tensors_of(model).items()}
    for slot in (*survey({"model": model}).values(), *criterion_slots):
        for identity in _identities_in(slot):
            if identity in names_by_id:
                raise ValueError(
                    "module_loss: model and criterion must not know a parameter by its identity (id(), a key of a "
                    f"dict, in a set), because a step passes other tensors; got {names_by_id[identity]!r} in "
                    f"{slot.path}: use its name, or an attribute of the parameter"
                )


def _identities_in(slot: Slot) -> Iterator[int]:
    """Yield the numbers in a slot that may be the identity of a tensor."""
    if isinstance(slot.owner, dict):
        if isinstance(slot.key, Tensor):
            yield id(slot.key)
        elif isinstance(slot.key, int):
            yield slot.key
    is_in_set = slot.path.endswith("}")
    if is_in_set and isinstance(slot.value, Tensor):
        yield id(slot.value)
    if type(slot.value) is int:  # not a bool
        yield slot.value


def trainable_tensors_of(criterion_slots: Iterable[Slot], model: nn.Module) -> dict[int, CriterionTensor]:
    """Return the trainable tensors that a criterion reaches and that are not the model's, by id."""
    ids_of_model = set(map(id, tensors_of(model).values()))
    tensors: dict[int, CriterionTensor] = {}
    for slot in criterion_slots:
        tensor = slot.value
        if not isinstance(tensor, Tensor) or id(tensor) in ids_of_model:
            continue
        if tensor.requires_grad and tensor.is_leaf:
            tensors.setdefault(id(tensor), CriterionTensor(slot.path.removeprefix("criterion."), tensor))
    return tensors


def check_no_other_is_trained(nodes: Iterable[Node], tensors: dict[int, CriterionTensor], criterion: object) -> None:
    """Raise ValueError if a loss depends, through autograd, on a trainable tensor that no step trains.

    Args:
        nodes: the nodes of the loss's graph.
        tensors: of `trainable_tensors_of`.
        criterion: the criterion, for the message.
    """
    for node in nodes:
        # Only the node that accumulates the gradient of a leaf has a variable: the leaf.
        reached = tensors.get(id(getattr(node, "variable", None)))
        if reached is not None:
            name = getattr(criterion, "__name__", type(criterion).__name__)
            raise ValueError(
                f"module_loss: criterion must have no trainable parameter, which no step would train; got "
                f"{reached.path!r} in {name}: make it a part of the model, whose forward takes the target, or "
                "freeze it, requires_grad_(False); what another step trains (a GAN's discriminator) comes in the "
                "batch, other_step.compute_params(state), for functional_call"
            )
