"""A steady loop compiles once: nothing that changes from step to step is a constant of the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import funcamp
from funcamp._jit import cache_name


def test_schedule_and_scale_compile_once() -> None:
    """A loop that overflows, backs off and grows: no Python number that changes reaches the step."""
    optimizer = funcamp.stateless(torch.optim.AdamW, lr=lambda applied: 1e-3 / (1 + applied))
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
    opt_state, scaler, scales = optimizer.init(params), funcamp.init(config), set()
    for _ in range(12):
        params, opt_state, scaler, _ = compiled(params, opt_state, scaler, torch.randn(8, 4))
        scales.add(scaler.scale.item())
    assert counters["stats"]["unique_graphs"] == 1  # else TORCH_LOGS=recompiles names it
    assert len(scales) > 2
    assert 0 < opt_state.applied < 12


@pytest.mark.inductor
@pytest.mark.parametrize("sources", ["", "after an update"])
def test_a_second_start_takes_the_program_of_the_same_sources_from_inductors_cache(
    sources: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled() -> Any:
        torch.compiler.reset()
        counters.clear()
        funcamp.jit(lambda s, x: (s + 0.5 * x, s.sum()))(torch.ones(3), torch.ones(3))
        return counters["inductor"]

    with fresh_cache():
        assert compiled()["fxgraph_cache_miss"] == 1
        if sources:
            monkeypatch.setattr(cache_name, "_sources", lambda: sources)
        assert compiled()["fxgraph_cache_miss" if sources else "fxgraph_cache_hit"] == 1
