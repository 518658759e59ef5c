"""The claim: a preset moves the scale as its library does, bit for bit, whatever overflows when."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from funcamp import ScalerConfig, ScalerState, exhausted, init, presets, rules, update
from funcamp._scaler.state import counters_of
from tests.conftest import Transform
from tests.rules import peer_rules
from tests.support.oracle import flagged

LIBRARIES: dict[str, Callable[..., Any]] = {
    "megatron": peer_rules.Megatron,
    "deepspeed": peer_rules.DeepSpeedDynamic,
    "deepspeed_fp16": peer_rules.DeepSpeedFP16,
    "apex": peer_rules.ApexAmp,
    "apex_hysteresis": peer_rules.ApexHysteresis,
    "jmp": peer_rules.Jmp,
    "flax": peer_rules.Flax,
    "keras": peer_rules.Keras,
    "tensorflow": peer_rules.TensorFlow,
    "paddle": peer_rules.PaddleKernel,
    "paddle_dygraph": peer_rules.PaddleDygraph,
    "fairseq": peer_rules.Fairseq,
    "fsdp_cpu": peer_rules.ShardedCpu,
}

#: What the libraries call each number of a rule.
NAMES: dict[str, tuple[str, ...]] = {
    "first": (
        "init_scale", "initial_scale", "loss_scale", "scale", "init_loss_scaling", "current_scale",
        "initial_loss_scale", "prev_loss_scaling",
    ),
    "interval": (
        "growth_interval", "scale_window", "period", "dynamic_growth_steps", "growth_steps", "incr_every_n_steps",
    ),
    "overflows": ("hysteresis", "delayed_shift", "decr_every_n_nan_or_inf"),
    "growth": ("growth_factor", "scale_factor", "factor", "incr_ratio"),
    "backoff": ("backoff_factor", "decr_ratio"),
    "least": ("min_scale", "min_loss_scale", "minimum_scale"),
    "most": ("max_loss_scale",),
}  # fmt: skip

#: The numbers of a rule, and options that only some have.
NUMBERS: dict[str, dict[str, Any]] = {
    "": {
        "first": 999.0, "interval": 2, "overflows": 3, "growth": 1.7, "backoff": 0.3, "least": 3.0, "most": 1100.0,
        "tolerance": 0.3,
    },
    "consecutive": {
        "first": 64.0, "interval": 3, "overflows": 2, "growth": 3.0, "backoff": 0.77, "least": 5.0, "most": 50.0,
        "consecutive_hysteresis": True, "tolerance": 0.5, "threshold": 5.0,
    },
    "at the top": {
        "first": 2.0**126, "interval": 1, "overflows": 1, "growth": 2.0, "backoff": 0.5, "least": 2.0**123,
        "most": 1.5 * 2.0**127,
    },
}  # fmt: skip
CASES = [(library, numbers) for library in LIBRARIES for numbers in NUMBERS]


def pair(library: str, numbers: str = "", **options: Any) -> tuple[Any, ScalerConfig]:
    """The oracle and the configuration of a library, with the same numbers."""

    def make(function: Callable[..., Any]) -> Any:
        values = {"raise_error_at_min_scale": False} | NUMBERS[numbers] | options
        values |= {name: values[role] for role, names in NAMES.items() for name in names}
        return function(**{name: values[name] for name in inspect.signature(function).parameters if name in values})

    return make(LIBRARIES[library]), make(getattr(presets, library))


def assert_follows_library(
    case: tuple[str, str], flags: Iterable[bool], step: Callable[[ScalerState, ScalerConfig], ScalerState] = update
) -> None:
    """Compare a preset with its oracle after every flag."""
    rule, config = pair(*case)
    state = init(config)
    assert state.scale.item() == rule.scale
    seen = []
    for flag in flags:
        seen.append(flag)
        stuck = exhausted(flagged(state, flag), config)
        state = step(flagged(state, flag), config)
        rule.update(flag)
        assert state.scale.item() == rule.scale or state.scale.isnan(), (
            f"{seen}: {state} against {rule.scale}, {vars(rule)}"
        )
        assert state.found_inf.item() == 0.0
        for counter in ("_hysteresis_tracker", "hysteresis_tracker", "cur_hysteresis"):
            if hasattr(rule, counter):
                assert counters_of(state) == {"hysteresis_tracker": getattr(rule, counter)}, f"{seen}"
        if isinstance(rule, peer_rules.Fairseq):
            assert bool(stuck) == (rule.raised or (flag and rule.scale == math.inf)), f"{seen}: {vars(rule)}"


@pytest.mark.thorough(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_preset_follows_its_library(case: tuple[str, str]) -> None:
    """Through every short sequence, and through long random ones."""
    for flags in itertools.product([False, True], repeat=7):
        assert_follows_library(case, flags)
    rng = random.Random(f"{case}")
    for probability in (0.05, 0.3, 0.7):
        assert_follows_library(case, [rng.random() < probability for _ in range(400)])


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("library", LIBRARIES)
def test_preset_follows_its_library_under_every_transform(library: str, transform: Transform) -> None:
    config = pair(library)[1]
    run = transform(lambda state: update(state, config))
    rng = random.Random(library)
    assert_follows_library((library, ""), [rng.random() < 0.4 for _ in range(25)], lambda state, _: run(state))


def test_exhausted_where_deepspeed_raises() -> None:
    """Up to its first exception, where a run of DeepSpeed's ends."""
    for flags in itertools.product([False, True], repeat=9):
        rule, config = pair("deepspeed", "consecutive", least=16.0, raise_error_at_min_scale=True)
        state = init(config)
        for flag in flags:
            rule.update(flag)
            given = flagged(state, flag)
            assert bool(exhausted(given, config)) == rule.raised
            if rule.raised:
                break
            state = update(given, config)


