"""Shapes that follow from values, such as those of `logits[mask]` and `nonzero`: as in the eager step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from funcamp import ScalerConfig, jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same
from tests.support.stand_in import StandIn
from tests.support.steps import assert_as_eager

CLASSES, ROWS = 3, 12
SIZES = (ROWS, 5, 2, 1, 0, 1, 7)


def labeled(logits: Tensor, target: Tensor) -> Tensor:
    """The usual loss of masked language models and of graphs with few labels."""
    chosen = target >= 0
    return cross_entropy(logits[chosen], target[chosen])


def batches(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    made = []
    for size in SIZES:
        target = torch.full((ROWS,), -1)
        target[torch.randperm(ROWS)[:size]] = torch.randint(CLASSES, (size,))
        made.append((torch.randn(ROWS, 4), target))
    return made


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, CLASSES))


ADAMW = stateless(torch.optim.AdamW, lr=0.1)


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_over_a_mask_trains_as_the_eager_step(policy: str, accumulate: int) -> None:
    config = ScalerConfig(2.0**20, growth_interval=2)
    step = make_train_step(
        module_loss(model(), labeled), ADAMW, config, policy=policy, max_norm=1.0, accumulate=accumulate
    )
    run, given = jit(step, backend="eager"), batches()
    if accumulate > 1:
        given = [(x.unflatten(0, (accumulate, -1)), target.unflatten(0, (accumulate, -1))) for x, target in given]
    rows = assert_as_eager(step, run, step.init(), given)
    assert run.programs == 1
    assert any(row.found_inf for row in rows) == (policy == "float16")


def operations(state: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Any:
    """One of each kind, after the other."""
    x, target = batch
    w, chosen = state["w"], target >= 0
    rows, columns = x[chosen] @ w, x.t()[:, chosen]
    values, back = torch.unique(target, return_inverse=True)
    written = x.clone()
    written[chosen] = 2.0
    sums = rows.new_zeros(values.shape[0], 4).index_add(0, back, x)
    repeated = x.repeat_interleave(target + 1, 0).mean(0).nan_to_num()
    filled = torch.zeros_like(x).index_put((chosen,), rows)
    per_row = rows.square().sum() / chosen.nonzero().shape[0]
    out = [per_row.nan_to_num(), written, columns, values, rows.softmax(0), torch.cat([rows, x])]
    return {"w": w + 0.01 * (filled.sum(0) + sums.amax(0) + repeated)}, [*out, x.masked_select(x > 0.5)]


@pytest.mark.inductor
def test_generated_code_computes_what_the_operations_do() -> None:
    assert_as_eager(operations, jit(operations), {"w": torch.randn(4, 4)}, batches(1), 1e-5)


@pytest.mark.inductor
def test_compiled_parts_write_the_state_last() -> None:
    """Everything reads the old state, in whichever part and whatever was selected."""

    def step(state: dict[str, Tensor], mask: Tensor) -> tuple[dict[str, Tensor], Any]:
        w, other = state["w"], state["other"]
        rows = w.t()[mask]  # a view of what is written, in an open operation
        mean = rows.sum(0) / rows.shape[0]
        late = w.t() * mean[:, None]  # and in the last part
        new = {"w": other, "other": w + late.sin(), "count": state["count"] + 1}
        return new, {"old": w, "rows": w[mask], "mean": mean, "late": late, "view": late.t()[1:]}

    state = {"w": torch.randn(4, 4), "other": torch.randn(4, 4), "count": torch.zeros(())}
    masks = [torch.randperm(4) < size for size in (2, 4, 1, 3)]
    for run in (jit(step), jit(step, donate=False)):
        assert_as_eager(step, run, state, masks, 1e-6)


def put(x: Tensor, places: Tensor) -> Tensor:
    return x.index_put((places > 0,), torch.arange(2.0))


def add(x: Tensor, places: Tensor) -> Tensor:
    return x[places > 0] + torch.arange(2.0)


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("write", "bad", "text"),
    [(put, [0, 1, 1, 2], "index_put"), (add, [1, 1, 1, 0], "size|u0")],
)
def test_places_or_a_size_that_cannot_be_are_an_error_and_lose_nothing(write: Any, bad: list[int], text: str) -> None:
    # contract: "a tensor that a mask has selected does not broadcast (an error)"
    run, good = jit(lambda state, places: (state + 1, write(state, places))), torch.tensor([0, 1, 1, 0])
    state, found = run(torch.zeros(4), good)
    assert_same(found, write(torch.zeros(4), good))
    with pytest.raises(RuntimeError, match=text):
        run(state, torch.tensor(bad))
    assert_same(run(state, good), (torch.full((4,), 2.0), write(torch.ones(4), good)))


def test_a_cuda_graph_has_fixed_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn().take_place(monkeypatch)
    step = make_train_step(module_loss(model(), labeled), ADAMW)
    text = r"jit: step must not take a shape from values in a CUDA graph; .*test_open_shapes.py:.*pass capture=False"
    with pytest.raises(RuntimeError, match=text):
        jit(step, backend="eager")(step.init(), batches()[0])
    jit(step, backend="eager", capture=False)(step.init(), batches()[0])
