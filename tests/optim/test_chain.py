"""`chain`: clip, step, average and delay as parts of one optimizer, against torch's loop written out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import _pytree

from funcamp import (
    ScalerConfig,
    average,
    by_group,
    chain,
    clip_by_norm,
    clip_by_value,
    every,
    make_train_step,
    module_loss,
    ravel,
    stateless,
)
from funcamp._optim.part import Update
from tests.support.helpers import assert_close, assert_same
from tests.support.steps import eager_and_traced
from tests.support.torch_loop import TorchLoop

ADAMW = stateless(torch.optim.AdamW, lr=0.1)
SGD = stateless(torch.optim.SGD, lr=1.0)
CONFIG = ScalerConfig(init_scale=2.0**10)


def params() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"b": torch.randn(3), "w": torch.randn(4, 3)}


def gradients(number: int) -> dict[str, Tensor]:
    torch.manual_seed(100 + number)
    return {"b": torch.randn(3), "w": torch.randn(4, 3) * number}


def by_chain(optimizer: Any, steps: int, start: Any) -> tuple[Any, Any]:
    now, state = start, optimizer.init(start)
    for number in range(steps):
        grads = gradients(number)
        now, state = optimizer.update(now, now.ravel(grads) if hasattr(now, "ravel") else grads, state)
    return now, state


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("part", "of_torch", "tolerance"),
    [
        (clip_by_norm(0.5), lambda leaves: torch.nn.utils.clip_grad_norm_(leaves, 0.5), 1e-6),
        (clip_by_value(0.25), lambda leaves: torch.nn.utils.clip_grad_value_(leaves, 0.25), 0.0),
    ],
    ids=["by norm", "by value"],
)
def test_clipping_and_the_average_are_torchs(part: Any, of_torch: Any, tolerance: float, flat: bool) -> None:
    module = nn.ParameterDict({name: nn.Parameter(value) for name, value in params().items()})
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=False)
    averaged: Any = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    averaged.update_parameters(module)  # torch's average begins with the first parameters it gets
    for number in range(5):
        for name, gradient in gradients(number).items():
            module[name].grad = gradient.clone()
        of_torch(list(module.parameters()))
        optimizer.step()
        averaged.update_parameters(module)
    start: Any = ravel(params()) if flat else params()
    now, (_, state) = by_chain(chain(part, ADAMW, average(0.75)), 5, start)
    for found, expected in ((now, module), (state.average, averaged.module)):
        assert_close(found.tree() if flat else found, dict(expected.items()), tolerance)


def test_a_part_acts_at_every_second_update_and_rests_in_between() -> None:
    """torch's loop, in which the optimizer steps at updates 2 and 4 only."""
    loop = TorchLoop(torch.optim.AdamW, params(), lr=0.1, foreach=False)
    for number in (1, 3):
        loop.step(gradients(number))
    now, state = by_chain(chain(every(2, ADAMW)), 5, params())
    assert_same(now, loop.params())
    assert (state.updates, state.state.applied) == (5, 2)


def test_a_step_stores_the_groups_of_an_optimizer_in_a_chain() -> None:
    def layer(name: str, _: Tensor) -> str:
        return name.partition(".")[0]

    groups = by_group({"0": SGD, "2": chain(every(2, SGD))}, group=layer)
    step = step_of(chain(clip_by_norm(1.0), groups))
    start = step.init()
    assert set(start.params.layout.labels) == {"0", "2"}
    state, _ = step(start, batch(0))
    assert_same(state.params["2.weight"], start.params["2.weight"])
    assert not torch.equal(state.params["0.weight"], start.params["0.weight"])


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("of_vectors", [ADAMW, chain(every(2, ADAMW))], ids=["optimizer", "every"])
def test_a_group_without_parameters_keeps_its_counts_where_the_others_are(of_vectors: Any, flat: bool) -> None:
    """A model without biases on a GPU; the meta device stands for it."""
    groups = by_group({"matrix": ADAMW, "vector": of_vectors})
    step = make_train_step(lambda weights, x: (weights["w"] * x).sum(), groups, CONFIG)
    weight = torch.ones(2, 2, device="meta")
    state, _ = step(step.init({"w": weight}, flat=flat), weight)
    assert {leaf.device.type for leaf in _pytree.tree_leaves(state)} == {"meta"}


