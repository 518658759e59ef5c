"""The steps of a call in C++: the bits of the same steps one by one, whatever they read, return and write."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree

from funcamp import ScalerConfig, jit, make_train_step, module_loss, stateless
from funcamp._cpu import steps_in_cpp
from tests.support.generated import code_of
from tests.support.helpers import assert_same, clone

CALLS, STEPS = 3, 4

Step = Callable[[Any, Any], tuple[Any, Any]]


def at(batch: Any, *numbers: int) -> Any:
    """The batch of a call, or of a step of a call."""
    return _pytree.tree_map(lambda leaf: leaf[numbers], batch)


def one_by_one(step: Step, state: Any, batch: Any) -> tuple[Any, Any]:
    """All steps of all calls by a program of one step; metrics are stacked by torch."""
    run, rows = jit(step), []
    for call in range(CALLS):
        for number in range(STEPS):
            state, metrics = run(state, at(batch, call, number))
            rows.append(clone(metrics))
    return state, _pytree.tree_map(lambda *values: torch.stack(values).unflatten(0, (CALLS, STEPS)), *rows)


def in_calls(step: Step, state: Any, batch: Any, **options: Any) -> tuple[Any, Any, str]:
    """The same by a program of several steps; and its code."""
    run, rows = jit(step, unroll=STEPS, **options), []
    with torch.random.fork_rng():
        code = code_of(run, clone(state), at(batch, 0))
    for call in range(CALLS):
        state, metrics = run(state, at(batch, call))
        rows.append(metrics)
    return state, _pytree.tree_map(lambda *values: torch.stack(values), *rows), code


def assert_in_cpp_as_in_python(step: Step, state: Any, batch: Any, **options: Any) -> tuple[Any, Any]:
    """The bits of the same program with the loop in Python; return those results."""
    generator = torch.get_rng_state()
    after, metrics, code = in_calls(step, clone(state), batch, **options)
    torch.set_rng_state(generator)
    in_python = in_calls(step, clone(state), batch, without=["steps_in_cpp"], **options)
    assert "entry_of_one_step" in code
    assert "entry_of_one_step" not in in_python[2]
    assert_same(after, in_python[0])
    assert_same(metrics, in_python[1])
    return after, metrics


@pytest.mark.inductor
@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_a_training_step_with_a_skip_and_dropout(policy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4))
    adamw = stateless(torch.optim.AdamW, lr=1e-2)
    step = make_train_step(module_loss(model, F.mse_loss), adamw, ScalerConfig(init_scale=2.0**12), policy=policy)
    batch = torch.randn(CALLS, STEPS, 6, 8), torch.randn(CALLS, STEPS, 6, 4)
    batch[1][1, 2, 0, 0] = torch.inf
    torch.manual_seed(1)
    state, metrics = assert_in_cpp_as_in_python(step, step.init(), batch)
    torch.manual_seed(1)
    expected_state, expected = one_by_one(step, step.init(), batch)
    assert expected.skipped[-1, -1] == 1
    assert_same(state, expected_state)
    assert_same(metrics, expected)


TABLE = torch.arange(5.0)


def everything(state: dict[str, Tensor], batch: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Results of all kinds: transposed, of other dtypes, empty, a leaf of the state, of the batch, twice the same."""
    x, flags = batch["x"], batch["more"][0]
    weight = state["weight"] + x.sum(0)
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
        "constant": torch.ones(2, 3),
    }
    return {"weight": weight, "count": count, "fixed": state["fixed"]}, metrics


@pytest.mark.inductor
@pytest.mark.parametrize("exact", [False, True])
def test_results_of_all_kinds(exact: bool) -> None:
    state = {"weight": torch.zeros(5), "count": torch.tensor(1), "fixed": torch.ones(3)}
    batch: dict[str, Any] = {"x": torch.randn(CALLS, STEPS, 4, 5), "more": [torch.rand(CALLS, STEPS, 4) < 0.5]}
    after, metrics = assert_in_cpp_as_in_python(everything, state, batch, exact=exact)
    assert metrics["count"][-1, -1] == 1 + batch["more"][0].sum()
    assert_same(metrics["before"][:, 1:], metrics["after"][:, :-1])
    assert_same(after["fixed"], torch.ones(3))


@pytest.mark.inductor
def test_views_of_the_batch_are_of_any_layout() -> None:
    def step(state: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        rows, expanded, scalar = batch
        return state + rows.sum(0) * scalar, (rows * expanded).sum()

    whole = torch.randn(CALLS, 6, STEPS, 3)
    batch = whole.transpose(1, 2), torch.randn(3).expand(CALLS, STEPS, 6, 3), torch.randn(CALLS, 2 * STEPS)[:, ::2]
    after, _ = assert_in_cpp_as_in_python(step, torch.zeros(3), batch)
    torch.testing.assert_close(after, (batch[0].sum(2) * batch[2][..., None]).sum((0, 1)))


@pytest.mark.inductor
def test_an_error_in_a_step_is_the_calls(caplog: pytest.LogCaptureFixture) -> None:
    run = jit(lambda state, batch: (state + torch.arange(4)[batch], state.sum()), unroll=STEPS)
    state, _ = run(torch.zeros(1), torch.tensor([[0], [1], [2], [3]]))
    assert state.item() == 6
    with pytest.raises(RuntimeError, match="index"):
        run(state, torch.tensor([[0], [1], [9], [3]]))


@pytest.mark.inductor
def test_a_program_that_cpp_cannot_call_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(steps_in_cpp, "_LOOP", "this is no C++")
    batch = torch.randn(STEPS, 7)
    with caplog.at_level(logging.INFO, "funcamp"):
        state, metrics = jit(lambda state, batch: (state + batch, state.sum()), unroll=STEPS)(torch.zeros(7), batch)
    assert "compiling again without steps_in_cpp" in caplog.text
    assert "without cpp_wrapper" not in caplog.text
    torch.testing.assert_close(state, batch.sum(0))
    assert metrics.shape == (STEPS,)


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


@pytest.mark.inductor
def test_numbers_of_python_are_constants_of_every_step() -> None:
    def step(state: Tensor, batch: Tensor) -> tuple[Tensor, Any]:
        changed = batch.clone()
        changed[0] = 7
        return state + changed, {"sum": state.sum(), "constant": torch.tensor(3.0)}

    batch = torch.randn(CALLS, STEPS, 5)
    after, metrics = assert_in_cpp_as_in_python(step, torch.zeros(5), batch)
    assert after[0] == 7 * CALLS * STEPS
    assert_same(metrics["constant"], torch.full((CALLS, STEPS), 3.0))
