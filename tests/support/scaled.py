"""Tensors in 16 bits times numbers in tensors, in a program and in eager code."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from funcamp import jit

#: Products and quotients of a tensor in 16 bits and a number in a tensor of shape ().
SCALED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, number: x * number,
    "product, the number first": lambda x, number: number * x,
    "quotient": lambda x, number: x / number,
    "quotient, the number first": lambda x, number: number / x,
    "in place": lambda x, number: x.clone().mul_(number),
    "sum": lambda x, number: x + number,
    "of a total": lambda x, number: x.sum() / number,
    "of a total, one in a list": lambda x, number: x.sum() * number.reshape(1),
}


def scaled(dtype: torch.dtype, device: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what a program computes of them, and what eager code does."""
    x = torch.linspace(0.25, 2.25, 64).to(device, dtype)
    numbers = {"float32": torch.tensor(3.01), "float64": torch.tensor(3.01).double(), "count": torch.tensor(100_001)}

    def step(state: Tensor, numbers: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        computed = itertools.product(SCALED.items(), numbers.items())
        return state + 1, {f"{name}, {kind}": compute(x, number) for (name, compute), (kind, number) in computed}

    batch = {name: number.to(device) for name, number in numbers.items()}
    _, found = jit(step)(torch.zeros((), device=device), batch)
    return found, step(torch.zeros((), device=device), batch)[1]
