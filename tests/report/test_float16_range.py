"""Float16 operations that get or make a number outside of float16's range."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from funcamp.report.audit import Auditor, Finding

X = torch.tensor([[1.0, -2.0, 3.0, -4.0]], dtype=torch.float16)
MASK = torch.tensor([0.0, -1e9, -1e9, 0.0])


def findings(compute: Callable[[Tensor], Tensor]) -> list[Finding]:
    """The findings in a forward and a backward pass of a function of float16 numbers."""
    auditor = Auditor()
    with auditor.watching(), contextlib.suppress(RuntimeError):
        compute(X.clone().requires_grad_()).float().sum().backward()
    return auditor.findings()


@pytest.mark.parametrize(
    ("compute", "detail"),
    [
        (lambda x: x @ (x.detach().T * 1e4), "mm of numbers from -4e+04 to 3e+04; float16 ends at 65504"),
        (lambda x: mse_loss(x * 200, x.detach() * 0), "mse_loss of numbers from -800 to 600; float16 ends at 65504"),
        (lambda x: (x.float() * 1e5).half(), "cast to float16 of numbers from -4e+05 to 3e+05; float16 ends at 65504"),
        (lambda x: x.detach().clone().mul_(x.detach() * 2e4) + x, "mul of numbers from -4 to 3; float16 ends at 65504"),
        (lambda x: x.masked_fill(x > 2, -1e9), "masked_fill with -1e+09"),
        (lambda x: x + (x > 0).half() * -1e9, "mul with -1e+09"),
        (lambda x: x + 0 * x.clamp(min=1e-8), "clamp with 1e-08"),
        (lambda x: x * (x.detach() / (0 * x.detach())), "div of numbers from -4 to 3"),
        (lambda x: x * torch.inf, "the first loss is not finite"),
    ],
)
def test_the_operation_and_its_numbers_are_named(compute: Callable[[Tensor], Tensor], detail: str) -> None:
    (finding,) = findings(compute)
    assert finding.detail.startswith(detail)
    if "first loss" not in detail:
        assert finding.line.number == compute.__code__.co_firstlineno


def mask_in_an_earlier_pass(x: Tensor) -> Tensor:
    (x + MASK.half()).softmax(-1).sum().backward()
    return x * torch.inf


@pytest.mark.parametrize(
    "compute",
    [
        mask_in_an_earlier_pass,
        lambda x: nn.functional.normalize(x, dim=1),  # its epsilon of 1e-12 is torch's own
        lambda x: x + MASK.half().clamp(min=-1e4),  # a mask that is cast
        lambda x: (x.float() + 1e-4 * MASK).half().softmax(-1),  # scores with a mask, which are cast
        lambda x: x.masked_fill(x > 2, -torch.inf).softmax(-1),
        lambda x: x.detach().clone().mul_(2) + x,
    ],
)
def test_what_is_meant_is_no_finding(compute: Callable[[Tensor], Tensor]) -> None:
    assert findings(compute) == []
