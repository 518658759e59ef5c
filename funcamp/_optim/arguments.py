"""The arguments of an optimizer's class: which are refused, and what its constructor gets."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from funcamp import _tree
from funcamp._optim.hyperparameters import Signature, check_tensor, example_of, is_dynamic, map_items
from funcamp._optim.torch_optim.rule import UpdateRule
from funcamp._types import Kwargs

#: A call in place of a wrong one, for errors.
EXAMPLE = "stateless(torch.optim.AdamW, lr=...)"
#: Arguments that choose another implementation of the same step.
_IMPLEMENTATIONS = ("fused", "foreach", "differentiable")
#: Entries of a group that do not change the numbers of a step: they choose how torch computes it.
WITHOUT_EFFECT = ("params", "capturable", *_IMPLEMENTATIONS)


def check_hyperparameters(cls: type[torch.optim.Optimizer], hyperparameters: Kwargs, accepted: Signature) -> None:
    """Check what the user gave for a class, whose constructor accepts some parameters.

    Raises:
        TypeError: a name is not the class's; or a tensor holds no float, or it or a schedule is given for what
            chooses the algorithm.
        ValueError: a tensor has dimensions, or an argument chooses another implementation.
    """
    takes_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    for name, value in hyperparameters.items():
        if name == "params":
            raise no_parameters(value)
        if name == "self" or not (takes_any_name or name in accepted):
            names = ", ".join(name for name in accepted if name not in ("self", "params"))
            got = f"{name}={_tree.brief(value)}"
            raise TypeError(f"stateless: {cls.__name__} has no hyperparameter {name}; got {got}: it has {names}")
        if name in _IMPLEMENTATIONS and (is_dynamic(value) or value):
            raise ValueError(
                f"stateless: {name} must be False or None (torch.compile fuses the step; no gradient flows through it);"
                f" got {name}={value!r}"
            )
        map_items(functools.partial(check_tensor, "stateless"), name, value)
        if issubclass(value if isinstance(value, type) else type(value), torch.optim.lr_scheduler.LRScheduler):
            raise TypeError(
                f"stateless: {name} must be a number, a tensor or a schedule; got {_tree.brief(value)}: write "
                "funcamp.schedule(stateless(...), lambda optimizer: ..., steps=...)"
            )
        default = accepted[name].default if name in accepted else None
        if is_dynamic(value) and isinstance(default, (bool, str)):
            raise TypeError(
                f"stateless: {name} must be a {type(default).__name__}, because it chooses the algorithm; "
                f"got {_tree.brief(value)}"
            )


def torch_group(cls: type[torch.optim.Optimizer], arguments: Kwargs) -> Kwargs:
    """Return the parameter group of a torch optimizer with these arguments: with its defaults, for some parameter."""
    any_parameter = torch.zeros(2, 2, requires_grad=True)  # a matrix, because Muon takes nothing else
    group: Kwargs = cls([any_parameter], **arguments).param_groups[0]
    return group


def group_of(cls: type[torch.optim.Optimizer], rule: UpdateRule, hyperparameters: Kwargs, arguments: Kwargs) -> Kwargs:
    """Return the parameter group of a class of torch.optim: all its arguments, with its defaults.

    Args:
        cls: the class.
        rule: its update rule.
        hyperparameters: what the user gave.
        arguments: the same with numbers in place of tensors and schedules.

    Raises:
        TypeError: the rule does not know an argument, or a tensor or a schedule is given for a constant.
        ValueError: the class or the rule refuses a value.
    """
    for name, value in hyperparameters.items():  # some of a newer torch, perhaps, and texts of it
        if name not in (*rule.arguments, *WITHOUT_EFFECT):
            raise TypeError(
                f"stateless: {cls.__name__} must be given without {name}, which torch has and funcamp has not"
            )
        if is_dynamic(value) and name in rule.constants:
            raise TypeError(f"stateless: {name} must be a constant; got {_tree.brief(value)}")
        if rule.texts and isinstance(value, str) and value not in rule.texts:
            raise ValueError(f"stateless: {name} must be one of {rule.texts}; got {value!r}")
    try:
        return torch_group(cls, arguments)
    except (TypeError, ValueError) as error:
        got = ", ".join(f"{name}={_tree.brief(value)}" for name, value in hyperparameters.items())
        raise type(error)(f"stateless: {cls.__name__} refuses its hyperparameters: {error}; got {got}") from error


def no_parameters(value: object) -> TypeError:
    """Return the error for parameters, or for a hyperparameter without its name."""
    return TypeError(
        "stateless: hyperparameters must be given by name, and parameters must not be given, as they are in the state; "
        f"got {_tree.brief(value)}: write {EXAMPLE}"
    )


def constructor_arguments(hyperparameters: Mapping[str, Any], accepted: Signature) -> Kwargs:
    """Return Python values for the class's constructor, with examples for tensors and schedules."""
    arguments = {name: example_of(name, value, accepted) for name, value in hyperparameters.items()}
    for name, value in (("foreach", False), ("fused", None), ("capturable", False)):  # a CPU has no capturable step
        if name in accepted:
            arguments[name] = value
    return arguments
