"""Operations that a compiled program computes wrongly, or cannot compute: it calls torch's own instead.

LSTM layers on a CPU: oneDNN's layer allocates the workspace of its backward pass only while gradients are enabled, and
a compiled program runs with them disabled: the backward pass then fails, with every backend. It also reads its input as
if it were contiguous, and Inductor may pass one that is not: the gradient of the input's weight is then computed from
wrong numbers. In a trace the workspace is empty, because only oneDNN knows its size; since torch 2.14 generated code
checks sizes. So the layer returns an empty view of it. Torch 2.11 to 2.15;
https://github.com/pytorch/pytorch/issues/158007

Multi-label margin loss: torch.compile's own form counts the classes after the first -1 too. Torch 2.11 to 2.13;
https://github.com/pytorch/pytorch/issues/141017

Multi-margin loss and softshrink of values that are not finite: torch.compile's own forms give NaN
for an infinite input, and 0 for NaN, which hides an overflow. Torch 2.11 to 2.15, and to 2.13.

The gradient of a soft margin loss: torch.compile's own form, sigmoid(z) - 1, has no digits left for a
large margin (14 % off at 15). Torch 2.11 to 2.15.

The gradient of an average pool with ceil_mode: Inductor's own form divides the windows over the edge by the number of
elements of a whole one, the forward pass by those inside. Torch 2.11 to 2.15;
https://github.com/pytorch/pytorch/issues/198119

The gradient of `interpolate(scale_factor=1.7)`, by nearest neighbours: Inductor's own form takes the ratio of the sizes
for the factor, and gives it to other pixels. In `torch.compile` the forward pass has another form. Torch 2.11 to 2.15.

2 ** i of integers i on a CPU: C++ in place of Python (`cpp_wrapper`) gives torch the 2 as a float, and reads the floats
that are returned as integers. Torch 2.11 to 2.15.

An adaptive max pool: Inductor's own form takes no NaN for the largest number of a window, and gives the gradient to
another one. Torch 2.11 to 2.15.

A 3-d max pool: of a transposed input Inductor's own form gives the backward pass, which is torch's, the places of the
largest numbers in another order than it reads; in a padded window of -inf it finds the largest number in the padding,
and the gradient is written outside of its memory. Torch 2.11 to 2.15.

A permutation that indexes: Inductor has patterns that leave out the check of its bounds. Up to torch 2.13 one raises
for `x[torch.randperm(n)]`, as mixup has it; those of 2.14 and 2.15 draw again for `order[order]`.
https://github.com/pytorch/pytorch/issues/183988
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx

from funcamp._jit.passes.program import Pass, Program
from funcamp._types import Operation
from funcamp._upstream import NAN_SHRUNK, PADDED_TARGETS
from funcamp._upstream.renamed import renamed

if TYPE_CHECKING:
    from torch._ops import OpOverload

_aten = torch.ops.aten


class _Replacement(NamedTuple):
    """What a program calls instead of an operation."""

    operation: OpOverload
    where: Callable[..., bool]
    """Whether it does, given the arguments by name."""


#: By the operations that a program was traced with.
_replacements: dict[OpOverload, _Replacement] = {}


def _contiguous(value: object) -> object:
    """Return an argument; a tensor in contiguous memory."""
    return value.contiguous() if isinstance(value, Tensor) else value


def _constant(value: object) -> object:
    """Return an argument; a tensor without its part in autograd's graph."""
    return value.detach() if isinstance(value, Tensor) else value


def _layer(*args: object) -> tuple[Tensor, ...]:
    """Return the results of an LSTM layer, with the workspace for its backward pass as an empty view of it."""
    # A layer that the step only reads, such as a teacher's, may require gradients.
    arguments = [_contiguous(_constant(value)) for value in args]
    with torch.enable_grad():  # else there is no workspace
        *results, workspace = _aten.mkldnn_rnn_layer.default(*arguments)
    return *results, workspace[:0]


def _layer_backward(*args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of an LSTM layer, whose workspace is found by the empty view of it, the last argument."""
    *others, empty_view = args
    workspace_length = empty_view.untyped_storage().nbytes() // empty_view.element_size()
    workspace = empty_view.as_strided([workspace_length], [1], 0)
    arguments = map(_contiguous, [*others, workspace])
    *gradients, bias_gradient, grad_hx, grad_cx = _aten.mkldnn_rnn_layer_backward.default(*arguments)
    # The gradients of both biases are one tensor.
    return *gradients, bias_gradient.clone(), grad_hx, grad_cx


def _define(
    name: str, original: OpOverload, run: Operation | None = None, where: Callable[..., bool] = lambda **_: True
) -> None:
    """Make programs call an operation under a name of this library, for which the compiler has no other form."""
    _replacements[original] = _Replacement(renamed(name, original, run or original), where)


def _counts_over_the_edge(*, ceil_mode: bool, count_include_pad: bool, divisor_override: object, **_: object) -> bool:
    """Return whether windows of an average pool differ in what they divide by."""
    return ceil_mode and count_include_pad and divisor_override is None


def _is_no_ratio(
    *,
    output_size: Sequence[object],
    input_size: Sequence[object],
    scales_h: float | None = None,
    scales_w: float | None = None,
    **_: object,
) -> bool:
    """Return whether a factor of an interpolation is not the ratio of the sizes."""
    sizes = zip((scales_h, scales_w), input_size[-2:], output_size)
    return any(scale is not None and isinstance(size, int) and size * scale != out for scale, size, out in sizes)


def _is_of_integers(*, exponent: fx.Node, **_: object) -> bool:
    """Return whether a number is raised to integers."""
    return not exponent.meta["val"].is_floating_point()


_define("lstm_layer", _aten.mkldnn_rnn_layer.default, _layer)
_define("lstm_layer_backward", _aten.mkldnn_rnn_layer_backward.default, _layer_backward)
if PADDED_TARGETS:
    _define("multilabel_margin_loss", _aten.multilabel_margin_loss_forward.default)
_define("multi_margin_loss", _aten.multi_margin_loss.default)
_define("soft_margin_loss_backward", _aten.soft_margin_loss_backward.default)
if NAN_SHRUNK:
    _define("softshrink", _aten.softshrink.default)
_define("avg_pool2d_backward", _aten.avg_pool2d_backward.default, where=_counts_over_the_edge)
_define("avg_pool3d_backward", _aten.avg_pool3d_backward.default, where=_counts_over_the_edge)
_define("pow", _aten.pow.Scalar, where=_is_of_integers)
_define("adaptive_max_pool2d", _aten.adaptive_max_pool2d.default)
_define("max_pool3d_with_indices", _aten.max_pool3d_with_indices.default)
_define("randperm", _aten.randperm.default)
_define("upsample_nearest2d_backward", _aten.upsample_nearest2d_backward.default, where=_is_no_ratio)


def _run(program: Program) -> Program:
    for node in program.module.graph.nodes:
        replacement = _replacements.get(node.target)
        if replacement is not None and replacement.where(**_arguments(node)):
            node.target = replacement.operation
    return program


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operation by name."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    return {**dict(zip(names, node.args)), **node.kwargs}


PASS = Pass(
    name="whole_operations",
    why="torch.compile computes these wrongly or not at all: LSTMs, losses, pools, interpolations, permutations",
    evidence="https://github.com/pytorch/pytorch/issues/158007; tests/upstream/test_upstream.py",
    where=lambda _: bool(_replacements),
    run=_run,
    defect=True,
)
