"""timm's training loop with `GradScaler` in its loss scaler: what it does with its own, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.float16_run import assert_moves
from tests.support.helpers import assert_same
from tests.support.trainers import imported

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]

NUMBERS = {"init_scale": 2.0**24, "growth_interval": 4}


def theirs(**numbers: Any) -> Any:
    """timm's loss scaler; it takes no options of torch's."""
    made = imported("timm_train").TimmScaler("cpu")
    if numbers:
        made.load_state_dict(made.state_dict() | {"scale": numbers["init_scale"]})
        made._scaler.set_growth_interval(numbers["growth_interval"])
    return made


def ours(**numbers: Any) -> Any:
    return imported("timm_train").NativeScaler("cpu", **numbers)


def test_run_equals_the_one_with_timms_scaler(tmp_path: Path) -> None:
    expected, actual = (imported("timm_train").train(make(**NUMBERS), tmp_path) for make in (theirs, ours))
    assert_moves([row["scaler"]["scale"] for row in expected])
    assert_same(actual, expected)


@pytest.mark.parametrize(("first", "second"), [(theirs, ours), (ours, theirs)])
def test_checkpoint_continues_with_the_other_scaler(first: Any, second: Any, tmp_path: Path) -> None:
    example = imported("timm_train")
    whole = example.train(first(**NUMBERS), tmp_path)
    example.train(first(**NUMBERS), tmp_path, last=1)
    rest = example.train(second(), tmp_path, resume=tmp_path / "last.pth.tar")
    assert_same(rest, whole[example.UPDATES :])


def test_example_learns(tmp_path: Path) -> None:
    assert imported("timm_train").main(tmp_path)["scale"] < 2.0**24
