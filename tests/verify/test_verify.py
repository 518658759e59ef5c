"""`verify` finds what is wrong with a step, blames no step that is right, and changes no module of the user's.

The silent classes are planted into modules, with what refuses them switched off: `verify` must name each by itself.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

import funcamp
from funcamp._autograd import module_checks, module_loss
from funcamp._autograd.module_loss import ModuleLoss
from funcamp._autograd.module_tensors import ModuleTensors
from funcamp._jit import jit_step
from funcamp._trace import trace as trace_module
from funcamp._verify.report import Outcome, Verification
from funcamp._verify.rounding import Rounding
from funcamp._verify.torch_loop import TorchLoop
from tests.support.helpers import assert_same, clone


def mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(count: int = 4, *shape: int) -> list[Any]:
    made = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(*shape, 16, 4, generator=generator)
        made.append((x, x.sum(-1, keepdim=True)))
    return made


def make(
    model: nn.Module, criterion: Any = mse, optimizer: Any = None, loss: dict[str, Any] | None = None, **options: Any
) -> funcamp.TrainStep:
    optimizer = optimizer or funcamp.stateless(torch.optim.SGD, lr=0.1, momentum=0.9)
    return funcamp.make_train_step(funcamp.module_loss(model, criterion, **(loss or {})), optimizer, **options)


def check(step: funcamp.TrainStep, given: list[Any] | None = None, **options: Any) -> Verification:
    """Verify with the traced operations one by one, which compiles nothing."""
    return funcamp.verify(funcamp.jit(step, backend="eager"), given or batches(), **options)


def outcomes(found: Verification) -> list[str]:
    return [one.outcome.name for one in found.comparisons]


ADAMW = funcamp.stateless(torch.optim.AdamW, lr=lambda count: 0.01 / (1 + count), weight_decay=0.1)
GROUPS = funcamp.by_group(
    {
        "matrix": funcamp.stateless(torch.optim.SGD, lr=0.1, weight_decay=0.1),
        "vector": funcamp.stateless(torch.optim.SGD, lr=0.1),
    }
)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "bfloat16"},
        {"policy": "float16"},
        {"policy": "float16", "max_norm": 0.5},
        {"policy": "float16", "max_value": 0.01},
        {"policy": "float16", "ema_decay": 0.9, "config": funcamp.ScalerConfig(growth_interval=1)},
        {"optimizer": GROUPS, "policy": "float16"},
        {"policy": "float16", "config": funcamp.ScalerConfig(2.0**10, min_scale=1.0)},
        {"policy": "float16", "config": funcamp.presets.apex()},
    ],
    ids=str,
)
def test_a_right_step_is_equal_to_torchs_loop(options: dict[str, Any]) -> None:
    found = check(make(mlp(), **options))
    allowed = {"EQUAL"} if "max_norm" not in options else {"EQUAL", "ROUNDING"}  # torch sums the norm in float32
    assert set(outcomes(found)) <= allowed, str(found)
    assert found.ok
    assert (1 in found.skipped) == (options.get("policy") == "float16")
    assert not any("likely causes" in note for note in found.notes)


def test_optimizers_that_round_elsewhere_are_within_rounding() -> None:
    found = check(make(mlp(), optimizer=ADAMW, policy="float16"))
    assert outcomes(found)[1:] == ["EQUAL", "EQUAL"]
    assert outcomes(found)[0] in ("EQUAL", "ROUNDING"), str(found)


def test_an_optimizer_with_entries_for_frozen_parameters() -> None:
    model = mlp()
    next(model.parameters()).requires_grad_(False)
    found = check(make(model, optimizer=funcamp.stateless(torch.optim.Adagrad, lr=0.01)))
    assert outcomes(found) == ["EQUAL", "EQUAL", "EQUAL"], str(found)


def test_the_yardstick_is_the_largest_of_several_disturbed_runs_so_far() -> None:
    def rows(*losses: float) -> list[dict[str, Tensor]]:
        return [{"metrics.loss": torch.tensor(loss), "metrics.found_inf": torch.zeros(())} for loss in losses]

    reference = rows(1.0, 0.9, 0.8)
    rounding = Rounding(reference, [rows(1.0, 0.9, 0.8), rows(1.0, 0.91, 0.8)], {})

    def share(step: int, loss: float) -> float:
        found = rounding.difference(step, reference[step], rows(*[loss] * 3)[step])
        return found.share if found else 0.0

    assert share(1, 0.9) == 0
    assert share(0, 1.01) > 1
    assert share(2, 0.81) < 1
    assert share(2, 0.83) > 1

    noisy = Rounding(reference, [rows(1.0, 1.0, 0.8)], rows(1.1)[0])  # by half of what the loss has moved: noise

    def noisy_share(loss: float) -> float:
        found = noisy.difference(1, reference[1], rows(*[loss] * 3)[1])
        return found.share if found else 0.0

    assert noisy_share(9.0) < 1
    assert noisy_share(float("nan")) > 1

    other_skip = rows(1.0, 0.9, 0.8)
    other_skip[1]["metrics.found_inf"] = torch.ones(())
    rounding = Rounding(reference, [other_skip], {})
    assert share(0, 1.01) > 1
    assert share(2, 9.0) == 0
    assert rounding.noisy_step == 1


@pytest.mark.parametrize("weight", [None, lambda batch: 1.0 + batch[0].shape[0]])
def test_micro_batches_agree_with_torchs_loop(weight: Any) -> None:
    found = check(make(mlp(), policy="float16", accumulate=3, weight=weight), batches(4, 3))
    assert outcomes(found)[1:] == ["EQUAL", "EQUAL"], str(found)
    assert outcomes(found)[0] in ("EQUAL", "ROUNDING"), str(found)  # the mean of the losses rounds elsewhere


@pytest.mark.parametrize("keep", [False, True])
def test_buffers_of_a_skipped_step_agree_with_torchs_loop(keep: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
    found = check(make(model, policy="float16", loss={"keep_buffers": keep}))
    assert outcomes(found) == ["EQUAL"] * 3, str(found)


def test_a_batch_norm_that_the_backward_pass_runs_again_counts_once() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
            self.last = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Any:
            return self.last(torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False))

    found = check(make(Recomputed()))
    assert outcomes(found) == ["EQUAL"] * 3, str(found)
    assert not found.notes


class WithMean(nn.Module):
    """Assigns a buffer in the forward pass, and has a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = mlp(), nn.Parameter(torch.ones(2))
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.mean = self.mean * 0.9 + x.mean() * 0.1
        return self.inner(x) + self.mean


