"""Operations that a compiled program computes wrongly, or cannot compute: it calls torch's own instead.

LSTM layers on a CPU: oneDNN's layer allocates the workspace of its backward pass only while gradients are enabled, and
a compiled program runs with them disabled: the backward pass then fails, with every backend. It also reads its input as
if it were contiguous, and Inductor may give it one that is not: the gradient of the input's weight is then that of
other numbers. In a trace the workspace is empty, because only oneDNN knows its size; since torch 2.14 generated code
checks sizes. So the layer returns an empty view of it. Torch 2.11 to 2.15;
https://github.com/pytorch/pytorch/issues/158007

Multi-label margin loss: torch.compile's own form counts the classes after the first -1 too. Torch 2.11 to 2.13;
https://github.com/pytorch/pytorch/issues/141017

Multi-margin loss and softshrink of values that are not finite: torch.compile's own forms give NaN
for an infinite input, and 0 for NaN, which hides an overflow. Torch 2.11 to 2.15, and to 2.13.

The gradient of a soft margin loss: torch.compile's own form, sigmoid(z) - 1, has no digits left for a
large margin (14 % off at 15). Torch 2.11 to 2.15.

CTC loss with lengths in tensors, on a CPU: torch has no rule for the shape of what it keeps for its
backward pass; it follows from the longest target. The program keeps it for the longest target that
there is room for, so that it is right for the lengths of every batch. Torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from funcamp._upstream import INEXACT_MARGIN, LSTM_WORKSPACE, NAN_MARGIN, NAN_SHRUNK, PADDED_TARGETS

_aten = torch.ops.aten
_library: Any = torch.library.Library("funcamp", "FRAGMENT")  # type: ignore[no-untyped-call]
_instead: dict[Any, Any] = {}


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _constant(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _layer(*args: Any) -> tuple[Tensor, ...]:
    given = map(_constant, args)  # a layer that the step only reads, such as a teacher's, may require gradients
    with torch.enable_grad():
        *found, workspace = _aten.mkldnn_rnn_layer.default(*map(_contiguous, given))
    return *found, workspace[:0]


def _layer_backward(*args: Any) -> tuple[Tensor, ...]:
    *given, none = args
    workspace = none.as_strided([none.untyped_storage().nbytes() // none.element_size()], [1], 0)
    *found, grad_hx, grad_cx = _aten.mkldnn_rnn_layer_backward.default(*map(_contiguous, [*given, workspace]))
    *others, bias = found
    return *others, bias.clone(), grad_hx, grad_cx  # both biases' gradient is one tensor


def renamed(name: str, original: Any, run: Any) -> Any:
    """Define an operation of the same arguments under another name, by which no compiler takes it apart; return it."""
    signature = str(original._schema).partition("(")[2]
    _library.define(f"{name}({signature}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"funcamp::{name}", original, lib=_library)
    return getattr(torch.ops.funcamp, name).default


def _define(name: str, original: Any, run: Any) -> None:
    _instead[original] = renamed(name, original, run)


if LSTM_WORKSPACE.present:
    _define("lstm_layer", _aten.mkldnn_rnn_layer.default, _layer)
    _define("lstm_layer_backward", _aten.mkldnn_rnn_layer_backward.default, _layer_backward)
if PADDED_TARGETS.present:
    _margin = _aten.multilabel_margin_loss_forward.default
    _define("multilabel_margin_loss", _margin, _margin)
if NAN_MARGIN.present:
    _define("multi_margin_loss", _aten.multi_margin_loss.default, _aten.multi_margin_loss.default)
if INEXACT_MARGIN.present:
    _margin_backward = _aten.soft_margin_loss_backward.default
    _define("soft_margin_loss_backward", _margin_backward, _margin_backward)
if NAN_SHRUNK.present:
    _define("softshrink", _aten.softshrink.default, _aten.softshrink.default)


def _room(log_probs: Tensor, targets: Tensor) -> tuple[int, int, int]:
    """Return the shape of a CTC loss's alphas for the longest target: for targets in rows, or one after the other."""
    steps, batch, _ = log_probs.shape
    return batch, steps, 2 * targets.shape[-1] + 1


def _ctc_loss(log_probs: Tensor, targets: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    loss, alphas = _aten._ctc_loss.Tensor(log_probs, targets, *args)
    unused = _room(log_probs, targets)[2] - alphas.shape[2]
    return loss, torch.nn.functional.pad(alphas, (0, unused))


def _ctc_loss_shapes(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), log_probs.new_empty(_room(log_probs, targets))


def _ctc_loss_backward_shape(_: Tensor, log_probs: Tensor, *__: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


_ctc: dict[Any, Any] = {}
for _name, _original, _run, _shapes in (
    ("ctc_loss", _aten._ctc_loss.Tensor, _ctc_loss, _ctc_loss_shapes),
    ("ctc_loss_backward", _aten._ctc_loss_backward.Tensor, _aten._ctc_loss_backward.Tensor, _ctc_loss_backward_shape),
):
    _library.define(f"{_name}({str(_original._schema).partition('(')[2]}")
    _library.impl(_name, _run, "CPU")
    torch.library.register_fake(f"funcamp::{_name}", _shapes, lib=_library)
    _ctc[_original] = getattr(torch.ops.funcamp, _name).default


def of_known_shape(operation: Any, args: Any) -> Any:
    """Return the operation that a trace records instead of one whose shape follows from values; mostly itself."""
    instead = _ctc.get(operation)
    return operation if instead is None or args[0].device.type != "cpu" else instead


def keep_whole(module: fx.GraphModule) -> None:
    """Let such operations of a traced graph run as in the eager loop; the graph is not recompiled."""
    for node in module.graph.nodes:
        node.target = _instead.get(node.target, node.target)
