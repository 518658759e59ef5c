"""Several processes, started by torchrun: each case of `ranks` on every rank."""

from __future__ import annotations

import json

import pytest

from tests.distributed.ranks import CASES
from tests.support.launch import torchrun

pytestmark = [pytest.mark.compiled, pytest.mark.processes]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[list[dict[str, str]], str]]:
    """For 2 and 4 processes what each rank found, and what they printed."""
    found = {}
    for world in (2, 4):
        folder = tmp_path_factory.mktemp(f"ranks{world}")
        printed = torchrun(world, "-m", "tests.distributed.ranks.run", folder, bound=1200).everything
        files = [folder / f"{rank}.json" for rank in range(world)]
        found[world] = ([json.loads(file.read_text()) if file.exists() else {} for file in files], printed)
    return found


@pytest.mark.thorough
@pytest.mark.inductor
@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world in (2, 4) for name, (worlds, _) in CASES.items() if world in worlds]
)
def test_the_case_holds_on_every_rank(
    launched: dict[int, tuple[list[dict[str, str]], str]], world: int, name: str
) -> None:
    found, printed = launched[world]
    for rank, results in enumerate(found):
        failed = next((case for case, error in results.items() if error), "an earlier one")
        error = results.get(name, f"not run, for {failed} failed\n{printed[-2000:]}")
        assert not error, f"rank {rank} of {world}: {error}"
