"""Run a step on tensors without values: what it returns, and whether it reads one on the host."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from funcamp import _tree
from funcamp._signature import check_like
from funcamp._types import Tree

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class Outline(NamedTuple):
    """What a step returns beside the state."""

    spec: _tree.TreeSpec
    """The structure of its metrics."""
    constants: list[Any]
    """Their leaves, with None in place of every tensor."""
    tensors: list[int]
    """The places of the tensors."""


class _StayOnDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses an operation that takes a tensor of the state's type of device and gives one of another."""

    def __init__(self, home: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._home = home

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        away = _devices(out) - self._home
        if away and _devices((args, kwargs)) & self._home:
            raise _MovedError(f"moves a tensor to {away.pop()}")
        return out


def _devices(tree: Tree) -> set[str]:
    return {leaf.device.type for leaf in _tree.leaves(tree) if isinstance(leaf, Tensor)}


class _MovedError(Exception):
    pass


def outline(call: str, step: Any, state: Tree, batch: Tree) -> Outline:
    """The structure of a step's metrics, found without computing anything.

    Raises:
        TypeError: the step returns no pair.
        ValueError: the new state differs from the one given in structure, or a leaf of it in shape, dtype or device.
        RuntimeError: the step reads a value on the host, or moves a tensor to another type of device.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )

    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def without_values(leaf: Any) -> Any:
        return fake.from_tensor(leaf.detach()) if isinstance(leaf, Tensor) else leaf

    flat, spec = _tree.flatten((state, batch))
    given = _tree.unflatten([without_values(leaf) for leaf in flat], spec)
    try:
        with torch.no_grad(), fake, _StayOnDevice(_devices(state)):
            out = step(*given)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise RuntimeError(
            f"{call}: step must not read a tensor's value on the host (no .item(), no branch on a tensor, no shape "
            f"that follows from values); {_line(error)} does"
        ) from None
    except _MovedError as error:
        raise RuntimeError(f"{call}: step must stay on one type of device; {_line(error)} {error}") from None
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"{call}: step must return the pair (state, metrics); got {type(out).__name__}")
    check_like(call, ("state", "the step's new state"), (given[0], out[0]))
    leaves, metrics = _tree.flatten(out[1])
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    return Outline(metrics, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], tensors)


def _line(error: BaseException) -> str:
    """The innermost line of a traceback that is the user's."""
    found, trace = None, error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith((*_OURS, "<")):
            found = (name, trace.tb_lineno)
        trace = trace.tb_next
    if found is None:
        return "a line of it"
    return f"{found[0]}:{found[1]} ({linecache.getline(*found).strip()})"
