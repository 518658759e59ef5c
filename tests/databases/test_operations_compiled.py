"""The claim: what Inductor generates for torch's operations differs from eager code by rounding only."""

from __future__ import annotations

import logging

import pytest
import torch

from funcamp import jit
from tests.databases.known import UNINITIALIZED
from tests.support.databases import (
    LIMIT,
    SEED,
    Expected,
    Setting,
    convolutions,
    expected_of,
    joined,
    linear_layers,
    operations,
    worst_error,
)

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.inductor,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("one_thread"),
]
#: In 16 bits the input of an operation is what layers computed in the same program. The kernels of these are funcamp's
#: own in bfloat16 (linear layers) and in float16 (convolutions).
SETTINGS = {
    "float32": Setting(torch.float32, None, samples=3),
    "bfloat16 after linear layers": Setting(torch.bfloat16, linear_layers, samples=1),
    "float16 after convolutions": Setting(torch.float16, convolutions, samples=1),
}
NAMES = sorted(operations().keys() - UNINITIALIZED)
#: How many operations are one program: together they compile in seconds.
TOGETHER = 25
#: Samples that Inductor cannot compile: an index of shape () that it reads on the host, and sparse results.
NOT_COMPILED = {"take 2", "to_sparse 0", "to_sparse 1", "to_sparse 2"}


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("first", range(0, len(NAMES), TOGETHER))
def test_operations_are_the_eager_ones_but_for_rounding(
    first: int, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected: dict[str, Expected] = {}
    for name in NAMES[first : first + TOGETHER]:
        expected |= expected_of(name, SETTINGS[setting])
    for case in NOT_COMPILED & expected.keys():
        del expected[case]
    together = joined([found.case for found in expected.values()])
    torch.manual_seed(SEED)
    with caplog.at_level(logging.WARNING, "funcamp"):
        state, metrics = jit(together.step)(together.state, together.batch)
    errors = {case: worst_error(pair, found) for (case, found), pair in zip(expected.items(), zip(state, metrics))}
    assert {case: error for case, error in errors.items() if error > LIMIT} == {}
    assert "one by one" not in caplog.text  # then nothing was compiled
