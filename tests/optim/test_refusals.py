"""What optimizers refuse: what is called, the error, and words that it must have."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ExponentialLR,
    LambdaLR,
    ReduceLROnPlateau,
    StepLR,
)

from funcamp import (
    average,
    by_group,
    chain,
    clip_by_norm,
    clip_by_value,
    every,
    make_train_step,
    ravel,
    schedule,
    stateless,
)
from tests.support.foreign import Base
from tests.support.helpers import assert_refused

optim = torch.optim
ANY: Any = 3
SGD, ADAMW = stateless(optim.SGD, lr=0.1), stateless(optim.AdamW)
PARAMS = {"b": torch.ones(3), "w": torch.ones(4, 3)}

Call = Callable[[], object]
Row = tuple[Call, type[Exception], str]


def updated(optimizer: Any, of: Any = None) -> Call:
    """Return an update, with the state of this optimizer or of another."""
    return lambda: optimizer.update(PARAMS, PARAMS, (of or optimizer).init(PARAMS))


HALF = torch.tensor(0.5)
GROUPED = by_group({"matrix": SGD, "vector": SGD})
OPTIMIZERS: dict[str, Row] = {
    "bool": (lambda: stateless(optim.SGD, nesterov=HALF), TypeError, "nesterov must be a bool, because it chooses"),
    "constant": (
        # contract: "a schedule or a tensor for Muon's `ns_coefficients`"
        lambda: stateless(optim.Muon, ns_coefficients=(HALF, 1.0, 2.0)),
        TypeError,
        "ns_coefficients must be a constant",
    ),
    "no float": (
        lambda: stateless(optim.AdamW, betas=(torch.tensor(1), 0.9)),
        TypeError,
        r"betas must hold a float, as torch\.tensor\(1\.0\) does; got torch",
    ),
    "shape": (
        lambda: stateless(optim.AdamW, betas=(0.9, torch.ones(3))),
        ValueError,
        r"betas must have shape \(\); got \(3,\)",
    ),
    "differentiated": (
        lambda: torch.func.grad(lambda w: SGD.update(w, 2 * w, SGD.init(torch.ones(2)))[0].sum())(torch.ones(2)),
        ValueError,
        "no gradient flows through",
    ),
    "assigned": (
        lambda: setattr(SGD, "lr", 0.1),
        AttributeError,
        "lr cannot be assigned.* Make another with lr=0.1",
    ),
    "item assigned": (lambda: cast(Any, SGD.hyperparameters).update(lr=0.1), AttributeError, "update"),
    "assigned group": (lambda: setattr(GROUPED, "group", abs), AttributeError, "group cannot be assigned"),
    "state of a chain": (
        updated(ADAMW, chain(ADAMW, average(0.5))),
        TypeError,
        "must be an OptState, .*; got a tuple of an OptState, an Average",
    ),
    "state without an average": (
        updated(chain(ADAMW, average(0.5)), ADAMW),
        ValueError,
        r"must be a tuple with a state for each of.*average\(0.5\).*: begin an average with",
    ),
    "states without another average": (
        updated(chain(ADAMW, average(0.5), average(0.9)), chain(ADAMW, average(0.5))),
        ValueError,
        r"begin an average with state._replace\(opt_state=\(\*state\.opt_state, funcamp.average",
    ),
    "groups of another state": (
        lambda: ADAMW.update(ravel(PARAMS), ravel(PARAMS), ADAMW.init(ravel(PARAMS, group=lambda *_: "all"))),
        ValueError,
        r"groups of opt_state; got Params\(2 tensors in {vector: .*Params\(2 tensors in {all: .*state.params.ravel\(tree\)",
    ),
    "order of states": (
        updated(chain(average(0.5), ADAMW), chain(ADAMW, average(0.5))),
        AttributeError,
        "'OptState' object has no attribute 'average'",
    ),
}


def of_another(optimizer: optim.Optimizer) -> Any:
    return StepLR(optim.SGD([torch.zeros(1)]), 3)


def resumed(optimizer: optim.Optimizer) -> Any:
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return LambdaLR(optimizer, lambda count: 1.0, last_epoch=500)


def scheduled(make: Any, optimizer: Any = SGD, steps: Any = 9) -> Call:
    return lambda: schedule(optimizer, make, steps=steps)


def steps_of_3(optimizer: optim.Optimizer) -> Any:
    return StepLR(optimizer, 3)


def is_infinite_at_3(optimizer: optim.Optimizer) -> Any:
    return LambdaLR(optimizer, lambda count: math.inf if count == 3 else 1.0)


SCHEDULES: dict[str, Row] = {
    "make": (scheduled(3), TypeError, "make must be a function from torch's optimizer to its scheduler, .*; got 3$"),
    "nothing": (scheduled(lambda o: None), TypeError, "make must return a scheduler of the optimizer .*; got None$"),
    "of another": (scheduled(of_another), TypeError, "a scheduler of the optimizer that it is given"),
    "a list": (scheduled(lambda o: [StepLR(o, 1)]), TypeError, "SequentialLR and ChainedScheduler combine several"),
    "plateau": (scheduled(ReduceLROnPlateau), TypeError, "missing 1 required positional argument: 'metrics'"),
    "resumed": (scheduled(resumed), ValueError, "starts at step 0, .* a LambdaLR with last_epoch=501: leave"),
    "resumed inside": (
        scheduled(lambda o: ChainedScheduler([ExponentialLR(o, 0.9), ExponentialLR(o, 0.9, last_epoch=7)])),
        ValueError,
        "starts at step 0, .* a ExponentialLR with last_epoch=8",
    ),
    "a tensor": (
        scheduled(lambda o: LambdaLR(o, lambda count: HALF)),  # type: ignore[arg-type, return-value]
        TypeError,
        "lr of LambdaLR must be a Python number; got a torch.float32 tensor",
    ),
    "inf": (scheduled(is_infinite_at_3), ValueError, "lr of LambdaLR must be finite; got inf after 3 steps"),
    "steps": (scheduled(steps_of_3, steps=2.0), TypeError, "steps must be an integer; got 2.0"),
    "no steps": (scheduled(steps_of_3, steps=0), ValueError, "steps must be 1 or more; got 0"),
    "torch's optimizer": (
        scheduled(steps_of_3, optim.SGD([torch.zeros(1)])),
        TypeError,
        "optimizer must be made by stateless, .*; got a SGD",
    ),
    "groups": (
        scheduled(steps_of_3, GROUPED),
        TypeError,
        "got a GroupedOptimizer: schedule each optimizer of by_group by itself",
    ),
    "scheduled": (
        scheduled(steps_of_3, stateless(optim.SGD, lr=lambda count: 0.1)),
        TypeError,
        "a number as lr, because StepLR sets it; got <function",
    ),
}


def step_of(optimizer: Any) -> Any:
    return make_train_step(lambda params, batch: (params["w"] * batch).sum(), optimizer)


def by_letter(number: int) -> Callable[[str, Tensor], str]:
    return lambda name, _: name[number]


def by_two_functions() -> Any:
    return chain(*(by_group({"w": SGD}, group=by_letter(number)) for number in (0, -1)))


def without_b(update: Any) -> Any:
    return update._replace(gradients={"b": None, "w": update.gradients["w"]})


AFTER = r"make_train_step: optimizer must have a part after clip_by_\w+\(0.1\)"
CHAINS: dict[str, Row] = {
    "no parts": (chain, TypeError, "chain: parts must be given"),
    "a number": (lambda: chain(clip_by_norm(1.0), ANY), TypeError, r"chain: parts\[1\] must be a pure optimizer"),
    "a class": (lambda: chain(optim.AdamW), TypeError, r"parts\[0\].*write stateless\(torch.optim.AdamW"),
    "interval": (lambda: every(0, SGD), ValueError, "every: interval must be 1 or more; got 0"),
    "part of every": (lambda: every(2, "sgd"), TypeError, "every: part must be a pure optimizer with init and update"),
    "decay": (lambda: average(2), ValueError, "average: decay must be from 0 to 1; got 2"),
    "bound": (lambda: clip_by_value(torch.ones(2)), ValueError, r"clip_by_value: max_value must have shape \(\)"),
    "nothing returned": (updated(chain(lambda update: None, SGD)), TypeError, "must return an Update.*got None"),
    "a gradient left out": (
        updated(chain(every(2, without_b), SGD)),
        ValueError,
        r"must return gradients\['b'\] as it got it, .*zeros for no gradient",
    ),
    "clip after the optimizer": (lambda: step_of(chain(SGD, clip_by_value(0.1), average(0.5))), ValueError, AFTER),
    "clip after a group's": (
        lambda: step_of(by_group({"matrices": SGD, "vectors": chain(SGD, clip_by_value(0.1))})),
        ValueError,
        AFTER,
    ),
    "average in a group": (
        lambda: step_of(by_group({"matrix": chain(SGD, average(0.5)), "vector": SGD})),
        ValueError,
        r"make_train_step: optimizer must have its averages .*: write chain\(by_group\(...\), average\(decay\)\)",
    ),
    "average in a delayed chain": (
        lambda: step_of(chain(every(2, chain(SGD, average(0.5))), average(0.5))),
        ValueError,
        "must have its averages as parts of its outermost chain",
    ),
    "two groupings": (lambda: step_of(by_two_functions()), ValueError, "must group parameters by one function"),
    "every to torch": (
        lambda: step_of(chain(every(2, ADAMW))).to_torch(step_of(chain(every(2, ADAMW))).init(PARAMS)),
        TypeError,
        "must be made by stateless; got every",
    ),
}


class NeedsClosure(Base):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class KeepsObject(Base):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.counter = iter(range(99))


class SortsIntoGroups(Base):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__([{"params": [p]} for p in params], lr)


class KeepsElsewhere(Base):
    count = itertools.count(1)

    def move(self, p: Any, state: Any, group: Any) -> None:
        p.sub_(p.grad, alpha=group["lr"] / next(KeepsElsewhere.count))


class KeepsRate(Base):
    def __init__(self, params: Any, lr: Any = 0.1) -> None:
        super().__init__(params, lr)
        self.rate = lr

    def move(self, p: Any, state: Any, group: Any) -> None:
        p.sub_(p.grad, alpha=self.rate)


class Hooked(Base):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.register_step_post_hook(lambda *_: None)


class Counts(Base):
    options: ClassVar[dict[str, Any]] = {"k": 1}

    def begin(self, group: Any) -> None:
        group["k"] += 1


class Reads(Counts):
    def move(self, p: Any, state: Any, group: Any) -> None:
        p.sub_(p.grad, alpha=(1.0, 0.5)[int(group["k"]) % 2])


class Draws(Base):
    def move(self, p: Any, state: Any, group: Any) -> None:
        p.sub_(torch.randn_like(p))


class DrawsLate(Counts):
    def move(self, p: Any, state: Any, group: Any) -> None:
        p.sub_(torch.randn_like(p) if group["k"] > 100 else p.grad)


class Grows(Base):
    def move(self, p: Any, state: Any, group: Any) -> None:
        state[f"grad {len(state)}"] = p.grad.clone()


class KeepsByText(Base):
    def move(self, p: Any, state: Any, group: Any) -> None:
        table: Any = self.state
        table["k"] = p.grad.sum()


class ChangesText(Base):
    def move(self, p: Any, state: Any, group: Any) -> None:
        state["phase"] = "late" if state.get("phase") else "early"
        p.sub_(p.grad)


class AsksTooMuch(Base):
    def move(self, p: Any, state: Any, group: Any) -> None:
        for element in range(5):
            if p.grad.flatten()[element % p.numel()] > element:
                p.sub_(0.1)


class DependsAndAsks(Base):
    """A rate that depends on all gradients, and questions of each parameter."""

    def begin(self, group: Any) -> None:
        group["lr"] = 0.1 / max(1.0, sum(p.grad.norm().item() for p in group["params"]))

    def move(self, p: Any, state: Any, group: Any) -> None:
        rate = group["lr"] * (0.1 if p.grad.norm().item() > 5 else 1.0)
        rate = rate * 0.5 if p.abs().max() > 2 else rate
        p.sub_(p.grad, alpha=rate if p.grad.max() > 2 else 2 * rate)


class UsesLists(Counts):
    def move(self, p: Any, state: Any, group: Any) -> None:
        torch._foreach_add_([p], [p.grad], alpha=-1 / group["k"])


#: Classes that are not followed, and the reason that is given.
CLASSES: dict[Any, str] = {
    NeedsClosure: "missing 1 required positional argument: 'closure'",
    KeepsObject: "it keeps an object as self.counter",
    SortsIntoGroups: "it sorts its parameters into groups",
    KeepsElsewhere: "comes to other numbers than in its own loop",
    Hooked: "hooks on its step",
    Reads: (
        # contract: "Anything else that it asks of such a number is refused by name"
        "reads a number that changes in training"
    ),
    Draws: (
        # contract: "optimizers of other packages that draw random numbers"
        "draws random numbers"
    ),
    DrawsLate: "its step draws random numbers; draw them in a part of a chain",
    Grows: "must have the same entries",
    KeepsByText: (
        # contract: "or keep state under a text"
        "parameters as keys of"
    ),
    ChangesText: "its step changes 'phase'|must be a tensor or a number",
    AsksTooMuch: "in more than 16 ways",
    DependsAndAsks: (
        # contract: "whose parameters depend on each other, and branch more than 16 ways together"
        "depends on another one|more than 16 ways|changes lr"
    ),
    UsesLists: "pass foreach=False",
}
FOREIGN: dict[str, Row] = {
    cls.__name__: (
        functools.partial(stateless, cls),
        TypeError,
        f"^stateless: {cls.__name__} cannot be made pure: .*({reason})",
    )
    for cls, reason in CLASSES.items()
}
FOREIGN |= {
    "tensor that a class keeps": (
        lambda: stateless(KeepsRate, lr=torch.tensor(0.1)),
        TypeError,
        "uses a number of its constructor that is a tensor or a schedule here",
    ),
}
CALLS = {**OPTIMIZERS, **SCHEDULES, **CHAINS, **FOREIGN}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_refused(name: str) -> None:
    assert_refused(*CALLS[name])


@pytest.mark.compiled
def test_torch_compile_of_another_class_is_refused_and_jit_is_named() -> None:
    optimizer = stateless(KeepsRate)
    update = torch.compile(optimizer.update, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"compile the step with funcamp\.jit"):
        update(PARAMS, PARAMS, optimizer.init(PARAMS))
