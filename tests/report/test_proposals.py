"""The first operation of an overflow, the range of its inputs, and the smallest change that makes it finite."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
from funcamp.report.proposals import propose_for_epsilon
from funcamp.report.reruns import Call, Change
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import funcamp
from funcamp.report.audit import Auditor, Finding
from funcamp.report.render import rows, text

X = torch.tensor([[1.0, -2.0, 3.0, -4.0]], dtype=torch.float16)


def findings(compute: Callable[[Tensor], Tensor]) -> list[Finding]:
    """The findings in a forward and a backward pass of a function of float16 numbers."""
    auditor = Auditor()
    with auditor.watching(), contextlib.suppress(RuntimeError):
        compute(X.clone().requires_grad_()).float().sum().backward()
    return auditor.findings()


def proposed(compute: Callable[[Tensor], Tensor]) -> tuple[str, str, str]:
    """The detail, the change and the proof of the only overflow or constant."""
    (finding,) = findings(compute)
    assert finding.line.number == compute.__code__.co_firstlineno
    assert finding.proposal is not None
    return finding.detail, finding.change, finding.proposal.proof


BEYOND = "; float16 ends at 65504, so its result stays in float32"


@pytest.mark.parametrize(
    ("compute", "detail", "change", "proof"),
    [
        (
            lambda x: x @ (x.detach().T * 1e4),
            "mm of numbers from -4e+04 to 3e+04; float16 ends at 65504",
            "with torch.autocast(device, enabled=False):  # around the line, with x.float() of each input",
            f"mm, run again on the same inputs with this change, is finite: from 3e+05 to 3e+05{BEYOND}",
        ),
        (
            lambda x: (x * 4).exp(),
            "exp of numbers from -16 to 12; float16 ends at 65504",
            "x.float()  # of each input, before exp",
            "exp, run again on the same inputs with this change, is finite: from 1.125e-07 to 1.628e+05" + BEYOND,
        ),
        (
            lambda x: (x * 100).pow(2),
            "pow of numbers from -400 to 300; float16 ends at 65504",
            "x.float()  # of each input, before pow",
            "pow, run again on the same inputs with this change, is finite: from 1e+04 to 1.6e+05" + BEYOND,
        ),
        (
            lambda x: (x.abs() * 1e4).sum(),
            "sum of numbers from 1e+04 to 4e+04; float16 ends at 65504",
            "sum(..., dtype=torch.float32)",
            "sum, run again on the same inputs with this change, is finite: from 1e+05 to 1e+05" + BEYOND,
        ),
        (
            lambda x: mse_loss(x * 200, x.detach() * 0),
            "mse_loss of numbers from -800 to 600; float16 ends at 65504",
            "x.float()  # of each input, before mse_loss",
            "mse_loss, run again on the same inputs with this change, is finite: from 3e+05 to 3e+05" + BEYOND,
        ),
        (
            lambda x: x.detach().clone().mul_(3e4) + x,
            "mul_ of numbers from -4 to 3; float16 ends at 65504",
            "x = x.float()  # of each input; mul in place of mul_, which writes float16",
            "mul_, run again on the same inputs with this change, is finite: from -1.2e+05 to 9e+04" + BEYOND,
        ),
        (
            lambda x: (x.float() * 1e5).half(),
            "cast to float16 of numbers from -4e+05 to 3e+05; float16 ends at 65504",
            "leave it in float32  # no cast; under autocast: autocast(enabled=False) around the line",
            "cast to float16, run again on the same inputs with this change, is finite: from -4e+05 to 3e+05" + BEYOND,
        ),
        (
            lambda x: x.masked_fill(x > 2, -1e9),
            "masked_fill with -1e+09",
            "torch.finfo(torch.float16).min  # in place of -1e+09",
            "masked_fill, run again on the same inputs with this change, is finite: from -6.55e+04 to 1",
        ),
        (
            lambda x: x + (x > 0).half() * -1e9,
            "mul with -1e+09",
            "torch.finfo(torch.float16).min  # in place of -1e+09",
            "mul, run again on the same inputs with this change, is finite: from -6.55e+04 to -0",
        ),
        (
            lambda x: x * 1e6,
            "mul with 1e+06",
            "x.float()  # of each input, before mul",
            "mul, run again on the same inputs with this change, is finite: from -4e+06 to 3e+06" + BEYOND,
        ),
    ],
)
def test_the_smallest_change_that_makes_the_operation_finite_is_proposed(
    compute: Callable[[Tensor], Tensor], detail: str, change: str, proof: str
) -> None:
    assert proposed(compute) == (detail, change, proof)


def zeros_over(x: Tensor, epsilon: float) -> Tensor:
    largest = (0 * x).abs().amax(1, keepdim=True)
    return x / (largest + epsilon).sqrt()


def test_for_a_division_by_a_lost_epsilon_the_smallest_epsilon_that_helps_is_proposed() -> None:
    lost, division = findings(lambda x: zeros_over(x, 1e-9))
    assert lost.rule.name == "epsilon-below-float16"
    assert division.rule.name == "float16-overflow"
    assert division.detail == f"div of numbers from -4 to 3; the epsilon of 1e-09 at {lost.line} is zero in float16"
    assert division.change == "an epsilon of 0.001 in place of 1e-09"
    assert division.proposal is not None
    assert "is finite: from -126.5 to 94.88; its gradients for a gradient of 1 too" in division.proposal.proof
    assert lost.proposal == division.proposal


def test_without_a_gradient_an_epsilon_only_has_to_keep_the_result_finite() -> None:
    def compute(x: Tensor) -> Tensor:
        with torch.no_grad():
            zeros_over(x, 1e-9)
        return x

    _, division = findings(compute)
    assert division.change == "an epsilon of 1e-07 in place of 1e-09"


def test_if_a_gradient_is_beyond_float16_all_that_leads_to_the_division_is_to_be_float32() -> None:
    _, division = findings(lambda x: 1e3 * x / (0 * x + 1e-8))
    assert division.change == "x.float() + 1e-08  # and in float32 what computes x, and the division"
    assert division.proposal is not None
    assert "its gradient for a gradient of 1 is beyond float16" in division.proposal.proof


def test_an_epsilon_too_small_to_divide_by_is_not_proposed() -> None:
    _, division = findings(lambda x: x * (0 * x.detach() + 1e-8).reciprocal())
    assert division.change == "an epsilon of 0.0001 in place of 1e-08"


def test_if_no_epsilon_helps_the_division_in_float32_is_proposed() -> None:
    _, division = findings(lambda x: x + 1e3 * x.detach() / (0 * x.detach() + 1e-8))
    assert division.change == "x.float() + 1e-08  # and the division in float32"


def is_in_float32(change: Change) -> bool:
    return change(torch.float16) is torch.float32


@pytest.mark.parametrize("runs_in_float32", [True, False])
def test_an_epsilon_with_which_the_operation_does_not_run_is_not_proposed(runs_in_float32: bool) -> None:
    def run(epsilon: float, change: Change) -> object:
        return torch.ones(1) if runs_in_float32 and is_in_float32(change) else None

    division = Call(torch.ops.aten.div.Tensor, (X, 0 * X.abs()), {})
    proposal = propose_for_epsilon(division, run, 1e-8)
    assert proposal.change == ("x.float() + 1e-08  # and the division in float32" if runs_in_float32 else "")
    assert proposal.proof.startswith("div, run again" if runs_in_float32 else "no change of policy holds: div is inf")


def test_an_epsilon_of_torchs_own_is_named_only_if_something_is_divided_by_zero() -> None:
    assert findings(lambda x: nn.functional.normalize(x, dim=1)) == []
    (division,) = findings(lambda x: nn.functional.normalize(0 * x, dim=1))
    assert division.rule.name == "float16-overflow"
    assert "the epsilon of 1e-12" in division.detail
    own, _ = findings(lambda x: (0 * x) / (0 * x).abs().clamp(min=1e-12))
    assert own.rule.name == "epsilon-below-float16"


def test_a_division_by_zero_without_an_epsilon_is_no_overflow_of_float16() -> None:
    (finding,) = findings(lambda x: x.relu() / (0 * x))
    assert finding.rule.name == "not-finite-from-start"


def test_if_no_change_helps_the_finding_has_the_reason() -> None:
    (finding,) = findings(lambda x: (x + 300).exp())
    assert finding.change == ""
    assert finding.proposal is not None
    reason = "no change of policy holds: exp is inf or NaN in float32 too; make its inputs smaller"
    assert finding.proposal.proof == reason
    auditor = Auditor()
    with auditor.watching():
        (X.clone().requires_grad_() + 300).exp().sum().backward()
    assert f"tried: {reason}" in text(auditor)
    assert "change:" not in text(auditor)
    assert [(row["change"], row["tried"]) for row in rows(auditor)] == [("", reason)]


@pytest.mark.parametrize(("value", "kind"), [(math.inf, "inf"), (math.nan, "NaN")])
def test_an_input_that_is_not_finite_is_named(value: float, kind: str) -> None:
    (finding,) = findings(lambda x: x * (x.detach() / x.detach() * value))
    assert finding.rule.name == "not-finite-from-start"
    place = f"{kind} is in an input of mul at {__file__}:"
    assert finding.detail.startswith(f"the first loss is not finite; {place}")
    assert finding.detail.endswith(" already; no change of policy helps")


class Scaled(nn.Module):
    """Multiplies by a matrix that fits float16, and its product does not."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.ParameterDict({"large": torch.full((2, 4), 6e4)})

    def forward(self, x: Tensor) -> Tensor:
        row: Tensor = self.gain["large"][0]
        return (x.half() * 2) * row


