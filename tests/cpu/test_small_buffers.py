"""Small buffers in one block: which of Inductor's statements make a buffer a part, and that no number changes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from funcamp import jit, make_train_step, module_loss
from funcamp._cpu.small_buffers import in_one_block
from tests.support.generated import code_of
from tests.support.helpers import assert_same
from tests.support.steps import SGD

MAKE = """    AtenTensorHandle {0}_handle;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided({1}, {2}, {3}, cached_torch_dtype_{4}, cached_torch_device_type_cpu, 0, &{0}_handle));
    RAIIAtenTensorHandle {0}({0}_handle);
"""  # noqa: E501
START = """void inductor_entry_impl(
    AtenTensorHandle* input_handles, AtenTensorHandle* output_handles) {
    auto inputs = steal_from_raw_handles_to_raii_handles(input_handles, 1);
    auto arg0_1 = std::move(inputs[0]);
    static constexpr int64_t *scalar=nullptr;
    static constexpr int64_t shape[] = {4L, 8L, };
    static constexpr int64_t strides[] = {8L, 1L, };
    static constexpr int64_t open[] = {s0, 1L, };
"""


def scalar(name: str, dtype: str = "float32") -> str:
    return MAKE.format(name, 0, "scalar", "scalar", dtype)


def matrix(name: str, dtype: str = "float32", shape: str = "shape") -> str:
    return MAKE.format(name, 2, shape, "strides", dtype)


def parts(statements: str) -> list[str]:
    """The buffers that become parts, each with where it begins in the block and the size of its elements."""
    source = in_one_block(START + statements + "}\n")
    return [a + b for a, b in re.findall(r"Part (buf\w+\{)small_buffers_first \+ (.*\});", source)]


def kernel(*names: str) -> str:
    arguments = ", ".join(f"(const float*)({name}.data_ptr())" for name in names)
    return f"    cpp_fused_add_0({arguments});\n"


VIEW = "    auto buf1 = wrap_with_raii_handle_if_needed(reinterpret_tensor_wrapper(buf0, 1, shape, strides, 6L));\n"
MOVES = "    auto buf2 = std::move(buf1);  // reuse\n    buf0.reset();\n"
#: A tensor if anything but a kernel sees a buffer, also under another name, or if its size is not known.
TENSORS = (
    matrix("buf0") + "    output_handles[0] = buf0.release();\n",
    matrix("buf0") + "    aoti_torch_cpu_mm_out(buf0, arg0_1, arg0_1);\n",
    matrix("buf0") + "    auto buf9 = std::move(buf0);  // reuse\n    output_handles[0] = buf9.release();\n",
    matrix("buf0") + "    auto buf9 = something_new(buf0);\n",
    matrix("buf0", shape="open"),
    matrix("buf0", "complex64") + "    cpp_fused_0((c10::complex<float>*)(buf0.data_ptr()));\n",
    scalar("buf0").replace("_type_cpu", "_type_cuda"),
)
CASES = [
    (
        scalar("buf0") + matrix("buf1") + scalar("buf2", "float64") + kernel("buf1"),
        ["buf0{0, 4}", "buf1{64, 4}", "buf2{192, 8}"],
    ),
    (matrix("buf0", "bfloat16") + VIEW + MOVES + scalar("buf3") + kernel("buf2"), ["buf0{0, 2}", "buf3{64, 4}"]),
    *((statements + scalar("buf1"), ["buf1{0, 4}"]) for statements in TENSORS),
]


@pytest.mark.parametrize(("statements", "expected"), CASES)
def test_a_part_is_what_only_kernels_see(statements: str, expected: list[str]) -> None:
    assert parts(statements) == expected


def train(**options: Any) -> tuple[Any, list[Any], str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    step = make_train_step(module_loss(model, nn.functional.mse_loss), SGD, max_norm=1.0)
    run, state, rows = jit(step, **options), step.init(), []
    code = code_of(run, step.init(), (torch.randn(6, 8), torch.randn(6, 4)))
    for _ in range(4):
        state, metrics = run(state, (torch.randn(6, 8), torch.randn(6, 4)))
        rows.append((metrics, metrics.loss.clone()))
    return state, rows, code


@pytest.mark.inductor
def test_no_number_changes_and_metrics_are_kept() -> None:
    state, rows, code = train()
    *without, code_without = train(without=["small_buffers"])
    assert "Part buf" in code
    assert "Part buf" not in code_without
    assert_same([state, rows], without)
    for metrics, loss in rows:  # what a caller has is not in a block that later calls write
        assert_same(metrics.loss, loss)
