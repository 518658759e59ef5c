"""Check this machine: torch, the compiler, a step beside torch's loop, host reads on a GPU, the time of a step."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import funcamp
from funcamp import _upstream
from funcamp._jit.compile import cpp_compiler


class Finding(NamedTuple):
    """One line of the report."""

    check: str
    ok: bool
    detail: str


def examine(device: str) -> list[Finding]:
    """Run every check on a device; a failure does not stop the others."""
    checks: dict[str, Callable[[str], str]] = {
        "machine": _machine,
        "torch's private names": _private_names,
        "compiler": _compiler,
        "a step beside torch's loop": _verified,
        "a step": _time_and_syncs,
    }
    findings = []
    for name, check in checks.items():
        try:
            findings.append(Finding(name, True, check(device)))
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            findings.append(Finding(name, False, f"{type(error).__name__}: {lines[0]}"))
    return findings


def report(findings: list[Finding]) -> str:
    """Format the findings as a table."""
    width = max(len(finding.check) for finding in findings)
    lines = [f"{finding.check:{width}}  {'ok' if finding.ok else 'failed':6}  {finding.detail}" for finding in findings]
    return "\n".join(lines)


def _machine(device: str) -> str:
    hardware = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"funcamp {funcamp.__version__}, torch {torch.__version__}, Python {platform.python_version()}, {hardware}"


def _private_names(_: str) -> str:
    lost = _upstream.lost()
    if lost:
        raise RuntimeError("; ".join(lost))
    return f"all {len(_upstream.PRIVATE)} found"


def _compiler(device: str) -> str:
    if device == "cuda":
        import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]

        return f"triton {triton.__version__}"
    return cpp_compiler("torch.compile needs a C++ compiler on a CPU")


def _task(device: str) -> tuple[funcamp.TrainStep, Callable[[int], tuple[Tensor, Tensor]]]:
    """Return a step, and a function from its number to its batch. The scale overflows at first, and grows often."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).to(device)
    step = funcamp.make_train_step(
        funcamp.module_loss(model, nn.functional.mse_loss),
        funcamp.stateless(torch.optim.AdamW, lr=1e-2),
        funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=20),
        policy="float16",
        max_norm=1.0,
    )

    def batch(index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(8, 16, generator=generator)
        targets = torch.randn(8, 4, generator=generator)
        return inputs.to(device), targets.to(device)

    return step, batch


def _verified(device: str) -> str:
    step, batch = _task(device)
    verification = funcamp.verify(funcamp.jit(step, exact=True), [batch(index) for index in range(6)], steps=6)
    roads = ", ".join(f"{one.roads}: {one.outcome.value} {one.detail()}".strip() for one in verification.comparisons)
    if not verification.ok:
        raise AssertionError(roads)
    return roads


def _time_and_syncs(device: str) -> str:
    """Time the compiled step; on a GPU an error if it synchronizes."""
    step, batch = _task(device)
    run, state, one_batch = funcamp.jit(step), step.init(), batch(0)
    state, _ = run(state, one_batch)

    def call() -> None:
        nonlocal state
        state, _ = run(state, one_batch)

    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            call()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    from torch.utils.benchmark import Timer  # imports setuptools

    timed = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads()).blocked_autorange()
    syncs = ", no host synchronization" if device == "cuda" else ""
    return f"{timed.median * 1e3:.3f} ms, compiled{syncs}"
