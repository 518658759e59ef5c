"""The claim: what Inductor generates for torch's operations differs from eager code by rounding only.

With exact=True it draws eager mode's random numbers.
"""

from __future__ import annotations

import operator

import pytest
import torch

from tests.databases.known import NOT_COMPILED, UNINITIALIZED
from tests.support.databases import Setting, assert_compiled_right, programs

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.inductor,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("names", programs(UNINITIALIZED), ids=operator.itemgetter(0))
def test_operations_are_the_eager_ones_but_for_rounding(names: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert_compiled_right(names, Setting(torch.float32, samples=3, samples_of_nn=12, exact=True), NOT_COMPILED, caplog)
