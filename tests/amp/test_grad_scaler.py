"""The claim: `funcamp.GradScaler` is `torch.amp.GradScaler` bit for bit, without its host reads and unsafe steps."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import funcamp
from funcamp import GradScaler, ScalerConfig, init, presets, update
from funcamp._amp import unscale
from funcamp._amp.nonfinite import describe_nonfinite
from funcamp._amp.undo import is_watched
from tests.support.helpers import assert_same, clone
from tests.support.host_reads import host_reads

Optimizers = Callable[[list[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizers] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "SGD dampening": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.3),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.1),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9, centered=True),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.1),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "Muon": lambda params: torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.1),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
}


class Loop:
    """One scaler with its parameters and optimizers, given gradients as `backward` would leave them."""

    def __init__(self, scaler: Any, *names: str, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        shapes: list[tuple[int, ...]] = [(3, 2), (4,), ()]
        self.params: list[Tensor] = [
            torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for _ in names for shape in shapes
        ]
        groups = [self.params[index : index + 3] for index in range(0, len(self.params), 3)]
        self.optimizers = [OPTIMIZERS[name](group) for name, group in zip(names, groups)]
        self.scaler = scaler
        scaler.scale(torch.zeros(()))

    def step(self, grads: list[Tensor], *, unscale: bool = False, new_scale: Any = None) -> None:
        for param, grad in zip(self.params, grads):
            param.grad = grad.clone()
        for optimizer in self.optimizers:
            if unscale:
                self.scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
            self.scaler.step(optimizer)
        self.scaler.update(new_scale)

    def state(self) -> Any:
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        return [param.detach() for param in self.params], states, self.scaler.state_dict()


def grads_for(params: list[Tensor], rng: random.Random, overflow: bool) -> list[Tensor]:
    grads = [torch.randn(param.shape, dtype=param.dtype) * 100 for param in params]
    if overflow:
        grads[rng.randrange(len(grads))].view(-1)[0] = rng.choice([math.inf, -math.inf, math.nan])
    return grads


def assert_same_runs(mine: Loop, theirs: Loop, *, seed: int = 0, steps: int = 25, probability: float = 0.4) -> None:
    """Drive both with the same gradients; the first steps overflow, so that a state begins with a skip."""
    rng = random.Random(seed)
    # torch's own first state is not defined then: test_fused_momentum_starts_from_zeros_after_a_skip
    first = 0 if any(opt.defaults.get("momentum") and opt.defaults.get("fused") for opt in theirs.optimizers) else 2
    for step in range(steps):
        grads = grads_for(mine.params, rng, step < first or (step > 1 and rng.random() < probability))
        new_scale = {7: 3.0, 13: torch.tensor(2.0**12)}.get(step)
        unscale = step % 3 == 1
        mine.step(grads, unscale=unscale, new_scale=new_scale)
        theirs.step(grads, unscale=unscale, new_scale=new_scale)
        (params, states, scale), (expected, expected_states, expected_scale) = mine.state(), theirs.state()
        assert scale == expected_scale
        assert_same(params, expected)
        for state, other in zip(states, expected_states):
            assert_same(state, other)


def make(cls: Any, **options: Any) -> Any:
    return cls("cpu", init_scale=2.0**10, growth_factor=1.7, backoff_factor=0.3, growth_interval=3, **options)


@pytest.mark.parametrize("skip", ["select", "host"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loop_follows_torch(name: str, skip: Any) -> None:
    assert_same_runs(Loop(make(GradScaler, skip=skip), name), Loop(make(torch.amp.GradScaler), name))


@pytest.mark.parametrize("skip", ["select", "host"])
def test_several_optimizers_each_skip_by_their_own_flag(skip: Any) -> None:
    names = ("AdamW", "SGD momentum", "AdamW fused")
    assert_same_runs(Loop(make(GradScaler, skip=skip), *names), Loop(make(torch.amp.GradScaler), *names), steps=40)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_follow_torch(dtype: torch.dtype) -> None:
    mine, theirs = Loop(make(GradScaler), "AdamW", dtype=dtype), Loop(make(torch.amp.GradScaler), "AdamW", dtype=dtype)
    assert_same_runs(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sparse_gradients_follow_torch(dtype: torch.dtype) -> None:
    runs = []
    for cls in (GradScaler, torch.amp.GradScaler):
        scaler = make(cls)
        weight = torch.nn.Parameter(torch.ones(4, 2, dtype=dtype))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler.scale(torch.zeros(()))
        for values in ([1.0, 2.0], [math.inf, 1.0], [3.0, 4.0]):
            rows = torch.tensor(values, dtype=dtype)[:, None].repeat(1, 2)
            weight.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), rows, (4, 2), check_invariants=False)
            scaler.step(optimizer)
            scaler.update()
        runs.append((weight.detach(), torch.tensor(scaler.get_scale())))
    assert_same(*runs)


def test_empty_complex_and_missing_gradients() -> None:
    empty, wave, idle = (torch.nn.Parameter(p) for p in (torch.zeros(0, 3), torch.ones(2) * 1j, torch.ones(2)))
    optimizer = torch.optim.SGD([empty, wave, idle], lr=1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    for value, expected in ((4 + 8j, -1 - 1j), (complex(1, math.nan), -1 - 1j)):
        scaler.scale(torch.zeros(()))
        empty.grad, wave.grad = torch.zeros(0, 3), torch.full((2,), value)
        scaler.step(optimizer)
        scaler.update()
        assert wave.detach()[0] == expected
    assert scaler.get_scale() == 2.0


def test_scale_takes_what_torchs_takes() -> None:
    ours, theirs = make(GradScaler), make(torch.amp.GradScaler)
    outputs = (torch.ones(2).half(), [torch.tensor(2.0).half(), (torch.tensor(3.0, dtype=torch.float64),)])
    assert_same(ours.scale(outputs), theirs.scale(outputs))
    assert_same(list(ours.scale(iter([torch.ones(2)]))), list(theirs.scale(iter([torch.ones(2)]))))
    assert_same(ours.scale(torch.tensor(3.0)), theirs.scale(torch.tensor(3.0)))


# what goes wrong, the same way


def _stepped(scaler: Any) -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(torch.zeros(()))
    weight.grad = torch.ones(2)
    scaler.step(optimizer)
    return optimizer


def _half(scaler: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(2).half())
    weight.grad = torch.ones(2).half()
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD([weight], lr=0.1))


def _twice(scaler: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def _no_params() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


MISUSE: dict[str, Callable[[Any], object]] = {
    "unscale before scale": lambda scaler: scaler.unscale_(_no_params()),
    "step before scale": lambda scaler: scaler.step(_no_params()),
    "update before scale": lambda scaler: scaler.update(),
    "update before step": lambda scaler: (scaler.scale(torch.zeros(())), scaler.update()),
    "unscale twice": _twice,
    "unscale after step": lambda scaler: scaler.unscale_(_stepped(scaler)),
    "step twice": lambda scaler: scaler.step(_stepped(scaler)),
    "step without gradients": lambda scaler: (scaler.scale(torch.zeros(())), scaler.step(_no_params())),
    "closure": lambda scaler: scaler.step(_no_params(), closure=lambda: 1.0),
    "float16 gradient": _half,
    "scale of a number": lambda scaler: scaler.scale(3.0),
    "scale of numbers": lambda scaler: list(scaler.scale([3.0])),
    "new scale of two": lambda scaler: (_stepped(scaler), scaler.update(torch.ones(2))),
    "new scale elsewhere": lambda scaler: (_stepped(scaler), scaler.update(torch.ones(1, device="meta"))),
    "new scale with grad": lambda scaler: (_stepped(scaler), scaler.update(torch.ones(1, requires_grad=True))),
    "pickle in mid-step": lambda scaler: (_stepped(scaler), pickle.dumps(scaler)),
    "empty state dict": lambda scaler: scaler.load_state_dict({}),
    "short state dict": lambda scaler: scaler.load_state_dict({"scale": 1.0}),
    "growth of 1": lambda scaler: type(scaler)("cpu", growth_factor=1.0),
    "backoff of 1": lambda scaler: type(scaler)("cpu", backoff_factor=1.0),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_raises_what_torch_raises(name: str) -> None:
    raised = []
    for cls in (GradScaler, torch.amp.GradScaler):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what is compared
            MISUSE[name](cls("cpu"))
        raised.append((caught.type, str(caught.value)))
    assert raised[0] == raised[1]


def test_signatures_and_defaults_are_torchs() -> None:
    for name, theirs in vars(torch.amp.GradScaler).items():
        if inspect.isfunction(theirs):
            ours = inspect.signature(getattr(GradScaler, name)).parameters
            expected = inspect.signature(theirs).parameters
            assert list(ours)[: len(expected)] == list(expected), name
            assert [ours[key].default for key in expected] == [p.default for p in expected.values()], name
            assert all(p.kind is p.KEYWORD_ONLY for key, p in ours.items() if key not in expected), name


def test_no_cuda_warns_and_disables() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available.  Disabling") as caught:
        scaler = GradScaler()
    assert caught[0].filename == __file__
    assert not scaler.is_enabled()


def test_disabled_does_nothing() -> None:
    scaler = GradScaler("cpu", enabled=False)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, math.inf])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    assert scaler.scale("anything") == "anything"
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0, -math.inf]
    assert (scaler.state_dict(), scaler.get_scale()) == ({}, 1.0)
    scaler.load_state_dict({})
    assert scaler.metrics().scale == 1.0
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()


def _numbers(scaler: Any) -> list[object]:
    """Return what the getters return or raise."""
    numbers: list[object] = []
    for get in (scaler.get_growth_factor, scaler.get_backoff_factor, scaler.get_growth_interval):
        try:
            numbers.append(get())
        except AttributeError:
            numbers.append(AttributeError)
    return numbers


def test_setters_of_a_disabled_one_are_torchs() -> None:
    disabled = [cls("cpu", enabled=False) for cls in (GradScaler, torch.amp.GradScaler)]
    assert _numbers(disabled[0]) == _numbers(disabled[1]) == [AttributeError] * 3
    for scaler in disabled:
        scaler.set_growth_factor(4.0)
        scaler.set_backoff_factor(0.25)
        scaler.set_growth_interval(100)
        assert _numbers(scaler) == _numbers(pickle.loads(pickle.dumps(scaler))) == [4.0, 0.25, 100]
        assert (scaler.state_dict(), scaler.get_scale()) == ({}, 1.0)


# saving


@pytest.mark.parametrize("classes", [(GradScaler, torch.amp.GradScaler), (torch.amp.GradScaler, GradScaler)])
@pytest.mark.parametrize("begun", [False, True])
def test_state_dict_goes_both_ways_with_torchs(classes: tuple[Any, Any], begun: bool) -> None:
    source, target = classes
    run = Loop(make(source), "SGD")
    assert_same_runs(run, Loop(make(torch.amp.GradScaler), "SGD"), steps=6)
    other = target("cpu")
    if begun:
        other.scale(torch.zeros(()))
    other.load_state_dict(run.scaler.state_dict())
    assert other.state_dict() == run.scaler.state_dict()
    for wrapped in (other, pickle.loads(pickle.dumps(other)), copy.deepcopy(other)):
        mine, theirs = Loop(wrapped, "SGD"), Loop(copy.deepcopy(run.scaler), "SGD")
        assert_same_runs(mine, theirs, seed=1, steps=8)


def test_state_dict_before_the_first_scale_is_torchs() -> None:
    assert make(GradScaler).state_dict() == make(torch.amp.GradScaler).state_dict()
    assert make(GradScaler).get_scale() == 2.0**10


def test_a_refused_state_dict_changes_nothing() -> None:
    scaler = make(GradScaler)
    before = scaler.state_dict()
    for bad in (
        {"growth_factor": 0.5},
        {"backoff_factor": 0.0},
        {"scale": "high"},
        {"scale": math.nan},
        {"_growth_tracker": 2**40},
        {"_growth_tracker": 1.5},
    ):
        with pytest.raises((ValueError, TypeError)):
            scaler.load_state_dict({**before, "scale": 5.0, **bad})
        assert scaler.state_dict() == before


def test_setters_take_effect_and_refuse() -> None:
    mine, theirs = Loop(make(GradScaler), "SGD"), Loop(make(torch.amp.GradScaler), "SGD")
    for loop in (mine, theirs):
        loop.scaler.set_growth_factor(3.0)
        loop.scaler.set_backoff_factor(0.7)
        loop.scaler.set_growth_interval(1)
    assert_same_runs(mine, theirs)
    with pytest.raises(ValueError, match=r"backoff_factor must be above 0 and at most 1; got 0\.0"):
        mine.scaler.set_backoff_factor(0.0)
    assert mine.scaler.get_backoff_factor() == 0.7
    for loop in (mine, theirs):  # freezing the scale
        loop.scaler.set_growth_factor(1.0)
        loop.scaler.set_backoff_factor(1.0)
    assert_same_runs(mine, theirs)
    for interval in (0, 10**12):  # torch takes them for never
        mine.scaler.set_growth_interval(interval)
        before = mine.scaler.get_scale()
        mine.step([torch.ones_like(param) for param in mine.params])
        assert (mine.scaler.get_growth_interval(), mine.scaler.get_scale()) == (interval, before)


@pytest.mark.parametrize("interval", [None, "5", 5.0, math.nan, math.inf, True], ids=str)
def test_a_growth_interval_that_is_no_integer_is_named_wherever_it_is_set(interval: Any) -> None:
    scaler = make(GradScaler)
    before = scaler.state_dict()
    with pytest.raises(TypeError, match=f"GradScaler: growth_interval must be an integer; got '?{interval}'?$"):
        scaler.set_growth_interval(interval)
    with pytest.raises(TypeError, match=f"GradScaler: growth_interval must be an integer; got '?{interval}'?$"):
        scaler.load_state_dict({**before, "growth_interval": interval})
    with pytest.raises(TypeError, match="GradScaler: growth_interval must be "):
        GradScaler("cpu", growth_interval=interval)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("preset", [presets.megatron, presets.flax, presets.warm_start])
def test_another_rule_runs_and_is_saved(preset: Callable[[], ScalerConfig]) -> None:
    config = preset()
    loop, state, rng = Loop(GradScaler("cpu", config=config), "SGD"), init(config), random.Random(0)
    for step in range(12):
        found = step < 3 or rng.random() < 0.4
        state = update(type(state)(*state[:2], torch.tensor(float(found)), *state[3:]), config)
        loop.step(grads_for(loop.params, rng, found))
        assert loop.scaler.get_scale() == state.scale.item()
        if step == 5:
            saved = loop.scaler.state_dict()
            assert set(saved) - set(make(GradScaler).state_dict()) == set(getattr(state, "counters", ()))
            again = GradScaler("cpu", config=config)
            again.load_state_dict(saved)
            loop.scaler = copy.deepcopy(again)
            loop.scaler.scale(torch.zeros(()))


def test_new_scale_of_shape_one_is_taken() -> None:
    """torch promises it and raises (copy_ into shape ())."""
    loop = Loop(make(GradScaler), "SGD")
    loop.step([torch.ones_like(param) for param in loop.params], new_scale=torch.tensor([3.0]))
    assert loop.scaler.get_scale() == 3.0


def test_new_scale_of_another_type_is_refused() -> None:
    scaler = GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with pytest.raises(AssertionError, match="new_scale should be a float"):
        scaler.update("8")  # type: ignore[arg-type]


def test_new_scale_that_is_a_bool_is_refused() -> None:
    """torch's class raises an AttributeError for it."""
    scaler = make(GradScaler)
    _stepped(scaler)
    with pytest.raises(AssertionError, match="new_scale should be a float or a 1-element"):
        scaler.update(True)
    assert scaler.get_scale() == 2.0**10


