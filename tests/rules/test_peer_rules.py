"""The claim: a preset moves the scale as its library does, bit for bit, whatever overflows when."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils import _pytree

import funcamp
from funcamp import ScalerConfig, ScalerState, exhausted, init, presets, update
from funcamp._scaler.state import RuleState
from tests.conftest import Transform
from tests.rules import peer_rules
from tests.support.helpers import assert_same
from tests.support.oracle import flagged
from tests.support.rules import RULES

# The oracle, the preset, arguments for both, arguments for the oracle alone.
Case = tuple[type[Any], Callable[..., ScalerConfig], dict[str, Any], dict[str, Any]]
_QUIET = {"raise_error_at_min_scale": False}

CASES: dict[str, Case] = {
    "megatron": (
        peer_rules.Megatron,
        presets.megatron,
        {"initial_scale": 64.0, "growth_interval": 3, "hysteresis": 2},
        {},
    ),
    "megatron odd factors": (
        peer_rules.Megatron,
        presets.megatron,
        {"initial_scale": 999.0, "growth_interval": 2, "hysteresis": 3, "growth_factor": 1.7, "backoff_factor": 0.3},
        {},
    ),
    "megatron no hysteresis": (
        peer_rules.Megatron,
        presets.megatron,
        {"initial_scale": 2.0**124, "growth_interval": 1, "hysteresis": 1},
        {},
    ),
    "deepspeed": (peer_rules.DeepSpeedDynamic, presets.deepspeed, {"init_scale": 64.0, "scale_window": 2}, _QUIET),
    "deepspeed consecutive": (
        peer_rules.DeepSpeedDynamic,
        presets.deepspeed,
        {"init_scale": 64.0, "scale_window": 3, "delayed_shift": 3, "consecutive_hysteresis": True, "min_scale": 0.25},
        _QUIET,
    ),
    "deepspeed window 1": (
        peer_rules.DeepSpeedDynamic,
        presets.deepspeed,
        {"init_scale": 64.0, "scale_window": 1, "delayed_shift": 1},
        _QUIET,
    ),
    "deepspeed old": (
        peer_rules.DeepSpeedDynamicOld,
        presets.deepspeed_old,
        {"init_scale": 64.0, "scale_factor": 3.0, "scale_window": 2, "delayed_shift": 2},
        _QUIET,
    ),
    "deepspeed old consecutive": (
        peer_rules.DeepSpeedDynamicOld,
        presets.deepspeed_old,
        {
            "init_scale": 64.0,
            "scale_factor": 1.7,
            "scale_window": 3,
            "delayed_shift": 2,
            "consecutive_hysteresis": True,
        },
        _QUIET,
    ),
    "deepspeed fp16": (
        peer_rules.DeepSpeedFP16,
        presets.deepspeed_fp16,
        {"init_scale": 64.0, "scale_window": 2},
        {},
    ),
    "deepspeed fp16 window 1": (
        peer_rules.DeepSpeedFP16,
        presets.deepspeed_fp16,
        {"init_scale": 8.0, "scale_window": 1},
        {},
    ),
    "apex": (peer_rules.ApexAmp, presets.apex, {"init_scale": 2.0**22, "scale_window": 2}, {}),
    "apex bounds": (
        peer_rules.ApexAmp,
        presets.apex,
        {"init_scale": 100.0, "scale_window": 2, "min_loss_scale": 3.0, "max_loss_scale": 77.0},
        {},
    ),
    "apex at the top": (
        peer_rules.ApexAmp,
        presets.apex,
        {"init_scale": 2.0**126, "scale_window": 2, "min_loss_scale": 0.0, "max_loss_scale": 1.5 * 2.0**127},
        {},
    ),
    "apex hysteresis": (
        peer_rules.ApexHysteresis,
        lambda current_scale, **rest: presets.apex_hysteresis(current_scale, **rest),
        {"current_scale": 999.0, "growth_interval": 2, "hysteresis": 2, "growth_factor": 1.7, "backoff_factor": 0.77},
        {},
    ),
    "jmp": (peer_rules.Jmp, presets.jmp, {"loss_scale": 64.0, "period": 3}, {}),
    "jmp odd factor": (
        peer_rules.Jmp,
        presets.jmp,
        {"loss_scale": 999.0, "period": 2, "factor": 1.7, "min_loss_scale": 0.3},
        {},
    ),
    "jmp at the top": (peer_rules.Jmp, presets.jmp, {"loss_scale": 2.0**126, "period": 1}, {}),
    "flax": (peer_rules.Flax, presets.flax, {"scale": 64.0, "growth_interval": 2}, {}),
    "flax odd factors": (
        peer_rules.Flax,
        presets.flax,
        {"scale": 999.0, "growth_interval": 1, "growth_factor": 1.7, "backoff_factor": 0.3, "minimum_scale": 0.7},
        {},
    ),
    "flax at the top": (peer_rules.Flax, presets.flax, {"scale": 1.5 * 2.0**126, "growth_interval": 1}, {}),
    "flax at the bottom": (peer_rules.Flax, presets.flax, {"scale": 2.0**-124, "growth_interval": 3}, {}),
    "keras": (peer_rules.Keras, presets.keras, {"initial_scale": 2.0**126, "dynamic_growth_steps": 2}, {}),
    "tensorflow": (
        peer_rules.TensorFlow,
        lambda initial_loss_scale, growth_steps: presets.tensorflow(initial_loss_scale, growth_steps),
        {"initial_loss_scale": 8.0, "growth_steps": 2},
        {},
    ),
    "paddle": (
        peer_rules.PaddleKernel,
        lambda prev_loss_scaling, **rest: presets.paddle(prev_loss_scaling, **rest),
        {"prev_loss_scaling": 99.0, "incr_every_n_steps": 2, "decr_every_n_nan_or_inf": 2, "decr_ratio": 0.8},
        {},
    ),
    "paddle dygraph": (
        peer_rules.PaddleDygraph,
        presets.paddle_dygraph,
        {"init_loss_scaling": 2.0**126, "incr_every_n_steps": 2, "decr_every_n_nan_or_inf": 3, "incr_ratio": 1.9},
        {},
    ),
    "fairseq": (peer_rules.Fairseq, presets.fairseq, {"init_scale": 64.0, "scale_window": 3}, {}),
    "fairseq tolerance": (
        peer_rules.Fairseq,
        presets.fairseq,
        {"init_scale": 64.0, "scale_window": 4, "tolerance": 0.3, "min_loss_scale": 5.0, "scale_factor": 1.7},
        {},
    ),
    "fairseq threshold": (
        peer_rules.Fairseq,
        presets.fairseq,
        {"init_scale": 64.0, "scale_window": 2, "tolerance": 0.5, "threshold": 3.3, "min_loss_scale": 3.3},
        {},
    ),
    "fsdp on a cpu": (
        peer_rules.ShardedCpu,
        presets.fsdp_cpu,
        {"init_scale": 999.0, "growth_interval": 2, "growth_factor": 1.7, "backoff_factor": 0.3},
        {},
    ),
    "fsdp on a cpu at the top": (
        peer_rules.ShardedCpu,
        presets.fsdp_cpu,
        {"init_scale": 2.0**126, "growth_interval": 1},
        {},
    ),
}

#: What the library counts under other names, and how it reads as funcamp's.
COUNTERS: dict[str, Callable[[Any], int]] = {
    "Megatron": lambda rule: rule._hysteresis_tracker,
    "DeepSpeedDynamic": lambda rule: rule.cur_hysteresis,
    "DeepSpeedDynamicOld": lambda rule: rule.cur_hysteresis,
    "ApexHysteresis": lambda rule: rule.hysteresis_tracker,
    "PaddleKernel": lambda rule: rule.decr_every_n_nan_or_inf - rule.num_bad_steps,
    "PaddleDygraph": lambda rule: rule.decr_every_n_nan_or_inf - rule._decr_count,
}


def assert_follows_library(
    case: str, flags: Iterable[bool], step: Callable[[ScalerState, ScalerConfig], ScalerState] = update
) -> None:
    """Compare a preset with its oracle after every flag."""
    oracle, preset, arguments, quiet = CASES[case]
    rule, config = oracle(**arguments, **quiet), preset(**arguments)
    state = init(config)
    assert state.scale.item() == rule.scale
    seen = []
    for flag in flags:
        seen.append(flag)
        stuck = exhausted(flagged(state, flag), config)
        state = step(flagged(state, flag), config)
        rule.update(flag)
        assert state.scale.item() == rule.scale or state.scale.isnan(), f"{seen}: {state} against {rule}"
        assert state.found_inf.item() == 0.0
        if oracle.__name__ in COUNTERS:
            counter = _pytree.tree_leaves(state)[-1].item()
            assert counter == COUNTERS[oracle.__name__](rule), f"{seen}: {state} against {rule}"
        if oracle is peer_rules.Fairseq:
            assert bool(stuck) == (rule.raised or (flag and rule.scale == math.inf)), f"{seen}: {state} against {rule}"


@pytest.mark.thorough(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_preset_follows_its_library_through_every_short_sequence(case: str) -> None:
    for flags in itertools.product([False, True], repeat=7):
        assert_follows_library(case, flags)


@pytest.mark.thorough(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("probability", [0.05, 0.3, 0.7])
@pytest.mark.parametrize("case", CASES)
def test_preset_follows_its_library_through_random_sequences(case: str, probability: float) -> None:
    rng = random.Random(f"{case} {probability}")
    assert_follows_library(case, [rng.random() < probability for _ in range(400)])


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("case", ["megatron odd factors", "deepspeed old", "jmp odd factor", "flax odd factors"])
def test_preset_follows_its_library_under_every_transform(case: str, transform: Transform) -> None:
    config = CASES[case][1](**CASES[case][2])
    run = transform(lambda state: update(state, config))
    rng = random.Random(case)
    assert_follows_library(case, [rng.random() < 0.4 for _ in range(25)], lambda state, _: run(state))


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("case", CASES)
def test_preset_compiles_and_batches(case: str) -> None:
    """Every rule, in one graph and under vmap: the same numbers as eager."""
    config = CASES[case][1](**CASES[case][2])
    compiled = torch.compile(update, fullgraph=True, backend="aot_eager")
    batched = torch.func.vmap(lambda state: update(state, config))
    state = init(config)
    for flag in (True, False, False, False, True, True, True, False):
        given = flagged(state, flag)
        state = update(given, config)
        assert_same(compiled(given, config), state)
        stacked = _pytree.tree_map(lambda leaf: torch.stack([leaf, leaf]), given)
        assert_same(_pytree.tree_map(lambda leaf: leaf[1], batched(stacked)), state)


@pytest.mark.parametrize("kind", [peer_rules.DeepSpeedDynamic, peer_rules.DeepSpeedDynamicOld])
def test_exhausted_where_deepspeed_raises(kind: type[Any]) -> None:
    """Up to its first exception, where a run of DeepSpeed's ends."""
    preset = presets.deepspeed if kind is peer_rules.DeepSpeedDynamic else presets.deepspeed_old
    for flags in itertools.product([False, True], repeat=9):
        arguments: dict[str, Any] = {"init_scale": 4.0, "scale_window": 3, "delayed_shift": 2}
        rule, config = kind(**arguments), preset(**arguments)
        state = init(config)
        for flag in flags:
            rule.update(flag)
            given = flagged(state, flag)
            assert bool(exhausted(given, config)) == rule.raised
            if rule.raised:
                break
            state = update(given, config)


