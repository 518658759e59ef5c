"""Float32 and small bfloat16 products on a CPU as kernels of the program (`_cpu/product_kernel.py`).

A call of torch's product costs one to twelve microseconds besides the product: a tensor, a dispatch, in bfloat16 a
primitive of oneDNN. Nothing can be computed in its loop. On processors of AMD torch's float32 products (MKL) do not use
the widest registers.

- Small products always become kernels. A product in bfloat16 is one of float32 with casts, which become part of the
  loops around it. What is computed in its loop reads the sum after the cast (`emulate_precision_casts`).
- Larger ones of float32 do if each thread has some rows of the left factor: threads share a kernel by rows, and each of
  them reads the right factor. In bfloat16 processors multiply faster than in float32.

Float16 is left to torch: what overflows there must be infinite. So is everything with exact=True.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcamp._cpu.product_kernel import product, register_kernel, split_of
from funcamp._jit.passes.graph_pass import GraphPass
from funcamp._jit.passes.program import Pass, Program

_aten = torch.ops.aten
_CAST: Any = torch.ops.prims.convert_element_type.default
#: Number of multiplications below which a product always becomes a kernel: about ten microseconds of one thread.
SMALL = 2**20
#: Number of rows for each thread from which on a larger one does.
ROWS = 16


class ProductsAsKernels(GraphPass):
    """Replaces products by `funcamp::product` in a graph that Inductor has already simplified."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Change the graph in place."""
        for node in list(graph.nodes):
            if node.target in (_aten.mm.default, _aten.addmm.default) and not node.kwargs and _becomes_kernel(node):
                _replace(graph, node)


def _becomes_kernel(node: torch.fx.Node) -> bool:
    """Return whether a product, of the last two arguments, is to be a kernel of the program."""
    left, right = (factor.meta["val"] for factor in node.args[-2:])  # type: ignore[union-attr]
    result: Tensor = node.meta["val"]
    if result.dtype not in (torch.float32, torch.bfloat16) or result.device.type != "cpu":
        return False
    sizes = [*left.shape, right.shape[1]]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return False
    m, k, n = sizes
    if m * k * n < SMALL:
        return True
    return result.dtype == torch.float32 and split_of(m, n, k, torch.get_num_threads()).rows >= ROWS


def _replace(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Put the kernel in the place of a product, with casts and a sum around it."""
    result_example = node.meta["val"]
    sums_example = result_example.float()

    def call(operation: Any, arguments: tuple[Any, ...], example: Tensor) -> torch.fx.Node:
        new_node = graph.call_function(operation, arguments)
        new_node.meta = {**node.meta, "val": example}
        return new_node

    def as_float32(factor: Any) -> torch.fx.Node:
        example = factor.meta["val"]
        if example.dtype == torch.float32:
            return factor  # type: ignore[no-any-return]
        return call(_CAST, (factor, torch.float32), example.float())

    with graph.inserting_before(node):
        *bias, left, right = node.args
        replacement = call(product, (as_float32(left), as_float32(right)), sums_example)
        if bias:
            replacement = call(_aten.add.Tensor, (replacement, bias[0]), sums_example)
        if result_example.dtype != torch.float32:
            replacement = call(_CAST, (replacement, result_example.dtype), result_example)
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)


def _run(program: Program) -> Program:
    if not register_kernel():
        return program
    kernels = ProductsAsKernels(program.cache_name)
    return program._replace(
        options={**program.options, "post_grad_custom_post_pass": kernels},
        may_fail=(*program.may_fail, PASS.name),  # a torch without `brgemm`
    )


PASS = Pass(
    name="products",
    why="products on a CPU are kernels of the program, large ones in float32 only",
    evidence="benchmarks/passes.py",
    where=lambda target: target.by_inductor and target.on_cpu and not target.exact,
    run=_run,
)
