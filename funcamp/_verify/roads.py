"""The roads along which the same training is run: torch's loop, the step in eager mode, and the compiled step."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._step.state import Metrics, TrainState
from funcamp._step.step import TrainStep
from funcamp._storage.params import clone, expand
from funcamp._trace.host_generators import host_generators, set_states, states_of
from funcamp._types import Tree
from funcamp._verify.copied_contents import CopiedContents
from funcamp._verify.rounding import Row, copied_to_host
from funcamp._verify.torch_loop import TorchLoop

#: A step, eager or compiled.
Run = Callable[[TrainState, Tree], tuple[TrainState, Metrics]]


@contextlib.contextmanager
def generators_restored(tensors: list[Tensor]) -> Iterator[None]:
    """Context manager: the random number generators of Python, numpy, and torch, on the tensors' devices, too."""
    modules = host_generators()
    states = states_of(modules)
    with torch.random.fork_rng({tensor.device for tensor in tensors if tensor.device.type != "cpu"}):
        try:
            yield
        finally:
            set_states(modules, states)


def seed_generators(number: int) -> None:
    """Seed every random number generator, as each road does before the step of this number."""
    torch.manual_seed(number)
    for module in host_generators():
        module.seed(number)


class Training(NamedTuple):
    """A few steps of training, which every road takes from the same start."""

    step: TrainStep
    """The step before it is compiled."""
    state: TrainState
    """The first state. Roads use clones."""
    batches: list[Tree]
    """A batch for every step. Roads use deep copies, since a step may write into its batch."""
    scales: Mapping[int, float]
    """The scales that are set before some steps, by the step's number."""
    contents: CopiedContents
    """The user's objects."""

    def torch_rows(self, eager: list[Row], unused: set[str]) -> list[Row]:
        """Run torch's loop with the scales of the eager steps, and return its rows.

        Args:
            eager: the rows of the eager steps.
            unused: gets the names of the parameters without a gradient.
        """
        rows: list[Row] = []
        with self.contents.entered():
            loop = TorchLoop(self.step, self.state, unused)
            for number, batch in enumerate(copy.deepcopy(self.batches)):
                seed_generators(number)
                rows.append(copied_to_host(loop.step(batch, float(eager[number]["metrics.scale"]))))
        return rows

    def step_rows(self, run: Run, *, seed: int | None = None, resumed_at: int = 0) -> list[Row]:
        """Run a step, eager or compiled, and return its rows.

        Args:
            run: the step.
            seed: disturb the first parameters with this seed. The rows are then without the disturbance: a step may be
                smaller than that, and only how far it goes is compared.
            resumed_at: save the state before the step of this number, and go on from what was saved.
        """
        state = clone(self.state)
        disturbance = {} if seed is None else _disturb(state.params, self.step.options.policy, seed)
        rows: list[Row] = []
        for numbers in range(resumed_at), range(resumed_at, len(self.batches)):
            with self.contents.entered():  # a new process begins with a new module
                if rows:
                    state = self._saved_and_loaded(state)
                for number in numbers:
                    if number in self.scales:
                        scale = torch.full_like(state.scaler.scale, self.scales[number])
                        state = state._replace(scaler=state.scaler._replace(scale=scale))
                    seed_generators(number)
                    state, metrics = run(state, copy.deepcopy(self.batches[number]))
                    row = row_of(self.step, state, metrics)
                    rows.append(row | {name: row[name] - change for name, change in disturbance.items()})
        return rows

    def _saved_and_loaded(self, state: TrainState) -> TrainState:
        file = io.BytesIO()
        torch.save(self.step.state_dict(state), file)
        file.seek(0)
        return self.step.load_state_dict(torch.load(file), like=clone(self.state))


def row_of(step: TrainStep, state: TrainState, metrics: Metrics | None) -> Row:
    """Return copies of what there is to compare after a step, by name, on the host."""
    values = {**step.state_dict(state), "metrics": metrics}
    named = zip(_tree.names(values), _tree.leaves(values))
    return copied_to_host({name: leaf for name, leaf in named if isinstance(leaf, Tensor)})


@torch.no_grad()
def _disturb(params: Tree, compute_dtype: torch.dtype, seed: int) -> Row:
    """Move every number by one unit in the last place of the precision that is computed in; return by how much."""
    torch.manual_seed(seed)
    named = {"params": expand(params)}
    disturbance: Row = {}
    for name, value in zip(_tree.names(named), _tree.leaves(named)):
        before = value.clone()
        part = max(torch.finfo(compute_dtype).eps, torch.finfo(value.dtype).eps)
        value.mul_(1 + part * torch.randn_like(value).sgn())
        disturbance[name] = value - before
    return copied_to_host(disturbance)
