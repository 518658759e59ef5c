"""`numerics_report` on runs that overflow: the scale it recommends works at once, or it says why none does."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import funcamp
from funcamp import ScalerConfig, init, jit, make_train_step, module_loss, stateless
from funcamp.__main__ import main
from funcamp.numerics import NumericsReport, numerics_report, stats
from funcamp.report.numbers.backward_passes import Operation, Trial, find_largest_scale

SGD = stateless(torch.optim.SGD, lr=0.0)


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


def steered(x: Tensor, factor: float | Tensor) -> Tensor:
    """x, its gradient times a factor."""
    return x.detach() + (x - x.detach()) * factor


class Steep(Net):
    """The gradient of the first layer is orders larger than that of the last."""

    def between(self, x: Tensor) -> Tensor:
        return super().between(steered(x, 512.0))


class Flat(Net):
    """The gradient of the first layer is orders smaller than that of the last."""

    def between(self, x: Tensor) -> Tensor:
        return super().between(steered(x, 2.0**-10))


class Uneven(Net):
    """Half of one gradient is orders larger than the other half."""

    def between(self, x: Tensor) -> Tensor:
        return super().between(steered(x, torch.tensor([1024.0] * 4 + [1.0] * 4)))


class Revived(Net):
    """A gradient that float16 flushes to zero without a loss scale, multiplied by much further down."""

    def between(self, x: Tensor) -> Tensor:
        return steered(super().between(steered(x, 2.0**12)), 2.0**-12)


class Overflows(Net):
    """The forward pass is infinite in float16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3e4 * 1e3


class ZeroByZero(Net):
    def between(self, x: Tensor) -> Tensor:
        return super().between(x) / x.sum(1, keepdim=True).mul(0).float() * 0


class RootOfZero(Net):
    """The loss is finite; its gradient is NaN at every scale."""

    def between(self, x: Tensor) -> Tensor:
        return super().between(x) + torch.sqrt(x.float() * 0)


def times(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda out, target: F.mse_loss(out.float(), target) * factor


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def made(kind: type[Net]) -> Net:
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
    loss_fn = module_loss(model, criterion, engine="func" if how == "jit" else "autograd")
    step: Any = make_train_step(loss_fn, SGD, ScalerConfig(scale), policy="float16")
    if how == "jit":
        step = jit(step)
        return numerics_report(step, step._step.init(), batch(), module=model)
    return numerics_report(step, step.init(), batch(), module=model)


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, funcamp.GradScaler])
def test_a_disabled_scaler_has_no_scale_and_the_loop_runs(kind: Any) -> None:
    model = nn.Linear(4, 1)
    scaler = kind("cpu", enabled=False)
    report = numerics_report(lambda: scaler.scale(model(torch.ones(2, 4)).sum()).backward(), module=model)
    assert report.loss_scale == 1.0
    assert model.weight.grad is not None


def gradients(model: Net, criterion: Any, scale: float) -> list[Tensor]:
    model.zero_grad()
    amp(torch.amp.GradScaler("cpu", init_scale=scale), model, criterion)
    return [torch.zeros_like(value) if value.grad is None else value.grad for value in model.parameters()]


def is_finite(grads: list[Tensor]) -> bool:
    return all(bool(grad.isfinite().all()) for grad in grads)


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("how", ["torch", "GradScaler", "step", "jit"])
@pytest.mark.parametrize(
    ("kind", "factor"),
    [(Net, 1.0), (Net, 1e8), (Net, 1e20), (Net, 1e-7), (Steep, 1.0), (Flat, 1.0), (Uneven, 1.0), (Revived, 1.0)],
)
def test_recommended_scale_works_at_once(how: str, kind: type[Net], factor: float) -> None:
    model, criterion = made(kind), times(factor)
    wide = torch.autograd.grad(criterion(model(batch()[0]), batch()[1]), list(model.parameters()))
    for scale in (2.0**60, 2.0**24, 1.0):
        report = report_of(how, made(kind), criterion, scale)
        assert report.loss_scale == scale
        advice = report.recommend_scale(headroom=1.0)
        assert is_finite(gradients(model, criterion, advice.scale))
        assert not is_finite(gradients(model, criterion, 2 * advice.scale))
        safe = report.recommend_scale()
        assert safe.scale == advice.scale / 2
        assert not safe.is_upper_bound
        lost = sum(
            int(((grad == 0) & (want != 0)).sum()) for grad, want in zip(gradients(model, criterion, safe.scale), wide)
        )
        assert lost <= 0.02 * sum(want.numel() for want in wide)
        assert safe.underflow <= 0.02


