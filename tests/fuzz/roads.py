"""Run a random training along all roads, and raise for a difference that rounding does not explain."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import funcamp
from funcamp import _tree
from funcamp._verify.compare import Rounding, Row
from funcamp._verify.python_state import PythonState
from funcamp._verify.roads import Disturbance, Generators, Task, row_of, start_of, step_rows, torch_rows
from funcamp._verify.torch_loop import why_not


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
    python = PythonState({"model": loss_fn.model, "criterion": loss_fn.criterion, "step": step})
    task = Task(step, step.init(flat=flat), batches, None, python, Generators(set()))
    try:
        eager = list(step_rows(task, step))
        reference, name = eager, "eager step"
        ulp = torch.finfo(step._options.policy.compute_dtype).eps
        if why_not(step):
            disturbed = list(step_rows(task, step, disturbed=Disturbance(ulp)))
        else:
            scales = [float(row["metrics.scale"]) for row in eager]
            reference, _ = torch_rows(task, scales)
            disturbed, _ = torch_rows(task, scales, disturbed=Disturbance(ulp))
            name = "torch's loop"
        rounding = Rounding(reference, disturbed, start_of(task))
        _check(rounding, name, "eager step", eager)
        again = _compiled(task, flat, consume, operations, options)
        _check(rounding.against(eager), "eager step", "compiled step", again, exact=options.get("backend") == "eager")
    finally:
        task.begin()


def _check(rounding: Rounding, reference: str, road: str, rows: Any, *, exact: bool = False) -> None:
    for number, row in enumerate(rows):
        found = rounding.difference(number, row)
        if found is not None and (exact or not found.is_rounding):
            raise ApartError(
                f"{road} differs from {reference} at step {number}: {found.name} by {found.size:.1e}, "
                f"{found.allowed:.1e} allowed"
            )


def _compiled(
    task: Task, flat: bool, consume: bool, operations: Mapping[int, str], options: dict[str, Any]
) -> Iterator[Row]:
    """Yield the rows of a compiled step with operations on the state between its calls."""
    task.begin()
    step: Any = task.step
    run, other = funcamp.jit(step, **options), funcamp.jit(step, donate=False, **options)
    state: Any = step.init(flat=flat, consume=consume)
    for number, batch in enumerate(task.batches):
        operation = operations.get(number)
        call: Any = {"eager step": step, "other jit": other}.get(operation or "", run)
        state = _operated(step, state, batch, operation)
        state, metrics = call(state, tuple(leaf.clone() for leaf in batch))
        yield row_of(step, state, metrics)


def _operated(step: Any, state: Any, batch: Any, operation: str | None) -> Any:
    """Do something with a state that must change no number."""
    if operation == "save and load":
        return step.load_state_dict(step.state_dict(state), like=state)
    if operation == "clone":
        return funcamp.clone(state)
    if operation == "pickle":
        return pickle.loads(pickle.dumps(state))
    if operation == "evaluate":
        step.loss(state, tuple(leaf[0] for leaf in batch) if step._options.accumulate > 1 else batch)
    if operation == "compute_params":
        step.compute_params(state)
    if operation == "forget the state's flag":
        return state._replace(scaler=state.scaler._replace(found_inf=state.scaler.found_inf.clone()))
    return state
