"""The parameter groups of torch's optimizer for a step: which parameters, in which order, under which numbers.

torch numbers parameters in the order in which its optimizer got them; funcamp uses their names. A `TorchGroup` has the
names in torch's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from funcamp._autograd.loss import Loss
from funcamp._autograd.module_loss import ModuleLoss
from funcamp._optim.by_group import GroupedOptimizer
from funcamp._optim.chain import only_optimizer_of
from funcamp._optim.optimizer import StatelessOptimizer
from funcamp._optim.torch_optim.sgd import APPLIED_ENTRY
from funcamp._scaler.config import ScalerConfig
from funcamp._step.state import TrainState


class Step(Protocol):
    """What the conversion asks of a `TrainStep`."""

    loss_fn: Loss
    optimizer: object
    config: ScalerConfig

    @property
    def _split(self) -> Callable[[TrainState, Mapping[str, object]], TrainState]: ...


class TorchGroup(NamedTuple):
    """One parameter group of torch's optimizer."""

    label: str | None
    """Its label in `by_group`; None without."""
    optimizer: StatelessOptimizer
    prefix: str
    """The prefix of its entries among the exported names."""
    names: list[str]
    """The names of its parameters, in torch's order."""

    def key(self, entry: str, name: str) -> str:
        """Return the exported name of an optimizer entry of a parameter."""
        return f"{self.prefix}state.{entry}.{name}"

    def key_of_shared(self, entry: str) -> str:
        """Return the exported name of what the optimizer keeps for all parameters."""
        return f"{self.prefix}shared.{entry}"

    def shared_in(self, saved: Iterable[str]) -> list[str]:
        """Return the names of what the optimizer keeps for all parameters, that are among exported names."""
        start = self.key_of_shared("")
        entries = [key.removeprefix(start) for key in saved if key.startswith(start)]
        return [entry for entry in entries if entry != APPLIED_ENTRY]

    def numbers_among(self, entries: Iterable[str], param: Tensor) -> set[str]:
        """Return the entries that are Python's numbers in torch's class.

        Raises:
            TypeError: an entry is in a container or in an attribute.
        """
        optimizer = self.optimizer
        for entry in entries:
            if any(sign in entry for sign in "[:."):
                raise TypeError(
                    f"to_torch, from_torch: {optimizer._cls.__name__} keeps {entry!r} in a container or an attribute, "
                    "which torch's format does not name; save and load with step.state_dict and "
                    "step.load_state_dict"
                )
        return set(entries) & optimizer._python_numbers(param)

    def entries_in(self, saved: Iterable[str]) -> list[str]:
        """Return the names of the optimizer's entries, as in torch, that are among exported names."""
        start = f"{self.prefix}state."
        entries: dict[str, None] = {}
        for key in saved:
            if key.startswith(start):
                entries[key.removeprefix(start).partition(".")[0]] = None
        return list(entries)


def groups_of(call: str, step: Step, state: TrainState, names: Iterable[str] | None) -> list[TorchGroup]:
    """Return the parameter groups of torch's optimizer: one, or one for each label of `by_group`.

    Args:
        call: the public function, for errors.
        step: the step.
        state: a state of it.
        names: the parameters in the order in which torch's optimizer got them; None for the module's.

    Raises:
        TypeError: an optimizer was not made by `stateless`.
        ValueError: names are not those of the step's parameters.
    """
    labels = state.params.layout.label_of()
    optimizer = only_optimizer_of(step.optimizer)
    module_parameters: dict[str, nn.Parameter] = {}
    if isinstance(step.loss_fn, ModuleLoss):
        module_parameters = dict(step.loss_fn.model.named_parameters())

    # The parameters in torch's order.
    if names is not None:
        order = list(names)
    else:
        order = list(module_parameters) or list(labels)
    _check_order(call, order, set(labels), set(module_parameters))

    # The groups: all parameters in one, or those of each label.
    if not isinstance(optimizer, GroupedOptimizer):
        _check_optimizer(call, optimizer)
        return [TorchGroup(None, optimizer, "opt_state.", order)]
    for name in order:
        if name not in labels:  # a frozen parameter of the module
            labels[name] = optimizer.group(name, module_parameters[name])
    groups: list[TorchGroup] = []
    for label, optimizer_of_label in optimizer.optimizers.items():
        _check_optimizer(call, optimizer_of_label)
        names_of_label = [name for name in order if labels[name] == label]
        groups.append(TorchGroup(label, optimizer_of_label, f"opt_state.{label}.", names_of_label))
    return groups


def _check_order(call: str, order: Sequence[str], trained: set[str], of_module: set[str]) -> None:
    names = set(order)
    is_repeated = len(names) < len(order)
    if is_repeated or not trained <= names <= trained | of_module:
        odd = sorted(trained ^ names)
        raise ValueError(
            f"{call}: names must be those of the step's parameters, each once; got {list(order)}, odd is {odd}"
        )


def _check_optimizer(call: str, optimizer: object) -> None:
    if not isinstance(optimizer, StatelessOptimizer):
        raise TypeError(f"{call}: the step's optimizer must be made by stateless; got {optimizer!r}")


def has_several_classes(optimizer: object) -> bool:
    """Return whether torch needs one optimizer per group, because their classes differ."""
    if not isinstance(optimizer, GroupedOptimizer):
        return False
    classes = {grouped._cls for grouped in optimizer.optimizers.values()}
    return len(classes) > 1


def hyperparameters_of(optimizer: StatelessOptimizer, applied: Tensor) -> dict[str, object]:
    """Return the numbers of a torch.optim group after some applied steps."""
    arguments: dict[str, object] = {}
    for name, value in (optimizer._hyperparameters | optimizer._hyper(applied, [applied])).items():
        arguments[name] = as_number(value)
    group = torch_group_of(optimizer, arguments)
    return {name: value for name, value in group.items() if name != "params"}


def torch_group_of(optimizer: StatelessOptimizer, arguments: Mapping[str, Any]) -> dict[str, object]:
    """Return the parameter group of torch's class with these arguments, defaults included."""
    any_parameter = torch.zeros(2, 2, requires_grad=True)  # a matrix, because Muon takes nothing else
    torch_optimizer = optimizer._cls([any_parameter], **arguments)
    group: dict[str, object] = torch_optimizer.param_groups[0]
    return group


def as_number(value: object) -> object:
    """Return a hyperparameter as a number, or as a tuple of numbers."""
    if isinstance(value, (tuple, list)):
        return tuple(as_number(item) for item in value)
    return value.item() if isinstance(value, Tensor) else value
