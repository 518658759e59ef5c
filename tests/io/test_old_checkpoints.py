"""Checkpoints of earlier versions, committed as files: they load, and the run goes on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from funcamp import distributed, load
from tests.io.old_checkpoints import BESIDE, FOLDER, dcp, make, process_group, train
from tests.support.helpers import assert_same


@pytest.mark.parametrize("name", ["nested.pt", "state.pt"])
def test_file_of_an_earlier_version_goes_on(name: str) -> None:
    saved = load(FOLDER / name)
    if name == "nested.pt":
        assert_same({key: saved[key] for key in BESIDE}, BESIDE)
        saved = saved["state"]
    step = make()
    resumed = step.load_state_dict(saved, like=step.init())
    assert_same(resumed, train(step, step.init(), 3))
    assert_same(train(step, resumed, 2), train(step, step.init(), 5))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # torch's, on its own checkpoints
def test_sharded_checkpoint_of_an_earlier_version_goes_on_with_fewer_ranks() -> None:
    """Two ranks wrote it."""
    alone = make()
    with process_group(dist.HashStore(), rank=0, world_size=1):  # type: ignore[attr-defined]
        step = make(distributed.DataParallel(shard=True))
        saved = distributed.sharded_state_dict(step.init())
        dcp.load(saved, checkpoint_id=FOLDER / "sharded")
        resumed = distributed.load_sharded_state_dict(saved, like=step.init())
        assert_same(step.state_dict(resumed), alone.state_dict(train(alone, alone.init(), 3)))
        assert_same(step.state_dict(train(step, resumed, 2)), alone.state_dict(train(alone, alone.init(), 5)))


def test_torch_reads_the_file_by_itself() -> None:
    assert_same(torch.load(FOLDER / "nested.pt", weights_only=True), load(FOLDER / "nested.pt"))
