"""The roads along which the same training is run: torch's loop, the step in eager mode, and the compiled step."""

from __future__ import annotations

import contextlib
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
from funcamp._verify.copied_contents import CopiedContents
from funcamp._verify.rounding import Row, copied_to_host
from funcamp._verify.torch_loop import TorchLoop

#: The scale at which float16 gradients overflow. Float32's largest number is 2^128.
_OVERFLOWS = 2.0**120

Step = Callable[[Tree, Tree], tuple[Tree, Tree]]


def devices_of(tree: Tree) -> set[torch.device]:
    """Return the devices of a pytree's tensors, except the CPU."""
    return {tensor.device for tensor in _tree.tensors_in(tree)} - {torch.device("cpu")}


@contextlib.contextmanager
def generators_restored(devices: set[torch.device]) -> Iterator[None]:
    """Context manager: the random number generators of Python, numpy and torch are put back, those of devices too."""
    numpy = sys.modules.get("numpy")  # no requirement: it is not imported for this
    of_python, of_numpy = random.getstate(), numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(of_python)
        if numpy:
            numpy.random.set_state(of_numpy)


def _generator_states(devices: set[torch.device]) -> list[Tensor]:
    """Return the states of torch's generators."""
    of_devices = [torch.get_device_module(device).get_rng_state(device) for device in devices]
    return [torch.get_rng_state(), *of_devices]


def _seed_generators(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number)


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

    def torch_rows(self, scales: list[float]) -> tuple[list[Row], TorchLoop]:
        """Run torch's loop with these scales; return its rows, and the loop."""
        assert isinstance(self.step, TrainStep)
        with self.contents.entered():
            loop = TorchLoop(self.step, self.state)
            rows = [loop.step(self.batch(number), scale) for number, scale in enumerate(scales)]
        return rows, loop

    def step_rows(self, run: Step, *, seed: int | None = None, resumed_at: int = 0) -> list[Row]:
        """Run a step, eager or compiled, and return its rows.

        Args:
            run: the step.
            seed: disturb the first parameters with this seed.
            resumed_at: save the state before the step of this number, and go on from what was saved.
        """
        state = clone(self.state)
        if seed is not None:
            _disturb(self.step, state, seed)
        rows: list[Row] = []
        for numbers in range(resumed_at), range(resumed_at, len(self.batches)):
            with self.contents.entered():  # a new process begins with a new module
                if rows:
                    state = self._saved_and_loaded(state)
                for number in numbers:
                    state, row = self.take_step(run, state, number)
                    rows.append(row)
        return rows

    def take_step(self, run: Step, state: Tree, number: int) -> tuple[Tree, Row]:
        """Return the state after a step and the step's row; the step of the overflow gets a scale that is too high."""
        if number != self.overflow:
            state, metrics = run(state, self.batch(number))
            return state, row_of(self.step, state, metrics)
        scale = float(state.scaler.scale)
        state, metrics = run(with_scale(state, _OVERFLOWS), self.batch(number))
        return with_scale(state, scale), row_of(self.step, state, metrics)

    def batch(self, number: int) -> Tree:
        """Return a copy of the batch of a step, which may write into it, and seed the generators for the step."""
        _seed_generators(number)
        return copy.deepcopy(self.batches[number])

    def probe(self) -> tuple[list[str], bool]:
        """Take one eager step; return which of the user's attributes it changes, and whether it draws random numbers."""
        devices = devices_of((self.state, self.contents.tensors))
        with self.contents.entered():
            before = self.contents.described()
            self.take_step(self.step, clone(self.state), 0)
            after, generators = self.contents.described(), _generator_states(devices)
        _seed_generators(0)
        has_drawn = not all(map(torch.equal, generators, _generator_states(devices)))
        return [name for name in before | after if before.get(name) != after.get(name)], has_drawn

    def _saved_and_loaded(self, state: Tree) -> Tree:
        step, file = self.step, io.BytesIO()
        torch.save(step.state_dict(state) if isinstance(step, TrainStep) else state, file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        return step.load_state_dict(saved, like=clone(self.state)) if isinstance(step, TrainStep) else saved


def with_scale(state: TrainState, scale: float) -> TrainState:
    """Return a state with another scale."""
    return state._replace(scaler=state.scaler._replace(scale=torch.full_like(state.scaler.scale, scale)))


def row_of(step: Step, state: Tree, metrics: Tree) -> Row:
    """Return copies of what there is to compare after a step, by name, on the host."""
    values = step.state_dict(state) if isinstance(step, TrainStep) else {"state": state}
    named = zip(_tree.names({**values, "metrics": metrics}), [*_tree.leaves(values), *_tree.leaves(metrics)])
    return copied_to_host({name: leaf for name, leaf in named if isinstance(leaf, Tensor)})


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
