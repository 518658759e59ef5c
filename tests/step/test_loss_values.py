"""What a loss is given and what it returns: buffers that it writes, tensors it hands on, results of another form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import funcamp
from funcamp import ScalerConfig, jit, loss, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same

SGD = stateless(torch.optim.SGD, lr=0.1)
CONFIG = ScalerConfig(16.0)
X = torch.linspace(-1, 1, 8).reshape(4, 2)

MODES: dict[str, Callable[[Any], Any]] = {
    "eager": lambda step: step,
    "jit": lambda step: jit(step, backend="eager"),
    "jit, not donated": lambda step: jit(step, backend="eager", donate=False),
}


def params() -> dict[str, Tensor]:
    return {"w": torch.arange(6.0).reshape(2, 3) / 6, "b": torch.ones(3)}


def base(p: Any, x: Tensor) -> Tensor:
    value: Tensor = (x @ p["w"] + p["b"]).square().mean()
    return value


def in_place(p: Any, buffers: dict[str, Tensor], x: Tensor) -> Any:
    value = base(p, x)
    buffers["n"].mul_(0.5).add_(value.detach(), alpha=0.5)
    return value, buffers


def by_name(p: Any, buffers: dict[str, Tensor], x: Tensor) -> Any:
    value = base(p, x)
    buffers["n"] = buffers["n"] * 0.5 + value.detach() * 0.5
    return value, buffers


@pytest.mark.compiled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("written", [in_place, by_name])
def test_a_loss_may_write_its_buffers(written: Any, mode: str) -> None:
    """A skipped step puts them back, an applied one has them, and the state before is as it was."""
    step = make_train_step(loss(written, has_buffers=True), SGD, CONFIG)
    first = step.init(params(), {"n": torch.zeros(())})
    before = first.buffers["n"].clone()
    run = MODES[mode](step)
    skipped, metrics = run(funcamp.clone(first), X * float("nan"))
    assert metrics.found_inf == 1
    assert_same(skipped.buffers["n"], before)
    assert_same(first.buffers["n"], before)
    after, metrics = run(funcamp.clone(first), X)
    assert_same(after.buffers["n"], metrics.loss * 0.5)
    assert_same(first.buffers["n"], before)
    step.loss(first, X)
    assert_same(first.buffers["n"], before)


@pytest.mark.compiled
@pytest.mark.parametrize("mode", MODES)
def test_kept_buffers_are_no_ones_memory(mode: str) -> None:
    """A buffer that is a tensor of the batch, or of the parameters, is a copy: no later step writes into those."""

    def keeping(p: Any, buffers: dict[str, Tensor], x: Tensor) -> Any:
        value = base(p, x) + buffers["last"].sum()
        return value, {"last": x, "prev": p["w"].detach()}

    step = make_train_step(loss(keeping, has_buffers=True, keep_buffers=True), SGD, CONFIG)
    x, run = X.clone(), MODES[mode](step)
    first = step.init(params(), {"last": torch.zeros(4, 2), "prev": torch.zeros(2, 3)})
    state, _ = step(first, x)
    held = funcamp.clone(first)
    for number in range(3):
        state, _ = run(state, X + number)
    assert_same(x, X)
    assert_same(first.params.tree(), held.params.tree())
    assert_same(state.buffers["last"], X + 2)


class Remembers(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 3)
        self.register_buffer("last", torch.zeros(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return super().forward(x)


@pytest.mark.compiled
@pytest.mark.parametrize("mode", MODES)
def test_a_modules_kept_buffer_is_not_the_batch(mode: str) -> None:
    loss_fn = module_loss(Remembers(), lambda output, _: output.square().mean(), keep_buffers=True)
    step = make_train_step(loss_fn, SGD, CONFIG)
    x, target = X.clone(), torch.zeros(())
    state, _ = step(step.init(), (x, target))
    run = MODES[mode](step)
    for number in range(1, 3):
        state, _ = run(state, (X + number, target))
    assert_same(x, X)


class Caches(nn.Linear):
    """Its first call fills a buffer, which has another shape before."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.register_buffer("places", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.places.shape[0] != x.shape[0]:
            self.places = torch.arange(x.shape[0], dtype=self.weight.dtype)
        return super().forward(x) + self.places[:, None]


