"""A group of four in one process: it sends nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture(scope="module")
def rank_0_of_4() -> Iterator[None]:
    """This process as the first of four, whose collectives return what it has itself."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()