def test_the_scale_stays_within_its_bounds() -> None:
    loop = Loop(GradScaler("cpu", config=ScalerConfig(4.0, min_scale=2.0, max_scale=8.0, growth_interval=1)), "SGD")
    for overflow, expected in ((True, 2.0), (True, 2.0), (False, 4.0), (False, 8.0), (False, 8.0)):
        loop.step(grads_for(loop.params, random.Random(0), overflow))
        assert loop.scaler.get_scale() == expected
    loop.step([torch.ones_like(param) for param in loop.params], new_scale=100.0)
    assert loop.scaler.get_scale() == 8.0


# safer than torch


@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW fused"])
@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 2.0**-128, 2.0**-60, math.inf, math.nan])
def test_nothing_infinite_reaches_an_optimizer_at_any_scale(name: str, scale: float) -> None:
    """torch steps on the product of a finite gradient and 1 / scale, infinite or NaN."""
    loop = Loop(GradScaler("cpu", skip="select"), name)
    loop.step([torch.ones_like(param) for param in loop.params], new_scale=scale)
    for size in (2.0**100, 2.0**-120, 0.0):
        loop.scaler.update(scale)
        loop.step([torch.full_like(param, size) for param in loop.params])
        assert all(param.isfinite().all() for param in loop.params), (size, loop.params)


