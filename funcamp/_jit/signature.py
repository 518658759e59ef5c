"""The signature of a call: what a step is compiled for, and how two signatures differ.

Calls with equal signatures run one program. Not in a signature, because any may change from call to call:

- values, strides and memory of the batch's tensors: they are copied to the layout of the program if need be;
- the state: all are like the first one (`StateMemory.metadata`), and another one is an error;
- tensors that the step reads besides its arguments: they are read at every call (`CapturedTensors`);
- grad mode, inference mode and the state of random number generators.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._dtensor import is_distributed
from funcamp._jit.constants import ATOMS, ByIdentity, constant_key, names_key, structure_key
from funcamp._trace.autocast_regions import autocast_regions
from funcamp._trace.tensor_subclass import PLAIN_TENSORS
from funcamp._types import Tree

_LEAVES = PLAIN_TENSORS | ATOMS
#: What a leaf of a batch is compared by: of a tensor everything except its values, strides and memory; of a constant
#: its class and a description of its value.
LeafKey: TypeAlias = tuple[Hashable, ...]
#: A signature: containers and keys of the batch; the `leaf_key` of each of its leaves; the regions of autocast around
#: the call; torch's default dtype; the number of the values that the step's Python may read (`PythonValues`).
Key: TypeAlias = tuple[Hashable, tuple[LeafKey, ...], Hashable, torch.dtype, int]
#: The same as `Key` with constants only: per leaf the key of a constant, None for a tensor; () if all are tensors.
Frame: TypeAlias = tuple[Hashable, tuple[Hashable, ...], Hashable, torch.dtype, int]


def flattened(batch: Tree) -> tuple[Hashable, list[object]]:
    """Return the structure of a batch as in a signature, and its leaves in the order of torch's pytrees.

    Mappings that are no pytree nodes are dicts here, as in `_tree.plain`.
    """
    leaves: list[object] = []
    return _structure(batch, leaves), leaves


def _structure(node: Tree, leaves: list[object]) -> Hashable:
    """Return the structure of a node, None for a leaf; append its leaves to the list."""
    kind: Any = type(node)
    if kind in _LEAVES:
        leaves.append(node)
        return None
    if kind is dict:
        return kind, names_key(node), _structures(node.values(), leaves)
    if kind is tuple or kind is list or _tree.is_named_tuple(kind):
        return kind, _structures(node, leaves)
    node_leaves, spec = _tree.flatten(node)
    is_leaf = len(node_leaves) == 1 and node_leaves[0] is node
    if not is_leaf:
        return structure_key(spec), _structures(node_leaves, leaves)
    if isinstance(node, Mapping):
        return _structure(dict(node), leaves)
    leaves.append(node)
    return None


def _structures(nodes: Collection[object], leaves: list[object]) -> tuple[Hashable, ...]:
    """Return the structures of several nodes; append their leaves to the list."""
    return tuple([_structure(node, leaves) for node in nodes])


def frame_of(structure: Hashable, leaves: list[object], tensors: list[Tensor], python_values: int) -> Frame:
    """Return what the signature of a call has now besides its tensors.

    Args:
        structure: of the batch.
        leaves: the batch's.
        tensors: those among its leaves.
        python_values: the number of the values that the step's Python reads.

    Raises:
        Exception: a constant of the batch cannot be described.
    """
    constants: tuple[Hashable, ...] = ()
    if len(tensors) < len(leaves):
        constants = tuple([None if isinstance(leaf, Tensor) else constant_key(leaf) for leaf in leaves])
    return structure, constants, autocast_regions(), torch.get_default_dtype(), python_values


def key_of(frame: Frame, leaves: list[object]) -> Key:
    """Return the signature of a call.

    Args:
        frame: from `frame_of`.
        leaves: the batch's.

    Raises:
        Exception: a constant of the batch cannot be described.
    """
    structure, _, *around = frame
    return structure, tuple([leaf_key(leaf) for leaf in leaves]), *around  # type: ignore[return-value]


def leaf_key(leaf: Any) -> LeafKey:
    """Return all of a tensor but its values, strides and memory; else a description: 1, 1.0 and True differ."""
    kind: Any = type(leaf)
    if kind in PLAIN_TENSORS:
        return leaf.shape, leaf.dtype, leaf.device, leaf.layout, Tensor, leaf.requires_grad
    if not isinstance(leaf, Tensor):
        return constant_key(leaf)
    if is_distributed(leaf):
        kind = kind, leaf.device_mesh, leaf.placements
    return leaf.shape, leaf.dtype, leaf.device, leaf.layout, kind, leaf.requires_grad


def shapes(batch: Tree) -> str:
    """Return the dtypes and shapes of a batch's first tensors as a short text."""
    tensors = [leaf for leaf in _tree.leaves(batch) if isinstance(leaf, Tensor)]
    if not tensors:
        return "no tensors"
    texts = [f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in tensors[:4]]
    if len(tensors) > 4:
        texts.append("...")
    return ", ".join(texts)


def difference(batch: Tree, before: Key, now: Key) -> str:
    """Return how the signature of a call with this batch differs from another one; "" if in values of Python only."""
    former_structure, former_leaves, former_autocast, former_dtype, _ = before
    structure, leaves, autocast, dtype, _ = now
    if former_structure != structure:
        return f"its structure changed to {_tree.flatten(batch)[1]}"
    for index, (old, new) in enumerate(zip(former_leaves, leaves)):
        if old != new:
            fix = f": {_NUMBER_FIX}" if _is_number(old) and _is_number(new) else ""
            return f"batch{_tree.path_of(batch, index)} changed from {shown(old)} to {shown(new)}{fix}"
    if former_autocast != autocast:
        return (
            f"the autocast around the call changed from {former_autocast} to {autocast}: call it without a "
            "region, and give make_train_step a policy"
        )
    if former_dtype != dtype:
        return f"torch's default dtype changed from {former_dtype} to {dtype}"
    return ""


#: What to do if a number of a batch changes.
_NUMBER_FIX = (
    "make it a tensor, torch.as_tensor(...), as a Python number is a constant of the program, and each new one "
    "compiles again"
)


def shown(key: Any) -> str:
    """Return what a leaf of a batch, or a value in Python, is compared by as a text."""
    if isinstance(key, ByIdentity):
        return _tree.brief(key.value)
    if len(key) > 2:
        shape, dtype, device, _, _, requires_grad = key
        return f"a {dtype} tensor of shape {tuple(shape)} on {device}{' that requires a gradient' * requires_grad}"
    kind, value = key
    if kind in (tuple, set, frozenset):
        return f"({', '.join(map(shown, value))})"
    return str(value) if kind in (float, complex) else repr(value)


def _is_number(leaf: LeafKey) -> bool:
    """Return whether a leaf's key is that of a Python number. A bool has two values: it may choose a program."""
    return len(leaf) == 2 and leaf[0] in (int, float, complex)
