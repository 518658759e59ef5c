"""Random numbers of a jitted step: the eager step's; a generator that is set back gives the same, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from funcamp import jit
from tests.support import defects
from tests.support.helpers import assert_same, together

X = torch.linspace(-1, 1, 6)
SELDOM, OFTEN = torch.full((6,), 0.1), torch.full((6,), 0.9)


def both(fn: Callable[[Tensor], Tensor]) -> list[list[Tensor]]:
    """What an eager and a jitted step of a function return in three calls, and the number that follows."""
    found = []
    for wrap in (lambda step: step, lambda step: jit(step, backend="eager")):
        run, rows, state = wrap(lambda state, batch: (state + 1, fn(batch))), [], torch.zeros(())
        torch.manual_seed(0)
        for _ in range(3):
            state, out = run(state, X)
            rows.append(out)
        found.append([*rows, torch.rand(())])
    return found


def written(x: Tensor) -> Tensor:
    out = torch.empty(4)
    torch.rand(4, out=out)
    return out


DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu in place": lambda x: F.rrelu(x.clone(), training=True, inplace=True),
    "rand": lambda x: torch.rand(3),
    "rand out": written,
    "randint": lambda x: torch.randint(0, 9, (3,)),
    "randperm": lambda x: torch.randperm(5),
    "random_ of a range": lambda x: torch.empty(3).random_(0, 10),
    "bernoulli of probabilities": lambda x: torch.bernoulli(x.abs()),
    "normal of means": lambda x: torch.normal(x, 1.0),
    "a transposed tensor": lambda x: torch.rand_like(x.view(2, 3).t()),
    "filled in place": lambda x: torch.empty(3, 2).t().normal_(),
    "multinomial": lambda x: torch.multinomial(x.abs(), 2),
}


@pytest.mark.parametrize("name", DRAWN)
def test_numbers_are_those_of_the_eager_step(name: str) -> None:
    eager, jitted = both(DRAWN[name])
    assert_same(jitted, eager)


@pytest.mark.inductor
def test_generated_code_with_exact_draws_the_eager_steps_numbers() -> None:
    def drawn(x: Tensor) -> list[Tensor]:
        found = [torch.empty_like(x).exponential_()]
        if defects.SWAPPED_DRAWS:
            return found
        found += [x.new_empty(4).cauchy_(), torch.empty_like(x).geometric_(0.5), torch.empty_like(x).log_normal_()]
        found += [F.gumbel_softmax(x, hard=True), F.rrelu(x, training=True), torch.empty_like(x).uniform_(-1, 1)]
        return [*found, torch.bernoulli(x.abs()), torch.randn_like(x)]

    run = jit(lambda state, x: (state + 1, drawn(x)), exact=True, donate=False)
    torch.manual_seed(0)
    _, found = run(torch.zeros(()), X)
    torch.manual_seed(0)
    assert_same(list(found), drawn(X))


def again(first: Callable[[], Tensor], second: Callable[[], Tensor]) -> Tensor:
    before = torch.get_rng_state()
    one = first()
    torch.set_rng_state(before)
    return torch.stack([one, second()])


def of_means(x: Tensor) -> Tensor:
    return again(lambda: torch.normal(x, 1.0), lambda: torch.normal(x, 1.0))


def checkpointed(draw: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The gradient of a function that draws, and that the backward pass computes again."""

    def gradient(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = checkpoint(lambda inner: (draw(inner.sin()) * inner).sin(), x, use_reentrant=False)
        return torch.autograd.grad(out.sum(), x)[0]

    return gradient


SET_BACK: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: again(lambda: torch.rand(6), lambda: torch.rand(6)),
    "dropout": lambda x: again(lambda: F.dropout(x), lambda: F.dropout(x * 2)),
    "the same means": lambda x: of_means(x.sin()),
    "probabilities, computed again": checkpointed(lambda x: torch.bernoulli(x.detach().abs())),
    "rrelu, computed again": checkpointed(lambda x: F.rrelu(x, training=True)),
    "dropout with its mask, computed again": checkpointed(lambda x: torch.native_dropout(x, 0.5, True)[0]),
    "filled": lambda x: again(lambda: torch.empty(6).uniform_(), lambda: torch.empty(6).uniform_()),
    "a captured tensor": lambda x: again(lambda: torch.bernoulli(OFTEN), lambda: torch.bernoulli(OFTEN)),
}


