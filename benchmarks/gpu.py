"""Tests and benchmarks on a GPU that is lent for minutes: parts of at most eight minutes, in order of value.

    python benchmarks/gpu.py [PART ...] [--out DIR] [--device cpu] [--sizes "..."] [--rounds 9]

Parts: tests, step, phase, price and rest, half an hour together and what runs if no part is named; verify, public,
bfloat16, large, rl, float8, parity, sanitize and roofline. It needs torch, numpy, pytest and what torch.compile needs,
installs nothing, and takes JAX and optax if they are there; public and verify need timm and torchvision, and sanitize
CUDA's compute-sanitizer. A part goes on past a line that fails or takes too long, says at the end which did, and fails
then. What was measured is in the result files.
--device, --sizes and --rounds replace those of every line of a part: with `--device cpu` and a small size they
rehearse it, in four times the time. Tests are then only collected.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PEERS = (
    "torch.compile(model), GradScaler",
    'torch.compile(model, mode="reduce-overhead"), GradScaler',
    "funcamp.jit",
    "JAX jit, optax, jmp's rule",
)
OTHERS = (
    "forward and backward captured, GradScaler outside",
    "funcamp.GradScaler, the loop captured",
    "funcamp.jit",
    "funcamp.jit, a tensor a parameter",
    "funcamp.jit, exact=True",
    "funcamp.jit, kernels apart",
)


class Line(NamedTuple):
    """A benchmark, the sizes that fit a GPU's memory and the time, its options, and its seconds at most."""

    script: str
    seconds: int
    sizes: tuple[str, ...]
    options: tuple[str, ...] = ()


STEP = ("MLP 0.14 M", "GPT 124 M, 16,384 tokens", "GPT 3.3 M", "MLP 134 M", "CNN 2.7 M", "GPT 124 M, 1,024 tokens")
PUBLIC = ("ResNet-50 24 M", "ViT-B/16 86 M", "ConvNeXt-Tiny 28 M")
LEARNERS = ("PPO 64, batch 64", "DQN", "TD3", "SAC", "PPO 256, batch 256")
PHASE = ("124 M in 148", "1 M in 10", "1,000 M in 300", "10 M in 100", "10 M in 10,000")
PARTS: dict[str, list[Line]] = {
    "tests": [],
    "step": [Line("step", 440, STEP, ("--variants", ";".join(PEERS)))],
    "phase": [Line("phase", 280, PHASE)],
    "price": [Line("price", 220, ("MLP 0.14 M", "GPT 124 M, 1,024 tokens", "GPT 3.3 M", "MLP 134 M"))],
    "rest": [
        Line("grad_scaler", 60, ("10 M in 100", "0.1 M in 20")),
        Line("overhead", 40, ("10 leaves", "1,000 leaves")),
        Line("track", 150, ("GPT 3.3 M",), ("--copies=1",)),
        Line("step", 130, ("MLP 3.2 M",), ("--forms", "--variants", ";".join(OTHERS))),
    ],
    "verify": [Line("gpu_verify", 300, ())],
    "public": [Line("step", 440, PUBLIC, ("--public", "--variants", ";".join(PEERS[:3])))],
    "bfloat16": [Line("step", 440, (*STEP[:2], "CNN 2.7 M"), ("--dtype=bfloat16", "--variants", ";".join(PEERS)))],
    "large": [Line("step", 440, ("GPT 355 M, 8,192 tokens",), ("--variants", ";".join(PEERS)))],
    "rl": [Line("rl", 440, LEARNERS)],
    "parity": [Line("parity", 300, ())],
    "roofline": [Line("roofline", 300, ("GPT 124 M, 16,384 tokens", "MLP 0.14 M", "MLP 134 M"))],
    "sanitize": [],
    "float8": [
        Line(
            "float8_speed",
            420,
            ("8,192 x 4,096 x 16,384", "2 blocks of width 4,096, 8,192 tokens", "8,192 x 4,096 x 4,096"),
        )
    ],
}
HALF_AN_HOUR = ("tests", "step", "phase", "price", "rest")
TESTS = 400  # seconds
GRACE = 10
SANITIZE = 400
SHOWN = 50  # lines of what failed; tests.log has all
WORKERS = 12  # test processes at most: each has a context on the GPU


