"""`numerics_report` and the loss scale: the one of the run, the one it recommends, and why none helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import funcamp
from funcamp import ScalerConfig, jit, make_train_step, module_loss, stateless
from funcamp.report import NumericsReport, numerics_report

SGD = stateless(torch.optim.SGD, lr=0.0)
ROADS = pytest.mark.parametrize("how", ["torch", "GradScaler", "step", "jit"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.between(torch.tanh(self.first(x)))))
        return out

    def between(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(x)
        return out


class Overflows(Net):
    """The forward pass is infinite in float16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3e4 * 1e3


class RootOfZero(Net):
    """The loss is finite; its gradient is NaN at every scale."""

    def between(self, x: Tensor) -> Tensor:
        return super().between(x) + torch.sqrt(x.float() * 0)


def times(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda out, target: F.mse_loss(out.float(), target) * factor


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def made(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind()


def amp(scaler: Any, model: nn.Module, criterion: Any) -> None:
    with torch.autocast("cpu", torch.float16):
        out = model(batch()[0])
    scaler.scale(criterion(out, batch()[1])).backward()


def report_of(how: str, model: Net, criterion: Any, scale: float) -> NumericsReport:
    """The report of one step at a loss scale, by four roads."""
    if how in ("torch", "GradScaler"):
        kind: Any = torch.amp.GradScaler if how == "torch" else funcamp.GradScaler
        return numerics_report(lambda: amp(kind("cpu", init_scale=scale), model, criterion), module=model)
    step: Any = make_train_step(module_loss(model, criterion), SGD, ScalerConfig(scale), policy="float16")
    state = step.init()
    return numerics_report(jit(step) if how == "jit" else step, state, batch(), module=model)


def are_finite(criterion: Any, scale: float) -> bool:
    """Whether the gradients of a float16 step are finite at a loss scale."""
    model = made()
    amp(torch.amp.GradScaler("cpu", init_scale=scale), model, criterion)
    return all(value.grad is None or bool(value.grad.isfinite().all()) for value in model.parameters())


@pytest.mark.compiled
@ROADS
@pytest.mark.parametrize(("factor", "scale"), [(1.0, 2.0**10), (1e-7, 2.0**24)])
def test_the_recommended_scale_works_at_once_and_gradients_are_shown_without_scale(
    how: str, factor: float, scale: float
) -> None:
    criterion = times(factor)
    report = report_of(how, made(), criterion, scale)
    assert report.loss_scale == scale
    advice = report.recommend_scale(headroom=1.0)
    assert not advice.is_upper_bound
    assert are_finite(criterion, advice.scale)
    assert not are_finite(criterion, 4 * advice.scale)  # magnitudes are rounded up to a power of two
    assert report.recommend_scale().scale == advice.scale / 2
    model, (x, y) = made(), batch()
    plain = numerics_report(lambda: criterion(model(x), y), module=model)
    for path, record in report.records.items():
        expected = plain.records[path].backward.std.item()
        assert record.backward.std.item() == pytest.approx(expected, rel=2e-2)
    assert report.operations[-1].backward  # nothing of the optimizer


@pytest.mark.compiled
@ROADS
@pytest.mark.parametrize(("kind", "operation", "backward"), [(Overflows, "mul", False), (RootOfZero, "div", True)])
def test_no_scale_helps_and_the_operation_at_fault_is_named(
    how: str, kind: type[Net], operation: str, backward: bool
) -> None:
    report = report_of(how, made(kind), times(1.0), 2.0**10)
    cause, first = report.cause(), report.first_nonfinite()
    assert cause is not None
    assert first is not None
    assert first.operation is cause.operation
    assert (cause.operation.name, cause.operation.backward) == (operation, backward)
    assert (cause.kind, cause.made) == ("inf", True)
    assert cause.operation.line is not None
    file, line = cause.operation.line
    assert f"class {kind.__name__}(" in "".join(Path(file).read_text().splitlines(keepends=True)[line - 6 : line])
    said = "\n".join(report.summary())
    assert f"No loss scale helps: the {'gradients are' if backward else 'loss is'} inf or NaN" in said
    assert f"at {__file__}:{line}" in said
    with pytest.raises(ValueError, match="recommend_scale: the gradients must be finite at some loss scale; got "):
        report.recommend_scale()


def test_a_scale_that_is_too_high_is_no_fault_and_bounds_the_right_one() -> None:
    report = report_of("torch", made(), times(1.0), 2.0**40)
    assert report.cause() is None
    advice = report.recommend_scale()
    assert advice.is_upper_bound
    assert advice.scale <= 2.0**39
    assert "Loss scale for float16: at most" in "\n".join(report.summary())
    assert "inf of 12))" in report.annotate()


def test_a_scale_may_be_passed_overflow_the_loss_or_be_disabled() -> None:
    model, (x, y) = made(), batch()
    report = numerics_report(lambda: times(2.0**10)(model(x), y), module=model, loss_scale=2.0**10)
    plain = numerics_report(lambda: times(1.0)(model(x), y), module=model)
    assert report.loss_scale == 2.0**10
    assert report.recommend_scale().scale == plain.recommend_scale().scale
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    report = numerics_report(lambda: scaler.scale(model(x).sum() * 1e-6 + 1e36).backward(), module=model)
    assert report.first_nonfinite() is report.cause() is None
    assert report.recommend_scale().scale > 1
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert numerics_report(lambda: scaler.scale(model(x).sum()).backward()).loss_scale == 1.0


def test_each_backward_pass_has_its_scale() -> None:
    model, (x, y) = made(), batch()
    step = make_train_step(module_loss(model, times(1.0)), SGD, ScalerConfig(2.0**10), policy="float16", accumulate=2)
    report = numerics_report(step, step.init(), (x.reshape(2, 2, 6), y.reshape(2, 2, 3)), module=model)
    assert [one.loss_scale for one in report.passes] == [2.0**10] * 2

    model = made()

    def penalized() -> None:
        given = x.requires_grad_()
        (inner,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
        torch.amp.GradScaler("cpu", init_scale=2.0**10).scale(inner.square().sum()).backward()

    report = numerics_report(penalized, module=model)
    assert [one.loss_scale for one in report.passes] == [1.0, 2.0**10]
    assert report.recommend_scale().scale > 1
