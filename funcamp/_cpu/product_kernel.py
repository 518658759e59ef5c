"""`funcamp::product`: a float32 matrix product that Inductor generates as a kernel of the program on a CPU.

    out[i, j] = sum over l of  left[i, l] * right[l, j]

The kernel calls `brgemm`, of whose blocks oneDNN's own products are made (torch's ATen/native/CPUBlas.h). If oneDNN
has none for this processor, `brgemm` calls MKL or OpenBLAS. Compared with a call of `aten.mm` there is no tensor, no
dispatch and no oneDNN primitive between two kernels, and pointwise operations on the result become part of the loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import patch

import torch

from funcamp import _upstream
from funcamp._upstream.renamed import renamed

product: Any = renamed("product", torch.ops.aten.mm.default, torch.ops.aten.mm.default)

#: Rows, columns and terms of a sum that one call of `brgemm` takes. The blocks of both factors stay in a core's cache:
#: from 256 x 256 x 256 to 1024 x 3072 x 768 this reaches 104 to 116 of the 118 GFLOP/s of a core of an AMD EPYC.
BLOCK = 256
#: Number of multiplications from which on a product is shared among threads: about two microseconds of one.
SHARED = 2**17
#: Number of results that a thread keeps on its stack until they have their last value.
_MAX_ON_STACK = 2**14

_SOURCE = r"""
{{template.header().getvalue()}}
namespace at::native::cpublas {
void brgemm(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, const bool, const float*, const float*, float*, bool);
}
extern "C" {{kernel.def_kernel(inputs={"left": left, "right": right}, outputs={"out": out}, aliases=aliases)}}
{
    // A factor may begin inside a larger tensor.
    const float* const first_left = &({{kernel.index(left, [0, 0])}});
    const float* const first_right = &({{kernel.index(right, [0, 0])}});
{%- if split.shares > 1 %}
    #pragma omp parallel for num_threads({{split.shares}}) schedule(static, 1)
{%- endif %}
    for (int64_t share = 0; share < {{split.shares}}; share++) {
        const int64_t row_start = share * {{split.rows}};
        const int64_t row_end = std::min<int64_t>({{m}}, row_start + {{split.rows}});
        if (row_start >= row_end) continue;
{%- if is_local %}
        {{define_local(kernel)}}
{%- endif %}
{%- set sums = local_part(kernel) if is_local else part(kernel, product_buffer) %}
        float* const first_sum = &({{kernel.index(sums, [0, 0])}});
        constexpr int64_t sums_stride = {{kernel.stride(sums, 0)}};
        for (int64_t i = row_start; i < row_end; i += {{block}})
            for (int64_t j = 0; j < {{n}}; j += {{block}})
                for (int64_t l = 0; l < {{k}}; l += {{block}})
                    at::native::cpublas::brgemm(
                        std::min<int64_t>({{block}}, row_end - i),
                        std::min<int64_t>({{block}}, {{n}} - j),
                        std::min<int64_t>({{block}}, {{k}} - l),
                        {{left_stride}}, {{right_stride}}, sums_stride, l > 0,
                        first_left + i * {{left_stride}} + l, first_right + l * {{right_stride}} + j,
                        first_sum + (i - row_start) * sums_stride + j, false);
        {{kernel.store_output(part(kernel, out_2d), sums, product_buffer, epilogue_nodes,
                              offsets=offsets, reindexers=reindexers)}}
    }
}
"""


class Split(NamedTuple):
    """How the rows of a product are divided among threads."""

    shares: int
    rows: int
    """Of a share."""

    @property
    def is_shared(self) -> bool:
        """Return whether several threads take part."""
        return self.shares > 1


def split_of(m: int, n: int, k: int, threads: int) -> Split:
    """Return how a product is divided: not at all if there is little to do."""
    if m * n * k < SHARED or threads < 2:
        return Split(1, m)
    rows_rounded_up = -(-m // threads)
    return Split(threads, rows_rounded_up)


#: A buffer and a kernel of Inductor, which has no types for them.
_Buffer: TypeAlias = Any
_Kernel: TypeAlias = Any


class _Epilogue(NamedTuple):
    """What follows a product in its kernel: the pointwise operations that Inductor has put there."""

    out: _Buffer
    """The buffer that is written last."""
    out_2d: _Buffer
    """The same as rows and columns of the product."""
    product_buffer: _Buffer
    """The buffer that the following operations read as the product."""
    epilogue_nodes: list[_Buffer]
    reindexers: list[object]
    aliases: dict[str, str]
    """Names of buffers that are in the memory of the last one."""
    is_local: bool
    """Whether the product needs memory besides that of the last buffer."""


class _Inductor(NamedTuple):
    """What the kernel needs of Inductor, found by name; it has no public types."""

    register_lowering: Any
    template_class: Any
    view_as_product: Any
    """Returns a buffer as rows and columns of a product."""
    thread_count: Any
    virtualized: Any
    """What belongs to the program that is being compiled."""
    ir: Any


def _find_inductor() -> _Inductor:
    return _Inductor(
        # First, because only this imports all that the others need: torch._inductor has circular imports.
        register_lowering=_upstream.find("torch._inductor.lowering.register_lowering"),
        template_class=_upstream.find("torch._inductor.codegen.cpp_template.CppTemplate"),
        view_as_product=_upstream.find("torch._inductor.codegen.cpp_gemm_template.gen_2d_view_of_epilogue_buf"),
        thread_count=_upstream.find("torch._inductor.utils.parallel_num_threads"),
        virtualized=_upstream.find("torch._inductor.virtualized.V"),
        ir=_upstream.find("torch._inductor.ir"),
    )


@functools.cache
def register_kernel() -> bool:
    """Register the kernel that Inductor generates for `product`; return whether the installed torch can generate it."""
    inductor = _find_inductor()
    if not _upstream.usable(*inductor):
        return False
    template_class = _make_template_class(inductor)
    ir = inductor.ir

    def contiguous(factor: object) -> _Buffer:
        buffer: _Buffer = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(factor))
        return buffer

    def lower(left: object, right: object) -> object:
        """Return the product in Inductor's form; both factors are contiguous, copied if they are not."""
        factors = [contiguous(left), contiguous(right)]
        m, k = factors[0].get_size()
        n = factors[1].get_size()[1]
        layout = ir.FixedLayout(factors[0].get_device(), torch.float32, [m, n])
        split = split_of(int(m), int(n), int(k), inductor.thread_count())
        output: object = template_class(factors, layout, split).generate().output_node()
        return output

    inductor.register_lowering(product, type_promotion_kind=None)(lower)
    return True


