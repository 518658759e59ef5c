"""Buffers kept between calls are used again only when nothing can see them any more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import clone, jit
from funcamp._jit import buffer_pool
from funcamp._jit.buffer_pool import Scratch
from tests.support.helpers import assert_same


def take(scratch: Scratch) -> Tensor:
    return scratch.take((8,), (1,), torch.float32)


def test_a_buffer_is_used_again_when_nothing_holds_its_storage() -> None:
    scratch = Scratch()
    first = take(scratch)
    place = first.data_ptr()
    second = take(scratch)
    assert second.data_ptr() != place
    view = first[2:]
    del first
    assert take(scratch).data_ptr() not in (place, second.data_ptr())
    array = view.numpy()
    del view
    assert take(scratch).data_ptr() != place
    del array
    again = take(scratch)
    assert again.data_ptr() == place
    storage = again.untyped_storage()
    del again
    assert take(scratch).data_ptr() != place
    del storage
    assert take(scratch).data_ptr() == place


def test_a_buffer_that_was_resized_is_not_used_again() -> None:
    scratch = Scratch()
    first = take(scratch)
    first.untyped_storage().resize_(0)
    del first
    assert take(scratch).fill_(1.0).sum().item() == 8


def large(state: Any, batch: Tensor) -> Any:
    flat = torch.cat([(state["a"] * batch).cumsum(0), state["b"].cumsum(0)])
    return {"a": flat[:64] + state["b"], "b": flat[64:] * 0.5}, {"flat": flat, "part": flat[3:5], "sum": flat.sum()}


def blocks_of(run: Any) -> int:
    return sum(len(blocks) for blocks in run._scratch._kept.values())


@pytest.mark.inductor
@pytest.mark.parametrize("donate", [True, False])
def test_a_step_on_kept_buffers_is_the_same_step(monkeypatch: pytest.MonkeyPatch, donate: bool) -> None:
    monkeypatch.setattr(buffer_pool, "LARGE", -(1 << 40))
    monkeypatch.setattr(buffer_pool, "KEPT", 256)
    start = {"a": torch.randn(64), "b": torch.randn(64)}
    run = jit(large, donate=donate)
    plain = jit(lambda state, batch: large(state, batch), donate=donate)
    state, expected, kept, blocks = clone(start), clone(start), [], set()
    for index in range(12):
        batch = torch.full((), 1.0 + index % 3)
        monkeypatch.setattr(buffer_pool, "LARGE", 1 << 40)
        expected, wanted = plain(expected, batch)
        monkeypatch.setattr(buffer_pool, "LARGE", -(1 << 40))
        state, metrics = run(state, batch)
        assert_same(state, expected)
        if index % 2:  # some are held, some are dropped
            kept.append((metrics, clone(wanted)))
        if index > 3:
            blocks.add(blocks_of(run) - len(kept))
    for metrics, wanted in kept:
        assert_same(metrics, wanted)
    assert blocks_of(run) > 0
    assert len(blocks) <= 2, "buffers pile up"
