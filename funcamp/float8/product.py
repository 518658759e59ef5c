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
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, overload

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from funcamp import _tree, _upstream
from funcamp._scaler.precision import reciprocal
from funcamp._types import Args, FunctionContext, VmapInfo
from funcamp._upstream.autograd_function import keep_functions_whole
from funcamp.float8.config import BACKWARD, FORWARD, MULTIPLE, Float8Config, check_config, fits
from funcamp.float8.quantized import amax_of, check_wide, quantize
from funcamp.float8.state import check_tensor

_scaled_mm = _upstream.find("torch._scaled_mm")


class Scales(NamedTuple):
    """Scales that are known before the product, and their reciprocals."""

    scale: Tensor
    inverse: Tensor

    def at(self, *index: int) -> Scales:
        """Return the scales at an index."""
        return Scales(self.scale[index], self.inverse[index])


class Operands(NamedTuple):
    """A matrix in float8 for the products of both passes, each of which sums along rows."""

    plain: Tensor
    transposed: Tensor
    inverse: Tensor
    """The reciprocal of the scale, or per row of those of the rows."""
    column_inverse: Tensor | None
    """Per row, of the scales of the columns, which the transposed matrix has; else None, because Dynamo takes no tensor
    twice."""
    amax: Tensor | None
    """With delayed scaling."""

    def transposed_inverse(self) -> Tensor:
        """Return the reciprocals of the scales of the transposed matrix."""
        return self.inverse if self.column_inverse is None else self.column_inverse


_FIELDS = len(Operands._fields)


def make_operands(
    matrix: Tensor, config: Float8Config, delayed: Scales | None, dtype: torch.dtype = FORWARD
) -> Operands:
    """Scale a matrix into float8, with delayed scaling by a given scale."""
    if config.by_row:
        rows = quantize(matrix, dtype, dim=1, power_of_two=config.power_of_two)
        columns = quantize(matrix, dtype, dim=0, power_of_two=config.power_of_two)
        inverse = reciprocal(rows.scale)
        column_inverse = reciprocal(columns.scale)
        return Operands(rows.values.contiguous(), columns.values.t().contiguous(), inverse, column_inverse, amax=None)
    if delayed is None:
        values, scale = quantize(matrix, dtype, power_of_two=config.power_of_two)
        return operands_of_values(values, reciprocal(scale), None)
    values, _ = quantize(matrix, dtype, scale=delayed.scale)
    return operands_of_values(values, delayed.inverse, amax_of(matrix))


def operands_of_values(values: Tensor, inverse: Tensor, amax: Tensor | None) -> Operands:
    """Return the operands of a matrix in float8 with one scale."""
    return Operands(
        plain=values.contiguous(),
        transposed=values.t().contiguous(),
        inverse=inverse,
        column_inverse=None,
        amax=amax,
    )


class _ProductContext(FunctionContext, Protocol):
    """What a product keeps for its backward pass, besides tensors."""

    dtype: torch.dtype
    config: Float8Config