def test_torch_steps_on_what_overflows_below_a_scale_of_one() -> None:
    """When this fails the difference can leave the docstring."""
    loop = Loop(torch.amp.GradScaler("cpu"), "SGD")
    loop.step([torch.ones_like(param) for param in loop.params], new_scale=2.0**-60)
    loop.step([torch.full_like(param, 2.0**100) for param in loop.params])
    assert not all(param.isfinite().all() for param in loop.params)


def _two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gradient is seen on two devices: cpu and cpu:0 are two keys."""
    real = unscale.by_device

    def both(*args: Any, **kwargs: Any) -> dict[torch.device, list[Tensor]]:
        (grads,) = real(*args, **kwargs).values()
        return {torch.device("cpu"): grads, torch.device("cpu", 0): [grad.clone() for grad in grads]}

    monkeypatch.setattr(unscale, "by_device", both)


def test_flag_of_two_devices_is_exactly_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _two_devices(monkeypatch)
    given = []
    loop = Loop(make(GradScaler), "AdamW fused")
    (optimizer,) = loop.optimizers
    optimizer.register_step_pre_hook(lambda self, *_: given.append(self.found_inf.item()))
    before = [param.detach().clone() for param in loop.params]
    loop.step(grads_for(loop.params, random.Random(0), True))
    assert given == [1.0]
    assert_same([param.detach() for param in loop.params], before)
    assert all(state["step"] == 0 for state in optimizer.state.values())
    assert loop.scaler.metrics().found_inf == 1.0


def test_a_fused_kernel_given_two_moves_its_count_back() -> None:
    """torch's own sum over devices. When this fails the difference can leave the docstring."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer: Any = torch.optim.AdamW([weight], fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(2.0)
    optimizer.step()
    assert optimizer.state[weight]["step"] == -1.0
    assert not torch.equal(weight, torch.ones(2))


