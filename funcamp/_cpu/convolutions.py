"""Convolutions on a CPU by formulas that it computes faster than oneDNN or torch's own kernels.

Measured with torch 2.13 on an AMD EPYC with AVX-512, one core:

- float16, where the CPU has no arithmetic for it: torch's own kernels take 10 to 100 times as long as oneDNN's in
  float32. Computed in float32 and rounded once.
- The gradient of the weight of a depthwise convolution, for each channel c and offset k

      dw[c, k] = sum over images n and places p of  dy[n, c, p] * x[n, c, stride * p + dilation * k - padding]

  oneDNN has fast kernels for sizes up to 3. For others generated loops over channels, which lie side by side, take 1/2
  to 1/40 of its time.
- The gradient of the input of a depthwise convolution with strides, in bfloat16: oneDNN takes 10 to 25 times as long as
  in float32. With it the other gradients are computed in float32 too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._jit.passes.program import Pass
from funcamp._jit.passes.table import Decompositions

_aten = torch.ops.aten
_FORWARD, _BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
#: The largest size of a kernel for which oneDNN's gradient of a depthwise weight is fast.
_LARGEST_FAST = 3
#: The number of channels from which on loops over them are fast.
_MANY_CHANNELS = 32
#: torch 2.11 orders loops wrongly in programs with these: the gradient of another layer was wrong.
_LOOPS_ARE_RIGHT = not _upstream.LOST_ORDER
#: A copy in this layout, which Inductor would otherwise compute anew wherever it is read.
_copied: Any = _upstream.find("torch._inductor.inductor_prims.force_stride_order")
_has_half: Any = _upstream.find("torch.ops.mkldnn._is_mkldnn_fp16_supported", lambda: False)


def convolutions(table: Decompositions) -> Decompositions:
    """Return the decompositions of convolutions, given the table before."""
    former_backward = table[_BACKWARD]

    def backward(*args: Any) -> object:
        gradients = _backward(*args)
        return former_backward(*args) if gradients is NotImplemented else gradients

    return {_FORWARD: _forward, _BACKWARD: backward}


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: object) -> object:
    """Decompose `aten.convolution`."""
    if not _in_slow_half(x):
        return NotImplemented
    return _FORWARD(x.float(), weight.float(), None if bias is None else bias.float(), *geometry).to(x.dtype)


class _Geometry(NamedTuple):
    """The arguments of `aten.convolution_backward` that are no tensors, in its order."""

    bias_sizes: list[int] | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


def _backward(grad: Tensor, x: Tensor, weight: Tensor, *others: Any) -> object:
    """Decompose `aten.convolution_backward`."""
    *geometry_arguments, (needs_input, needs_weight, needs_bias) = others
    geometry = _Geometry(*geometry_arguments)
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return NotImplemented
    is_depthwise = _is_depthwise(x, weight, geometry)
    strided_bfloat16 = is_depthwise and x.dtype == torch.bfloat16 and max(geometry.stride) > 1
    in_float32 = _in_slow_half(x) or (strided_bfloat16 and needs_input)
    may_loop = needs_weight and is_depthwise and x.dtype != torch.float16
    weight_by_loops = may_loop and _loops_are_faster(weight, geometry)
    if not in_float32 and not weight_by_loops:
        return NotImplemented
    dtype = torch.float32 if in_float32 else x.dtype
    tensors = [value.to(dtype) for value in (grad, x, weight)]
    # torch computes the gradient of the weight with that of the bias, asked for or not.
    mask = [needs_input, False, False] if weight_by_loops else [needs_input, needs_weight, needs_bias]
    gradients: list[Tensor | None] = [None, None, None]
    if any(mask):
        computed = _BACKWARD(*tensors, *geometry, mask)
        gradients = [value.to(x.dtype) if is_needed else None for value, is_needed in zip(computed, mask)]
    if weight_by_loops:
        gradients[1] = _depthwise_weight_gradient(grad, x, weight.shape[2:], geometry)
        gradients[2] = grad.sum([0, *range(2, grad.dim())]) if needs_bias else None
    return tuple(gradients)


def _is_depthwise(x: Tensor, weight: Tensor, geometry: _Geometry) -> bool:
    """Return whether each channel is convolved with a separate kernel."""
    channels = x.shape[1]
    return geometry.groups == channels == weight.shape[0] and channels > 1 and not geometry.transposed


def _loops_are_faster(weight: Tensor, geometry: _Geometry) -> bool:
    """Return whether loops compute the gradient of a depthwise weight faster than oneDNN, and right."""
    kernel = weight.shape[2:]
    is_fast_in_onednn = len(kernel) <= 2 and max(kernel) <= _LARGEST_FAST and max(geometry.dilation) <= 1
    return _LOOPS_ARE_RIGHT and geometry.groups >= _MANY_CHANNELS and not is_fast_in_onednn


def _in_slow_half(x: Tensor) -> bool:
    """Return whether oneDNN does not convolve this float16 tensor on this CPU."""
    return x.dtype == torch.float16 and x.device.type == "cpu" and not _has_half()


def _depthwise_weight_gradient(grad: Tensor, x: Tensor, kernel: torch.Size, geometry: _Geometry) -> Tensor:
    """Return the gradient of the weight of a depthwise convolution, in shape (channels, 1, *kernel)."""
    dims = len(kernel)
    # For each dimension, from the last on: the padding before and after. The channels, which are last, get none.
    pads = [0, 0]
    for size in reversed(geometry.padding):
        pads += [size, size]
    # Of shape (images, *places, channels), then with a further dimension for each of the kernel's.
    windows = torch.nn.functional.pad(_channels_last(x), pads)
    for dim in range(dims):
        dilation = geometry.dilation[dim]
        extent = (kernel[dim] - 1) * dilation + 1
        windows = windows.unfold(1 + dim, extent, geometry.stride[dim])[..., ::dilation]
    products = windows * _channels_last(grad)[(..., *[None] * dims)]
    images_and_places = list(range(dims + 1))
    return products.sum(images_and_places).to(x.dtype).unsqueeze(1)


def _channels_last(x: Tensor) -> Tensor:
    """Return a tensor with its channels as the last dimension, side by side in memory, in float32."""
    last = x.movedim(1, -1).contiguous()
    return (_copied(last, last.stride()) if _upstream.usable(_copied) else last).float()


PASS = Pass(
    name="convolutions",
    why="a CPU computes gradients of depthwise convolutions, and float16 convolutions, faster by other formulas",
    evidence="benchmarks/passes.py",
    where=lambda target: target.by_inductor and "cpu" in target.devices,
    run=lambda program: program.extended(convolutions),
)
