"""Checkpoints that were written before `save` became torch.save and a rename (2026-11): they load, and the run goes on.

The files are in `checkpoints`; two ranks wrote `sharded`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as checkpoint_module

import funcamp
from funcamp import distributed, load, save
from tests.support.helpers import assert_same

dcp: Any = checkpoint_module  # its functions are untyped re-exports

FOLDER = Path(__file__).parent / "checkpoints"
#: Entries beside the state in `nested.pt`, one of each kind that a user saves.
BESIDE = {
    "rng": torch.arange(3, dtype=torch.uint8),
    "history": [1, 2.5, None, True, "text", b"bytes", (1, [2])],
    "about": {3: torch.float16, "shape": torch.Size([2]), "device": torch.device("cpu")},
}


def make(parallel: distributed.DataParallel | None = None) -> funcamp.TrainStep:
    """Return a step whose numbers are sums of few powers of two, hence the same on every machine."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(1.0, 1 + parameter.numel()).view_as(parameter))
    return funcamp.make_train_step(
        funcamp.module_loss(model, lambda output, target: (output * target).mean()),
        funcamp.stateless(torch.optim.SGD, lr=0.5, momentum=0.5),
        funcamp.ScalerConfig(init_scale=8.0, growth_interval=2),
        policy="float16",
        ema_decay=0.5,
        parallel=parallel,
    )


def train(step: funcamp.TrainStep, state: funcamp.TrainState, count: int) -> funcamp.TrainState:
    for _ in range(count):
        state, _ = step(state, (torch.ones(2, 2), torch.ones(2, 1)))
    return state


def test_file_of_an_earlier_version_goes_on() -> None:
    saved = load(FOLDER / "nested.pt")
    assert_same({key: saved[key] for key in BESIDE}, BESIDE)
    step = make()
    resumed = step.load_state_dict(saved["state"], like=step.init())
    assert_same(resumed, train(step, step.init(), 3))
    assert_same(train(step, resumed, 2), train(step, step.init(), 5))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # torch's, on its own checkpoints
def test_sharded_checkpoint_of_an_earlier_version_goes_on_with_fewer_ranks() -> None:
    alone = make()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        step = make(distributed.DataParallel(shard=True))
        saved = distributed.sharded_state_dict(step.init())
        dcp.load(saved, checkpoint_id=FOLDER / "sharded")
        resumed = distributed.load_sharded_state_dict(saved, like=step.init())
        assert_same(step.state_dict(resumed), alone.state_dict(train(alone, alone.init(), 3)))
        assert_same(step.state_dict(train(step, resumed, 2)), alone.state_dict(train(alone, alone.init(), 5)))
    finally:
        dist.destroy_process_group()


def test_what_a_user_saves_beside_a_state_comes_back_also_by_torch(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    save(BESIDE, file)
    assert_same(load(file), BESIDE)
    assert_same(torch.load(file, weights_only=True), BESIDE)
