"""Plain programs that torch's own loop runs: a jitted step computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import funcamp
from funcamp import jit, make_train_step, module_loss, stateless
from tests.support.steps import assert_as_eager

SGD = stateless(torch.optim.SGD, lr=0.1)


class Branches(nn.Module):
    """A branch that reads a parameter besides its operand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        chosen = torch.cond(x.sum() > 0, lambda a: (a * self.gain).sin(), lambda a: a - 1, (hidden,))
        loss: Tensor = chosen.square().mean()
        return loss


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_branches_that_follow_from_values_are_the_eager_ones(backend: str) -> None:
    x, step = torch.randn(3, 4).abs(), make_train_step(module_loss(Branches()), SGD)
    run = jit(step, backend=backend, compile_after=0)
    assert_as_eager(step, run, step.init(), [(x,), (-x,), (x * 2,)], 1e-6)


class Passing(TorchDispatchMode):
    """A mode for which Dynamo steps aside."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


REGIONS: dict[str, Callable[[], Any]] = {
    "stance": lambda: torch.compiler.set_stance("force_eager"),
    "mode": Passing,
}
X = torch.randn(3, 4)
SAMPLES = [((X, X.sum(1, keepdim=True)), torch.tensor(flag)) for flag in (True, False, True)]


def step_in_branch() -> tuple[funcamp.TrainStep, Callable[[Any, Any], Any]]:
    """Return a step, and a function that calls it in a branch of torch.cond."""
    config, adam = funcamp.ScalerConfig(init_scale=8.0), stateless(torch.optim.Adam, lr=0.1)
    step = make_train_step(module_loss(nn.Linear(4, 1), F.mse_loss), adam, config, policy="float16")

    def maybe(state: Any, batch: Any) -> Any:
        data, flag = batch
        leaves, spec = _pytree.tree_flatten(state)
        after = torch.cond(
            flag,
            lambda: [leaf.clone() for leaf in _pytree.tree_leaves(step(state, data)[0])],
            lambda: [leaf.clone() for leaf in leaves],
            (),
        )
        return _pytree.tree_unflatten(after, spec), None

    return step, maybe


def test_a_step_in_a_branch() -> None:
    step, maybe = step_in_branch()
    assert_as_eager(
        lambda state, batch: (step(state, batch[0])[0] if batch[1] else state, None),
        jit(maybe, backend="eager"),
        step.init(),
        SAMPLES,
    )


@pytest.mark.parametrize("region", REGIONS)
def test_branches_that_torch_compile_does_not_trace_are_refused(region: str) -> None:
    step, maybe = step_in_branch()

    def add(state: Tensor, batch: Any) -> Any:  # would keep the first call's batch and flag
        return torch.cond(batch[1], lambda: state + 1, lambda: state - batch[0][0].sum(), ()), None

    refused = r"jit: step must not call torch.cond .*test_plain_programs.py.* does: .*torch.where.*bool in the batch"
    for run, state in ((jit(maybe, backend="eager"), step.init()), (jit(add, backend="eager"), torch.ones(()))):
        with REGIONS[region](), pytest.raises(RuntimeError, match=refused):
            run(state, SAMPLES[0])


def test_anomaly_mode_is_left_out_of_a_jitted_step(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 1)
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    with torch.autograd.set_detect_anomaly(True):
        assert_as_eager(step, jit(step, backend="eager"), step.init(), [(torch.ones(2, 4), torch.ones(2, 1))])
    assert sum("set_detect_anomaly" in record.message for record in caplog.records) == 1


ROWS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a sum with alpha": lambda a, x, y: torch.add(a, x @ y, alpha=0.1),
    "a running average": lambda a, x, y: a.clone().mul_(0.9).add_(x @ y, alpha=0.1),
    "a linear layer": lambda a, x, y: torch.add(a, F.linear(x, y.T), alpha=0.1),
    "a difference": lambda a, x, y: torch.sub(a, x @ y, alpha=0.1),
    "a sum of ones of another dtype": lambda a, x, y: torch.cumsum(torch.full((3, 4), 2.7), 0, dtype=torch.int64),
}


@pytest.mark.inductor
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_code_keeps_keyword_arguments(dtype: torch.dtype) -> None:
    a, x, y = (torch.randn(size).to(dtype) for size in ((4, 5), (4, 6), (6, 5)))

    def all_rows(a: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = {name: row(a, x, y) for name, row in ROWS.items()}
        leaves = [value.detach().requires_grad_() for value in (a, x, y)]
        grads = torch.autograd.grad(ROWS["a sum with alpha"](*leaves).float().square().sum(), leaves)
        return found | {f"gradient {index}": grad for index, grad in enumerate(grads)}

    def step(state: Tensor, batch: Any) -> Any:
        return state + 1, all_rows(*batch)

    assert_as_eager(step, jit(step), torch.zeros(1), [(a, x, y)], 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.inductor
def test_compiled_losses_of_values_that_are_not_finite() -> None:
    x, target = torch.tensor([[1.0, float("inf"), float("nan"), -2.0]] * 4), torch.arange(4)

    def losses(x: Tensor) -> tuple[Tensor, ...]:
        leaf = x.detach().requires_grad_()
        values = F.multi_margin_loss(leaf, target, reduction="none"), F.softshrink(leaf)
        return *values, *(torch.autograd.grad(value.sum(), leaf)[0] for value in values)

    _, found = jit(lambda state, x: (state + 1, losses(x)))(torch.zeros(1), x)
    torch.testing.assert_close(found, losses(x), equal_nan=True)


@pytest.mark.inductor
def test_an_overflow_behind_a_product_with_zero_is_seen() -> None:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        unused = (x * params["unused"]).exp().sum()
        return (x * params["w"]).square().sum() + 0 * unused

    step = make_train_step(funcamp.loss(loss), SGD)
    state = step.init({"w": torch.ones(3), "unused": torch.ones(3)}, flat=False)
    for factor, skipped in ((1.0, 0.0), (200.0, 1.0)):
        x = torch.ones(3) * factor
        for metrics in (step(state, x)[1], jit(step, donate=False)(state, x)[1]):
            assert metrics.found_inf.item() == skipped
            assert metrics.loss.isnan().item() == bool(skipped)
