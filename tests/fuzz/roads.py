"""Run a random training along all roads, and raise for a difference that rounding does not explain."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import funcamp
from funcamp import _tree
from funcamp._verify.copied_contents import CopiedContents
from funcamp._verify.roads import Training, row_of, seed_generators
from funcamp._verify.rounding import Rounding, Row


class ApartError(AssertionError):
    """Two roads differ by more than rounding."""


def made_batches(sizes: list[int], micro: int = 0) -> list[Any]:
    """Return batches of these sizes, with micro-batches in front if there are any."""
    made = []
    for number, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(number)
        shape = (micro, size, 6) if micro else (size, 6)
        x = torch.randn(shape, generator=generator)
        made.append((x, torch.stack([x.sum(-1), x[..., 0], -x[..., 1]], -1)))
    return made


def max_of(grads: Any) -> Tensor:
    """Return the largest magnitude in a pytree of gradients."""
    return torch.stack([leaf.abs().max() for leaf in _tree.leaves(grads)]).max()


def compare(
    step: funcamp.TrainStep,
    batches: list[Any],
    *,
    operations: Mapping[int, str],
    flat: bool,
    consume: bool,
    **options: Any,
) -> None:
    """Raise `ApartError` if torch's loop, the eager step and the compiled one, with operations between, differ.

    Args:
        step: the step.
        batches: one for each step.
        operations: what to do before a step, by its number.
        flat: as for `init`.
        consume: as for `init`; for the compiled step only.
        options: of `jit`.
    """
    loss_fn: Any = step.loss_fn
    contents = CopiedContents([loss_fn.model, loss_fn.criterion])
    training = Training(step, step.init(flat=flat), batches, {}, contents)
    eager = training.step_rows(step)
    disturbed = [training.step_rows(step, seed=seed) for seed in range(3)]
    rounding = Rounding(eager, disturbed, row_of(step, training.state, None))
    with contextlib.suppress(NotImplementedError):  # torch has no such loop
        reference = training.torch_rows(eager, set())
        _check(rounding, "torch's loop", reference, "eager step", eager)
    with contents.entered():
        again = _compiled_rows(training, flat, consume, operations, options)
    _check(rounding, "eager step", eager, "compiled step", again, exact=options.get("backend") == "eager")


def _check(
    rounding: Rounding, name: str, reference: list[Row], road: str, rows: list[Row], *, exact: bool = False
) -> None:
    for number, row in enumerate(rows):
        found = rounding.difference(number, reference[number], row)
        if found is not None and (exact or found.share > 1):
            raise ApartError(
                f"{road} differs from {name} at step {number}: {found.name} by {found.size:.1e}, "
                f"{found.allowed:.1e} allowed"
            )


def _compiled_rows(
    training: Training, flat: bool, consume: bool, operations: Mapping[int, str], options: dict[str, Any]
) -> list[Row]:
    """Return the rows of a compiled step with operations on the state between its calls."""
    step: Any = training.step
    run, other = funcamp.jit(step, **options), funcamp.jit(step, donate=False, **options)
    state: Any = step.init(flat=flat, consume=consume)
    rows: list[Row] = []
    for number, batch in enumerate(training.batches):
        operation = operations.get(number)
        call: Any = {"eager step": step, "other jit": other}.get(operation or "", run)
        state = _operated(step, state, batch, operation)
        seed_generators(number)
        state, metrics = call(state, tuple(leaf.clone() for leaf in batch))
        rows.append(row_of(step, state, metrics))
    return rows


def _operated(step: Any, state: Any, batch: Any, operation: str | None) -> Any:
    """Do something with a state that must change no number."""
    if operation == "save and load":
        return step.load_state_dict(step.state_dict(state), like=state)
    if operation == "clone":
        return funcamp.clone(state)
    if operation == "pickle":
        return pickle.loads(pickle.dumps(state))
    if operation == "evaluate":
        step.loss(state, tuple(leaf[0] for leaf in batch) if step.options.accumulate > 1 else batch)
    if operation == "compute_params":
        step.compute_params(state)
    if operation == "forget the state's flag":
        return state._replace(scaler=state.scaler._replace(found_inf=state.scaler.found_inf.clone()))
    return state