class _Product(Function):
    """The products of operands; x and weight are what the gradients are of, and are not read."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,  # noqa: ARG004
        follows_x: Tensor,  # noqa: ARG004
        scale: Tensor | None,  # noqa: ARG004
        inverse: Tensor | None,  # noqa: ARG004
        amax: Tensor | None,
        config: Float8Config,
        *operand_fields: object,
    ) -> object:
        x_operands, weight_operands = _split_operands(operand_fields)
        y = _multiply(
            x_operands.plain,
            weight_operands.plain,
            x_operands.inverse,
            weight_operands.inverse,
            None,
            x.dtype,
            config,
            True,
        )
        return y if amax is None else (y, amax.clone())

    @staticmethod
    def setup_context(ctx: _ProductContext, inputs: Args, output: object) -> None:  # noqa: ARG004
        x, weight, follows_x, scale, inverse, _, config = inputs[:7]
        ctx.dtype = x.dtype
        ctx.config = config
        x_operands, weight_operands = _split_operands(inputs[7:])
        # The plain matrices are needed in the forward pass only.
        x_operands = x_operands._replace(plain=None)
        weight_operands = weight_operands._replace(plain=None)
        ctx.save_for_backward(weight, follows_x, scale, inverse, *x_operands, *weight_operands)

    @staticmethod
    def backward(ctx: _ProductContext, grad: Tensor, *amaxes_of_later_uses: Tensor) -> tuple[Tensor | None, ...]:
        weight, follows_x, scale, inverse, *operand_fields = ctx.saved_tensors
        x_operands, weight_operands = _split_operands(operand_fields)
        config = ctx.config
        delayed = None if scale is None else Scales(scale, inverse)
        grad_operands = make_operands(grad, config, delayed, BACKWARD)
        grad_x = None
        grad_weight = None
        amax = None
        if ctx.needs_input_grad[0]:
            grad_x = _multiply(
                grad_operands.plain,
                weight_operands.transposed,
                grad_operands.inverse,
                weight_operands.transposed_inverse(),
                weight,
                ctx.dtype,
                config,
                False,
            )
        if ctx.needs_input_grad[1]:
            grad_weight = _multiply(
                grad_operands.transposed,
                x_operands.transposed,
                grad_operands.transposed_inverse(),
                x_operands.transposed_inverse(),
                follows_x,
                weight.dtype,
                config,
                False,
            )
        if grad_operands.amax is not None:
            amaxes = torch.stack([x_operands.amax, weight_operands.amax, grad_operands.amax])
            amax = torch.maximum(amaxes, amaxes_of_later_uses[0])
        no_gradients_of_operands = [None] * (2 * _FIELDS)
        return grad_x, grad_weight, None, None, None, amax, None, *no_gradients_of_operands


def _split_operands(fields: Sequence[Any]) -> tuple[Any, Any]:
    """Return the operands of x and of the weight from the fields of both."""
    return Operands(*fields[:_FIELDS]), Operands(*fields[_FIELDS:])


class _Kernel(Function):
    """a b^T in a dtype, without a derivative; under vmap one product after the other.

    inverse_a, inverse_b: the reciprocals of the scales.
    follows: what b was made of, for the error of a second derivative.
    dtype: of the product.
    fast: `use_fast_accum` of torch's kernel on a GPU.
    """

    @staticmethod
    def forward(
        a: Tensor,
        b: Tensor,
        inverse_a: Tensor,
        inverse_b: Tensor,
        follows: Tensor | None,  # noqa: ARG004
        dtype: torch.dtype,
        config: Float8Config,
        fast: bool,
    ) -> Tensor:
        b = b.t()  # the kernel takes its second operand column by column
        scale_a = inverse_a.reshape(-1, 1)  # Inductor rejects a view of shape ()
        scale_b = inverse_b.reshape(1, -1)
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
            "the layer in bfloat16: name it in the policy's keep"
        )

    @staticmethod
    def vmap(info: VmapInfo, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        products = []
        for sample in range(info.batch_size):
            sample_args = [arg if dim is None else arg.select(dim, sample) for arg, dim in zip(args, in_dims)]
            products.append(_multiply(*sample_args))
        return torch.stack(products), 0


_multiply: Any = _Kernel.apply


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
) -> Tensor | tuple[Tensor, Tensor]:
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
    if weight.dim() != 2 or not fits(weight.shape):
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
    delayed = None if scale is None else Scales(scale, reciprocal(scale))
    weight_operands = make_operands(weight.detach(), config, delayed and delayed.at(1))
    y, amax_for_next_use = product(x, weight, weight_operands, config, delayed, amax)
    return y if amax_for_next_use is None else (y, amax_for_next_use)


def product(
    x: Tensor,
    weight: Tensor,
    weight_operands: Operands,
    config: Float8Config,
    delayed: Scales | None,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return `scaled_mm` of checked arguments, as a pair also without amax.

    delayed: the scales of x, weight and gradient, shape (3,).
    """
    if not config.emulate:
        check_device(x.device, config)
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    matrix = x.reshape(-1, x.shape[-1])
    rows = matrix.shape[0]
    missing_rows = -rows % MULTIPLE if rows else MULTIPLE
    if missing_rows:
        matrix = F.pad(matrix, (0, 0, 0, missing_rows))
    if torch.compiler.is_dynamo_compiling():
        keep_functions_whole()
    x_operands = make_operands(matrix.detach(), config, delayed and delayed.at(0))
    grad_scale, grad_inverse = (None, None) if delayed is None else delayed.at(2)
    # To save x would keep its memory; a second derivative with respect to x must still reach the error of `_Kernel`.
    follows_x = matrix[:0].clone()
    function: Any = _Product
    result = function.apply(
        matrix, weight, follows_x, grad_scale, grad_inverse, amax, config, *x_operands, *weight_operands
    )
    output_shape = (*x.shape[:-1], weight.shape[0])
    y, amax_for_next_use = (result, None) if amax is None else result
    return y[:rows].reshape(output_shape), amax_for_next_use


def check_device(device: torch.device, config: Float8Config) -> None:
    """Raise RuntimeError if a device has no float8 products."""
    missing = "" if device.type in ("cpu", "cuda", "meta") else "at all"
    if device.type == "cpu" and config.by_row and _upstream.NO_ROWS_ON_CPU.present:
        missing = "per row, which begin with torch 2.13"
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 9):
        missing = "below compute capability 8.9"
    if missing:
        raise RuntimeError(
            f"float8.scaled_mm: {device.type} must have float8 products, and has none {missing}: use a configuration "
            "with emulate=True, which multiplies in float32, or compute in bfloat16"
        )
    _upstream.check(_scaled_mm)
