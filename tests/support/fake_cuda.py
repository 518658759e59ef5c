"""A process in which "cuda" is a device: one H100 that has properties, and neither memory nor kernels.

    python -m tests.support.fake_cuda tests/gpu_program/...        pytest in such a process

Fake tensors on it, their autograd, and Inductor's code for it work. torch asks what devices there are when it is
imported, and Triton whether to interpret: this module is imported before both.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

_SOURCE = Path(__file__).with_suffix(".cpp")
_library: ctypes.CDLL | None = None

#: Of an H100 with 80 GB (SXM).
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    clock_rate=1980000,
    memory_clock_rate=2619000,
    memory_bus_width=5120,
    gcnArchName="",
    uuid="0",
)


def loaded() -> bool:
    """Whether this process has the device."""
    return _library is not None


def load() -> None:
    """Give this process the device; torch must not be imported yet."""
    global _library
    assert "torch" not in sys.modules
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    _library = ctypes.CDLL(str(_built(Path(found.origin).parent)), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401

    _library.take_cuda()


def _built(torch: Path) -> Path:
    """The shared library of this torch, built once a machine."""
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch / 'include'}", str(_SOURCE)]
    flags += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    version = (torch / "version.py").read_text()
    key = hashlib.sha256("\n".join([*flags, version, _SOURCE.read_text()]).encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"funcamp-fake-cuda-{os.getuid()}" / f"{key}.so"
    if not built.exists():
        built.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            made = Path(folder) / "made.so"
            names = [os.environ.get("CXX", "c++"), "g++", "clang++"]
            compiler = next(name for name in names if shutil.which(name))
            subprocess.run([compiler, *flags, "-o", str(made)], check=True)
            made.rename(built)
    return built


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """A region in which torch, Inductor and Triton see the device."""
    import torch._functorch.config
    import torch._inductor.config
    import torch._inductor.fx_passes.joint_graph
    import torch._inductor.runtime.triton_helpers
    import torch.cuda.amp.common
    import triton
    from torch._dynamo import device_interface

    shared: dict[str, object] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": PROPERTIES,
        "synchronize": None,
        "is_bf16_supported": True,
        "set_device": None,
    }
    of_cuda: dict[str, object] = {
        "get_device_capability": (9, 0),
        "get_device_name": PROPERTIES.name,
        "is_initialized": True,
        "_lazy_init": None,
        "mem_get_info": (PROPERTIES.total_memory, PROPERTIES.total_memory),
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
    }
    of_interface: dict[str, object] = {
        "exchange_device": 0,
        "maybe_exchange_device": 0,
        "get_raw_stream": 0,
        "get_compute_capability": 90,
    }
    interface: Any = device_interface.CudaInterface
    joint_graph: Any = torch._inductor.fx_passes.joint_graph
    # Patterns are traced on tensors of a device that has memory.
    joint_graph.lazy_init(torch.device("cpu"))
    with contextlib.ExitStack() as stack:

        def put(holder: object, **names: object) -> None:
            for name, value in names.items():
                stack.enter_context(mock.patch.object(holder, name, value, create=True))

        put(torch.cuda, **_returning(shared | of_cuda))
        put(torch.version, cuda="12.8")
        put(torch.cuda.amp.common, **_returning({"amp_definitely_not_available": False}))
        put(torch._C, **_returning({"_cuda_getCurrentRawStream": 0}))
        put(torch._subclasses.fake_tensor, **_returning({"init_gpu_context": None}))
        put(interface, **_returning(shared | of_interface))
        put(interface.Worker, **_returning(shared))
        for name in ("cuda", "cuda:0"):
            device_interface.register_interface_for_device(name, interface)
        put(joint_graph, **_returning({"lazy_init": None}))
        folder = joint_graph.UniformValueConstantFolder
        for name in ("_deduce_value", "_add_peephole_patterns"):  # constants are computed on their device
            put(folder, **{name: _on_host(getattr(folder, name))})
        put(torch._inductor.runtime.triton_helpers, **_returning({"set_driver_to_gpu": None}))
        triton.runtime.driver.set_active(_driver())
        # Padding is decided by timing.
        options = {"compile_threads": 1, "fx_graph_cache": False, "shape_padding": False}
        stack.enter_context(torch._inductor.config.patch(options))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        yield


def _returning(values: dict[str, object]) -> dict[str, object]:
    """Functions that return these values, whatever their arguments are."""
    return {name: staticmethod(lambda *_, value=value, **__: value) for name, value in values.items()}


def _on_host(fn: Callable[..., object]) -> Callable[..., object]:
    """The function; what it makes on the device is this machine's."""
    from tests.support.triton_cpu import Libraries

    def called(*args: object, **kwargs: object) -> object:
        with Libraries():
            return fn(*args, **kwargs)

    return called


def _driver() -> object:
    """Triton's, of the device."""
    import torch
    from triton.backends.compiler import GPUTarget

    facts = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}
    return types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=lambda device: facts),
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_device_interface=lambda: torch.cuda,
        is_active=lambda: True,
        get_active_torch_device=lambda: torch.device("cuda:0"),
    )


if __name__ == "__main__":
    from tests.support import fake_cuda  # this file runs under another name

    fake_cuda.load()
    import pytest

    sys.exit(pytest.main(sys.argv[1:]))
