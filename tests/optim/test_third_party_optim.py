"""`stateless` on optimizers that torch does not ship: pure ones follow themselves, others are refused with a reason."""

from __future__ import annotations

import collections
import math
from typing import Any

import numpy as np
import pytest
import torch

from funcamp import jit, make_train_step, stateless
from tests.support.helpers import assert_close, assert_same, clone
from tests.support.torch_loop import TorchLoop, linear_step, randn_like


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (https://arxiv.org/abs/2302.06675), with a counter in a Python int."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        if not lr > 0:
            raise ValueError(f"lr must be positive; got {lr}")
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["slow"] = p.clone()
                state["step"] += 1
                beta1, beta2 = group["betas"]
                correction = 1 - beta1 ** state["step"]
                direction = (state["exp_avg"] * beta1 + p.grad * (1 - beta1)).sign()
                p.add_(direction * correction, alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)
                state["slow"].lerp_(p, 0.1)


class Shampooing(torch.optim.Optimizer):
    """Keeps a matrix of torch's default dtype for each parameter, and multiplies gradients by it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() == 2:
                    state = self.state[p]
                    if not state:
                        state["left"] = torch.eye(p.shape[0], device=p.device)
                    state["left"].mul_(0.9).add_(p.grad @ p.grad.T, alpha=0.1)
                    p.add_(state["left"] @ p.grad * -group["lr"])


class GradWriter(torch.optim.SGD):
    """Writes into the gradients it is given."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(2)
            p.sub_(p.grad)


class Refused(torch.optim.Optimizer):
    """The part of a refused optimizer that does not matter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    def each(self) -> Any:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("step", torch.zeros(()))
            state["step"] += 1
            yield p, state


class ReadsItem(Refused):
    """Takes the root of a tensor that it reads."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, state in self.each():
            p.sub_(p.grad * self.param_groups[0]["lr"] / math.sqrt(state["step"].item()))


class ReadsCounter(torch.optim.Optimizer):
    """Has two counters in Python ints, and computes with both."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def weight(self, seen: Any, count: Any) -> Any:
        return 1 / (seen * math.sqrt(count))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["seen"], state["count"] = 0, 0
            state["seen"] += 1
            state["count"] += 1
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] * self.weight(state["seen"], state["count"]))


class BranchesOnCounter(ReadsCounter):
    """Reads the counter in an if, twice."""

    def weight(self, seen: Any, count: Any) -> Any:
        weight = 1 / seen if count > 3 else 0.1
        return weight if count % 4 != 0 else max(weight, min(0.5, 2 / count))


class ReadsGradBesideCounter(ReadsCounter):
    """Reads a gradient after the first step."""

    def weight(self, seen: Any, count: Any) -> Any:
        if not isinstance(seen, int) or seen > 1:
            return self.param_groups[0]["params"][0].grad.norm().tolist()
        return 1 / seen


class IndexesByCounter(ReadsCounter):
    """Takes a weight out of a list by a count."""

    def weight(self, seen: Any, count: Any) -> Any:
        return [1.0, 0.5, 0.2][int(count % 3)]


class Branches(Refused):
    """Asks for each parameter whether its gradient is large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, _ in self.each():
            if p.grad.norm() > 2:
                p.sub_(p.grad, alpha=0.1)


class CountsInGroup(Refused):
    """Counts in its parameter group, which has the count from the constructor, and adds up in one that it makes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["k"] += 1
        group["total"] = group.get("total", 0.0) + group["lr"] / math.pow(group["k"], 0.5)
        for p, _ in self.each():
            p.sub_(p.grad / group["total"], alpha=0.1 if group["k"] > 2 else 0.2)


class CountsInAttribute(Refused):
    """Counts in an attribute, and keeps a tensor of all parameters in one, and in the state of none."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.count = 0
        self.mean = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        grads = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = torch.stack([grad.norm().float() for grad in grads]).sum()
        self.mean = self.mean.to(norm.device) + (norm - self.mean.to(norm.device)) / self.count
        shared: Any = self.state
        shared["largest"] = max(float(self.mean), shared.get("largest", 0.0))
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad / (1 + self.mean.to(p.dtype) + shared["largest"]))


class Projector:
    """An object in a state."""

    def __init__(self) -> None:
        self.matrix: Any = None
        self.age = 0