def test_an_assigned_buffer_and_a_parameter_without_a_gradient() -> None:
    found = check(make(WithMean(), policy="float16"))
    assert outcomes(found) == ["EQUAL"] * 3, str(found)
    assert found.notes[0].startswith("no gradient for unused: ")


def test_auxiliary_outputs_and_a_model_that_returns_its_loss() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": mse(self.inner(x), labels)}

    with_aux = make(mlp(), lambda output, target: (mse(output, target), output), loss={"has_aux": True})
    assert outcomes(check(with_aux)) == ["EQUAL"] * 3
    named = [{"x": x, "labels": y} for x, y in batches()]
    assert outcomes(check(make(Own(), None), named)) == ["EQUAL"] * 3


def test_a_step_that_module_loss_did_not_make_has_no_torch_loop() -> None:
    step = funcamp.make_train_step(
        lambda params, batch: mse(batch[0] @ params["w"], batch[1]),
        funcamp.stateless(torch.optim.SGD),
        policy="float16",
    )
    found = check(step, state=step.init({"w": torch.ones(4, 1)}))
    assert outcomes(found) == ["LEFT_OUT", "EQUAL", "EQUAL"]
    assert "not of module_loss" in str(found)


def test_if_every_step_is_skipped_the_report_says_so() -> None:
    found = check(make(mlp(), policy="float16"), [(x, y * torch.inf) for x, y in batches()])
    assert found.skipped == (0, 1, 2, 3)
    assert "every step was skipped" in str(found)


