"""Defects of torch's compiler, each with the function of torch that is replaced while a program is compiled.

A function below gets torch's function, and returns the one that takes its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, fx

from funcamp import _upstream


class Bug(NamedTuple):
    """A defect of torch that is worked around by changing torch while a program is compiled."""

    name: str
    why: str
    """What is wrong in torch, in one line; printed by `jit(..., explain=True)` and `doctor`."""
    evidence: str
    """The test that shows it, or torch's issue."""
    present: bool
    """Whether the installed torch has it."""
    places: tuple[str, ...]
    """The names of torch's functions that are replaced."""
    corrected: Callable[[Any], Any]
    """From torch's function to the one without the defect."""

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """Context manager: torch without the defect."""
        with contextlib.ExitStack() as stack:
            for place in self.places:
                path, _, name = place.rpartition(".")
                owner = _upstream.look_up(path)
                stack.enter_context(patch.object(owner, name, self.corrected(getattr(owner, name))))
            yield


BUGS: list[Bug] = []


def _bug(*places: str, why: str, evidence: str, present: bool = True) -> Callable[[Callable[[Any], Any]], object]:
    """Return a decorator that adds a defect by the name of the function that corrects it."""

    def add(corrected: Callable[[Any], Any]) -> None:
        BUGS.append(Bug(corrected.__name__, why, evidence, present, places, corrected))

    return add


@_bug(
    "torch._inductor.scheduler.SchedulerNode.recompute_size_and_body",
    why="Inductor loses the order of a write and a read, such as that of dropout's mask, when it fuses different loops",
    evidence="https://github.com/pytorch/pytorch/issues/177631, https://github.com/pytorch/pytorch/issues/185509",
    present=_upstream.LOST_WRITES,
)
def lost_order(recompute: Any) -> Any:
    """Keep the order of reads and writes.

    Inductor computes anew what a loop reads, and forgets two things that are not in the loop's body: that it must come
    after another operation (torch 2.11), and that the memory it reads was written since by an operation that works in
    place (before torch 2.15). On a CPU that is dropout's draw: the loop would read the mask before it is drawn, which
    is NaN.
    """
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch.utils._ordered_set import OrderedSet

    def recompute_and_keep_order(node: Any, *args: Any, **kwargs: Any) -> None:
        # Dependencies without an index. The call computes all anew from the loop's body, and would drop these.
        order = OrderedSet(dep for dep in node.read_writes.reads if isinstance(dep, (WeakDep, StarDep)))
        recompute(node, *args, **kwargs)
        reads_and_writes = node.read_writes.with_read(order) if order else node.read_writes
        # The present name of each buffer that was written in place: without it the loop would not wait for the write.
        node.set_read_writes(reads_and_writes.rename(node.mutation_renames))

    return recompute_and_keep_order


@_bug(
    "torch._inductor.codegen.cpp.CppKernel.cache_dtype_convert",
    why="Inductor reads a rounded value back unrounded, even with emulate_precision_casts",
    evidence="https://github.com/pytorch/pytorch/issues/185337",
    present=_upstream.UNROUNDED,
)
def unrounded(_: Any) -> Any:
    """Let a kernel forget the value before rounding."""
    return lambda *_: None


@_bug(
    "torch._inductor.codegen.cpp.CppVecKernel.store_reduction",
    why="C++ that Inductor generates declares the 16-bit copy of a sum once for each tensor that it is stored in",
    evidence="https://github.com/pytorch/pytorch/issues/194706",
)
def declared_twice(store: Any) -> Any:
    """Give each store a block, so that its copy of the sum is declared in there.

    The biases of `a(x) + b(t)` have one gradient, a sum over rows: the C++ compiler would refuse the program.
    """
    from torch._inductor.utils import IndentedBuffer

    def store_in_block(kernel: Any, *args: object) -> None:
        lines_before = kernel.reduction_suffix
        with patch.object(kernel, "reduction_suffix", IndentedBuffer()):
            store(kernel, *args)
            lines_of_store = kernel.reduction_suffix
        lines_before.writeline("{")
        lines_before.splice(lines_of_store)
        lines_before.writeline("}")

    return store_in_block


@_bug(
    "torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu._generate_index_put_fallback",
    "torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu._generate_scatter_fallback",
    why="C++ that Inductor generates ignores errors of index_put and scatter_reduce",
    evidence="https://github.com/pytorch/pytorch/pull/190909",
    present=_upstream.LOST_ERRORS,
)
def lost_errors(generate: Any) -> Any:
    """Generate the same calls, each in torch's check of its error code.

    A write to indices out of range would silently leave the tensor as it was.
    """

    def generate_checked(wrapper: Any, *args: object) -> None:
        write_line = wrapper.writeline

        def write_checked_line(text: object) -> None:
            if isinstance(text, str) and text.startswith("aoti_torch_"):  # a call, which returns an error code
                text = f"AOTI_TORCH_ERROR_CODE_CHECK({text.rstrip(';')});"
            write_line(text)

        with patch.object(wrapper, "writeline", write_checked_line):
            generate(wrapper, *args)

    return generate_checked


