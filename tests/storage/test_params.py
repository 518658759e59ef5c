"""Flat storage holds what it was given, and every function does to it what it does to a dict."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import funcamp
from funcamp import Params, clip_grad_norm, ema_update, ravel, skip_step, stateless, unscale_and_check
from tests.support.helpers import assert_close, assert_same, clone
from tests.support.models import Tied
from tests.support.optimizers import CASES
from tests.support.oracle import state_of

SHAPES = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=4), st.sampled_from([torch.float32, torch.float16, torch.float64])),
    min_size=1,
    max_size=8,
)


def example() -> dict[str, Any]:
    shared = torch.randn(3, 5)
    return {
        "w": shared,
        "nested": [torch.randn(7), (torch.randn(16, 8), None)],
        "tied": shared,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.0),
        "double": torch.randn(4, 4, dtype=torch.float64),
        "complex": torch.randn(2, dtype=torch.complex64),
        "transposed": torch.randn(4, 6).t(),
        "wide": torch.randn(32, 8),
    }


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


def test_layout_of_a_group() -> None:
    flat = ravel(example())
    for view in flat.layout.views(flat.groups):
        assert view is not None
        assert view.storage_offset() * 4 % 256 == 0
        if view.dim() >= 2 and view.numel():
            assert view.storage_offset() * 2 % 256 == 0, "the float16 copy of a matrix is aligned as well"
    for group, sizes in zip(flat.groups, flat.layout.padded_sizes):
        assert group is not None
        assert group.shape == (sum(sizes),)
        assert group.storage_offset() == 0
    held = sum(leaf.abs().sum().item() for leaf in flat.layout.views(flat.groups) if leaf is not None)
    assert sum(group.abs().sum().item() for group in flat.groups if group is not None) == pytest.approx(held)


def test_tied_leaves_are_one() -> None:
    tree = example()
    flat = ravel(tree)
    views = flat.tree()
    assert views["w"] is views["tied"]
    assert (
        len(flat.layout.slots) == len([leaf for leaf in torch.utils._pytree.tree_leaves(tree) if leaf is not None]) - 1
    )
    model = Tied()
    views = ravel(dict(model.state_dict())).tree()  # other objects, one storage
    assert views["words.weight"] is views["head.weight"]


def test_state_dict_loads_into_the_module() -> None:
    model, other = Tied(), Tied()
    flat = ravel(dict(model.named_parameters(remove_duplicate=False)))
    trained = torch.utils._pytree.tree_map(lambda group: group * 2, flat)
    other.load_state_dict(trained.state_dict())
    for mine, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(mine * 2, theirs)
    assert other.head.weight is other.words.weight
    saved = trained.state_dict()
    assert all(v.is_contiguous() and v.storage_offset() == 0 for v in saved.values())
    assert_same(flat.ravel(saved), trained)


def test_pickle_and_copies_share_the_layout() -> None:
    flat = ravel(example())
    for other in (pickle.loads(pickle.dumps(flat)), copy.deepcopy(flat), copy.copy(flat)):
        assert other.layout is flat.layout
        assert_same(other, flat)


def test_parameters_are_grouped_by_label() -> None:
    flat = ravel(example(), group=lambda name, leaf: "head" if name.startswith("wide") else "rest")
    assert set(flat.layout.labels) == {"head", "rest"}
    by_label = dict(zip(flat.layout.labels, flat.groups))
    assert by_label["head"] is not None
    assert by_label["head"].numel() == 256


def core(params: Any, grads: Any) -> Any:
    grads, state = unscale_and_check(state_of(8.0), grads)
    clipped, norm = clip_grad_norm(grads, 0.5)
    clipped = funcamp.clip_grad_value(clipped, 0.01)
    average = ema_update(params, clipped, 0.9)
    return skip_step(state, new=clipped, old=params), average, norm, state, funcamp.all_finite(grads)


def real_tree() -> dict[str, Tensor]:
    return {"w": torch.randn(16, 8), "v": torch.randn(5), "u": torch.randn(3, 7), "x": torch.randn(32, 8)}


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
    if not bad:
        assert_close(norm, expected_norm, 1e-6)
        for tree, other in zip(trees, expected):
            assert_close(tree.tree(), other, 1e-6)
    else:
        assert_same(trees[0].tree(), params)


@pytest.mark.parametrize("case", CASES)
def test_every_optimizer_steps_as_on_a_dict(case: str) -> None:
    cls, arguments = CASES[case]
    optimizer = stateless(cls, **arguments)
    params = {"w": torch.randn(16, 8), "u": torch.randn(3, 7), "x": torch.randn(32, 8)}
    flat = ravel(params)
    opt_state, flat_state = optimizer.init(params), optimizer.init(flat)
    for step in range(4):
        torch.manual_seed(step)
        grads = {name: torch.randn_like(value) for name, value in params.items()}
        params, opt_state = optimizer.update(params, grads, opt_state)
        flat, flat_state = optimizer.update(flat, flat.ravel(grads), flat_state)
        assert isinstance(flat, Params)
        assert_same(flat.tree(), params)
    assert_same(flat, flat.ravel(flat.tree()))  # the padding is still zero


def test_an_optimizer_of_matrices_gets_the_views() -> None:
    muon = stateless(torch.optim.Muon, lr=0.1)
    params = {"w": torch.randn(16, 8), "u": torch.randn(3, 7)}
    assert set(muon.init(ravel(params)).state["momentum_buffer"]) == set(params)

    class PerTensor(torch.optim.SGD):
        """A step of unit length for each tensor."""

        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for param in self.param_groups[0]["params"]:
                    param.add_(param.grad / param.grad.norm(), alpha=-1.0)

    optimizer = stateless(PerTensor)
    flat = ravel(params)
    new, _ = optimizer.update(flat, flat, optimizer.init(flat))
    expected = {name: value - value / value.norm() for name, value in params.items()}
    assert_close(new.tree(), expected, 1e-6)


@pytest.mark.compiled
def test_gradient_of_a_flat_tree(transform: Callable[..., Any]) -> None:
    params = real_tree()

    def loss(tree: Any) -> Any:
        return sum((leaf.square() * leaf).sum() for leaf in tree.values())

    flat = ravel(params)
    grads = transform(lambda flat: torch.func.grad(lambda flat: loss(flat.tree()))(flat))(flat)
    assert_close(grads.tree(), torch.func.grad(loss)(params), 1e-6)
    assert_same(grads, flat.ravel(grads.tree()))


def test_nothing_it_was_made_of_is_shared() -> None:
    params = {"w": torch.randn(16, 8)}
    before = clone(params)
    flat = ravel(params)
    assert flat.groups[0] is not None
    flat.groups[0].zero_()
    assert_same(params, before)


def test_module_forward_on_views() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    flat = ravel(dict(model.named_parameters()))
    x = torch.randn(3, 8)
    assert torch.equal(torch.func.functional_call(model, flat.tree(), (x,)), model(x))


def squares(params: Any, x: Tensor) -> Tensor:
    return torch.stack([(leaf.float() * x).square().sum() for leaf in params.values()]).sum()


@pytest.mark.parametrize("policy", [None, "float16"])
def test_tensor_by_tensor_is_flat_storage_with_other_groups(policy: str | None) -> None:
    """Each tensor is a group in its own shape, tied names are one tensor, and a step computes the same."""
    weight = torch.randn(4, 3)
    params = {"w": weight, "b": torch.randn(3), "tied": weight, "none": None}

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return squares({name: leaf for name, leaf in params.items() if leaf is not None}, x)

    adam = stateless(torch.optim.AdamW, lr=0.1)
    step = funcamp.make_train_step(loss_fn, adam, funcamp.ScalerConfig(2.0**8), policy=policy, ema_decay=0.5)
    single, flat = step.init(params, flat=False), step.init(params)
    assert [group.shape for group in single.params.groups if group is not None] == [(4, 3), (3,)]
    assert repr(single.params) == "Params(2 tensors, each a group)"
    for _ in range(3):
        single, _ = step(single, torch.ones(()))
        flat, _ = step(flat, torch.ones(()))
    assert single.params["w"] is single.params["tied"]
    assert_same(single.params.tree(), flat.params.tree())
    assert_same(step.state_dict(single), step.state_dict(flat))
    assert_same(step.load_state_dict(step.state_dict(flat), like=step.init(params, flat=False)), single)
    assert_same(pickle.loads(pickle.dumps(single)), single)


def test_a_plain_tree_in_a_state_is_taken_as_it_is() -> None:
    step = funcamp.make_train_step(squares, stateless(torch.optim.SGD, lr=0.1), policy="bfloat16")
    params = {"w": torch.randn(2, 3), "b": torch.randn(3)}
    state = step.init(params)
    tree: Any = params
    replaced = state._replace(params=tree)
    x = torch.ones(())
    assert_same(step.loss(replaced, x), step.loss(state, x))
    assert_same(step.compute_params(replaced), step.compute_params(state))
    assert_same(step(replaced, x)[0].params.tree(), step(state, x)[0].params.tree())
    with pytest.raises(TypeError, match=r"loss: params\['w'\] must not be float16"):
        step.loss(state._replace(params={"w": params["w"].half()}), x)  # type: ignore[arg-type]
