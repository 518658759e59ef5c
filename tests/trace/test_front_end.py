"""`jit` runs a step's Python once, as JAX does: what is in it acts as in eager code, or is refused by name."""

from __future__ import annotations

import itertools
import logging
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import jit
from tests.support.helpers import assert_same, clone
from tests.support.steps import assert_as_eager
from tests.support.torch_loop import assert_as_torchs_loop


def compiled(step: Any) -> Any:
    return jit(step, backend="eager")


class Scaled(torch.autograd.Function):
    """Takes ctx, and has a gradient that its forward has not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 3 + 0 * x


def halved(module: Any, grads: Any, _: Any) -> Any:
    return (grads[0] * 0.5,)


class AsItComes(nn.Module):
    """A mixture of experts with a Function, hooks, the older spectral_norm, which writes buffers, and a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 2) for _ in range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.first = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.first.register_full_backward_hook(halved)
        self.gate.register_forward_hook(lambda module, args, out: out * 2)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        logging.getLogger("a.model").info("a batch of %s", tuple(x.shape))
        self.frozen.to(x.device)  # assigns to `.data` what is there
        x = self.first(x.sin() + self.frozen(x)).tanh()
        weights = self.gate(x).softmax(-1)
        mixed = torch.stack([expert(x) for expert in self.experts], -1) * weights.unsqueeze(-2)
        out: Tensor = Scaled.apply(mixed.sum(-1).mean(1))
        return out.float()


@pytest.mark.compiled
def test_a_model_as_it_comes_is_torchs_loop() -> None:
    batches = [(torch.randn(4, 3, 8, requires_grad=True), torch.randn(4, 2)) for _ in range(8)]
    scales = assert_as_torchs_loop(
        lambda: (AsItComes(), F.mse_loss),
        batches,
        compiled,
        policy="float16",
        config={"init_scale": 2.0**24, "growth_interval": 4},
        keep_buffers=True,
    )
    assert scales[0] < 2.0**24


def add(state: Any, batch: Tensor) -> Any:
    return {"x": state["x"] + batch.sum()}, None


def start() -> dict[str, Tensor]:
    return {"x": torch.zeros(())}


def test_what_python_does_it_does_when_traced(capsys: pytest.CaptureFixture[str]) -> None:
    def step(state: Any, batch: Tensor) -> Any:
        print("a batch of", tuple(batch.shape), torch.compiler.is_compiling())  # noqa: T201  what a user would do
        warnings.warn("slow", UserWarning, stacklevel=1)
        return add(state, batch)

    run, state = compiled(step), start()
    with pytest.warns(UserWarning, match="slow"):
        state, _ = run(state, torch.ones(2))
    state, _ = run(state, torch.ones(2))
    assert state["x"].item() == 4
    assert capsys.readouterr().out == "a batch of (2,) True\n"
    assert not torch.compiler.is_compiling()


@pytest.mark.compiled
def test_a_model_that_fails_when_it_is_compiled_is_traced_as_in_eager_mode(caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    def step(state: Any, batch: Tensor, mask: Tensor | None = None) -> Any:
        seen.append(torch.compiler.is_compiling())
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones_like(batch)
        return add(state, batch * mask[:])  # type: ignore[index]

    run, state = compiled(step), start()
    for _ in range(2):
        state, _ = run(state, torch.ones(2))
    assert state["x"].item() == 4
    assert seen == [True, False] * 2  # once more, because it changed a list
    assert "traced as in eager mode" in caplog.text


class Keeps(nn.Module):
    """Keeps a mask that it makes once."""

    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(3, 3).tril_()
        return (self.mask @ x).sum()


def test_a_trace_that_fails_leaves_no_tensor_without_values() -> None:
    model, x = Keeps(), torch.ones(3)

    def step(state: Any, batch: Tensor) -> Any:
        return {"x": state["x"] + model(batch)}, batch.sum().item()

    with pytest.raises(RuntimeError, match="not read a tensor's value"):
        compiled(step)(start(), x)
    assert model.mask is None  # as before the call
    assert_same(model(x), torch.tensor(6.0))


def test_a_backward_pass_of_ones_own() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        w = state["w"].detach().requires_grad_()
        (w * batch).square().sum().backward()
        return {"w": state["w"] - 0.1 * w.grad}, None

    run, state = compiled(step), {"w": torch.ones(3)}
    assert_as_eager(lambda state, x: clone(step(state, x)), run, state, [torch.arange(3.0)] * 3)


@pytest.mark.parametrize("asks", [True, False])
def test_an_error_is_that_of_the_first_attempt(asks: bool) -> None:
    """A step that does not ask whether it is compiled has no second one."""
    attempts = itertools.count(1)

    def fails() -> Any:
        raise KeyError(f"attempt {next(attempts)}") from ValueError("its cause")

    step = (lambda *_: (torch.compiler.is_compiling(), fails())) if asks else (lambda *_: fails())
    with pytest.raises(KeyError, match="attempt 1") as caught:
        compiled(step)(start(), torch.ones(2))
    assert isinstance(caught.value.__cause__, ValueError)
    assert next(attempts) == 2 + asks
