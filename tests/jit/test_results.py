"""No two results of a program share memory, and none shares memory with an input."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import jit
from funcamp._memory import overlaps
from tests.support.helpers import assert_same

CAPTURED = torch.arange(4.0)
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]


def step(state: Any, batch: Any) -> Any:
    """Every kind of result that is equal to another one or to an input, as one program: compiling takes long."""
    w = state["w"] + batch["x"]
    new = {"w": w, "ema": w + 0, "same": w, "old": state["w"] * 1, "kept": state["kept"], "view": w.view(2, 2)}
    of_the_state = {"w": w, "flat": w.view(2, 2).view(-1), "part": w[1:3], "expanded": w[:1].expand(4)}
    of_the_state |= {"kept": state["kept"], "old": state["w"], "bits": w.view(torch.int32)}
    sums = {"sum": w.sum(), "sum again": w.sum() + 0}
    others = {"batch": batch["x"], "batch part": batch["x"][2:]}
    others |= {"captured": CAPTURED, "captured view": CAPTURED.view(2, 2) * 1}
    x, ones = batch["x"], torch.ones(4)
    equal = [x * ones, x + torch.zeros(4), x - 0 * ones, x / ones, (x * 1)[1:] * 1, x.double().float()]
    equal += [x.view(2, 2).transpose(0, 1).mT.reshape(4) * 1, torch.cat([x]), CAPTURED * ones, state["w"] * ones]
    others |= {f"equal {number}": value for number, value in enumerate(equal)}
    return new, {**of_the_state, **sums, **others}


def start() -> Any:
    leaves = {name: torch.zeros(4) for name in ("w", "ema", "same", "old", "kept")}
    return {**leaves, "view": torch.zeros(2, 2)}


def tensors(*trees: Any) -> dict[str, Tensor]:
    return {f"{number} {name}": leaf for number, tree in enumerate(trees) for name, leaf in tree.items()}


@pytest.mark.parametrize("unroll", [None, 2])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_have_memory_of_their_own(backend: str, donate: bool, unroll: int | None) -> None:
    run, state, expected = jit(step, backend=backend, donate=donate, unroll=unroll), start(), start()
    known: dict[str, Tensor] = {"captured": CAPTURED}
    values: dict[str, Tensor] = {"captured": CAPTURED.clone()}
    for call in range(2):
        batch = {"x": torch.full((4,), call + 1.0)}
        rows = []
        for _ in range(unroll or 1):
            expected, metrics = step({name: leaf.clone() for name, leaf in expected.items()}, batch)
            rows.append({name: leaf.clone() for name, leaf in metrics.items()})
        stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]} if unroll else rows[0]
        given = {"x": batch["x"].expand(unroll, 4).clone()} if unroll else batch
        state, found = run(state, given)
        assert_same((state, found), ({name: leaf.clone() for name, leaf in expected.items()}, stacked))
        found_tensors = {
            f"{call} {name}": leaf for name, leaf in tensors(found, {} if donate else state, given).items()
        }
        known |= found_tensors
        values |= {name: leaf.clone() for name, leaf in found_tensors.items()}
    assert list(overlaps({**known, **tensors(state)} if donate else known)) == []
    assert_same(known, values)  # later calls changed none


def test_nothing_is_copied_if_no_result_shares_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    run = jit(lambda state, batch: (state + batch, {"a": state * 2}), backend="aot_eager", donate=False)
    state, _ = run(torch.zeros(4), torch.ones(4))
    counted = itertools.count()
    monkeypatch.setattr(Tensor, "clone", lambda *_: next(counted))
    run(state, torch.ones(4))
    assert next(counted) == 0