@pytest.mark.compiled
@pytest.mark.parametrize("how", ["torch", "GradScaler", "step", "jit"])
def test_gradients_are_shown_without_the_scale_that_the_step_applied(how: str) -> None:
    report = report_of(how, made(Net), times(1.0), 2.0**10)
    x, y = batch()
    model = made(Net)
    plain = numerics_report(lambda: times(1.0)(model(x), y), module=model)
    for path, record in plain.records.items():
        ours = report.unscaled_records()[path]
        assert ours.backward.std.item() == pytest.approx(record.backward.std.item(), rel=2e-2)
        assert report.records[path].backward.std.item() == pytest.approx(record.backward.std.item() * 2**10, rel=2e-2)
    assert f"<- {plain.records['last'].backward.std:.2g}"[:6] in report.annotate()
    assert {one.loss_scale for one in report.operations if one.backward} == {2.0**10}


@pytest.mark.compiled
@pytest.mark.parametrize("how", ["torch", "GradScaler", "step", "jit"])
def test_gradients_of_a_run_that_overflows_are_measured_where_they_are_finite(how: str) -> None:
    report, fine = (report_of(how, made(Net), times(1.0), scale) for scale in (2.0**40, 2.0**10))
    assert "0 NaN" not in report.annotate()
    assert "inf of 12))" in report.annotate()
    for path, record in fine.unscaled_records().items():
        ours = report.unscaled_records()[path].backward
        assert (ours.count.item(), ours.nonfinite.item()) == (record.backward.count.item(), 0)
        assert ours.std.item() == pytest.approx(record.backward.std.item(), rel=2e-2)
    assert report.operations[-1].backward  # nothing of the optimizer


@pytest.mark.compiled
@pytest.mark.parametrize("scale", [2.0**16, 1.0])
@pytest.mark.parametrize("how", ["torch", "GradScaler", "step", "jit"])
@pytest.mark.parametrize(
    ("kind", "operation", "backward"),
    [(Overflows, "mul", False), (ZeroByZero, "div", False), (RootOfZero, "div", True)],
)
def test_no_scale_helps_and_the_operation_at_fault_is_named(
    how: str, kind: type[Net], operation: str, backward: bool, scale: float
) -> None:
    report = report_of(how, made(kind), times(1.0), scale)
    cause = report.cause()
    assert cause is not None
    assert (cause.operation.name, cause.operation.backward, cause.made) == (operation, backward, True)
    assert cause.operation.line is not None
    file, line = cause.operation.line
    assert f"class {kind.__name__}(" in "".join(Path(file).read_text().splitlines(keepends=True)[line - 6 : line])
    said = "\n".join(report.summary())
    assert f"No loss scale helps: the {'gradients are' if backward else 'loss is'} inf or NaN" in said
    assert f"at {__file__}:{line}" in said
    assert "flushed" not in said
    with pytest.raises(ValueError, match="recommend_scale: the gradients must be finite at some loss scale; got "):
        report.recommend_scale()


def test_a_layer_at_fault_is_named() -> None:
    model = made(Net)
    with torch.no_grad():
        model.second.weight.mul_(1e6)
    report = report_of("step", model, times(1.0), 2.0**16)
    cause = report.cause()
    assert cause is not None
    assert "forward" in str(cause)
    assert report_of("torch", model, times(1.0), 1.0).cause() is not None


def test_a_loss_that_overflows_by_its_scale_alone_is_no_fault() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    report = numerics_report(lambda: scaler.scale(model(x).sum() * 1e-6 + 1e36).backward(), module=model)
    assert report.cause() is None
    assert report.first_nonfinite() is None
    assert report.recommend_scale().scale > 1


def test_half_of_a_gradient_infinite_is_shown_by_counts() -> None:
    layer = nn.Linear(4, 4)

    def loss() -> None:
        with torch.autocast("cpu", torch.float16):
            out = layer(torch.ones(2, 4))
        (out.float() * torch.tensor([1e9, 1e9, 0.0, 0.0])).sum().backward()

    report = numerics_report(loss, module=layer)
    assert report.annotate().endswith("<- 5.34e+08 (4 inf of 8))")
    assert str(report.records[""]).endswith("<- 0 (4 inf of 8))")
    assert report.unscaled_records()[""].backward.nonfinite == 0
    assert report.to_rows()[0]["posinf"] == 0
    record = funcamp.numerics.Record(stats(torch.ones(2)), stats(torch.tensor([math.nan, -math.inf, 1.0, 2.0])))
    assert str(record) == "(-> 0, <- 0.707 (1 NaN, 1 inf of 4))"


