"""The pass that casts groups of parameters: one cast for a group, and not another number."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from funcamp import ScalerConfig, jit, make_train_step, module_loss, stateless
from funcamp._jit import passes
from funcamp._jit.passes import casts
from funcamp._jit.passes.program import Program, Target
from tests.support.helpers import assert_same

aten = torch.ops.aten
WIDTH, WORDS, ROWS = 16, 32, 4


class Gpt(nn.Module):
    """Embeddings, matrices of one row length and of another, norms, and a head that may be tied."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for _ in range(2):  # each weight is used twice
            x = x + self.down(F.gelu(self.up(self.norm(x))))
        out: Tensor = self.head(x)
        return out


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


def trained(tied: bool, accumulate: int, **options: Any) -> Any:
    """The state after some jitted steps."""
    torch.manual_seed(0)
    loss_fn = module_loss(Gpt(tied=tied), lambda out, y: F.cross_entropy(out.float().flatten(0, -2), y.flatten()))
    adamw = stateless(torch.optim.AdamW, lr=1e-2)
    step = make_train_step(loss_fn, adamw, ScalerConfig(2.0**10), policy="bfloat16", accumulate=accumulate)
    run, state = jit(step, backend="eager", **options), step.init()
    for seed in range(3):
        torch.manual_seed(seed)
        tokens = torch.randint(WORDS, (accumulate, 2, ROWS) if accumulate > 1 else (2, ROWS))
        state, _ = run(state, (tokens, tokens))
    return state


def casts_of_inputs(graph: fx.Graph) -> list[str]:
    """The inputs that are cast to bfloat16, and those of which a part is."""
    names = []
    for node in graph.find_nodes(op="call_function", target=aten._to_copy.default):
        source = node.args[0]
        while source.op != "placeholder" and len(source.all_input_nodes) == 1:
            source = source.all_input_nodes[0]
        if source.op == "placeholder" and node.kwargs.get("dtype") == torch.bfloat16:
            names.append(source.name)
    return names


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("tied", "accumulate"), [(True, 1), (False, 2)])
def test_a_group_is_cast_once_and_no_number_changes(graphs: list[fx.Graph], tied: bool, accumulate: int) -> None:
    found = trained(tied, accumulate)
    cast = casts_of_inputs(graphs[0])
    # Matrices of two row lengths, and biases; a head that is an embedding too, in the group of embeddings.
    assert len(cast) == len(set(cast)) == (4 if tied else 3)
    joins = graphs[0].find_nodes(op="call_function", target=aten.cat.default)
    assert sum(join.meta["val"].dtype == torch.bfloat16 for join in joins) == 2 * accumulate
    assert_same(found, trained(tied, accumulate, without=["casts"]))


class Convolutions(nn.Module):
    """Gradients in the order of channels, and parts of a size that needs zeros after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 5, 3, bias=False), nn.Conv2d(5, 7, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(x.contiguous(memory_format=torch.channels_last))))
        return out


@pytest.mark.usefixtures("one_thread")
def test_gradients_of_convolutions_are_joined_before_they_are_cast(graphs: list[fx.Graph]) -> None:
    def state_after(**options: Any) -> Any:
        torch.manual_seed(0)
        loss_fn = module_loss(Convolutions(), lambda out, y: (out.float() - y).square().mean())
        step = make_train_step(loss_fn, stateless(torch.optim.AdamW, lr=1e-2), policy="bfloat16")
        return jit(step, backend="eager", **options)(step.init(), (torch.rand(2, 3, 6, 6), torch.rand(2, 7, 2, 2)))[0]

    found = state_after()
    (join,) = graphs[0].find_nodes(op="call_function", target=aten.cat.default)
    assert join.meta["val"].dtype == torch.bfloat16
    assert any(part.target is aten.new_zeros.default for part in join.args[0])
    assert_same(found, state_after(without=["casts"]))


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
