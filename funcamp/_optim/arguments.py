"""The arguments of an optimizer's class: which are refused, and what its constructor gets."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch

from funcamp import _tree
from funcamp._optim.hyperparameters import Signature, check_value, example_of, is_dynamic
from funcamp._optim.torch_optim.rule import UpdateRule
from funcamp._types import Kwargs

#: A call in place of a wrong one, for errors.
EXAMPLE = "stateless(torch.optim.AdamW, lr=...)"
#: torch's names of hyperparameters that other libraries call otherwise.
_TORCHS_NAMES = {"learning_rate": "lr", "decay": "weight_decay", "epsilon": "eps"}
#: Entries of a group that do not change the numbers of a step: they choose how torch computes it.
WITHOUT_EFFECT = ("params", "foreach", "fused", "capturable", "differentiable")


def check_arguments(
    cls: type[torch.optim.Optimizer], rule: UpdateRule, hyperparameters: Kwargs, arguments: Kwargs
) -> Kwargs:
    """Return the parameter group of a class of torch.optim: all its arguments, with its defaults.

    Args:
        cls: the class.
        rule: its update rule.
        hyperparameters: what the user gave.
        arguments: the same with numbers in place of tensors and schedules.

    Raises:
        TypeError: an argument is not the class's, or the rule does not know it, or a tensor or a schedule is given for
            what is no number.
        ValueError: the class or the rule refuses a value.
    """
    accepted = inspect.signature(cls.__init__).parameters
    check_names(cls, hyperparameters, accepted)
    check_implementation(hyperparameters)
    for name, value in hyperparameters.items():
        if name not in (*rule.arguments, *WITHOUT_EFFECT):
            raise TypeError(
                f"stateless: {cls.__name__} must be given without {name}, which torch has and funcamp has not"
            )
        if is_dynamic(value):
            if name in rule.constants:
                raise TypeError(f"stateless: {name} must be a constant; got {_tree.brief(value)}")
            check_is_no_choice(name, value, accepted)
    try:
        group: Kwargs = cls([torch.zeros(2, 2, requires_grad=True)], **arguments).param_groups[0]
    except (TypeError, ValueError) as error:
        got = ", ".join(f"{name}={_tree.brief(value)}" for name, value in hyperparameters.items())
        raise type(error)(f"stateless: {cls.__name__} refuses its hyperparameters: {error}; got {got}") from error
    for name, value in hyperparameters.items():  # of a newer torch, perhaps
        if isinstance(value, str) and value not in rule.texts:
            raise ValueError(f"stateless: {name} must be one of {rule.texts}; got {value!r}")
    return group


def impure(cls: type, why: str) -> TypeError:
    """Return the error for a class that cannot be a function."""
    return TypeError(f"stateless: {cls.__name__} cannot be made pure: {why}")


def check_names(cls: type[torch.optim.Optimizer], hyperparameters: Mapping[str, object], accepted: Signature) -> None:
    """Raise TypeError for what is no hyperparameter of the class, and for torch's parameters and schedulers."""
    takes_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    for name, value in hyperparameters.items():
        if name == "params":
            raise no_parameters(value)
        check_value("stateless", name, value)
        scheduler = torch.optim.lr_scheduler.LRScheduler
        if isinstance(value, scheduler) or (isinstance(value, type) and issubclass(value, scheduler)):
            raise TypeError(
                f"stateless: {name} must be a number, a tensor or a schedule; got {_tree.brief(value)}: write "
                "funcamp.schedule(stateless(...), lambda optimizer: ..., steps=...)"
            )
        if name == "self" or not (takes_any_name or name in accepted):
            torchs = _TORCHS_NAMES.get(name)
            fix = f": write {torchs}={value!r}" if torchs in accepted else ""
            raise TypeError(f"stateless: {cls.__name__} has no hyperparameter {name}; got {name}={value!r}{fix}")


def no_parameters(value: object) -> TypeError:
    """Return the error for parameters, or for a hyperparameter without its name."""
    return TypeError(
        "stateless: hyperparameters must be given by name, and parameters must not be given, as they are in the state; "
        f"got {_tree.brief(value)}: write {EXAMPLE}"
    )


def check_implementation(hyperparameters: Mapping[str, object]) -> None:
    """Raise ValueError for arguments that choose another implementation of the same step."""
    for name in ("fused", "foreach", "differentiable"):
        value = hyperparameters.get(name)
        if is_dynamic(value) or value:
            raise ValueError(
                f"stateless: {name} must be False or None (torch.compile fuses the step; no gradient flows through it);"
                f" got {name}={value!r}"
            )


def refuse_closure(cls: type[torch.optim.Optimizer]) -> None:
    """Raise TypeError if the class's step needs an argument."""
    step_parameters = list(inspect.signature(cls.step).parameters.values())[1:]  # without self
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # a mixin gives them to the next class
    named = [parameter for parameter in step_parameters if parameter.kind not in variadic]
    required = [parameter.name for parameter in named if parameter.default is parameter.empty]
    if required:
        raise impure(
            cls,
            f"its step needs {', '.join(required)}, through which it evaluates the loss and branches on the value on "
            "the host; use it in an ordinary float32 loop, without a scaler, or take an optimizer without a closure",
        )


def check_is_no_choice(name: str, value: object, accepted: Signature) -> None:
    """Raise TypeError if a tensor or a schedule is given for an argument that chooses the algorithm."""
    default = accepted[name].default if name in accepted else None
    if isinstance(default, (bool, str)):
        raise TypeError(
            f"stateless: {name} must be a {type(default).__name__}, because it chooses the algorithm; "
            f"got {_tree.brief(value)}"
        )


def constructor_arguments(hyperparameters: Mapping[str, object], accepted: Signature) -> Kwargs:
    """Return Python values for the class's constructor, with examples for tensors and schedules."""
    arguments = {name: example_of(name, value, accepted) for name, value in hyperparameters.items()}
    for name, value in (("foreach", False), ("fused", None)):
        if name in accepted:
            arguments.setdefault(name, value)
    if "capturable" in accepted:  # neither needed nor used
        arguments["capturable"] = False
    return arguments
