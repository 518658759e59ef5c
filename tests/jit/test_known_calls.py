"""A call like an earlier one finds its program without a signature; any other call gets what its signature says."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from funcamp import jit
from funcamp._jit import jit_step
from tests.support.helpers import assert_same, clone
from tests.support.steps import assert_as_eager


class Rollout(NamedTuple):
    observations: Any
    actions: Any


X, Y = torch.arange(6.0).view(2, 3), torch.arange(3)
BATCHES: dict[str, Any] = {
    "tensor": X,
    "nested": {"x": [Rollout(X, (Y,))], "y": {}, "z": ()},
    "numbers": ((1, X), {"y": Y, "z": [True, None, 0.5, "text"]}),
    "None": None,
    "OrderedDict": collections.OrderedDict(x=X, y=Y),
    "deque": collections.deque([X, Y]),
    "structseq": torch.return_types.max((X, Y)),
}


def add(state: Tensor, batch: Any) -> tuple[Tensor, Any]:
    tensors = [leaf.sum() for leaf in _pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return state + sum(tensors), _pytree.tree_map_only(Tensor, lambda leaf: leaf + state, batch)


@pytest.mark.parametrize("name", BATCHES)
def test_a_later_call_makes_no_signature(name: str) -> None:
    run, state, batch = jit(add, backend="eager"), torch.zeros(()), BATCHES[name]
    state, _ = run(state, batch)
    once = state.clone()
    with mock.patch.object(jit_step, "key_of", side_effect=AssertionError):
        found = run(state, batch)
    assert_same(found, add(once, batch))


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda x: x[:1].clone(),
    "strides": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:1].expand(2, 3),
    "dtype": lambda x: x.double(),
    "gradient": lambda x: x.clone().requires_grad_(),
    "negative": lambda x: x._neg_view(),
}


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_another_tensor_after_known_ones_is_not_taken_for_one(name: str, donate: bool) -> None:
    def weighed(state: Tensor, x: Tensor) -> Any:
        rows = torch.arange(6.0).view(2, 3)[: len(x)]
        return state + (x.detach() * rows).sum(0).float(), x.detach() * 2

    run = jit(weighed, backend="eager", donate=donate)
    batches = [OTHERS[name](X + number) if number in (3, 4, 6) else X + number for number in range(8)]
    assert_as_eager(lambda state, x: clone(weighed(state, x)), run, torch.zeros(3), batches)
    assert run.programs == 1 + (name in ("shape", "dtype", "gradient"))