class KeepsContainers(Refused):
    """Keeps lists, a dict, a text, None, and an object in a parameter's state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, state in self.each():
            if "means" not in state:
                state["means"] = [torch.zeros_like(p), torch.zeros_like(p)]
                state["by_decay"] = {0.5: torch.zeros_like(p), 0.9: torch.zeros_like(p)}
                state["mode"], state["lost"], state["projector"] = "warm", None, Projector()
            for index, mean in enumerate(state["means"]):
                mean.lerp_(p.grad, 0.5 / (1 + index))
            for decay, buffer in state["by_decay"].items():
                buffer.mul_(decay).add_(p.grad)
            projector = state["projector"]
            if projector.matrix is None:
                projector.matrix = torch.ones_like(p)
            projector.age += 1
            if projector.age % 2 == 0:
                projector.matrix = projector.matrix * 0.9
            total = sum(state["by_decay"].values()) + sum(state["means"])
            p.sub_(total * projector.matrix, alpha=0.05)


class KeepsByParameter(Refused):
    """Keeps averages in dicts of its own: one by the parameter, one by its id, and one that all share."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__([p for p in params if p.requires_grad], lr)
        self.slow: dict[Any, Any] = {}
        self._by_id: dict[int, Any] = {}
        self._numbers = {"largest": torch.zeros(())}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        shared: Any = self.state
        shared.setdefault("fast", {})
        for p, _ in self.each():
            if p not in self.slow:
                self.slow[p], shared["fast"][p] = torch.zeros_like(p), p.clone()
                self._by_id[id(p)] = {"norm": torch.zeros((), dtype=p.dtype, device=p.device)}
            self.slow[p].lerp_(p.grad, 0.1)
            shared["fast"][p].lerp_(p, 0.5)
            self._by_id[id(p)]["norm"].lerp_(p.grad.norm(), 0.3)
            self._numbers["largest"] = torch.maximum(self._numbers["largest"].to(p.device), p.grad.norm().float())
            scale = (1 + self._by_id[id(p)]["norm"]) * (1 + self._numbers["largest"].to(p.dtype))
            p.sub_((self.slow[p] + 0.01 * shared["fast"][p]) / scale)


class ChangesModes(Refused):
    """Trains with other weights than those of an evaluation, and must be told which are in use."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["train_mode"] = False

    def train(self) -> None:
        self.param_groups[0]["train_mode"] = True

    def eval(self) -> None:
        for p in self.param_groups[0]["params"]:
            if "mean" in self.state[p]:
                p.data.copy_(self.state[p]["mean"])
        self.param_groups[0]["train_mode"] = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("call train() first")
        for p, state in self.each():
            state.setdefault("mean", p.clone())
            p.sub_(p.grad, alpha=0.1)
            state["mean"].lerp_(p, 1 / (1 + state["step"].to(p.dtype)))


class DividesByZero(Refused):
    """Divides by a sum that is 0 in the first steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["k"] += 1
        weight = 0.0 if group["k"] < 3 else 1.0
        group["sum"] = group.get("sum", 0.0) + weight
        try:
            share = weight / group["sum"]
        except ZeroDivisionError:
            share = 0.25
        for p, _ in self.each():
            p.sub_(p.grad, alpha=share)


class AsksTooMuch(Refused):
    """Searches for a length by halves."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, _ in self.each():
            length = torch.ones((), dtype=p.dtype, device=p.device)
            for _ in range(6):
                length = length / 2 if (p.grad * length).norm() > 0.3 else length * 1.5
            p.sub_(p.grad * length)


class AsksThreeOfEach(Refused):
    """Asks little of each parameter, and too much of two together: each steps alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, _ in self.each():
            for limit in (0.3, 0.6, 0.9):
                if p.grad.abs().max() > limit:
                    p.sub_(p.grad, alpha=limit)


