"""Several steps on one state: two halves of a training, an evaluation."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcamp import jit, make_train_step, module_loss
from tests.support.helpers import assert_same
from tests.support.steps import SGD

State = dict[str, Tensor]
Compiled = Callable[..., Any]


def generator_step(state: State, batch: Tensor) -> tuple[State, Tensor]:
    return {**state, "generator": state["generator"] + state["discriminator"] * batch}, state["generator"].sum()


def discriminator_step(state: State, batch: Tensor) -> tuple[State, Tensor]:
    return {**state, "discriminator": state["discriminator"] - state["generator"] / batch.sum()}, batch.mean()


def difference(state: State, batch: Tensor) -> tuple[State, Tensor]:
    return state, (state["generator"] - state["discriminator"]).abs().sum() + batch.sum()


def begun() -> State:
    return {"generator": torch.arange(4.0), "discriminator": torch.ones(4)}


def test_steps_take_turns_on_one_state(mode: str, compiled: Compiled) -> None:
    eager = [generator_step, discriminator_step, difference]
    run = compiled(generator_step)
    steps = [run, run.also(discriminator_step), run.also(difference)]
    state, expected = begun(), begun()
    for number in range(4):
        batch = torch.full((4,), number + 1.0)
        for step, reference in zip(steps, eager):
            before = state
            state, metric = step(state, batch)
            expected, row = reference(expected, batch)
            assert_same((state, metric), (expected, row))
            assert (state is before) == (mode != "undonated")
    assert [step.programs for step in steps] == [1, 1, 1]


def test_a_tensor_in_the_memory_of_the_state_that_a_later_step_reads(mode: str, compiled: Compiled) -> None:
    state = begun()
    anchor = state["generator"].detach()
    run = compiled(generator_step)
    evaluate = run.also(lambda state, batch: (state, (state["generator"] - anchor).sum() + batch.sum()))
    state, _ = run(state, torch.ones(4))
    if mode == "captured":  # an earlier graph writes into it
        again = run.also(lambda state, batch: ({**state, "generator": state["generator"] + anchor}, batch.sum()))
        with pytest.raises(RuntimeError, match=r"jit: step must read no tensor .* in the memory of the state, where"):
            again(state, torch.zeros(4))
    for number in range(3):
        before = anchor.clone()
        state, metric = evaluate(state, torch.zeros(4))
        assert metric == (state["generator"] - before).sum()
        state, _ = run(state, torch.ones(4))
        assert state["generator"].tolist() == [number + 2.0, number + 3.0, number + 4.0, number + 5.0]


def test_the_other_step_has_options_of_its_own() -> None:
    run = jit(generator_step, backend="eager", unroll=2)
    one, two = run.also(difference), run.also(difference, unroll=2)
    state, _ = run(begun(), torch.ones(2, 4))
    assert one(state, torch.ones(4))[1].shape == ()
    assert two(state, torch.ones(2, 4))[1].shape == (2,)


def test_a_step_that_no_one_has_is_dropped_with_what_it_reads(compiled: Compiled) -> None:
    anchor, run = torch.arange(4.0), compiled(generator_step)
    evaluate = run.also(lambda state, batch, anchor=anchor: (state, (state["generator"] - anchor).sum()))
    state, _ = run(begun(), torch.ones(4))
    evaluate(state, torch.ones(4))
    dropped = weakref.ref(anchor)
    del anchor, evaluate
    gc.collect()
    assert dropped() is None
    run(state, torch.ones(4))


@pytest.mark.parametrize("mode", ["donated", "captured"], indirect=True)  # else the module does not follow
def test_an_evaluation_reads_the_module_that_shares_the_states_memory(compiled: Compiled) -> None:
    """With consume the module has the trained values, also after a program that reads it was compiled."""
    module = nn.Linear(4, 1)
    step = make_train_step(module_loss(module, nn.functional.mse_loss), SGD)
    run = compiled(step)
    evaluate = run.also(lambda state, batch: (state, nn.functional.mse_loss(module(batch[0]), batch[1])))
    state, batch = step.init(consume=True), (torch.randn(8, 4), torch.randn(8, 1))
    for _ in range(3):
        state, _ = run(state, batch)
        state, loss = evaluate(state, batch)
        assert_same(loss, step.loss(state, batch))
    assert_same(module.weight.detach(), state.params["weight"])
