"""What compiled code depends on besides its source: versions, the processor's instructions, the GPU."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import funcamp

#: The beginnings of the names of instructions that a C++ compiler uses by itself on x86.
_INSTRUCTIONS = (
    *("abm", "adx", "aes", "amx", "avx", "bmi", "f16c", "fma", "gfni", "lzcnt", "movbe", "pclmul", "popcnt", "sha"),
    *("sse", "ssse", "vaes", "vpclmul"),
)


def this_machine(*, has_gpu: bool) -> dict[str, Any]:
    """Return what code compiled here needs.

    Args:
        has_gpu: whether some of it is for the GPU.
    """
    # The libraries use Python's own interface, which changes from 3.11 to 3.12.
    needs: dict[str, Any] = {
        "funcamp": funcamp.__version__,
        "torch": str(torch.__version__),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": sorted(_instructions()),
    }
    if has_gpu:
        needs["GPU"] = torch.cuda.get_device_capability() if torch.cuda.is_available() else "none"
    return needs


def check_machine(needs: Mapping[str, Any]) -> None:
    """Raise ValueError if this machine lacks what code needs."""
    here = this_machine(has_gpu="GPU" in needs)
    for name, needed in needs.items():
        if name == "processor":
            missing = sorted({*needed} - {*here[name]})
            difference = f"it uses instructions that this processor lacks: {', '.join(missing)}" if missing else ""
        else:
            difference = "" if needed == here[name] else f"it needs {name} {needed}, and here is {here[name]}"
        if difference:
            raise ValueError(
                f"load_step: path must be a file for this machine; {difference}: make the file again on a machine like "
                "this one, with jit(step) and run.save(path)"
            )


def _instructions() -> set[str]:
    """Return the instructions of this processor that generated code may use; its name if the system has no list."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, features = line.partition(":")
            if name.strip() == "Features":  # ARM
                return {*features.split()}
            if name.strip() == "flags":
                return {feature for feature in features.split() if feature.startswith(_INSTRUCTIONS)}
    return {platform.processor()}