class GrowsState(Refused):
    """Keeps the last four gradients, and makes an average of them in the third step, as of other slow averages."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["k"] += 1
        for p, state in self.each():
            state.setdefault("last", collections.deque(maxlen=4)).append(p.grad.clone())
            if self.param_groups[0]["k"] % 3 == 0:
                if "slow" not in state:
                    state["slow"] = p.clone()
                state["slow"].lerp_(p, 0.5)
                p.copy_(state["slow"])
            p.sub_(sum(state["last"]), alpha=0.1)


class LosesState(Refused):
    """Warms up with an entry that it then deletes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["k"] += 1
        for p, state in self.each():
            if self.param_groups[0]["k"] < 4:
                p.sub_(state.setdefault("warm", torch.zeros_like(p)).add_(p.grad), alpha=0.1)
            else:
                state.pop("warm", None)
                p.sub_(p.grad, alpha=0.1)


class AsksForTypes(Refused):
    """Computes otherwise with a float than with an int, by their types."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["k"] += 1
        group["share"] = type(group["lr"])(group["k"] / 2)
        for p, _ in self.each():
            if type(group["k"]) is int and type(group["share"]) == float and type(group["lr"]) in (float,):  # noqa: E721
                p.sub_(p.grad, alpha=group["lr"] * group["share"])
            if isinstance(self, type) or type(self) is not AsksForTypes or type(p.grad) is not torch.Tensor:
                p.zero_()


class AsksIfTrue(Refused):
    """Asks a flag that changes in the fourth step whether it is True itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["k"] += 1
        group["is_warm"] = group["k"] > 3
        for p, _ in self.each():
            p.sub_(p.grad, alpha=0.1 if group["is_warm"] is True else 0.01)


class GrowsForEver(Refused):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, state in self.each():
            state.setdefault("all", []).append(p.grad.clone())


class AsksWhetherEqual(Refused):
    """Takes another step where the gradient's signs are those of the last one, or its numbers near them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, state in self.each():
            last = state.setdefault("last", torch.zeros_like(p))
            if torch.equal(last.sign(), p.grad.sign()) or torch.allclose(last, p.grad, atol=0.7):
                p.sub_(p.grad, alpha=0.1)
            last.copy_(p.grad)
            p.sub_(p.grad, alpha=0.1)


class ChangesText(Refused):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _, state in self.each():
            state["mode"] = "warm" if "mode" not in state or state["mode"] == "cold" else "cold"


class SortsIntoGroups(torch.optim.SGD):
    """Makes two parameter groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__([{"params": list(params)}, {"params": []}], lr)


class DrawsNumbers(Refused):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, _ in self.each():
            p.sub_(p.grad * np.random.random())


