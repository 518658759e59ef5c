"""What funcamp works around in torch: each test fails on a version for which `_upstream` says otherwise."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from funcamp import _upstream


def compiled(fn: Any, *args: Any, backend: str = "inductor") -> Any:
    return torch.compile(fn, fullgraph=True, backend=backend)(*args)


def agrees(fn: Callable[..., Tensor], *args: Any, backend: str = "inductor") -> bool:
    """Whether a compiled function returns what it returns eagerly."""
    expected = fn(*args)
    found: Tensor = compiled(fn, *args, backend=backend)
    return torch.equal(found.nan_to_num(77), expected.nan_to_num(77))


def raised(call: Callable[[], object]) -> str:
    """The text of the error that a call raises; nothing if it does not."""
    try:
        call()
    except Exception as error:
        return str(error)
    return ""


# What generated code gets wrong.


def swapped(a: Tensor, b: Tensor) -> None:
    new, old = a + 1, a.clone()
    a.copy_(new)
    b.copy_(old)


def written_back() -> bool:
    a, b = torch.zeros(3), torch.full((3,), 9.0)
    compiled(swapped, a, b)
    return b.tolist() == [0.0] * 3


def replaced(leaf: Tensor, rows: Tensor) -> Tensor:
    result = leaf.slice_scatter(rows, 0, 1, 3)
    leaf.zero_()
    return result


def chosen_rows() -> bool:
    def rows(x: Tensor, mask: Tensor) -> Tensor:
        chosen = x[mask]
        return (torch.cat([chosen, chosen], 1).view(-1, 4) * torch.arange(4.0)).sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return agrees(rows, torch.arange(24.0).view(6, 4), torch.arange(6) < 3)


def error_of_index_put() -> bool:
    def write(x: Tensor, mask: Tensor) -> Tensor:
        return x.index_put((mask,), torch.arange(2.0, device=x.device))

    with torch._inductor.config.patch(cpp_wrapper=True):
        return "index_put" in raised(lambda: compiled(write, torch.zeros(4), torch.arange(4) < 3))


def read_before_a_write() -> bool:
    def shift(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        row, largest, before = b[1].clone(), a.amax(1, keepdim=True).expand(4, 4), a.clone()
        scanned = a.cummax(0).values
        b.copy_(largest.clone())
        a.copy_(scanned.clone())
        return row, before

    row, _ = compiled(shift, torch.zeros(4, 4), torch.ones(4, 4))
    return bool(row.tolist() == [1.0] * 4)


def mask_of_dropout() -> bool:
    def dropped(x: Tensor, first: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, last: Tensor) -> Tensor:
        hidden = F.gelu(F.layer_norm(x @ first.t() + bias, (16,), scale, shift))
        mask = torch.bernoulli(torch.empty_like(hidden), 0.9) / 0.9
        kept = hidden * mask
        out = kept @ last.t()
        upper = 2 * out / 8
        first_gradient, last_gradient = (upper @ last * mask).t() @ x, upper.t() @ kept
        first.copy_(first - 0.01 * first_gradient)
        last.copy_(last - 0.01 * last_gradient)
        return out.square().mean()

    sizes = [(8, 6), (16, 6), (16,), (16,), (16,), (1, 16)]
    return not compiled(dropped, *[torch.randn(size) for size in sizes]).isnan()


def rounded() -> bool:
    with torch._inductor.config.patch(emulate_precision_casts=True):
        return agrees(lambda x: x.half().float(), torch.tensor([1.0 + 2.0**-12]))


def exact_margin() -> bool:
    def gradient(x: Tensor) -> Any:
        return torch.func.grad(lambda x: F.soft_margin_loss(x, torch.full_like(x, 2.0)))(x)

    x = torch.full((64,), 7.5)
    return torch.allclose(compiled(gradient, x), gradient(x), atol=0)


def smooth_gradient(x: Tensor) -> Any:
    return torch.func.grad(lambda x: F.smooth_l1_loss(x, torch.zeros_like(x)))(x)


def keywords() -> bool:
    # Up to torch 2.12 there is no pattern that loses alpha; the one for cumsum loses the dtype.
    as_asked = compiled(lambda: torch.cumsum(torch.full((3, 4), 2.7), 0, dtype=torch.int64)).dtype == torch.int64
    return as_asked and agrees(lambda a, x: torch.add(a, x @ x, alpha=0.5), torch.zeros(2, 2), torch.ones(2, 2))


def permuted(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    order = torch.randperm(4)
    return x[torch.randperm(4)], order[order], order


def permutations() -> bool:
    found: list[Tensor] = []  # an error, or other rows
    return not raised(lambda: found.extend(compiled(permuted, torch.ones(4)))) and torch.equal(
        found[1], found[2][found[2]]
    )


def pooled_at_the_edge(x: Tensor) -> Any:
    return torch.func.grad(lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True).square().sum())(x)


def shrunk(gradient: Tensor) -> Any:
    return torch.ops.aten.upsample_nearest2d_backward(gradient, [4, 4], [1, 1, 8, 8], 0.6, 0.6)


NAN, PADDED = torch.tensor([[1.0, float("nan"), 0.5]]), torch.tensor([[0, 1, -1, -1, -1]])
#: By what shows the defect: whether torch is right, and whether the installed one has the defect.
INDUCTOR: dict[str, tuple[Callable[[], bool], bool]] = {
    "inputs are written back in their order": (written_back, _upstream.VERSION < (2, 15)),
    "a result is computed in an input": (lambda: agrees(replaced, torch.ones(4), torch.full((2,), 5.0)), True),
    "other rows are read if a shape follows from values": (
        chosen_rows, _upstream.VERSION >= (2, 12) and _upstream.WRONG_ROWS
    ),
    "C++ forgets an error": (error_of_index_put, _upstream.LOST_ERRORS),
    "a write comes before a read": (read_before_a_write, _upstream.LOST_ORDER),
    "memory is read before it is written in place": (mask_of_dropout, _upstream.LOST_WRITES),
    "an unrounded value is read": (rounded, _upstream.UNROUNDED),
    "a sum that is stored twice is declared twice": (
        lambda: "at_BFloat16_tmp_acc0_vec"
        not in raised(lambda: compiled(lambda x: (x.sum(0), x.sum(0, keepdim=True)), torch.ones(32, 16).bfloat16())),
        True,
    ),
    "a margin of NaN is a number": (lambda: agrees(lambda x: F.multi_margin_loss(x, PADDED[0, :1]), NAN), True),
    "a smooth loss of NaN has a gradient": (lambda: agrees(smooth_gradient, NAN), True),
    "a shrunk NaN is a number": (lambda: agrees(F.softshrink, NAN), _upstream.NAN_SHRUNK),
    "a large soft margin's gradient is inexact": (exact_margin, True),
    "patterns lose keyword arguments": (keywords, _upstream.LOST_KEYWORDS),
    "products with zero are zeros": (lambda: agrees(lambda x: x * 0, NAN), _upstream.LOST_NAN),
    "classes after the end count": (
        lambda: agrees(
            F.multilabel_margin_loss, torch.tensor([[1.0, -1.0, 0.5, 0.3, -0.2]]), PADDED, backend="aot_eager"
        ),
        _upstream.PADDED_TARGETS,
    ),
    "rows taken by a permutation": (permutations, True),
    "a window over the edge is a whole one": (
        lambda: agrees(pooled_at_the_edge, torch.arange(81.0).view(1, 1, 9, 9)), True
    ),
    "a factor is the ratio of sizes": (lambda: agrees(shrunk, torch.arange(16.0).view(1, 1, 4, 4)), True),
}  # fmt: skip


@pytest.mark.thorough  # it depends on torch only
@pytest.mark.inductor
@pytest.mark.parametrize("name", INDUCTOR)
def test_generated_code_is_wrong_where_it_is_said(name: str) -> None:
    is_right, is_present = INDUCTOR[name]
    assert is_right() != is_present


# What Dynamo, vmap and kernels get wrong.


class Seven(torch.autograd.Function):
    """A backward that is told from that of the forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 7 * g


