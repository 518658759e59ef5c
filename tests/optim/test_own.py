"""An optimizer of the user's own gets every parameter in its shape, however a step stores them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from funcamp import average, by_group, chain, every, make_train_step, stateless
from tests.support.helpers import assert_close, assert_same
from tests.support.models import mlp
from tests.support.steps import build, compiled, eager_and_traced

MOMENTUM, RATE = 0.5, 0.1


def stepped(param: Tensor, grad: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    """A step of LARS: as long as the parameter's norm."""
    buffer = MOMENTUM * buffer + grad * (param.norm() / grad.norm())
    return param - RATE * buffer, buffer


class Lars:
    """Reads shapes: its state has a buffer like each parameter, and evaluation takes directions."""

    def init(self, params: Any) -> Any:
        return _pytree.tree_map_only(Tensor, torch.zeros_like, params)

    def update(self, params: Any, grads: Any, state: Any) -> Any:
        leaves, spec = _pytree.tree_flatten(params)
        all_leaves = zip(leaves, _pytree.tree_leaves(grads), _pytree.tree_leaves(state))
        pairs = [(None, None) if one[0] is None else stepped(*one) for one in all_leaves]
        new_params, new_state = zip(*pairs)
        return _pytree.tree_unflatten(new_params, spec), _pytree.tree_unflatten(new_state, spec)

    def evaluation_params(self, params: Any, state: Any) -> Any:
        return _pytree.tree_map_only(Tensor, lambda param: param / param.norm(), params)


VECTORS = stateless(torch.optim.SGD, lr=0.0)
OPTIMIZERS: dict[str, Any] = {
    "alone": Lars(),
    "in a chain": chain(Lars(), average(0.5)),
    "of a group": by_group({"matrix": Lars(), "vector": VECTORS}),
    "at every update": chain(every(1, Lars())),
}


@pytest.mark.compiled
@eager_and_traced
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_takes_the_steps_of_a_plain_loop(name: str, flat: bool, wrap: Any) -> None:
    task, only_matrices = mlp(), name == "of a group"
    step = build(task, OPTIMIZERS[name])
    state, run = step.init(flat=flat), wrap(step)
    params = {name: param.detach().clone().requires_grad_() for name, param in task.model.named_parameters()}
    buffers = {name: torch.zeros_like(param) for name, param in params.items()}
    for number in range(3):
        x, y = task.batch(number)
        state, _ = run(state, (x, y))
        loss = task.criterion(torch.func.functional_call(task.model, params, (x,)), y)
        grads = torch.autograd.grad(loss, list(params.values()))
        for (label, param), grad in zip(params.items(), grads):
            if param.dim() >= 2 or not only_matrices:
                new, buffers[label] = stepped(param.detach(), grad, buffers[label])
                params[label] = new.requires_grad_()
    for label, param in params.items():
        assert_close(state.params[label], param.detach(), 1e-5)
    assert_same(step.load_state_dict(step.state_dict(state), like=step.init(flat=flat)), state)
    with step.evaluating(state, average=False) as model:
        for _, param in model.named_parameters():
            if param.dim() >= 2:
                assert_close(param.norm(), torch.tensor(1.0), 1e-5)


class Returns:
    """Returns what a function makes of the parameters; the loss's gradients are ones."""

    def __init__(self, make: Callable[[dict[str, Tensor]], Any]) -> None:
        self.make = make

    def init(self, params: Any) -> Any:
        return ()

    def update(self, params: Any, grads: Any, state: Any) -> Any:
        return self.make(params), state


MISFITS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "None": (lambda params: {**params, "b": None}, r"must return params\['b'\] as it got it, .* got None"),
    "a number": (lambda params: {**params, "b": 0.0}, r"must return params\['b'\] as it got it"),
    "another shape": (lambda params: {**params, "b": params["w"]}, r"must return params\['b'\] as it got it"),
    "another dtype": (lambda params: {**params, "b": params["b"].half()}, r"float16 .* cast by .to\(p.dtype\)"),
    "one parameter only": (lambda params: {"b": params["b"]}, r"must have one tree structure"),
    "an item written": (lambda params: params.update(b=params["b"] - 1) or params, "must not write .* a new dict"),
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", MISFITS)
def test_another_form_of_the_parameters_is_an_error_that_names_the_part(name: str, flat: bool) -> None:
    make, expected = MISFITS[name]
    step = make_train_step(lambda p, x: (p["w"] * x).sum() + p["b"].sum(), Returns(make))
    state = step.init({"b": torch.ones(3), "w": torch.ones(2)}, flat=flat)
    with pytest.raises(ValueError, match=rf"chain: <.*Returns object .*{expected}"):
        step(state, torch.ones(2))


class Writes(Returns):
    """Writes into what it gets."""

    def init(self, params: Any) -> Any:
        self.make(params)
        return ()


class WritesInAnEvaluation(Returns):
    def evaluation_params(self, params: Any, state: Any) -> Any:
        self.make(params)
        return params


def test_init_and_an_evaluation_must_not_write_into_parameters() -> None:
    def write(params: dict[str, Tensor]) -> None:
        params["0.weight"].zero_()

    with pytest.raises(ValueError, match="must not write"):
        build(mlp(), Writes(write)).init()
    step = build(mlp(), WritesInAnEvaluation(write))
    with pytest.raises(ValueError, match="must not write"), step.evaluating(step.init()):
        pass


@pytest.mark.parametrize("flat", [False, True])
def test_an_item_that_is_written_under_torch_compile_counts(flat: bool) -> None:
    def halved(update: Any) -> Any:
        update.gradients["w"] = update.gradients["w"] * 0.5
        return update

    step = make_train_step(lambda p, x: (p["w"] * x).sum(), chain(halved, stateless(torch.optim.SGD, lr=1.0)))
    state, _ = compiled(step)(step.init({"w": torch.zeros(2)}, flat=flat), torch.ones(2))
    assert_close(state.params["w"], torch.full((2,), -0.5), 1e-6)
