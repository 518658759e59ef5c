"""Parts of small flat tensors as inputs of a program: equal blocks share their kernels, and no number changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcamp import jit, make_train_step, module_loss, stateless
from funcamp._cpu import part_inputs
from funcamp._jit import compile as compiler
from funcamp._jit import passes
from tests.support.generated import written
from tests.support.steps import assert_as_eager

pytestmark = pytest.mark.inductor

State = dict[str, Tensor]
WIDTH, PARTS = 64, 4


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer parts are enough: less to compile."""
    monkeypatch.setattr(part_inputs, "MANY", PARTS)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.linear(self.norm(x)))


def kernels(blocks: int) -> int:
    """The kernels that a step of so many blocks has, each counted once."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(blocks)])
    adamw = stateless(torch.optim.AdamW, lr=1e-3)
    step = make_train_step(module_loss(model, nn.functional.mse_loss), adamw, policy="bfloat16", max_norm=1.0)
    batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    # Products of torch's: kernels of the program read each matrix where it begins in its flat tensor.
    code = written(jit(step, without=["products"]), step.init(), batch)
    return len(re.findall(r"^extern \"C\"\s+void\s+cpp_fused", code, re.M))


@pytest.mark.thorough
def test_equal_blocks_share_their_kernels() -> None:
    few, many = kernels(PARTS), kernels(PARTS + 2)
    assert few == many > 0


def parts(state: State, name: str = "flat") -> list[Tensor]:
    return list(torch.split(state[name], [WIDTH] * PARTS))


def scaled(state: State, x: Tensor) -> Tensor:
    return torch.stack([torch.tanh(part * part.sum()) + x / 8 for part in parts(state)]).reshape(-1)


def results_are_the_old_values(state: State, x: Tensor) -> tuple[State, Any]:
    old = state["flat"], parts(state)[3], parts(state)[1].view(8, 8).t(), (state["flat"] * state["other"]).sum()
    return {**state, "flat": scaled(state, x)}, old


def two_leaves_change_places(state: State, x: Tensor) -> tuple[State, Any]:
    value = scaled(state, x).sum() + torch.stack([part.sum() for part in parts(state, "other")]).sum()
    return {"flat": state["other"], "other": state["flat"]}, value


def a_part_is_written_in_place(state: State, x: Tensor) -> tuple[State, Any]:
    new = scaled(state, x)
    state["flat"].add_(1.0)
    return {**state, "flat": new + state["flat"]}, parts(state)[1]


def a_leaf_is_copied_to(state: State, x: Tensor) -> tuple[State, Any]:
    early = parts(state)[0][3:7]
    value = scaled(state, x).sum()
    state["flat"].copy_(state["other"])
    return {"flat": state["flat"], "other": state["other"] * 2 + value}, value + early.sum()


def a_part_of_a_copy_is_written_in_place(state: State, x: Tensor) -> tuple[State, Any]:
    copy = state["flat"].clone()
    copy[:WIDTH].mul_(x.sum())
    return {**state, "flat": scaled({"flat": copy}, x)}, parts(state)[0] + copy[:WIDTH]


#: Steps, and how many flat tensors they read by parts that are inputs.
STEPS: dict[Callable[[State, Tensor], tuple[State, Any]], int] = {
    results_are_the_old_values: 1,
    two_leaves_change_places: 2,
    a_part_is_written_in_place: 0,
    a_leaf_is_copied_to: 0,
    a_part_of_a_copy_is_written_in_place: 1,
}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_inputs_for_parts_change_no_number(
    step: Callable[[State, Tensor], tuple[State, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def noted(program: Any) -> Any:
        changed = part_inputs.part_inputs(program)
        names = [node.name for node in changed.module.graph.find_nodes(op="placeholder")]
        found.append(sum(name.startswith("part_of_") and name.endswith("_0") for name in names))
        return changed

    noting = [one._replace(run=noted) if one.name == "part_inputs" else one for one in passes.pipeline()]
    monkeypatch.setattr(passes, "pipeline", lambda: noting)
    if not STEPS[step]:  # the graph is as it was: nothing of Inductor's to test
        monkeypatch.setattr(compiler, "_by_inductor", lambda program: (program.module, None))
    torch.manual_seed(0)
    state = {name: torch.randn(PARTS * WIDTH) for name in ("flat", "other")}
    assert_as_eager(step, jit(step, exact=True), state, list(torch.randn(3, WIDTH)), 1e-5)
    assert found == [STEPS[step]]