class NormalizesRarely(Refused):
    """Element by element, but in every fiftieth step of its group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["k"] += 1
        for p, _ in self.each():
            update = p.grad / p.grad.norm() if group["k"] % 50 == 0 else p.grad
            p.sub_(update, alpha=group["lr"])


def test_a_class_that_normalizes_in_a_rare_branch_is_not_pointwise() -> None:
    assert not stateless(NormalizesRarely)._traits.pointwise
    assert stateless(CountsInGroup)._traits.pointwise


FOLLOWERS = [
    *(ReadsItem, ReadsCounter, BranchesOnCounter, Branches, CountsInGroup, CountsInAttribute),
    *(KeepsContainers, KeepsByParameter, ChangesModes, DividesByZero, GrowsState, LosesState, AsksWhetherEqual),
    *(AsksForTypes, AsksThreeOfEach),
]


def example() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(3, 2), "b": torch.randn(4)}


@pytest.mark.parametrize("cls", FOLLOWERS, ids=lambda cls: cls.__name__)
def test_training_continues_from_a_saved_state(cls: Any) -> None:
    step = linear_step(stateless(cls))
    state = step.init(example())
    for _ in range(3):
        state, _ = step(state, example())
    zeros = {name: torch.zeros_like(value) for name, value in example().items()}
    loaded = step.load_state_dict(step.state_dict(state), like=step.init(zeros))
    grads = example()
    assert_same(step(loaded, grads)[0].params.tree(), step(state, grads)[0].params.tree())


@pytest.mark.parametrize(
    "cls", [ReadsCounter, BranchesOnCounter, CountsInGroup, DividesByZero], ids=lambda cls: cls.__name__
)
def test_training_continues_in_a_torch_loop_and_back(cls: Any) -> None:
    """The counts of a class are Python's numbers in torch's format, in states and in the group."""
    params = example()
    grads = [randn_like(params) for _ in range(9)]
    step = linear_step(stateless(cls))
    state = step.init(params)
    for number in range(3):
        state, _ = step(state, grads[number])

    exported = step.to_torch(state)["optimizer"]
    loop = TorchLoop(cls, state.params.tree())
    loop.optimizer.load_state_dict(exported)
    for number in range(3, 6):
        state, _ = step(state, grads[number])
        loop.step(grads[number])
    assert_close(state.params.tree(), loop.params(), 1e-6)

    again = step.init(clone(loop.params()))
    again = step.from_torch(again, optimizer=loop.optimizer.state_dict(), steps=6)
    for number in range(6, 9):
        state, _ = step(state, grads[number])
        again, _ = step(again, grads[number])
    assert_close(again.params.tree(), state.params.tree(), 1e-6)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (KeepsContainers, "KeepsContainers keeps 'means\\[0\\]' in a container"),
        (KeepsByParameter, "KeepsByParameter keeps .* in a container"),
        (LosesState, "LosesState adds or removes entries in later steps"),
    ],
)
def test_a_state_that_torchs_format_does_not_name_is_refused(cls: Any, reason: str) -> None:
    step = make_train_step(lambda p, batch: (p["w"] * batch).sum(), stateless(cls), policy=None)
    state, _ = step(step.init({"w": torch.ones(2, 2)}), torch.ones(2, 2))
    with pytest.raises(TypeError, match=reason):
        step.to_torch(state)


def test_evaluation_params_are_those_that_the_classs_eval_sets() -> None:
    params = example()
    loop, optimizer = TorchLoop(ChangesModes, params), stateless(ChangesModes)
    loop.optimizer.train()
    opt_state = optimizer.init(params)
    for _ in range(4):
        grads = randn_like(params)
        params, opt_state = optimizer.update(params, grads, opt_state)
        loop.step(grads)
    loop.optimizer.eval()
    evaluated = optimizer.evaluation_params(params, opt_state)
    assert_close(evaluated, loop.params(), 1e-6)
    assert not torch.equal(evaluated["w"], params["w"])


class Wraps(torch.optim.Optimizer):
    """Steps by another optimizer, and every second time draws the parameters to where they were."""

    def __init__(self, params: Any) -> None:
        self.optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        self.defaults, self.state = self.optimizer.defaults, self.optimizer.state
        self.param_groups = self.optimizer.param_groups
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        before = [p.clone() for p in self.param_groups[0]["params"]]
        self.optimizer.step()
        self.count += 1
        if self.count % 2 == 0:
            for p, former in zip(self.param_groups[0]["params"], before):
                p.lerp_(former, 0.5)


@torch.compile(backend="eager")
def compiled_update(p: torch.Tensor, grad: torch.Tensor, rate: torch.Tensor) -> None:
    p.sub_(grad * rate)


class Compiles(Refused):
    """Has parts under torch.compile: a function of its module, a static one, a method, and one that it makes."""

    static_update = staticmethod(torch.compile(compiled_update, fullgraph=True, backend="eager"))

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.own_update = torch.compile(lambda p, grad: p.sub_(grad * 0.1), backend="eager")

    @torch.compile(backend="eager")
    def halve(self, p: torch.Tensor) -> None:
        p.mul_(0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, state in self.each():
            compiled_update(p, p.grad, 0.1 / state["step"].to(p.device))
            self.static_update(p, p.grad, 0.1 / state["step"].to(p.device))
            self.own_update(p, p.grad)
            self.halve(p)


class Decomposes(Refused):
    """Decomposes a matrix in every third step, which fails for NaN."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["k"] += 1
        for p, state in self.each():
            matrix = p.grad.reshape(p.shape[0], -1)
            state.setdefault("basis", torch.zeros(p.shape[0], p.shape[0], dtype=p.dtype, device=p.device))
            if self.param_groups[0]["k"] % 3 == 0:
                state["basis"].copy_(torch.linalg.eigh(matrix @ matrix.mT + torch.eye(p.shape[0]).to(matrix))[1])
            p.sub_((state["basis"] @ matrix).reshape(p.shape), alpha=0.1)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("flat", [False, True], ids=["per_tensor", "flat"])