@pytest.mark.parametrize("dampening", [0.0, 0.3])
def test_fused_momentum_starts_from_zeros_after_a_skip(dampening: float) -> None:
    """torch's class leaves memory that nobody wrote in the buffer: filled with NaN here, so that it shows."""
    torch.use_deterministic_algorithms(True)
    try:
        results = {}
        for kind, cls in (("ours", GradScaler), ("torch's", torch.amp.GradScaler)):
            for fused in (True, False):
                weight = torch.nn.Parameter(torch.ones(2))
                optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, dampening=dampening, fused=fused)
                scaler = make(cls)
                scaler.scale(torch.zeros(()))
                for grad in (math.inf, 3.0, 4.0):
                    weight.grad = torch.full((2,), grad)
                    scaler.step(optimizer)
                    scaler.update(1.0)
                results[kind, fused] = weight.detach()
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(results["ours", False], results["torch's", False])
    assert_same(results["ours", True], results["torch's", False])
    assert results["torch's", True].isnan().all(), "the difference can leave the docstring"


def test_float16_gradients_are_unscaled_in_float32_if_asked() -> None:
    weight = torch.nn.Parameter(torch.zeros(4).half())
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**26, allow_fp16=True)  # its reciprocal is 0 in float16
    scaler.scale(torch.zeros(()))
    given = torch.tensor([60000.0, -1.0, 3.0, 2.0**10]).half()
    weight.grad = given.clone()
    scaler.unscale_(optimizer)
    assert_same(weight.grad, (given.float() * 2.0**-26).half())
    scaler.step(optimizer)
    scaler.update(2.0**-10)
    assert weight[0] == -(given[0].float() * 2.0**-26).half()
    weight.grad = given.clone()
    scaler.step(optimizer)  # 60000 * 2**10 is not finite in float16
    assert weight[1] == (2.0**-26 * given.float()).half()[1].abs()
    scaler.update()
    assert scaler.metrics().found_inf == 1.0
    weight.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), given[:2], (4,), check_invariants=False)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.metrics().found_inf == 1.0


