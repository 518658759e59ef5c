"""The pass that casts groups of parameters: one cast for a group, and not another number."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from funcamp import ScalerConfig, jit, stateless
from funcamp._jit import passes
from funcamp._jit.passes import casts
from funcamp._jit.passes.program import Program, Target
from tests.support.helpers import assert_same
from tests.support.models import Task, cnn, mlp
from tests.support.steps import build

aten = torch.ops.aten
ADAMW = stateless(torch.optim.AdamW, lr=1e-2)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """The graphs that the pass has changed; it is the only one, and runs for every backend."""
    seen: list[fx.Graph] = []

    def run(program: Any) -> Any:
        program = casts.casts(program)
        program.module.graph.eliminate_dead_code()
        program.module.graph.lint()
        seen.append(program.module.graph)
        return program

    only = casts.PASS._replace(run=run, where=lambda _: True)
    monkeypatch.setattr(passes, "pipeline", lambda: (only,))
    return seen


def trained(make: Callable[[], Task], accumulate: int = 1, **options: Any) -> Any:
    """The state after some jitted steps."""
    task = make()
    step = build(task, ADAMW, config=ScalerConfig(2.0**10), policy="bfloat16", accumulate=accumulate)
    run, state = jit(step, backend="eager", **options), step.init()
    for number in range(3):
        parts = [task.batch(accumulate * number + part) for part in range(accumulate)]
        batch = tuple(map(torch.stack, zip(*parts))) if accumulate > 1 else parts[0]
        state, _ = run(state, batch)
    return state


def casts_of_groups(graph: fx.Graph) -> list[str]:
    """The inputs in flat storage that are cast to bfloat16, and those of which a part is."""
    names = []
    for node in graph.find_nodes(op="call_function", target=aten._to_copy.default):
        source = node.args[0]
        while source.op != "placeholder" and len(source.all_input_nodes) == 1:
            source = source.all_input_nodes[0]
        is_group = source.op == "placeholder" and source.meta["val"].dim() == 1
        if is_group and node.kwargs.get("dtype") == torch.bfloat16:
            names.append(source.name)
    return names


def joins_of(graph: fx.Graph) -> list[Any]:
    """The concatenations in bfloat16."""
    joins = graph.find_nodes(op="call_function", target=aten.cat.default)
    return [join for join in joins if join.meta["val"].dtype == torch.bfloat16]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_group_is_cast_once_and_no_number_changes(graphs: list[fx.Graph], accumulate: int) -> None:
    found = trained(mlp, accumulate)
    cast = casts_of_groups(graphs[0])
    # Three groups of matrices, and biases; what the norm has beside these is not cast.
    assert len(cast) == len(set(cast)) == 4
    assert len(joins_of(graphs[0])) == 3 * accumulate  # the gradients of the matrices
    assert_same(found, trained(mlp, accumulate, without=["casts"]))


def in_the_order_of_channels() -> Task:
    """Its gradients are in another order than its parameters, and of a size that needs zeros after it."""
    task = cnn()

    def batch(number: int) -> tuple[Tensor, Tensor]:
        x, target = task.batch(number)
        return x.contiguous(memory_format=torch.channels_last), target

    return task._replace(batch=batch)


@pytest.mark.usefixtures("one_thread")
def test_gradients_of_convolutions_are_joined_before_they_are_cast(graphs: list[fx.Graph]) -> None:
    found = trained(in_the_order_of_channels)
    assert any(part.target is aten.new_zeros.default for join in joins_of(graphs[0]) for part in join.args[0])
    assert_same(found, trained(in_the_order_of_channels, without=["casts"]))


def part_written(flat: Tensor) -> tuple[Tensor, ...]:
    """A part that is written after the other one's cast, and two casts of one part, the first of which is written."""
    first, second = flat.split_with_sizes([8, 8])
    low, other = first.to(torch.bfloat16), first.to(torch.bfloat16)
    second.mul_(2)
    other.mul_(2)
    return low, other, second.to(torch.bfloat16)


def source_written(flat: Tensor) -> tuple[Tensor, ...]:
    """A gradient that is written after its cast."""
    low = flat.to(torch.bfloat16).clone()
    first, second = low[:8], low[8:]
    parts = [first.to(torch.float32), second.to(torch.float32)]
    low.mul_(2)
    return torch.cat(parts), low


@pytest.mark.parametrize("function", [part_written, source_written])
def test_what_is_written_after_its_cast_is_not_moved(function: Any) -> None:
    flat = torch.arange(16.0)
    module = make_fx(function, tracing_mode="fake")(flat)
    program = Program(module, [flat], nullcontext(), Target("inductor", frozenset({"cpu"})), b"", {})
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        changed = casts.casts(program._replace(mode=nullcontext(mode))).module
    changed.recompile()
    assert_same(changed(flat.clone()), function(flat.clone()))


@pytest.mark.inductor
def test_numbers_that_vmap_casts_are_no_tensors() -> None:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return state + 1, state.float() * 0.5 + x

    members = torch.func.vmap(step, in_dims=(0, None))
    found = jit(members)(torch.zeros(3, dtype=torch.int32), torch.ones(()))
    assert_same(found, members(torch.zeros(3, dtype=torch.int32), torch.ones(())))