@pytest.mark.parametrize("cls", [*FOLLOWERS, Wraps, Compiles, Decomposes], ids=lambda cls: cls.__name__)
def test_a_class_follows_itself_with_skipped_steps(cls: Any, flat: bool, jitted: bool) -> None:
    """Infinite gradients are skipped."""
    # Other gradients of the padding would be another norm: flat storage is for elementwise classes.
    step = linear_step(stateless(cls))
    run = jit(step, backend="eager") if jitted else step
    params = {**example(), "v": torch.randn(3, 2)}
    state = step.init(params, flat=flat)
    loop = TorchLoop(cls, params)
    if cls is ChangesModes:
        loop.optimizer.train()
    for number in range(12):
        grads = randn_like(params)
        if number in (0, 4, 7):
            state, metrics = run(state, {name: grad * math.inf for name, grad in grads.items()})
            assert metrics.found_inf
            continue
        state, _ = run(state, grads)
        assert_close(state.params.tree(), loop.step(grads), 1e-6)


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_class_with_counters_follows_itself_from_its_first_values(compiled: bool) -> None:
    params = example()
    loop, optimizer = TorchLoop(Lion, params), stateless(Lion)
    update = torch.compile(optimizer.update, fullgraph=True, backend="aot_eager") if compiled else optimizer.update
    opt_state = optimizer.init(params)
    assert_same(opt_state.state["step"]["w"], torch.tensor(0))
    assert_same(opt_state.state["slow"], params)
    for _ in range(6):
        grads = randn_like(params)
        params, opt_state = update(params, grads, opt_state)
        assert_close(params, loop.step(grads), 1e-6)
    assert opt_state.state["step"]["b"] == 6


def test_counters_that_a_class_computes_with_are_entries_of_its_state() -> None:
    entries = stateless(ReadsCounter, lr=torch.tensor(0.1)).init({"w": torch.zeros(2)}).state
    assert_same(entries, {"seen": {"w": torch.tensor(0)}, "count": {"w": torch.tensor(0)}})


def test_a_class_may_call_as_tensor_on_a_tensor() -> None:
    """In a region of torch.device("cpu") `torch.as_tensor` would copy the trial's tensors, which have no values."""

    class Wraps(Refused):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p, state in self.each():
                if "count" not in state:
                    state["count"] = torch.zeros((), device=p.device)
                state["count"] += 1
                assert p.grad is not None
                p.sub_(p.grad / torch.as_tensor(state["count"]))

    params, grads = torch.zeros(2), torch.ones(2)
    optimizer = stateless(Wraps)
    opt_state = optimizer.init(params)
    for expected in (-1.0, -1.5):
        params, opt_state = optimizer.update(params, grads, opt_state)
        assert params.tolist() == [expected, expected]


@pytest.mark.parametrize("scheduled", [False, True])
def test_optimizer_with_a_state_of_the_default_dtype_follows_itself(scheduled: bool) -> None:
    params, rates = {"w": torch.randn(3, 2)}, (0.1, 0.05, 0.02)
    loop = TorchLoop(Shampooing, params)
    optimizer = stateless(Shampooing, lr=(lambda step: torch.tensor(rates)[step]) if scheduled else 0.1)
    opt_state = optimizer.init(params)
    for rate in rates:
        grads = randn_like(params)
        loop.optimizer.param_groups[0]["lr"] = rate if scheduled else 0.1
        params, opt_state = optimizer.update(params, grads, opt_state)
        assert_close(params, loop.step(grads), 1e-6)