@pytest.mark.parametrize("skip", [None, "host", "select"])
def test_the_metrics_before_the_update_are_of_this_step(skip: Any) -> None:
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", skip=skip)
    for expected, value in ((0.0, 1.0), (1.0, math.inf), (0.0, 2.0)):
        scaler.scale((weight * value).sum()).backward()
        for call in (scaler.unscale_, scaler.step):
            call(optimizer)
            assert scaler.metrics().found_inf == expected
        scaler.update()
        assert scaler.metrics().found_inf == expected
        optimizer.zero_grad()


def test_the_description_of_gradients_that_were_cleared() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    assert "were cleared before" in describe_nonfinite(optimizer)
    weight.grad = torch.ones(2)
    assert "are finite by now" in describe_nonfinite(optimizer)
    weight.grad = torch.tensor([1.0, math.inf])
    assert "number 0 of group 0" in describe_nonfinite(optimizer)


MODES = [None, "host", "select"]


@pytest.mark.parametrize("skip", MODES)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW fused"])
@pytest.mark.filterwarnings("ignore:GradScaler.step. a skipped step cannot be undone.*given a closure:UserWarning")
def test_positional_closure_follows_torch(name: str, skip: Any) -> None:
    """Called unless the step is skipped: a fused optimizer's always."""
    seen = []
    for scaler in (make(GradScaler, skip=skip), make(torch.amp.GradScaler)):
        loop, returned = Loop(scaler, name), []
        (optimizer,) = loop.optimizers

        def closure(loop: Loop = loop) -> float:
            for param in loop.params:
                param.grad = torch.full_like(param, 0.5)
            return 7.0

        for overflow in (True, False, True):
            for param, grad in zip(loop.params, grads_for(loop.params, random.Random(0), overflow)):
                param.grad = grad
            returned.append(scaler.step(optimizer, closure))
            scaler.update()
        seen.append((returned, loop.state()[0], scaler.state_dict(), [param.grad for param in loop.params]))
    assert_same(*seen)


