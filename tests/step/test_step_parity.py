"""A step follows torch's documented mixed-precision loop, over whole runs: losses, scales, skips and parameters.

Eager, everything is equal bit for bit, so the same float16 numbers went into every product and came out of it. With
AdamW and clipping, parameters are within a fraction of their norm: AdamW rounds its step size elsewhere than torch's
CPU default does, the norm is summed in float64, and a last bit can move a copy to its neighbour, 2^-11 of it in float16
and 2^-8 in bfloat16. Modules that use their weights in other ways are in tests/autograd/test_module.py, groups of
parameters in test_torch_checkpoint.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.models import Task, cnn, mlp, tied
from tests.support.steps import compiled, eager
from tests.support.torch_loop import assert_as_torchs_loop

STEPS = 40
#: It overflows float16 at the first steps; the interval lets the scale climb into overflow again and again.
CONFIG = {"init_scale": 2.0**24, "growth_interval": 5}
SGD = torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}
RMSPROP = torch.optim.RMSprop, {"lr": 1e-3}
ADAMW = torch.optim.AdamW, {"lr": 2e-3}

#: A task, a policy, and what else is another than usual.
Case = tuple[Callable[[], Task], str, dict[str, Any]]


def assert_follows(case: Case, wrap: Callable[[Any], Any] = eager, **tolerances: float) -> None:
    make, policy, how = case
    batch, pieces = make().batch, how.get("accumulate", 1)
    batches: list[Any] = [batch(number) for number in range(STEPS * pieces)]
    if pieces > 1:
        batches = [batches[first : first + pieces] for first in range(0, STEPS * pieces, pieces)]
    options: dict[str, Any] = {"optimizer": SGD, "config": CONFIG, "keep_buffers": True, **how, **tolerances}
    scales = assert_as_torchs_loop(lambda: make()[:2], batches, wrap, policy=policy, **options)
    if policy == "float16":
        assert sum(after < before for before, after in itertools.pairwise(scales)) >= 4


CLIPPED = {"optimizer": ADAMW, "max_norm": 0.5, "relative_of_losses": 2.0**-6}
EAGER: dict[str, Case] = {
    "MLP, float16": (mlp, "float16", {"flat": False}),
    "CNN, float16": (cnn, "float16", {}),
    "transformer, bfloat16": (tied, "bfloat16", {"optimizer": RMSPROP}),
    "transformer, micro-batches": (tied, "float16", {"accumulate": 3}),
    "dropout": (functools.partial(mlp, 0.3), "float16", {}),
    "AdamW with clipping": (mlp, "float16", {**CLIPPED, "flat": False, "relative": 2.0**-13}),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", EAGER)
def test_a_step_is_torchs_loop(name: str) -> None:
    assert_follows(EAGER[name])


# No weight with two uses: under torch.func autocast casts it twice, and its gradients are added in float32.
COMPILED: list[Case] = [
    (cnn, "float16", {}),
    (mlp, "float16", {"flat": False}),
    (mlp, "bfloat16", {"optimizer": RMSPROP}),
    (cnn, "bfloat16", {**CLIPPED, "relative": 2.0**-8}),
]


@pytest.mark.thorough(keep=1)
@pytest.mark.compiled
@pytest.mark.parametrize("number", range(len(COMPILED)))
def test_a_step_under_torch_compile_is_torchs_loop(number: int) -> None:
    assert_follows(COMPILED[number], compiled)


@pytest.mark.thorough(keep=1)
@pytest.mark.inductor
@pytest.mark.parametrize(("make", "policy"), [(mlp, "bfloat16"), (tied, "float16")])
def test_generated_code_follows_torchs_loop(make: Any, policy: str) -> None:
    # Inductor keeps intermediates in float32 that eager rounds to the low precision: 40 steps apart by that, no more.
    assert_follows((make, policy, {}), lambda step: torch.compile(step, fullgraph=True), relative=2.0**-6)
