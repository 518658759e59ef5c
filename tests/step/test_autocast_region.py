"""A torch.autocast region around the call of a step: a policy decides, and without one the region does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same, clone

SGD = stateless(torch.optim.SGD, lr=0.1)
WRAPS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda step: step,
    "jit": lambda step: jit(step, backend="eager"),
    "compile": lambda step: torch.compile(step, backend="eager", fullgraph=True),
}
BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), target)


def trained(
    policy: Any, wrap: Callable[[Any], Any], region: Callable[[], AbstractContextManager[Any]], **options: Any
) -> Any:
    step = make_train_step(module_loss(model(), loss_of), SGD, policy=policy, max_norm=1.0, **options)
    run, state, losses = wrap(step), step.init(), []
    batch = tuple(part.expand(2, *part.shape) for part in BATCH) if options else BATCH
    for _ in range(2):
        with region():
            state, metrics = run(state, batch)
            losses.append([metrics.loss, step.loss(state, BATCH)])
    return clone(losses), dict(state.params.tree())


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("policy", "region", "wrap"),
    [
        ("float16", torch.bfloat16, "eager"),
        ("bfloat16", torch.float16, "eager"),
        ("float16", torch.float16, "eager"),
        ("float16", torch.bfloat16, "jit"),
        ("float16", torch.bfloat16, "compile"),
    ],
)
def test_a_policy_computes_the_same_in_a_region(policy: str, region: torch.dtype, wrap: str) -> None:
    inside = trained(policy, WRAPS[wrap], lambda: torch.autocast("cpu", region))
    assert_same(inside, trained(policy, WRAPS[wrap], nullcontext))


def test_accumulation_computes_the_same_in_a_region() -> None:
    inside = trained("float16", WRAPS["eager"], lambda: torch.autocast("cpu", torch.bfloat16), accumulate=2)
    assert_same(inside, trained("float16", WRAPS["eager"], nullcontext, accumulate=2))


def test_without_a_policy_the_region_applies() -> None:
    """The forward pass is that of a loss which opens the region itself."""

    def region() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    def own_region(params: dict[str, Tensor], batch: Any) -> Tensor:
        with region():
            value: Tensor = module_loss(model(), loss_of)(params, batch)
            return value

    step = make_train_step(module_loss(model(), loss_of), SGD)
    with region():
        _, metrics = step(step.init(), BATCH)
    assert_same(metrics.loss, own_region(module_loss(model(), loss_of).params(), BATCH))


def test_the_cache_is_empty_after_a_step() -> None:
    """torch keeps a cast until the region ends, here the caller's: one for each weight of each step."""
    weights = []

    def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        weights.append(params["weight"])
        return torch.mm(x, params["weight"]).float().sum()

    step = make_train_step(loss_fn, SGD, policy="bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        step(step.init({"weight": torch.ones(6, 3)}), BATCH[0])
        with torch.no_grad():
            weights[0].zero_()
        assert torch.mm(BATCH[0], weights[0]).abs().sum() == 0


@pytest.mark.thorough(keep=5)
@pytest.mark.compiled
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("around", [torch.bfloat16, None])
@pytest.mark.parametrize("policy", [None, "float32", "float16", "bfloat16"])
def test_a_forward_pass_of_ones_own_computes_as_the_loss_does(
    policy: str | None, around: torch.dtype | None, wrap: str
) -> None:
    net = model()
    step = make_train_step(module_loss(net, loss_of), SGD, policy=policy)

    def both(state: Any, batch: Any) -> Any:
        x, target = batch
        with step.autocast(state):
            output = torch.func.functional_call(net, step.compute_params(state), x)
        return state, (output, loss_of(output, target))

    with nullcontext() if around is None else torch.autocast("cpu", around):
        _, (output, found) = WRAPS[wrap](both)(step.init(), BATCH)
        expected = step.loss(step.init(), BATCH)
    assert_same(found.detach(), expected)
    dtype = around if policy in (None, "float32") else getattr(torch, str(policy), None)
    assert output.dtype == (torch.float32 if dtype is None else dtype)


def test_the_region_needs_a_state() -> None:
    step = make_train_step(module_loss(model(), loss_of), SGD, policy="float16")
    with pytest.raises(TypeError, match=r"autocast: state must be a TrainState.*got a dict"):
        step.autocast(step.compute_params(step.init()))
    with step.autocast(step.init()._replace(scaler=step.init().scaler._replace(scale=torch.ones((), device="meta")))):
        assert not torch.is_autocast_enabled("cpu")
