"""Random trainings: torch's loop, the eager step and the traced one agree, whatever is done to the state between steps.

`make fuzz SEEDS=0:200` runs more, and cuts a failing one down to a short script.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fuzz.__main__ import backend_of, cut_down, failure
from tests.fuzz.case import case_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.thorough(keep=6)
@pytest.mark.compiled
@pytest.mark.parametrize("seed", [*range(60), 5103])  # the last one: weights of a loss in float16
def test_traced_training_is_torchs(seed: int) -> None:
    case = case_of(seed)
    assert not failure(case, backend_of("eager")), case.script()


@pytest.mark.thorough
@pytest.mark.compiled
def test_a_failing_case_is_found_and_cut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.fuzz import blocks

    def wrong(self: object, x: torch.Tensor) -> torch.Tensor:
        return x * (2 if torch.compiler.is_compiling() else 1)

    monkeypatch.setattr(blocks.Normed, "forward", wrong)
    parts: dict[str, Any] = {"blocks": ("nn.GELU()", "blocks.Normed()"), "options": ("accumulate=2",)}
    parts |= {"operations": ((2, "clone"),), "sizes": (8, 8, 8, 3), "criterion": "mse", "policy": None}
    planted = replace(case_of(3), **parts)
    found = failure(planted, backend_of("eager"))
    assert found.startswith("ApartError: compiled step differs from eager step at step 0"), found
    small = cut_down(planted, backend_of("eager"))
    assert small.blocks == ("blocks.Normed()",)
    assert not small.operations
    assert not small.options
    assert len(small.sizes) == 3
