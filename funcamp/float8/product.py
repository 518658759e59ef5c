"""`scaled_mm`: the product of a linear layer in float8, forward and backward.

    y      = x w^T       E4M3 times E4M3
    grad_x = g w         E5M2 times E4M3
    grad_w = g^T x       E5M2 times E4M3

Each is a b^T whose operands are scaled into float8 for it, row by row or with one scale. The backward pass gets x and w
as they are, and scales them again: it needs no memory for float8 copies, and a second derivative reaches `_Kernel`.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from funcamp import _tree, _upstream
from funcamp._scaler.state import reciprocal
from funcamp._types import FunctionContext, VmapInfo
from funcamp._upstream.autograd_function import keep_functions_whole
from funcamp.float8.config import BACKWARD, FORWARD, MULTIPLE, Float8Config, check_config, fits
from funcamp.float8.quantized import Quantized, check_wide, quantize

_scaled_mm = _upstream.find("torch._scaled_mm")


class _ProductContext(FunctionContext, Protocol):
    """What a product keeps for its backward pass, besides tensors."""

    config: Float8Config


class _Product(Function):
    """x weight^T with x of shape (rows, in); the gradients are products in float8 too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, config: Float8Config) -> Tensor:
        return _multiply(_scaled(x, config), _scaled(weight, config), x.dtype, config, fast=True)

    @staticmethod
    def setup_context(ctx: _ProductContext, inputs: tuple[Any, ...], output: object) -> None:  # noqa: ARG004
        x, weight, ctx.config = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: _ProductContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        config = ctx.config
        scaled_grad = _scaled(grad, config, BACKWARD)
        grad_x = None
        grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _multiply(scaled_grad, _scaled(weight.t(), config), x.dtype, config, fast=False)
        if ctx.needs_input_grad[1]:
            if config.by_row:
                transposed_grad = _scaled(grad.t(), config, BACKWARD)
            else:
                transposed_grad = Quantized(scaled_grad.values.t(), scaled_grad.scale)
            grad_weight = _multiply(transposed_grad, _scaled(x.t(), config), weight.dtype, config, fast=False)
        return grad_x, grad_weight, None


def _scaled(matrix: Tensor, config: Float8Config, dtype: torch.dtype = FORWARD) -> Quantized:
    """Scale an operand into float8: a product sums along its rows."""
    return quantize(matrix, dtype, dim=1 if config.by_row else None, power_of_two=config.power_of_two)


def _multiply(a: Quantized, b: Quantized, dtype: torch.dtype, config: Float8Config, *, fast: bool) -> Tensor:
    """Return a b^T in a dtype.

    fast: `use_fast_accum` of torch's kernel on a GPU.
    """
    scale_a = reciprocal(a.scale).reshape(-1, 1)  # Inductor rejects a view of shape ()
    scale_b = reciprocal(b.scale).reshape(1, -1)
    kernel: Any = _Kernel.apply
    product: Tensor = kernel(a.values.contiguous(), b.values.contiguous(), scale_a, scale_b, dtype, config, fast)
    return product


