"""Operations as events: reads and writes of gradients, and float16 numbers that do not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._audit import events
from funcamp._audit.events import Event
from funcamp._audit.lines import calling_line, is_called_by_funcamp
from funcamp._audit.tracked import Tracked

_current_node = _upstream.find("torch._C._current_autograd_node")
_without_modes = _upstream.find("torch._C._DisableTorchDispatch")
if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as _Mode
else:
    _Mode = _upstream.find("torch.utils._python_dispatch.TorchDispatchMode")

#: Statistics. A check for inf and NaN is none: it has no `abs` that is read further.
_READS = {"norm", "linalg_vector_norm", "_foreach_norm", "sum", "mean", "max", "amax", "min", "std", "var", "pow"}
_READS |= {"_local_scalar_dense", "square", "dot", "histc"}
_MAGNITUDES = {"abs", "_foreach_abs"}
_WRITES = {"mul_", "div_", "copy_", "_foreach_mul_", "_foreach_div_", "_foreach_copy_"}
_WRITES |= {"_amp_foreach_non_finite_check_and_unscale_"}
_CLIPS = {
    "clamp",
    "clamp_min",
    "clamp_max",
    "clamp_",
    "clamp_min_",
    "clamp_max_",
    "_foreach_clamp_min_",
    "_foreach_clamp_max_",
}
#: Writes that are no unscaling if the factor is a tensor of the gradient's shape.
_PRODUCTS = {"mul_", "div_"}
_ZEROS = {"zero_", "_foreach_zero_"}
_OF_GRADIENTS = _READS | _MAGNITUDES | _WRITES | _CLIPS | _ZEROS

#: Operations that read a loss, or divide it.
_OF_LOSSES = {"_local_scalar_dense", "div", "mul"}

#: Operations whose result has their constant, with a float16 tensor.
_WITH_CONSTANT = {"add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "scalar_tensor"}
#: Those of an epsilon.
_WITH_EPSILON = {"add", "add_", "clamp_min", "clamp_min_", "clamp", "clamp_"}
#: Those that raise for a constant beyond float16.
_RAISING = {"masked_fill", "masked_fill_", "fill_", "full", "full_like", "new_full"}
_SUMS = {"add", "add_"}
#: Half of the smallest float16 number; what is not larger rounds to zero.
_EPSILON = 2.0**-25
_LARGEST = torch.finfo(torch.float16).max

#: Operations that make inf of finite numbers in any dtype, or whose values mean nothing.
_NO_OVERFLOWS = ("log", "div", "reciprocal", "rsqrt", "empty", "new_empty", "resize", "view", "set_")


class Operations(_Mode):
    """A dispatch mode that turns operations of the user's code into events.

    Args:
        emit: gets each event.
        tracked: which tensors are gradients.
        is_quiet: whether operations are those of a scaler, an optimizer or torch's clipping.
    """

    def __init__(self, emit: Callable[[Event], None], tracked: Tracked, is_quiet: Callable[[], bool]) -> None:
        for private_name in (_current_node, _without_modes, _Mode):
            _upstream.check(private_name)
        super().__init__()  # type: ignore[no-untyped-call]
        self._emit = emit
        self._tracked = tracked
        self._is_quiet = is_quiet

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if self._is_quiet() or _current_node() is not None:
            return func(*args, **keywords)
        name = func._schema.name.split("::")[1]
        if name in _RAISING and _is_float16(args, keywords):
            self._find_constant(name, args)
        result = func(*args, **keywords)
        if name in _OF_LOSSES:
            self._find_loss(args[0])
        if name in _OF_GRADIENTS:
            self._find_gradients(name, args, result)
        if isinstance(result, Tensor) and result.dtype == torch.float16:
            self._find_misfits(name, args, result)
        return result

    def _find_loss(self, tensor: Any) -> None:
        """Report a scaled loss that is read or divided."""
        scaling = self._tracked.scaling_of(tensor)
        if scaling is not None:
            self._emit(events.ScaledLossRead(calling_line(), scaling.scaler, scaling.updates))

    def _find_gradients(self, name: str, args: Any, result: Any) -> None:
        """Report what an operation does with gradients."""
        tensors = _tensors_in(args)
        keys = self._tracked.gradients_among(tensors[:1] if name.endswith("_") and name[0] != "_" else tensors)
        if not keys:
            return
        if name in _MAGNITUDES:
            for magnitude, key in zip(_tensors_in([result]), keys):
                self._tracked.keep_magnitude(magnitude, key)
        elif name in _READS:
            self._emit(events.GradientRead(calling_line(), keys))
        elif name in _CLIPS:
            self._emit(events.Clipped(calling_line(), keys))
        elif name in _ZEROS:
            self._emit(events.Cleared(calling_line(), keys, None))
        elif not (name in _PRODUCTS and _is_mask(args[1])):
            self._emit(events.GradientWritten(calling_line(), keys))

    def _find_misfits(self, name: str, args: Any, result: Tensor) -> None:
        """Report a constant that float16 does not have, else an overflow."""
        if name in _WITH_EPSILON:
            for value in _numbers_in(args):
                if 0 < abs(value) <= _EPSILON:
                    self._emit(events.ConstantUsed(calling_line(), name, value))
                    return
        if all_finite(result):
            return
        if name in _WITH_CONSTANT and self._find_constant(name, args):
            return
        inputs = [one for one in _tensors_in(args) if one.is_floating_point()]
        makes_inf = not name.startswith(_NO_OVERFLOWS) and bool(inputs) and all(map(math.isfinite, _numbers_in(args)))
        if not makes_inf or not all(map(all_finite, inputs)):
            return
        if _is_masking(name, inputs, _numbers_in(args), result):
            return
        if not is_called_by_funcamp():  # a step of funcamp scales and casts, and reports what overflows
            self._emit(events.Overflowed(calling_line(), name, max(map(_largest, inputs))))

    def _find_constant(self, name: str, args: Any) -> bool:
        """Report a constant beyond float16, and return whether there is one."""
        for value in _numbers_in(args):
            if _LARGEST < abs(value) < math.inf:
                self._emit(events.ConstantUsed(calling_line(), name, value))
                return True
        return False


def all_finite(tensor: Tensor) -> bool:
    """Return whether a plain tensor is finite; True for any other."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return True
    if tensor.device.type == "meta" or not tensor.is_floating_point():
        return True
    with _without_modes(), torch.no_grad():
        return bool(torch.isfinite(tensor).all())


