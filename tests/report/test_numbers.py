"""`numerics_report`: every operation, where non-finite values come from, and its rows and tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from funcamp.numerics import Record, stats
from funcamp.report import annotate, numerics_report
from tests.support.helpers import assert_same
from tests.support.models import Block, mlp
from tests.support.steps import build


def forward(report: Any) -> list[str]:
    return [one.name for one in report.operations if not one.backward]


def test_every_operation_of_both_passes_is_seen() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    report = numerics_report(lambda: F.mse_loss(model(x), y))
    assert [(one.name, one.path) for one in report.operations if not one.backward] == [
        ("addmm", "0"),
        ("tanh", "1"),
        ("addmm", "2"),
        ("mse_loss", ""),
    ]
    assert [(one.name, one.path, one.shape) for one in report.operations if one.backward] == [
        ("mse_loss_backward", "", (3, 2)),
        ("mm", "2", (3, 8)),
        ("mm", "2", (2, 8)),
        ("sum", "2", (1, 2)),
        ("tanh_backward", "1", (3, 8)),
        ("mm", "0", (8, 4)),
        ("sum", "0", (1, 8)),
    ]
    assert_same(report.operations[0].stats.row, stats(model[0](x)).row)
    assert all(value.grad is None for value in model.parameters())
    assert not any(part._forward_hooks for part in model.modules())
    assert repr(report) == "NumericsReport(4 forward, 7 backward operations)"


def test_the_same_operations_under_torch_func_and_vmap() -> None:
    model, x = mlp().model, torch.randn(3, 8)
    params = {name: value.detach() for name, value in model.named_parameters()}

    def gradient(params: Any, x: Tensor) -> Any:
        return grad(lambda p: functional_call(model, p, (x,)).square().mean())(params)

    plain, func = numerics_report(lambda: model(x).square().mean()), numerics_report(gradient, params, x)
    assert forward(func) == forward(plain)
    assert sorted(one.name for one in func.operations) == sorted(one.name for one in plain.operations)
    assert {one.path for one in func.operations} == {one.path for one in plain.operations}
    samples = numerics_report(vmap(gradient, (None, 0)), params, x[:, None])
    assert samples.records[""].forward.count == 12


def test_the_optimizer_of_a_step_is_left_out_wherever_it_is_called() -> None:
    task = mlp()
    step = build(task)

    def fn(state: Any) -> Any:
        for number in range(2):
            state, metrics = step(state, task.batch(number))
        return metrics.loss * 3

    report, direct = numerics_report(fn, step.init()), numerics_report(step, step.init(), task.batch(0))
    names = [(one.name, one.path) for one in direct.operations]
    assert [(one.name, one.path) for one in report.operations] == [*names, *names, ("mul", "")]
    assert (report.loss_scale, len(report.passes)) == (2.0**16, 2)


class Masked(nn.Module):
    """A block, and a softmax of scores of which the first are masked."""

    def __init__(self, masked: int) -> None:
        super().__init__()
        self.block, self.mask = Block(8), torch.arange(8) < masked

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.block(x).masked_fill(self.mask, -torch.inf), -1)


def report_of(model: nn.Module) -> Any:
    return numerics_report(lambda: model(torch.randn(2, 3, 8)).sum(), module=model)


def test_a_mask_is_no_overflow_unless_it_leaves_no_score() -> None:
    assert report_of(Masked(4)).first_nonfinite() is None
    report = report_of(Masked(8))
    origin = report.first_nonfinite()
    assert (origin.kind, origin.operation.name, origin.operation.path) == ("NaN", "_softmax", "")
    assert "Non-finite values: NaN first in _softmax" in report.summary()[1]
    assert str(origin).endswith(", from an input with inf")


class LowMask(nn.Module):
    """A softmax of scores with a mask that is -inf in float16."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x + torch.tensor([0.0, -1e9, 0.0, -1e9]).half(), -1)


@pytest.mark.parametrize(("bias", "path"), [(0.0, None), (7e4, "2")])
def test_an_operation_is_not_at_fault_if_its_layer_returns_finite_values(bias: float, path: str | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), LowMask(), nn.Linear(4, 4))
    torch.nn.init.constant_(model[2].bias, bias)  # type: ignore[arg-type]

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            out: Tensor = model(torch.randn(3, 4)).float().square().mean()
        return out

    report = numerics_report(loss, module=model)
    for origin in (report.first_nonfinite(), report.cause()):
        assert (origin and origin.operation.path) == path


