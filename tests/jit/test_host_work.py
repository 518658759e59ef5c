"""What a call does in Python: the same after all that a training loop does between two steps."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from funcamp import jit, make_train_step, module_loss
from tests.support.steps import SGD

X, Y = torch.randn(8, 4), torch.randn(8, 4)


def python_calls(function: Callable[[], object]) -> int:
    """The number of Python functions that are entered."""
    count = 0

    def profile(frame: Any, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def evaluated(model: nn.Module, loss_fn: Any, state: Any) -> None:
    model.load_state_dict(loss_fn.state_dict(state.params, state.buffers))
    model.eval()
    model(X)
    model.train()


def test_a_call_is_as_before_after_an_evaluation() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4))
    model.epoch = 0
    loss_fn = module_loss(model, F.mse_loss)
    step = make_train_step(loss_fn, SGD)
    run, state = jit(step, backend="eager"), step.init()
    for _ in range(3):
        state, _ = run(state, (X, Y))
    before = python_calls(lambda: run(state, (X, Y)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the module is behind
        evaluated(model, loss_fn, state)
    state, _ = run(state, (X, Y))
    assert python_calls(lambda: run(state, (X, Y))) == before
    assert run.programs == 1
