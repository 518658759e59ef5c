"""What is another signature besides the batch, and where a jitted step cannot be called."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch

from funcamp import jit
from funcamp._jit.jit_step import JitStep


def add(state: Any, batch: Any) -> Any:
    return {"a": state["a"] + batch}, None


def test_copies_and_pickles_are_not_compiled_yet() -> None:
    run, state = jit(add, backend="aot_eager", donate=False), {"a": torch.zeros(2)}
    run(state, torch.ones(2))
    for other in (pickle.loads(pickle.dumps(run)), copy.deepcopy(run)):
        assert (repr(other), other.programs) == (repr(run), 0)
        other(state, torch.ones(2))
        assert state["a"].sum() == 0  # the options too


def test_another_autocast_around_the_call_is_another_signature() -> None:
    linear = torch.nn.Linear(64, 64)
    run = jit(lambda state, batch: (state + 1, linear(batch)), backend="eager")
    state, batch = torch.zeros(()), torch.randn(2, 64)
    with torch.autocast("cpu", torch.bfloat16):
        state, half = run(state, batch)
    for _ in range(2):
        state, full = run(state, batch)
    assert (half.dtype, full.dtype, run.programs) == (torch.bfloat16, torch.float32, 2)


def call(run: JitStep, state: Any, batch: Any) -> Any:
    return run(state, batch)


def test_a_jitted_step_inside_another_or_inside_a_transform_says_what_to_do() -> None:
    run, state = jit(add, backend="eager"), {"a": torch.zeros(3)}
    run(state, torch.ones(3))
    for used in (run, jit(add, backend="eager")):  # compiled before, too
        with pytest.raises(RuntimeError, match=r"jit: jit\(.*add.*\) must not be called inside another jit"):
            jit(functools.partial(call, used), backend="eager")(state, torch.ones(3))
    with pytest.raises(RuntimeError, match=r"not be called inside .* a transform of torch\.func"):
        torch.vmap(lambda row: run(state, row)[0])(torch.ones(2, 3))