def test_a_loss_may_be_infinite_by_what_a_layer_leaves_behind() -> None:
    class Leaves(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.penalty = torch.exp(x.abs() + 100).sum()
            out: Tensor = super().forward(x)
            return out

    model = nn.Sequential(Leaves(4, 4))
    report = numerics_report(lambda: model(torch.randn(3, 4)).sum() + model[0].penalty, module=model)
    cause = report.cause()
    assert cause is not None
    assert cause.operation.name == "exp"


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_batch_that_is_not_finite_is_named(value: float) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    x[0] = value
    said = str(numerics_report(lambda: layer(x).sum()).first_nonfinite())
    assert ("from an input with inf" if value == torch.inf else "came in with a parameter or the batch") in said


def test_a_bad_weight_is_named_where_it_is_used() -> None:
    model = Masked(4)
    with torch.no_grad():
        model.block.up.weight.mul_(1e38).mul_(10.0)
    assert report_of(model).first_nonfinite().operation.path == "block.up"


def test_other_roots_have_names_of_their_own() -> None:
    model, criterion = nn.Sequential(nn.Linear(4, 4)), nn.MSELoss()
    report = numerics_report(lambda: criterion(model(torch.randn(2, 4)), torch.randn(2, 4)), module=model)
    counts = {path: record.forward.count.item() for path, record in report.records.items()}
    assert counts == {"0": 8, "": 8, "<MSELoss>": 1}
    assert report.annotate().splitlines()[-1].startswith("<MSELoss>")


def test_checkpointed_layers_are_seen_once() -> None:
    layer = nn.Linear(4, 4)
    report = numerics_report(lambda: checkpoint(layer, torch.randn(2, 4), use_reentrant=False).sum())
    assert forward(report) == ["addmm", "sum"]
    assert report.records[""].forward.count == report.records[""].backward.count == 8


def test_rows_and_tree() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    small = torch.randn(3, 8).exp() * 1e-7
    report = numerics_report(lambda: (model(torch.randn(3, 4)) * 0 + small).sum() * 1e-9, module=model)
    rows = report.to_rows()
    assert [row["index"] for row in rows] == list(range(len(rows)))
    assert rows[0] == rows[0] | {"direction": "forward", "module": "0", "operation": "addmm", "dtype": "float32"}
    (sums,) = [row for row in rows if row["operation"] == "add"]
    assert sums["underflow"] == pytest.approx((small.half() == 0).double().mean().item())
    tree = report.annotate().splitlines()
    assert tree[0].startswith("Sequential ")
    assert tree[1].startswith("  (0): Linear(in_features=4, out_features=8, bias=True)  (-> 0.")
    records = {"layer": Record(stats(torch.ones(2)), stats(torch.tensor([torch.nan, -torch.inf, 1.0, 2.0])))}
    assert annotate(None, records) == "layer  (-> 0, <- 0.707 (1 NaN, 1 inf of 4))"


ANY: Any = 3
REPORT = numerics_report(lambda: torch.ones(2) * 2)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: numerics_report(ANY), TypeError, "numerics_report: fn must be callable; got 3"),
        (lambda: numerics_report(abs, module=ANY), TypeError, "numerics_report: module must be a torch"),
        (lambda: numerics_report(abs, loss_scale=-1), ValueError, "loss_scale must be a positive number; got -1"),
        (lambda: numerics_report(lambda: None), RuntimeError, "must run operations on floating-point tensors"),
        (REPORT.recommend_scale, ValueError, "must have finite, nonzero gradients"),
        (lambda: REPORT.recommend_scale(headroom=0), ValueError, "headroom must be a positive number; got 0"),
        (lambda: REPORT.to_rows(torch.int8), TypeError, "dtype must be one of"),
        (lambda: numerics_report(lambda: 1 / 0), ZeroDivisionError, "division by zero"),
    ],
)
def test_a_call_that_is_refused(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
    assert torch.nn.modules.module._global_forward_hooks == {}
