"""torch.optim.lr_scheduler beside `GradScaler`: as beside torch's scaler; and schedules that count applied steps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

import funcamp
from tests.support.helpers import assert_same, clone
from tests.support.host_reads import host_reads


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.item(),
        lambda x: 1 if x else 0,
        lambda x: float(x),
        lambda x: torch.ones(2).add_(1.0, alpha=x),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: torch.equal(x, x),
        lambda x: x[x > 0],
    ],
    ids=["item", "branch", "float", "scalar argument", "tolist", "numpy", "equal", "mask"],
)
def test_every_way_to_read_is_seen(read: Callable[[Tensor], Any]) -> None:
    with host_reads() as reads:
        x = torch.ones(()) * 2
        assert reads == []
        read(x)
        assert [__file__ in place for place in reads] == [True]


pytestmark = pytest.mark.usefixtures("one_thread")


STEPS = 24
HUGE = 11  # this batch overflows float16 in the forward pass, whatever the scale
NUMBERS: dict[str, Any] = {"init_scale": 2.0**12, "growth_interval": 5}

Scaler = torch.amp.GradScaler
FUNCAMP: dict[str, Callable[..., Scaler]] = {
    skip or "default": functools.partial(funcamp.GradScaler, skip=skip) for skip in (None, "host", "select")
}


def problem() -> tuple[torch.nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    x = torch.randn(STEPS, 4, 4)
    y = x.sum(2, keepdim=True)
    x[HUGE] = 1e30
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)), list(zip(x, y))


def backward(model: torch.nn.Module, batch: tuple[Tensor, Tensor], scaler: Scaler) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        loss = torch.nn.functional.mse_loss(model(batch[0]).float(), batch[1])
    scaler.scale(loss).backward()
    return loss.detach()


Advance = Callable[[Scaler, float, Any, Tensor], None]


def always(scaler: Scaler, scale_before: float, schedule: Any, loss: Tensor) -> None:
    if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        schedule.step(loss.item())
    else:
        schedule.step()


def where_the_scale_held(scaler: Scaler, scale_before: float, schedule: Any, loss: Tensor) -> None:
    if scaler.get_scale() >= scale_before:
        schedule.step()


def where_the_flag_is_clear(scaler: Scaler, scale_before: float, schedule: Any, loss: Tensor) -> None:
    assert isinstance(scaler, funcamp.GradScaler)
    if not scaler.metrics().found_inf.item():
        schedule.step()


def train(scaler: Scaler, make_schedule: Callable[[Any], Any], advance: Advance = always) -> list[dict[str, Any]]:
    model, batches = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    schedule = make_schedule(optimizer)
    rows = []
    for batch in batches:
        scale_before = scaler.get_scale()
        loss = backward(model, batch, scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        advance(scaler, scale_before, schedule, loss)
        rows.append(
            {
                "count": schedule.last_epoch,
                "group": {name: value for name, value in optimizer.param_groups[0].items() if name != "params"},
                "scaler": scaler.state_dict(),
                "params": clone(dict(model.named_parameters())),
            }
        )
    return rows


def column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def applied(rows: list[dict[str, Any]]) -> list[bool]:
    """Whether the parameters moved, from the second step on."""
    params = [torch.cat([p.flatten() for p in row["params"].values()]) for row in rows]
    return [not torch.equal(before, after) for before, after in itertools.pairwise(params)]


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda count: 1 / (1 + count)),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=3e-2, total_steps=STEPS + 1),  # moves the momentum too
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=6), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[6]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_run_equals_the_one_with_torchs_scaler(schedule: str) -> None:
    expected = train(Scaler("cpu", **NUMBERS), SCHEDULES[schedule])
    assert len({group["lr"] for group in column(expected, "group")}) > 1
    assert applied(expected)[HUGE - 1] is False
    assert column(expected, "count")[-1] == STEPS
    for make in FUNCAMP.values():
        assert_same(train(make("cpu", **NUMBERS), SCHEDULES[schedule]), expected)


def test_skipped_first_step_warns_where_step_is_not_called_and_the_schedule_advances_anyway() -> None:
    overflowing = NUMBERS | {"init_scale": 2.0**24}
    early = r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`"
    with pytest.warns(UserWarning, match=early):
        expected = train(Scaler("cpu", **overflowing), SCHEDULES["LambdaLR"])
    for name in ("default", "host"):
        with pytest.warns(UserWarning, match=early):
            assert_same(train(FUNCAMP[name]("cpu", **overflowing), SCHEDULES["LambdaLR"]), expected)
    # no warning under selection: optimizer.step is called, and undone
    assert_same(train(FUNCAMP["select"]("cpu", **overflowing), SCHEDULES["LambdaLR"]), expected)
    assert applied(expected)[0] is False
    assert column(expected, "count") == list(range(1, STEPS + 1))


@pytest.mark.parametrize("init_scale", [2.0**12, 2.0**24])
@pytest.mark.parametrize("name", FUNCAMP)
def test_schedule_advances_on_applied_steps_where_the_loop_reads(name: str, init_scale: float) -> None:
    numbers = NUMBERS | {"init_scale": init_scale}
    expected = train(Scaler("cpu", **numbers), SCHEDULES["CosineAnnealingLR"], where_the_scale_held)
    moved = applied(expected)
    assert 0 < moved.count(False) < STEPS - 1
    assert column(expected, "count")[-1] == moved.count(True) + (init_scale < 2.0**24)
    for advance in (where_the_scale_held, where_the_flag_is_clear):
        assert_same(train(FUNCAMP[name]("cpu", **numbers), SCHEDULES["CosineAnnealingLR"], advance), expected)


def test_scale_at_its_lower_bound_tells_nothing_and_the_flag_does() -> None:
    bounded = functools.partial(funcamp.ScalerConfig, init_scale=4.0, min_scale=4.0, growth_interval=100)
    by_scale, by_flag = [
        train(funcamp.GradScaler("cpu", config=bounded()), SCHEDULES["LambdaLR"], advance)
        for advance in (where_the_scale_held, where_the_flag_is_clear)
    ]
    assert column(by_scale, "count")[-1] == STEPS
    assert column(by_flag, "count")[-1] == STEPS - 1


def warm_up_then_cosine(applied: Tensor) -> Tensor:
    return 1e-2 * torch.minimum((applied + 1) / 6, 0.5 + 0.5 * torch.cos(torch.pi * applied / STEPS))


def test_schedule_of_a_count_on_the_device_advances_on_applied_steps_and_reads_nothing() -> None:
    model, batches = problem()
    lr, taken = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    scaler = funcamp.GradScaler("cpu", init_scale=2.0**24, growth_interval=5, skip="select")
    lrs = []
    with host_reads() as reads:
        for batch in batches:
            lr.copy_(warm_up_then_cosine(taken))
            backward(model, batch, scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            taken = torch.where(scaler.metrics().found_inf == 0, taken + 1, taken)
            lrs.append(lr.clone())
    assert reads == []

    other, batches = problem()
    count, expected = 0, []
    reading = torch.optim.AdamW(other.parameters(), lr=torch.zeros(()), fused=True)
    upstream = Scaler("cpu", init_scale=2.0**24, growth_interval=5)
    for batch in batches:
        expected.append(warm_up_then_cosine(torch.tensor(count)))
        reading.param_groups[0]["lr"] = expected[-1].clone()
        scale_before = upstream.get_scale()
        backward(other, batch, upstream)
        upstream.step(reading)
        upstream.update()
        reading.zero_grad()
        count += upstream.get_scale() >= scale_before
    assert 2 < count < STEPS
    assert taken == count
    assert_same(lrs, expected)
    assert_same(dict(model.named_parameters()), dict(other.named_parameters()))
    assert all(state["step"] == count for state in optimizer.state.values())
