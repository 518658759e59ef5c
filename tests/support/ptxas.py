"""Generated kernels compiled for an H100: Inductor's own options, Triton and its ptxas; no GPU takes part."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from triton.backends.nvidia.compiler import get_ptxas

from tests.support.fake_cuda import pretended
from tests.support.gpu_program import Kernel

_PTXAS: str = get_ptxas(90).path  # Triton has two since 3.6; that of this architecture is another one since 3.9


class Compiled(NamedTuple):
    """What one instance of a kernel takes."""

    registers: int
    """A thread."""
    spilled: int
    """Bytes a thread, stored and loaded."""
    shared: int
    """Bytes a block."""
    warps: int
    accesses: dict[int, int]
    """Loads and stores of global memory in the text, by their bytes a thread."""


def compiled(kernel: Kernel) -> Compiled:
    """Compile a kernel with Inductor's first configuration, in a process that does not interpret."""
    with pretended(), config.patch(use_static_triton_launcher=False):
        made: Any = getattr(PyCodeCache.load(kernel.source), kernel.name)
        binary = made._precompile_config(made.configs[0]).kernel
    ptx: str = binary.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernel.ptx"
        text.write_text(ptx)
        command = [_PTXAS, "-v", "--gpu-name=sm_90a", str(text), "-o", f"{text}.cubin"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    accesses: dict[int, int] = {}
    for count, bits in re.findall(r"(?:ld|st)\.global[.\w:]*?(?:\.v(\d))?\.[bfus](\d+)", ptx):
        size = int(count or 1) * int(bits) // 8
        accesses[size] = accesses.get(size, 0) + 1
    return Compiled(
        registers=int(_found(r"Used (\d+) registers", said)),
        spilled=int(_found(r"(\d+) bytes spill stores", said)) + int(_found(r"(\d+) bytes spill loads", said)),
        shared=binary.metadata.shared,
        warps=binary.metadata.num_warps,
        accesses=accesses,
    )


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, text
    return match[1]
