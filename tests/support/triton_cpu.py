"""A GPU's program executed on the CPU: Triton's interpreter, what it lacks, and stand-ins for CUDA's libraries."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle, interpreter_builder

_aten = torch.ops.aten
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _elementwise(function: Callable[..., object], dtype: tl.dtype | None = None) -> Callable[..., tl.tensor]:
    """An external function of CUDA's, in numpy; its result has the type of its first argument, or dtype."""

    def call(*args: object, **_: object) -> tl.tensor:
        given = next(arg for arg in args if isinstance(arg, tl.tensor))
        arrays = [arg.handle.data if isinstance(arg, tl.tensor) else arg for arg in args]
        with np.errstate(all="ignore"):
            data = np.asarray(function(*arrays))
        out = given.dtype if dtype is None else dtype
        data = data.astype({tl.int32: np.int32, tl.int1: np.bool_}.get(out, given.handle.data.dtype))
        shape = tl.block_type(out, list(data.shape)) if given.type.is_block() else out
        return tl.tensor(TensorHandle(data, out), shape)

    return call


_SAME = ("exp", "exp2", "expm1", "log", "log1p", "log2", "sqrt", "sin", "cos", "tanh", "floor", "ceil", "trunc", "fmod")
_OTHER: dict[str, Callable[..., object]] = {
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "pow": lambda x, y: np.power(x, np.asarray(y).astype(x.dtype)),
    "erf": _erf,
    "nearbyint": np.rint,
    "mul_rn": np.multiply,
    "add_rn": np.add,
    "sub_rn": np.subtract,
    "div_rn": np.divide,
}
_EXTERNAL = {
    **{name: _elementwise(getattr(np, name)) for name in (*_SAME, "abs", "ldexp")},
    **{name: _elementwise(function) for name, function in _OTHER.items()},
    **{name: _elementwise(getattr(np, name), tl.int1) for name in ("isinf", "isnan")},
    "finitef": _elementwise(np.isfinite, tl.int1),
    "signbit": _elementwise(np.signbit, tl.int32),
    "ilogb": _elementwise(lambda x: np.frexp(x)[1] - 1, tl.int32),
}


