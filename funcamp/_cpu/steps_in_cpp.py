"""Take the several steps of a call in C++ instead of in Python.

From Python, each step of a call makes views of the batch, a list of arguments, and tensors of the results, and passes
the layers that torch puts around a compiled program: 20 to 40 microseconds, where the program itself takes 80.

The C++ that Inductor has written for one step stays as it is, under another name. In its place is a function that calls
it for one step after the other: with the tensors of the state, in which a donated step leaves its results, and with
views of the stacked batch. Metrics are copied into tensors with a first dimension for the steps.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

from torch import Tensor

from funcamp._cpu.sources import ENTRY, TAKE_OVER, can_change_sources, source_changed
from funcamp._jit.passes.program import Pass, Program, Steps, TensorFunction

#: Where the entry of a program gives an input a name.
_INPUT = re.compile(r"auto (\w+) = std::move\(inputs\[(\d+)\]\);")
_RESULT = re.compile(r"output_handles\[(\d+)\]")

#: What comes before the function of one step, up to its new name. The inputs of the new function are those of a step,
#: but the batch's are stacked; it returns the stacked results.
_LOOP = """
#include <algorithm>
#include <cstring>
#include <vector>

static void entry_of_one_step(AtenTensorHandle* input_handles, AtenTensorHandle* output_handles);

namespace {

RAIIAtenTensorHandle same_tensor(AtenTensorHandle tensor) {
    AtenTensorHandle same;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor, &same));
    return RAIIAtenTensorHandle(same);
}

// A step's part of a tensor that holds all steps along its first dimension.
RAIIAtenTensorHandle step_of(AtenTensorHandle stack, int64_t step) {
    int64_t dims, *sizes, *strides;
    AtenTensorHandle view;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(stack, &dims));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(stack, &sizes));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(stack, &strides));
    AOTI_TORCH_ERROR_CODE_CHECK(
        aoti_torch__reinterpret_tensor(stack, dims - 1, sizes + 1, strides + 1, step * strides[0], &view));
    return RAIIAtenTensorHandle(view);
}

// A new tensor for the values of all steps, given that of one.
RAIIAtenTensorHandle stack_for(AtenTensorHandle value, int64_t steps) {
    int64_t dims, *sizes;
    int32_t dtype;
    AtenTensorHandle stack;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(value, &dims));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(value, &sizes));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(value, &dtype));
    std::vector<int64_t> stack_sizes(dims + 1), stack_strides(dims + 1);
    int64_t stride = 1;
    for (int64_t dim = dims; dim > 0; --dim) {
        stack_sizes[dim] = sizes[dim - 1];
        stack_strides[dim] = stride;
        stride *= sizes[dim - 1];
    }
    stack_sizes[0] = steps;
    stack_strides[0] = stride;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
        dims + 1, stack_sizes.data(), stack_strides.data(), dtype, aoti_torch_device_type_cpu(), 0, &stack));
    return RAIIAtenTensorHandle(stack);
}

// Copies a step's value to its place in the tensor of all steps.
void put_step(AtenTensorHandle stack, int64_t step, AtenTensorHandle value) {
    bool is_contiguous;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(value, &is_contiguous));
    if (!is_contiguous) {
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(step_of(stack, step), value, 0));
        return;
    }
    int32_t dtype;
    int64_t numel;
    void *to, *from;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(value, &dtype));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(value, &numel));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(stack, &to));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(value, &from));
    const size_t bytes = numel * aoti_torch_dtype_element_size(dtype);
    if (bytes) {
        std::memcpy(static_cast<char*>(to) + step * bytes, from, bytes);
    }
}

}  // namespace

void inductor_entry_impl(AtenTensorHandle* input_handles, AtenTensorHandle* output_handles) {
    // The inputs: the graph's constants, the state's leaves, the stacked batch's tensors, what the step reads besides.
    constexpr int64_t steps = %(steps)d;
    constexpr int64_t first_of_batch = %(first_of_batch)d, end_of_batch = %(end_of_batch)d;
    constexpr int64_t input_count = %(inputs)d, result_count = %(results)d;
    auto inputs = steal_from_raw_handles_to_raii_handles(input_handles, input_count);
    // One for each result, made when the first step has shown its kind.
    std::vector<RAIIAtenTensorHandle> stacks;
    for (int64_t step = 0; step < steps; ++step) {
        std::vector<AtenTensorHandle> step_inputs(input_count), step_results(result_count);
        for (int64_t input = 0; input < input_count; ++input) {
            // A step takes over its inputs, so it gets handles of its own; a donated state stays where it is.
            const bool is_of_batch = first_of_batch <= input && input < end_of_batch;
            step_inputs[input] =
                (is_of_batch ? step_of(inputs[input], step) : same_tensor(inputs[input])).release();
        }
        entry_of_one_step(step_inputs.data(), step_results.data());
        // An error of an operation that C++ calls in Python; or of the handler of a signal, such as Ctrl-C.
        if (PyErr_Occurred() || PyErr_CheckSignals()) {
            return;
        }
        // Results that are the same tensor have the same handle, which is deleted once.
        std::vector<AtenTensorHandle> handles(step_results);
        std::sort(handles.begin(), handles.end());
        handles.erase(std::unique(handles.begin(), handles.end()), handles.end());
        auto owners = steal_from_raw_handles_to_raii_handles(handles.data(), handles.size());
        for (int64_t result = 0; result < result_count; ++result) {
            if (step == 0) {
                stacks.push_back(stack_for(step_results[result], steps));
            }
            put_step(stacks[result], step, step_results[result]);
        }
    }
    for (int64_t result = 0; result < result_count; ++result) {
        output_handles[result] = stacks[result].release();
    }
}

