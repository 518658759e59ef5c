"""The roads along which the same training is run: torch's loop, the step in eager mode, and the compiled step."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._step.state import TrainState
from funcamp._step.step import TrainStep
from funcamp._storage.params import clone
from funcamp._types import Tree
from funcamp._verify.copied_contents import CopiedContents
from funcamp._verify.rounding import Row, copied_to_host
from funcamp._verify.torch_loop import TorchLoop

#: The scale at which float16 gradients overflow. Float32's largest number is 2^128.
_OVERFLOWS = 2.0**120

Step = Callable[[Tree, Tree], tuple[Tree, Tree]]


class Generators:
    """The states of the random number generators: Python's, numpy's, and torch's on the devices of some tensors."""

    def __init__(self, tree: Tree) -> None:
        self._python = random.getstate()
        # numpy is no requirement: it is not imported for this.
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._devices = {tensor.device for tensor in _tree.tensors_in(tree)} | {torch.device("cpu")}
        self._torch = self._torch_states()

    def _torch_states(self) -> list[Tensor]:
        return [_torch_generator(device).get_state() for device in self._devices]

    def restore(self) -> None:
        """Put the generators back."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for device, state in zip(self._devices, self._torch):
            _torch_generator(device).set_state(state)

    def have_drawn(self) -> bool:
        """Return whether torch's generators have moved since."""
        return not all(map(torch.equal, self._torch, self._torch_states()))


def _torch_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    generators: Sequence[torch.Generator] = torch.get_device_module(device).default_generators
    return generators[device.index]


class Training(NamedTuple):
    """A few steps of training, which every road takes from the same start."""

    step: Step
    """The step before it is compiled."""
    state: Tree
    """The first state. Roads use clones."""
    batches: list[Tree]
    """A batch for every step. Roads use deep copies."""
    overflow: int | None
    """The number of the step whose scale is too high, on purpose."""
    contents: CopiedContents
    """The user's objects."""
    generators: Generators
    """The random number generators, as they are at the start."""

    @contextlib.contextmanager
    def from_start(self) -> Iterator[None]:
        """Context manager: everything outside of the state is as at the start."""
        self.generators.restore()
        with self.contents.entered():
            yield

    def torch_rows(self, scales: list[float]) -> tuple[list[Row], TorchLoop]:
        """Run torch's loop with these scales; return its rows, and the loop."""
        assert isinstance(self.step, TrainStep)
        with self.from_start():
            loop = TorchLoop(self.step, self.state)
            rows = [loop.step(batch, scale) for batch, scale in zip(copy.deepcopy(self.batches), scales)]
        return rows, loop

    def step_rows(self, run: Step, seed: int | None = None) -> list[Row]:
        """Run a step, eager or compiled; with a seed from disturbed parameters. Return its rows."""
        state = clone(self.state)
        if seed is not None:
            _disturb(self.step, state, seed)
        with self.from_start():
            rows, _ = self.rows_and_state(run, state, range(len(self.batches)))
        return rows

    def resumed_rows(self, run: Step, middle: int) -> list[Row]:
        """Run a step, save the state in the middle, and go on from what was saved; return all rows."""
        step = self.step
        file = io.BytesIO()
        with self.from_start():
            rows, state = self.rows_and_state(run, clone(self.state), range(middle))
            torch.save(step.state_dict(state) if isinstance(step, TrainStep) else state, file)
            generators = Generators(state)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        with self.from_start():  # a new process begins with a new module
            generators.restore()
            state = step.load_state_dict(saved, like=clone(self.state)) if isinstance(step, TrainStep) else saved
            later_rows, _ = self.rows_and_state(run, state, range(middle, len(self.batches)))
        return rows + later_rows

    def rows_and_state(self, run: Step, state: Tree, numbers: range) -> tuple[list[Row], Tree]:
        """Take some steps, for which everything else is ready; return their rows, and the state after them."""
        rows: list[Row] = []
        for number in numbers:
            state, row = self._step(run, state, number)
            rows.append(row)
        return rows, state

    def _step(self, run: Step, state: Tree, number: int) -> tuple[Tree, Row]:
        """Return the state after a step and the step's row; the step of the overflow gets a scale that is too high."""
        batch = copy.deepcopy(self.batches[number])  # a step may write into it
        if number != self.overflow:
            state, metrics = run(state, batch)
            return state, row_of(self.step, state, metrics)
        scale = float(state.scaler.scale)
        state, metrics = run(with_scale(state, _OVERFLOWS), batch)
        row = row_of(self.step, state, metrics)
        return with_scale(state, scale), row


def with_scale(state: TrainState, scale: float) -> TrainState:
    """Return a state with another scale."""
    return state._replace(scaler=state.scaler._replace(scale=torch.full_like(state.scaler.scale, scale)))


def row_of(step: Step, state: Tree, metrics: Tree) -> Row:
    """Return copies of what there is to compare after a step, by name, on the host."""
    row: Row = {}
    trees = {"state": state, "metrics": metrics}
    if isinstance(step, TrainStep):
        row |= step.state_dict(state)
        del trees["state"], row["scaler.found_inf"]  # 0 after each update; the flag of the step is in its metrics
    for prefix, tree in trees.items():
        for name, leaf in zip(_tree.names(tree), _tree.leaves(tree)):
            if isinstance(leaf, Tensor):
                row[f"{prefix}.{name}"] = leaf
    return copied_to_host(row)


@torch.no_grad()
def _disturb(step: Step, state: Tree, seed: int) -> None:
    """Move every number of the parameters by one unit in the last place of the precision that is computed in."""
    generator = torch.Generator().manual_seed(seed)
    computed = step._options.policy.compute_dtype if isinstance(step, TrainStep) else torch.float64
    for value in _tree.tensors_in(state.params if isinstance(state, TrainState) else state):
        if value.is_floating_point() or value.is_complex():
            part = max(torch.finfo(dtype).eps for dtype in (computed, value.dtype))
            signs = 1 - 2 * torch.randint(2, value.shape, generator=generator).to(value.device)
            value.mul_(1 + part * signs)
