"""On a GPU: the same counts as on the host, also from a captured step."""

from __future__ import annotations

import pytest
import torch

from funcamp import ScalerConfig, jit, make_train_step, module_loss, stateless
from funcamp.numerics import stats, track_scales
from tests.support.helpers import assert_close, assert_same
from tests.support.models import mlp, on_gpu

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_counts_are_those_of_the_host(dtype: torch.dtype, compiled: bool) -> None:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0**-24, 2.0**-133, 65504.0])
    x = torch.cat([special, torch.randn(100_000).exp() * 1e-6]).to(dtype)
    run = torch.compile(stats, fullgraph=True) if compiled else stats
    found, wanted = run(x.cuda()).row.cpu(), stats(x).row
    assert_same(found[3:], wanted[3:])
    assert_close(found[:3], wanted[:3], 1e-5)


def test_captured_step_counts_what_the_eager_one_does() -> None:
    task = on_gpu(mlp())
    loss_fn = track_scales(module_loss(task.model, task.criterion), sample=None)
    step = make_train_step(loss_fn, stateless(torch.optim.SGD, lr=0.1), ScalerConfig(2.0**12), policy="float16")
    run, captured, state = jit(step), step.init(), step.init()
    for index in range(4):
        batch = task.batch(index)
        captured, found = run(captured, batch)
        state, wanted = step(state, batch)
        for name, record in wanted.records.items():
            assert found.records[name].backward.count == record.backward.count > 0
            assert_close(found.records[name].forward.std, record.forward.std, 2e-2)
            assert_close(found.records[name].backward.std, record.backward.std, 2e-2)
