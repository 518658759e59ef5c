"""`tap`: return a value unchanged; its statistics, and those of its gradient, come out as a gradient.

    d loss / d probe.forward = stats(x)         d loss / d probe.backward = stats(d loss / d x)

This is not a true derivative: a record takes its place. So `torch.func.grad` returns the statistics with the gradients
of the parameters, and they add up like gradients: over every use of a probe, over samples, over micro-batches.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.autograd import Function

from funcamp import _tree
from funcamp._types import Args, FunctionContext
from funcamp._upstream.autograd_function import keep_functions_whole
from funcamp.numerics.counting import check_sample, check_values, count, take_numbers
from funcamp.numerics.counting_pass import count_jointly
from funcamp.numerics.record import Record


def count_both(saved: Tensor, grad: Tensor, sample: int) -> Tensor:
    """Return the rows of a sample of the forward pass and of the gradient, counted together."""
    return count_jointly([saved.unsqueeze(0), take_numbers(grad, sample).unsqueeze(0)])


class _TapContext(FunctionContext, Protocol):
    """What a tap keeps for its backward pass."""

    sample: int | None


class _Tap(Function):
    """A copy of x, which saves what the backward pass counts."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, forward: Tensor, backward: Tensor, sample: int | None) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        # With a sample all counting happens in the backward pass: fewer kernels to compile and to launch.
        # x is copied, because in-place operations may write the result; a compiler removes the copy.
        tapped = x.clone()
        saved = count(x) if sample is None else take_numbers(x, sample).clone()
        return tapped, saved

    @staticmethod
    def setup_context(ctx: _TapContext, inputs: Args, output: tuple[Tensor, Tensor]) -> None:
        _, saved = output
        ctx.save_for_backward(saved)
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)  # a loss that does not depend on x leaves the record empty
        ctx.sample = inputs[3]

    @staticmethod
    def backward(
        ctx: _TapContext, grad: Tensor | None, _: None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (saved,) = ctx.saved_tensors
        if grad is None:
            return None, None, None, None
        if ctx.sample is None:
            # Under torch.func.vjp the saved tensor is a wrapper of a finished level; any operation unwraps it.
            return grad, saved.clone(), count(grad), None
        forward, backward = count_both(saved, grad, ctx.sample)
        return grad, forward, backward, None


def tap(x: Tensor, probe: Record, *, sample: int | None = None) -> Tensor:
    """Return x; its gradient with respect to the probe is the statistics of x and of x's gradient.

    d loss / d probe = Record(stats(x), stats(d loss / d x)), summed over all uses of the probe. Pure; works under
    torch.func's transforms except forward mode, double backward, autocast, checkpoint, torch.compile(fullgraph=True)
    and in a captured step. If the loss does not depend on x, the record stays empty (count 0). The gradient of a scaled
    loss is counted scaled: see `Record.unscale`. No sync.

    Args:
        x: a strided floating-point or complex tensor.
        probe: the result of `probe`, on x's device.
        sample: count about this many elements, evenly spread, if x has more; None for all. Counting a number takes
            1 to 3 ns compiled on two cores, 75 ns eager.

    Returns:
        x, as a new tensor.

    Raises:
        TypeError: x is not such a tensor, probe not a `Record`, or sample not an integer.
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
    keep_functions_whole()
    function: Any = _Tap
    tapped: Tensor
    tapped, _ = function.apply(x, probe.forward.row, probe.backward.row, sample)
    return tapped