# paddle_dygraph has the defaults of paddle.amp.GradScaler, not of the class that has the rule
@pytest.mark.parametrize("library", [library for library in LIBRARIES if library != "paddle_dygraph"])
def test_a_preset_has_its_librarys_defaults(library: str) -> None:
    config, rule = getattr(presets, library)(), LIBRARIES[library]()
    assert config.init_scale == rule.scale
    assert config.growth_interval == next(getattr(rule, name) for name in NAMES["interval"] if hasattr(rule, name))
    ours, theirs = (inspect.signature(make).parameters for make in (getattr(presets, library), LIBRARIES[library]))
    for name in ours.keys() & theirs.keys():
        assert ours[name].default == theirs[name].default, name


@pytest.mark.parametrize("library", ["jmp", "deepspeed", "deepspeed_fp16", "fairseq"])
def test_a_tracker_beyond_a_shortened_interval_grows_as_the_library_does(library: str) -> None:
    rule, config = pair(library, "consecutive")
    for name, value in {"counter": 5, "last_overflow_iter": -6, "_last_overflow_iter": -6}.items():
        if hasattr(rule, name):
            setattr(rule, name, value)
    state = init(config)
    state = type(state)(state.scale, torch.tensor(5, dtype=torch.int32), *state[2:])
    for _ in range(12):
        state = update(state, config)
        rule.update(False)
        assert state.scale.item() == rule.scale
    assert state.scale.item() > config.init_scale


def test_every_rule_of_the_package_is_compared_with_its_library() -> None:
    def below(kind: Any) -> set[Any]:
        return {kind}.union(*(below(other) for other in kind.__subclasses__()))

    ours = {kind for kind in below(rules.Rule) if kind.__module__.startswith("funcamp.")}
    compared = {type(getattr(presets, library)().rule) for library in LIBRARIES}
    assert {kind.__name__ for kind in ours - compared} == {"Rule", "HysteresisRule", "Torch", "Static"}


def test_apex_takes_a_minimum_of_0_for_none() -> None:
    assert presets.apex(min_loss_scale=0.0).min_scale is None
