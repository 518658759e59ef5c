"""A compiled step in place of examples/recipes/sparse_embedding.py: dense gradients train alike, sparse are refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import funcamp
from tests.recipes import advance, example, scaler_for, trace_of, values
from tests.support.helpers import assert_close, clone, one_thread

STEPS = 40
EAGER = pytest.param(lambda step, **_: step, id="eager")
COMPILED = pytest.param(functools.partial(funcamp.jit, backend="eager"), id="compiled")


def functional(recipe: Any, *, sparse: bool) -> Any:
    loss_fn = funcamp.module_loss(recipe.make_model(sparse), recipe.criterion)
    sgd = funcamp.stateless(torch.optim.SGD, lr=0.05)
    return funcamp.make_train_step(loss_fn, sgd, recipe.CONFIG, policy="float16")


def distinct(index: int, device: str) -> Any:
    """A batch in which no word comes twice."""
    words = torch.randperm(63, generator=torch.Generator().manual_seed(index)).view(21, 3)
    return words.to(device), words.sin().sum(1, keepdim=True).to(device)


@pytest.mark.compiled
@pytest.mark.parametrize("wrap", [EAGER, COMPILED])
@pytest.mark.parametrize("repeats", [False, True], ids=["distinct words", "repeated words"])
def test_dense_gradients_in_a_step_are_the_sparse_loop(repeats: bool, wrap: Any) -> None:
    recipe, trace, history = example("sparse_embedding"), [], []
    batch = recipe.batch if repeats else distinct
    model = recipe.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = scaler_for(recipe.CONFIG, "cpu")
    step = functional(recipe, sparse=False)
    run, state = wrap(step), step.init()
    with one_thread():
        for index in range(STEPS):
            words, target = batch(index, "cpu")
            with torch.autocast("cpu", torch.float16):
                loss = recipe.criterion(model(words), target)
            scaler.scale(loss).backward()
            assert model[0].weight.grad.is_sparse
            scaler.step(optimizer)
            trace.append(advance(scaler))
            model.zero_grad()
            state, metrics = run(state, (words, target))
            history.append(clone(metrics))
    assert trace_of(history) == trace
    assert sum(skipped for _, skipped in trace) >= 5
    # Sparse SGD subtracts the gradients of a repeated word one by one, dense their sum: a last bit, which can move a
    # float16 copy or activation to its neighbour.
    assert_close(state.params.tree(), values(model), 2.0**-12 if repeats else 0.0)


@pytest.mark.compiled
@pytest.mark.parametrize("wrap", [EAGER, COMPILED])
def test_sparse_gradient_in_a_step_is_an_error_that_says_what_to_do(wrap: Any) -> None:
    recipe = example("sparse_embedding")
    step = functional(recipe, sparse=True)
    with pytest.raises(TypeError, match=r"gradients must be dense \(sparse=False in an embedding\)"):
        wrap(step)(step.init(), recipe.batch(0, "cpu"))


@pytest.mark.parametrize("name", ["SparseAdam", "AdamW"])
def test_skipped_step_moves_nothing(name: str) -> None:
    recipe = example("sparse_embedding")
    with one_thread():
        params, history = recipe.train(3)
    assert [row.found_inf.item() for row in history] == [1.0] * 3
    start = values(recipe.make_model())
    part = "0." if name == "SparseAdam" else "2."
    assert all(torch.equal(params[key], start[key]) for key in params if key.startswith(part))