@pytest.mark.filterwarnings("ignore:module_loss. model reads:UserWarning")
def test_a_weight_of_a_step_is_named_for_keep() -> None:
    def loss(outputs: Tensor, _: Tensor) -> Tensor:
        return outputs.float().mean()

    def take_step(policy: str) -> list[Finding]:
        auditor = Auditor()
        with auditor.watching():
            sgd = funcamp.stateless(torch.optim.SGD, lr=0.1)
            step = funcamp.make_train_step(funcamp.module_loss(Scaled(), loss), sgd, policy=policy)
            step(step.init(), (X, X))
        return auditor.findings()

    (finding,) = take_step("float16,copy=gain.*")
    assert finding.change == 'Policy(torch.float16, keep=("gain.large",))  # the weight in float32'
    assert take_step("float16,keep=gain.*") == []


def test_an_operation_that_runs_again_draws_no_random_numbers_of_the_loop() -> None:
    def dropped(x: Tensor) -> Tensor:
        return torch.native_dropout(0 * x + 6e4, 0.3, True)[0]

    def draw(*, audited: bool) -> Tensor:
        torch.manual_seed(0)
        with Auditor().watching() if audited else contextlib.nullcontext():
            dropped(X)
        return torch.rand(3)

    torch.manual_seed(0)
    (finding,) = findings(dropped)
    assert finding.proposal is not None
    assert "is finite" in finding.proposal.proof
    assert torch.equal(draw(audited=True), draw(audited=False))


def test_an_operation_that_is_not_torchs_own_does_not_run_again() -> None:
    calls = []

    @torch.library.custom_op("tests_of_the_auditor::enlarge", mutates_args=())
    def enlarge(x: Tensor) -> Tensor:
        calls.append(x)
        return x * 1e5

    with Auditor().watching():
        enlarge(X)
    assert len(calls) == 1


def test_a_cast_mask_is_no_overflow_and_a_cast_activation_is() -> None:
    mask = torch.tensor([0.0, -1e9, -1e9, 0.0])
    assert findings(lambda x: x + mask.half().clamp(min=-1e4)) == []
    (finding,) = findings(lambda x: x + torch.tensor([1.0, -1e5, -2e5, 3.0]).half())
    assert finding.detail.startswith("cast to float16 of numbers from -2e+05 to 3;")


def test_what_an_addition_wrote_over_is_remembered_until_the_division() -> None:
    def compute(x: Tensor) -> Tensor:
        sizes = 0 * x.detach()
        sizes.add_(1e-8)
        quotient = x / sizes
        sizes.fill_(1.0)
        return quotient

    _, division = findings(compute)
    assert division.change == "an epsilon of 0.0001 in place of 1e-08"