def test_fsdp_preset_follows_torchs_sharded_scaler() -> None:
    scaler: Any = ShardedGradScaler(
        "cpu", 999.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=2, process_group=None
    )
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    config = presets.fsdp_cpu(999.0, 0.3, 1.7, 2)
    state, rng = init(config), random.Random(0)
    for _ in range(200):
        found = rng.random() < 0.3
        flag = torch.full((1,), float(found))
        scaler._per_optimizer_states[0] = {"stage": None, "found_inf_per_device": {torch.device("cpu"): flag}}
        scaler.update()
        state = update(flagged(state, found), config)
        assert (state.scale.item(), state.growth_tracker.item()) == (scaler.get_scale(), int(scaler._growth_tracker))


def test_every_rule_has_a_state() -> None:
    for rule in RULES.values():
        config = ScalerConfig(rule=rule)
        state = init(config)
        assert type(update(state, config)) is type(state)
        assert set(getattr(state, "counters", ())) == set(rule.first_counters())


@pytest.mark.parametrize(
    ("preset", "oracle"),
    [
        (presets.megatron, peer_rules.Megatron),
        (presets.deepspeed, peer_rules.DeepSpeedDynamic),
        (presets.deepspeed_old, peer_rules.DeepSpeedDynamicOld),
        (presets.deepspeed_fp16, peer_rules.DeepSpeedFP16),
        (presets.apex, peer_rules.ApexAmp),
        (presets.jmp, peer_rules.Jmp),
        (presets.flax, peer_rules.Flax),
        (presets.keras, peer_rules.Keras),
        (presets.tensorflow, peer_rules.TensorFlow),
        (presets.paddle, peer_rules.PaddleKernel),
        (presets.fairseq, peer_rules.Fairseq),
        (presets.fsdp_cpu, peer_rules.ShardedCpu),
    ],
)
def test_preset_starts_with_its_librarys_defaults(preset: Callable[[], ScalerConfig], oracle: type[Any]) -> None:
    config, rule = preset(), oracle()
    assert config.init_scale == rule.scale
    names = ("growth_interval", "scale_window", "period", "dynamic_growth_steps", "growth_steps", "incr_every_n_steps")
    assert config.growth_interval == next(getattr(rule, name) for name in names if hasattr(rule, name))


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed consecutive", "deepspeed old", "paddle", "paddle dygraph"])
def test_a_spent_counter_of_megatrons_backs_off(name: str) -> None:
    """One type of state for all that count overflows: a resume under another rule must not be stuck."""
    config = CASES[name][1](**CASES[name][2])
    fresh: Any = init(config)
    for spent in (0, -7):
        state = fresh._replace(found_inf=torch.tensor(1.0), counters={"hysteresis_tracker": torch.tensor(spent).int()})
        assert update(state, config).scale < fresh.scale


