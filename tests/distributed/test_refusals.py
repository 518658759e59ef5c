"""What `funcamp.distributed` refuses: what is called, the error, and words that it must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import funcamp
from funcamp import distributed
from funcamp.distributed import load_sharded_state_dict, max_over, sharded_state_dict
from tests.support.helpers import assert_refused
from tests.support.steps import SGD

pytestmark = pytest.mark.usefixtures("rank_0_of_4")

Parallel: Any = distributed.DataParallel
BATCH = torch.ones(8, 4), torch.ones(8, 4)


def mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes)


def made(parallel: Any = None, optimizer: Any = SGD, model: Any = None, **options: Any) -> Any:
    return funcamp.make_train_step(
        funcamp.module_loss(model or nn.Linear(4, 4), F.mse_loss), optimizer, parallel=parallel, **options
    )


def sharded(*group: Any, **options: Any) -> Any:
    return made(Parallel(*group, shard=True), **options)


def loaded_in_another_order() -> object:
    step = funcamp.make_train_step(lambda p, x: (p["a"] * p["b"] * x).sum(), SGD, parallel=Parallel(shard=True))
    state, like = (step.init({name: torch.ones(2, 2) for name in names}) for names in ("ab", "ba"))
    return load_sharded_state_dict(sharded_state_dict(state), like)


def loaded_in_other_groups() -> object:
    step = funcamp.make_train_step(funcamp.module_loss(nn.Linear(2, 1), nn.functional.mse_loss), SGD)
    return load_sharded_state_dict(sharded_state_dict(step.init(flat=False)), step.init())


def loaded_with_two_counts() -> object:
    step = sharded(optimizer=funcamp.stateless(torch.optim.Adam), model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    saved = step.state_dict(step.init())
    saved["opt_state.state.step.0.bias"] = saved["opt_state.state.step.0.bias"] - 1
    return step.load_state_dict(saved, like=step.init())


def waiting(state: Tensor, batch: Tensor) -> Any:
    total = batch.sum()
    dist.all_reduce(total)
    return state + total, total


STATE: Any = {}
#: What is called, the error, and its words.
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a group": (lambda: max_over("all"), TypeError, "group must be a ProcessGroup, a DeviceMesh or None; got 'all'"),  # type: ignore[arg-type]
    "a group of others": (lambda: max_over(dist.new_group([1, 2])), ValueError, "group must contain this process"),
    "a mesh of two dimensions": (lambda: Parallel(mesh(2, 2)), ValueError, "group must be a mesh of one dimension"),
    "dtype": (lambda: Parallel(dtype="bfloat16"), TypeError, "dtype must be a torch.dtype; got 'bfloat16'"),
    "buckets": (lambda: Parallel(buckets=0), ValueError, "buckets must be 1 or more; got 0"),
    "parallel": (lambda: made("all"), TypeError, r"parallel must be a distributed\.DataParallel; got 'all'"),
    "flat": (lambda: sharded().init(flat=False), ValueError, r"flat must be True with DataParallel\(.*shard=True\); got False"),
    "consume": (lambda: sharded().init(consume=True), ValueError, r"consume must be False with DataParallel\(.*shard=True\)"),
    "observe": (lambda: sharded(observe={"f": funcamp.found_inf_by_leaf}), ValueError, r"observe must not be given with DataParallel\(.*shard=True\); got a dict"),
    "a matrix's optimizer": (
        # contract: "What needs a parameter's own shape"
        lambda: sharded(optimizer=funcamp.stateless(torch.optim.Adafactor)).init(), TypeError, "only torch.optim's elementwise classes take them"
    ),
    "FSDP2": (lambda: made(model=fully_shard(nn.Linear(4, 4), mesh=mesh(4))), TypeError, "model must be the module itself"),
    "a complete state": (lambda: sharded()(made(Parallel()).init(), BATCH), ValueError, "state must be sharded over this step's ranks"),
    "a state of other ranks": (lambda: sharded()(sharded(mesh(2, 2)).init(), BATCH), ValueError, "state must be sharded over this step's ranks"),
    "a sharded state": (lambda: made(Parallel())(sharded().init(), BATCH), ValueError, "state must not be sharded"),
    "a sharded state alone": (lambda: made()(sharded().init(), BATCH), ValueError, r"step: state must not be sharded; distributed\.gather_state"),
    "a sharded state's loss": (lambda: made().loss(sharded().init(), BATCH), ValueError, "loss: state must not be sharded"),
    "a sharded state's tree": (lambda: sharded().init().params.tree(), TypeError, r"distributed\.gather_state makes them complete"),
    "sharded_state_dict": (lambda: sharded_state_dict(STATE), TypeError, "sharded_state_dict: state must be a TrainState"),
    "load like": (lambda: load_sharded_state_dict({}, STATE), TypeError, "like must be a TrainState"),
    "load two counts": (loaded_with_two_counts, ValueError, "saved must hold one count for all parameters"),
    "a collective that waits in Python": (lambda: funcamp.jit(waiting, backend="eager")(torch.zeros(()), torch.ones(2)), RuntimeError, "not wait for other ranks in Python; .*test_refusals.py.*_functional_collectives"),
    "load another layout": (loaded_in_another_order, ValueError, "in its order; got another layout"),
    "load other groups": (loaded_in_other_groups, ValueError, r"got another layout \(init\(flat=\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_argument_is_named_with_the_rule_and_the_value(name: str) -> None:
    assert_refused(*REFUSED[name])