@pytest.mark.parametrize(
    ("name", "unscale", "warns"),
    [("SGD", False, True), ("SGD", True, True), ("AdamW fused", False, False), ("AdamW fused", True, True)],
)
def test_a_closure_that_scales_is_warned_of_where_nothing_unscales_it(name: str, unscale: bool, warns: bool) -> None:
    loop = Loop(make(GradScaler), name)
    (optimizer,) = loop.optimizers

    def closure() -> None:
        loop.scaler.scale(loop.params[0].sum()).backward()

    for param in loop.params:
        param.grad = torch.ones_like(param)
    if unscale:
        loop.scaler.unscale_(optimizer)
    with pytest.warns(UserWarning, match="called in the closure of step") if warns else contextlib.nullcontext():
        loop.scaler.step(optimizer, closure)
    loop.scaler.update()
    loop.scaler.scale(torch.zeros(()))


@pytest.mark.parametrize("skip", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unscaling_before_backward_raises_at_the_step(name: str, skip: Any) -> None:
    """As torch, which says "'int' object has no attribute 'device'" of a fused optimizer."""
    loop = Loop(make(GradScaler, skip=skip), name)
    (optimizer,) = loop.optimizers
    loop.scaler.unscale_(optimizer)
    for param in loop.params:
        param.grad = torch.ones_like(param)
    before = clone(loop.state()[:2])
    for _ in range(2):
        with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
            loop.scaler.step(optimizer)
        assert_same(loop.state()[:2], before)
    assert not hasattr(optimizer, "grad_scale")


def test_fused_optimizer_without_gradients_does_nothing() -> None:
    for cls in (GradScaler, torch.amp.GradScaler):
        loop = Loop(make(cls), "AdamW fused", "SGD")
        fused, other = loop.optimizers
        for param in other.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        loop.scaler.unscale_(fused)
        loop.scaler.step(fused)
        loop.scaler.step(other)
        loop.scaler.update()
        assert not fused.state


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"skip": "never"}, ValueError, 'skip must be "select", "host" or None; got \'never\''),
        ({"allow_fp16": 1}, TypeError, "allow_fp16 must be True or False; got 1"),
        ({"config": 3}, TypeError, "config must be a ScalerConfig"),
        ({"config": ScalerConfig(), "init_scale": 4.0}, ValueError, "must be left out if config is given"),
        ({"init_scale": 0.0}, ValueError, "init_scale must be positive and finite"),
        ({"backoff_factor": -1.0}, ValueError, "backoff_factor must be above 0 and at most 1; got -1.0"),
    ],
)
def test_a_bad_argument_is_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        GradScaler("cpu", **options)
    assert message in str(caught.value)


# reads


# On a CPU the others read their own counters.
@pytest.mark.parametrize("name", ["SGD", "SGD momentum", "SGD fused", "AdamW fused", "Muon"])
@pytest.mark.parametrize("unscale", [False, True])
def test_no_host_read_but_for_a_flag_at_the_step_that_makes_the_state(name: str, unscale: bool) -> None:
    loop, rng = Loop(make(GradScaler, skip="select"), name), random.Random(0)
    for step in range(6):
        grads = grads_for(loop.params, rng, step % 2 == 0)
        makes_state = name not in ("SGD", "AdamW fused") and not loop.optimizers[0].state
        with host_reads() as reads:
            for param, grad in zip(loop.params, grads):
                param.grad = grad
            if unscale:
                loop.scaler.unscale_(loop.optimizers[0])
            loop.scaler.step(loop.optimizers[0])
            loop.scaler.update()
            loop.scaler.metrics()
        assert len(reads) == int(makes_state)
    assert not makes_state


