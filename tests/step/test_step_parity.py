"""A step follows torch's documented mixed-precision loop, over whole runs: losses, scales, skips and parameters.

Eager, everything is equal bit for bit, so the same float16 numbers went into every product and came out of it. With
AdamW and clipping, parameters are within a fraction of their norm: AdamW rounds its step size elsewhere than torch's CPU
default does, the norm is summed in float64, and a last bit can move a copy to its neighbour, 2^-11 of it in float16 and
2^-8 in bfloat16. Modules that use their weights in other ways are in tests/autograd/test_module.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from funcamp import ScalerConfig, by_group, stateless
from tests.recipes import values
from tests.support.helpers import assert_close, assert_same, clone, values_of
from tests.support.models import Task, cnn, mlp, tied
from tests.support.steps import build, eager
from tests.support.torch_loop import AmpLoop

# 2**24 overflows float16 at the first steps; the interval lets the scale climb into overflow again and again.
CONFIG = ScalerConfig(init_scale=2.0**24, growth_interval=5)
STEPS = 40
HALF, BRAIN = torch.float16, torch.bfloat16
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "AdamW": (torch.optim.AdamW, {"lr": 2e-3}),
}


class Case(NamedTuple):
    """A training: what is trained, how, and how far parameters may be from torch's, relative to their norm."""

    make: Callable[[], Task]
    optimizer: str
    dtype: torch.dtype
    flat: bool = True
    parts: int = 1
    grouped: bool = False
    max_norm: float | None = None
    tolerance: float = 0.0

    def pieces(self, task: Task, number: int) -> list[Any]:
        return [task.batch(number * self.parts + part) for part in range(self.parts)]

    def by_step(self, wrap: Callable[[Any], Any]) -> tuple[list[Any], dict[str, Tensor]]:
        """The losses, scales and flags of a step, and the parameters after it."""
        task, (cls, arguments) = self.make(), OPTIMIZERS[self.optimizer]
        optimizer: Any = stateless(cls, **arguments)
        if self.grouped:
            optimizer = by_group({"matrix": stateless(cls, weight_decay=0.1, **arguments), "vector": optimizer})
        options: dict[str, Any] = {"accumulate": self.parts, "max_norm": self.max_norm, "ema_decay": 0.9}
        step = build(task, optimizer, config=CONFIG, policy=self.dtype, **options)
        start, state, run, trace = clone(values_of(task.model)), step.init(flat=self.flat), wrap(step), []
        torch.manual_seed(7)
        for number in range(STEPS):
            pieces, before = self.pieces(task, number), state
            batch = tuple(map(torch.stack, zip(*pieces))) if self.parts > 1 else pieces[0]
            state, metrics = run(state, batch)
            if metrics.found_inf:
                counts = {name: getattr(before, name) + 1 for name in ("step", "skipped", "consecutive_skips")}
                assert_same(state, before._replace(**counts, scaler=state.scaler))
            trace.append((metrics.loss, metrics.scale.item(), metrics.found_inf.item()))
        assert_same(values_of(task.model), start)
        return trace, dict(state.params.tree())

    def by_torch(self) -> tuple[list[Any], dict[str, Tensor]]:
        """The same of torch's loop."""
        task, (cls, arguments) = self.make(), OPTIMIZERS[self.optimizer]
        groups: Any = task.model.parameters()
        if self.grouped:
            matrices, vectors = ([p for p in task.model.parameters() if (p.dim() > 1) == large] for large in (1, 0))
            groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
        loop = AmpLoop(task.model, task.criterion, cls(groups, **arguments), CONFIG, self.dtype)
        torch.manual_seed(7)
        trace = [loop.step(*self.pieces(task, number), max_norm=self.max_norm) for number in range(STEPS)]
        return trace, values(task.model)


def assert_follows(case: Case, wrap: Callable[[Any], Any] = eager) -> None:
    trace, params = case.by_step(wrap)
    expected_trace, expected = case.by_torch()
    assert [row[1:] for row in trace] == [row[1:] for row in expected_trace]
    if case.dtype == HALF:
        assert sum(skipped for *_, skipped in trace) >= 4
    if case.tolerance:
        assert_close(params, expected, case.tolerance)
    else:
        assert_same((trace, params), (expected_trace, expected))


EAGER = {
    "MLP, float16": Case(mlp, "SGD", HALF, flat=False),
    "CNN, float16": Case(cnn, "SGD", HALF),
    "transformer, bfloat16": Case(tied, "RMSprop", BRAIN),
    "transformer, micro-batches": Case(tied, "SGD", HALF, parts=3),
    "groups of parameters": Case(tied, "SGD", HALF, grouped=True),
    "dropout": Case(functools.partial(mlp, dropout=0.3), "SGD", HALF),
    "AdamW with clipping": Case(mlp, "AdamW", HALF, flat=False, max_norm=0.5, tolerance=2.0**-13),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", EAGER)
def test_a_step_is_torchs_loop(name: str) -> None:
    assert_follows(EAGER[name])


# No weight with two uses: under torch.func autocast casts it twice, and its gradients are added in float32.
COMPILED = [
    Case(cnn, "SGD", HALF),
    Case(mlp, "SGD", HALF, flat=False),
    Case(mlp, "RMSprop", BRAIN),
    Case(cnn, "AdamW", BRAIN, max_norm=0.5, tolerance=2.0**-8),
]


@pytest.mark.thorough(keep=1)
@pytest.mark.compiled
@pytest.mark.parametrize("number", range(len(COMPILED)))
def test_a_step_under_torch_compile_is_torchs_loop(number: int) -> None:
    assert_follows(COMPILED[number], lambda step: torch.compile(step, fullgraph=True, backend="aot_eager"))


@pytest.mark.thorough(keep=1)
@pytest.mark.inductor
@pytest.mark.parametrize(("make", "dtype"), [(mlp, BRAIN), (tied, HALF)])
def test_generated_code_follows_torchs_loop(make: Any, dtype: torch.dtype) -> None:
    # Inductor keeps intermediates in float32 that eager rounds to the low precision: 40 steps apart by that, no more.
    case = Case(make, "SGD", dtype, tolerance=2.0**-6)
    assert_follows(case, lambda step: torch.compile(step, fullgraph=True))
