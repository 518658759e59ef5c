"""What `funcamp.numerics` refuses: what is called, the error, and words that it must have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from funcamp import module_loss
from funcamp.numerics import Records, probe, stats, tap, track_scales
from tests.support.helpers import assert_refused

RECORD = stats(torch.ones(2))
RECORDS: Any = Records.of({"a": probe()})
MODEL = nn.Linear(2, 2)
COMPILED: Any = torch.compile(MODEL)
WITH_COMPILED_LAYER = nn.Sequential(nn.Linear(2, 2))
WITH_COMPILED_LAYER[0].compile()
LOSS = module_loss(MODEL, F.mse_loss)
track: Any = track_scales
INTEGERS = torch.ones(2, dtype=torch.int64)
BATCH = (torch.ones(1, 2), torch.ones(1, 2))

#: What is called, the error, and its words.
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "integers": (lambda: stats(INTEGERS), TypeError, "stats: x must be a strided floating-point or complex tensor; got .*int64"),
    "a number": (lambda: stats(1.0), TypeError, "stats: x must be"),  # type: ignore[arg-type]
    "a sparse tensor": (lambda: stats(torch.eye(2).to_sparse()), TypeError, "stats: x must be"),
    "a format": (lambda: RECORD.underflow(torch.int8), TypeError, "dtype must be one of torch.float16, .*; got torch.int8"),
    "a scale of 0": (lambda: RECORD.overflow(torch.float16, 0.0), ValueError, "Stats: scale must be a positive number; got 0.0"),
    "an infinite factor": (lambda: RECORD.rescale(math.inf), ValueError, "rescale: factor must be a positive number; got inf"),
    "a negative scale": (lambda: probe().unscale(-1.0), ValueError, "unscale: scale must be a positive number; got -1.0"),
    "tapped integers": (lambda: tap(INTEGERS, probe()), TypeError, "tap: x must be a strided floating-point .*int64"),
    "no probe": (lambda: tap(torch.ones(1), torch.zeros(2, 568)), TypeError, "tap: probe must be a Record, as probe"),  # type: ignore[arg-type]
    "half a sample": (lambda: tap(torch.ones(1), probe(), sample=1.5), TypeError, "tap: sample must be an integer or None; got 1.5"),  # type: ignore[arg-type]
    "forward mode": (
        # contract: "forward mode (`jvp`, `jacfwd`) through a tap"
        lambda: torch.func.jvp(lambda x: tap(x, probe()), (torch.ones(2),), (torch.ones(2),)), RuntimeError, "jvp"
    ),
    "no records": (lambda: Records.of({}), ValueError, "records must hold one at least"),
    "a mapping added": (lambda: RECORDS + {}, TypeError, "unsupported operand"),
    "other names added": (lambda: RECORDS + Records(("other",), RECORDS.rows), ValueError, "Records: names must be the same.*'other'"),
    "a name": (lambda: RECORDS["b"], KeyError, "b"),
    "no loss": (lambda: track(MODEL), TypeError, "track_scales: loss_fn must be a loss of module_loss"),
    "a compiled module": (lambda: track(module_loss(COMPILED)), TypeError, "loss_fn must be of the module itself.*OptimizedModule"),
    "a compiled layer": (lambda: track(module_loss(WITH_COMPILED_LAYER)), TypeError, "loss_fn must be of the module itself.* got a Linear"),
    "a tracked module": (lambda: track(track(LOSS)), ValueError, "must not be tracked already"),
    "no sample": (lambda: track(LOSS, sample=0), ValueError, "track_scales: sample must be 1 or more; got 0"),
    "a number for modules": (lambda: track(LOSS, 5), TypeError, "modules must be paths or a predicate; got 5"),
    "a path": (lambda: track(LOSS, ["no"]), ValueError, "modules must be paths in the module; got 'no'"),
    "a path twice": (lambda: track(LOSS, ["", ""]), ValueError, "modules must differ"),
    "no module chosen": (lambda: track(LOSS, lambda *_: False), ValueError, "must choose a module at least"),
    "no record of a module": (lambda: track(LOSS)({}, {}, BATCH), ValueError, "must hold a Record for every tapped module; got none for ''"),
    "a loss without probes": (lambda: track(LOSS)({}, BATCH), TypeError, "must be called with params, probes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_argument_is_named_with_the_rule_and_the_value(name: str) -> None:
    assert_refused(*REFUSED[name])
