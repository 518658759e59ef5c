"""Convolutions on a CPU by formulas that it computes faster than oneDNN or torch's own kernels.

Measured with torch 2.13 on an AMD EPYC with AVX-512, one core:

- float16, where the CPU has no arithmetic for it: torch's own kernels take 10 to 100 times as long as oneDNN's in
  float32. Computed in float32 and rounded once.
- The gradient of the weight of a depthwise convolution, for each channel c and offset k

      dw[c, k] = sum over images n and places p of  dy[n, c, p] * x[n, c, stride * p + dilation * k - padding]

  oneDNN has fast kernels for sizes up to 3. For others generated loops over channels, which lie side by side, take 1/2
  to 1/40 of its time.
- The gradient of the input of a depthwise convolution with strides, in bfloat16: oneDNN takes 10 to 25 times as long as
  in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._jit.passes.program import Pass
from funcamp._jit.passes.table import Decompositions

_aten = torch.ops.aten
_FORWARD, _BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
#: The largest size of a kernel for which oneDNN's gradient of a depthwise weight is fast.
_FAST = 3
#: The number of channels from which on loops over them are fast.
_MANY = 32
#: torch 2.11 orders loops wrongly in programs with these: the gradient of another layer was wrong.
_LOOPS = not _upstream.LOST_ORDER.present
#: A copy in this layout, which Inductor would otherwise compute anew wherever it is read.
_copied: Any = _upstream.find("torch._inductor.inductor_prims.force_stride_order")
_has_half: Any = _upstream.find("torch.ops.mkldnn._is_mkldnn_fp16_supported", lambda: False)


def convolutions(table: Decompositions) -> Decompositions:
    """Return the decompositions of convolutions, given the table before."""
    before = table[_BACKWARD]

    def backward(*args: Any) -> Any:
        found = _backward(*args)
        return before(*args) if found is NotImplemented else found

    return {_FORWARD: _forward, _BACKWARD: backward}


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Any:
    """Decompose `aten.convolution`."""
    if not _in_slow_half(x):
        return NotImplemented
    return _FORWARD(x.float(), weight.float(), None if bias is None else bias.float(), *geometry).to(x.dtype)


def _backward(grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any) -> Any:
    """Decompose `aten.convolution_backward`."""
    stride, padding, dilation, transposed, output_padding, groups, wanted = rest
    geometry = bias_sizes, stride, padding, dilation, transposed, output_padding, groups

    def computed(dtype: torch.dtype, *mask: bool) -> list[Tensor | None]:
        given = [value.to(dtype) for value in (grad, x, weight)]
        found: Any = _BACKWARD(*given, *geometry, list(mask))
        # torch returns the gradient of the weight with that of the bias, wanted or not.
        return [value.to(x.dtype) if asked else None for value, asked in zip(found, mask)]

    if _in_slow_half(x):
        return tuple(computed(torch.float32, *wanted))
    one_by_one = groups == x.shape[1] == weight.shape[0] and groups > 1 and not transposed
    if not one_by_one or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    kernel = weight.shape[2:]
    loops = _LOOPS and groups >= _MANY and wanted[1] and (len(kernel) > 2 or max(kernel) > _FAST or max(dilation) > 1)
    wide = wanted[0] and x.dtype == torch.bfloat16 and max(stride) > 1
    if not loops and not wide:
        return NotImplemented
    by_input = computed(torch.float32 if wide else x.dtype, True, False, False)[0] if wanted[0] else None
    if not loops:
        return (by_input, *computed(x.dtype, False, *wanted[1:])[1:])
    by_weight = _depthwise_weight(grad, x, kernel, stride, padding, dilation)
    return by_input, by_weight, grad.sum([0, *range(2, grad.dim())]) if wanted[2] else None


def _in_slow_half(x: Tensor) -> bool:
    """Return whether oneDNN does not convolve this float16 tensor on this CPU."""
    return x.dtype == torch.float16 and x.device.type == "cpu" and not _has_half()


def _depthwise_weight(
    grad: Tensor, x: Tensor, kernel: torch.Size, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """Return the gradient of the weight of a depthwise convolution, in shape (channels, 1, *kernel)."""
    dims = len(kernel)
    windows = torch.nn.functional.pad(_channels_last(x), [0, 0, *(size for size in padding[::-1] for _ in range(2))])
    for dim in range(dims):
        windows = windows.unfold(1 + dim, (kernel[dim] - 1) * dilation[dim] + 1, stride[dim])[..., :: dilation[dim]]
    products = windows * _channels_last(grad)[(..., *[None] * dims)]
    return products.sum(list(range(dims + 1))).to(x.dtype).unsqueeze(1)


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
