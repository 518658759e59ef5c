"""The claim: what Inductor generates for torch's operations differs from eager code by rounding only."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from funcamp import jit
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
#: Of 671 operations; to compile all of them takes an hour.
CHOSEN = 25
#: In 16 bits the input of an operation is what layers computed in the same program. The kernels of these are funcamp's
#: own in bfloat16 (linear layers) and in float16 (convolutions).
SETTINGS = {
    f"{dtype} after {layers.__name__}": Setting(dtype, layers)
    for dtype in (torch.bfloat16, torch.float16)
    for layers in (linear_layers, convolutions)
}


def wrong(names: Iterable[str], setting: Setting | None = None) -> dict[str, float]:
    """Return the errors of operations that differ by more than rounding, after compiling all as one program."""
    expected = {name: expected_of(name, setting) for name in names}
    programs = {name: found for name, found in expected.items() if isinstance(found, Expected)}
    assert len(programs) > CHOSEN // 2
    together = joined([found.case for found in programs.values()])
    torch.manual_seed(SEED)
    state, metrics = jit(together.step)(together.state, together.batch)
    errors = {name: worst_error(pair, found) for (name, found), pair in zip(programs.items(), zip(state, metrics))}
    return {name: error for name, error in errors.items() if error > LIMIT}


@pytest.mark.thorough
def test_every_so_many_operations_are_the_eager_ones_but_for_rounding() -> None:
    names = sorted(operations())
    assert wrong(names[:: len(names) // CHOSEN][:CHOSEN]) == {}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SETTINGS)
def test_so_are_others_after_layers_in_16_bits(name: str) -> None:
    names = [name for name in sorted(operations()) if operations()[name].supports_autograd]
    first = 1 + list(SETTINGS).index(name)
    assert wrong(names[first :: len(names) // CHOSEN][:CHOSEN], SETTINGS[name]) == {}
