"""`scaled_grad_and_value` against torch.func.grad_and_value on the scaled loss, and against backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from funcamp import ScalerConfig, jit, make_train_step, module_loss, scaled_grad_and_value, stateless
from tests.conftest import Transform
from tests.support.helpers import assert_same
from tests.support.oracle import state_of


def loss_fn(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"][0] + params["b"]).square().mean()


def example() -> tuple[dict[str, Any], Tensor]:
    return {"w": [torch.randn(4, 3)], "b": torch.randn(3)}, torch.randn(5, 4)


@pytest.mark.compiled
def test_power_of_two_scale_gives_the_unscaled_gradient(transform: Transform) -> None:
    params, x = example()
    expected, loss = torch.func.grad_and_value(loss_fn)(params, x)
    (grads, state), value = transform(scaled_grad_and_value(loss_fn))(state_of(2.0**10), params, x)
    assert_same(state, state_of(2.0**10))
    torch.testing.assert_close((grads, value), (expected, loss), rtol=1e-6, atol=1e-7)


def test_eager_power_of_two_scale_is_bit_equal_to_backward() -> None:
    params, x = example()
    leaves = {"w": [params["w"][0].clone().requires_grad_()], "b": params["b"].clone().requires_grad_()}
    loss = loss_fn(leaves, x)
    loss.backward()
    (grads, _), value = scaled_grad_and_value(loss_fn)(state_of(2.0**10), params, x)
    assert_same((grads, value), ({"w": [leaves["w"][0].grad], "b": leaves["b"].grad}, loss.detach()))


def test_loss_comes_back_as_the_loss_function_gave_it() -> None:
    _, loss = scaled_grad_and_value(lambda w: (w * 3e38).half().sum() * 0 + w.half())(
        state_of(2.0**16), torch.tensor(1.0)
    )
    assert loss.dtype == torch.float16


@pytest.mark.compiled
def test_aux_tensors_come_back(transform: Transform) -> None:
    params, x = example()

    def with_aux(params: Any, x: Tensor) -> Any:
        loss = loss_fn(params, x)
        return loss, {"hidden": x @ params["w"][0], "loss": loss}

    (grads, _), (loss, aux) = transform(scaled_grad_and_value(with_aux, has_aux=True))(state_of(8.0), params, x)
    assert_same(aux["loss"], loss)
    torch.testing.assert_close(aux["hidden"], x @ params["w"][0])
    assert not aux["hidden"].requires_grad
    assert grads["b"].shape == (3,)


def test_none_leaves_of_params_have_none_gradients() -> None:
    (grads, _), _ = scaled_grad_and_value(lambda p: p["w"].sum())(state_of(8.0), {"w": torch.ones(2), "none": None})
    assert_same(grads, {"w": torch.ones(2), "none": None})


def test_float16_overflow_of_the_scaled_gradient_sets_the_flag() -> None:
    def half_loss(w: Tensor) -> Tensor:
        return (w.half() * torch.tensor(4.0, dtype=torch.float16)).float().sum()

    run = scaled_grad_and_value(half_loss)
    assert run(state_of(2.0**10), torch.ones(3))[0][1].found_inf == 0.0
    (_, state), loss = run(state_of(2.0**15), torch.ones(3))
    assert_same(state, state_of(2.0**15, found_inf=1.0))
    assert loss == 12.0


def test_gradients_are_unscaled_with_the_scale_that_multiplied_the_loss() -> None:
    (grads, state), _ = scaled_grad_and_value(lambda w: w.sum())(state_of(8.0, tracker=1999), torch.ones(2))
    assert grads.tolist() == [1.0, 1.0]
    assert_same(state, state_of(8.0, tracker=1999))


def test_keyword_arguments_reach_the_loss_function() -> None:
    (grads, _), _ = scaled_grad_and_value(lambda w, *, factor: (w * factor).sum())(
        state_of(8.0), torch.ones(2), factor=3.0
    )
    assert grads.tolist() == [3.0, 3.0]


def test_inside_grad_a_second_derivative_is_right() -> None:
    def inner(w: Tensor) -> Tensor:
        (grads, _), _ = scaled_grad_and_value(lambda w: (w**3).sum())(state_of(8.0), w)
        return torch.as_tensor(grads.sum())

    assert torch.func.grad(inner)(torch.tensor([2.0])).item() == 12.0


def test_non_finite_loss_sets_the_flag() -> None:
    (_, state), loss = scaled_grad_and_value(lambda w: (w * math.inf).sum())(state_of(8.0), torch.ones(2))
    assert state.found_inf == 1.0
    assert torch.isinf(loss)


class Penalty(nn.Module):
    """Its output, and how that changes with its input; or its output, computed again in the backward pass."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.again = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), again

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)
        if x.requires_grad and not self.again:
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            y = y + slope.square().sum(1, keepdim=True)
        return y


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("wrapped", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("engine", [None, "autograd"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"policy": "bfloat16"}], ids=str)
def test_penalty_on_the_gradient_of_the_batch(options: Any, engine: Any, wrapped: bool) -> None:
    """`x.requires_grad_()` and torch.autograd.grad in the forward pass, as gradient penalties are written."""
    model = Penalty()
    step = make_train_step(
        module_loss(model, mse_loss, engine=engine),
        stateless(torch.optim.SGD, lr=0.1),
        ScalerConfig(1.0),
        **options,
    )
    run: Any = jit(step, backend="eager") if wrapped else step
    state, parts = step.init(), options.get("accumulate", 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        x, y = torch.randn(2, 5, 3), torch.randn(2, 5, 1)
        x.requires_grad_(index != 1)
        pieces = [(x[i], y[i]) for i in range(parts)]
        optimizer.zero_grad()
        losses = []
        for piece, target in pieces:
            with torch.autocast("cpu", torch.bfloat16, enabled="policy" in options):
                loss = mse_loss(model(piece), target) / parts
            loss.backward()
            losses.append(loss.detach() * parts)
        optimizer.step()
        state, metrics = run(state, (x, y) if parts > 1 else pieces[0])
        assert not metrics.loss.requires_grad
        assert not any(leaf.requires_grad for leaf in torch.utils._pytree.tree_leaves(state))
        torch.testing.assert_close(metrics.loss, torch.stack(losses).mean(), rtol=1e-6, atol=0)
        if parts == 1:
            assert_same(state.params.tree(), {name: value.detach() for name, value in model.named_parameters()})
    if wrapped:
        assert run.programs == 2


@pytest.mark.compiled
@pytest.mark.parametrize("wrapped", [False, True], ids=["eager", "jit"])
def test_batch_that_requires_a_gradient_under_a_checkpoint(wrapped: bool) -> None:
    ends = []
    for again in (False, True):
        step = make_train_step(module_loss(Penalty(again), mse_loss), stateless(torch.optim.SGD, lr=0.1))
        run: Any = jit(step, backend="eager") if wrapped else step
        torch.manual_seed(1)
        ends.append(run(step.init(), (torch.randn(5, 3, requires_grad=again), torch.randn(5, 1))))
    assert_same(*ends)


def test_state_that_requires_a_gradient_is_differentiated_by_torch_func() -> None:
    step = make_train_step(lambda p, x: (p["w"] * x).square().sum(), stateless(torch.optim.SGD, lr=0.1))
    state = step.init({"w": torch.ones(2)})
    leaves = [leaf.requires_grad_() for leaf in state.params.groups if leaf is not None]
    _, metrics = step(state, torch.ones(2))
    assert torch.autograd.grad(metrics.loss, leaves)[0].sum() == 4.0


@pytest.mark.parametrize(
    ("engine", "detached", "expected"),
    [
        (None, False, True),
        ("func", False, True),
        ("autograd", False, False),
        (None, True, False),
        ("func", True, False),
    ],
)
def test_results_require_a_gradient_if_torch_func_gets_a_modules_parameters(
    engine: Any, detached: bool, expected: bool
) -> None:
    module = nn.Linear(3, 1)
    params = {name: value.detach() if detached else value for name, value in module.named_parameters()}
    grad_fn = scaled_grad_and_value(
        lambda params, x: torch.func.functional_call(module, params, x).square().mean(), engine=engine
    )
    (grads, _), loss = grad_fn(state_of(8.0), params, torch.ones(4, 3))
    assert {loss.requires_grad, grads["weight"].requires_grad, grads["bias"].requires_grad} == {expected}
    new_weight = params["weight"] - 0.1 * grads["weight"]
    assert new_weight.requires_grad != detached


def test_penalty_under_torch_func_says_what_to_do() -> None:
    step = make_train_step(module_loss(Penalty(), mse_loss, engine="func"), stateless(torch.optim.SGD))
    with pytest.raises(RuntimeError, match=r"take torch\.func\.grad there, or pass engine='autograd'"):
        step(step.init(), (torch.ones(5, 3, requires_grad=True), torch.ones(5, 1)))


def _under_no_grad(output: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        return mse_loss(output, target)


WITHOUT_A_GRAPH = {
    "no_grad": _under_no_grad,
    "detach": lambda output, target: mse_loss(output, target).detach(),
    "accuracy": lambda output, target: (output.argmax(1) == target.argmax(1)).float().mean(),
    "constant": lambda output, target: target.sum(),
}


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "jit", "window", "compile"])
@pytest.mark.parametrize("engine", [None, "autograd", "func"])
@pytest.mark.parametrize("kind", [*WITHOUT_A_GRAPH])
def test_loss_without_a_graph_is_refused(kind: str, engine: Any, how: str) -> None:
    """As torch's backward does: such a step would count, decay weights and train nothing."""
    criterion = WITHOUT_A_GRAPH[kind]
    with pytest.raises(RuntimeError, match="does not require grad"):
        criterion(nn.Linear(3, 2)(torch.randn(4, 3)), torch.randn(4, 2)).backward()
    window = {"accumulate": 2} if how == "window" else {}
    loss_fn = module_loss(nn.Linear(3, 2), criterion, engine=engine)
    step = make_train_step(loss_fn, stateless(torch.optim.AdamW), **window)  # type: ignore[arg-type]
    state = step.init()
    runs: dict[str, Any] = {"eager": step, "compile": torch.compile(step, backend="eager", fullgraph=True)}
    run: Any = runs.get(how) or jit(step, backend="eager")
    batch = (torch.randn(2, 4, 3), torch.randn(2, 4, 2)) if window else (torch.randn(4, 3), torch.randn(4, 2))
    with pytest.raises(Exception, match=r"step: loss_fn must return a loss that depends on the parameters") as caught:
        run(state, batch)
    assert how == "compile" or caught.type is ValueError


@pytest.mark.parametrize("engine", ["func", None])
def test_a_derivative_with_respect_to_the_input_gets_advice_that_helps(engine: Any) -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((params["w"] * x).sin().sum(), x, create_graph=True)
        return (slope - x).pow(2).mean()

    params, x = {"w": torch.tensor([2.0])}, torch.ones(3, requires_grad=engine is None)
    with pytest.raises(RuntimeError, match=r"take torch.func.grad in the loss, or pass engine='autograd'"):
        scaled_grad_and_value(loss_fn, engine=engine)(state_of(1.0), params, x)
    (grads, _), _ = scaled_grad_and_value(loss_fn, engine="autograd")(state_of(1.0), params, x)
    assert grads["w"].isfinite().all()
