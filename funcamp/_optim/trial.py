"""Steps of a class on a few numbers, and how their results compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp._optim.class_state import ClassState
from funcamp._optim.class_step import ClassStep, empty_state


class Inputs(NamedTuple):
    """Arguments of a step."""

    params: list[Tensor]
    grads: list[Tensor]

    def with_gradients_times(self, factor: float) -> Inputs:
        """Return the arguments with larger gradients."""
        return Inputs(self.params, [grad * factor for grad in self.grads])

    def one_by_one(self) -> list[Inputs]:
        """Return the arguments of a separate step for each parameter."""
        return [Inputs([param], [grad]) for param, grad in zip(self.params, self.grads)]


def inputs_on(device: str, dtype: torch.dtype = torch.float32) -> Inputs:
    """Return two matrices, and other numbers as their gradients."""
    numbers = torch.linspace(-1.0, 1.5, 6, device=device, dtype=dtype)
    wide = numbers.reshape(2, 3)
    tall = numbers.reshape(3, 2)
    return Inputs(params=[wide, tall.cos()], grads=[wide.sin(), tall.exp()])


def precise_inputs(step: ClassStep) -> Inputs:
    """Return inputs in float64, or in float32 for a class that mixes them with tensors of torch's default dtype."""
    inputs = inputs_on("cpu", torch.float64)
    try:
        two_steps(step, inputs)
    except RuntimeError:
        return inputs_on("cpu")
    return inputs


def two_steps(
    step: ClassStep,
    inputs: Inputs,
    values: Mapping[str, object] | None = None,
    treated_as_zero: frozenset[str] = frozenset(),
) -> list[Tensor]:
    """Return the parameters and the state after two steps along the path that the numbers of the trial propose.

    Args:
        step: the class.
        inputs: those of the first step; the second has other gradients, so that it changes all of the state.
        values: of the hyperparameters that are tensors; the others are Python numbers. By default all dynamic ones are
            tensors, with their examples as values.
        treated_as_zero: as in `Decisions`.
    """
    if step.steps_separately and len(inputs.params) > 1:
        return [tensor for single in inputs.one_by_one() for tensor in two_steps(step, single, values, treated_as_zero)]
    hyper = step.examples(inputs.params[0].device.type, values)
    first = step.along_paths(inputs.params, inputs.grads, None, empty_state(inputs.params), hyper)
    other_grads = [grad.cos() for grad in inputs.grads]
    decisions = step.decisions(treated_as_zero=treated_as_zero)
    second_run = step.run(first.params, other_grads, first.state, hyper, decisions)
    second = step.stepped(second_run, step.form(first.params), other_grads, first.state, first.state)
    return tensors_in(second.params, second.state)


def tensors_in(params: list[Tensor], state: ClassState) -> list[Tensor]:
    """Return parameters and a state in one list."""
    tensors = list(params)
    for entries in (*state.per_param, state.shared):
        tensors += [entries[name] for name in sorted(entries)]
    return tensors


def are_equal(tensors: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether two lists of tensors are equal; NaN equals NaN."""
    return len(tensors) == len(others) and all(map(is_equal, tensors, others))


def distance(tensors: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, relative to the tensor's largest element."""
    if len(tensors) != len(expected):
        return float("inf")
    distances = [0.0]
    for tensor, reference in zip(tensors, expected):
        if reference.numel() == 0:
            continue
        if reference.is_complex():
            tensor, reference = torch.view_as_real(tensor), torch.view_as_real(reference)
        reference = reference.double()
        tensor = tensor.double()
        largest = reference.abs().max().clamp(min=1e-30)
        distance = float((tensor - reference).abs().max() / largest)
        distances.append(float("inf") if distance != distance else distance)
    return max(distances)


def is_equal(tensor: Tensor, other: Tensor) -> bool:
    """Return whether tensors are equal; NaN equals NaN, of which a path that is not taken may be full."""
    if tensor.shape != other.shape:
        return False
    are_nan = (tensor != tensor) & (other != other)
    return bool(((tensor == other) | are_nan).all())
