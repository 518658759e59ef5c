"""A policy is the dtype of autocast around a loss, which gets the parameters of the state, without a stale cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcamp import Policy, ScalerConfig, jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same, clone
from tests.support.models import Task, cross_entropy, mlp, tied


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_policy_is_written_as_text_or_with_a_dtype_of_torch(dtype: torch.dtype) -> None:
    loss_fn = module_loss(nn.Linear(2, 2), cross_entropy)
    name = str(dtype).removeprefix("torch.")
    for policy in (name, dtype, Policy(dtype)):
        assert make_train_step(loss_fn, stateless(torch.optim.SGD), policy=policy)._options.policy == Policy(dtype)
    assert str(Policy(dtype)) == name
    for other in (name.upper(), f"torch.{name}", "fp16", "16-mixed", f"{name},keep=0.*"):
        with pytest.raises(ValueError, match=r"make_train_step: policy must be one of float16, bfloat16, float32; got"):
            make_train_step(loss_fn, stateless(torch.optim.SGD), policy=other)


@pytest.mark.parametrize("flat", [True, False])
def test_a_loss_gets_the_parameters_as_they_are_stored(flat: bool) -> None:
    seen = {}

    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        seen.update({name: value.dtype for name, value in params.items()})
        product = batch @ params["w"]
        seen["product"] = product.dtype
        loss: Tensor = (product + params["b"]).float().square().mean()
        return loss

    step = make_train_step(loss_fn, stateless(torch.optim.SGD), ScalerConfig(256.0), policy="float16")
    params = {"w": torch.randn(4, 4), "b": torch.zeros(4), "double": torch.zeros(2, 2, dtype=torch.float64)}
    _, metrics = step(step.init(params, flat=flat), torch.randn(2, 4))
    dtypes = {"w": torch.float32, "b": torch.float32, "double": torch.float64, "product": torch.float16}
    assert seen == dtypes
    assert metrics.found_inf == 0


def test_what_autocast_does_not_cast_is_in_a_group_by_itself() -> None:
    """Autocast casts all matrices of another group, so a compiled step casts whole groups."""
    task = tied()
    layout = make_train_step(module_loss(task.model, task.criterion), stateless(torch.optim.SGD)).init().params.layout
    groups = dict(zip(layout.tree(range(len(layout.slots))), [slot.group for slot in layout.slots]))
    with_words = {name for name, group in groups.items() if group == groups["words.weight"]}
    assert with_words == {"words.weight", "positions"}


def test_no_grad_and_grad_passes_in_one_loss() -> None:
    """A teacher without gradient before the student, in one autocast region: the gradient is the student's."""
    model = nn.Linear(4, 4)
    x = torch.randn(8, 4)

    def both(params: Any, batch: Tensor) -> Tensor:
        with torch.no_grad():
            target = torch.func.functional_call(model, params, (batch,)).float()
        loss: Tensor = (torch.func.functional_call(model, params, (batch,)).float() - target - 1).square().mean()
        return loss

    def alone(params: Any, batch: Tensor) -> Tensor:
        out = torch.func.functional_call(model, params, (batch,)).float()
        loss: Tensor = (out - out.detach() - 1).square().mean()
        return loss

    params = dict(model.named_parameters())
    after = []
    for loss_fn in (both, alone):
        step = make_train_step(loss_fn, stateless(torch.optim.SGD, lr=0.1), policy="float16")
        state, _ = step(step.init(params), x)
        after.append(state.params.tree())
    assert_same(after[0], after[1])
    assert not torch.equal(after[0]["weight"], params["weight"])


def test_inference_between_steps_sees_the_new_weights() -> None:
    task = mlp()
    step = make_train_step(
        module_loss(task.model, task.criterion), stateless(torch.optim.SGD, lr=0.1), policy="bfloat16"
    )
    state = step.init()
    with torch.autocast("cpu", torch.bfloat16):  # a region around the loop, whose cache would go stale
        for index in range(4):
            expected = step.loss(state, task.batch(index))
            state, metrics = step(state, task.batch(index))
            assert_same(metrics.loss, expected)
            after = step.loss(state, task.batch(index))
            fresh = Task(mlp().model, cross_entropy, task.batch)
            fresh.model.load_state_dict(state.params.state_dict())
            assert_same(after, cross_entropy(fresh.model(task.batch(index)[0]), task.batch(index)[1]).detach())
            assert after != expected