def _fma(self: object, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    """With one rounding, as the GPU's; Triton's interpreter rounds the product too."""
    wide = np.float64 if x.data.dtype == np.float32 else x.data.dtype
    with np.errstate(all="ignore"):
        data = x.data.astype(wide) * y.data.astype(wide) + z.data.astype(wide)
    return TensorHandle(data.astype(x.data.dtype), z.dtype.scalar)


def _erf_of(self: object, x: TensorHandle) -> TensorHandle:
    return TensorHandle(_erf(x.data).astype(x.data.dtype), x.dtype.scalar)


def _reduce(self: Any, given: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """As a tree, as blocks are powers of two; Triton's interpreter calls the function for every element."""
    dtypes = [value.dtype for value in given]
    arrays = [value.handle.data for value in given]
    kept = [1] * arrays[0].ndim
    if self.axis is not None:
        kept = [1 if dim == self.axis else size for dim, size in enumerate(arrays[0].shape)]
        arrays = [np.moveaxis(array, self.axis, 0) for array in arrays]
    else:
        arrays = [array.reshape(-1) for array in arrays]
    while half := len(arrays[0]) // 2:
        low = [self.to_tensor(array[:half], dtype) for array, dtype in zip(arrays, dtypes)]
        high = [self.to_tensor(array[half:], dtype) for array, dtype in zip(arrays, dtypes)]
        found = self.combine_fn.fn(*low, *high)
        arrays = [value.handle.data for value in (found if isinstance(found, tuple) else (found,))]
    ends = [array.reshape(kept) if self.keep_dims else array[0] for array in arrays]
    return [self.to_tensor(end, dtype) for end, dtype in zip(ends, dtypes)]


_complete = False


def complete() -> None:
    """Give Triton's interpreter, if this process has it, what it lacks of CUDA's functions; for good."""
    global _complete
    if not knobs.runtime.interpret or _complete:
        return
    _complete = True
    for name, function in _EXTERNAL.items():
        setattr(libdevice, name, function)
    builder: Any = type(interpreter_builder)
    builder.create_fma, builder.create_erf = _fma, _erf_of
    methods = interpreter._patch_lang_tensor

    def with_index(tensor: object, scope: Any) -> None:
        """A number may be an array of one, which numpy 2.4 does not convert: Triton 3.6."""
        methods(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = with_index
    interpreter.ReduceOps.generic_reduce = _reduce
    # Triton's interpreter patches the language for every function that it calls, a third of the time: once is enough.
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    # A GPU checks it only in debug mode.
    interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


@contextlib.contextmanager
def loaded() -> Iterator[None]:
    """A region in which programs are imported."""
    guards: Any = torch._C._dynamo.guards
    check = guards.assert_size_stride

    def lay_out(value: Tensor, size: tuple[int, ...], stride: tuple[int, ...], *library: str) -> None:
        """Before the program checks what a library gave it: lay it out as CUDA's would have."""
        if library not in ((), ("input",)) and value.stride() != stride and value.shape == size:
            value.set_(torch.empty_strided(size, stride, dtype=value.dtype).copy_(value))  # type: ignore[call-overload]
        check(value, size, stride, *library)

    with mock.patch.multiple(guards, _empty_strided_cuda=guards._empty_strided_cpu, assert_size_stride=lay_out):
        yield


_SWITCHES: Any = dict.fromkeys(("_exchange_device", "_maybe_exchange_device", "set_device"), lambda device: 0)


@contextlib.contextmanager
def executed() -> Iterator[None]:
    """A region in which programs are called with tensors of this machine."""
    launch = CachingAutotuner.run

    def run(kernel: Any, *args: object, **kwargs: object) -> object:
        """With the largest of the blocks that Inductor would try: every instance costs the interpreter as much."""
        kernel.configs.sort(key=lambda config: -math.prod(v for k, v in config.kwargs.items() if k.endswith("BLOCK")))
        return launch(kernel, *args, **kwargs)

    with (
        mock.patch.object(CachingAutotuner, "run", run),
        mock.patch.multiple(torch.cuda, **_SWITCHES),
        np.errstate(all="ignore"),
        Libraries(),
    ):
        yield


class Libraries(TorchDispatchMode):
    """What a program calls besides its own kernels, done here; what it makes on the GPU is made here."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        return _INSTEAD.get(func, func)(*args, **kwargs)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, float]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q.float() @ k.float().mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores, scale


def _rows_first(value: Tensor) -> Tensor:
    """The layout of flash attention's results: (batch, time, heads, width) in memory."""
    return value.transpose(1, 2).contiguous().transpose(1, 2)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, _: bool = False, *, scale: Any = None
) -> tuple[Any, ...]:
    assert dropout == 0.0
    scores = _scores(q, k, causal, scale)[0]
    logsumexp = scores.logsumexp(-1)
    out = _rows_first(((scores - logsumexp[..., None]).exp() @ v.float()).to(q.dtype))
    seed, offset = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out, logsumexp, None, None, q.shape[2], k.shape[2], seed, offset, torch.empty(0)


def _attention_backward(*args: Any, scale: float | None = None) -> tuple[Tensor, ...]:
    grad, q, k, v, out, logsumexp = args[:6]
    scores, factor = _scores(q, k, args[11], scale)
    shares, grad = (scores - logsumexp[..., None]).exp(), grad.float()
    inner = shares * (grad @ v.float().mT - (grad * out.float()).sum(-1, keepdim=True)) * factor
    found = inner @ k.float(), inner.mT @ q.float(), shares.mT @ grad
    return tuple(_rows_first(one.to(q.dtype)) for one in found)


_INSTEAD: dict[object, Callable[..., object]] = {
    _aten._scaled_dot_product_flash_attention.default: _attention,
    _aten._scaled_dot_product_flash_attention_backward.default: _attention_backward,
}