def test_the_read_that_torch_makes_is_caught() -> None:
    loop = Loop(make(torch.amp.GradScaler), "SGD")
    with host_reads() as reads:
        loop.step([torch.ones_like(param) for param in loop.params])
    assert reads


class Counting(torch.optim.SGD):
    """Keeps what no selection could put back: Python numbers, a tensor of its own, a new state at every step."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.steps, self.mean = 0, torch.zeros(())

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.steps += 1
        self.param_groups[0]["taken"] = self.param_groups[0].get("taken", 0) + 1
        for param in self.param_groups[0]["params"]:
            self.mean += param.detach().mean()
            self.state[param] = {"momentum_buffer": self.state[param]["momentum_buffer"] * 1.0}


def test_another_class_is_read_for_with_a_warning_and_follows_torch() -> None:
    """Selection would leave in it what a skipped step wrote."""
    results = []
    for scaler in (make(GradScaler, skip="select"), make(torch.amp.GradScaler)):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = Counting([weight], lr=1.0, momentum=0.9)
        scaler.scale(torch.zeros(()))
        first = isinstance(scaler, GradScaler)
        for grad in (math.inf, 1.0, math.nan, 1.0):
            weight.grad = torch.full((2,), grad)
            with pytest.warns(UserWarning, match="Counting is no class") if first else contextlib.nullcontext():
                scaler.step(optimizer)
            scaler.update(1.0)
            first = False
        results.append((weight.detach(), optimizer.state[weight], optimizer.mean, optimizer.steps))
        assert optimizer.param_groups[0]["taken"] == 2
    assert_same(*results)


def test_sparse_adam_is_read_for_with_its_own_reason() -> None:
    table = torch.nn.Embedding(8, 2, sparse=True)
    optimizer, scaler = torch.optim.SparseAdam(table.parameters()), make(GradScaler, skip="select")
    scaler.scale(table(torch.tensor([1, 2])).sum()).backward()
    with pytest.warns(UserWarning, match="SparseAdam takes steps whose size follows from values"):
        scaler.step(optimizer)


def test_hooks_see_no_step_that_is_put_back_unless_asked_to() -> None:
    expectations: list[tuple[Any, list[int]]] = [(None, [1]), ("host", [1]), ("select", [1, 1])]
    for skip, expected in expectations:
        loop = Loop(make(GradScaler, skip=skip), "SGD")
        called: list[int] = []
        (optimizer,) = loop.optimizers
        optimizer.register_step_post_hook(lambda *_, called=called: called.append(1))
        loop.step(grads_for(loop.params, random.Random(0), True))
        loop.step(grads_for(loop.params, random.Random(0), False))
        assert called == expected
        assert is_watched(optimizer)
    optimizer = torch.optim.SGD(loop.params, lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert not is_watched(optimizer)


def test_an_exception_in_a_step_that_is_to_be_skipped_leaves_the_parameters() -> None:
    loop = Loop(make(GradScaler, skip="select"), "AdamW")
    (optimizer,) = loop.optimizers
    before = [param.detach().clone() for param in loop.params]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    optimizer.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.step(grads_for(loop.params, random.Random(0), True))
    assert_same([param.detach() for param in loop.params], before)
    assert all(state["step"] == 0 for state in optimizer.state.values())


def test_a_tensor_subclass_is_read_for() -> None:
    class Named(torch.nn.Parameter):
        pass

    weight = Named(torch.ones(2))
    scaler = GradScaler("cpu", skip="select")
    scaler.scale(torch.zeros(()))
    weight.grad = torch.full((2,), math.inf)
    with pytest.warns(UserWarning, match="a parameter is a Named"):
        scaler.step(torch.optim.SGD([weight], lr=0.1))
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("fused", [False, True])
def test_distributed_tensors_follow_torch(fused: bool) -> None:
    """FSDP2's parameters, in a group of one process: torch's kernel takes the MAX over ranks of their flags."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh, results = init_device_mesh("cpu", (1,)), []
        for scaler in (make(GradScaler), make(torch.amp.GradScaler)):
            weight = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
            optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
            scaler.scale(torch.zeros(()))
            for size in (1.0, math.inf, 3.0):
                weight.grad = distribute_tensor(torch.full((4,), size), mesh, [Shard(0)])
                scaler.step(optimizer)
                scaler.update()
            results.append((weight.detach().full_tensor(), torch.tensor(scaler.get_scale())))  # type: ignore[attr-defined]
        assert_same(*results)
    finally:
        dist.destroy_process_group()


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("skip", ["select", "host"])
def test_a_compiled_loop_breaks_its_graph_at_the_scaler_and_follows_the_eager_one(skip: Any) -> None:
    def run(compiled: bool) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = GradScaler("cpu", init_scale=2.0**127, growth_interval=2, skip=skip)

        def loop(x: Tensor) -> None:
            model.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()

        call = torch.compile(loop, backend="eager") if compiled else loop
        scales = []
        for x in torch.randn(6, 3, 4) * 4:
            call(x)
            scales.append(scaler.get_scale())
        return scales, [param.detach() for param in model.parameters()]

    scales, params = run(compiled=True)
    expected_scales, expected_params = run(compiled=False)
    assert scales == expected_scales
    assert len(set(scales)) >= 3
    assert_same(params, expected_params)


