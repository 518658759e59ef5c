"""The steps of a call in C++: the bits of the same steps one by one, whatever they read, return and write."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree

from funcamp import ScalerConfig, jit, make_train_step, module_loss, stateless
from tests.support.generated import code_of
from tests.support.helpers import assert_same, clone

CALLS, STEPS = 3, 4

Step = Callable[[Any, Any], tuple[Any, Any]]


def in_calls(step: Step, state: Any, batch: Any, **options: Any) -> tuple[Any, list[Any], str]:
    """All steps of all calls, the metrics of each call, and the program's code."""
    run, rows, calls = jit(step, unroll=STEPS, **options), [], []
    for call in range(CALLS):
        calls.append(_pytree.tree_map(lambda leaf, call=call: leaf[call], batch))
    with torch.random.fork_rng():
        code = code_of(run, clone(state), calls[0])
    torch.manual_seed(1)
    for one in calls:
        state, metrics = run(state, one)
        rows.append(metrics)
    return state, rows, code


def assert_in_cpp_as_in_python(step: Step, state: Any, batch: Any, **options: Any) -> tuple[Any, Any]:
    """The bits of the same program with the loop in Python; return those results."""
    after, rows, code = in_calls(step, clone(state), batch, **options)
    other, other_rows, in_python = in_calls(step, clone(state), batch, without=["steps_in_cpp"], **options)
    assert "entry_of_one_step" in code
    assert "entry_of_one_step" not in in_python
    assert_same((after, rows), (other, other_rows))
    return after, _pytree.tree_map(lambda *values: torch.stack(values), *rows)


@pytest.mark.thorough
@pytest.mark.inductor
@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_a_training_step_with_a_skip_and_dropout(policy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4))
    adamw = stateless(torch.optim.AdamW, lr=1e-2)
    step = make_train_step(module_loss(model, F.mse_loss), adamw, ScalerConfig(init_scale=2.0**12), policy=policy)
    batch = torch.randn(CALLS, STEPS, 6, 8), torch.randn(CALLS, STEPS, 6, 4)
    batch[1][1, 2, 0, 0] = torch.inf
    state, metrics = assert_in_cpp_as_in_python(step, step.init(), batch)
    assert metrics.skipped[-1, -1] == state.skipped == 1


TABLE = torch.arange(5.0)


def everything(state: dict[str, Tensor], batch: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Results of all kinds: transposed, of other dtypes, drawn, empty, a leaf of the state, of the batch, twice one."""
    x, flags, (rows, expanded, scalar) = batch["x"], batch["flags"], batch["views"]
    weight = state["weight"] + x.sum(0)
    weight[0] = 7
    count = state["count"] + flags.sum()
    metrics = {
        "transposed": x.t() * 2,
        "flags": flags,
        "again": flags,
        "before": state["weight"],
        "after": weight,
        "the same twice": weight,
        "count": count,
        "double": count.double() / 3,
        "empty": x[:0],
        "captured": TABLE * weight,
        "constant": torch.full((2, 3), 3.0),
        "drawn": torch.rand(3),
        "of views": (rows * expanded).sum(0) * scalar,
    }
    return {"weight": weight, "count": count, "fixed": state["fixed"]}, metrics


@pytest.mark.thorough(keep=1)
@pytest.mark.inductor
@pytest.mark.parametrize("exact", [False, True])
def test_results_and_batches_of_all_kinds(exact: bool) -> None:
    state = {"weight": torch.zeros(5), "count": torch.tensor(1), "fixed": torch.ones(3)}
    rows = torch.randn(CALLS, 6, STEPS, 3).transpose(1, 2)
    views = rows, torch.randn(3).expand(CALLS, STEPS, 6, 3), torch.randn(CALLS, 2 * STEPS)[:, ::2]
    flags = torch.rand(CALLS, STEPS, 4) < 0.5
    batch = {"x": torch.randn(CALLS, STEPS, 4, 5), "flags": flags, "views": views}
    after, metrics = assert_in_cpp_as_in_python(everything, state, batch, exact=exact)
    assert metrics["count"][-1, -1] == 1 + flags.sum()
    assert_same(metrics["before"][:, 1:], metrics["after"][:, :-1])
    assert_same((after["fixed"], after["weight"][0]), (torch.ones(3), torch.tensor(7.0)))
    torch.testing.assert_close(metrics["of views"], (views[0] * views[1]).sum(2) * views[2][..., None])


@pytest.mark.inductor
def test_an_error_in_a_step_is_the_calls() -> None:
    run = jit(lambda state, batch: (state + torch.arange(4)[batch], state.sum()), unroll=STEPS)
    state, _ = run(torch.zeros(1), torch.tensor([[0], [1], [2], [3]]))
    assert state.item() == 6
    with pytest.raises(RuntimeError, match="index"):
        run(state, torch.tensor([[0], [1], [9], [3]]))


@pytest.mark.inductor
def test_a_signal_is_handled_between_two_steps() -> None:
    def step(state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        product = batch
        for _ in range(8):
            product = product @ batch
        return state + 1, product.sum()

    many = 2000
    batch = torch.randn(1, 200, 200).expand(many, 200, 200) / 20
    run = jit(step, unroll=many)
    state, _ = run(torch.zeros(()), batch)

    def interrupt(*_: object) -> None:
        if state > many:  # not before the first step of the call has written it
            raise KeyboardInterrupt

    handler_before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(state, batch)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler_before)
    assert many < state < 2 * many