@pytest.mark.parametrize(
    ("oracle", "config", "counters"),
    [
        (peer_rules.Jmp(8.0, counter=5, period=3), presets.jmp(8.0, 3), {}),
        (peer_rules.DeepSpeedDynamic(8.0, 3), presets.deepspeed(8.0, 3), {"last_overflow_iter": -6}),
        (
            peer_rules.DeepSpeedDynamicOld(8.0, 2.0, 3),
            presets.deepspeed_old(8.0, 2.0, 3),
            {"last_overflow_iter": -6},
        ),
        (peer_rules.DeepSpeedFP16(8.0, 3), presets.deepspeed_fp16(8.0, 3), {"last_overflow_iter": -6}),
        (
            peer_rules.Fairseq(8.0, scale_window=3),
            presets.fairseq(8.0, scale_window=3),
            {"_last_overflow_iter": -6},
        ),
    ],
)
def test_a_tracker_beyond_a_shortened_interval_grows_as_the_library_does(
    oracle: Any, config: ScalerConfig, counters: dict[str, int]
) -> None:
    for name, value in counters.items():
        setattr(oracle, name, value)
    state = init(config)
    state = type(state)(state.scale, torch.tensor(5, dtype=torch.int32), *state[2:])
    for _ in range(12):
        state = update(state, config)
        oracle.update(False)
        assert state.scale.item() == oracle.scale
    assert state.scale.item() > 8.0


