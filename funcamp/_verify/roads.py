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

    def start(self) -> Row:
        """Return the values before the first step."""
        return row_of(self.step, self.state, None)

    def torch_rows(self, scales: list[float], seed: int | None = None) -> tuple[list[Row], set[str]]:
        """Run torch's loop with these scales; return its rows, and the names of parameters that got no gradient."""
        assert isinstance(self.step, TrainStep)
        with self.from_start():
            loop = TorchLoop(self.step, self.state)
            _disturb(self.step, list(loop.parameters.values()), seed)
            rows = [loop.step(batch, scale) for batch, scale in zip(copy.deepcopy(self.batches), scales)]
        return rows, loop.without_gradient

    def step_rows(self, run: Step, seed: int | None = None) -> list[Row]:
        """Run a step, eager or compiled; return its rows."""
        with self.from_start():
            return self.rows_from(0, clone(self.state), run, seed)

    def resumed_rows(self, run: Step, after: int) -> list[Row]:
        """Run a step, save the state after some steps, and return the rows of the rest, run from what was saved."""
        step = self.step
        file = io.BytesIO()
        with self.from_start():
            state = clone(self.state)
            for number in range(after):
                state, _ = self._step(run, state, number)
            torch.save(step.state_dict(state) if isinstance(step, TrainStep) else state, file)
            generators = Generators(state)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        with self.from_start():  # a new process begins with a new module
            state = step.load_state_dict(saved, like=clone(self.state)) if isinstance(step, TrainStep) else saved
            generators.restore()
            return self.rows_from(after, state, run)

    def rows_from(self, first: int, state: Tree, run: Step, seed: int | None = None) -> list[Row]:
        """Return the rows of the steps from the first on, which everything else is ready for."""
        parameters = state.params if isinstance(state, TrainState) else state
        _disturb(self.step, _tree.tensors_in(parameters), seed)
        rows: list[Row] = []
        for number in range(first, len(self.batches)):
            state, row = self._step(run, state, number)
            rows.append(row)
        return rows

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
def _disturb(step: Step, values: list[Tensor], seed: int | None) -> None:
    """Move every number up or down by one unit in the last place of the precision that is computed in."""
    if seed is None:
        return
    generator = torch.Generator().manual_seed(seed)
    computed = step._options.policy.compute_dtype if isinstance(step, TrainStep) else torch.float64
    for value in values:
        if value.is_floating_point() or value.is_complex():
            part = max(torch.finfo(dtype).eps for dtype in (computed, value.dtype))
            signs = 1 - 2 * torch.randint(2, value.shape, generator=generator).to(value.device)
            value.copy_(value * (1 + part * signs))