@pytest.mark.compiled
@eager_and_traced
@pytest.mark.parametrize("flat", [False, True])
def test_a_state_of_another_grouping_is_refused(flat: bool, wrap: Callable[[Any], Any]) -> None:
    """The labels are the same: without the check the parameters would keep the optimizers of before."""

    def step_with(fast: str) -> Any:
        rates = {"fast": SGD, "slow": stateless(torch.optim.SGD, lr=0.01)}
        return step_of(by_group(rates, group=lambda name, _: "fast" if name.startswith(fast) else "slow"))

    first, other = step_with("0"), step_with("2")
    state, _ = first(first.init(flat=flat), batch(0))
    match = "update: params must have the labels .*; got 'fast' for '0.weight', which it labels 'slow'"
    with pytest.raises(ValueError, match=match):
        wrap(other)(state, batch(1))
    wrap(other)(other.init(state.params.tree(), flat=flat), batch(1))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def step_of(optimizer: Any, **options: Any) -> Any:
    return make_train_step(module_loss(model(), nn.functional.mse_loss), optimizer, CONFIG, **options)


def batch(number: int, last: float = 1.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(number)
    x = torch.randn(8, 3)
    x[-1, -1] *= last
    return x, torch.randn(8, 1)


@pytest.mark.compiled
@eager_and_traced
@pytest.mark.parametrize("flat", [False, True])
def test_a_steps_options_are_a_chain(flat: bool, wrap: Callable[[Any], Any]) -> None:
    """max_norm and ema_decay are the same chain, bit for bit, with the same state and one skipped step."""

    def trained(optimizer: Any, **options: Any) -> Any:
        step = step_of(optimizer, policy="bfloat16", **options)
        state, run = step.init(flat=flat), wrap(step)
        for number in range(4):
            state, metrics = run(state, batch(number, torch.inf if number == 2 else 1.0))
        return state, metrics

    expected = trained(ADAMW, max_norm=0.3, ema_decay=0.5)
    assert_same(trained(chain(clip_by_norm(0.3), ADAMW, average(0.5))), expected)
    assert expected[0].skipped == 1
    assert_same(trained(chain(clip_by_value(0.01), ADAMW)), trained(ADAMW, max_value=0.01))


@pytest.mark.compiled
@eager_and_traced
def test_a_skipped_step_changes_no_state_of_a_chain(wrap: Callable[[Any], Any]) -> None:
    optimizer = chain(clip_by_norm(1.0), every(2, ADAMW), average(0.5))
    step = step_of(optimizer)
    run, state = wrap(step), step.init()
    state, _ = run(state, batch(0))
    before = copy.deepcopy(state)
    state, metrics = run(state, batch(1, torch.inf))
    assert metrics.found_inf == 1.0
    assert_same((state.params, state.opt_state), (before.params, before.opt_state))
    state, _ = run(state, batch(2))
    delayed, _ = state.opt_state
    assert (delayed.updates, delayed.state.applied) == (2, 1)
    assert_same(step.load_state_dict(step.state_dict(state), like=step.init()), state)


def test_a_chain_reports_the_rate_of_its_optimizer() -> None:
    rate = stateless(torch.optim.SGD, lr=lambda applied: 0.5 / (1 + applied))
    step = step_of(chain(every(3, average(0.9)), every(2, rate), average(0.5)), max_norm=1.0)
    state, rates = step.init(), []
    for number in range(4):
        state, metrics = step(state, batch(number))
        rates.append(metrics.lr.item())
    assert rates == [0.5, 0.5, 0.25, 0.25]


def test_an_average_can_begin_and_end_in_mid_training() -> None:
    without, averaging = step_of(ADAMW), step_of(ADAMW, ema_decay=0.5)
    state, _ = without(without.init(), batch(0))
    begun = state._replace(opt_state=(state.opt_state, average(0.5).init(state.params)))
    after, _ = averaging(begun, batch(1))
    assert_close(after.ema.tree(), {n: (v + after.params[n]) / 2 for n, v in state.params.tree().items()}, 1e-6)
    without(after._replace(opt_state=after.opt_state[0]), batch(2))


@pytest.mark.parametrize(
    "averages",
    [(average(0.5), average(0.9)), (every(2, average(0.5)),)],
    ids=["two", "delayed"],
)
def test_a_chain_with_averages_goes_to_torch_and_back_and_through_a_checkpoint(averages: tuple[Any, ...]) -> None:
    """Clipping and averages are no part of torch's checkpoints."""
    step = step_of(chain(clip_by_norm(1.0), ADAMW, *averages))
    state, _ = step(step.init(), batch(0))
    assert_same(step.load_state_dict(step.state_dict(state), like=step.init()), state)
    saved = step.to_torch(state)
    plain = step_of(ADAMW, max_norm=1.0)
    assert_same(saved, plain.to_torch(plain(plain.init(), batch(0))[0]))
    optimizer = torch.optim.AdamW(model().parameters(), lr=0.1)
    optimizer.load_state_dict(saved["optimizer"])
    back = step.from_torch(step.init(), optimizer=optimizer.state_dict())
    assert back.opt_state[0].applied == 1
    assert_same(back.opt_state[0].state, state.opt_state[0].state)


def tenth(update: Update) -> Update:
    return update._replace(gradients=_pytree.tree_map(lambda g: g * 0.1, update.gradients))


@pytest.mark.parametrize(
    "parts",
    [
        (clip_by_norm(1.0), clip_by_norm(0.5)),
        (clip_by_value(1.0), clip_by_norm(1.0)),
        (chain(tenth, average(0.5)), clip_by_norm(0.25)),
    ],
    ids=["twice", "by value first", "after a function in a chain"],
)
def test_each_part_clips_by_the_norm_of_what_it_gets(parts: tuple[Any, ...]) -> None:
    """In a step as by itself: the norm that the step knows is that of its own gradients only."""
    gradient, start = torch.tensor([3.0, 4.0]), {"w": torch.zeros(2)}
    optimizer = chain(*parts, SGD)
    expected, _ = optimizer.update(start, {"w": gradient}, optimizer.init(start))
    step = make_train_step(lambda p, x: (p["w"] * x).sum(), optimizer, ScalerConfig(2.0))
    state, _ = step(step.init(start), gradient)
    assert_close(state.params["w"], expected["w"], 1e-6)


class WritesParameters:
    def init(self, params: Any) -> Any:
        return ()

    def update(self, params: Any, grads: Any, state: Any) -> Any:
        for param, grad in zip(_pytree.tree_leaves(params), _pytree.tree_leaves(grads)):
            if param is not None:
                param.sub_(0.1 * grad)
        return params, state


class WritesItsState:
    def init(self, params: Any) -> Any:
        return {"calls": torch.zeros(())}

    def transform(self, update: Update, state: Any) -> Any:
        state["calls"].add_(1)
        return update, state


class ReplacesItsState(WritesItsState):
    def transform(self, update: Update, state: Any) -> Any:
        state["calls"] = state["calls"] + 1
        return update, state


def writes_gradients(update: Update) -> Update:
    for gradient in getattr(update.gradients, "tree", lambda: update.gradients)().values():
        gradient.mul_(0.5)
    return update


WRITING: dict[str, Any] = {
    "gradients": chain(writes_gradients, clip_by_norm(0.1), SGD),
    "gradients, at every second update": chain(every(2, writes_gradients), SGD),
    "an optimizer": WritesParameters(),
    "an optimizer of a group": by_group({"matrix": WritesParameters(), "vector": SGD}),
    "its state": chain(SGD, WritesItsState()),
    "an item of its state": chain(SGD, ReplacesItsState()),
}


@pytest.mark.compiled
@eager_and_traced
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", WRITING)
def test_a_part_that_writes_into_what_it_gets_is_refused(name: str, flat: bool, wrap: Callable[[Any], Any]) -> None:
    """A skipped step could not undo the write, and a clip would not see it."""
    step = step_of(WRITING[name])
    with pytest.raises(ValueError, match=r"must not write into .* compute new tensors, such as g \* 0.5"):
        wrap(step)(step.init(flat=flat), batch(0))


def test_a_part_that_writes_is_refused_under_vmap() -> None:
    writing, stacked = WRITING["gradients"], {"w": torch.ones(2, 3)}
    with pytest.raises(ValueError, match="must not write into"):
        torch.vmap(lambda grads: writing.update({"w": torch.ones(3)}, grads, writing.init(stacked)))(stacked)


def test_a_function_changes_gradients_at_every_second_update() -> None:
    now, _ = by_chain(chain(every(2, tenth), SGD), 2, params())
    first, second = gradients(0), gradients(1)
    assert_close(now, {name: value - first[name] - 0.1 * second[name] for name, value in params().items()}, 1e-6)
