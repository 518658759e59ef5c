"""`scaled_mm`: the product of a linear layer in float8, forward and backward.

    y      = x w^T       E4M3 times E4M3
    grad_x = g w         E5M2 times E4M3
    grad_w = g^T x       E5M2 times E4M3

With delayed scaling the gradient with respect to `amax` is not a derivative: the amaxes of x, w and g take its place.
Two gradients would be summed, and amaxes need the maximum, so a product also returns its `amax` for the next product
with the same scales: the amaxes pass from the last use to the first, each use taking the maximum with its own.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from funcamp import _tree, _upstream
from funcamp._float8.config import BACKWARD, FORWARD, Float8Config, check_config
from funcamp._float8.quantize import amax_of, check_wide, quantize, reciprocal
from funcamp._float8.state import check_tensor
from funcamp._upstream.autograd_function import keep_functions_whole

#: The sizes that float8 products accept are multiples of this.
MULTIPLE = 16

_scaled_mm: Any = _upstream.find("torch._scaled_mm")


class _Product(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        scales: Tensor | None,
        inverse: Tensor | None,
        amax: Tensor | None,
        by_row: bool,
        power: bool,
        emulate: bool,
    ) -> Any:
        quantized = _Quantizer(scales, inverse, by_row, power)
        y = _multiply(quantized(x, 0, 1), quantized(weight, 1, 1), x.dtype, by_row, emulate, fast=True)
        return y if amax is None else (y, amax.clone())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        # The tensors themselves: per row, the backward pass needs the scales of their columns.
        ctx.save_for_backward(*inputs[:4])
        ctx.options = inputs[5:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *merged: Tensor) -> Any:
        x, weight, scales, inverse = ctx.saved_tensors
        by_row, power, emulate = ctx.options
        quantized = _Quantizer(scales, inverse, by_row, power)
        grad_x = grad_weight = amax = None
        if ctx.needs_input_grad[0]:
            by_weight = quantized(weight, 1, 0).t()
            grad_x = _multiply(quantized(grad, 2, 1), by_weight, x.dtype, by_row, emulate)
        if ctx.needs_input_grad[1]:
            by_input = quantized(x, 0, 0).t()
            grad_weight = _multiply(quantized(grad, 2, 0).t(), by_input, weight.dtype, by_row, emulate)
        if merged:
            amax = torch.maximum(torch.stack([amax_of(x), amax_of(weight), amax_of(grad)]), merged[0])
        return grad_x, grad_weight, None, None, amax, None, None, None


class _Operand(NamedTuple):
    """A matrix in float8, and the reciprocal of its scale, or those of its rows."""

    values: Tensor
    inverse: Tensor

    def t(self) -> _Operand:
        return _Operand(self.values.t(), self.inverse)


class _Quantizer:
    """Quantizes the tensors of one product: input 0, weight 1, gradient 2; per row along a dimension."""

    def __init__(self, scales: Tensor | None, inverse: Tensor | None, by_row: bool, power_of_two: bool) -> None:
        self._scales, self._inverse, self._by_row, self._power_of_two = scales, inverse, by_row, power_of_two
        self._known: dict[int, _Operand] = {}

    def __call__(self, value: Tensor, which: int, dim: int) -> _Operand:
        if not self._by_row and which in self._known:
            return self._known[which]
        dtype = BACKWARD if which == 2 else FORWARD
        if self._scales is None or self._inverse is None:
            made = quantize(value, dtype, dim=dim if self._by_row else None, power_of_two=self._power_of_two)
            self._known[which] = _Operand(made.values, reciprocal(made.scale))
        else:
            made = quantize(value, dtype, scale=self._scales[which])
            self._known[which] = _Operand(made.values, self._inverse[which])
        return self._known[which]


def _multiply(
    a: _Operand, b: _Operand, dtype: torch.dtype, by_row: bool, emulate: bool, *, fast: bool = False
) -> Tensor:
    """Return a b^T in a dtype, both operands with a scale per row or one."""
    made = torch.bfloat16 if by_row else dtype  # the GPU's kernel with scales per row makes no other
    inverses = a.inverse.reshape(-1, 1), b.inverse.reshape(1, -1)  # Inductor rejects a view of shape ()
    kernel: Any = _Kernel
    product: Tensor = kernel.apply(a.values.contiguous(), b.values.contiguous(), *inverses, made, emulate, fast)
    return product.to(dtype)


class _Kernel(Function):
    """The product of two matrices in float8, without a derivative; under vmap one product after the other."""

    @staticmethod
    def forward(
        a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, emulate: bool, fast: bool
    ) -> Tensor:
        b, kind = b.t(), a.device.type  # the kernel takes its second operand column by column
        # On a CPU torch's float8 product is a product in float32, which autocast would lower.
        with contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
            if emulate:
                return ((a.float() * inverse_a) @ (b.float() * inverse_b)).to(dtype)
            found: Tensor = _scaled_mm(a, b, scale_a=inverse_a, scale_b=inverse_b, out_dtype=dtype, use_fast_accum=fast)
            return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # noqa: ARG004
        raise RuntimeError(
            "float8.scaled_mm: a loss must be differentiated once; a second derivative (of a gradient penalty) needs "
            "the layer in bfloat16: name it in the policy's keep"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        each = [
            [value if dim is None else value.select(dim, number) for value, dim in zip(args, in_dims)]
            for number in range(info.batch_size)
        ]
        kernel: Any = _Kernel
        return torch.stack([kernel.apply(*one) for one in each]), 0


@overload
def scaled_mm(x: Tensor, weight: Tensor, config: Float8Config = Float8Config()) -> Tensor: ...
@overload
def scaled_mm(
    x: Tensor, weight: Tensor, config: Float8Config, *, scale: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor]: ...
def scaled_mm(
    x: Tensor,
    weight: Tensor,
    config: Float8Config = Float8Config(),
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> Any:
    """Multiply as a linear layer does, in float8: E4M3 forward, E5M2 gradients.

    y = x weight^T. The gradients are products of the same kind: grad_x = g weight and grad_weight = g^T x, in the
    dtypes of x and weight. Sums are in float32. A value that is not finite makes its results NaN, so an overflow
    reaches `found_inf`. Under torch.autocast x is cast to its dtype first, as for a linear layer. Rows are filled up
    with zeros to a multiple of 16, which changes no sum. Pure; safe under torch.compile, vmap and torch.func; no
    second derivative; no sync.

    With delayed scaling, differentiate with respect to amax (zeros): the gradient is the amaxes of this use, for
    `update`. Pass the amax that a use returns to the next use of the same scales, which merges them by MAX.

    Args:
        x: float32, bfloat16 or float16, shape (..., in).
        weight: the same dtypes, shape (out, in), both multiples of 16: the weight of a torch.nn.Linear.
        config: the configuration.
        scale: with delayed scaling, the product's row of `Float8State.scale`, shape (3,).
        amax: with delayed scaling, float32, shape (3,): zeros, or what another use of these scales returned.

    Returns:
        y, shape (..., out), in x's dtype; with delayed scaling the pair of y and amax.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: a shape differs from the above; scale and amax do not belong to the configuration.
        RuntimeError: the device has no float8 products; set emulate=True in the configuration.

    Example:
        >>> from funcamp import float8
        >>> x, weight = torch.ones(2, 16), torch.full((16, 16), 0.5)
        >>> float8.scaled_mm(x, weight)[0, 0]
        tensor(8.)
        >>> config = float8.transformer_engine()
        >>> def loss(amax, state):
        ...     y, amax = float8.scaled_mm(x, weight, config, scale=state.scale[0], amax=amax[0])
        ...     return y.sum()
        >>> state = float8.init(config, 1)
        >>> torch.func.grad(loss)(torch.zeros(1, 3), state)
        tensor([[1.0000, 0.5000, 1.0000]])

    References:
        torchao/float8/float8_linear.py, pytorch/ao at 36027d8.
    """
    call = "float8.scaled_mm"
    config = check_config(call, config)
    check_wide(call, "x", x)
    check_wide(call, "weight", weight)
    if weight.dim() != 2 or not fits(weight):
        raise ValueError(
            f"{call}: weight must have shape (out, in), both multiples of {MULTIPLE}, as float8 products need it: pad "
            f"the layer, or keep it in bfloat16; got {tuple(weight.shape)}"
        )
    if not x.dim() or x.shape[-1] != weight.shape[1] or x.device != weight.device:
        raise ValueError(
            f"{call}: x must have shape (..., {weight.shape[1]}) on {weight.device}; got {_tree.describe(x)}"
        )
    if config.scaling == "delayed":
        check_tensor(call, "scale", scale, (3,))
        check_tensor(call, "amax", amax, (3,))
    elif scale is not None or amax is not None:
        raise ValueError(f"{call}: scale and amax must not be given with current scaling, which has no state")
    return product(x, weight, config, scale, None if scale is None else reciprocal(scale), amax)


def product(
    x: Tensor, weight: Tensor, config: Float8Config, scales: Tensor | None, inverse: Tensor | None, amax: Tensor | None
) -> Any:
    """Return `scaled_mm` of checked arguments, with the reciprocals of the scales."""
    if not config.emulate:
        check_device("float8.scaled_mm", x.device, config)
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    filling = -rows % MULTIPLE if rows else MULTIPLE
    if filling:
        flat = F.pad(flat, (0, 0, 0, filling))
    if torch.compiler.is_dynamo_compiling():
        keep_functions_whole()
    function: Any = _Product
    out = function.apply(flat, weight, scales, inverse, amax, config.by_row, config.power_of_two, config.emulate)
    y, *merged = (out,) if amax is None else out
    y = y[:rows].reshape(*x.shape[:-1], weight.shape[0])
    return (y, *merged) if merged else y


def fits(weight: Tensor) -> bool:
    """Return whether the hardware takes a matrix of this shape."""
    return all(size and size % MULTIPLE == 0 for size in weight.shape)


def check_device(call: str, device: torch.device, config: Float8Config) -> None:
    """Raise RuntimeError if a device has no float8 products."""
    if device.type == "cpu":
        missing = "per row, which begin with torch 2.13" if config.by_row and _upstream.NO_ROWS_ON_CPU.present else ""
    elif device.type == "cuda":
        old = torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 9)
        missing = "below compute capability 8.9" if old else ""
    else:
        missing = "at all" if device.type != "meta" else ""
    if missing:
        raise RuntimeError(
            f"{call}: {device.type} must have float8 products, and has none {missing}: use a configuration with "
            "emulate=True, which multiplies in float32, or compute in bfloat16"
        )
    _upstream.check(_scaled_mm)