def _make_template_class(inductor: _Inductor) -> Callable[..., Any]:
    """Return the class that writes the C++ of one product and of what follows it."""

    class ProductTemplate(inductor.template_class):  # type: ignore[misc, name-defined]
        """Writes the C++ of one product and of what follows it."""

        def __init__(self, factors: list[_Buffer], layout: object, split: Split) -> None:
            super().__init__("product", factors, layout, split.shares)
            self._split = split

        def render(
            self,
            kernel: _Kernel,
            template_buffer_node: _Buffer | None = None,
            flag_template_buffer_has_other_users: bool | None = None,
            epilogue_nodes: list[_Buffer] | None = None,
            **_: object,
        ) -> str:
            """Return the C++; the names are those that Inductor gives."""
            split = self._split
            left, right = self.input_nodes
            m, k = left.get_size()
            n = right.get_size()[1]
            product_buffer = self.output_node if template_buffer_node is None else template_buffer_node
            epilogue = _epilogue_of(
                inductor,
                product_buffer,
                epilogue_nodes or [],
                is_read=bool(flag_template_buffer_has_other_users),
            )
            values = {
                "template": self,
                "kernel": kernel,
                "left": left,
                "right": right,
                "m": m,
                "n": n,
                "k": k,
                "left_stride": left.get_stride()[0],
                "right_stride": right.get_stride()[0],
                "block": BLOCK,
                "split": split,
                "offsets": ("row_start", 0) if split.is_shared else (0, 0),
                "part": functools.partial(_share_of, split),
                "define_local": functools.partial(_define_local, [split.rows, int(n)]),
                "local_part": functools.partial(_local_share, split),
            }
            with self._dtype_known(epilogue.product_buffer):
                return str(self._template_from_string(_SOURCE).render(values | epilogue._asdict()))

        def _dtype_known(self, buffer: _Buffer) -> AbstractContextManager[object]:
            """Context manager: Inductor knows the dtype of a buffer that only this kernel has."""
            program = inductor.virtualized.graph
            if buffer.get_name() in program.name_to_buffer:
                return nullcontext()
            return patch.object(program, "get_dtype", self._fake_get_dtype(buffer))

    return ProductTemplate


def _share_of(split: Split, kernel: _Kernel, buffer: _Buffer) -> _Buffer:
    """Return a thread's rows of a buffer."""
    return kernel.slice_nd(buffer, [("row_start", "row_end"), ()]) if split.is_shared else buffer


def _define_local(sizes: list[int], kernel: _Kernel) -> object:
    """Return the C++ of memory for a thread's share."""
    rows, columns = sizes
    fits_on_stack = rows * columns <= _MAX_ON_STACK
    define = kernel.define_stack_allocated_buffer if fits_on_stack else kernel.define_buffer
    return define("sums", sizes)


def _local_share(split: Split, kernel: _Kernel) -> _Buffer:
    """Return what a share needs of that memory; the last share may be smaller than the others."""
    buffer = kernel.local_buffers["sums"]
    return kernel.slice_nd(buffer, [(0, "row_end - row_start"), ()]) if split.is_shared else buffer


def _epilogue_of(inductor: _Inductor, buffer: _Buffer, nodes: list[_Buffer], *, is_read: bool) -> _Epilogue:
    """Return what follows a product.

    Args:
        inductor: what the kernel needs of Inductor.
        buffer: the product.
        nodes: the pointwise operations that Inductor put into its kernel.
        is_read: whether others than these read the product, so that it must be stored too.
    """
    if not nodes:
        return _Epilogue(buffer, buffer, buffer, [], [], {}, is_local=False)
    ir = inductor.ir
    out = nodes[-1]
    out_2d, _ = inductor.view_as_product(out, buffer, [out], [], [None])
    # Each by itself: if the last one has the product's shape, torch takes all for operations of that shape.
    reindexers: list[object] = []
    for node in nodes:
        inductor.view_as_product(node, buffer, [node], reindexers, [None])
    product_buffer = buffer
    stored_nodes = list(nodes)
    if is_read:
        # The first of what follows is a copy of the product to where the others read it.
        product_buffer = ir.Buffer(name=f"{buffer.get_name()}_sums", layout=buffer.layout)
        copy = ir.Pointwise(
            device=buffer.get_device(),
            dtype=buffer.get_dtype(),
            inner_fn=product_buffer.make_loader(),
            ranges=buffer.get_size(),
        )
        stored_nodes.insert(0, ir.ComputedBuffer(name=buffer.get_name(), layout=buffer.layout, data=copy))
        reindexers.insert(0, None)
    return _Epilogue(
        out=out,
        out_2d=out_2d,
        product_buffer=product_buffer,
        epilogue_nodes=stored_nodes,
        reindexers=reindexers,
        aliases={product_buffer.get_name(): out.get_name()},
        # The sums are float32: only such a result has room for them.
        is_local=is_read or out.get_dtype() != torch.float32,
    )
