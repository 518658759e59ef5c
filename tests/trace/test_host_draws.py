"""Numbers that Python or numpy draws in a step: refused with the line, as a program would repeat them."""

from __future__ import annotations

import pickle
import random
import re
import threading
from collections.abc import Callable
from random import random as uniform
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import rand
from torch import Tensor

from funcamp import jit

DRAWS: dict[str, tuple[Callable[[], Any], str]] = {
    "random": (lambda: random.random(), "Python's random"),
    "a choice": (lambda: random.choice([1.0, 2.0]), "Python's random"),
    "seeded": (lambda: random.seed(1) or 1.0, "Python's random"),
    "numpy": (lambda: float(np.random.rand()), "numpy.random"),
    "a sample": (lambda: float(np.random.sample()), "numpy.random"),
    "numpy seeded": (lambda: np.random.seed(1) or 1.0, "numpy.random"),
    "a number of two": (lambda: random.gauss(0, 1), "Python's random"),
    "a permutation": (lambda: float(np.random.permutation(3)[0]), "numpy.random"),
    "both": (lambda: random.random() + float(np.random.rand()), "Python's random and numpy.random"),
}


def compiled(draw: Callable[[], Any]) -> Any:
    return jit(lambda state, x: (state + x.sum() * draw(), None), backend="eager")


def generators() -> bytes:
    return pickle.dumps((random.getstate(), np.random.get_state()))


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_refused_with_its_line(name: str) -> None:
    draw, owner = DRAWS[name]
    before, state = generators(), torch.zeros(())
    with pytest.raises(
        RuntimeError, match=rf"draw from {owner}, as .*test_host_draws.py:\d+ \(.* does: draw from torch"
    ):
        compiled(draw)(state, torch.ones(2))
    assert generators() == before
    assert state == 0


@pytest.mark.parametrize(("draw", "owner"), [(lambda: uniform(), "Python's random"), (lambda: rand(), "numpy.random")])
def test_a_function_that_was_imported_is_refused_without_a_line(draw: Callable[[], Any], owner: str) -> None:
    before = generators()
    with pytest.raises(
        RuntimeError,
        match=f"draw from {owner}, as .*; a line that is not known, or another thread, does: draw from torch",
    ):
        compiled(draw)(torch.zeros(()), torch.ones(2))
    assert generators() == before


def test_the_modules_are_as_they_were() -> None:
    before = random.random, np.random.rand
    with pytest.raises(RuntimeError, match=r"draw from numpy\.random"):
        compiled(lambda: np.random.rand())(torch.zeros(()), torch.ones(2))
    assert (random.random, np.random.rand) == before


def put_back() -> float:
    before = random.getstate()
    drawn = random.random()
    random.setstate(before)
    return drawn


@pytest.mark.parametrize(
    "draw", [put_back, lambda: random.Random(0).random(), lambda: np.random.default_rng(0).random()]
)
def test_what_draws_the_same_at_every_step_is_taken(draw: Callable[[], float]) -> None:
    state, run = torch.zeros(()), compiled(draw)
    for count in (1, 2):
        state, _ = run(state, torch.ones(2))
        torch.testing.assert_close(state, torch.tensor(2.0 * draw() * count))


def test_another_thread_may_draw(caplog: pytest.LogCaptureFixture) -> None:
    """One that loads data draws as often as it comes to."""

    def load() -> None:
        random.random()
        np.random.rand()

    def step(state: Tensor, x: Tensor) -> tuple[Tensor, None]:
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        random.getstate()
        return state + x.sum(), None

    before = pickle.loads(generators())
    state, _ = jit(step, backend="eager")(torch.zeros(()), torch.ones(2))
    assert state == 2
    assert re.search(r"another thread drew from Python's random and numpy.random .*test_host_draws.py:\d+", caplog.text)
    after = generators()
    random.setstate(before[0])
    np.random.set_state(before[1])
    load()
    assert generators() == after  # only what it had drawn, once


def test_draws_of_two_threads_are_refused() -> None:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, None]:
        thread = threading.Thread(target=random.random)
        thread.start()
        thread.join()
        return state + x.sum() * random.random(), None

    with pytest.raises(RuntimeError, match=r"draw from Python's random, .*test_host_draws.py:\d+"):
        jit(step, backend="eager")(torch.zeros(()), torch.ones(2))


def test_a_step_that_draws_and_then_fails_leaves_the_generator_as_it_was() -> None:
    def step(state: Any, x: Tensor) -> Any:
        return state + x * random.random() * x.sum().item(), None

    before = generators()
    with pytest.raises(RuntimeError, match="must not read"):
        jit(step, backend="eager")(torch.zeros(()), torch.ones(()))
    assert generators() == before


def test_dynamo_keeps_no_function_of_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take a later function at the same address for one of numpy."""
    known: Any = torch._dynamo.trace_rules._numpy_function_ids
    monkeypatch.setattr(known, "function_ids", None)  # as in a new process

    def step(state: Tensor, batch: Tensor) -> Any:
        return state, torch.cond(batch.sum() > 0, lambda x: x * 2, lambda x: x * 3, (batch,))

    jit(step, backend="eager")(torch.zeros(()), torch.ones(2))
    assert known() == set(known.lazy_initializer())
