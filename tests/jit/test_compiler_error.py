"""An error of the compiler reaches the user with what there is to say: its text, or where it was raised."""

from __future__ import annotations

import pytest
import torch

from funcamp import jit
from funcamp._jit import executable

ERRORS: list[tuple[Exception, str]] = [
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
]


@pytest.mark.parametrize(("error", "expected"), ERRORS, ids=["text", "operation", "nothing", "classes"])
def test_error_of_the_compiler_names_its_cause_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(executable, "compile_graph", fails)
    with pytest.raises(RuntimeError) as caught:
        jit(lambda state, batch: (state + batch, None), backend="aot_eager")(torch.zeros(2), torch.ones(2))
    assert caught.value.__cause__ is error
    text = str(caught.value)
    assert text.startswith("jit: step was traced, but cannot be compiled: ")
    assert expected in text
    assert "backend='eager' runs its operations without a compiler; explain=True" in text
