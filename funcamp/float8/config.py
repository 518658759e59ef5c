"""How tensors are scaled into float8: Python values only, checked when created."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch

from funcamp import _tree
from funcamp._check import boolean

Granularity = Literal["tensor", "row"]

#: The formats of the forward pass and of gradients, with their largest numbers.
FORWARD = torch.float8_e4m3fn
BACKWARD = torch.float8_e5m2
LARGEST = {dtype: torch.finfo(dtype).max for dtype in (FORWARD, BACKWARD)}

#: The sizes that float8 products accept are multiples of this.
MULTIPLE = 16


def fits(shape: Sequence[int]) -> bool:
    """Return whether the hardware takes a matrix of this shape."""
    return all(size and size % MULTIPLE == 0 for size in shape)


@dataclass(frozen=True)
class Float8Config:
    """The constants of float8 scaling: Python values, hashable, constants of a compiled graph.

    A tensor is stored as E4M3 (inputs and weights) or E5M2 (gradients) of tensor * scale. The scale is computed from
    the largest magnitude of the tensor itself ("current" scaling), so there is no state. torchao's recipes are
    `Float8Config()` ("tensorwise") and `Float8Config("row", power_of_two=True)` ("rowwise", whose gradients are E4M3
    there).

    Args:
        granularity: "tensor" for one scale per tensor, "row" for one per row of the operands of each product, along
            the dimension that it sums over, with bfloat16 products.
        power_of_two: round the scale down to a power of two.
        emulate: multiply in float32 instead, on any device: the same numbers up to the order of sums, slow.

    Raises:
        TypeError: a value is not of the type given above.
        ValueError: granularity is another text.

    Example:
        >>> Float8Config("row", power_of_two=True)
        Float8Config(granularity='row', power_of_two=True, emulate=False)

    References:
        torchao/float8/config.py, pytorch/ao at 36027d8.
    """

    granularity: Granularity = "tensor"
    power_of_two: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        call = "Float8Config"
        if self.granularity not in get_args(Granularity):
            raise ValueError(f"{call}: granularity must be 'tensor' or 'row'; got {self.granularity!r}")
        boolean(call, "power_of_two", self.power_of_two)
        boolean(call, "emulate", self.emulate)

    @property
    def by_row(self) -> bool:
        """Whether every row has a scale."""
        return self.granularity == "row"


def check_config(call: str, config: object) -> Float8Config:
    """Return the configuration; raise TypeError if it is something else."""
    if not isinstance(config, Float8Config):
        names = ", ".join(field.name for field in fields(Float8Config))
        raise TypeError(f"{call}: config must be a Float8Config ({names}); got {_tree.brief(config)}")
    return config
