"""The claim: what Inductor generates for torch's operations differs from eager code by rounding only."""

from __future__ import annotations

import pytest
import torch

from funcamp import jit
from tests.support.databases import LIMIT, SEED, Expected, expected_of, joined, operations, worst_error

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.inductor,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("one_thread"),
]
#: `benchmarks/databases.py` compiles all of them, which takes an hour.
CHOSEN = 25


@pytest.mark.thorough
def test_every_so_many_operations_are_the_eager_ones_but_for_rounding() -> None:
    names = sorted(operations())
    every = len(names) // CHOSEN
    expected = {name: expected_of(name) for name in names[::every][:CHOSEN]}
    programs = {name: found for name, found in expected.items() if isinstance(found, Expected)}
    assert len(programs) > CHOSEN // 2
    together = joined([found.case for found in programs.values()])
    torch.manual_seed(SEED)
    state, metrics = jit(together.step)(together.state, together.batch)
    errors = {
        name: worst_error(pair, found, random_too=False)
        for (name, found), pair in zip(programs.items(), zip(state, metrics))
    }
    assert {name: error for name, error in errors.items() if error > LIMIT} == {}
