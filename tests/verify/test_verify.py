"""`verify` finds what is wrong with a step, blames no step that is right, and changes no module of the user's."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

import funcamp
from funcamp._step.options import Options
from funcamp._verify.report import Outcome, Verification
from funcamp._verify.rounding import Rounding
from funcamp._verify.torch_loop import TorchLoop
from tests.support.helpers import assert_same, assert_silent, clone


def mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(count: int = 4, *shape: int) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, 16, 4, generator=generator) for _ in range(count)]
    return [(x, x.sum(-1, keepdim=True)) for x in inputs]


SGD = funcamp.stateless(torch.optim.SGD, lr=0.1, momentum=0.9)


def make(
    model: nn.Module, criterion: Any = mse, optimizer: Any = SGD, loss: dict[str, Any] | None = None, **options: Any
) -> funcamp.TrainStep:
    return funcamp.make_train_step(funcamp.module_loss(model, criterion, **(loss or {})), optimizer, **options)


def check(step: funcamp.TrainStep, given: list[Any] | None = None, **options: Any) -> Verification:
    """Verify with the traced operations one by one, which compiles nothing."""
    return funcamp.verify(funcamp.jit(step, backend="eager"), given or batches(), **options)


def outcomes(found: Verification) -> list[str]:
    return [one.outcome.name for one in found.comparisons]


# What is right.


class WithMean(nn.Module):
    """Assigns a buffer in the forward pass, and has a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused, self.norm = mlp(), nn.Parameter(torch.ones(2)), nn.BatchNorm1d(4)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.mean = self.mean * 0.9 + x.mean() * 0.1
        return self.inner(torch.utils.checkpoint.checkpoint(self.norm, x, use_reentrant=False)) + self.mean


