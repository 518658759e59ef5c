"""What Inductor makes of a step, read in its code for a CPU: one loop a group, scalars outside."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

from funcamp import TrainStep, jit, make_train_step, module_loss, stateless
from funcamp._jit import session
from tests.support.generated import code_of, written

pytestmark = pytest.mark.inductor

WIDTH = 16
BATCH = (torch.randn(8, WIDTH), torch.randn(8, WIDTH))


def step_of(layers: int) -> TrainStep:
    """AdamW with a schedule and clipping on a stack of Linears."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    adamw = stateless(torch.optim.AdamW, lr=lambda applied: 1e-3 / (1 + applied))
    return make_train_step(module_loss(model, nn.functional.mse_loss), adamw, policy="bfloat16", max_norm=1.0)


def allocated(code: str) -> list[int]:
    """Elements of every buffer that a program written in C++ allocates."""
    arrays = re.findall(r"(int_array_\d+)\[\] = \{([\d, L]+)\}", code)
    sizes = {name: math.prod(map(int, re.findall(r"\d+", shape))) for name, shape in arrays}
    return [sizes[name] for name in re.findall(r"aoti_torch_empty_strided\([1-9]\d*, (int_array_\d+),", code)]


@pytest.mark.thorough
def test_a_donated_step_allocates_copies_and_gradients_and_no_new_state() -> None:
    step, size = step_of(12), 12 * WIDTH * WIDTH
    donated, undonated = [
        allocated(written(jit(step, donate=donate, without=["small_buffers"]), step.init(), BATCH)).count(size)
        for donate in (True, False)
    ]
    assert donated == 1  # the gradients; each product casts the parameters that it reads
    # Parameters and two moments too, of which one may reuse a buffer.
    assert undonated >= 3


def test_what_cannot_be_called_from_cpp_is_called_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no such call in C++")

    def step(state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return state * 0.25 + state @ batch, state.sum()

    state, batch = torch.randn(3, 3), torch.randn(3, 3)
    monkeypatch.setattr(CppWrapperCpu, "generate", refuse)
    run = jit(step, donate=False)
    assert "CppWrapperCodeCache" not in code_of(run, state, batch)
    torch.testing.assert_close(run(state, batch), step(state, batch))


def test_inductor_may_recurse_deeply_while_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so for a deep model: 48 blocks of a GPT, minutes to compile, failed without when it planned memory."""
    from torch._inductor import compile_fx

    depths = []

    def compiled(*_: Any, **__: Any) -> Any:
        depths.append(sys.getrecursionlimit())
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_fx, "compile_fx", compiled)
    before, run = sys.getrecursionlimit(), jit(lambda state, batch: (state + batch, None))
    with pytest.raises(KeyboardInterrupt):
        run(torch.zeros(2), torch.ones(2))
    assert (depths, sys.getrecursionlimit()) == ([session._DEEP], before)
