"""Who sees which precision: the policy's rules, and what explicit copies are right about without a cache."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from funcamp import Policy, ScalerConfig, jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same, clone
from tests.support.models import Task, Tied, cnn, cross_entropy, mlp, tied

GLOBS = st.lists(st.text("ab.*", min_size=1, max_size=6), max_size=3).map(tuple)


@given(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]), GLOBS, GLOBS)
@settings(max_examples=60, deadline=None)
def test_it_parses_what_it_prints(dtype: torch.dtype, keep: Any, copied: Any) -> None:
    policy = Policy(dtype, keep=keep, copy=copied)
    assert Policy.parse(str(policy)) == policy
    assert hash(Policy.parse(str(policy))) == hash(policy)


@given(st.text("ab.*", min_size=1, max_size=8), st.text("ab.", max_size=10))
@settings(max_examples=300, deadline=None)
def test_globs_are_those_of_fnmatch(glob: str, name: str) -> None:
    leaf = torch.zeros(2)
    assert Policy(copy=(glob,)).casts(name, leaf, frozenset()) == fnmatch.fnmatchcase(name, glob)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_policy_is_written_as_text_or_with_a_dtype_of_torch(dtype: torch.dtype) -> None:
    loss_fn = module_loss(nn.Linear(2, 2), cross_entropy)
    name = str(dtype).removeprefix("torch.")
    for policy in (name, dtype, Policy(dtype)):
        assert make_train_step(loss_fn, stateless(torch.optim.SGD), policy=policy)._options.policy == Policy(dtype)
    assert Policy.parse(f" {name} , keep=a.*|b ") == Policy(dtype, keep=("a.*", "b"))
    for other in (name.upper(), f"torch.{name}", "fp16", "16-mixed"):
        with pytest.raises(ValueError, match=r"must begin with a dtype, one of float16, bfloat16, float32"):
            Policy.parse(other)


@pytest.mark.parametrize("kind", ["keep", "copy"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("wrong", ["heads.*", "head", "words.weight|heads.*", "norm.running_mean"])
def test_glob_that_matches_no_parameter_is_refused(kind: str, dtype: str, wrong: str) -> None:
    """A typo would leave the layer in low precision without a word."""
    glob = wrong.split("|")[-1]
    problem = rf"init: every glob in the policy's {kind} must match .* got '{re.escape(glob)}', .* 'words\.weight'"
    with pytest.raises(ValueError, match=problem):
        seen_by_loss(tied(), f"{dtype},{kind}={wrong}", True)
    own = make_train_step(
        lambda p, x: p["head"]["w"].sum(), stateless(torch.optim.SGD), policy=f"float16,{kind}=head.b"
    )
    with pytest.raises(ValueError, match=r"got 'head\.b', and the names are 'head\.w': correct it"):
        own.init({"head": {"w": torch.ones(2, 2)}})


def test_globs_of_frozen_and_tied_parameters_match() -> None:
    task = tied()
    task.model.positions.requires_grad_(False)
    seen = seen_by_loss(task, "float16,keep=head.weight|positions,copy=words.*", True)
    assert (seen["head.weight"], seen["words.weight"]) == (torch.float32, torch.float16)


def seen_by_loss(task: Task, policy: str, flat: bool) -> dict[str, torch.dtype]:
    step = make_train_step(module_loss(task.model, task.criterion), stateless(torch.optim.SGD), policy=policy)
    state = step.init(flat=flat)
    inputs = step._inputs("step", state.params)
    return {name: value.dtype for name, value in inputs.tree(inputs.values(inputs.cast(state.params))).items()}


@pytest.mark.parametrize("flat", [True, False])
def test_the_loss_sees_copies_where_autocast_would_cast(flat: bool) -> None:
    seen = seen_by_loss(tied(), "float16", flat)
    low = {name for name, dtype in seen.items() if dtype == torch.float16}
    assert low == {
        "head.weight", "block.qkv.weight", "block.out.weight", "block.out.bias", "block.up.weight", "block.up.bias",
        "block.down.weight", "block.down.bias",
    }  # fmt: skip
    assert seen["words.weight"] == torch.float32, "the embedding's lookup is in float32, though it is the head's weight"
    assert {n for n, d in seen_by_loss(cnn(), "bfloat16", flat).items() if d != torch.float32} == {
        "0.weight", "3.weight", "6.weight", "6.bias",
    }  # fmt: skip
    overruled = seen_by_loss(tied(), "float16,keep=block.*,copy=positions", flat)
    assert {n for n, d in overruled.items() if d == torch.float16} == {"head.weight", "positions"}
    assert set(seen_by_loss(tied(), "float32", flat).values()) == {torch.float32}


def test_a_loss_of_ones_own_sees_matrices_in_low_precision() -> None:
    seen = {}

    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        seen.update({name: value.dtype for name, value in params.items()})
        loss: Tensor = (batch @ params["w"] + params["b"]).float().square().mean()
        return loss

    step = make_train_step(loss_fn, stateless(torch.optim.SGD), ScalerConfig(256.0), policy="float16")
    params = {"w": torch.randn(4, 4), "b": torch.zeros(4), "double": torch.zeros(2, 2, dtype=torch.float64)}
    _, metrics = step(step.init(params), torch.randn(2, 4))
    assert seen == {"w": torch.float16, "b": torch.float32, "double": torch.float64}
    assert metrics.found_inf == 0


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
        step = make_train_step(loss_fn, stateless(torch.optim.SGD, lr=0.1), policy="float16,copy=bias")
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


def test_module_names_are_those_of_autocast() -> None:
    loss_fn = module_loss(Tied(), cross_entropy)
    assert loss_fn.names["head.weight"] == loss_fn.names["words.weight"] == "words.weight"
    attention = module_loss(nn.MultiheadAttention(4, 2), cross_entropy)
    assert set(attention.cast_names or ()) == set(dict(attention.model.named_parameters()))


POLICIES = ["float16", "bfloat16", "float16,keep=0.*", None]


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