class Own(nn.Module):
    """Returns its loss, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Dropout(0.1), mlp())

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": mse(self.inner(x), labels)}


def frozen_first() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4).requires_grad_(False), mlp())


def checked(model: Callable[[], nn.Module] = mlp, given: list[Any] | None = None, **options: Any) -> Verification:
    return check(make(model(), **options), given)


def of(*model: Any, **options: Any) -> functools.partial[Verification]:
    return functools.partial(checked, *model, **options)


GROUPS = funcamp.by_group(
    {
        "matrix": funcamp.stateless(torch.optim.SGD, lr=0.1, weight_decay=0.1),
        "vector": funcamp.stateless(torch.optim.SGD, lr=0.1),
    }
)
ADAMW = funcamp.stateless(torch.optim.AdamW, lr=lambda count: 0.01 / (1 + count), weight_decay=0.1)
HALF: dict[str, Any] = {"policy": "float16"}
AUX: dict[str, Any] = {"criterion": lambda output, target: (mse(output, target), output), "loss": {"has_aux": True}}
NAMED = [{"x": x, "labels": y} for x, y in batches()]
#: Steps that are torch's bit for bit, but for the first comparison of some.
RIGHT: dict[str, tuple[functools.partial[Verification], str]] = {
    "float32, aux": (of(**AUX), "EQUAL"),
    "bfloat16": (of(policy="bfloat16"), "EQUAL"),
    "a frozen layer": (of(frozen_first, **HALF), "EQUAL"),
    "a norm that torch sums in float32": (of(**HALF, max_norm=0.5), "ROUNDING"),
    "a limit of each value": (of(**HALF, max_value=0.01), "EQUAL"),
    "an average": (of(**HALF, ema_decay=0.9, config=funcamp.ScalerConfig(growth_interval=1)), "EQUAL"),
    "groups": (of(**HALF, optimizer=GROUPS), "EQUAL"),
    "a schedule": (of(**HALF, optimizer=ADAMW), "ROUNDING"),
    "a group without parameters": (of(lambda: nn.Linear(4, 1, bias=False), **HALF, optimizer=GROUPS), "EQUAL"),
    "another rule": (of(**HALF, config=funcamp.presets.apex()), "EQUAL"),
    "buffers": (of(WithMean, **HALF), "EQUAL"),
    "buffers that are kept": (of(WithMean, **HALF, loss={"keep_buffers": True}), "EQUAL"),
    "a model's own loss": (of(Own, NAMED, criterion=None), "EQUAL"),
    "micro-batches": (of(mlp, batches(4, 3), **HALF, accumulate=3), "ROUNDING"),
    "weights": (of(mlp, batches(4, 3), accumulate=3, weight=lambda batch: batch[0].abs().sum()), "ROUNDING"),
}


@pytest.mark.thorough(keep=8)
@pytest.mark.compiled
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_is_equal_to_torchs_loop(name: str) -> None:
    call, most = RIGHT[name]
    found = call()
    assert outcomes(found)[0] in ("EQUAL", most), str(found)
    assert outcomes(found)[1:] == ["EQUAL", "EQUAL"], str(found)
    assert found.ok
    assert (1 in found.skipped) == (found.overflow is not None)
    assert [note.partition(":")[0] for note in found.notes] == ["no gradient for unused"] * name.startswith("buffers")


def test_each_option_of_a_step_has_a_row() -> None:
    options = {name for call, _ in RIGHT.values() for name in call.keywords}
    assert set(Options._fields) - options == {"observe", "parallel"}, "add a row to RIGHT, and the option to TorchLoop"


def rows(*losses: float) -> list[dict[str, Tensor]]:
    return [{"metrics.loss": torch.tensor(loss), "metrics.found_inf": torch.zeros(())} for loss in losses]


def test_the_yardstick_is_the_largest_of_several_disturbed_runs_so_far() -> None:
    reference = rows(1.0, 0.9, 0.8)

    def share(rounding: Rounding, step: int, loss: float) -> float:
        found = rounding.difference(step, reference[step], rows(*[loss] * 3)[step])
        return found.share if found else 0.0

    rounding = Rounding(reference, [rows(1.0, 0.9, 0.8), rows(1.0, 0.91, 0.8)], {})
    assert share(rounding, 1, 0.9) == 0
    assert share(rounding, 2, 0.81) < 1 < share(rounding, 2, 0.83)
    assert share(rounding, 0, 1.01) > 1
    noisy = Rounding(reference, [rows(1.0, 1.0, 0.8)], rows(1.1)[0])  # by half of what the loss has moved: noise
    assert share(noisy, 1, 9.0) < 1 < share(noisy, 1, float("nan"))
    skips = rows(1.0, 0.9, 0.8)
    skips[1]["metrics.found_inf"] = torch.ones(())
    skipping = Rounding(reference, [skips], {})
    assert share(skipping, 0, 1.01) > 1
    assert (share(skipping, 2, 9.0), skipping.noisy_step) == (0, 1)


def test_a_tracked_step_has_a_torch_loop() -> None:
    step = make(mlp())
    tracked = funcamp.make_train_step(funcamp.numerics.track_scales(step.loss_fn), SGD)
    assert outcomes(check(tracked)) == ["EQUAL"] * 3


def test_a_step_that_module_loss_did_not_make_has_no_torch_loop() -> None:
    step = funcamp.make_train_step(lambda params, batch: mse(batch[0] @ params["w"], batch[1]), SGD)
    found = check(step, state=step.init({"w": torch.ones(4, 1)}))
    assert outcomes(found) == ["LEFT_OUT", "EQUAL", "EQUAL"]
    assert "not of module_loss" in str(found)


def test_a_state_in_mid_training_and_steps_that_are_all_skipped() -> None:
    step = make(mlp(), optimizer=ADAMW, policy="float16", ema_decay=0.9)
    state = step.init()
    for batch in batches(3):
        state, _ = step(state, batch)
    before = clone(state)
    found = check(step, state=state)
    assert found.ok, str(found)
    assert found.comparisons[0].outcome is not Outcome.LEFT_OUT
    assert_same(state, before)
    found = check(step, [(x, y * torch.inf) for x, y in batches()])
    assert found.skipped == (0, 1, 2, 3)
    assert "every step was skipped" in str(found)


def test_a_schedule_begins_anew_with_a_new_optimizer_in_mid_training() -> None:
    optimizer = funcamp.stateless(torch.optim.AdamW, lr=lambda applied: 0.1 / (1 + applied))
    step = make(mlp(), optimizer=optimizer)
    state = step.init()
    for batch in batches(3):
        state, _ = step(state, batch)
    found = check(step, state=state._replace(opt_state=optimizer.init(state.params)))
    assert outcomes(found) == ["EQUAL"] * 3, str(found)


@pytest.mark.compiled
@pytest.mark.inductor
def test_compiled_by_default_with_exact() -> None:
    found = funcamp.verify(make(Own(), None, policy="bfloat16"), NAMED)
    assert found.ok, str(found)


class Chaos(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp()

    def forward(self, x: Tensor) -> Tensor:
        out = torch.sigmoid(self.layer(x))
        for _ in range(8):
            out = 3.9 * out * (1 - out)
        return out


def test_an_unrolled_step_is_compared_one_step_in_a_call() -> None:
    assert funcamp.verify(funcamp.jit(make(mlp()), unroll=2, backend="eager"), batches()).ok


def test_chaos_is_not_blamed() -> None:
    found = check(make(Chaos(), policy="bfloat16"))
    assert found.ok, str(found)
    assert "the model amplifies rounding: from step 1 on" in str(found)


# Nothing of the user's changes.


class Stateful(nn.Module):
    """Keeps something in every way that a module can; may raise at its third call."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.raises = nn.Linear(4, 1), raises
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.last, self.generator = torch.zeros(1), torch.Generator().manual_seed(3)
        self.history: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.raises and len(self.history) > 2:
            raise KeyError("third call")
        self.history.append(len(self.history))
        self.last = x.detach().mean()
        self.seen += 1
        x.mul_(2.0)
        out: Tensor = self.layer(x)
        return out + random.random() * 0 + torch.rand(1, generator=self.generator) * 0


