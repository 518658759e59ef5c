"""The arguments of an optimizer's class: which are refused, and what its constructor gets."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from funcamp import _tree
from funcamp._optim.hyperparameters import Signature, check_tensor, example_of, is_dynamic, map_items
from funcamp._types import Kwargs

#: A call in place of a wrong one, for errors.
EXAMPLE = "stateless(torch.optim.AdamW, lr=...)"
#: Arguments that choose how torch computes a step, with what a constructor gets: a CPU has no capturable step.
_IMPLEMENTATIONS = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}
#: Entries of a group that do not change the numbers of a step.
WITHOUT_EFFECT = ("params", *_IMPLEMENTATIONS)


def check_hyperparameters(cls: type[torch.optim.Optimizer], hyperparameters: Kwargs, accepted: Signature) -> None:
    """Check what the user gave for a class, whose constructor accepts some parameters.

    Raises:
        TypeError: a name is not the class's; or a tensor holds no float, or it or a schedule is given for what
            chooses the algorithm.
        ValueError: a tensor has dimensions, or a gradient is asked for.
    """
    takes_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    for name, value in hyperparameters.items():
        if name == "params":
            raise no_parameters(value)
        if not takes_any_name and name not in accepted:
            names = ", ".join(name for name in accepted if name != "params")
            got = f"{name}={_tree.brief(value)}"
            raise TypeError(f"stateless: {cls.__name__} has no hyperparameter {name}; got {got}: it has {names}")
        if name == "differentiable" and value:
            got = _tree.brief(value)
            raise ValueError(f"stateless: differentiable must be False, as no gradient flows through a step; got {got}")
        map_items(functools.partial(check_tensor, "stateless", name), value)
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


def torch_optimizer(cls: type[torch.optim.Optimizer], arguments: Kwargs) -> torch.optim.Optimizer:
    """Return a torch optimizer with these arguments: one parameter group, of some parameter."""
    any_parameter = torch.zeros(2, 2, requires_grad=True)  # a matrix, because Muon takes nothing else
    return cls([any_parameter], **arguments)


def no_parameters(value: object) -> TypeError:
    """Return the error for parameters, or for a hyperparameter without its name."""
    return TypeError(
        "stateless: hyperparameters must be given by name, and parameters must not be given, as they are in the state; "
        f"got {_tree.brief(value)}: write {EXAMPLE}"
    )


def constructor_arguments(hyperparameters: Mapping[str, Any], accepted: Signature) -> Kwargs:
    """Return Python values for the class's constructor, with examples for tensors and schedules."""
    arguments = {name: example_of(name, value, accepted) for name, value in hyperparameters.items()}
    return arguments | {name: value for name, value in _IMPLEMENTATIONS.items() if name in accepted}
