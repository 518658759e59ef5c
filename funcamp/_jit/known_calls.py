"""`KnownCalls`: finds the program of a call by one comparison of all tensors of the batch, in C.

To make a signature, Python reads every attribute of every tensor, in half a microsecond for each tensor. For a call
like an earlier one torch does that: its guards compare a list of tensors with what they noted of another list. They
compare all that is in a signature, and strides and lazy conjugation too, so that the program can read these tensors as
they are, if they are outside the memory of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from funcamp import _upstream
from funcamp._jit.signature import Frame
from funcamp._trace.tensor_subclass import PLAIN_TENSORS

if TYPE_CHECKING:
    from funcamp._jit.executable import Executable

_TensorGuards: Any = _upstream.find("torch._C._dynamo.guards.TensorGuards")


class KnownCalls:
    """The programs of calls whose tensors were read as they are, without a copy into another layout."""

    def __init__(self) -> None:
        self._by_frame: dict[Frame, list[tuple[Callable[..., bool], Executable]]] = {}
        """For each program a comparison of tensors with those of a call."""

    def find(self, frame: Frame, tensors: list[Tensor]) -> Executable | None:
        """Return the program of an earlier call with this frame and such tensors; None if no call is known.

        A call that is not known may have a program too: guards that were made outside inference mode match nothing
        inside it.
        """
        known_calls = self._by_frame.get(frame)
        # Guards that get a nested tensor abort the process.
        if known_calls is None or True in [tensor.is_nested for tensor in tensors]:
            return None
        for are_alike, executable in known_calls:
            if are_alike(*tensors):
                return executable
        return None

    def add(self, frame: Frame, tensors: list[Tensor], executable: Executable) -> None:
        """Note what the tensors of a call are, instead of the former ones of that program."""
        are_plain = {*map(type, tensors)} <= PLAIN_TENSORS  # a DTensor has more attributes
        if not are_plain or not _upstream.usable(_TensorGuards):
            return
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        others = [known_call for known_call in self._by_frame.get(frame, ()) if known_call[1] is not executable]
        self._by_frame[frame] = [*others, (guards.check, executable)]
