"""The GPU's program of a jitted step, made and executed on a machine without a GPU.

In a process of `fake_cuda` a step that is compiled inside `on_gpu` is traced and compiled for CUDA as `jit` does it,
while state and batch are this machine's: called, it runs the generated program, its Triton kernels by Triton's
interpreter, with blocks and grids of Inductor's choice. What this cannot show: races, alignment, flushed denormals, the
order of sums within a block, cuBLAS's and cuDNN's rounding.
"""

from __future__ import annotations

import contextlib
import math
import re
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode

from funcamp import jit
from funcamp._jit import executable as _executable
from funcamp._jit import trace_step as _trace_step
from funcamp._jit.compile import target_of
from funcamp._jit.passes.program import Steps, Target
from tests.support import triton_cpu
from tests.support.fake_cuda import pretended

executable: Any = _executable
tracing: Any = _trace_step

_BYTES = {"fp64": 8, "i64": 8, "fp32": 4, "i32": 4, "u32": 4, "fp16": 2, "bf16": 2, "i16": 2, "i8": 1, "u8": 1, "i1": 1}
_BYTES |= {"fp8e4nv": 1, "fp8e5": 1}
#: A loop's variable, or a part of it: x1 = ((xindex // 64) % 12).
_VARIABLE = r"^\s+(\w+) = \(*([a-z]\w*index)(?: // (\d+)\)*)?(?: % (\d+)\)*)?$"


