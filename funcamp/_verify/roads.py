"""The roads along which the same training is run: torch's loop, the step in eager mode, and the compiled step."""

from __future__ import annotations

import copy
import io
import random
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._step.state import TrainState
from funcamp._step.step import TrainStep
from funcamp._storage.params import clone
from funcamp._types import Tree
from funcamp._verify.compare import Row, copied_to_host
from funcamp._verify.python_state import PythonState
from funcamp._verify.torch_loop import TorchLoop

#: The scale at which float16 gradients overflow. Float32's largest number is 2^128.
_OVERFLOWS = 2.0**120

_Step = Callable[[Tree, Tree], tuple[Tree, Tree]]


class Task(NamedTuple):
    """One training of a few steps, which every road does from the same start."""

    step: _Step
    """The step before it is compiled."""
    state: Tree
    """The first state. Roads use clones."""
    batches: list[Tree]
    """A batch for every step. Roads use deep copies."""
    overflow: int | None
    """The number of the step whose scale is too high, on purpose."""
    python_state: PythonState
    """What the user's objects keep in Python."""
    generators: Generators
    """The random number generators, as they are at the start."""

    def begin(self) -> None:
        """Put everything outside of the state back to the start."""
        self.python_state.restore()
        self.generators.restore()


class Generators:
    """The state of the random number generators: torch's own on the CPU and on some devices, Python's and numpy's."""

    def __init__(self, devices: set[torch.device]) -> None:
        self._python = random.getstate()
        # numpy is no requirement: it is not imported for this.
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._cpu = torch.get_rng_state()
        self._devices: dict[torch.device, Tensor] = {}
        for device in devices:
            if device.type != "cpu":
                self._devices[device] = torch.get_device_module(device).get_rng_state(device)

    def restore(self) -> None:
        """Put the generators back."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        for device, state in self._devices.items():
            torch.get_device_module(device).set_rng_state(state, device)

    def have_drawn(self) -> bool:
        """Return whether torch's generators have moved since."""
        now = Generators(set(self._devices))
        if not torch.equal(self._cpu, now._cpu):
            return True
        return any(not torch.equal(state, now._devices[device]) for device, state in self._devices.items())


def start_of(task: Task) -> Row:
    """Return the values before the first step."""
    return _values(task.step, task.state)


class Disturbance(NamedTuple):
    """A change of every number of the parameters, and of the batches."""

    part: float
    """By how much of the number, up or down."""
    also_batches: bool = True
    """False for batches whose numbers have a meaning: a distribution's sample, 0 or 1."""


def torch_rows(task: Task, scales: list[float], *, disturbed: Disturbance | None = None) -> tuple[list[Row], set[str]]:
    """Run torch's loop; return its rows, and the names of parameters that got no gradient.

    Args:
        task: the training; its step is a `TrainStep`.
        scales: the scale of every step, for a step whose rule is not torch's.
        disturbed: what to change before the first step.
    """
    assert isinstance(task.step, TrainStep)
    task.begin()
    loop = TorchLoop(task.step, task.state)
    if disturbed:
        for parameter in loop.parameters():
            _disturb(parameter.data, disturbed.part)
    rows: list[Row] = []
    for number, batch in enumerate(_batches(task, disturbed)):
        if number == task.overflow:
            scale = loop.scale
            rows.append(loop.step(batch, _OVERFLOWS))
            loop.scale = scale
        else:
            rows.append(loop.step(batch, None if loop.follows_rule else scales[number]))
    return rows, loop.without_gradient


def step_rows(
    task: Task, run: _Step, *, disturbed: Disturbance | None = None, save_after: int | None = None
) -> Iterator[Row]:
    """Run a step, eager or compiled; yield a row for every batch.

    Args:
        task: the training.
        run: the step, or a compiled one.
        disturbed: as for `torch_rows`; changes the state's numbers.
        save_after: save the state after this number of steps, finish, and run the rest again from what was saved. Only
            the rows of the second run are yielded.
    """
    task.begin()
    state = clone(task.state)
    if disturbed:
        for leaf in _tree.leaves(state.params if isinstance(state, TrainState) else state):
            if isinstance(leaf, Tensor):
                _disturb(leaf, disturbed.part)

    saved: tuple[bytes, Generators] | None = None
    for number, batch in enumerate(_batches(task, disturbed)):
        if number == save_after:
            devices = {leaf.device for leaf in _tree.leaves(state) if leaf is not None}
            saved = _saved(task, state), Generators(devices)
        state, row = _one_step(task, run, state, batch, number)
        if save_after is None:
            yield row
    if save_after is None or saved is None:
        return

    saved_state, generators = saved
    task.begin()  # a new process begins with the Python values of a new module
    state = _loaded(task, saved_state)
    generators.restore()
    for number, batch in enumerate(_batches(task, disturbed)):
        if number >= save_after:
            state, row = _one_step(task, run, state, batch, number)
            yield row


