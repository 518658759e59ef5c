"""Mistakes that look otherwise than in their loops, each with what is right."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss, mse_loss

from funcamp.__main__ import main
from funcamp.report.audit import Auditor, Finding
from tests.report.loops.parts import batches, losses, model_and_optimizer, scaler_of
from tests.report.scripts import LOOPS, watch
from tests.report.training import names


def accumulate(loss_of: Callable[[Tensor, Tensor], Tensor]) -> list[str]:
    """The findings of a loop with windows of three micro-batches."""
    auditor = Auditor()
    with auditor.watching():
        model, optimizer = model_and_optimizer()
        scaler = scaler_of()
        for number, (x, y) in enumerate(batches(), 1):
            scaler.scale(loss_of(model(x), y)).backward()
            if number % 3 == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return names(auditor)


def test_a_sum_of_two_means_is_to_be_divided_too() -> None:
    assert accumulate(lambda outputs, y: mse_loss(outputs, y) + 0.1 * l1_loss(outputs, y)) == [
        "accumulation-not-divided"
    ]
    assert accumulate(lambda outputs, y: (mse_loss(outputs, y) + 0.1 * l1_loss(outputs, y)) / 3) == []
    assert accumulate(lambda outputs, y: mse_loss(outputs, y) / 3 + l1_loss(outputs, y) / 3) == []


def test_a_sum_that_is_divided_by_the_samples_of_all_micro_batches_is_divided() -> None:
    assert accumulate(lambda outputs, y: (outputs - y).square().sum() / 9) == []
    assert accumulate(lambda outputs, y: 0.5 * mse_loss(outputs, y) + 0.1 * l1_loss(outputs, y)) == []


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize(("scale", "expected"), [(2.0**60, ["scheduler-on-skipped"]), (2.0**10, [])])
def test_a_fused_optimizer_skips_its_step_itself(scale: float, expected: list[str]) -> None:
    auditor = Auditor()
    with auditor.watching():
        model, _ = model_and_optimizer()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        scaler = scaler_of(scale)
        for loss in losses(model):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    assert names(auditor) == expected


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float16, ["model-half-with-scaler"]), (torch.float32, [])])
def test_a_model_that_is_cast_by_to(dtype: torch.dtype, expected: list[str]) -> None:
    auditor = Auditor()
    with auditor.watching(), contextlib.suppress(ValueError):
        model, optimizer = model_and_optimizer()
        model.to("cpu", dtype=dtype)
        scaler = scaler_of()
        for x, y in batches():
            optimizer.zero_grad()
            scaler.scale(mse_loss(model(x.to(dtype)).float(), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert names(auditor) == expected


@pytest.mark.parametrize(("own_loss", "expected"), [(True, ["optimizer-not-stepped"]), (False, [])])
def test_in_a_run_that_is_cut_a_discriminator_may_be_stepped_later(own_loss: bool, expected: list[str]) -> None:
    auditor = Auditor(8)
    with auditor.watching():
        model, optimizer = model_and_optimizer()
        judge, judge_optimizer = nn.Linear(1, 1), torch.optim.SGD
        own_optimizer = judge_optimizer(judge.parameters(), lr=0.1)
        scaler = scaler_of()
        for x, y in batches(20):
            optimizer.zero_grad()
            own_optimizer.zero_grad()
            scaler.scale(mse_loss(judge(model(x)), y)).backward()
            if own_loss:
                scaler.scale(judge(y).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert names(auditor) == expected


@dataclasses.dataclass
class Parts:
    """A checkpoint that is no dict."""

    optimizer: dict[str, Any]
    scaler: dict[str, Any] | None


@pytest.mark.parametrize(("saves_scaler", "expected"), [(False, ["checkpoint-without-scaler"]), (True, [])])
def test_a_checkpoint_may_be_a_dataclass(saves_scaler: bool, expected: list[str]) -> None:
    auditor = Auditor()
    with auditor.watching():
        model, optimizer = model_and_optimizer()
        scaler = scaler_of()
        for x, y in batches():
            optimizer.zero_grad()
            scaler.scale(mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        torch.save(Parts(optimizer.state_dict(), scaler.state_dict() if saves_scaler else None), io.BytesIO())
    assert names(auditor) == expected


@pytest.mark.parametrize(("before_step", "expected"), [(True, {"cleared-before-step"}), (False, set())])
def test_gradients_that_are_cleared_one_by_one(before_step: bool, expected: set[str]) -> None:
    def clear(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    auditor = Auditor()
    with auditor.watching():
        model, optimizer = model_and_optimizer()
        scaler = scaler_of()
        for x, y in batches():
            scaler.scale(mse_loss(model(x), y)).backward()
            if before_step:
                clear(model)
            scaler.step(optimizer)
            scaler.update()
            if not before_step:
                clear(model)
    assert set(names(auditor)) == expected


def test_a_mistake_is_named_although_torch_raises_before_the_first_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nscores = torch.zeros(2, 2).half()\nscores.masked_fill(scores == 0, -1e9)\n")
    with pytest.raises(RuntimeError, match="without overflow"):
        main(["report", str(script)])
    assert "constant-beyond-float16" in capsys.readouterr().out


def skipping(*, applied: int, skipped: int, init_scale: float) -> Auditor:
    """A loop whose last passes take the root of 0."""
    auditor = Auditor()
    with auditor.watching():
        model, optimizer = model_and_optimizer()
        scaler = scaler_of(init_scale)
        for number, (x, _) in enumerate(batches(applied + skipped)):
            optimizer.zero_grad()
            outputs = model(x)
            scaler.scale(
                (outputs - outputs.detach() * (number >= applied)).norm(dim=1).square().sqrt().mean()
            ).backward()
            scaler.step(optimizer)
            scaler.update()
    return auditor


def test_skipped_steps_are_no_finding_if_they_are_few_or_the_first_scale_may_be_too_high() -> None:
    assert names(skipping(applied=1, skipped=7, init_scale=2.0**10)) == []
    assert names(skipping(applied=0, skipped=10, init_scale=2.0**10)) == []
    assert names(skipping(applied=0, skipped=12, init_scale=2.0**10)) == ["each-step-skipped"]


def finding_of(name: str) -> Finding:
    """The finding of the loop with a mistake."""
    (finding,) = watch(LOOPS[name], raises=True).findings()
    return finding


@pytest.mark.parametrize("name", ["optimizer-not-unscaled", "optimizer-not-stepped"])
def test_a_finding_on_one_of_several_optimizers_names_it(name: str) -> None:
    assert re.fullmatch(r"SGD, made at .*parts.py:\d+", finding_of(name).detail)
