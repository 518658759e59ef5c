"""Check this machine: compilation, donation, capture, parity with torch's scaler, time of a step."""

from __future__ import annotations

import copy
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import funcamp
from funcamp import _upstream
from funcamp._jit import explain
from funcamp._jit.compile import cpp_compiler
from funcamp._jit.passes.program import Target
from funcamp._types import Step, Tree, name_of

#: The number of steps that are compared with torch's loop.
_STEPS = 300
#: A scale that is too high at first, and that grows often, so that steps are skipped.
_CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=20)


class Finding(NamedTuple):
    """One line of the report."""

    check: str
    status: Literal["ok", "failed", "not here"]
    detail: str


class _NotHere(Exception):  # noqa: N818  not an error: the check does not apply to this machine
    pass


def examine(device: str, seconds: float) -> list[Finding]:
    """Run every check on a device; a failure does not stop the others."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("machine", lambda: _machine(device)),
        ("torch's private names", _private_names),
        ("compiler", lambda: _compiler(device)),
        ("passes of jit", lambda: _passes(device)),
        ("verify", lambda: _verified(device)),
        ("donation", lambda: _donation(device)),
        ("capture and replay", lambda: _capture(device)),
        ("parity with GradScaler", lambda: _parity(device)),
        ("host reads", lambda: _host_reads(device)),
        ("launches in a step", lambda: _launches(device)),
        ("time of a step", lambda: _timing(device, seconds)),
    ]
    findings = []
    for name, check in checks:
        try:
            findings.append(Finding(name, "ok", check()))
        except _NotHere as reason:
            findings.append(Finding(name, "not here", str(reason)))
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            findings.append(Finding(name, "failed", f"{type(error).__name__}: {lines[0]}"))
    return findings


def report(findings: list[Finding]) -> str:
    """Format the findings as a table."""
    width = max(len(finding.check) for finding in findings)
    lines = [f"{finding.check:{width}}  {finding.status:8}  {finding.detail}" for finding in findings]
    return "\n".join(lines)


def _machine(device: str) -> str:
    hardware = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"funcamp {funcamp.__version__}, torch {torch.__version__}, Python {platform.python_version()}, {hardware}"


def _private_names() -> str:
    lost = _upstream.lost()
    if lost:
        raise RuntimeError("; ".join(lost))
    return f"all {len(_upstream.PRIVATE)} found"


def _compiler(device: str) -> str:
    if device == "cuda":
        import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]

        return f"triton {triton.__version__}"
    return cpp_compiler("torch.compile needs a C++ compiler on a CPU")


def _passes(device: str) -> str:
    """Return what a program on this machine goes through; `jit(step, explain=True)` has the reasons."""
    changes = list(explain.changes(Target("inductor", frozenset({device}))))
    texts: list[str] = []
    for plural, kind in (("passes", "pass"), ("options", "option"), ("corrections of torch", "torch")):
        names = [change.name for change in changes if change.kind == kind]
        texts.append(f"{len(names)} {plural}: {', '.join(names)}")
    return "; ".join(texts)


def _task(device: str, width: int = 32) -> tuple[nn.Module, Callable[[int], tuple[Tensor, Tensor]]]:
    """Return a model, and a function from the number of a step to its batch; the same in every call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))

    def batch(index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(8, 16, generator=generator)
        targets = torch.randn(8, 4, generator=generator)
        return inputs.to(device), targets.to(device)

    return model.to(device), batch


def _mse(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def _step(
    model: nn.Module, optimizer: type[torch.optim.Optimizer], dtype: str = "float16", **options: Any
) -> funcamp.TrainStep:
    """Return a step with a mean squared error, in the precision of a policy."""
    loss_fn = funcamp.module_loss(model, _mse)
    return funcamp.make_train_step(loss_fn, funcamp.stateless(optimizer, lr=1e-2), _CONFIG, policy=dtype, **options)


def _check_equal(actual: object, expected: object, what: str) -> None:
    if actual != expected:
        raise AssertionError(f"{what}: {actual} instead of {expected}")


def _check_alike(run: Step, other_run: Step, step: funcamp.TrainStep, batch: Callable[[int], Tree], steps: int) -> int:
    """Run two forms of a step, raise if a scale differs, and return how many steps were skipped."""
    state = step.init()
    other_state = step.init()
    skipped = 0
    for index in range(steps):
        state, metrics = run(state, batch(index))
        other_state, other_metrics = other_run(other_state, batch(index))
        _check_equal(metrics.scale.item(), other_metrics.scale.item(), f"scale at step {index}")
        skipped += int(metrics.found_inf.item())
    return skipped


def _torch_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    dtype: torch.dtype,
    device: str,
    batch: Tree,
) -> None:
    """Take a step of torch's loop."""
    inputs, targets = batch
    optimizer.zero_grad()
    with torch.autocast(device, dtype):
        loss = _mse(model(inputs), targets)
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()


def _verified(device: str) -> str:
    model, batch = _task(device)
    step = _step(model, torch.optim.AdamW, max_norm=1.0)
    start = time.perf_counter()
    batches = [batch(index) for index in range(6)]
    verification = funcamp.verify(funcamp.jit(step, exact=True), batches, steps=6)
    seconds = time.perf_counter() - start
    if not verification.ok:
        raise AssertionError(f"verify: {verification}")
    outcomes = ", ".join(f"{one.road}: {one.outcome.value}" for one in verification.comparisons)
    return (
        f"{verification.steps} steps, {len(verification.skipped)} skipped; {outcomes}; {seconds:.0f} s with compiling"
    )


def _donation(device: str) -> str:
    def rotate(state: list[Tensor], batch: Tensor) -> tuple[list[Tensor], Tensor]:
        first, second, third = state
        return [second, third.clone(), first + batch], first.sum()

    run = funcamp.jit(rotate, capture=False)
    state = [torch.full((64,), float(value), device=device) for value in (1, 2, 3)]
    for _ in range(3):
        state, _ = run(state, torch.ones(64, device=device))
    # After three rotations each leaf is back in its place, one larger.
    _check_equal([leaf[0].item() for leaf in state], [2.0, 3.0, 4.0], "rotated leaves")
    return "a rotation of leaves is written back correctly"


def _capture(device: str) -> str:
    if device != "cuda":
        raise _NotHere("CUDA graphs need a GPU")
    model, batch = _task(device)
    step = _step(model, torch.optim.SGD)
    skipped = _check_alike(funcamp.jit(step), funcamp.jit(step, capture=False), step, batch, 100)
    return f"100 replays equal to the uncaptured program, {skipped} of them skipped"


def _parity(device: str) -> str:
    model, batch = _task(device)
    torch_model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(torch_model.parameters(), lr=1e-2, foreach=False)  # the arithmetic of `stateless`
    scaler = torch.amp.GradScaler(device, init_scale=_CONFIG.init_scale, growth_interval=_CONFIG.growth_interval)
    step = _step(model, torch.optim.SGD)
    state = step.init()
    skipped = 0
    for index in range(_STEPS):
        scale = scaler.get_scale()
        _torch_step(torch_model, optimizer, scaler, torch.float16, device, batch(index))
        state, metrics = step(state, batch(index))
        _check_equal(metrics.scale.item(), scale, f"scale at step {index}")
        _check_equal(bool(metrics.found_inf), scaler.get_scale() < scale, f"skip at step {index}")
        skipped += int(metrics.found_inf.item())
    params = state.params.tree()
    are_equal = all(torch.equal(params[name], value) for name, value in torch_model.named_parameters())
    _check_equal(are_equal, True, "parameters bit for bit")
    return f"{_STEPS} steps, {skipped} skipped: scales, skips and parameters equal"


def _host_reads(device: str) -> str:
    model, batch = _task(device)
    step = _step(model, torch.optim.AdamW, max_norm=1.0)
    state = step.init()
    traced_step = funcamp.jit(step, backend="eager", capture=False)
    traced_step(funcamp.clone(state), batch(0))  # tracing raises for a host read
    if device != "cuda":
        return "none, traced without values"
    run = funcamp.jit(step)
    state, _ = run(state, batch(0))
    batch_on_device = batch(1)  # made before the mode is set, because it copies from the host
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            state, _ = run(state, batch_on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none, traced without values and run under set_sync_debug_mode('error')"


def _launches(device: str) -> str:
    metrics = _upstream.find("torch._inductor.metrics")
    model, batch = _task(device)
    step = _step(model, torch.optim.AdamW, max_norm=1.0)
    metrics.reset()
    run = funcamp.jit(step, capture=False)
    run(step.init(), batch(0))
    groups = len(step.init().params.groups)
    return f"{metrics.generated_kernel_count} kernels besides matrix products, 6 tensors in {groups} groups"


def _timing(device: str, seconds: float) -> str:
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    model, batch = _task(device, width=256)
    one_batch = batch(0)
    torch_model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(torch_model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(device)

    def torch_step() -> None:
        _torch_step(torch_model, optimizer, scaler, dtype, device, one_batch)

    step = _step(model, torch.optim.AdamW, name_of(dtype))
    run = funcamp.jit(step)
    state = step.init()

    def jit_step() -> None:
        nonlocal state
        state, _ = run(state, one_batch)

    for call in (torch_step, jit_step) * 3:  # compiles, and fills caches
        call()
    from torch.utils.benchmark import Timer  # imports setuptools

    threads = torch.get_num_threads()
    timers = [Timer("call()", globals={"call": call}, num_threads=threads) for call in (torch_step, jit_step)]
    ratios: list[float] = []
    times: list[float] = []
    end = time.perf_counter() + seconds
    # By turns, so that each ratio is of two times that were taken one after the other.
    while len(ratios) < 3 or time.perf_counter() < end:
        torch_time, jit_time = (timer.timeit(50).mean for timer in timers)
        ratios.append(jit_time / torch_time)
        times.append(jit_time)
    time_of_step = statistics.median(times)
    return (
        f"{time_of_step * 1e3:.3f} ms, {statistics.median(ratios):.2f} times the eager GradScaler loop's time "
        f"({len(ratios)} rounds, medians)"
    )
