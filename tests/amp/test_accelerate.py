"""Hugging Face Accelerate with `GradScaler`: what its loop does with torch's scaler, bit for bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped]
import pytest
import torch
from accelerate.utils import GradScalerKwargs  # type: ignore[import-untyped]
from torch.utils.data import DataLoader, TensorDataset

import funcamp
from tests.support.accelerated import forget
from tests.support.helpers import assert_same, clone
from tests.support.host_reads import host_reads
from tests.support.programs import import_example

example = import_example("accelerate_loop")

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

STEPS, SIZE = 24, 4
HUGE = 11  # this batch overflows float16 in the forward pass, whatever the scale
NUMBERS: dict[str, Any] = {"init_scale": 2.0**19, "growth_interval": 5}

Scaler = torch.amp.GradScaler
Maker = Callable[..., Scaler]
FUNCAMP: dict[str, Maker] = {
    skip or "default": functools.partial(funcamp.GradScaler, skip=skip) for skip in (None, "host", "select")
}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}


class Run:
    """A model, its optimizer, data and schedule, prepared by Accelerate as on a GPU; `rows` of every step."""

    def __init__(
        self, scaler: Scaler, optimizer: str = "sgd", accumulate: int = 1, cls: Any = accelerate.Accelerator
    ) -> None:
        torch.manual_seed(0)
        forget()
        self.accelerator = cls(mixed_precision="fp16", cpu=True, gradient_accumulation_steps=accumulate)
        self.accelerator.native_amp = True  # see test_on_a_cpu_accelerate_trains_in_float32
        self.accelerator.scaler = scaler
        x = torch.randn(STEPS * SIZE, 4)
        y = x.sum(1, keepdim=True)
        x[HUGE * SIZE] = 1e30
        model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
        inner = OPTIMIZERS[optimizer](model.parameters())
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model,
            inner,
            DataLoader(TensorDataset(x, y), batch_size=SIZE),
            torch.optim.lr_scheduler.ExponentialLR(inner, 0.9),
        )
        self.rows: list[dict[str, Any]] = []

    def train(self, first: int = 0, last: int = STEPS, max_norm: float | None = None) -> Run:
        for x, y in itertools.islice(self.loader, first, last):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(torch.nn.functional.mse_loss(self.model(x), y))
                if max_norm is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.rows.append(
                {
                    "skipped": bool(self.optimizer.step_was_skipped),
                    "any skipped": self.accelerator.optimizer_step_was_skipped,
                    "scaler": self.accelerator.scaler.state_dict(),
                    "lr": self.schedule.get_last_lr(),
                    "params": clone(dict(self.model.named_parameters())),
                }
            )
        return self

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]


def test_on_a_cpu_accelerate_trains_in_float32() -> None:
    accelerator = accelerate.Accelerator(mixed_precision="fp16", cpu=True)
    assert accelerator.mixed_precision == "fp16"
    assert accelerator.scaler is None
    assert not accelerator.native_amp
    seen: list[torch.dtype] = []
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    model.register_forward_hook(lambda module, args, out: seen.append((args[0] @ module.weight).dtype))
    model(torch.ones(1, 4))
    assert seen == [torch.float32]


def test_scaler_kwargs_choose_numbers_and_no_class() -> None:
    assert GradScalerKwargs(init_scale=8.0).to_kwargs() == {"init_scale": 8.0}
    with pytest.raises(TypeError, match="skip"):
        GradScalerKwargs(skip="select")


@pytest.mark.parametrize("max_norm", [None, 0.1], ids=["", "clip"])
@pytest.mark.parametrize("accumulate", [1, 2], ids=["", "accumulate"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_run_equals_the_one_with_torchs_scaler(optimizer: str, accumulate: int, max_norm: float | None) -> None:
    expected = Run(Scaler("cpu", **NUMBERS), optimizer, accumulate).train(max_norm=max_norm)
    scales = [row["scale"] for row in expected.column("scaler")]
    assert scales[accumulate - 1] < NUMBERS["init_scale"]
    assert any(b < a for a, b in itertools.pairwise(scales[HUGE - 2 :]))
    assert any(b > a for a, b in itertools.pairwise(scales))
    for name in ("default", "host"):
        actual = Run(FUNCAMP[name]("cpu", **NUMBERS), optimizer, accumulate).train(max_norm=max_norm)
        assert len(actual.rows) == STEPS
        assert_same(actual.rows, expected.rows)
        assert_same(actual.optimizer.state_dict(), expected.optimizer.state_dict())


def applied(run: Run) -> list[bool]:
    """Whether the parameters moved, from the second step on."""
    params = [torch.cat([p.flatten() for p in row["params"].values()]) for row in run.rows]
    return [not torch.equal(before, after) for before, after in itertools.pairwise(params)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_selection_with_the_examples_accelerator_equals_torch(optimizer: str) -> None:
    # not torch's fused run: Accelerate takes no step of it for skipped (the next test)
    expected = Run(Scaler("cpu", **NUMBERS), "adamw" if optimizer == "fused" else optimizer).train()
    actual = Run(FUNCAMP["select"]("cpu", **NUMBERS), optimizer, cls=example.Accelerator).train()
    for name in ("skipped", "any skipped", "scaler", "lr"):
        assert actual.column(name) == expected.column(name)
    assert [not skipped for skipped in actual.column("skipped")[1:]] == applied(actual)
    if optimizer != "fused":
        assert_same(actual.rows, expected.rows)
        assert_same(actual.optimizer.state_dict(), expected.optimizer.state_dict())


@pytest.mark.parametrize("scaler", ["torch", "select"])
def test_accelerate_takes_no_step_for_skipped_whose_optimizer_was_called(scaler: str) -> None:
    # so its scheduler advances at every step: with a fused optimizer also with torch's scaler
    make, optimizer = (Scaler, "fused") if scaler == "torch" else (FUNCAMP["select"], "sgd")
    run = Run(make("cpu", **NUMBERS), optimizer).train()
    assert not any(run.column("skipped"))
    assert False in applied(run)
    assert run.schedule.scheduler.last_epoch == STEPS


class OnADevice(funcamp.GradScaler):
    """Says that its flags lie elsewhere: without skip, it then does what it does on a GPU."""

    def _unscale_grads_(self, *args: Any) -> Any:
        return {torch.device("meta"): flag for flag in super()._unscale_grads_(*args).values()}


def test_by_default_a_step_on_a_gpu_is_reported_skipped_too() -> None:
    expected = Run(Scaler("cpu", **NUMBERS)).train()
    assert_same(Run(OnADevice("cpu", **NUMBERS)).train().rows, expected.rows)


@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
def test_examples_optimizer_reads_nothing_unless_asked(optimizer: str) -> None:
    run = Run(FUNCAMP["select"]("cpu", **{**NUMBERS, "init_scale": 2.0}), optimizer, cls=example.Accelerator)

    def step(huge: float) -> None:
        run.accelerator.backward(run.model(torch.full((SIZE, 4), huge)).mean())
        run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()

    step(1.0)  # makes the optimizer's state, and reads the flag
    with host_reads() as reads:
        step(1.0)
        step(1e30)
        assert reads == []
        assert run.accelerator.optimizer_step_was_skipped
        assert len(reads) == 1


MAKERS: dict[str, tuple[Maker, Any]] = {
    "torch": (Scaler, accelerate.Accelerator),
    "host": (FUNCAMP["host"], accelerate.Accelerator),
    "select": (FUNCAMP["select"], example.Accelerator),
}


@pytest.mark.parametrize(("first", "second"), list(itertools.product(MAKERS, repeat=2)))
def test_loaded_state_goes_on_as_the_uninterrupted_run(first: str, second: str, tmp_path: Path) -> None:
    half = 15  # in the middle of a growth interval
    whole = Run(Scaler("cpu", **NUMBERS), "adamw").train()
    make, cls = MAKERS[first]
    before = Run(make("cpu", **NUMBERS), "adamw", cls=cls).train(0, half)
    before.accelerator.save_state(str(tmp_path))
    saved = torch.load(tmp_path / "scaler.pt", weights_only=True)
    assert saved == whole.rows[half - 1]["scaler"]
    assert saved["_growth_tracker"] > 0
    make, cls = MAKERS[second]
    after = Run(make("cpu"), "adamw", cls=cls)  # the file's numbers count, not the constructor's
    after.accelerator.load_state(str(tmp_path))
    after.train(half, STEPS)
    assert_same(before.rows + after.rows, whole.rows)
    assert_same(after.optimizer.state_dict(), whole.optimizer.state_dict())


def test_scaler_set_after_prepare_is_not_the_optimizers() -> None:
    run = Run(Scaler("cpu", **NUMBERS))
    run.accelerator.scaler = funcamp.GradScaler("cpu", **NUMBERS)
    run.accelerator.backward(run.model(torch.ones(SIZE, 4)).mean())
    with pytest.raises(AssertionError, match="_scale is None"):
        run.optimizer.step()


def test_closure_that_accelerate_passes_by_position_is_taken_as_by_torch() -> None:
    results = []
    for make in (Scaler, funcamp.GradScaler):
        run = Run(make("cpu", init_scale=4.0))
        run.accelerator.backward(run.model(torch.ones(SIZE, 4)).mean())

        def closure(run: Run = run) -> float:
            for param in run.model.parameters():
                param.grad = torch.ones_like(param)
            return 1.0

        run.optimizer.step(closure)
        results.append([param.detach() for param in run.model.parameters()])
    assert_same(*results)
