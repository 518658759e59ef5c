"""A second start finds the compiled program in Inductor's cache, if funcamp's sources are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import funcamp
from funcamp._jit import cache_name


@pytest.mark.inductor
def test_a_second_start_takes_the_program_of_the_same_sources_from_inductors_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compiled() -> Any:
        torch.compiler.reset()
        counters.clear()
        funcamp.jit(lambda s, x: (s + 0.5 * x, s.sum()))(torch.ones(3), torch.ones(3))
        return counters["inductor"]

    with fresh_cache():
        assert compiled()["fxgraph_cache_miss"] == 1
        assert compiled()["fxgraph_cache_hit"] == 1
        monkeypatch.setattr(cache_name, "_sources", lambda: "after an update")
        assert compiled()["fxgraph_cache_miss"] == 1
