"""What is asked of the C++ compiler ahead is what a program asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import codecache, cpu_vec_isa

from funcamp import jit
from funcamp._cpu import options
from funcamp._cpu.headers import ahead
from funcamp._upstream.bugs import BUGS


class Stop(BaseException):
    """Past every handler of an Exception."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """The headers that are asked for; nothing is compiled."""
    headers: set[Any] = set()

    def header(*args: Any, **options: Any) -> str:
        headers.add((args, str(sorted(options.items()))))
        return "none.h"

    def refuse(*_: Any) -> None:
        raise Stop

    monkeypatch.setattr(codecache, "_precompile_header", header)
    monkeypatch.setattr(codecache, "_worker_compile_cpp", refuse)
    codecache.CppWrapperCodeCache.cache_clear()
    return headers


@pytest.mark.inductor
@pytest.mark.parametrize("kind", ["from C++", "from C++, kernels apart", "from Python"])
def test_a_program_asks_for_the_same_headers(kind: str, asked: set[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    apart = kind.endswith("apart")
    monkeypatch.setattr(options, "LONG", 0 if apart else 1500)
    without = ("headers", "cpp_wrapper") if kind == "from Python" else ("headers",)
    expected = {
        "cpp_wrapper": kind != "from Python",
        "cpp_wrapper_build_separate": apart,
        "aot_inductor.compile_wrapper_opt_level": "O0" if apart else "O1",
    }
    (compiler_flags,) = (bug for bug in BUGS if bug.name == "mixed_transposes")
    with compiler_flags.changed(), torch._inductor.config.patch(expected), ahead():
        pass
    before = set(asked)
    assert len(before) == (2 if apart else 1)
    assert cpu_vec_isa.valid_vec_isa_list.cache_info().currsize == 1
    with torch._inductor.config.patch(force_disable_caches=True), pytest.raises(Stop):
        jit(lambda state, batch: (state + batch.exp(), state.sum()), without=without)(torch.zeros(3), torch.ones(3))
    assert asked == before
