"""A scale for each block: whose flag moves it, what one scale for all would lose, and rescaling within one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import funcamp
from funcamp._optim.optimizer import StatelessOptimizer
from tests.recipes import example
from tests.support.helpers import difference, one_thread
from tests.support.steps import eager

recipe = example("layer_scalers")

Rescale = Callable[[Tensor, Tensor], Tensor]
Trees = list[dict[str, Tensor]]


def in_the_sum(x: Tensor, ratio: Tensor) -> Tensor:
    """x, exactly, for x - x is zero; its gradient times ratio."""
    return x.detach() + (x - x.detach()) * ratio


class ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, ratio: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], _: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.saved_tensors[0], None


def by_a_function(x: Tensor, ratio: Tensor) -> Tensor:
    return ScaleGradient.apply(x, ratio)  # type: ignore[no-any-return]


def compiled(step: Any) -> Any:
    return funcamp.jit(step, backend="eager", donate=False)


def block_by_block(monkeypatch: pytest.MonkeyPatch, scales: list[float]) -> Trees:
    """The unscaled gradients of the recipe's first step: what it gives to its optimizer."""
    seen: list[Trees] = []
    plain = StatelessOptimizer.update

    def watched(self: Any, params: Any, grads: Trees, opt_state: Any) -> Any:
        seen.append(funcamp.clone(grads))
        return plain(self, params, grads, opt_state)

    with monkeypatch.context() as patch:
        patch.setattr(recipe, "CONFIGS", [funcamp.ScalerConfig(init_scale=scale) for scale in scales])
        patch.setattr(StatelessOptimizer, "update", watched)
        _, (row,) = recipe.train(1, eager)
    assert not row.found_inf.any()
    return seen[0]


def in_one_graph(scales: list[float], rescale: Rescale, wrap: Any, dtype: torch.dtype = torch.float16) -> Trees:
    """The unscaled gradients of a loss in which rescale stands between the blocks."""

    def scaled_loss(params: Trees, scalers: list[funcamp.ScalerState], x: Tensor, y: Tensor) -> Any:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            for index, (block, own) in enumerate(zip(recipe.BLOCKS, params)):
                if index:
                    x = rescale(x, scalers[index - 1].scale / scalers[index].scale)
                x = block(own, x)
        return funcamp.scale(scalers[-1], mse_loss(x, y))

    def step(state: Any, batch: Any) -> Any:
        params, scalers = state
        grads = torch.func.grad(scaled_loss)(params, scalers, *batch)
        return state, list(map(funcamp.unscale_and_check, scalers, grads))

    scalers = [funcamp.init(funcamp.ScalerConfig(init_scale=scale)) for scale in scales]
    _, checked = wrap(step)((recipe.make_params("cpu"), scalers), recipe.batch(0, "cpu"))
    assert not any(state.found_inf for _, state in checked)
    return [grads for grads, _ in checked]


def test_overflow_above_moves_no_scale_below() -> None:
    with one_thread():
        rows = recipe.Row(*map(torch.stack, zip(*recipe.train(60, eager)[1])))
    above = rows.found_inf[:-1, 1:] == 1
    here = rows.found_inf[:-1, :-1] == 1
    change = rows.scale[1:, :-1] / rows.scale[:-1, :-1]
    assert (above & here).sum() >= 5
    assert (change[above] == 1).all()
    assert (~above & here).any(0).all()
    assert (change[~above & here] == 0.5).all()


def test_one_scale_for_all_loses_a_branch_that_own_scales_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    make_params = recipe.make_params

    def with_a_small_branch(device: str) -> Trees:
        stem, branch, head = make_params(device)
        return [stem, {**branch, "gamma": branch["gamma"] * 2.0**-16}, head]

    monkeypatch.setattr(recipe, "make_params", with_a_small_branch)
    expected = in_one_graph([1.0, 1.0, 1.0], in_the_sum, eager, torch.float32)
    own, shared = (block_by_block(monkeypatch, scales) for scales in ([2.0**14, 2.0**40, 2.0**14], [2.0**14] * 3))
    for name in ("up", "down"):
        assert difference(own[1][name], expected[1][name]) < 1e-3
        assert difference(shared[1][name], expected[1][name]) > 0.1


@pytest.mark.compiled
@pytest.mark.parametrize("wrap", [eager, compiled])
@pytest.mark.parametrize("rescale", [in_the_sum, by_a_function])
def test_rescaling_in_one_graph_gives_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, rescale: Rescale, wrap: Any
) -> None:
    scales = [2.0**14, 2.0**30, 2.0**14]
    assert difference(in_one_graph(scales, rescale, wrap), block_by_block(monkeypatch, scales)) == 0
