"""The claim: so are operations in 16 bits, on what layers computed in the same program."""

from __future__ import annotations

import operator

import pytest
import torch

from tests.databases.known import NOT_COMPILED, UNINITIALIZED
from tests.support.databases import Setting, assert_compiled_right, convolutions, linear_layers, programs

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.inductor,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("one_thread"),
]
#: The kernels of these layers are funcamp's own.
SETTINGS = {
    "bfloat16": Setting(torch.bfloat16, linear_layers, samples_of_several=6),
    "float16": Setting(torch.float16, convolutions, samples_of_several=6),
}


@pytest.mark.thorough
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("names", programs(UNINITIALIZED), ids=operator.itemgetter(0))
def test_operations_after_layers_are_the_eager_ones_but_for_rounding(
    names: list[str], setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert_compiled_right(names, SETTINGS[setting], NOT_COMPILED, caplog)
