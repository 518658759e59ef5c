"""An error of the compiler reaches the user with what there is to say: its text, or where it was raised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import jit
from funcamp._jit import executable

FIX = r"\. backend='eager' runs its operations without a compiler; explain=True .* without=\(...\) leaves"


def error_of(monkeypatch: pytest.MonkeyPatch, error: Exception) -> str:
    """Return what a step raises whose compiler raises this."""

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(executable, "compile_graph", fails)
    with pytest.raises(RuntimeError) as caught:
        jit(lambda state, batch: (state + batch, None), backend="aot_eager")(torch.zeros(2), torch.ones(2))
    assert caught.value.__cause__ is error
    return str(caught.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError("no space left\non the device"), "no space left. backend="),
        (
            ValueError("LoweringException: KeyError: 'x'\n  target: aten.sin.default\n  args[0]: 3"),
            "KeyError: 'x', at the operation aten.sin.default. ",
        ),
        (AssertionError(), "AssertionError without a text, raised by tests.jit.test_compiler_error.fails in line "),
        (
            ValueError("InductorError: LoweringException: AssertionError: \n  target: aten.cos.default\n"),
            "InductorError: LoweringException: AssertionError without a text, raised by ",
        ),
    ],
    ids=["text", "operation", "nothing", "classes"],
)
def test_error_of_the_compiler_names_its_cause_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: str
) -> None:
    text = error_of(monkeypatch, error)
    assert text.startswith("jit: step was traced, but cannot be compiled: ")
    assert expected in text
    assert "backend='eager' runs its operations without a compiler; explain=True" in text


@pytest.mark.inductor
def test_an_assertion_of_inductor_names_operation_and_place() -> None:
    from torch._inductor import lowering

    def fails(*_: Any, **__: Any) -> Any:
        raise AssertionError

    def step(state: Tensor, batch: Tensor) -> Any:
        return state + torch.sin(batch), None

    operation = torch.ops.aten.sin.default
    before = lowering.lowerings[operation]
    lowering.lowerings[operation] = fails
    try:
        with pytest.raises(RuntimeError) as caught:
            jit(step)(torch.zeros(2), torch.ones(2))
    finally:
        lowering.lowerings[operation] = before
    place = r"raised by tests\.jit\.test_compiler_error\.fails in line \d+"
    assert caught.match(rf"AssertionError without a text, {place}, at the operation aten\.sin\.default{FIX}")