class Kernel(NamedTuple):
    """A generated kernel of a program."""

    name: str
    source: str
    launches: int
    """How often one call of the program runs it."""

    @property
    def ranges(self) -> dict[str, int]:
        """The lengths of its loops."""
        numels = re.findall(r"^\s+(\w+)numel = (\d+)$", self.source, re.MULTILINE)
        return {f"{name}index": int(count) for name, count in numels}

    @property
    def elements(self) -> int:
        """How often its innermost loop runs."""
        return math.prod(self.ranges.values())

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that a launch reads and writes: each load and store by itself, each address once.

        An index that is itself loaded counts as another for every element; what a mask leaves out counts too.
        """
        pointers = dict(re.findall(r"'(\w+)': '\*(\w+)'", self.source))
        ranges = self.ranges
        for name, base, divisor, size in re.findall(_VARIABLE, self.source, re.MULTILINE):
            rest = -(-ranges[base] // int(divisor or 1))
            ranges[name] = min(rest, int(size)) if size else rest
        moved = {"load": 0, "store": 0}
        for kind, pointer, index in re.findall(r"tl\.(load|store)\((\w+) \+ \((.*?)\)[,)]", self.source):
            names = set(re.findall(r"[a-z]\w*", index))
            indirect = any(name.startswith("tmp") for name in names)
            count = self.elements if indirect else min(self.elements, math.prod(ranges.get(name, 1) for name in names))
            moved[kind] += count * _BYTES[pointers[pointer]]
        return moved["load"], moved["store"]


class Program(NamedTuple):
    """The text of a program, and what one call of it does."""

    code: str
    flops: int
    """Of matrix products, convolutions and attention."""

    @property
    def body(self) -> str:
        """The calls, one a line."""
        return self.code[self.code.index("def call(") :]

    @property
    def kernels(self) -> list[Kernel]:
        """The generated ones."""
        launched = Counter(re.findall(r"(triton_\w+)\.run\(", self.body))
        found = re.findall(r"(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)'''", self.code, re.DOTALL)
        return [Kernel(name, source, launched[name]) for name, source in found]

    @property
    def launches(self) -> int:
        """Of generated kernels."""
        return sum(kernel.launches for kernel in self.kernels)

    @property
    def libraries(self) -> Counter[str]:
        """Calls of cuBLAS, cuDNN and ATen, by name."""
        return Counter(re.findall(r"(?:extern_kernels|torch\.ops\.aten)\.(\w+)[\w.]*\(", self.body))

    @property
    def products_in_place(self) -> int:
        """Matrix products that are written into a part of a larger tensor."""
        parts = re.findall(r"(buf\d+) = reinterpret_tensor\(.*# alias", self.body)
        return len(set(parts) & set(re.findall(r"extern_kernels\.\w*mm\(.*out=(buf\d+)\)", self.body)))

    @property
    def allocations(self) -> int:
        """On the GPU."""
        return self.body.count("empty_strided_cuda(")

    @property
    def on_host(self) -> list[str]:
        """Lines that read a value on the host, or allocate there."""
        return re.findall(r".*(?:\.item\(|empty_strided_cpu|cpu').*", self.body)

    def of(self, *operations: str) -> list[Kernel]:
        """The kernels whose names have all of these operations."""
        return [kernel for kernel in self.kernels if all(operation in kernel.name for operation in operations)]


class _Written(BaseException):
    """No Exception, which Inductor would wrap."""


def program_of(step: Callable[[Any, Any], Any], state: object, batch: object, **options: Any) -> Program:
    """The program of `jit(step, **options)`; nothing runs, so state and batch may be fake."""
    run = jit(step, **options)
    flat, spec = _pytree.tree_flatten(state)
    places = [place for place, leaf in enumerate(flat) if isinstance(leaf, Tensor)]

    def filled(leaves: list[Tensor]) -> object:
        values = dict(zip(places, leaves))
        return _pytree.tree_unflatten([values.get(place) for place in range(len(flat))], spec)

    def stop(code: str) -> None:
        raise _Written(code)

    owned = types.SimpleNamespace(leaves=[flat[place] for place in places], filled=filled)
    memory: Any = types.SimpleNamespace(current=owned, metadata=None, graphs=None)
    given = [leaf for leaf in _pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    with on_gpu(stop):
        graph = tracing.trace_step(step, run._options, memory, batch, given, {})
        with pretended(), graph.mode, torch.no_grad(), FlopCounterMode(display=False) as counter:
            graph.module(*graph.examples)
        try:
            target = target_of(graph, "inductor", frozenset({"cuda"}), exact=False)
            executable.compile_traced(graph, target, run._options, None)
        except _Written as written:
            return Program(str(written), counter.get_total_flops())
    raise AssertionError("nothing was compiled")


@contextlib.contextmanager
def on_gpu(written: Callable[[str], None] = lambda code: None) -> Iterator[None]:
    """A region in which steps are compiled for the GPU; written is called with the text of each program."""
    triton_cpu.complete()
    trace, compile_graph = tracing.trace, executable.compile_graph

    def traced(fn: object, args: list[Tensor], home: object, **options: object) -> object:
        with pretended(), _chosen_attention():
            return trace(fn, _like(args), {"cuda"}, **options)

    def compiled(graph: object, target: Target, *args: object, steps: Steps | None = None, **_: object) -> object:
        on_cuda = target._replace(devices=frozenset({"cuda"}))
        with pretended(), triton_cpu.loaded(), mock.patch.object(GraphLowering, "save_output_code", written):
            run = compile_graph(graph, on_cuda, *args, steps=steps)

        def call(values: list[Tensor]) -> object:
            with triton_cpu.executed():
                return run(values)

        return call

    # The state is on one device, its successor in the trace on the other.
    with (
        mock.patch.multiple(tracing, trace=traced, check_like=lambda *_: None),
        mock.patch.object(executable, "compile_graph", compiled),
    ):
        yield


def _like(tensors: list[Tensor]) -> list[Tensor]:
    """On the GPU."""
    with FakeTensorMode():
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in tensors]


@contextlib.contextmanager
def _chosen_attention() -> Iterator[None]:
    """What torch would choose on an H100; a build for CPUs has nothing that chooses."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, dropout_p: float = 0.0, is_causal: bool = False) -> Tensor:
        if q.dtype.itemsize == 2:
            flash = torch.ops.aten._scaled_dot_product_flash_attention.default
            out: Tensor = flash(q, k, v, dropout_p, is_causal)[0]
        else:
            efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
            out = efficient(q, k, v, None, True, dropout_p, is_causal)[0]
        return out

    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        yield