static void entry_of_one_step("""


def _with_loop(steps: Steps, constant_count: int, input_count: int, result_count: int, source: str) -> str:
    """Return the C++ of all steps, given that of one.

    Args:
        steps: the steps.
        constant_count: the number of constants of the graph, such as that of `x[0] = 7`: AOTAutograd makes them the
            first inputs.
        input_count: the number of inputs of a step, without these.
        result_count: the number of its results.
        source: the C++ of a step.

    Raises:
        RuntimeError: it has other inputs or results.
    """
    before_entry, _, after_entry = source.partition(ENTRY)
    take_over = TAKE_OVER.search(after_entry)
    # Inductor's own constants follow the inputs, and have other names.
    named_inputs = [int(number) for name, number in _INPUT.findall(after_entry) if name.startswith("arg")]
    if take_over is None or named_inputs != list(range(constant_count + input_count)):
        raise RuntimeError("the inputs in C++ are not the program's")
    written_results = {int(number) for number in _RESULT.findall(after_entry)}
    # There are more where torch itself would write an input after the program, from Python.
    if written_results != {*range(result_count)}:
        raise RuntimeError("the results in C++ are not the program's")
    first_of_batch = constant_count + steps.state_leaves
    loop = _LOOP % {
        "steps": steps.number,
        "first_of_batch": first_of_batch,
        "end_of_batch": first_of_batch + steps.batch_leaves,
        "inputs": int(take_over[1]),
        "results": result_count,
    }
    return before_entry + loop + after_entry


class _ResultsChecked(NamedTuple):
    """Raises at its first call if a program has taken one step instead of all of them.

    The loop is put into C++ that torch writes. If it is there, the results are stacked.
    """

    expected_shapes: list[tuple[int, ...]]
    """Of the results of all steps; at least one."""

    def __call__(self, all_steps: TensorFunction) -> TensorFunction:
        """Return the checked function, given the compiled one of state and batch."""
        is_checked = False

        def run(values: list[Tensor]) -> list[Tensor]:
            nonlocal is_checked
            results = all_steps(values)
            if not is_checked:
                shapes = [tuple(result.shape) for result in results]
                if shapes != self.expected_shapes:
                    raise RuntimeError(
                        "jit: this torch compiles no loop over the steps of a call (unroll); got results of shapes "
                        f"{shapes} instead of {self.expected_shapes}: pass without=['steps_in_cpp'], and start from "
                        "a saved state"
                    )
                is_checked = True
            return results

        return run


def _run(program: Program) -> Program:
    steps = program.steps
    # A step that is not donated returns the next state instead of leaving it where the next step reads it.
    if steps is None or not steps.donated:
        return program
    # What other passes put around a program belongs around each of its steps.
    if program.around or not program.options.get("cpp_wrapper") or not can_change_sources():
        return program
    results: Any = program.module.graph.output_node().args[0]
    # Without results, nothing would show that a program has no loop although it should.
    if not results:
        return program
    constants = [*program.module.parameters(), *program.module.buffers()]
    add_loop = functools.partial(_with_loop, steps, len(constants), len(program.examples), len(results))
    expected_shapes = [(steps.number, *node.meta["val"].shape) for node in results]
    return program._replace(
        steps=None,
        cache_name=program.cache_name + b"-loop",
        while_compiled=(*program.while_compiled, functools.partial(source_changed, add_loop)),
        may_fail=(*program.may_fail, PASS.name),
        around=(_ResultsChecked(expected_shapes),),
    )


PASS = Pass(
    name="steps_in_cpp",
    why="from Python, every step of a call (unroll) takes another 20 to 40 microseconds",
    evidence="tests/cpu/test_steps_in_cpp.py; benchmarks/rl.py",
    where=lambda target: target.by_inductor and target.on_cpu and not target.is_open,
    run=_run,
)