def test_a_state_of_another_rule_is_refused() -> None:
    with pytest.raises(TypeError, match=r"update: state must count clean steps only, .* Dynamic; got .* hysteresis"):
        update(init(presets.megatron()))
    with pytest.raises(TypeError, match=r"update: state must count hysteresis_tracker, .* Megatron; got .* clean"):
        update(init(), presets.megatron())
    with pytest.raises(TypeError, match="exhausted: state must count overflows, since_rescale"):
        exhausted(init(), presets.fairseq())


def test_a_whole_step_runs_with_another_rule() -> None:
    """Checkpoint and jit's trace carry the counters."""
    config = presets.megatron(initial_scale=2.0**20, hysteresis=3)
    step = funcamp.make_train_step(
        lambda params, x: (params["w"] * x).sum().half().float(), funcamp.stateless(torch.optim.SGD), config
    )
    state = step.init({"w": torch.ones(4)})
    for _ in range(2):
        state, _ = step(state, torch.full((4,), torch.inf))
    again = step.load_state_dict(step.state_dict(state), like=step.init({"w": torch.ones(4)}))
    assert isinstance(again.scaler, RuleState)
    assert again.scaler.counters == {"hysteresis_tracker": 1}
    run = funcamp.jit(step, backend="eager")
    after, metrics = run(again, torch.full((4,), torch.inf))
    assert metrics.skipped == 3
    assert metrics.consecutive_skips == 3
    assert after.scaler.scale.item() == 2.0**19


def test_every_librarys_rule_is_compared_with_it() -> None:
    compared = {type(preset(**arguments).rule) for _, preset, arguments, _ in CASES.values()}
    torch_and_our_own = {type(RULES[name]) for name in ("dynamic", "static", "warm_start")}
    assert compared | torch_and_our_own == {*map(type, RULES.values())}