def _one_step(task: Task, run: _Step, state: Tree, batch: Tree, number: int) -> tuple[Tree, Row]:
    """Return the state after a step and the step's row; the step of the overflow gets a scale that is too high."""
    if number != task.overflow:
        state, metrics = run(state, batch)
        return state, row_of(task.step, state, metrics)
    scale = state.scaler.scale.clone()
    state = state._replace(scaler=state.scaler._replace(scale=torch.full_like(scale, _OVERFLOWS)))
    state, metrics = run(state, batch)
    row = row_of(task.step, state, metrics)
    return state._replace(scaler=state.scaler._replace(scale=scale)), row


def row_of(step: _Step, state: Tree, metrics: Tree) -> Row:
    """Return what there is to compare after a step, on the host."""
    row = _values(step, state)
    if isinstance(step, TrainStep):
        row["loss"] = metrics.loss
        row["found_inf"] = metrics.found_inf
        row["grad_norm"] = metrics.grad_norm
        row["metrics.scale"] = metrics.scale
        row["applied"] = metrics.applied
        row |= _by_path("lr", metrics.lr)
        row |= _by_path("aux", metrics.aux)
    else:
        row["found_inf"] = torch.zeros(())  # a function that the user wrote skips nothing
        row |= _by_path("metrics", metrics)
    return copied_to_host(row)


def _values(step: _Step, state: Tree) -> Row:
    """Return copies of a state's values by name, on the host."""
    if not isinstance(step, TrainStep):
        return copied_to_host(_by_path("state", state))
    values = step.state_dict(state)
    del values["scaler.found_inf"]  # 0 after each update; the flag of the step is in its metrics
    return copied_to_host(values)


def _by_path(prefix: str, tree: Tree) -> Row:
    """Return the tensors of a tree by the prefix and their paths."""
    tensors: Row = {}
    for index, leaf in enumerate(_tree.leaves(tree)):
        if isinstance(leaf, Tensor):
            tensors[f"{prefix}{_tree.path_of(tree, index)}"] = leaf
    return tensors


def _batches(task: Task, disturbed: Disturbance | None) -> Iterator[Tree]:
    """Yield copies of the batches, because a step may write into them; memory that leaves share stays shared."""
    for original in task.batches:
        batch = copy.deepcopy(original)
        if disturbed and disturbed.also_batches:
            for leaf in _tree.leaves(batch):
                # Whole numbers are codes: classes, masks, positions.
                if isinstance(leaf, Tensor) and not _is_whole(leaf):
                    _disturb(leaf, disturbed.part)
        yield batch


def _is_whole(value: Tensor) -> bool:
    return value.is_floating_point() and value.layout == torch.strided and torch.equal(value, value.round())


@torch.no_grad()
def _disturb(value: Tensor, part: float) -> None:
    """Change every number of a tensor by a part of it, up or down."""
    if not (value.is_floating_point() or value.is_complex()) or value.layout != torch.strided:
        return
    part = max(part, torch.finfo(value.dtype).eps)
    indices = torch.arange(value.numel(), device=value.device).reshape(value.shape)
    # As if drawn, and the same in every run: 1 or -1 by the index.
    signs = 1 - 2 * (indices * 7919 % 101 % 2)
    value.copy_(value * (1 + part * signs))


def _saved(task: Task, state: Tree) -> bytes:
    file = io.BytesIO()
    torch.save(task.step.state_dict(state) if isinstance(task.step, TrainStep) else _tree.leaves(state), file)
    return file.getvalue()


def _loaded(task: Task, saved: bytes) -> Tree:
    loaded = torch.load(io.BytesIO(saved), weights_only=True)
    if isinstance(task.step, TrainStep):
        return task.step.load_state_dict(loaded, like=clone(task.state))
    _, spec = _tree.flatten(task.state)
    return _tree.unflatten(loaded, spec)
