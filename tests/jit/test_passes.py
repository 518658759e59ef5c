"""The list of what is done to a program: complete, explained, and each part can be left out."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from funcamp import _cpu, jit
from funcamp._cpu import part_inputs
from funcamp._jit import explain, passes
from funcamp._jit.passes import pipeline
from tests.support.launch import ROOT
from tests.support.steps import assert_as_eager

PARTS, WIDTH, CHANNELS = part_inputs.MANY, 4, 32
#: Without the passes of layers that not every program gets.
PASSES = (*passes.BEFORE_LAYERS, *_cpu.PASSES, *passes.AFTER_LAYERS)


def state() -> dict[str, Tensor]:
    return {
        "flat": torch.randn(PARTS * WIDTH),
        "kernel": torch.randn(CHANNELS, 1, 5, 5) / 5,
        "counts": torch.zeros(2, dtype=torch.int64),
    }


def step(state: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Any]:
    """Train small parts of one tensor, and a depthwise convolution."""
    flat, kernel = leaves = [state[name].detach().requires_grad_() for name in ("flat", "kernel")]
    out = F.conv2d(x, kernel, padding=2, groups=CHANNELS)
    for part in flat.split(WIDTH):
        out = torch.tanh(out + part.sum() * 0.1)
    out = 2 * out
    gate = torch.sigmoid(out)
    out.view(-1).mul_(0.5)  # what the gate has read is written through a view
    loss = (gate * out).square().mean()
    new = [leaf.detach() - 0.1 * grad for leaf, grad in zip(leaves, torch.autograd.grad(loss, leaves))]
    # The second count is the first one's old value: a write back in another order than that of the leaves.
    counts = torch.stack([state["counts"][0] + 1, state["counts"][0]])
    return {"flat": new[0], "kernel": new[1], "counts": counts}, loss.detach()


def halves() -> list[list[str]]:
    """All passes, and random halves of them with the other halves: each is left out beside most of the others."""
    names = sorted(one.name for one in PASSES)
    random = Random(0)
    found = [list(names)]
    for _ in range(4):
        random.shuffle(names)
        middle = len(names) // 2
        found += [sorted(names[:middle]), sorted(names[middle:])]
    return found


@pytest.mark.thorough
@pytest.mark.inductor
@pytest.mark.parametrize("without", halves(), ids=lambda without: f"without {len(without)}")
def test_a_program_without_some_of_them_computes_the_same(without: list[str]) -> None:
    """This step meets no defect of torch; where the reason is one, the other tests fail without it."""
    assert_as_eager(step, jit(step, without=without), state(), torch.randn(3, 2, CHANNELS, 6, 6), 1e-5)


def test_each_says_why_and_what_shows_it() -> None:
    assert len({one.name for one in pipeline()}) == len([*pipeline()]) == len(explain.names())
    for one in pipeline():
        assert 20 < len(one.why) < 120
        assert one.evidence
        for file in re.findall(r"(?:tests|benchmarks)/[\w/.-]+", one.evidence):
            assert (ROOT / file).exists(), f"{one.name}: {file}"


def test_one_that_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(program: Any) -> Any:
        raise KeyError("x")

    monkeypatch.setattr(passes, "pipeline", lambda: [passes.views.PASS._replace(run=run, where=lambda _: True)])
    with pytest.raises(RuntimeError, match="pass 'views' raises KeyError: 'x'"):
        jit(step, backend="eager")(state(), torch.randn(2, CHANNELS, 6, 6))


def test_explain_prints_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    run = jit(lambda state, batch: (state + batch, None), backend="eager", explain=True, without=["whole_operations"])
    run(torch.ones(2), torch.ones(2))
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "funcamp.jit: a program for eager on cpu:"
    assert re.fullmatch(r" +whole_operations +.*\(left out\)", printed[1])
