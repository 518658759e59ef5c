"""Every recipe in examples/recipes: as its torch.amp loop, eager and captured; short, documented, with a result."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

import pytest

import funcamp
from tests.recipes import FOLDER, NAMES, example, oracle, trace_of, uncompiled
from tests.support.helpers import assert_close, assert_same, one_thread
from tests.support.models import with_two_roundings
from tests.support.stand_in import StandIn

STEPS = 40

Wrap = Callable[..., Any]


@pytest.fixture(params=["eager", "captured"])
def wrap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Wrap:
    """How a recipe's step is run: as it is, or compiled, donated and replayed (a stand-in takes the graph's part)."""
    if request.param == "eager":
        return uncompiled
    StandIn().take_place(monkeypatch)
    return functools.partial(funcamp.jit, backend="eager")


@functools.cache
def expected(name: str) -> Any:
    with one_thread():
        return oracle(name).oracle(example(name), STEPS, "cpu")


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_the_torch_loop(name: str, wrap: Wrap) -> None:
    with one_thread():
        params, history = example(name).train(STEPS, wrap)
    expected_params, expected_trace = expected(name)
    assert trace_of(history) == expected_trace
    assert len(history) == STEPS
    assert_close(params, expected_params, oracle(name).TOLERANCE)


#: What is changed in a recipe and in its loop.
CHANGED: dict[str, dict[str, Any]] = {
    # Under vmap the difference to the loop is where the bias is added.
    name: {"make_model": with_two_roundings(example(name).make_model)}
    for name in ("ensemble", "maml", "per_sample")
}
CHANGED["sam"] = {"RHO": 2.0}  # the second gradient overflows, too


@pytest.mark.parametrize("name", CHANGED)
def test_changed_recipe_is_its_loop_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = example(name)
    for attribute, value in CHANGED[name].items():
        monkeypatch.setattr(recipe, attribute, value)
    with one_thread():
        params, history = recipe.train(STEPS, uncompiled)
        expected_params, expected_trace = oracle(name).oracle(recipe, STEPS, "cpu")
    assert trace_of(history) == expected_trace
    assert_same(params, expected_params)


@pytest.mark.thorough(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_main_shows_a_result(name: str) -> None:
    with one_thread():
        numbers = example(name).main(wrap=uncompiled)
    assert numbers["skipped"] >= 1
    assert all(isinstance(value, (int, float)) for value in numbers.values())


@pytest.mark.parametrize("name", NAMES)
def test_file_is_short_and_says_what_to_watch(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 130
    doc = ast.get_docstring(ast.parse(text)) or ""
    assert f"python examples/recipes/{name}.py" in doc
    assert "Watch" in doc
    assert "\n    assert " in text