@pytest.mark.parametrize("name", SET_BACK)
def test_a_generator_set_back_draws_the_same(name: str) -> None:
    eager, jitted = both(SET_BACK[name])
    assert_same(jitted, eager)


OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "other probabilities": lambda x: again(lambda: torch.bernoulli(x.abs()), lambda: torch.bernoulli(x.abs() / 2)),
    "other means": lambda x: again(lambda: torch.normal(x, 1.0), lambda: torch.normal(x + 100, 1.0)),
    "another kind": lambda x: again(lambda: torch.rand(6), lambda: torch.randn(6)),
    "another shape": lambda x: again(lambda: torch.rand(6), lambda: torch.rand(12)[:6]),
    "another captured tensor": lambda x: again(lambda: torch.bernoulli(SELDOM), lambda: torch.bernoulli(OFTEN)),
    "other rates": lambda x: again(lambda: torch.poisson(x.abs()), lambda: torch.poisson(x.abs() * 9)),
}


@pytest.mark.parametrize("name", OTHER)
def test_a_generator_set_back_for_other_numbers_is_refused(name: str) -> None:
    run = jit(lambda state, batch: (state + 1, OTHER[name](batch)), backend="eager")
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=r"step must not set the generator back .*test_draws.py:\d+ \(.*draw once"):
        run(torch.zeros(()), X)
    assert_same(torch.get_rng_state(), before)


def seeds(state: Tensor, batch: Tensor) -> Any:
    torch.manual_seed(0)
    return state + torch.rand(2).sum(), None


def seeds_negative(state: Tensor, batch: Tensor) -> Any:
    torch.manual_seed(-1)
    return state + torch.rand(2).sum(), None


def seeds_last(state: Tensor, batch: Tensor) -> Any:
    drawn = torch.rand(2)
    torch.manual_seed(0)
    return state + drawn.sum(), None


GENERATOR = torch.Generator().manual_seed(0)


def draws_from_its_own(state: Tensor, batch: Tensor) -> Any:
    return state + torch.rand(2, generator=GENERATOR).sum(), None


def names_torchs(state: Tensor, batch: Tensor) -> Any:
    return state + torch.rand(2, generator=torch.default_generator).sum(), None


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (seeds, r"must not seed torch's generator.*test_draws.py:\d+ \(.*torch.rand\(2\).*\) draws"),
        (seeds_negative, r"must not seed torch's generator.*draws after it was seeded"),
        (seeds_last, r"must not seed torch's generator \(torch.manual_seed\).*seed before the call"),
        (names_torchs, r"draws from its own: leave out generator="),
        (draws_from_its_own, r"default generator.*test_draws.py:\d+ \(.*generator=GENERATOR.*\) draws from its own"),
    ],
)
def test_seeds_and_generators_of_its_own_are_refused(step: Any, text: str) -> None:
    """A program would repeat their numbers at every call; the default generator is as before the trace."""
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=f"(?s)jit: .*{text}"):
        jit(step, backend="eager")(torch.zeros(()), torch.ones(2))
    assert torch.equal(torch.get_rng_state(), before)


def test_two_threads_trace_one_after_the_other() -> None:
    results: dict[int, float] = {}

    def work(index: int) -> None:
        def step(state: Tensor, batch: Tensor) -> Any:
            for _ in range(50):
                state = state + (batch * index).sum()
            return state, None

        state, _ = jit(step, backend="eager")(torch.zeros(()), torch.ones(2))
        results[index] = state.item()

    together(work, threads=2)
    assert results == {0: 0.0, 1: 100.0}
    assert not torch.compiler.is_compiling()
    assert torch.default_generator.initial_seed() < 1 << 63
