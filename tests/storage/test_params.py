"""Flat storage holds what it was given, and every function does to it what it does to a dict."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree

import funcamp
from funcamp import Params, clip_grad_norm, ema_update, ravel, skip_step, stateless, unscale_and_check
from tests.support.helpers import assert_close, assert_same
from tests.support.models import Tied
from tests.support.oracle import state_of

DTYPES = [torch.float32, torch.float16, torch.float64, torch.complex64]
SHAPES = st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=4), st.sampled_from(DTYPES)), min_size=1, max_size=8)


@given(SHAPES, st.randoms())
@settings(max_examples=60, deadline=None)
def test_any_tree_comes_back(shapes: Any, random: Any) -> None:
    leaves: list[Any] = [torch.randn(shape).to(dtype) for shape, dtype in shapes]
    leaves += [*random.sample(leaves, random.randint(0, len(leaves))), None]
    tree = {"list": leaves[::2], "dict": {str(i): leaf for i, leaf in enumerate(leaves[1::2])}}
    flat = ravel(tree)
    assert_same(flat.tree(), tree)
    assert_same(flat.ravel(tree), flat)
    assert_same(ravel(flat.tree()), flat)
    assert sum(len(part) for part in flat.layout.padded_sizes) == len(flat.layout.slots)


def real_tree() -> dict[str, Tensor]:
    shapes = {"w": (16, 8), "v": (5,), "u": (3, 7), "empty": (0, 4), "x": (32, 8)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def sizes(flat: Params) -> list[tuple[str, int]]:
    return [(label, group.numel()) for label, group in zip(flat.layout.labels, flat.groups) if group is not None]


def test_layout_of_a_group() -> None:
    """Matrices of one row length are a group; each tensor is aligned, also in a float16 copy; the rest is zero."""
    tree = real_tree()
    flat = ravel(tree)
    assert sizes(flat) == [("matrix", 128 + 256), ("vector", 64), ("matrix", 128)]
    for view in flat.values():
        assert view.storage_offset() * 4 % 256 == 0
        assert view.dim() < 2 or view.storage_offset() * 2 % 256 == 0
    values = sum(leaf.abs().sum().item() for leaf in tree.values())
    assert sum(group.abs().sum().item() for group in flat.groups if group is not None) == pytest.approx(values)
    labelled = ravel(tree, group=lambda name, _: "head" if name == "x" else "rest")
    assert ("head", 256) in sizes(labelled)


def test_tied_leaves_are_one() -> None:
    array, model = np.ones(3, dtype=np.float32), Tied()
    trees: list[dict[str, Tensor]] = [
        {"a": torch.from_numpy(array), "b": torch.from_numpy(array)},  # one memory under two storages
        {"a": model.state_dict()["words.weight"], "b": model.state_dict()["head.weight"]},  # two objects, one storage
    ]
    for tree in trees:
        views = ravel(tree).tree()
        assert views["a"] is views["b"]


def test_state_dict_loads_into_the_module() -> None:
    model, other = Tied(), Tied()
    flat = ravel(dict(model.named_parameters(remove_duplicate=False)))
    trained = _pytree.tree_map(lambda group: group * 2, flat)
    saved = trained.state_dict()
    other.load_state_dict(saved)
    assert_same([value * 2 for value in model.parameters()], [value.detach() for value in other.parameters()])
    assert all(v.is_contiguous() and v.storage_offset() == 0 for v in saved.values())
    assert_same(flat.ravel(saved), trained)


def core(params: Any, grads: Any) -> Any:
    grads, state = unscale_and_check(state_of(8.0), grads)
    clipped, norm = clip_grad_norm(grads, 0.5)
    clipped = funcamp.clip_grad_value(clipped, 0.01)
    average = ema_update(params, clipped, 0.9)
    return skip_step(state, new=clipped, old=params), average, norm, state, funcamp.all_finite(grads)


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("bad", [False, True])
def test_core_functions_take_it_as_they_take_a_dict(bad: bool, transform: Callable[..., Any]) -> None:
    params, grads = real_tree(), real_tree()
    if bad:
        grads["u"][1, 1] = torch.inf
    flat = ravel(params)
    *trees, norm, state, finite = transform(core)(flat, flat.ravel(grads))
    *expected, expected_norm, expected_state, expected_finite = core(params, grads)
    assert_same((state, finite), (expected_state, expected_finite))
    if bad:
        assert_same(trees[0].tree(), params)
    else:
        assert_close((norm, [tree.tree() for tree in trees]), (expected_norm, expected), 1e-6)


@pytest.mark.compiled
def test_gradient_of_a_flat_tree(transform: Callable[..., Any]) -> None:
    params = real_tree()

    def loss(tree: Any) -> Any:
        return sum((leaf.square() * leaf).sum() for leaf in tree.values())

    grads = transform(lambda flat: torch.func.grad(lambda flat: loss(flat.tree()))(flat))(ravel(params))
    assert_close(grads.tree(), torch.func.grad(loss)(params), 1e-6)
    assert_same(grads, grads.ravel(grads.tree()))


def squares(params: Any, x: Tensor) -> Tensor:
    return torch.stack([(leaf.float() * x).square().sum() for leaf in params.values() if leaf is not None]).sum()


@pytest.mark.parametrize("policy", [None, "float16"])
def test_tensor_by_tensor_is_flat_storage_with_other_groups(policy: str | None) -> None:
    """Each tensor is a group in its own shape, tied names are one tensor, and a step computes the same."""
    weight = torch.randn(4, 3)
    params = {"w": weight, "b": torch.randn(3), "tied": weight, "none": None}
    params |= {"empty": torch.zeros(0, 3), "scalar": torch.ones(())}
    adam = stateless(torch.optim.AdamW, lr=0.1)
    step = funcamp.make_train_step(squares, adam, funcamp.ScalerConfig(2.0**8), policy=policy, ema_decay=0.5)
    single, flat = step.init(params, flat=False), step.init(params)
    assert [group.shape for group in single.params.groups if group is not None] == [(4, 3), (3,), (0, 3), ()]
    for _ in range(3):
        single, _ = step(single, torch.ones(()))
        flat, _ = step(flat, torch.ones(()))
    assert single.params["w"] is single.params["tied"]
    assert_same(step.state_dict(single), step.state_dict(flat))
    assert_same(step.load_state_dict(step.state_dict(flat), like=step.init(params, flat=False)), single)
    assert_same(pickle.loads(pickle.dumps(single)), single)
    assert_same(step.init(flat.params).params, flat.params)  # taken apart and stored anew
    assert_same(single.opt_state[0].state["exp_avg"]["b"], flat.opt_state[0].state["exp_avg"]["b"])
