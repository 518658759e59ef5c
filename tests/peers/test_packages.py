"""The claim: presets move the scale as the packages themselves do; `make peers` installs them and runs this.

Scales stay above 2**-126: XLA on a CPU flushes smaller ones to zero.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from funcamp import ScalerConfig, exhausted, init, presets, update
from funcamp._scaler.state import RuleState
from tests.support.oracle import flagged

pytestmark = [
    pytest.mark.peers,
    # Keras on torch with NumPy 2
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]

#: One step of a package's scaler, given whether it overflows; returns its scale.
Stepper = Callable[[bool], float]


def jmp_stepper(period: int, factor: float, least: float) -> Stepper:
    import jax.numpy as jnp
    import jmp
    import numpy as np

    held = [jmp.DynamicLossScale(jnp.float32(512.0), period=period, factor=factor, min_loss_scale=np.float32(least))]

    def step(found: bool) -> float:
        held[0] = held[0].adjust(jnp.array(not found))
        return float(held[0].loss_scale)

    return step


def flax_stepper(interval: int, growth: float, backoff: float) -> Stepper:
    import jax
    import jax.numpy as jnp
    from flax.training.dynamic_scale import DynamicScale

    run = jax.jit(lambda ds, g: ds.value_and_grad(lambda p: p * g)(jnp.float32(1.0)).dynamic_scale)
    # an array, not a number: flax multiplies a number in double precision until it is one
    held = [
        DynamicScale(growth_factor=growth, backoff_factor=backoff, growth_interval=interval, scale=jnp.float32(512.0))
    ]

    def step(found: bool) -> float:
        held[0] = run(held[0], jnp.float32(math.inf if found else 0.0))
        return float(held[0].scale)

    return step


def keras_stepper(steps: int) -> Stepper:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras
    import numpy as np

    variable = keras.Variable(np.ones(2, "float32"))
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.0), initial_scale=512.0, dynamic_growth_steps=steps
    )
    optimizer.build([variable])

    def step(found: bool) -> float:
        grads = np.array([1.0, math.inf if found else 1.0], "float32")
        optimizer.apply([keras.ops.convert_to_tensor(grads)], [variable])
        return float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))

    return step


CASES: dict[str, tuple[Callable[[], Stepper], ScalerConfig]] = {
    "jmp": (lambda: jmp_stepper(3, 2, 1.0), presets.jmp(512.0, 3)),
    "jmp odd factor": (lambda: jmp_stepper(2, 1.7, 0.3), presets.jmp(512.0, 2, 1.7, 0.3)),
    "flax": (lambda: flax_stepper(2, 2.0, 0.5), presets.flax(2.0, 0.5, 2, 512.0)),
    "flax odd factors": (lambda: flax_stepper(1, 1.7, 0.3), presets.flax(1.7, 0.3, 1, 512.0)),
    "keras": (lambda: keras_stepper(3), presets.keras(512.0, 3)),
}


@pytest.mark.parametrize("probability", [0.1, 0.4])
@pytest.mark.parametrize("name", CASES)
def test_preset_follows_the_package(name: str, probability: float) -> None:
    make, config = CASES[name]
    step, state, rng = make(), init(config), random.Random(f"{name} {probability}")
    for _ in range(120):
        found = rng.random() < probability
        state = update(flagged(state, found), config)
        assert state.scale.item() == step(found)


def deepspeed_module() -> Any:
    """DeepSpeed's loss_scaler.py alone: the package imports its launcher and its kernels."""
    quiet = logging.getLogger("quiet")
    quiet.disabled = True
    stand_ins: dict[str, dict[str, Any]] = {
        "deepspeed": {},
        "deepspeed.comm": {"get_rank": lambda: 0},
        "deepspeed.runtime": {},
        "deepspeed.runtime.config_utils": {"DeepSpeedConfigObject": object},
        "deepspeed.utils": {"log_dist": lambda *args, **kwargs: None, "logger": quiet},
        "deepspeed.runtime.utils": {"has_inf_or_nan": None},
    }
    found = importlib.util.find_spec("deepspeed")
    assert found is not None
    assert found.origin is not None
    for name, contents in stand_ins.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        sys.modules[name] = module
    path = Path(found.origin).parent / "runtime" / "fp16" / "loss_scaler.py"
    spec = importlib.util.spec_from_file_location("deepspeed_loss_scaler", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for name in stand_ins:
        del sys.modules[name]
    return module


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("probability", [0.1, 0.4, 0.7])
def test_preset_follows_deepspeed(probability: float, consecutive: bool) -> None:
    """Up to its exception at the minimum, which is `exhausted`."""
    scaler = deepspeed_module().DynamicLossScaler(64.0, 3, 1.0, 2, consecutive)
    config = presets.deepspeed(64.0, 3, 1.0, 2, consecutive)
    state, rng = init(config), random.Random(f"{probability} {consecutive}")
    for _ in range(300):
        found = rng.random() < probability
        given = flagged(state, found)
        if exhausted(given, config):
            with pytest.raises(Exception, match="already at minimum"):
                scaler.update_scale(found)
            return
        scaler.update_scale(found)
        state = update(given, config)
        assert isinstance(state, RuleState)
        (left,) = state.counters.values()
        assert (state.scale.item(), left.item()) == (scaler.cur_scale, scaler.cur_hysteresis)
    assert probability < 0.7
