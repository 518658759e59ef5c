"""How often each operation runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts operations by name inside the block; of DTensors what runs on their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))
