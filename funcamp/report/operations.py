"""The operations of the script's own code: a dispatch mode gets them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp.report.events import Event, Key
from funcamp.report.float16_range import RAISING, Float16Range
from funcamp.report.gradient_operations import GradientOperations
from funcamp.report.reruns import Call, operator_name, recorded
from funcamp.report.tensors import tensor_arguments
from funcamp.report.tracked import Tracked
from funcamp._types import Args, Kwargs
from funcamp._upstream.modes import check_modes

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.utils._python_dispatch import TorchDispatchMode as _Mode
else:
    _Mode = _upstream.find("torch.utils._python_dispatch.TorchDispatchMode")


class Operations(_Mode):
    """A dispatch mode that reports operations of the script's own code as events.

    Args:
        emit: gets each event.
        tracked: which tensors are gradients.
        is_hidden: returns whether the operations that run now are those of a scaler, an optimizer, torch's clipping or
            a backward pass.
    """

    def __init__(self, emit: Callable[[Event], None], tracked: Tracked, is_hidden: Callable[[], bool]) -> None:
        check_modes()
        _upstream.check(_Mode)
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_hidden = is_hidden
        self._tracked = tracked
        self._gradients = GradientOperations(emit, tracked)
        self._float16 = Float16Range(emit)

    @property
    def nonfinite_input(self) -> str:
        """The first float16 operation of the run with inf or NaN in an input; empty without one."""
        return self._float16.nonfinite_input

    def report_norm(self, norm: object, parameters: tuple[Key, ...]) -> None:
        """Report the norm of gradients that a function of torch has computed."""
        self._gradients.report_norm(norm, parameters)

    def report_host_read(self, tensor: Tensor) -> None:
        """Report that numbers that may be computed from gradients are read on the host, for a statistic."""
        self._gradients.report_host_read(tensor)

    def report_new_gradient(self, parameter: Key, gradient: Tensor) -> None:
        """Report that the loop has replaced a parameter's gradient."""
        self._gradients.report_new_gradients((parameter,), self._tracked.power_of_computed(gradient), [gradient])

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        keywords = kwargs or {}
        if self._is_hidden():
            return func(*args, **keywords)
        name = operator_name(func)
        if name in RAISING:
            self._float16.check_before(Call(func, args, keywords))
        call = recorded(func, args, keywords)
        result = func(*args, **keywords)
        self._gradients.check(name, call, result)
        for output in tensor_arguments((result,)):
            if output.dtype == torch.float16:
                self._float16.check_result(call, output)
                break
        return result
