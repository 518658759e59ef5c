"""Type aliases for funcamp's signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

#: Nested dicts, lists, tuples, NamedTuples and registered dataclasses of tensors; None is an empty leaf.
Tree: TypeAlias = Any
#: A pure function of the found_inf flag, float32, shape (): for example a MAX over ranks.
Reduce: TypeAlias = Callable[[Tensor], Tensor]
#: A pure function from the count of applied steps, int64, shape (), to a hyperparameter, shape ().
Schedule: TypeAlias = Callable[[Tensor], "Tensor | float"]


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module: float16."""
    return str(dtype).removeprefix("torch.")
