"""The claim: so are operations on tensors with another order in memory."""

from __future__ import annotations

import operator

import pytest
import torch

from tests.databases.known import NOT_COMPILED, READS_MEMORY, UNINITIALIZED
from tests.support.databases import Setting, assert_compiled_right, other_layout, programs

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.inductor,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("names", programs(UNINITIALIZED), ids=operator.itemgetter(0))
def test_operations_are_the_eager_ones_on_another_layout(names: list[str], caplog: pytest.LogCaptureFixture) -> None:
    setting = Setting(torch.float32, other_layout, samples=2, samples_of_nn=6, exact=True)
    assert_compiled_right(names, setting, NOT_COMPILED | READS_MEMORY, caplog)