def test_a_state_in_mid_training() -> None:
    step = make(mlp(), optimizer=ADAMW, policy="float16", ema_decay=0.9)
    state = step.init()
    for batch in batches(3):
        state, _ = step(state, batch)
    before = clone(state)
    found = check(step, state=state)
    assert found.ok, str(found)
    assert found.comparisons[0].outcome is not Outcome.LEFT_OUT
    assert_same(state, before)


@pytest.mark.compiled
@pytest.mark.inductor
def test_compiled_by_default_with_exact() -> None:
    found = funcamp.verify(make(mlp(), policy="bfloat16"), batches())
    assert found.ok, str(found)


# Nothing of the user's changes.


class Stateful(nn.Module):
    """Keeps something in every way that a module can."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.last = 0, torch.zeros(1)
        self.history: list[int] = []
        self.generator = torch.Generator().manual_seed(3)
        self.by_name: dict[str, Any] = {"n": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.by_name["n"] += 1
        self.history.append(self.calls)
        self.last = x.detach().mean()
        self.seen += 1
        x.mul_(1.0)
        out: Tensor = self.layer(x)
        return out + random.random() * 0 + torch.rand(1, generator=self.generator) * 0


def test_nothing_of_the_users_changes() -> None:
    class Center:
        def __init__(self) -> None:
            self.center = torch.zeros(1)

        def __call__(self, output: Tensor, target: Tensor) -> Tensor:
            self.center = self.center + output.detach().mean()
            return mse(output, target)

    model, criterion = Stateful(), Center()
    model.layer.weight.grad = torch.ones(1, 4)
    step, given = make(model, criterion), batches()
    before = clone(dict(model.state_dict())), clone(given), random.getstate(), torch.get_rng_state()
    objects = dict(vars(model)), list(model.history), dict(model.by_name), model.generator.get_state(), criterion.center
    check(step, given)
    assert_same(dict(model.state_dict()), before[0])
    assert_same(given, before[1])
    assert random.getstate() == before[2]
    assert torch.equal(torch.get_rng_state(), before[3])
    assert all(vars(model)[name] is value for name, value in objects[0].items())
    assert (model.history, dict(model.by_name)) == (objects[1], objects[2])
    assert torch.equal(model.generator.get_state(), objects[3])
    assert criterion.center is objects[4]
    assert torch.equal(model.layer.weight.grad, torch.ones(1, 4))


def test_a_state_from_before_is_not_left_behind_by_verify() -> None:
    model = mlp()
    step = make(model)
    state = step.init()
    check(step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.state_dict()  # no step of the caller's was taken
    step(state, batches(1)[0])
    with pytest.warns(UserWarning, match="older values than the state"):
        model.state_dict()


def test_a_step_that_raises_leaves_everything_as_it_was() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 1), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 2:
                raise KeyError("third call")
            out: Tensor = self.layer(x)
            return out

    model = Fails()
    with pytest.raises(KeyError, match="third call"):
        check(make(model))
    assert model.calls == 0


# What is wrong is found, and named.


def assert_found_wrong(found: Verification, roads: str) -> None:
    wrong = [one for one in found.comparisons if one.outcome is Outcome.DIFFERENT]
    assert wrong, str(found)
    assert wrong[0].roads == roads, str(found)
    assert "likely causes" in str(found)
    assert not found.ok


def test_a_host_read_in_the_step_is_shown_as_refused() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out * 2 if x.sum().item() > 0 else out

    found = check(make(Reads()))
    assert outcomes(found) == ["EQUAL", "REFUSED", "EQUAL"]
    assert "must not read" in str(found)
    assert not found.ok


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off everything that refuses or mends what a module keeps outside of the state."""

    monkeypatch.setattr(ModuleLoss, "_check_of_call", lambda *_: lambda returned: None)
    for module in (module_checks, module_loss):
        monkeypatch.setattr(module, "check_hooks", lambda model: None)
    monkeypatch.setattr(ModuleTensors, "attributes_on", lambda self, values: contextlib.nullcontext())
    monkeypatch.setattr(jit_step, "_python_parts", lambda step: {})
    monkeypatch.setattr(trace_module, "settle", lambda trace_once, roots, is_known: trace_once())


