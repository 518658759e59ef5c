"""The claim: torch's own samples of each operation compute under `jit`, bit for bit, what they compute in plain Python."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.databases.known import KNOWN, UNINITIALIZED
from tests.support.databases import (
    AUTOCAST,
    FAILS,
    dtypes_of,
    is_same,
    is_same_kind,
    operations,
    outcome,
    samples_of,
)

pytestmark = [
    # torch's samples call deprecated and experimental parts of torch; torch's own tests let these warnings pass.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.mark.parametrize("name", operations())
def test_every_sample_is_the_plain_one_or_known(name: str) -> None:
    operation = operations()[name]
    same = is_same_kind if name in UNINITIALIZED else is_same
    outcomes: Counter[str] = Counter()
    for dtype, count in dtypes_of(operation).items():
        samples = samples_of(operation, dtype, count)
        # Autocast casts float32 only.
        modes = list(AUTOCAST) if dtype is torch.float32 else ["plain"]
        for mode in modes:
            for sample in samples:
                outcomes[outcome(operation.op, sample, mode, same=same)] += 1
            if operation.inplace_variant is not None and samples:
                outcomes[outcome(operation.inplace_variant, samples[0], mode, same=same)] += 1
    unusual = {text: number for text, number in outcomes.items() if text not in ("equal", FAILS)}
    assert unusual == KNOWN.get(name, {})


def test_known_operations_exist() -> None:
    assert not (KNOWN.keys() | UNINITIALIZED) - operations().keys()