class _Kernel(Function):
    """torch's product of scaled matrices, without a derivative; under vmap one product after the other."""

    @staticmethod
    def forward(
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        dtype: torch.dtype,
        config: Float8Config,
        fast: bool,
    ) -> Tensor:
        b = b.t()  # the kernel takes its second operand column by column
        kernel_dtype = torch.bfloat16 if config.by_row else dtype  # the GPU's kernel with scales per row has no other
        device_type = a.device.type
        # On a CPU torch's float8 product is a product in float32, which autocast would lower.
        with contextlib.nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False):
            if config.emulate:
                emulated = (a.float() * scale_a) @ (b.float() * scale_b)
                return emulated.to(kernel_dtype).to(dtype)
            y: Tensor = _scaled_mm(a, b, scale_a, scale_b, out_dtype=kernel_dtype, use_fast_accum=fast)
            return y.to(dtype)

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        pass

    @staticmethod
    def backward(ctx: object, grad: object) -> object:  # noqa: ARG004
        raise RuntimeError(
            "float8.scaled_mm: a loss must be differentiated once; a second derivative (of a gradient penalty) needs "
            "the layer in bfloat16: name it in float8.convert(model, keep=...)"
        )

    @staticmethod
    def vmap(info: VmapInfo, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        kernel: Any = _Kernel.apply
        products = []
        for sample in range(info.batch_size):
            sample_args = [arg if dim is None else arg.select(dim, sample) for arg, dim in zip(args, in_dims)]
            products.append(kernel(*sample_args))
        return torch.stack(products), 0


def scaled_mm(x: Tensor, weight: Tensor, config: Float8Config = Float8Config()) -> Tensor:
    """Multiply as a linear layer does, in float8: E4M3 forward, E5M2 gradients.

    y = x weight^T. The gradients are products of the same kind: grad_x = g weight and grad_weight = g^T x, in the
    dtypes of x and weight. Sums are in float32. A value that is not finite makes its results NaN, so an overflow
    reaches `found_inf`. Under torch.autocast x is cast to its dtype first, as for a linear layer. Rows are filled up
    with zeros to a multiple of 16, which changes no sum. Pure; safe under torch.compile, vmap and torch.func; no
    second derivative; no sync.

    Args:
        x: float32, bfloat16 or float16, shape (..., in).
        weight: the same dtypes, shape (out, in), both multiples of 16: the weight of a torch.nn.Linear.
        config: how tensors are scaled.

    Returns:
        y, shape (..., out), in x's dtype.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: a shape differs from the above.
        RuntimeError: the device has no float8 products; set emulate=True in the configuration.

    Example:
        >>> from funcamp import float8
        >>> x, weight = torch.ones(2, 16), torch.full((16, 16), 0.5)
        >>> float8.scaled_mm(x, weight)[0, 0].round()
        tensor(8.)

    References:
        torchao/float8/float8_linear.py, pytorch/ao at 36027d8.
    """
    call = "float8.scaled_mm"
    config = check_config(call, config)
    check_wide(call, "x", x)
    check_wide(call, "weight", weight)
    if weight.dim() != 2 or not fits(weight.shape):
        raise ValueError(
            f"{call}: weight must have shape (out, in), both multiples of {MULTIPLE}, as float8 products need it: pad "
            f"the layer, or keep it in bfloat16; got {tuple(weight.shape)}"
        )
    if not x.dim() or x.shape[-1] != weight.shape[1] or x.device != weight.device:
        raise ValueError(
            f"{call}: x must have shape (..., {weight.shape[1]}) on {weight.device}; got {_tree.describe(x)}"
        )
    if not config.emulate:
        check_device(x.device, config)
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    matrix = x.reshape(-1, x.shape[-1])
    rows = matrix.shape[0]
    missing_rows = -rows % MULTIPLE if rows else MULTIPLE
    if missing_rows:
        matrix = F.pad(matrix, (0, 0, 0, missing_rows))
    keep_functions_whole()
    product: Any = _Product.apply
    y: Tensor = product(matrix, weight, config)
    return y[:rows].reshape(*x.shape[:-1], weight.shape[0])


def check_device(device: torch.device, config: Float8Config) -> None:
    """Raise RuntimeError if a device has no float8 products."""
    missing = "" if device.type in ("cpu", "cuda", "meta") else "at all"
    if device.type == "cpu" and config.by_row and _upstream.NO_ROWS_ON_CPU:
        missing = "per row, which begin with torch 2.13"
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 9):
        missing = "below compute capability 8.9"
    if missing:
        raise RuntimeError(
            f"float8.scaled_mm: {device.type} must have float8 products, and has none {missing}: use a configuration "
            "with emulate=True, which multiplies in float32, or compute in bfloat16"
        )
    _upstream.check(_scaled_mm)