class OneLayer(nn.Module):
    """A linear layer, and something silent beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        weight: Any = self.layer.weight
        weight.gain = 2.0
        self.kept, self.rates = [weight.detach()], {id(weight): 0.5}
        self.calls, self.hidden, self.last = 0, torch.zeros(1), None
        self.method = lambda x: F.linear(x, weight.detach())


class KeepsAnAlias(OneLayer):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x) + F.linear(x, self.kept[0] * 0.5)


class KeepsInAClosure(OneLayer):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x) + self.method(x)


class AsksForTheClass(OneLayer):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * (2 if isinstance(self.layer.weight, nn.Parameter) else 1)


class AsksForAnAttribute(OneLayer):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * getattr(self.layer.weight, "gain", 1.0)


class AsksForTheIdentity(OneLayer):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * self.rates.get(id(self.layer.weight), 1.0)


class HasAHook(OneLayer):
    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.register_hook(lambda grad: grad * 0.5)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class HasALateHook(OneLayer):
    def __init__(self) -> None:
        super().__init__()

        def halve(weight: Tensor) -> None:
            assert weight.grad is not None
            weight.grad.mul_(0.5)

        self.layer.weight.register_post_accumulate_grad_hook(halve)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class Counts(OneLayer):
    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.layer(x) * min(1.0, self.calls / 5)


class KeepsAHiddenState(OneLayer):
    def forward(self, x: Tensor) -> Any:
        out = self.layer(x) + self.hidden
        self.hidden = out.detach().mean(0)
        return out


class BeginsWithNone(OneLayer):
    def forward(self, x: Tensor) -> Any:
        out = self.layer(x) if self.last is None else self.layer(x) + self.last
        self.last = out.detach().mean(0)
        return out


_TORCH, _COMPILED = "torch's loop - eager step", "eager step - compiled step"


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize(
    ("plant", "roads"),
    [
        (KeepsAnAlias, _TORCH),
        (KeepsInAClosure, _TORCH),
        (AsksForTheClass, _TORCH),
        (AsksForAnAttribute, _TORCH),
        (AsksForTheIdentity, _TORCH),
        (HasAHook, _TORCH),
        (HasALateHook, _TORCH),
        (Counts, _COMPILED),
        (KeepsAHiddenState, _COMPILED),
        (BeginsWithNone, _COMPILED),
    ],
)
def test_what_nothing_refuses_is_found(plant: Callable[[], nn.Module], roads: str) -> None:
    assert_found_wrong(check(make(plant())), roads)


@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("how", ["object", "buffer"])
def test_what_a_criterion_keeps_is_found(how: str) -> None:
    class Center(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.center: Tensor
            self.register_buffer("center", torch.zeros(1))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            loss = mse(output - self.center, target)
            self.center = self.center * 0.9 + output.detach().mean() * 0.1
            return loss

    class Warms:
        calls = 0

        def __call__(self, output: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            return mse(output, target) * min(1.0, self.calls / 5)

    criterion = Warms() if how == "object" else Center()
    assert_found_wrong(check(make(mlp(), criterion)), _COMPILED)
    if isinstance(criterion, Center):
        assert torch.equal(criterion.center, torch.zeros(1))


def test_a_batch_over_one_memory_is_found() -> None:
    def criterion(output: Tensor, target: Tensor) -> Tensor:
        return mse(output, target.masked_fill_(target > 1, 0))

    given = []
    for x, _ in batches():
        given.append((x, x[:, :1]))  # the target is the first feature
    found = check(make(nn.Linear(4, 1), criterion), given)
    assert not found.ok
    assert "not write into its batch" in str(found), str(found)


def test_state_that_a_checkpoint_lacks() -> None:
    class Center(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.center = torch.zeros(1)

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            loss = mse(output - self.center, target)
            self.center.mul_(0.9).add_(output.detach().mean(), alpha=0.1)
            return loss

    found = check(make(mlp(), Center()))
    assert outcomes(found) == ["EQUAL", "REFUSED", "DIFFERENT"], str(found)
    assert "criterion.center" in found.comparisons[1].reason


def test_chaos_is_not_blamed() -> None:
    class Chaos(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp()

        def forward(self, x: Tensor) -> Tensor:
            out = torch.sigmoid(self.layer(x))
            for _ in range(8):
                out = 3.9 * out * (1 - out)
            return out

    found = check(make(Chaos(), policy="bfloat16"))
    assert found.ok, str(found)
    assert "the model amplifies rounding: from step 1 on" in str(found)


class Denoiser(nn.Module):
    """Casts its input to the dtype of its first weight, as diffusion models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.time, self.out = nn.Linear(4, 32, bias=False), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, t: Tensor) -> Any:
        angle = t.to(self.embed.weight.dtype)[:, None].float() * torch.exp(-torch.arange(16.0) / 2)
        return self.out(self.embed(x) + self.time(torch.cat([angle.cos(), angle.sin()], 1))).float()


