"""Some steps of a class's own loop, with which its steps as a function are compared when an optimizer is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcamp._optim.foreign.instance import changed, contents_of, entries_of, instance, leaves, shared_in, step_of
from funcamp._optim.foreign.number import RefusedError
from funcamp._optim.torch_optim.rule import State
from funcamp._types import Kwargs

_STEPS = 8


class OwnStep(NamedTuple):
    """A step of the class's own loop."""

    grads: list[Tensor]
    params: list[Tensor]
    """The parameters after it."""
    states: list[State]
    """The entries of each parameter after it, and last those that all share."""
    changed: set[str]
    """The names of what it changed for all parameters, also if that is no number: a flag, for example."""


def own_steps(
    cls: type[torch.optim.Optimizer], arguments: Kwargs, params: list[Tensor], generator: torch.Generator
) -> list[OwnStep]:
    """Return steps of an instance with these arguments, and random gradients of several sizes.

    Raises:
        RefusedError: parameters become infinite, so that there is nothing to compare.
    """
    owns: list[Any] = [nn.Parameter(param.clone()) for param in params]
    optimizer = instance(cls, owns, arguments)
    means = [normal(param.shape, generator) for param in params]
    steps = []
    for number in range(_STEPS):
        size = (1.0, 0.3, 30.0, 1.0, 1e-3)[number % 5]
        grads = [((mean + normal(mean.shape, generator)) * size).to(params[0].dtype) for mean in means]
        if number == 5:  # no other parameter depends on this gradient if they step one by one
            grads[0] *= 1e4
        for own, grad in zip(owns, grads):
            own.grad = grad.clone()
        before = leaves(shared_in(optimizer))
        with torch.no_grad():
            step_of(optimizer)()
        if not all(own.isfinite().all() for own in owns):
            raise RefusedError(cls, "its own loop comes to numbers that are not finite")
        contents = contents_of(optimizer, owns)
        params_after = [own.detach().clone() for own in owns]
        states = [entries_of(each, params[0]) for each in contents]
        steps.append(OwnStep(grads, params_after, states, changed(before, contents[-1])))
    return steps


def is_near(found: Tensor, wanted: Tensor, start: Tensor) -> bool:
    """Return whether a tensor is about what it is in the own loop, by its size or by the way that it went."""
    found, wanted, start = found.double(), wanted.double(), start.double()  # one may be a mask
    most_apart = 1e-5 * _largest(wanted - start) + 5e-7 * _largest(wanted)
    return torch.allclose(found, wanted, rtol=0.0, atol=most_apart, equal_nan=True)


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max())


def normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return random numbers."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)