POLICIES = ["float16", "bfloat16", None]


def policy_step(policy: str | None, task: Task | None = None, **options: Any) -> Any:
    task = task or mlp()
    options = {"policy": policy, **options}
    return make_train_step(
        module_loss(task.model, task.criterion), stateless(torch.optim.AdamW, lr=0.1), ScalerConfig(256.0), **options
    )


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("before", POLICIES)
@pytest.mark.parametrize("after", POLICIES)
def test_a_state_continues_under_a_step_of_another_policy(before: str | None, after: str | None, flat: bool) -> None:
    task = mlp()
    old, new = policy_step(before), policy_step(after)
    state, _ = old(old.init(flat=flat), task.batch(0))
    expected, batch = new.load_state_dict(old.state_dict(state), like=new.init(flat=flat)), task.batch(1)
    for _ in range(3):
        assert_same(new.loss(state, batch), new.loss(expected, batch))
        assert_same(new.compute_params(state), new.compute_params(expected))
        state, metrics = new(state, batch)
        expected, expected_metrics = new(expected, batch)
        assert_same(metrics.loss, expected_metrics.loss)
        assert_same(new.state_dict(state), new.state_dict(expected))
    state, _ = jit(new, backend="eager")(state, batch)
    assert_same(new.state_dict(state), new.state_dict(new(expected, batch)[0]))


@pytest.mark.compiled
def test_a_compiled_step_takes_the_state_of_another_policy() -> None:
    task = mlp()
    state, new = policy_step("float16").init(), policy_step("bfloat16")
    expected, wanted = new(clone(state), task.batch(0))
    for compiled in (jit(new, backend="eager", donate=False), jit(new, backend="eager")):
        assert_same(compiled(state, task.batch(0)), (expected, wanted))


def test_two_losses_take_turns_on_one_state() -> None:
    task = mlp()
    first = policy_step(None)
    inner = first.loss_fn
    second = make_train_step(lambda p, b: inner(p, b) * 2, first.optimizer, first.config)
    for wrap in (lambda step: step, lambda step: jit(step, backend="eager")):
        one, two, state = wrap(first), wrap(second), first.init()
        expected = first.init()
        for index in range(6):
            state, _ = (two if index % 2 else one)(state, task.batch(index))
            expected, _ = (second if index % 2 else first)(expected, task.batch(index))
        assert_same(state, expected)


def clamp(state: Any) -> Any:
    state.params["0.weight"].clamp_(-0.01, 0.01)
    return state


def put(state: Any) -> Any:
    values = {name: value.clamp(-0.01, 0.01) for name, value in state.params.tree().items()}
    return state._replace(params=state.params.ravel(values))


def put_into(state: Any) -> Any:
    """A copy of the state, and other values in that."""
    return clamp(clone(state))


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("change", [clamp, put, put_into])
@pytest.mark.parametrize("how", ["eager", "jit", "kept"])
def test_parameters_that_were_changed_between_steps_are_those_that_the_loss_sees(how: str, change: Any) -> None:
    task = mlp()
    step = policy_step("float16")
    run: Any = step if how == "eager" else jit(step, backend="eager", donate=how == "jit")
    state = step.init()
    for index in range(3):
        state, _ = run(state, task.batch(index))
    for index in range(3, 6):
        state = change(state)
        expected = step.load_state_dict(step.state_dict(state), like=step.init())
        assert_same(step.loss(state, task.batch(index)), step.loss(expected, task.batch(index)))
        expected, expected_metrics = step(expected, task.batch(index))
        state, metrics = run(state, task.batch(index))
        assert_same((metrics.loss, metrics.grad_norm), (expected_metrics.loss, expected_metrics.grad_norm))
        assert_same(state.params, expected.params)