def denoised(count: int = 4) -> list[Any]:
    torch.manual_seed(1)
    return [(torch.randn(64, 4), torch.rand(64) * 1000, torch.randn(64, 4)) for _ in range(count)]


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_a_cast_to_the_dtype_of_a_weight_is_as_in_torchs_loop(policy: str) -> None:
    found = check(make(Denoiser(), policy=policy), denoised())
    assert outcomes(found)[0] == "EQUAL", str(found)


def test_three_percent_of_the_loss_are_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TorchLoop._backward
    monkeypatch.setattr(TorchLoop, "_backward", lambda self, *args: right(self, *args) * 1.03)
    found = check(make(Denoiser(), policy="bfloat16"), denoised())
    assert outcomes(found)[0] == "DIFFERENT", str(found)


# Bad input.


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: funcamp.verify(mlp(), batches()), TypeError, "step must be a step of make_train_step, or jit of one"),
        (lambda: funcamp.verify(funcamp.jit(lambda s, b: (s, b)), batches()), TypeError, "step must be a step of"),
        (lambda: funcamp.verify(make(mlp()), batches(2)), ValueError, "batches must be at least 4"),
        (lambda: funcamp.verify(make(mlp()), batches(1)[0]), TypeError, r"which is one batch.*\[batch\] \* 4"),
        (lambda: funcamp.verify(make(mlp()), list(batches(1)[0])), ValueError, "batches must be at least 4"),
        (lambda: funcamp.verify(make(mlp()), torch.ones(4, 2)), TypeError, "which is one batch"),
        (lambda: funcamp.verify(make(mlp()), {"x": torch.ones(4)}), TypeError, "which is one batch"),
        (lambda: funcamp.verify(make(mlp()), batches(), steps=2), ValueError, "steps must be 3 or more; got 2"),
        (lambda: funcamp.verify(make(mlp()), batches(), state=()), TypeError, "state must be"),  # type: ignore[arg-type]
        (lambda: funcamp.verify(funcamp.jit(make(mlp()), unroll=2), batches()), ValueError, "one step in a call"),
    ],
)
def test_bad_input_is_refused_with_the_rule(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