@_bug(
    "torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu.generate_fallback_kernel_with_runtime_lookup_python",
    why="C++ that Inductor generates takes a list of one tensor for the tensor, and the process dies",
    evidence="tests/upstream/test_upstream.py",
    present=_upstream.LIST_OF_ONE,
)
def list_of_one(call_python: Any) -> Any:
    """Take the results of an operation that returns a list as a list."""

    def call_for_list(
        wrapper: object, name: str, kernel: str, operation: Any, args: object, results: Any, *rest: Any
    ) -> None:
        returned = operation._schema.returns
        if len(results) == 1 and len(returned) == 1 and isinstance(returned[0].type, torch.ListType):
            results = [*results, None]  # only one result is taken for a tensor; of several, None is left out
        call_python(wrapper, name, kernel, operation, args, results, *rest)

    return call_for_list


#: Keyword arguments without which an operation computes the same numbers.
_WITHOUT_NUMBERS = ("layout", "device", "pin_memory", "memory_format")


def _has_other_keywords(node: fx.Node, named: dict[str, object]) -> bool:
    """Return whether a node has a keyword argument that a pattern does not name and that changes numbers."""
    unnamed = [name for name in node.kwargs if name not in named and name not in _WITHOUT_NUMBERS]
    if not unnamed:
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # not an operation of torch, and so not in a pattern
        return True
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    return any(node.kwargs[name] != defaults.get(name) for name in unnamed)


@_bug(
    "torch._inductor.pattern_matcher._TargetArgsExpr._match",
    why="Inductor's patterns lose keyword arguments that they do not name, such as alpha of torch.add(a, x @ y, "
    "alpha=c)",
    evidence="https://github.com/pytorch/pytorch/issues/167313",
    present=_upstream.LOST_KEYWORDS,
)
def lost_keywords(match: Any) -> Any:
    """Match no operation with keyword arguments that the pattern does not name, as torch does from 2.15 on.

    `torch.add(a, x @ y, alpha=0.1)` would become `a + x @ y`, and `torch.cumsum(ones, 0, dtype=...)` get another dtype.
    So running averages of products (K-FAC, Shampoo, vector-quantized codebooks) would get other numbers.
    """
    from torch._inductor.pattern_matcher import FailedMatch

    def match_all_keywords(pattern: Any, node: object, context: object) -> object:
        if isinstance(node, fx.Node) and _has_other_keywords(node, pattern.kwargs):
            return FailedMatch("function_mismatch: node={}, pattern={}", node, pattern)
        return match(pattern, node, context)

    return match_all_keywords


@_bug(
    "torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder._add_peephole_patterns",
    why="Inductor makes zeros of a product with the integer 0, also of factors that are not finite",
    evidence="tests/upstream/test_upstream.py",
    present=_upstream.LOST_NAN,
)
def lost_nan(find_zeros: Any) -> Any:
    """Make zeros of products of integers only, as torch does from 2.14 on.

    `loss + 0 * unused.sum()`, with which people keep unused parameters in the graph, would hide an overflow from the
    scaler.
    """

    def find_zeros_of_integers(folder: Any) -> None:
        find_zeros(folder)
        for node in list(folder.node_replacements):
            value = node.meta.get("val")
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                del folder.node_replacements[node]
                del folder.node_replacements_shapes[node]

    return find_zeros_of_integers


def _reads_integers(operation: fx.Node) -> bool:
    values = [node.meta.get("val") for node in operation.all_input_nodes]
    return any(isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) for value in values)


def _names(computed: Any) -> str:
    """Return the names of the operations on integers that a loop of a kernel computes."""
    operations = computed.node.get_origins() if computed is not None else ()
    return ", ".join(sorted({str(one.target) for one in operations if _reads_integers(one)}))


@_bug(
    "torch._inductor.codegen.cpp.CppKernel.check_bounds",
    why="C++ that Inductor generates names no operation in the error of an index out of range",
    evidence="tests/jit/test_jit.py",
)
def unnamed_index(check: Any) -> Any:
    """Name the operations.

    "index out of bounds: 0 <= tmp3 < 10" becomes "aten.embedding.default: index out of bounds: 0 <= tmp3 < 10".
    """

    def check_with_names(kernel: Any, *args: object) -> None:
        check_index = kernel.indirect_assert

        def check_index_with_names(*args: object) -> str:
            line: str = check_index(*args)
            names = _names(kernel.current_node)
            return line.replace('"index', f'"{names}: index') if names else line

        with patch.object(kernel, "indirect_assert", check_index_with_names):
            check(kernel, *args)

    return check_with_names


@_bug(
    "torch._inductor.cpp_builder._get_optimization_cflags",
    why="GCC 12 compiles torch's transposition of 16-bit tiles wrong for Intel's Sapphire Rapids",
    evidence="tests/jit/test_transposes.py",
)
def mixed_transposes(flags_of_torch: Any) -> Any:
    """Add a flag for GCC.

    GCC 12 fails if a file transposes tiles twice. A kernel that transposes float16 or bfloat16 tensors, such as
    attention's keys, would read memory that nothing has written: NaN, or other numbers. The fault is in what GCC makes
    of straight code (`-ftree-slp-vectorize`, part of -O3); Inductor writes vectors itself and already leaves out GCC's
    own for loops.
    """
    from torch._inductor.cpp_builder import _is_gcc

    def with_a_flag(cpp_compiler: str, *args: object, **kwargs: object) -> tuple[list[str], list[str]]:
        compiler_flags, linker_flags = flags_of_torch(cpp_compiler, *args, **kwargs)
        if _is_gcc(cpp_compiler):
            compiler_flags = [*compiler_flags, "fno-tree-slp-vectorize"]
        return compiler_flags, linker_flags

    return with_a_flag
