"""The claim: every loop that `torch.amp.GradScaler` takes, `funcamp.GradScaler` takes, with the same bits.

Random loops: optimizers and their options, overflows, and what a user may do between `backward` and `update`. Every
decision comes from the seed alone, so that two scalers are given the same loop.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState as Stage

from funcamp import GradScaler

pytestmark = pytest.mark.slow

STEPS, LOOPS, PARTS = 5, 1000, 8
NUMBERS: dict[str, Any] = {"init_scale": 2.0**10, "growth_factor": 1.7, "backoff_factor": 0.4, "growth_interval": 2}

#: A fused step that torch begins and fails, for it has no flag to give; funcamp says so before. The loop ends.
UNSAFE = "unscaled before there was a gradient"


class OwnClass(torch.optim.Adam):
    """Not torch's own: a count on the host."""

    taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        return super().step(closure)


def flags(rng: random.Random, *names: str) -> dict[str, Any]:
    """Some of these options of a class of torch.optim."""
    values: dict[str, list[Any]] = {
        "foreach": [None, True, False], "fused": [None, None, True], "maximize": [False, False, True],
        "weight_decay": [0.0, 0.1], "amsgrad": [False, True], "capturable": [False] * 7 + [True],
        "momentum": [0.0, 0.9], "centered": [False, True], "lr_decay": [0.0, 0.1],
        "initial_accumulator_value": [0.0, 0.5], "nesterov": [False, True],
    }  # fmt: skip
    chosen = {name: rng.choice(values[name]) for name in names}
    if chosen.get("fused"):
        chosen["foreach"] = None
        chosen.pop("capturable", None)
    return chosen


def sgd(params: Any, rng: random.Random) -> torch.optim.Optimizer:
    options = flags(rng, "foreach", "fused", "maximize", "weight_decay", "momentum")
    if options["momentum"]:
        options |= rng.choice([{}, {"nesterov": True}, {"dampening": 0.3}])
    return torch.optim.SGD(params, lr=0.1, **options)


def adam(params: Any, rng: random.Random) -> torch.optim.Optimizer:
    options = flags(rng, "foreach", "fused", "maximize", "weight_decay", "amsgrad", "capturable")
    lr: Any = torch.tensor(0.1) if options["foreach"] is False and rng.random() < 0.3 else 0.1
    cls = torch.optim.Adam if rng.random() < 0.5 else torch.optim.AdamW
    return cls(params, lr=lr, **options)


def of(cls: Any, *names: str) -> Callable[[Any, random.Random], torch.optim.Optimizer]:
    return lambda params, rng: cls(params, lr=0.1, **flags(rng, *names))


CLASSES: dict[str, Callable[[Any, random.Random], torch.optim.Optimizer]] = {
    "SGD": sgd,
    "Adam": adam,
    "NAdam": of(torch.optim.NAdam, "foreach", "weight_decay", "maximize"),
    "RAdam": of(torch.optim.RAdam, "foreach", "weight_decay", "maximize"),
    "Adamax": of(torch.optim.Adamax, "foreach", "weight_decay", "maximize"),
    "Adagrad": of(torch.optim.Adagrad, "foreach", "fused", "lr_decay", "initial_accumulator_value", "maximize"),
    "Adadelta": of(torch.optim.Adadelta, "foreach", "weight_decay", "maximize", "capturable"),
    "Adafactor": of(torch.optim.Adafactor, "foreach", "weight_decay", "maximize"),
    "RMSprop": of(torch.optim.RMSprop, "foreach", "weight_decay", "momentum", "centered", "maximize"),
    "ASGD": of(torch.optim.ASGD, "foreach", "weight_decay", "maximize"),
    "Rprop": of(torch.optim.Rprop, "foreach", "maximize", "capturable"),
    "Muon": of(torch.optim.Muon, "weight_decay", "nesterov"),
    "SparseAdam": of(torch.optim.SparseAdam, "maximize"),
    "LBFGS": lambda params, rng: torch.optim.LBFGS(params, max_iter=2),
    "OwnClass": of(OwnClass, "amsgrad"),
}


