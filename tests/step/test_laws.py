"""Laws of a step: whatever is done with the state between calls, and in whatever form, no number changes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from funcamp import ScalerConfig, clone, jit, stateless
from tests.support.helpers import assert_close, assert_same, one_thread
from tests.support.torch_loop import linear_step

CONFIG = ScalerConfig(2.0**6, growth_interval=2)
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: stateless(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: stateless(torch.optim.AdamW, lr=lambda applied: 0.1 / (1 + applied)),
    "rmsprop": lambda: stateless(torch.optim.RMSprop, lr=0.01, centered=True),
    "radam": lambda: stateless(torch.optim.RAdam, lr=0.01),
}
SHAPES = st.lists(st.integers(0, 3), max_size=2).map(tuple)


class Case(NamedTuple):
    """A step, made anew for each form, with parameters and batches: a batch is the gradients."""

    optimizer: str
    options: dict[str, Any]
    params: dict[str, Tensor]
    batches: list[dict[str, Tensor]]

    def step(self, **more: Any) -> Any:
        return linear_step(OPTIMIZERS[self.optimizer](), CONFIG, **self.options, **more)


@st.composite
def cases(draw: Any) -> Case:
    shapes = draw(st.dictionaries(st.sampled_from(["a", "b.c", "d"]), SHAPES, min_size=1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    params = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    batches = []
    for is_finite in draw(st.lists(st.booleans(), min_size=2, max_size=5)):
        batch = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        if not is_finite:
            batch[draw(st.sampled_from(sorted(shapes)))].fill_(draw(st.sampled_from([float("inf"), float("nan")])))
        batches.append(batch)
    options = draw(st.sampled_from([{}, {"max_value": 0.5}, {"ema_decay": 0.9}, {"max_norm": 1.0, "ema_decay": 0.5}]))
    return Case(draw(st.sampled_from(sorted(OPTIMIZERS))), options, params, batches)


def trained(case: Case, step: Any, run: Any = None, change: Any = None, **layout: Any) -> Any:
    """The tensors of the last state by name, and the metrics of every call.

    Args:
        step: of the case.
        run: what is called; by default the step.
        change: returns another form of the state that a call gets.
        **layout: of the first state.
    """
    state = step.init(clone(case.params), **layout)
    rows: list[Any] = []
    for batch in case.batches:
        if change is not None:
            state = change(step, state)
        state, metrics = (run or step)(state, batch)
        rows.append(clone(metrics.to_dict()))
    return step.state_dict(state), rows


def changed(change: Callable[[Any, Any], Any]) -> Callable[[Case], Any]:
    return lambda case: trained(case, case.step(), change=change)


def traced(case: Case, **options: Any) -> Any:
    step = case.step()
    return trained(case, step, jit(step, backend="eager", **options))


def accumulated(case: Case) -> Any:
    """Each batch twice, whose mean is the batch bit for bit."""
    batches = [{name: torch.stack([value, value]) for name, value in batch.items()} for batch in case.batches]
    return trained(case._replace(batches=batches), case.step(accumulate=2))


#: What is done with the state before each call, or another form of the step.
FORMS: dict[str, Callable[[Case], Any]] = {
    "cloned": changed(lambda step, state: clone(state)),
    "saved and loaded": changed(lambda step, state: step.load_state_dict(step.state_dict(state), like=state)),
    "pickled": changed(lambda step, state: pickle.loads(pickle.dumps(state))),
    "accumulated": accumulated,
    "traced": traced,
    "traced, not donated": lambda case: traced(case, donate=False),
}


@pytest.mark.compiled
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(case=cases())
def test_no_form_of_a_step_changes_a_number(form: str, case: Case) -> None:
    with one_thread():
        assert_same(FORMS[form](case), trained(case, case.step()))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cases())
def test_flat_storage_changes_the_order_of_sums_only(case: Case) -> None:
    (found, _), (expected, _) = trained(case, case.step(), flat=False), trained(case, case.step())
    assert_close(found, expected, 1e-5)
