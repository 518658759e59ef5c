"""The auditor against loops with one mistake each, their right twins, and right loops of other forms."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

from funcamp.report.audit import Auditor
from funcamp.report.rules import RULES
from tests.report.loops.parts import batches, model_and_optimizer, scaler_of
from tests.report.scripts import LOOPS, RIGHT_LOOPS, run, watch
from tests.support.helpers import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:.*reentrant:UserWarning")


def rule_of(loop: str) -> str:
    return loop.partition("--")[0]


def test_each_rule_has_a_loop() -> None:
    assert set(map(rule_of, LOOPS)) == {rule.name for rule in RULES}


def marked_lines(path: Path) -> list[int]:
    """The numbers of the lines that the auditor must name."""
    lines = path.read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith("# wrong")]


@pytest.mark.parametrize("name", LOOPS)
def test_the_mistake_is_named_with_its_line_and_nothing_else(name: str) -> None:
    (finding,) = watch(LOOPS[name]).findings()
    assert finding.rule.name == rule_of(name)
    assert finding.line.file == str(LOOPS[name])
    assert [finding.line.number] == marked_lines(LOOPS[name])


@pytest.mark.parametrize("name", LOOPS)
def test_the_right_twin_has_no_finding(name: str) -> None:
    auditor = Auditor()
    with auditor.watching():
        run(LOOPS[name], "--right")
    assert auditor.passes >= 6
    assert auditor.findings() == []


@pytest.mark.parametrize("name", RIGHT_LOOPS)
def test_a_right_loop_has_no_finding_and_the_auditor_changes_no_number(name: str) -> None:
    auditor = Auditor()
    with auditor.watching():
        audited = run(RIGHT_LOOPS[name])
    assert auditor.passes >= 6
    assert auditor.findings() == []
    with torch.compiler.set_stance("force_eager"):  # as under the auditor
        alone = run(RIGHT_LOOPS[name])
    modules = [key for key, value in alone.items() if isinstance(value, torch.nn.Module)]
    assert_same(*[[dict(names[key].named_parameters()) for key in modules] for names in (audited, alone)])


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
