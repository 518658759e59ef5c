"""The smallest change that makes an operation finite, found by running the operation again on its inputs.

A change is proposed only if the operation, run again with it, is finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import grad as differentiate  # imported before the auditor replaces it

from funcamp.report.reruns import (
    Call,
    Change,
    Range,
    floating_tensors,
    in_float32,
    is_weight,
    range_of,
    run_again,
    unchanged,
    weights_in_float32,
    with_number,
)
from funcamp._types import Tree

#: Epsilons that are tried in place of one that is zero in float16, the smallest first.
_EPSILONS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
#: Operations whose inputs autocast casts to float16 again.
_CAST_BY_AUTOCAST = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "matmul", "einsum"}
_CAST_BY_AUTOCAST |= {"convolution", "mkldnn_linear", "_convolution", "mkldnn_convolution"}
_LARGEST = torch.finfo(torch.float16).max

#: Computes a result again with another epsilon and changed inputs; None if an operation does not take them.
RunWithEpsilon: TypeAlias = Callable[[float, Change], object]


class Proposal(NamedTuple):
    """What to change, and what shows that it helps."""

    change: str
    """The changed line; empty if no change helps."""
    proof: str
    """The result of running the operation again, or why it was not run or is never finite."""


class _Candidate(NamedTuple):
    """A change that is tried."""

    line: str
    """The changed line."""
    call: Call
    change: Change
    """How the arguments of the call change."""


def propose(call: Call, name_of_weight: Callable[[Tensor], str]) -> Proposal:
    """Return the smallest change that makes an operation finite that overflowed.

    name_of_weight: returns a parameter's name.
    """
    obstacle = _obstacle(call)
    if obstacle:
        return Proposal("", obstacle)
    for candidate in _candidates(call, name_of_weight):
        result_range = run_again(candidate.call, candidate.change)
        if result_range is not None and result_range.is_finite:
            return Proposal(candidate.line, _proof(call, result_range))
    return Proposal("", _why_none_helps(call))


def _candidates(call: Call, name_of_weight: Callable[[Tensor], str]) -> Iterator[_Candidate]:
    """Yield the changes to try, the smallest first."""
    if call.name == "_to_copy":
        line = "leave it in float32  # no cast; under autocast: autocast(enabled=False) around the line"
        yield _Candidate(line, call, in_float32)
        return
    weights = [tensor for tensor in call.floating_tensors if is_weight(tensor)]
    if weights:
        names = ", ".join(f'"{name_of_weight(weight)}"' for weight in weights)
        line = f"Policy(torch.float16, keep=({names},))  # the weight in float32"
        yield _Candidate(line, call, weights_in_float32)
    if _takes_dtype(call):
        call_with_dtype = call._replace(keywords={**call.keywords, "dtype": torch.float32})
        yield _Candidate(f"{call.name}(..., dtype=torch.float32)", call_with_dtype, unchanged)
    yield _Candidate(_line_in_float32(call), call, in_float32)


def _takes_dtype(call: Call) -> bool:
    """Return whether an operation has an argument for the dtype of its result that was not given."""
    names = [argument.name for argument in call.function._schema.arguments]
    is_given = call.keywords.get("dtype") is not None or len(call.arguments) == len(names)
    return "dtype" in names and not is_given and call.name in ("sum", "mean", "prod", "cumsum", "cumprod")


def _line_in_float32(call: Call) -> str:
    """Return the changed line that gives an operation float32 inputs."""
    if call.name in _CAST_BY_AUTOCAST:
        return "with torch.autocast(device, enabled=False):  # around the line, with x.float() of each input"
    if call.name.endswith("_"):
        return f"x = x.float()  # of each input; {call.name.rstrip('_')} in place of {call.name}, which writes float16"
    return f"x.float()  # of each input, before {call.name}"


def propose_for_constant(call: Call, value: float) -> Proposal:
    """Return the smallest change that makes an operation finite that got a constant beyond float16."""
    obstacle = _obstacle(call)
    if obstacle:
        return Proposal("", obstacle)
    if value < 0:  # a mask
        result_range = run_again(call, with_number(value, -_LARGEST))
        if result_range is not None and result_range.is_finite:
            line = f"torch.finfo(torch.float16).min  # in place of {value:g}"
            return Proposal(line, _proof(call, result_range))
    result_range = run_again(call, in_float32)
    if result_range is not None and result_range.is_finite:
        return Proposal(_line_in_float32(call), _proof(call, result_range))
    return Proposal("", _why_none_helps(call))


def propose_for_epsilon(call: Call, run: RunWithEpsilon, epsilon: float) -> Proposal:
    """Return the smallest change that makes a division by a lost epsilon finite.

    Args:
        call: the division.
        run: computes its result with another epsilon and changed inputs.
        epsilon: the epsilon that is zero in float16.
    """
    for larger in _EPSILONS:
        result_range, has_finite_gradients = _run_both_ways(run, larger, unchanged)
        if result_range is not None and has_finite_gradients:
            proof = _proof(call, result_range, "its gradients for a gradient of 1 too")
            return Proposal(f"an epsilon of {larger:g} in place of {epsilon:g}", proof)
    result_range, has_finite_gradients = _run_both_ways(run, epsilon, in_float32)
    if result_range is None:
        return Proposal("", _why_none_helps(call))
    if has_finite_gradients:
        proof = _proof(call, result_range, "its gradients for a gradient of 1 too")
        return Proposal(f"x.float() + {epsilon:g}  # and the division in float32", proof)
    proof = _proof(
        call, result_range, "its gradient for a gradient of 1 is beyond float16, so x itself must be float32"
    )
    return Proposal(f"x.float() + {epsilon:g}  # and in float32 what computes x, and the division", proof)


def _run_both_ways(run: RunWithEpsilon, epsilon: float, change: Change) -> tuple[Range | None, bool]:
    """Return the range of a result, and whether its gradients are finite; None if it is not finite or does not run.

    In a thread of its own: inside of an observed operation, torch records no graph.
    """
    leaves = []

    def change_leaf(argument: object) -> object:
        if isinstance(argument, Tensor) and argument.requires_grad:
            leaves.append(argument)
        return change(argument)

    def run_now() -> tuple[Range | None, bool]:
        result: Tree = run(epsilon, change_leaf)
        tensors = [] if result is None else floating_tensors(result)
        result_range = range_of(tensors)
        if result is None or not result_range.is_finite:
            return None, False
        outputs = [tensor for tensor in tensors if tensor.requires_grad]
        if not outputs or not leaves:
            return result_range, True
        gradients = differentiate(outputs, leaves, [torch.ones_like(one) for one in outputs], allow_unused=True)
        return result_range, range_of([one for one in gradients if one is not None]).is_finite

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(run_now).result()


def _obstacle(call: Call) -> str:
    """Return why an operation must not run again; empty if it may."""
    if call.function.namespace != "aten":  # another library's operation may have effects
        return f"not run again: {call.name} is no operation of torch's own"
    return ""


def _proof(call: Call, result_range: Range, about_gradients: str = "") -> str:
    """Return the sentence about an operation that is finite with a change."""
    proof = f"{call.label}, run again on the same inputs with this change, is finite: {result_range}"
    if about_gradients:
        proof = f"{proof}; {about_gradients}"
    is_beyond_float16 = max(abs(result_range.smallest), abs(result_range.largest)) > _LARGEST
    return f"{proof}; float16 ends at {_LARGEST:.0f}, so its result stays in float32" if is_beyond_float16 else proof


def _why_none_helps(call: Call) -> str:
    """Return why an operation is not finite with any change."""
    for tensor in call.floating_tensors:
        if not range_of([tensor]).is_finite:
            return f"no change of policy holds: an input of {call.label} is inf or NaN already"
    result_range = run_again(call, in_float32)
    if result_range is None:
        return f"no change of policy was found: {call.label} does not run in float32"
    return f"no change of policy holds: {call.label} is inf or NaN in float32 too; make its inputs smaller"
