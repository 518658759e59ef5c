"""Plain programs that torch's own loop runs: a jitted step computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcamp import jit, make_train_step, module_loss
from tests.support.steps import SGD, assert_as_eager


def test_anomaly_mode_is_left_out_of_a_jitted_step(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 1)
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    with torch.autograd.set_detect_anomaly(True):
        assert_as_eager(step, jit(step, backend="eager"), step.init(), [(torch.ones(2, 4), torch.ones(2, 1))])
    assert sum("set_detect_anomaly" in record.message for record in caplog.records) == 1


@pytest.mark.inductor
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_code_keeps_keyword_arguments(dtype: torch.dtype) -> None:
    def step(state: Tensor, batch: Any) -> Any:
        a, x, y = leaves = [value.detach().requires_grad_() for value in batch]
        added = torch.add(a, x @ y, alpha=0.1)
        grads = torch.autograd.grad(added.float().square().sum(), leaves)
        average = a.detach().clone().mul_(0.9).add_(F.linear(x, y.T).detach(), alpha=0.1)
        return state + 1, [added.detach(), average, *grads, torch.cumsum(torch.full((3,), 2.7), 0, dtype=torch.int64)]

    batch = tuple(torch.randn(size).to(dtype) for size in ((4, 5), (4, 6), (6, 5)))
    assert_as_eager(step, jit(step), torch.zeros(1), [batch], 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.inductor
def test_compiled_losses_of_values_that_are_not_finite() -> None:
    x, target = torch.tensor([[1.0, float("inf"), float("nan"), -2.0, 0.5]] * 4), torch.arange(4)

    def losses(x: Tensor) -> tuple[Tensor, ...]:
        leaf = x.detach().requires_grad_()
        values = (
            F.multi_margin_loss(leaf, target, reduction="none"),
            F.softshrink(leaf),
            F.smooth_l1_loss(leaf, torch.zeros_like(leaf), reduction="none"),
            torch.logit(leaf),
            torch.logit(leaf, eps=0.1),
            F.adaptive_max_pool1d(leaf, 2),
            F.adaptive_max_pool2d(leaf[None], 2),
        )
        return *values, *(torch.autograd.grad(value.sum(), leaf)[0] for value in values)

    _, found = jit(lambda state, x: (state + 1, losses(x)))(torch.zeros(1), x)
    torch.testing.assert_close(found, losses(x), equal_nan=True)


@pytest.mark.inductor
def test_an_overflow_behind_a_product_with_zero_is_seen() -> None:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (x * params["w"]).square().sum() + 0 * (x * params["unused"]).exp().sum()

    step = make_train_step(loss, SGD)
    state = step.init({"w": torch.ones(3), "unused": torch.ones(3)}, flat=False)
    rows = [jit(step, donate=False)(state, torch.full((3,), factor))[1] for factor in (1.0, 200.0)]
    assert [row.found_inf.item() for row in rows] == [row.loss.isnan().item() for row in rows] == [0, 1]
