"""The memory of a large program is kept from call to call: no page is cleared again, and no result is in it."""

from __future__ import annotations

import contextlib
import resource
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from funcamp import jit, load_step, make_train_step, module_loss, stateless
from funcamp._cpu import kept_memory
from funcamp._cpu.kept_memory import KeptMemory, in_kept_memory
from funcamp._jit import compile as compiler
from funcamp._jit.passes.program import Program
from tests.support.helpers import assert_same
from tests.support.steps import assert_as_eager

ANY: Any = None
SOURCE = """void inductor_entry_impl(
    AtenTensorHandle* input_handles, AtenTensorHandle* output_handles) {
    auto inputs = steal_from_raw_handles_to_raii_handles(input_handles, 3);
    auto arg0_1 = std::move(inputs[0]);
    auto arg1_1 = std::move(inputs[1]);
    auto _tensor_constant0 = std::move(inputs[2]);
    AtenTensorHandle pool1_handle;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, shape, stride, cached_torch_dtype_uint8, cached_torch_device_type_cpu, 0, &pool1_handle));
    RAIIAtenTensorHandle pool1(pool1_handle);
    aoti_torch__alloc_from_pool(pool1, 0, cached_torch_dtype_float32, 0, scalar, scalar, &tmp_tensor_handle_0);
}
"""  # noqa: E501


def test_the_block_is_an_input_between_the_others_and_inductors_constants() -> None:
    lines = in_kept_memory(2, SOURCE).splitlines()
    assert [line.strip() for line in lines if "inputs[" in line or "pool1" in line or "handles(" in line] == [
        "auto inputs = steal_from_raw_handles_to_raii_handles(input_handles, 4);",
        "RAIIAtenTensorHandle kept_memory(std::move(inputs[2]));",
        "auto arg0_1 = std::move(inputs[0]);",
        "auto arg1_1 = std::move(inputs[1]);",
        "auto _tensor_constant0 = std::move(inputs[3]);",
        "RAIIAtenTensorHandle pool1(std::move(kept_memory));",
        "aoti_torch__alloc_from_pool(pool1, 0, cached_torch_dtype_float32, 0, scalar, scalar, &tmp_tensor_handle_0);",
    ]


def test_other_inputs_are_refused() -> None:
    with pytest.raises(RuntimeError, match="inputs in C"):
        in_kept_memory(2, "void inductor_entry_impl() {}")


def test_a_result_in_the_block_is_copied() -> None:
    def in_the_block(inputs: list[Tensor]) -> list[Tensor]:
        value, memory = inputs
        memory.resize_(4).view(torch.float32)[0] = value
        return [memory.view(torch.float32)[0], value]

    run = KeptMemory()(in_the_block)
    results = [run([torch.ones(())]), run([torch.zeros(())])]
    assert_same(results, [[torch.ones(())] * 2, [torch.zeros(())] * 2])


def test_programs_of_a_thread_share_a_block_unless_one_calls_the_other() -> None:
    blocks: list[Tensor] = []
    programs: dict[str, Any] = {}

    def keep(inputs: list[Tensor]) -> list[Tensor]:
        blocks.append(inputs[-1])
        return []

    def call_another(inputs: list[Tensor]) -> list[Tensor]:
        programs["inner"]([])
        return keep(inputs)

    programs["inner"], programs["outer"] = KeptMemory()(keep), KeptMemory()(call_another)
    programs["inner"]([])
    programs["outer"]([])
    assert blocks[0] is blocks[2] is not blocks[1]
    block = weakref.ref(blocks[0])
    blocks.clear()
    programs.clear()
    assert block() is None  # as after JitStep.release()


@pytest.mark.parametrize(("operations", "is_planned"), [(500, True), (600, False)])
def test_a_program_of_many_small_values_is_not_planned(operations: int, is_planned: bool) -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = example = torch.empty(2**18, device="meta")
    for _ in range(operations):
        node = graph.call_function(torch.sin, (node,))
    module, options = fx.GraphModule(nn.Module(), graph), {"cpp_wrapper": True}
    program = Program(module, [example], contextlib.nullcontext(), ANY, b"", options)
    assert kept_memory.PASS.run(program).options.get("memory_planning", False) == is_planned


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def train(file: Path | None, **options: Any) -> tuple[list[Any], int]:
    """Take steps of a model, the last ones from a file; return the state, all metrics, and the last step's page faults.

    malloc returns blocks of more than 32 MB to the system whatever else there is, such as the 64 MB of all gradients.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 2**17), nn.GELU(), nn.Linear(2**17, 64))
    step = make_train_step(module_loss(model, nn.functional.mse_loss), stateless(torch.optim.AdamW), max_norm=1.0)
    run: Any = jit(step, **options)
    state, rows, faults = step.init(), [], [page_faults()]
    for number in range(6):
        if number == 3 and file is not None:
            run.save(file)
            run = load_step(file)
        state, metrics = run(state, (torch.randn(16, 64), torch.randn(16, 64)))
        rows.append(metrics)
        faults.append(page_faults())
    return [state, rows], faults[-1] - faults[-2]


@pytest.mark.thorough
@pytest.mark.inductor
def test_no_page_is_cleared_again_and_no_number_changes(tmp_path: Path) -> None:
    kept, faults = train(tmp_path / "step.pt")
    without, faults_without = train(None, without=["kept_memory"])
    assert_same(kept, without)
    assert faults < 1_000 < 8_000 < faults_without  # a block of 32 MB has 8,192 pages


@pytest.mark.thorough
@pytest.mark.inductor
def test_a_program_whose_code_is_not_found_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_memory, "LARGE", 1)
    monkeypatch.setattr(kept_memory, "LARGE_FOR_EACH", 0)
    monkeypatch.setattr(compiler, "_modules_of_inductor", list)
    assert_as_eager(step_of_products, jit(step_of_products), torch.eye(3), [torch.ones(3, 3)] * 2, 1e-6)


def step_of_products(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return state + (x @ state).tanh() @ x, x.sum()
