"""Several processes, started by torchrun: the tests of `ranks` on each of them."""

from __future__ import annotations

import pytest

from tests.support.launch import torchrun


@pytest.mark.thorough
@pytest.mark.compiled
@pytest.mark.inductor
@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 4])
def test_all_holds_on_every_rank(world: int) -> None:
    ended = torchrun(world, "-m", "tests.distributed.ranks", "-q", "-p", "no:cacheprovider", bound=1200)
    assert ended.code == 0, ended.everything
