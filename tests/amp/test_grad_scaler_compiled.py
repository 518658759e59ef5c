"""The claim: a plain scale / backward / step / update loop with `funcamp.GradScaler` compiles in one graph."""

from __future__ import annotations

import ast
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from funcamp import GradScaler, presets
from tests.support.helpers import assert_close, assert_same
from tests.support.launch import ENVIRONMENT, ROOT

pytestmark = pytest.mark.compiled

STEPS = 12
Loop = Callable[[Tensor, Tensor], Tensor]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "Adam tensor lr": (torch.optim.Adam, {"lr": torch.tensor(0.01), "amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


@pytest.fixture(autouse=True)
def _backward_is_traced() -> Iterator[None]:
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The first one overflows, and a later one."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(4, 4, generator=generator), torch.randn(4, 1, generator=generator)
    return x, y * (1e4 if step in (0, 7) else 1.0)


def build(scaler: Any, name: str, clip: bool = False) -> tuple[torch.nn.Module, torch.optim.Optimizer, Loop]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    cls, arguments = OPTIMIZERS[name]
    optimizer = cls(model.parameters(), **arguments)

    def loop(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return model, optimizer, loop


def make(cls: Any) -> Any:
    return cls("cpu", init_scale=2.0**12, growth_interval=3)


def assert_same_runs(name: str, *, clip: bool = False, backend: str = "aot_eager", tolerance: float = 1e-5) -> int:
    """Follow torch's loop, which is not compiled; return the number of graphs that funcamp's became."""
    ours, theirs = make(GradScaler), make(torch.amp.GradScaler)
    model, _, loop = build(ours, name, clip)
    expected, _, plain = build(theirs, name, clip)
    counted = CompileCounterWithBackend(backend)
    compiled = torch.compile(loop, fullgraph=True, backend=counted)
    scales = []
    for step in range(STEPS):
        compiled(*batch(step))
        plain(*batch(step))
        assert ours.get_scale() == theirs.get_scale()
        assert ours._get_growth_tracker() == theirs._get_growth_tracker()
        assert_close(list(model.parameters()), list(expected.parameters()), tolerance)
        scales.append(ours.get_scale())
    assert min(scales) < 2.0**12 < max(scales)
    return counted.frame_count


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_loop_follows_torchs_eager_one(name: str) -> None:
    assert_same_runs(name)


def test_compiled_loop_with_clipping_follows_torchs_in_two_graphs_one_before_the_state_is_there() -> None:
    assert assert_same_runs("AdamW", clip=True) == 2


@pytest.mark.thorough
@pytest.mark.inductor
def test_generated_code_follows_torchs() -> None:
    assert_same_runs("AdamW", backend="inductor", tolerance=1e-3)  # it keeps float16 products in float32


def test_a_skipped_step_changes_nothing_and_an_eager_one_goes_on() -> None:
    """A loop may be compiled in the middle of a run, and left again."""
    scaler = make(GradScaler)
    model, optimizer, loop = build(scaler, "AdamW")
    compiled = torch.compile(loop, fullgraph=True, backend="aot_eager")
    loop(*batch(1))
    compiled(*batch(2))
    before = [param.detach().clone() for param in model.parameters()]
    states = [{name: value.clone() for name, value in state.items()} for state in optimizer.state.values()]
    compiled(*batch(7))
    assert scaler.metrics().found_inf == 1.0
    assert_same([param.detach() for param in model.parameters()], before)
    assert_same([dict(state) for state in optimizer.state.values()], states)
    loop(*batch(3))
    assert all(state["step"] == 3 for state in optimizer.state.values())


def test_several_optimizers_in_one_graph() -> None:
    """Each by its own flag: the loss of the second alone overflows."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    scaler = make(GradScaler)

    def loop(x: Tensor, y: Tensor) -> Tensor:
        models[0].zero_grad()
        models[1].zero_grad()
        for loss in scaler.scale([models[0](x).sum(), models[1](y).sum()]):
            loss.backward()
        scaler.step(optimizers[0])
        scaler.step(optimizers[1])
        scaler.update()
        return x.sum()

    before = [model.weight.detach().clone() for model in models]
    torch.compile(loop, fullgraph=True, backend="aot_eager")(torch.ones(1, 2), torch.full((1, 2), math.inf))
    assert not torch.equal(models[0].weight, before[0])
    assert torch.equal(models[1].weight, before[1])
    assert scaler.get_scale() == 2.0**11


def test_another_rule_compiles() -> None:
    scaler = GradScaler("cpu", config=presets.megatron(initial_scale=2.0**12, hysteresis=2))
    _, _, loop = build(scaler, "SGD")
    compiled = torch.compile(loop, fullgraph=True, backend="aot_eager")
    seen = []
    for step in (0, 0, 0, 1):
        compiled(*batch(step))
        seen.append((scaler.get_scale(), scaler.state_dict()["hysteresis_tracker"]))
    assert seen == [(2.0**12, 1), (2.0**11, 0), (2.0**10, -1), (2.0**10, -1)]


def test_a_tensor_lr_changes_without_another_graph() -> None:
    _, optimizer, loop = build(make(GradScaler), "Adam tensor lr")
    lr = torch.tensor(0.01)
    optimizer.param_groups[0]["lr"] = lr
    compiled = torch.compile(loop, fullgraph=True, backend="aot_eager")
    for step in (1, 2):
        compiled(*batch(step))
    with torch.compiler.set_stance("fail_on_recompile"):
        lr.fill_(0.0)
        before = [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]
        compiled(*batch(3))
    assert_same([param.detach() for group in optimizer.param_groups for param in group["params"]], before)


def reason(call: Callable[[], object]) -> str:
    """The error that Dynamo's came of."""
    with pytest.raises(Exception, match="nonstrict_trace") as caught:
        call()
    error: BaseException = caught.value
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return str(error)


def test_a_first_step_of_another_formula_must_be_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    dampened = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.2})
    monkeypatch.setitem(OPTIMIZERS, "SGD dampening", dampened)
    model, _, loop = build(make(GradScaler), "SGD dampening")
    expected, _, plain = build(make(torch.amp.GradScaler), "SGD dampening")
    compiled = torch.compile(loop, fullgraph=True, backend="aot_eager")
    assert "optimizer must have taken a step before it is compiled" in reason(lambda: compiled(*batch(1)))
    loop(*batch(1))
    compiled(*batch(1))
    plain(*batch(1))
    plain(*batch(1))
    assert_close(list(model.parameters()), list(expected.parameters()), 1e-5)


class Twice(torch.optim.SGD):
    """Not torch's own."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


# Dynamo itself looks at the scaled loss, where it goes on behind the break of backward()
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
def test_what_does_not_compile_breaks_the_graph_and_follows_torch() -> None:
    """A class of one's own, a hook, an argument: as torch's scaler under torch.compile, and refused in one graph."""

    def double(optimizer: Any, *_: Any) -> None:
        optimizer.param_groups[0]["params"][0].grad.mul_(2.0)

    def hooked(weight: Tensor) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD([weight], lr=0.1)
        optimizer.register_step_pre_hook(double)
        return optimizer

    cases: list[Callable[[Tensor], torch.optim.Optimizer]] = [lambda weight: Twice([weight], lr=0.1), hooked]
    for case in cases:
        results = []
        for cls in (GradScaler, torch.amp.GradScaler):
            weight, scaler = torch.nn.Parameter(torch.ones(2)), make(cls)
            loop = one_step(weight, case(weight), scaler)
            compiled = torch.compile(loop, backend="aot_eager")
            with torch._dynamo.config.patch(trace_autograd_ops=False):  # whose break is another
                for size in (1.0, math.inf, 2.0):
                    compiled(torch.full((2,), size))
                    weight.grad = None
            results.append((weight.detach(), torch.tensor(scaler.get_scale())))
        assert_same(*results)
        torch._dynamo.reset()
        weight = torch.nn.Parameter(torch.ones(2))
        with pytest.raises(Exception, match=r"compiles only if optimizer is of an unmodified class of torch\.optim"):
            torch.compile(one_step(weight, case(weight), make(GradScaler)), fullgraph=True, backend="aot_eager")(
                torch.ones(2)
            )


def one_step(weight: Tensor, optimizer: torch.optim.Optimizer, scaler: Any) -> Callable[[Tensor], Tensor]:
    def loop(x: Tensor) -> Tensor:
        scaler.scale((weight * x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return x.sum()

    return loop


@pytest.mark.thorough
def test_hyperparameters_may_change_between_calls_and_loops() -> None:
    """Numbers that Dynamo would rather keep open: another optimizer through the same code, momentum that cycles."""
    for betas in ((0.9, 0.999), (0.5, 0.9), (0.7, 0.999)):
        ours, theirs = make(GradScaler), make(torch.amp.GradScaler)
        model, optimizer, loop = build(ours, "AdamW")
        expected, other, plain = build(theirs, "AdamW")
        compiled = torch.compile(loop, fullgraph=True, backend="aot_eager")
        for step in range(1, 4):
            for group in (optimizer.param_groups[0], other.param_groups[0]):
                group["lr"], group["betas"] = 0.1 * max(betas), betas
            compiled(*batch(step))
            plain(*batch(step))
            assert_close(list(model.parameters()), list(expected.parameters()), 1e-5)


def test_a_disabled_scaler_compiles() -> None:
    model, _, loop = build(GradScaler("cpu", enabled=False), "AdamW")
    torch.compile(loop, fullgraph=True, backend="aot_eager")(*batch(1))
    expected, _, plain = build(torch.amp.GradScaler("cpu", enabled=False), "AdamW")
    plain(*batch(1))
    assert_close(list(model.parameters()), list(expected.parameters()), 1e-5)


#: The scaler is the first of its process: the one that pickles it does not compile.
ALONE = """
import copy, pickle, sys, torch
from tests.amp.test_grad_scaler_compiled import batch, build
scaler = pickle.load(sys.stdin.buffer)
if sys.argv[1] == "copied":
    scaler = copy.deepcopy(scaler)
if sys.argv[1] == "disabled":
    from funcamp import GradScaler
    scaler = GradScaler("cpu", enabled=False)
model, _, loop = build(scaler, "SGD momentum")
with torch._dynamo.config.patch(trace_autograd_ops=True):
    torch.compile(loop, fullgraph=True, backend="eager")(*batch(1))
print([value.tolist() for value in model.parameters()])
"""


@pytest.mark.thorough(keep=1)
@pytest.mark.processes
@pytest.mark.parametrize("made", ["unpickled", "copied", "disabled"])
def test_a_scaler_that_no_other_came_before_compiles(made: str) -> None:
    plain = GradScaler("cpu", init_scale=16.0, enabled=made != "disabled")
    done = subprocess.run(
        [sys.executable, "-c", ALONE, made], cwd=ROOT, env=ENVIRONMENT, input=pickle.dumps(plain), capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    model, _, loop = build(plain, "SGD momentum")
    loop(*batch(1))
    assert_close(
        [torch.tensor(value) for value in ast.literal_eval(done.stdout.decode())], list(model.parameters()), 1e-6
    )
