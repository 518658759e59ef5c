"""Check this machine: compilation, donation, capture, parity with torch's scaler, time of a step."""

from __future__ import annotations

import copy
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import funcamp
from funcamp import _upstream
from funcamp._jit import explain
from funcamp._jit.compile import cpp_compiler
from funcamp._jit.passes.program import Target
from funcamp._types import name_of

_STEPS = 300
_CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=20)


class Finding(NamedTuple):
    """One line of the report."""

    check: str
    status: str
    """ok, failed, or not here."""
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
            text = (str(error).strip().splitlines() or [""])[0]
            findings.append(Finding(name, "failed", f"{type(error).__name__}: {text}"))
    return findings


def report(findings: list[Finding]) -> str:
    """Format the findings as a table."""
    width = max(len(finding.check) for finding in findings)
    return "\n".join(f"{f.check:{width}}  {f.status:8}  {f.detail}" for f in findings)


def _machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"funcamp {funcamp.__version__}, torch {torch.__version__}, Python {platform.python_version()}, {name}"


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
    kinds = {"passes": "pass", "options": "option", "corrections of torch": "torch"}
    named = {plural: [one.name for one in changes if one.kind == kind] for plural, kind in kinds.items()}
    return "; ".join(f"{len(names)} {plural}: {', '.join(names)}" for plural, names in named.items())


def _task(device: str, width: int = 32) -> tuple[nn.Module, Callable[[int], tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))

    def batch(index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, 16, generator=generator).to(device), torch.randn(8, 4, generator=generator).to(device)

    return model.to(device), batch


def _mse(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def _step(model: nn.Module, optimizer: type[torch.optim.Optimizer], dtype: str = "float16", **options: Any) -> Any:
    made = funcamp.stateless(optimizer, lr=1e-2)
    return funcamp.make_train_step(funcamp.module_loss(model, _mse), made, _CONFIG, policy=dtype, **options)


def _equal(found: Any, wanted: Any, what: str) -> None:
    if found != wanted:
        raise AssertionError(f"{what}: {found} instead of {wanted}")


def _alike(one: Any, other: Any, step: Any, batch: Callable[[int], Any], steps: int) -> int:
    """Run two forms of a step, raise if a scale differs, and return how many steps were skipped."""
    state, expected, skipped = step.init(), step.init(), 0
    for index in range(steps):
        state, metrics = one(state, batch(index))
        expected, wanted = other(expected, batch(index))
        _equal(metrics.scale.item(), wanted.scale.item(), f"scale at step {index}")
        skipped += int(metrics.found_inf.item())
    return skipped


def _torch_step(model: nn.Module, optimizer: Any, scaler: Any, dtype: torch.dtype, device: str, batch: Any) -> None:
    optimizer.zero_grad()
    with torch.autocast(device, dtype):
        loss = _mse(model(batch[0]), batch[1])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def _verified(device: str) -> str:
    model, batch = _task(device)
    step = _step(model, torch.optim.AdamW, max_norm=1.0)
    start = time.perf_counter()
    found = funcamp.verify(funcamp.jit(step, exact=True), [batch(index) for index in range(6)], steps=6)
    seconds = time.perf_counter() - start
    if not found.ok:
        raise AssertionError(f"verify: {found}")
    return f"{found.summary()}; {seconds:.0f} s with compiling"


def _donation(device: str) -> str:
    def rotate(state: list[Tensor], batch: Tensor) -> Any:
        a, b, c = state
        return [b, c.clone(), a + batch], a.sum()

    run = funcamp.jit(rotate, capture=False)
    state = [torch.full((64,), float(value), device=device) for value in (1, 2, 3)]
    for _ in range(3):
        state, _ = run(state, torch.ones(64, device=device))
    _equal([leaf[0].item() for leaf in state], [2.0, 3.0, 4.0], "rotated leaves")
    return "a rotation of leaves is written back correctly"


def _capture(device: str) -> str:
    if device != "cuda":
        raise _NotHere("CUDA graphs need a GPU")
    model, batch = _task(device)
    step = _step(model, torch.optim.SGD)
    skipped = _alike(funcamp.jit(step), funcamp.jit(step, capture=False), step, batch, 100)
    return f"100 replays equal to the uncaptured program, {skipped} of them skipped"


def _parity(device: str) -> str:
    model, batch = _task(device)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=1e-2, foreach=False)  # the arithmetic that `stateless` runs
    scaler = torch.amp.GradScaler(device, init_scale=_CONFIG.init_scale, growth_interval=_CONFIG.growth_interval)
    step = _step(model, torch.optim.SGD)
    state, skipped = step.init(), 0
    for index in range(_STEPS):
        before = scaler.get_scale()
        _torch_step(eager, optimizer, scaler, torch.float16, device, batch(index))
        state, metrics = step(state, batch(index))
        _equal(metrics.scale.item(), before, f"scale at step {index}")
        _equal(bool(metrics.found_inf), scaler.get_scale() < before, f"skip at step {index}")
        skipped += int(metrics.found_inf.item())
    ours = state.params.tree()
    same = all(torch.equal(ours[name], value) for name, value in eager.named_parameters())
    _equal(same, True, "parameters bit for bit")
    return f"{_STEPS} steps, {skipped} skipped: scales, skips and parameters equal"


def _host_reads(device: str) -> str:
    model, batch = _task(device)
    step = _step(model, torch.optim.AdamW, max_norm=1.0)
    state = step.init()
    funcamp.jit(step, backend="eager", capture=False)(funcamp.clone(state), batch(0))  # tracing raises for a host read
    if device != "cuda":
        return "none, traced without values"
    run = funcamp.jit(step)
    state, _ = run(state, batch(0))
    given = batch(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            state, _ = run(state, given)
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
    given = batch(0)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(device)

    def torch_step() -> None:
        _torch_step(eager, optimizer, scaler, dtype, device, given)

    step = _step(model, torch.optim.AdamW, name_of(dtype))
    run, box = funcamp.jit(step), [step.init()]

    def jit_step() -> None:
        box[0], _ = run(box[0], given)

    ratios: list[float] = []
    times: list[float] = []
    for call in (torch_step, jit_step) * 3:
        call()
    from torch.utils.benchmark import Timer  # imports setuptools

    threads = torch.get_num_threads()
    timers = [Timer("call()", globals={"call": call}, num_threads=threads) for call in (torch_step, jit_step)]
    end = time.perf_counter() + seconds
    while len(ratios) < 3 or time.perf_counter() < end:
        theirs, ours = (timer.timeit(50).mean for timer in timers)
        ratios.append(ours / theirs)
        times.append(ours)
    ratio, took = statistics.median(ratios), statistics.median(times)
    return f"{took * 1e3:.3f} ms, {ratio:.2f} times the eager GradScaler loop's time ({len(ratios)} rounds, medians)"
