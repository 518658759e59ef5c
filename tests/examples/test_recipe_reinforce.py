"""Several captured programs side by side: what one returned stays what it was, and each state is its own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.func import functional_call
from torch.utils import _pytree

import funcamp
from funcamp._jit import cuda_graph
from tests.recipes import example
from tests.support.helpers import assert_same, clone
from tests.support.stand_in import StandIn

RECIPE = example("reinforce")


pytestmark = pytest.mark.usefixtures("one_thread")


class Watched:
    """A wrap that keeps what every call returned beside its state, as it was and as it is now."""

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self.results: list[Any] = []
        self.then: list[Any] = []

    def __call__(self, step: Any) -> Any:
        run = self.jit(step)

        def watched(state: Any, batch: Any) -> Any:
            state, result = run(state, batch)
            self.results.append(result)
            self.then.append(clone(result))
            return state, result

        return watched


@pytest.mark.compiled
@pytest.mark.parametrize("captured", [False, True], ids=["compiled", "captured"])
def test_what_a_call_returned_stays_as_it_is(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if captured:
        monkeypatch.setattr(cuda_graph, "graphs_for", lambda device: StandIn())
    watched = Watched(functools.partial(funcamp.jit, backend="eager"))
    RECIPE.train(3, watched)
    assert len(watched.results) == 3 * (8 + 1)
    for now, then in zip(watched.results, watched.then):
        assert_same(now, then)
    storages = [leaf.untyped_storage()._cdata for result in watched.results[:8] for leaf in _pytree.tree_leaves(result)]
    assert len(set(storages)) == len(storages)


def test_actor_sees_what_the_learner_sees() -> None:
    model = RECIPE.make_model()
    seen = torch.stack(RECIPE.batch(0, "cpu")[:2], 1) / 4
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        expected = model(seen)
    loss_fn = funcamp.module_loss(model, lambda logits, target: (logits * target).sum())
    step = funcamp.make_train_step(loss_fn, funcamp.stateless(torch.optim.SGD), policy="float16")
    params = step.compute_params(step.init())
    assert {value.dtype for value in params.values()} == {torch.float32}
    with torch.autocast("cpu", torch.float16):
        assert_same(functional_call(model, params, seen), expected)


def test_no_action_of_the_run_hangs_on_a_last_bit() -> None:
    """The softmax is float32: programs that round it differently draw the same actions from the same logits."""
    margins = []

    def wrap(step: Any) -> Any:
        def watched(state: Any, batch: Any) -> Any:
            state, result = step(state, batch)
            if step.__name__ == "act":
                (params, uniform), (seen, action, _) = batch, result
                with torch.autocast("cpu", torch.float16):
                    logits = functional_call(RECIPE.make_model(), params, seen)
                margin = logits.double().softmax(1)[:, 1] - uniform.double()
                assert torch.equal(margin > 0, action == 1)
                margins.append(margin.abs().min().item())
            return state, result

        return watched

    RECIPE.train(40, wrap)
    assert len(margins) == 40 * 8
    assert min(margins) > 2.0**-18
