"""Which parameter's gradient is not finite. In the metrics of a step: tests/step/test_step_metrics.py."""

from __future__ import annotations

import math

import pytest
import torch

from funcamp import found_inf_by_leaf, leaf_names, ravel
from tests.conftest import Transform


@pytest.mark.compiled
def test_every_leaf_has_its_flag(transform: Transform) -> None:
    run = transform(found_inf_by_leaf)
    for bad in (math.nan, math.inf, -math.inf):
        grads = {"a": torch.ones(3), "b": {"c": torch.tensor([1.0, bad]), "d": torch.zeros(0)}, "e": torch.tensor(bad)}
        assert leaf_names(grads) == ("a", "b.c", "b.d", "e")
        assert run(grads).tolist() == [False, True, False, True]


def test_flat_empty_and_complex_trees_have_their_flags() -> None:
    tree = {"w": torch.full((2, 2), math.inf), "b": torch.ones(2), "half": torch.ones(3).half()}
    flat = ravel(tree)
    assert dict(zip(leaf_names(flat), found_inf_by_leaf(flat).tolist())) == {"w": True, "b": False, "half": False}
    assert leaf_names(torch.func.vmap(ravel)(tree | {"half": tree["b"]})) == leaf_names(flat)  # a batch of them
    some = {"a": None, "b": torch.tensor([complex(0, math.nan)])}
    assert (found_inf_by_leaf(some).tolist(), leaf_names(some)) == ([True], ("b",))
    assert (found_inf_by_leaf({}).tolist(), leaf_names({})) == ([], ())
