"""The claim: under `jit` torch's own samples of each operation compute, bit for bit, what they compute without it."""

from __future__ import annotations

import pytest

from tests.databases.known import KNOWN, UNINITIALIZED
from tests.support.databases import FAILS, is_same, is_same_kind, operations, outcomes_of

pytestmark = [
    pytest.mark.compiled,
    # torch's samples call deprecated and experimental parts of torch; torch's own tests let these warnings pass.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("name", operations())
def test_every_sample_is_the_plain_one_or_known(name: str) -> None:
    same = is_same_kind if name in UNINITIALIZED else is_same
    outcomes = outcomes_of(name, same=same)
    unusual = {text: number for text, number in outcomes.items() if text not in ("equal", FAILS)}
    assert unusual == KNOWN.get(name, {})


def test_known_operations_exist() -> None:
    assert not (KNOWN.keys() | UNINITIALIZED) - operations().keys()