def test_optimizer_that_writes_into_gradients_leaves_the_callers_alone() -> None:
    optimizer = stateless(GradWriter, lr=1.0)
    grads = torch.ones(2)
    new, _ = optimizer.update(torch.zeros(2), grads, optimizer.init(torch.zeros(2)))
    assert new.tolist() == [-2.0, -2.0]
    assert grads.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (
            IndexesByCounter,
            "IndexesByCounter cannot be made pure: its step reads a value in Python.*'count'.*GradScaler",
        ),
        (ReadsGradBesideCounter, "ReadsGradBesideCounter cannot be made pure: its step branches .* 16 ways"),
        (AsksTooMuch, "AsksTooMuch cannot be made pure: its step branches .* 16 ways \\(test_third_party_optim.py:"),
        (AsksIfTrue, "AsksIfTrue cannot be made pure: its step asks `is True`, and it keeps 'is_warm', which changes"),
        (GrowsForEver, "GrowsForEver cannot be made pure: its state grows in more than 8 steps; make all entries"),
        (
            ChangesText,
            "ChangesText cannot be made pure: its state entry 'mode' must be .*, or stay what it is; got 'cold'",
        ),
        (
            DrawsNumbers,
            "DrawsNumbers cannot be made pure: its steps .* come to other numbers than its own.* draws random",
        ),
        (
            SortsIntoGroups,
            "SortsIntoGroups cannot be made pure: it sorts .* into 2 groups; .*by_group\\({...}, group=...\\)",
        ),
        (torch.optim.LBFGS, "LBFGS cannot be made pure: its step needs closure, .*use it in an ordinary float32 loop"),
        (torch.optim.SparseAdam, ".*does not support dense gradients.*; use it in an ordinary loop with"),
        (torch.nn.Linear, "optimizer must be a subclass of torch.optim.Optimizer; got .*Linear"),
        (
            torch.optim.AdamW([torch.zeros(1)]),
            "optimizer must be a subclass of torch.optim.Optimizer; got one of class AdamW",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_class_that_cannot_be_pure_is_refused_with_the_reason(cls: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=f"(?s)stateless: {reason}"):
        stateless(cls)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"learning_rate": 1.0},
            TypeError,
            "AdamW has no hyperparameter learning_rate; got learning_rate=1.0: its learning rate is lr",
        ),
        ({"lr": torch.ones(3)}, ValueError, r"lr must have shape \(\); got \(3,\)"),
        ({"betas": (0.9, torch.ones(2))}, ValueError, r"betas\[1\] must have shape \(\); got \(2,\)"),
        ({"params": []}, TypeError, "parameters must not be given, as they are in the state; got \\[]"),
        ({"lr": -1.0}, ValueError, "AdamW refuses its hyperparameters: Invalid learning rate: -1.0"),
        ({"betas": (2.0, 0.9)}, ValueError, "Invalid beta parameter at index 0: 2.0"),
        ({"fused": True}, ValueError, "fused must be False or None.*got fused=True"),
        ({"foreach": True}, ValueError, "foreach must be False or None"),
        ({"differentiable": True}, ValueError, "differentiable must be False or None"),
        ({"fused": torch.tensor(True)}, ValueError, "fused must be False or None"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_bad_hyperparameter_is_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"(?s)stateless: .*{message}"):
        stateless(torch.optim.AdamW, **arguments)


@pytest.mark.parametrize(
    ("lr", "error", "message"),
    [
        (lambda applied: "fast", TypeError, "update: lr must be a number or a tensor of shape \\(\\); got 'fast'"),
        (lambda applied: torch.ones(2), ValueError, "update: lr must have shape \\(\\); got \\(2,\\)"),
        (torch.ones(2), ValueError, "update: lr must have shape \\(\\); got \\(2,\\)"),
        (
            torch.ones((), device="meta"),
            ValueError,
            "update: lr must be on the parameters' type of device, cpu; got meta",
        ),
    ],
    ids=["text", "vector schedule", "vector", "device"],
)
def test_bad_value_of_a_hyperparameter_is_named(lr: Any, error: type[Exception], message: str) -> None:
    optimizer = stateless(torch.optim.SGD, lr=lr)
    with pytest.raises(error, match=message):
        optimizer.init(torch.zeros(2))


class BeginsOtherwise(torch.optim.Optimizer):
    """Has another formula for the first step, of the group and of each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["total"] = group["total"] * 0.5 + 1.0 if "total" in group else 3.0
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            state["mean"] = state["mean"] * 0.5 + p.grad if "mean" in state else p.grad * 0.1
            p.sub_(state["mean"], alpha=group["lr"] * group["total"])


def test_a_parameter_whose_first_gradient_is_late_does_not_begin_the_group_anew() -> None:
    params = example()
    loop, optimizer = TorchLoop(BeginsOtherwise, params), stateless(BeginsOtherwise)
    opt_state = optimizer.init(params)
    for number in range(5):
        grads: dict[str, Any] = {**randn_like(params)}
        if number < 2:
            grads["w"] = None
        params, opt_state = optimizer.update(params, grads, opt_state)
        assert_close(params, loop.step(grads), 1e-6)
