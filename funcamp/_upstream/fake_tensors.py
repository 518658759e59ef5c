"""torch's tensors without values, on which a trace runs, and the mode that makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from funcamp import _upstream

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
else:
    FakeTensor = _upstream.find("torch._subclasses.fake_tensor.FakeTensor")
    FakeTensorMode = _upstream.find("torch._subclasses.fake_tensor.FakeTensorMode")

__all__ = ["FakeTensor", "FakeTensorMode"]
