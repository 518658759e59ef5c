"""Several processes, started by torchrun: each case of `ranks` on every rank."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest

from tests.distributed.ranks import CASES
from tests.support.launch import torchrun

pytestmark = [pytest.mark.compiled, pytest.mark.processes]


@functools.cache
def launched(world: int) -> tuple[list[dict[str, str]], str]:
    """What each rank of this many found, and what they printed."""
    with tempfile.TemporaryDirectory() as folder:
        printed = torchrun(world, "-m", "tests.distributed.ranks", folder, bound=1200).everything
        files = [Path(folder, f"{rank}.json") for rank in range(world)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files], printed


@pytest.mark.thorough
@pytest.mark.inductor
@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world in (2, 4) for name, (worlds, _) in CASES.items() if world in worlds]
)
def test_the_case_holds_on_every_rank(world: int, name: str) -> None:
    found, printed = launched(world)
    for rank, results in enumerate(found):
        failed = next((case for case, error in results.items() if error), "an earlier one")
        error = results.get(name, f"not run, for {failed} failed\n{printed[-2000:]}")
        assert not error, f"rank {rank} of {world}: {error}"