def run(command: list[str], seconds: float, log: Path | None = None, **variables: str) -> str:
    """Run a command in a session of its own; return "" or what was wrong."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables}
    with log.open("w") if log else contextlib.nullcontext() as to:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=to, stderr=to, start_new_session=True)
        try:
            status = process.wait(seconds)
        except BaseException as error:
            # At an interrupt pytest still prints what failed.
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return f"stopped after {seconds:.0f} s"
            raise
    return f"exit status {status}" if status else ""


def tests(device: str, out: Path | None) -> list[str]:
    """Run the CUDA tests on all cores, and the doctor beside them; return what failed."""
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        "-m",
        "cuda",
        *(["--collect-only"] if device == "cpu" else []),
    ]
    plain = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "300"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.monotonic()
        if wrong := run([*pytest, "-q", "--collect-only", "tests/cuda"], 120, folder / "collected.log", **plain):
            return [f"collecting the tests: {wrong}\n{(folder / 'collected.log').read_text()[-4000:]}"]
        found = [line for line in (folder / "collected.log").read_text().splitlines() if "::" in line]
        found.sort(key=lambda one: "recipes" in one)  # what takes longest comes last
        workers = min(WORKERS, os.cpu_count() or 1, len(found))
        # Warnings of this machine's packages are shown, and fail no test; each process compiles for itself.
        options = ["-v", "-rfE", "--tb=short", "-o", "faulthandler_timeout=150"]
        alone = {**plain, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        commands = {f"tests {index}": [*pytest, *options, *found[index::workers]] for index in range(workers)}
        commands["doctor"] = [sys.executable, "-m", "funcamp", "doctor", "--device", device]

        def end_of(label: str) -> str:
            # Processes that share a compile cache tune the same kernels at the same time, and take each other's choice.
            # No space in its path: torch 2.11 does not quote it.
            cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"compiled-{label.replace(' ', '-')}")}
            return run(commands[label], TESTS, folder / f"{label}.log", **alone, **cache)

        with ThreadPoolExecutor(len(commands)) as pool:
            ends = list(pool.map(end_of, commands))
        logs = {label: (folder / f"{label}.log").read_text() for label in commands}
    _keep(out, "tests.log", logs)
    failed = []
    for (label, text), wrong in zip(logs.items(), ends):
        lines = text.splitlines()
        print(f"{label}: {wrong or 'well'}: {lines[-1].strip('= ') if lines else ''}")
        if wrong:
            named = [line for line in lines if line.startswith(("FAILED", "ERROR")) or " failed " in line]
            failed += [f"{label}: {wrong}", *(line[:200] for line in named or lines[-20:])]
    print(logs["doctor"])
    print(f"{len(found)} tests in {workers} processes, {time.monotonic() - start:.0f} s")
    return failed


def sanitize(device: str, out: Path | None) -> list[str]:
    """Run a few steps under compute-sanitizer, all at once; return what failed.

    Every access of memory is checked, of the captured steps and of the program called without a graph, whose tensors
    are allocated one by one then. A read of memory that nothing wrote counts in generated kernels alone: libraries do
    that to their workspaces.
    """
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
    if device == "cuda" and not tool:
        return ["sanitize: compute-sanitizer was not found"]
    apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    forms: dict[str, tuple[str, str, dict[str, str]]] = {
        "memcheck, captured": ("memcheck", "captured", {}),
        "memcheck, called": ("memcheck", "called", apart),
        "initcheck, captured": ("initcheck", "captured", {}),
    }

    def checked(one: tuple[str, tuple[str, str, dict[str, str]]], folder: Path) -> tuple[str, str]:
        label, (kind, form, variables) = one
        tooled = [str(tool), "--tool", kind, "--launch-timeout", "0"] if device == "cuda" else []
        command = [*tooled, sys.executable, "-m", "tests.cuda.short_run", form, device]
        wrong = run(command, SANITIZE, folder / label, TORCHINDUCTOR_COMPILE_THREADS="1", **variables)
        return wrong, (folder / label).read_text()

    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(len(forms)) as pool:
        ends = list(pool.map(lambda one: checked(one, Path(name)), forms.items()))
    _keep(out, "sanitize.log", {label: text for label, (_, text) in zip(forms, ends)})
    failed = []
    for label, (wrong, text) in zip(forms, ends):
        summaries = re.findall(r"ERROR SUMMARY: .*", text)
        print(f"{label}: {wrong or 'ran to its end'}; {summaries[-1] if summaries else 'no summary'}")
        faults = faults_in(text, summaries, memcheck=label.startswith("memcheck"), on_a_gpu=device == "cuda")
        if wrong:
            faults.insert(0, wrong)
        failed += [f"sanitize: {label}: {line[:200]}" for line in faults]
    return failed


def faults_in(text: str, summaries: list[str], *, memcheck: bool, on_a_gpu: bool) -> list[str]:
    """Lines of compute-sanitizer's output that show a fault of a generated kernel, ten at most."""
    if on_a_gpu and not summaries:
        return text.splitlines()[-5:]
    faults = [line for line in text.splitlines() if "triton_" in line]
    if memcheck and summaries and "SUMMARY: 0 errors" not in summaries[-1]:
        faults = faults or summaries
    return faults[:10]


def _keep(out: Path | None, name: str, logs: dict[str, str]) -> None:
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("\n".join(f"==== {label}\n{text}" for label, text in logs.items()))


#: Parts that are not lines of benchmarks.
PROGRAMS = {"tests": tests, "sanitize": sanitize}


def main() -> None:
    """Run the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: {', '.join(HALF_AN_HOUR)}"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="folder for the result files and the logs")
    parser.add_argument("--sizes", help="names, separated by semicolons")
    parser.add_argument("--rounds", type=int)
    args = parser.parse_args()
    if strangers := [part for part in args.parts if part not in PARTS]:
        parser.error(f"PART must be one of {', '.join(PARTS)}; got {', '.join(strangers)}")
    out = args.out and args.out.absolute()
    given = [f"--device={args.device}"]
    if out:
        given.append(f"--out={out}")
    if args.rounds:
        given.append(f"--rounds={args.rounds}")
    # A rehearsal on a CPU takes longer.
    patience = 4 if args.device == "cpu" else 1
    failed: list[str] = []
    for part in args.parts or HALF_AN_HOUR:
        start = time.monotonic()
        if part in PROGRAMS:
            failed += PROGRAMS[part](args.device, out)
        for line in PARTS[part]:
            command = [sys.executable, f"benchmarks/{line.script}.py", *given, *line.options]
            if sizes := args.sizes or ";".join(line.sizes):
                command += ["--sizes", sizes]
            if wrong := run(command, line.seconds * patience):
                failed.append(f"{part}: {line.script}.py: {wrong}")
        print(f"==== {part}: {time.monotonic() - start:.0f} s", flush=True)
    print(*(failed[:SHOWN] or ["nothing failed"]), sep="\n")
    if len(failed) > SHOWN:
        print(f"and {len(failed) - SHOWN} lines more")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
