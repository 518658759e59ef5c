"""The claim: what Inductor generates for torch's operations differs from eager code by rounding only.

So it does for tensors with another order in memory. With exact=True it draws eager mode's random numbers.
"""

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
#: What is compiled, and what is left out.
SETTINGS = {
    "as they are": (Setting(torch.float32, samples=3, samples_of_nn=12, exact=True), NOT_COMPILED),
    "another layout": (
        Setting(torch.float32, other_layout, samples=2, samples_of_nn=6, exact=True),
        NOT_COMPILED | READS_MEMORY,
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("names", programs(UNINITIALIZED), ids=operator.itemgetter(0))
def test_operations_are_the_eager_ones_but_for_rounding(
    names: list[str], setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert_compiled_right(names, *SETTINGS[setting], caplog)
