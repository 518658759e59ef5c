"""A steady loop compiles once: nothing that changes from step to step is a constant of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import funcamp
from funcamp._jit import cache_name
from tests.support.helpers import clone


def run(optimizer: Any, steps: int, between: Callable[[], object]) -> list[int]:
    """Graphs compiled so far, after every step of a loop that overflows, backs off and grows."""
    config = funcamp.ScalerConfig(init_scale=2.0**20, growth_interval=2)
    grad_fn = funcamp.scaled_grad_and_value(lambda p, x: (x.half() @ p["w"].half()).float().square().mean())

    def step(params: Any, opt_state: Any, scaler: Any, x: Tensor) -> Any:
        (grads, scaler), loss = grad_fn(scaler, params, x)
        grads, _ = funcamp.clip_grad_norm(grads, 1.0)
        new = optimizer.update(params, grads, opt_state)
        params, opt_state = funcamp.skip_step(scaler, new=new, old=(params, opt_state))
        return params, opt_state, funcamp.update(scaler, config), loss

    counters.clear()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    params = {"w": torch.randn(4, 3)}
    opt_state, scaler = optimizer.init(params), funcamp.init(config)
    graphs, scales = [], set()
    for _ in range(steps):
        params, opt_state, scaler, _ = compiled(params, opt_state, scaler, torch.randn(8, 4))
        graphs.append(counters["stats"]["unique_graphs"])
        scales.add(scaler.scale.item())
        between()
    assert len(scales) > 2
    assert 0 < opt_state.applied < steps
    return graphs


def test_schedule_and_scale_compile_once() -> None:
    optimizer = funcamp.stateless(torch.optim.AdamW, lr=lambda applied: 1e-3 / (1 + applied))
    # If this fails: a Python number that changes reached the step (TORCH_LOGS=recompiles names it).
    assert run(optimizer, 12, lambda: None) == [1] * 12


@pytest.mark.inductor
def test_a_second_start_takes_the_program_from_inductors_cache() -> None:
    state, x = {"w": torch.ones(3)}, torch.ones(3)
    with fresh_cache():
        for found in ("fxgraph_cache_miss", "fxgraph_cache_hit"):
            torch.compiler.reset()
            counters.clear()
            funcamp.jit(lambda s, x: ({"w": s["w"] + 0.5 * x}, s["w"].sum()))(clone(state), x)
            assert counters["inductor"][found] == 1


@pytest.mark.inductor
def test_no_program_of_other_sources_is_taken_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    state, x = {"w": torch.ones(3)}, torch.ones(3)
    with fresh_cache():
        for sources in (b"before", b"after an update"):
            monkeypatch.setattr(cache_name, "_sources", lambda sources=sources: sources)
            torch.compiler.reset()
            counters.clear()
            funcamp.jit(lambda s, x: ({"w": s["w"] + 0.5 * x}, s["w"].sum()))(clone(state), x)
            assert counters["inductor"]["fxgraph_cache_miss"] == 1