@pytest.mark.parametrize(("scale", "underflow", "zero"), [(2.0**12, 0.5, 0.0), (1.0, 0.0, 0.5)])
def test_what_the_scale_that_works_flushes_is_counted(scale: float, underflow: float, zero: float) -> None:
    large, small = (torch.ones(4, dtype=torch.float16, requires_grad=True) for _ in range(2))

    def loss() -> None:
        both = (large.float() * 1e6).sum() + (small.float() * 1e-8).sum()  # one overflows, one is flushed
        torch.amp.GradScaler("cpu", init_scale=scale).scale(both).backward()

    report = numerics_report(loss)
    advice = report.recommend_scale()
    assert (advice.scale, advice.underflow, advice.zero) == (2.0**-5, underflow, zero)
    assert ("50 % more are zero at each scale seen." in "\n".join(report.summary())) == (zero > 0)


def test_scale_multiplied_by_hand_is_measured_too() -> None:
    model, criterion = made(Net), times(2.0**30)
    x, y = batch()

    def loss() -> None:
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        criterion(out, y).backward()

    report = numerics_report(loss, module=model, loss_scale=2.0**30)
    assert report.loss_scale == 2.0**30
    advice = report.recommend_scale(headroom=1.0)
    assert is_finite(gradients(model, times(1.0), advice.scale))
    assert not is_finite(gradients(model, times(1.0), 2 * advice.scale))


def test_a_loss_in_half_precision_has_a_scale() -> None:
    weight = torch.full((4,), 1e-3, dtype=torch.float16, requires_grad=True)
    report = numerics_report(lambda: (weight * 1000).sum() * 1000)  # its gradient, 10^6, is none of float16's
    assert report.recommend_scale(headroom=1.0).scale == 2.0**-4


def test_a_pass_that_cannot_be_repeated_gives_a_bound_and_says_what_to_do() -> None:
    model, criterion = made(Net), times(1e8)
    x, y = batch()

    def loss() -> None:
        with torch.autocast("cpu", torch.float16):
            out = checkpoint(model, x.requires_grad_(), use_reentrant=True)
        torch.amp.GradScaler("cpu", init_scale=2.0**16).scale(criterion(out, y)).backward()

    report = numerics_report(loss, module=model)
    advice = report.recommend_scale()
    assert advice.is_upper_bound
    assert advice.scale < 1.0  # what is finite is seen: the gradient of the loss in float32
    said = "\n".join(report.summary())
    assert "the gradients overflow; it could not be repeated at others" in said
    assert "Run this report once in float32 or bfloat16" in said
    assert f"Loss scale for float16: at most {advice.scale:g}" in said
    wide = numerics_report(lambda: criterion(model(x), y), module=model).recommend_scale()  # as it says
    assert not wide.is_upper_bound
    assert is_finite(gradients(model, criterion, wide.scale))


def test_a_hook_that_raises_when_called_again_leaves_a_bound() -> None:
    model, calls = made(Net), []

    def once(grad: Tensor) -> None:
        calls.append(grad)
        if len(calls) > 1:
            raise ArithmeticError("twice")

    model.first.weight.register_hook(once)
    report = report_of("torch", model, times(1.0), 2.0**30)
    assert report.passes[0].obstacle == "twice"
    assert report.recommend_scale().is_upper_bound