class Center:
    """A criterion that keeps a tensor."""

    def __init__(self) -> None:
        self.center = torch.zeros(1)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        loss = mse(output - self.center, target)
        self.center.mul_(0.9).add_(output.detach().mean(), alpha=0.1)
        return loss


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_of_the_users_changes(raises: bool) -> None:
    model, criterion, given = Stateful(raises), Center(), batches()
    model.layer.weight.grad = torch.ones(1, 4)
    step = make(model, criterion)
    state = step.init()

    def everything() -> Any:
        tensors = dict(model.state_dict()), model.last, criterion.center, model.layer.weight.grad, given, state
        generators = torch.get_rng_state(), model.generator.get_state()
        return clone((tensors, generators)), random.getstate(), list(model.history)

    before, attributes = everything(), dict(vars(model))
    with pytest.raises(KeyError, match="third call") if raises else contextlib.nullcontext():
        check(step, given)
    with assert_silent():  # no step of the caller's was taken
        assert_same(everything(), before)
    assert all(vars(model)[name] is value for name, value in attributes.items())
    if not raises:
        step(state, given[0])
        with pytest.warns(UserWarning, match="older values than the state"):
            model.state_dict()


# What is wrong is found, and named.


class OneLayer(nn.Module):
    """A linear layer, and something silent beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.kept = [self.layer.weight.detach()]
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class KeepsAnAlias(OneLayer):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x) + F.linear(x, self.kept[0] * 0.5)


class Counts(OneLayer):
    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.layer(x) * (1.0 if self.calls < 4 else 2.0)


_TORCH, _COMPILED = "torch's loop - eager step", "eager step - compiled step"


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("plant", "roads"),
    [
        (KeepsAnAlias, _TORCH),
        (Counts, _COMPILED),
    ],
)
def test_what_nothing_refuses_is_found(plant: Callable[[], nn.Module], roads: str) -> None:
    found = check(make(plant()))
    wrong = [one.roads for one in found.comparisons if one.outcome is Outcome.DIFFERENT]
    assert wrong[:1] == [roads], str(found)
    assert "likely causes" in str(found)
    assert not found.ok


def test_state_that_a_checkpoint_lacks_is_refused_by_jit_and_found() -> None:
    found = check(make(mlp(), Center()))
    assert outcomes(found) == ["EQUAL", "REFUSED", "DIFFERENT"], str(found)
    assert "criterion.center" in found.comparisons[1].reason
    assert not found.ok


@pytest.mark.parametrize("policy", [None, "bfloat16"])
def test_a_wrong_factor_is_no_rounding(policy: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    right, factor = TorchLoop._backward, 1.001 if policy is None else 1.1
    monkeypatch.setattr(TorchLoop, "_backward", lambda self, *args: right(self, *args) * factor)
    assert outcomes(check(make(mlp(), policy=policy)))[0] == "DIFFERENT"


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_an_update_may_be_smaller_than_a_unit_in_the_last_place(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, slow = TorchLoop._update, funcamp.stateless(torch.optim.AdamW, lr=2e-5)
    step = make(mlp(), optimizer=slow, policy=policy)
    assert check(step).ok

    def leave_out(self: Any, scaler: Any) -> None:
        parameters_before = clone(self._parameters)
        right(self, scaler)
        for name, value in parameters_before.items():
            self._parameters[name].detach().copy_(value)

    monkeypatch.setattr(TorchLoop, "_update", leave_out)
    assert outcomes(check(step))[0] == "DIFFERENT"


# Bad input.

STEP, MANY, ONE = make(mlp()), batches(), batches(1)[0]
OF_A_FUNCTION = funcamp.make_train_step(lambda params, batch: params["w"].sum(), funcamp.stateless(torch.optim.SGD))
#: Arguments, the error, and its words.
REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (
        # contract: "`verify` for a step that `make_train_step` did not make"
        (mlp(), MANY),
        {},
        TypeError,
        "step must be a step of make_train_step, or jit of one",
    ),
    ((STEP, ONE), {}, ValueError, r"batches must be at least 4.* of one batch write \[batch\] \* 4"),
    ((STEP, MANY), {"steps": 2}, ValueError, "steps must be 3 or more; got 2"),
    ((STEP, MANY), {"state": ()}, TypeError, "state must be"),
    ((OF_A_FUNCTION, MANY), {}, TypeError, r"state must be given for a loss without a module.* step.init\(params\)"),
]


@pytest.mark.parametrize(("arguments", "options", "error", "text"), REFUSED)
def test_bad_input_is_refused_with_the_rule(arguments: Any, options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        funcamp.verify(*arguments, **options)
