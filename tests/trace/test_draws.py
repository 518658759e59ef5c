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
from tests.support.helpers import assert_same
from tests.support.steps import assert_as_eager

X = torch.linspace(-1, 1, 6)


def written(x: Tensor) -> Tensor:
    out = torch.empty(4)
    torch.rand(4, out=out)
    return out


DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "rand out": written,
    "random_ of a range": lambda x: torch.empty(3).random_(0, 10),
    "filled in place": lambda x: torch.empty(3, 2).t().normal_(),
    "many filled in place": lambda x: torch.empty(8, 4).t().normal_(),
    "a slice filled in place": lambda x: torch.zeros(8, 8)[:, :4].normal_().clone(),
    "a column filled in place": lambda x: torch.zeros(32, 12)[:, 3:4].normal_().clone(),
    "a strided vector filled in place": lambda x: torch.zeros(96)[::4].normal_().clone(),
    "by means and deviations": lambda x: F.dropout(torch.normal(x[:, None].expand(6, 4).t(), x.abs()), 0.5),
    "by deviations": lambda x: F.dropout(torch.normal(0.5, x.view(3, 2).t().abs()), 0.5),
    "like a transposed one": lambda x: torch.randn_like(torch.empty(8, 4).t()),
    "a range, like a transposed one": lambda x: torch.randint_like(torch.empty(8, 4).t(), 3, 9),
    "few complex ones": lambda x: torch.empty(4, 2, dtype=torch.complex64).t().normal_(),
    "by probabilities": lambda x: torch.empty(3, 2).t().bernoulli_(torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]])),
    "by rates": lambda x: torch.poisson(torch.full((3, 2), 4.0).t()),
}


def assert_drawn_as_eager(drawn: Callable[[Tensor], list[Tensor]], x: Tensor) -> None:
    run = jit(lambda state, x: (state + 1, drawn(x)), exact=True, donate=False)
    torch.manual_seed(0)
    _, found = run(torch.zeros(()), x)
    torch.manual_seed(0)
    assert_same(list(found), drawn(x))


@pytest.mark.inductor
def test_generated_code_with_exact_draws_them_in_the_order_of_eager_mode() -> None:
    def drawn(x: Tensor) -> list[Tensor]:
        copied, wide = x.t().contiguous(), torch.zeros(6, 10)
        found = [wide[:, :5].normal_().clone(), wide[::2, ::2].normal_().clone(), torch.randn_like(copied)]
        found += [torch.randn_like((2 * x).t()), torch.distributions.Gamma(copied, 1.0).sample()]
        if not defects.SWAPPED_DRAWS:
            found += [torch.rand_like(copied), torch.randint_like(copied, 9), torch.rand_like(x.t() + 1)]
            found += [torch.randint_like(x.t(), 2, 9), torch.poisson(copied), torch.normal(0.5, copied)]
            found += [torch.distributions.Normal(x.t(), x.t()).sample()]
        return found

    assert_drawn_as_eager(drawn, torch.linspace(1, 2, 30).view(6, 5))


def checkpointed(draw: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The gradient of a function that draws, and that the backward pass computes again."""

    def gradient(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = checkpoint(lambda inner: (draw(inner.sin()) * inner).sin(), x, use_reentrant=False)
        return torch.autograd.grad(out.sum(), x)[0]

    return gradient


#: With a generator that the backward pass sets back.
SET_BACK: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout, computed again": checkpointed(F.dropout),
    "probabilities, computed again": checkpointed(lambda x: torch.bernoulli(x.detach().abs())),
    "rrelu, computed again": checkpointed(lambda x: F.rrelu(x, training=True)),
    "filled in place, computed again": checkpointed(lambda x: torch.empty_like(x).normal_()),
}


@pytest.mark.parametrize("name", [*DRAWN, *SET_BACK])
def test_numbers_are_those_of_the_eager_step(name: str) -> None:
    draw = DRAWN.get(name) or SET_BACK[name]

    def step(state: Tensor, x: Tensor) -> Any:
        return state + 1, draw(x)

    assert_as_eager(step, jit(step, backend="eager"), torch.zeros(()), [X] * 3)


def test_a_draw_that_nothing_needs_makes_another_program() -> None:
    settings = {"drawn": 0}

    def step(state: Tensor, x: Tensor) -> Any:
        torch.rand(settings["drawn"])
        return state, x + torch.rand(6)

    run = jit(step, backend="eager")
    for drawn in (0, 3, 0):
        settings["drawn"] = drawn
        assert_as_eager(step, run, torch.zeros(()), [X])
    assert run.programs == 2