class Forward(Seven):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent


def direct(x: Tensor) -> Any:
    return Seven.apply(x)


def squared(x: Tensor) -> Any:
    return Seven.apply(x.view_as(x)) ** 2


def batched_gradient(x: Tensor) -> Any:
    return torch.func.vmap(torch.func.grad(squared))(x[None])


def by_dynamo(fn: Any) -> Callable[[], bool]:
    """Whether Dynamo keeps the gradient of a function of a number."""
    return lambda: agrees(fn, torch.tensor(2.0), backend="aot_eager")


def leaf_in_a_graph() -> bool:
    def fn(x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            grad: Tensor = torch.autograd.grad(leaf.square(), leaf)[0]
            return grad

    with torch._dynamo.config.patch(trace_autograd_ops=True), torch.no_grad():
        return "requires_grad_" not in raised(by_dynamo(fn))


def float8_rows() -> object:
    x = torch.ones(16, 16).to(torch.float8_e4m3fn)
    return torch._scaled_mm(x, x.t(), scale_a=torch.ones(16, 1), scale_b=torch.ones(1, 16), out_dtype=torch.bfloat16)


def layout_of_a_batch_norm() -> bool:
    # The batch norms in `kernel_layouts` can go when this is right.
    def stride_of(x: Tensor) -> tuple[int, ...]:
        return torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[0].stride()

    x = torch.ones(2, 4, 3).transpose(1, 2)
    expected = stride_of(x)
    with FakeTensorMode() as mode:
        return stride_of(mode.from_tensor(x)) == expected


def decomposed_batch_norm() -> bool:
    arguments = torch.ones(2, 3).bfloat16(), torch.ones(3), torch.ones(3), None, None, True, 0.1, 1e-5
    decomposition = torch._decomp.decomposition_table[torch.ops.aten.native_batch_norm.default]
    return bool(decomposition(*arguments)[2].dtype == torch.native_batch_norm(*arguments)[2].dtype)


def workspace_of_an_lstm() -> bool:
    x, hidden, sizes = torch.ones(5, 4, 8), torch.zeros(4, 16), list[int]()
    weights = torch.ones(64, 8), torch.ones(64, 16), torch.ones(64), torch.ones(64)
    layer = torch.ops.aten.mkldnn_rnn_layer.default
    with torch.no_grad():
        found = layer(x, *weights, hidden, hidden, False, sizes, 2, 16, 1, True, False, True, True)
    return found[-1] is not None


def has_rule(call: Callable[..., Any]) -> Callable[[], bool]:
    """Whether vmap has a rule, which is missed with an error or a warning."""
    return lambda: "atching rule" not in raised(lambda: torch.func.vmap(call)(torch.ones(2, 3), torch.ones(2, 3)))


#: The same without generated code. For in-place calls see `_optim.pure_calls._UNBATCHED`.
OTHERS: dict[str, tuple[Callable[[], bool], bool]] = {
    "vmap of addcdiv_": (has_rule(lambda x, y: x.addcdiv_(y, y)), True),
    "vmap of addcmul_": (has_rule(lambda x, y: x.addcmul_(y, y)), True),
    "vmap of clamp_": (has_rule(lambda x, y: x.clamp_(0.0, 1.0)), True),
    "vmap of lerp_": (has_rule(lambda x, y: x.lerp_(y, 0.5)), True),
    "vmap of out=": (has_rule(lambda x, y: torch.maximum(x, y, out=x)), True),
    "vmap of view(dtype)": (has_rule(lambda x, y: x.view(torch.int32)), _upstream.NO_RULE_FOR_BITS),
    "a public pytree": (lambda: hasattr(torch.utils, "pytree"), True),  # which `_tree` could use
    # In the next three Dynamo makes an instance of it. In a step `autograd_function` makes it right.
    "Dynamo loses a backward": (by_dynamo(torch.func.grad(direct)), _upstream.VERSION < (2, 15)),
    "Dynamo loses a backward between two levels": (by_dynamo(torch.func.grad(torch.func.grad(squared))), True),
    "Dynamo refuses a backward under vmap": (
        lambda: "tried to vmap" not in raised(by_dynamo(batched_gradient)), True
    ),
    "Dynamo takes no function with a jvp": (  # then `numerics.taps._Tap` and `_TapWithJvp` can be one
        lambda: "custom jvp" not in raised(
            lambda: compiled(lambda x: Forward.apply(x), torch.ones(1, requires_grad=True), backend="eager")
        ),
        True,
    ),
    "Dynamo traces no leaf of its own": (leaf_in_a_graph, _upstream.NO_LEAVES),
    "a CPU has no float8 products by rows": (
        lambda: "only supports per-tensor scaling" not in raised(float8_rows), _upstream.NO_ROWS_ON_CPU
    ),
    "a transposed batch norm without values": (layout_of_a_batch_norm, True),
    "the statistics of a decomposed 16-bit batch norm": (decomposed_batch_norm, True),
    "an LSTM without gradients has no workspace": (workspace_of_an_lstm, True),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_torch_is_wrong_where_it_is_said(name: str, without_the_change: None) -> None:
    is_right, is_present = OTHERS[name]
    assert is_right() != is_present


# What ends the process.

LIST_OF_ONE = """
import torch
torch._inductor.config.cpp_wrapper = True
torch.compile(lambda x: torch.split(x * 2, [4])[0].sin())(torch.randn(4, dtype=torch.cfloat))
"""
TWO_THREADS = """
import threading
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from funcamp._trace.trace import stay

def enter():
    with FakeTensorMode():
        torch.zeros(2)

if {staying}:
    stay()
for _ in range(2):
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
enter()
"""
# A build for CPUs has no such guard, and where there is a GPU torch leaves it as it is.
GUARDED = torch.version.cuda is not None and not torch.cuda.is_available()


@pytest.mark.thorough
@pytest.mark.inductor
@pytest.mark.parametrize(
    ("program", "is_present"),
    [
        (LIST_OF_ONE, _upstream.LIST_OF_ONE),
        (TWO_THREADS.format(staying=False), _upstream.ENDED_THREAD and GUARDED),
        (TWO_THREADS.format(staying=True), False),
    ],
)
def test_a_process_ends_where_it_is_said(program: str, is_present: bool) -> None:
    code = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode
    assert code == (-signal.SIGSEGV if is_present else 0)


# The list of defects.


def test_every_workaround_ends_with_the_versions_that_need_it() -> None:
    defects = {name for name, value in vars(_upstream).items() if name.isupper() and isinstance(value, bool)}
    read: set[str] = set()
    for file in Path(_upstream.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name and isinstance(getattr(node, "ctx", None), ast.Load):
                read.add(name)
    assert defects - read == set()


def test_every_file_that_a_defect_names_exists() -> None:
    folder = Path(_upstream.__file__).parents[1]
    named = re.findall(r"`(\w+(?:/\w+)+\.py)`", Path(_upstream.__file__).read_text())
    assert len(named) > 10
    assert [path for path in named if not (folder / path).exists() and not path.startswith("tests/")] == []