def test_repeating_writes_nothing() -> None:
    model, plain = made(Net), made(Net)
    report_of("torch", model, times(1.0), 2.0**10)
    amp(torch.amp.GradScaler("cpu", init_scale=2.0**10), plain, times(1.0))
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("how", ["checkpoint", "vmap", "penalty", "accumulate", "sparse"])
def test_roads_of_a_backward_pass(how: str) -> None:
    model, (x, y) = made(Net), batch()
    config, kept = ScalerConfig(2.0**40), module_loss(model, times(1.0))
    if how == "accumulate":
        step = make_train_step(kept, SGD, config, policy="float16", accumulate=2)
        report = numerics_report(step, step.init(), (x.reshape(2, 2, 6), y.reshape(2, 2, 3)), module=model)
        assert len(report.passes) == 2
        assert "Backward pass 2: at the loss scale" in "\n".join(report.summary())
    elif how == "checkpoint":

        def loss() -> Any:
            with torch.autocast("cpu", torch.float16):
                out = checkpoint(model, x, use_reentrant=False)
            torch.amp.GradScaler("cpu", init_scale=2.0**40).scale(times(1.0)(out, y)).backward()

        report = numerics_report(loss, module=model)
    elif how == "vmap":

        def one(state: Any, params: Any) -> Any:
            return funcamp.scaled_grad_and_value(lambda p: kept({n: v.half() for n, v in p.items()}, (x.half(), y)))(
                state, params
            )

        states = torch.vmap(lambda scale: init()._replace(scale=scale))(torch.tensor([2.0**40, 2.0**40]))
        params = {name: torch.stack([value, value]) for name, value in kept.params().items()}
        report = numerics_report(torch.vmap(one), states, params, module=model)
    elif how == "penalty":

        def penalized() -> None:
            given = x.half().requires_grad_()
            out = model.half()(given).float().sum() * 2.0**10
            (inner,) = torch.autograd.grad(out, given, create_graph=True)
            torch.amp.GradScaler("cpu", init_scale=2.0**40).scale(inner.float().square().sum()).backward()

        report = numerics_report(penalized, module=model)
        assert [one.loss_scale for one in report.passes] == [1.0, 2.0**40]
    else:
        words = nn.Embedding(5, 4, sparse=True).half()
        report = numerics_report(
            lambda: (
                torch.amp.GradScaler("cpu", init_scale=2.0**40)
                .scale(words(torch.tensor([1, 2])).float().sum())
                .backward()
            ),
            module=words,
        )
        assert report.recommend_scale(headroom=1.0).scale == 2.0**15
    assert report.loss_scale == 2.0**40
    assert not report.passes[-1].finite
    assert report.passes[-1].largest_scale is not None
    assert report.recommend_scale().scale <= report.passes[-1].largest_scale / 2


def test_scale_of_every_pass_is_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    arguments = ["report", "--out", str(tmp_path / "out"), "--passes", "2", str(script)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    for index, scale in enumerate((2**24, 2**23)):
        assert f"Backward pass {index + 1}: at the loss scale {scale}" in said


SCRIPT = """
import sys
import torch
import torch.nn.functional as F
import funcamp

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
loss_fn = funcamp.module_loss(model, lambda out, target: F.mse_loss(out.float(), target))
config = funcamp.ScalerConfig(2.0**24)
sgd = funcamp.stateless(torch.optim.SGD, lr=0.1)
step = plain = funcamp.make_train_step(loss_fn, sgd, config, policy="float16")
if "jit" in sys.argv:
    step = funcamp.jit(step)
if "compile" in sys.argv:
    step = torch.compile(step, fullgraph=True)
state = plain.init()
for index in range(4):
    state, metrics = step(state, (torch.randn(4, 6), torch.randn(4, 3)))
print("ended")
"""


@pytest.mark.parametrize("own", [[], ["jit"], ["compile"]])
def test_command_finds_the_scale_of_a_step(own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert main(["report", "--watch", "1", "--out", str(tmp_path / "out"), str(script), "--", *own]) == 0
    said = capsys.readouterr().out
    assert "ended" not in said
    assert "Loss scale in this run: 16777216 (2^24)." in said
    assert "the gradients overflow; repeated at others, they are finite up to" in said
    page = (tmp_path / "out" / "report.html").read_text()
    assert "gradients are times the loss scale, 16777216 (2^24)" in page
    assert "gradients are times the loss scale, 16777216" in (tmp_path / "out" / "report.txt").read_text()


def test_ranks_are_not_left_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    report = report_of("torch", made(Net), times(1.0), 2.0**30)
    assert report.passes[0].obstacle == "other ranks may not repeat it too"
    assert report.recommend_scale().is_upper_bound


@pytest.mark.parametrize("limit", [-120, -37, -9, -8, -1, 0, 1, 5, 40, 100, None])
@pytest.mark.parametrize("seen", [True, False])
def test_search_finds_the_largest_scale_with_few_trials(limit: int | None, seen: bool) -> None:
    tried = []

    def again(place: int) -> Trial:
        tried.append(place)
        amax = 2.0 ** (16 - limit + place) if seen and limit is not None else 0.0
        about = (True, "", "mul", 0, torch.float16, (1,))
        one = Operation(*about, stats(torch.tensor([amax])), torch.zeros(2, dtype=torch.bool), 1.0)
        return Trial([one], limit is not None and place <= limit, {})

    found, _ = find_largest_scale(again, -120, 100)
    assert found == limit
    assert len(tried) == len(set(tried)) <= (6 if seen else 12)
