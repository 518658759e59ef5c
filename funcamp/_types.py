"""Names for the kinds of value that funcamp's signatures and errors speak of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

#: Nested dicts, lists, tuples, NamedTuples and registered dataclasses of tensors; None counts as an empty leaf.
Tree: TypeAlias = Any
#: A pure function on the found_inf flag, float32, shape (): a MAX over ranks, for instance.
Reduce: TypeAlias = Callable[[Tensor], Tensor]
#: A pure function from the count of applied steps, int64, shape (), to a hyperparameter, shape ().
Schedule: TypeAlias = Callable[[Tensor], "Tensor | float"]


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name without the module: float16."""
    return str(dtype).removeprefix("torch.")
