"""`tap`: a value passed through unchanged; its statistics, and those of its gradient, come out as a gradient.

    d loss / d probe.forward = stats(x)         d loss / d probe.backward = stats(d loss / d x)

No true derivative: a record in place of one. So the statistics come out of `torch.func.grad` beside the gradients of
the parameters, and add up as gradients do: over every use of a probe, over samples, over micro-batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from funcamp import _tree, _upstream
from funcamp._numerics.counting import check_sample, check_values, count, taken
from funcamp._numerics.counting_pass import count_jointly
from funcamp._numerics.record import Record
from funcamp._upstream.autograd_function import keep_functions_whole


def count_both(saved: Tensor, grad: Tensor, sample: int) -> Tensor:
    """The rows of a sample of the forward pass and of one of the gradient, in one pass."""
    return count_jointly([saved.unsqueeze(0), taken(grad, sample).unsqueeze(0)])


class _Tap(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, forward: Tensor, backward: Tensor, sample: int | None) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        # All is counted at once in the backward pass, where it is little: fewer kernels to compile and to launch.
        # A copy, which operations in place may write; a compiler leaves it out.
        return x.clone(), count(x) if sample is None else taken(x, sample).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.sample = inputs[3]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (saved,) = ctx.saved_tensors
        if grad is None:
            return None, None, None, None
        if ctx.sample is None:
            # Saved under torch.func.vjp, it is a wrapper of a level that has ended: any operation takes it off.
            return grad, saved.clone(), count(grad), None
        forward, backward = count_both(saved, grad, ctx.sample)
        return grad, forward, backward, None


class _TapWithJvp(_Tap):
    """The same for forward mode too; Dynamo takes no Function with a jvp, unless whole, under torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, *_: Any) -> tuple[Tensor | None, None]:  # noqa: ARG004
        return None if tangent is None else tangent.clone(), None


def tap(x: Tensor, probe: Record, *, sample: int | None = None) -> Tensor:
    """Return x; its gradient with respect to the probe is the statistics of x and of x's gradient.

    d loss / d probe = Record(stats(x), stats(d loss / d x)), summed over all uses of the probe. Pure: works under
    torch.func's transforms, double backward, autocast, checkpoint, torch.compile(fullgraph=True) and in a captured
    step. Where the loss does not depend on x, the record stays empty (count 0). A gradient of a scaled loss is counted
    as it is, scaled: see `Record.unscale`. No sync.

    Args:
        x: a strided floating-point or complex tensor.
        probe: what `probe` makes, on x's device.
        sample: count about so many elements, evenly spread, where x has more; None for all. Counting a number takes
            1 to 3 ns compiled on two cores, 75 ns eager.

    Returns:
        x itself, as a new tensor.

    Raises:
        TypeError: x is no such tensor, probe no `Record`, or sample no integer.
        ValueError: sample is below 1.

    Example:
        >>> from funcamp.numerics import probe, tap
        >>> def loss(w, probe, x):
        ...     return tap(w * x, probe).square().sum()
        >>> record = torch.func.grad(loss, argnums=1)(torch.tensor(2.0), probe(), torch.tensor([1.0, 3.0]))
        >>> print(record, record.backward.sum.item())
        (-> 2.83, <- 5.66) 16.0
    """
    if not isinstance(probe, Record):
        raise TypeError(f"tap: probe must be a Record, as probe() makes it; got {_tree.describe(probe)}")
    check_values("tap", x)
    check_sample("tap", sample)
    function: Any = _TapWithJvp
    if torch.compiler.is_dynamo_compiling():
        keep_functions_whole()
        if not _upstream.transforms_active():
            function = _Tap
    out: Tensor = function.apply(x, probe.forward.row, probe.backward.row, sample)[0]
    return out