def begun(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it must have taken a step: after a skipped first one torch's momentum is uninitialized memory."""
    return bool(optimizer.defaults.get("fused") and optimizer.defaults.get("momentum"))


def has_grads(optimizer: torch.optim.Optimizer) -> bool:
    return any(param.grad is not None for group in optimizer.param_groups for param in group["params"])


class Loop:
    """A random loop with a scaler; `run` lists what each call came to and left."""

    def __init__(self, seed: int, scaler: Any) -> None:
        self.rng, self.scaler = random.Random(seed), scaler
        self.numbers = torch.Generator().manual_seed(seed)
        names = [self.rng.choice(list(CLASSES)) for _ in range(self.rng.choice([1, 1, 2]))]
        self.seen: list[Any] = [names]
        self.sparse: set[Tensor] = set()
        self.optimizers = [self.optimizer(name) for name in names]

    def optimizer(self, name: str) -> torch.optim.Optimizer:
        groups: Any = [{"params": self.params(name)}]
        if self.rng.random() < 0.3 and name != "LBFGS":
            groups.append({"params": self.rng.choice([[], self.params(name)]), "lr": 0.05})
        made = CLASSES[name](groups, self.rng)
        if begun(made):
            for param in (param for group in made.param_groups for param in group["params"]):
                param.grad = torch.randn(param.shape, generator=self.numbers).to(param.dtype)
            made.step()
        return made

    def params(self, name: str) -> list[Tensor]:
        dtype = self.rng.choice([torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16])
        shapes: list[tuple[int, ...]] = [(3, 2), (4,), (), (0, 3)]
        if name == "Muon":
            shapes = [(3, 2), (2, 2)]
        elif name == "SparseAdam":
            shapes, dtype = [(4, 2)], torch.float32
        made = [self.param(shape, dtype) for shape in self.rng.sample(shapes, self.rng.randint(1, len(shapes)))]
        if name == "SparseAdam" or (dtype != torch.bfloat16 and self.rng.random() < 0.2):
            made.append(self.param((4, 2), dtype))
            self.sparse.add(made[-1])
        if name == "SparseAdam":
            self.sparse.update(made)
        return made

    def param(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.nn.Parameter(torch.randn(shape, generator=self.numbers).to(dtype))

    def backward(self, optimizer: torch.optim.Optimizer, overflows: bool, scaled: bool = True) -> Tensor:
        terms = []
        params = [param for group in optimizer.param_groups for param in group["params"]]
        bad = self.rng.randrange(len(params)) if overflows else None
        for index, param in enumerate(params):
            if self.rng.random() < 0.15 and index != bad:
                continue
            rows = torch.randint(4, (3,), generator=self.numbers)
            taken = torch.nn.functional.embedding(rows, param, sparse=True) if param in self.sparse else param
            factor = torch.randn(taken.shape, generator=self.numbers) * 10 ** self.rng.choice([-3, 0, 2])
            if factor.numel() and self.rng.random() < 0.5:
                factor.view(-1)[0] = self.rng.choice([0.0, -0.0])
            if index == bad and factor.numel():
                factor.view(-1)[-1] = self.rng.choice([math.inf, -math.inf, math.nan])
            terms.append((taken * factor.to(param.dtype)).sum().float())
        loss = torch.stack(terms).sum() if terms else torch.zeros((), requires_grad=True)
        (self.scaler.scale(loss) if scaled else loss).backward()
        return loss.detach()

    def attempt(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Note what a call returned or raised, and what is there after it."""
        try:
            outcome = call(*args, **kwargs)
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        values, states = [], []
        for optimizer in self.optimizers:
            for left in ("grad_scale", "found_inf"):  # torch leaves them where a fused step raises; the next is wrong
                vars(optimizer).pop(left, None)
            for group in optimizer.param_groups:
                for param in group["params"]:
                    values.append((frozen(param), frozen(param.grad)))
                    states.append(frozen(optimizer.state.get(param, {})))
        self.seen.append((name, frozen(outcome), values, states))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self.attempt("unscale_", self.scaler.unscale_, optimizer)
        grads = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        dense = not any(param.grad.is_sparse for param in grads)
        action = self.rng.randrange(10)
        if action == 0 and dense:
            torch.nn.utils.clip_grad_norm_(grads, 1.0)
        elif action == 1 and grads and dense:
            torch.nn.utils.clip_grad_value_(grads, 1.0)
        elif action == 2:
            optimizer.zero_grad(set_to_none=self.rng.random() < 0.7)
        elif action == 3 and grads:
            self.rng.choice(grads).grad = None
        elif action == 4 and grads:
            param = self.rng.choice(grads)
            param.grad = param.grad * 0.5
        elif action == 5:
            self.backward(optimizer, self.rng.random() < 0.3)
        elif action == 6 and grads and dense:
            self.rng.choice(grads).grad.fill_(math.inf)
        elif action == 7:
            self.attempt("unscale_ again", self.scaler.unscale_, optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        overflows, scaled = self.rng.random() < 0.3, self.rng.random() < 0.5

        def closure() -> Tensor:
            optimizer.zero_grad()
            return self.backward(optimizer, overflows, scaled)

        chance = 0.0 if isinstance(optimizer, torch.optim.LBFGS) and self.rng.random() < 0.9 else self.rng.random()
        if chance < 0.06 and (has_grads(optimizer) or not optimizer.defaults.get("fused")):
            self.attempt("step with closure", self.scaler.step, optimizer, closure)
        elif chance < 0.1:
            self.attempt("step with None", self.scaler.step, optimizer, None)
        elif chance < 0.12:
            self.attempt("step with named closure", self.scaler.step, optimizer, closure=closure)
        else:
            self.attempt("step", self.scaler.step, optimizer)

    def unsafe(self, optimizer: Any) -> bool:
        """Whether unscale_ saw no gradients, and now there are some, which are scaled."""
        noted = self.scaler._per_optimizer_states[id(optimizer)]
        unscaled = noted["stage"] is Stage.UNSCALED and not noted["found_inf_per_device"]
        return unscaled and has_grads(optimizer) and getattr(optimizer, "_step_supports_amp_scaling", False)

    def iterate(self) -> None:
        rng = self.rng
        for optimizer in self.optimizers:
            if rng.random() < 0.8:
                optimizer.zero_grad(set_to_none=rng.random() < 0.7)
            if rng.random() < 0.04:
                self.attempt("unscale_ early", self.scaler.unscale_, optimizer)
            self.backward(optimizer, rng.random() < 0.35)
        for optimizer in self.optimizers:
            if rng.random() < 0.35:
                self.unscale(optimizer)
        for optimizer in rng.sample(self.optimizers, len(self.optimizers)):
            if self.unsafe(optimizer):
                self.attempt(UNSAFE, self.scaler.step, optimizer)
                return
            if rng.random() > 0.05:
                self.step(optimizer)
            if rng.random() < 0.03:
                self.attempt("step again", self.scaler.step, optimizer)
        if rng.random() < 0.96:
            new_scale = rng.choice([None] * 8 + [2.0**8, torch.tensor(2.0**12)])
            self.attempt("update", self.scaler.update, new_scale)
            self.attempt("state_dict", self.scaler.state_dict)
        self.change()

    def change(self) -> None:
        """What happens to a run between two steps."""
        rng = self.rng
        for optimizer in self.optimizers:
            group, action = optimizer.param_groups[0], rng.randrange(14)
            if action < 3:
                if isinstance(group["lr"], Tensor):
                    group["lr"].mul_(0.5)
                else:
                    group["lr"] = group["lr"] * 0.5
            elif action == 3 and not isinstance(optimizer, torch.optim.LBFGS) and not group.get("fused"):
                optimizer.add_param_group({"params": [self.param((2, 2), torch.float32)]})
            elif action == 4:
                self.attempt("load", optimizer.load_state_dict, copy.deepcopy(optimizer.state_dict()))
            elif action == 5:
                with torch.no_grad():
                    group["params"][0].mul_(0.5)
            elif action == 6 and not begun(optimizer):
                optimizer.state.clear()
        if rng.random() < 0.1 and not self.scaler._per_optimizer_states:
            self.scaler = copy.deepcopy(self.scaler)

    def run(self) -> list[Any]:
        for _ in range(STEPS):
            self.iterate()
            # a step that fails half way: torch's SGD has not stored the momenta that it began
            if self.seen[-1][0] == UNSAFE or any("add(sparse, dense)" in str(call[1]) for call in self.seen[1:]):
                break
        return self.seen


def frozen(value: Any) -> Any:
    """A value as it is now, to compare: -0.0 differs from 0.0, and NaN equals NaN."""
    if isinstance(value, Tensor):
        if value.is_sparse:
            return "sparse", value.shape, frozen(value._indices()), frozen(value._values())
        return value.dtype, value.shape, repr(value.tolist())
    if isinstance(value, dict):
        return {key: frozen(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [frozen(entry) for entry in value]
    return repr(value)


def assert_same_calls(ours: list[Any], theirs: list[Any], skip: str | None) -> None:
    for index, ((name, *seen), (other, *wanted)) in enumerate(zip(ours[1:], theirs[1:])):
        assert name == other
        if name == UNSAFE:
            assert "AssertionError: No inf checks were recorded for this optimizer" in seen[0]
            return
        for what, left, right in zip(("outcome", "params and grads", "states"), seen, wanted):
            assert left == right, f"call {index}, {name}, {what}: {left} against {right}"
    assert len(ours) == len(theirs)


@pytest.mark.thorough(keep=1)
@pytest.mark.filterwarnings("ignore:GradScaler.step. a skipped step cannot be undone:UserWarning")
@pytest.mark.filterwarnings("ignore:GradScaler.scale. it is called in the closure of step:UserWarning")
@pytest.mark.parametrize("part", range(PARTS))
def test_random_loops_are_torchs(part: int) -> None:
    for seed in range(part, LOOPS, PARTS):
        expected = Loop(seed, torch.amp.GradScaler("cpu", **NUMBERS)).run()
        for skip in (None, "host", "select"):
            try:
                assert_same_calls(Loop(seed, GradScaler("cpu", skip=skip, **NUMBERS)).run(), expected, skip)
            except Exception as error:
                raise AssertionError(f"seed {seed}, skip={skip!r}, {expected[0]}") from error