@pytest.mark.compiled
def test_another_thread_that_compiles_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile sets a flag of the process."""
    loop = Loop(make(GradScaler, skip="select"), "SGD")
    called: list[int] = []
    loop.optimizers[0].register_step_post_hook(lambda *_: called.append(1))
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    loop.step(grads_for(loop.params, random.Random(0), False))
    assert called == [1]


def test_optimizer_that_takes_the_scaler_itself() -> None:
    class Takes(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
            grad_scaler.unscale_(self)
            return "stepped"

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    scaler = GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with pytest.warns(FutureWarning, match="going to stop passing itself"):
        assert scaler.step(Takes([weight], lr=1.0)) == "stepped"
    scaler.update()


def test_grad_scale_set_by_the_user_multiplies() -> None:
    """As torch's: a fused optimizer's own grad_scale is a factor, and both attributes are gone afterwards."""
    results = []
    for cls in (GradScaler, torch.amp.GradScaler):
        loop = Loop(make(cls), "AdamW fused")
        loop.optimizers[0].grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
        loop.step([torch.ones_like(param) for param in loop.params])
        assert not hasattr(loop.optimizers[0], "grad_scale")
        results.append([param.detach() for param in loop.params])
    assert_same(*results)


def test_metrics_are_copies_of_the_last_update() -> None:
    loop = Loop(make(GradScaler), "SGD")
    assert [leaf.item() for leaf in loop.scaler.metrics()] == [2.0**10, 0, 0.0]
    loop.step(grads_for(loop.params, random.Random(0), True))
    metrics = loop.scaler.metrics()
    loop.step(grads_for(loop.params, random.Random(0), False))
    assert [leaf.item() for leaf in metrics] == [pytest.approx(2.0**10 * 0.3), 0, 1.0]
    assert [leaf.item() for leaf in loop.scaler.metrics()][1:] == [1, 0.0]
    reader = funcamp.MetricReader()
    reader.put(loop.scaler.metrics())
    assert reader.ready()[0].found_inf == 0.0


def test_metrics_before_the_first_scale_are_what_was_loaded() -> None:
    saved = torch.amp.GradScaler("cpu").state_dict() | {"scale": 32.0, "_growth_tracker": 1500}
    scaler = GradScaler("cpu")
    scaler.load_state_dict(saved)
    torch.set_default_dtype(torch.float64)
    try:
        before = scaler.metrics()
    finally:
        torch.set_default_dtype(torch.float32)
    scaler.scale(torch.ones(()))
    assert_same(before, scaler.metrics())
    assert [leaf.item() for leaf in before] == [32.0, 1500, 0.0]


@pytest.mark.parametrize(
    ("skip", "fused", "reads"),
    [(None, True, 1), (None, False, 2), ("host", False, 2), ("select", True, 0), ("select", False, 0)],
)
def test_on_a_cpu_the_scale_is_read_and_the_flag_unless_the_optimizer_is_fused(
    skip: Any, fused: bool, reads: int
) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=fused)
    scaler = GradScaler("cpu", skip=skip)
    weight.grad = torch.ones(3)
    scaler.scale(torch.zeros(()))
    with host_reads() as found:
        scaler.step(optimizer)
        scaler.update()
    assert len(found) == reads, found