@pytest.mark.compiled
@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_that_a_first_call_fills_needs_that_call(mode: str) -> None:
    model = Caches()
    loss_fn = module_loss(model, lambda output, _: output.square().mean())
    step, batch = make_train_step(loss_fn, SGD, CONFIG, policy="bfloat16"), (X, torch.zeros(()))
    with pytest.raises(ValueError, match=r"'places' was .*\(1,\).* is .*; call a model .* once before init"):
        MODES[mode](step)(step.init(), batch)
    model(X)
    state, metrics = MODES[mode](step)(step.init(), batch)
    assert metrics.found_inf == 0
    assert torch.equal(state.buffers["places"], torch.arange(float(X.shape[0])))


PAIR = r"\(loss, \(buffers, aux\)\)"
BESIDE: dict[str, tuple[bool, Any, type[Exception], str]] = {
    "aux forgotten": (True, lambda b: {"n": b["n"], "k": b["n"]}, TypeError, PAIR),
    "one entry": (True, lambda b: {"n": b["n"]}, TypeError, PAIR),
    "swapped": (True, lambda b: (b["n"], b), TypeError, "its buffers as a dict; got a torch.float32"),
    "a list": (False, lambda b: [b["n"]], TypeError, "its buffers as a dict; got a list"),
    "more": (False, lambda b: {**b, "k": b["n"]}, ValueError, "'k' was None, is a torch"),
    "less": (False, lambda b: {"m": b["n"]}, ValueError, "'n' was .* is None"),
    "dtype": (False, lambda b: {"n": b["n"].double()}, ValueError, "'n' was .*float32.* is .*float64"),
    "shape": (False, lambda b: {"n": b["n"].expand(2)}, ValueError, r"'n' was .*\(\).* is .*\(2,\)"),
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("case", BESIDE)
def test_what_a_loss_returns_beside_is_checked(case: str, keep: bool) -> None:
    has_aux, beside, kind, message = BESIDE[case]
    described = loss(lambda p, b, x: (base(p, x), beside(b)), has_buffers=True, keep_buffers=keep, has_aux=has_aux)
    step = make_train_step(described, SGD, CONFIG)
    with pytest.raises(kind, match=message):
        step(step.init(params(), {"n": torch.zeros(())}), X)


def test_a_loss_that_uses_no_parameter_it_is_given_is_refused() -> None:
    """The loss of the module itself: it has a gradient, which trains nothing here."""
    model = nn.Linear(2, 1)
    step = make_train_step(lambda p, x: model(x).sum(), SGD, CONFIG)
    state = step.init(dict(model.named_parameters()))
    for run in (step, jit(step, backend="eager")):
        with pytest.raises(ValueError, match=r"depends on the parameters it is given; it uses none.*module_loss"):
            run(state, X)
    some = make_train_step(lambda p, x: base(p, x), SGD, CONFIG)
    after, _ = some(some.init({**params(), "unused": torch.ones(2)}), X)
    assert_same(after.params["unused"], torch.ones(2))


def test_an_engine_of_a_loss_holds_in_scaled_grad_and_value() -> None:
    named = loss(base, engine="func")
    (grads, _), value = funcamp.scaled_grad_and_value(named)(funcamp.init(), params(), X.clone().requires_grad_())
    assert value.requires_grad
    assert grads["w"].shape == (2, 3)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "keep without": (
        lambda: loss(base, keep_buffers=True),
        ValueError,
        "keep_buffers must be False without has_buffers",
    ),
    "partial": (
        lambda: loss(functools.partial(loss(base, engine="func"))),
        TypeError,
        "function must not be a loss already",
    ),
    "partial step": (
        lambda: make_train_step(functools.partial(module_loss(nn.Linear(1, 1), nn.functional.mse_loss)), SGD),
        TypeError,
        "function must not be a loss already",
    ),
    "probes": (lambda: loss(base, probes=None), TypeError, "probes must be names; got None"),  # type: ignore[arg-type]
    "criterion": (
        lambda: module_loss(nn.Linear(1, 1), loss(lambda output, target: output.sum())),
        TypeError,
        "criterion must be a plain function",
    ),
    "buffers": (
        lambda: make_train_step(base, SGD).init(params(), {"n": torch.zeros(())}),
        ValueError,
        "buffers must be None for a loss without",
    ),
    "names": (
        lambda: make_train_step(module_loss(nn.BatchNorm1d(2), nn.functional.mse_loss), SGD).init(
            buffers={"running_mean": torch.zeros(2)}
        ),
        ValueError,
        "the names of the module's; they differ in 'num_batches_tracked'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_do_nothing_is_refused(case: str) -> None:
    call, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        call()