def _largest(tensor: Tensor) -> float:
    """Return the largest magnitude of a tensor's numbers."""
    if not tensor.numel():
        return 0.0
    with _without_modes(), torch.no_grad():
        return tensor.abs().max().item()


def _is_float16(args: Any, keywords: Any) -> bool:
    """Return whether the result of an operation that fills will be float16."""
    dtype = keywords.get("dtype")
    if dtype is None and args and isinstance(args[0], Tensor):
        dtype = args[0].dtype
    return bool(dtype == torch.float16)


def _is_mask(factor: Any) -> bool:
    """Return whether a factor of a gradient is one for each of its elements, which neither scales nor averages."""
    return isinstance(factor, Tensor) and factor.numel() > 1


def _is_masking(name: str, inputs: list[Tensor], numbers: list[float], result: Tensor) -> bool:
    """Return whether an operation casts or adds a mask, whose large negative numbers become -inf."""
    if name != "_to_copy" and name not in _SUMS:
        return False
    with _without_modes(), torch.no_grad():
        if (torch.isposinf(result) | torch.isnan(result)).any():
            return False
        smallest = min([*numbers, *[one.min().item() for one in inputs if one.numel()]])
    return name == "_to_copy" or smallest <= -_LARGEST


def _tensors_in(args: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments and in lists of them."""
    tensors = []
    for one in args:
        if isinstance(one, Tensor):
            tensors.append(one)
        elif isinstance(one, (list, tuple)):
            tensors += [part for part in one if isinstance(part, Tensor)]
    return tensors


def _numbers_in(args: Iterable[Any]) -> list[float]:
    """Return the numbers among arguments, without flags."""
    return [float(one) for one in args if isinstance(one, (int, float)) and not isinstance(one, bool)]
