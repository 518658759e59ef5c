"""The auditor against loops with one mistake each, their right twins, and right loops of other forms."""

from __future__ import annotations

import contextlib
import gc
import runpy
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

from funcamp.report.audit import Auditor
from funcamp.report.rules import RULES
from tests.report.loops.parts import batches, model_and_optimizer, scaler_of
from tests.report.scripts import LOOPS, RIGHT_LOOPS, marked_lines, watch
from tests.support.helpers import assert_same

#: Right findings besides the mistake of a loop: to divide by the scale is to read it.
BESIDES = {"loss-over-updated-scale": {"scale-read-each-step"}}

pytestmark = pytest.mark.filterwarnings(
    "ignore:Detected call of `lr_scheduler.step:UserWarning", "ignore:.*reentrant:UserWarning"
)


def test_each_rule_has_a_loop() -> None:
    assert set(LOOPS) == {rule.name for rule in RULES}
    assert len(LOOPS) >= 30


@pytest.mark.parametrize("name", LOOPS)
def test_the_mistake_is_named_with_its_line_and_nothing_else(name: str) -> None:
    findings = watch(LOOPS[name], raises=True).findings()
    names = {finding.rule.name for finding in findings}
    assert names - BESIDES.get(name, set()) == {name}
    (finding,) = [finding for finding in findings if finding.rule.name == name]
    assert finding.line.file == str(LOOPS[name])
    assert {finding.line.number} == marked_lines(LOOPS[name])


@pytest.mark.parametrize("name", LOOPS)
def test_the_right_twin_has_no_finding(name: str) -> None:
    auditor = watch(LOOPS[name], "--right")
    assert auditor.passes >= 6
    assert auditor.findings() == []


def trained(path: Path, *, audited: bool) -> list[torch.Tensor]:
    """The parameters after a script, with or without the auditor."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(sys, "argv", [str(path)])
        if audited:
            stack.enter_context(Auditor().watching())
        names = runpy.run_path(str(path), run_name="__main__")
    return list(names["model"].parameters())


@pytest.mark.parametrize(
    "name", ["typical", "accumulation", "gradient_penalty", "funcamp_scaler", "plain", "iterators"]
)
def test_the_auditor_changes_no_number(name: str) -> None:
    assert_same(trained(RIGHT_LOOPS[name], audited=True), trained(RIGHT_LOOPS[name], audited=False))


def test_the_auditor_keeps_no_batch_and_no_graph() -> None:
    model, optimizer = model_and_optimizer()
    scaler = scaler_of()
    references = []
    with Auditor().watching():
        for x, y in batches():
            optimizer.zero_grad()
            scaler.scale(mse_loss(model(x.requires_grad_()), y)).backward(retain_graph=True)
            scaler.step(optimizer)
            scaler.update()
            references.append(weakref.ref(x))
            del x, y
        gc.collect()
        assert [reference() for reference in references] == [None] * 6


@pytest.mark.parametrize("name", RIGHT_LOOPS)
def test_a_right_loop_has_no_finding(name: str) -> None:
    auditor = watch(RIGHT_LOOPS[name])
    assert auditor.passes >= 6
    assert auditor.findings() == []
