"""What the tests share."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from tests.support.helpers import assert_same


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def mine(batch: Any, dim: int = 0) -> Any:
    """This rank's part of a batch."""
    return _pytree.tree_map(lambda leaf: leaf.chunk(world(), dim)[rank()], batch)


def full(tree: Any) -> Any:
    """A pytree with all values of its DTensors."""
    return _pytree.tree_map_only(DTensor, DTensor.full_tensor, tree)


@functools.cache
def square() -> DeviceMesh:
    """Four ranks as two rows of two."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))


@functools.cache
def meshes() -> list[DeviceMesh]:
    """All ranks along one dimension, and four of them along two."""
    return [init_device_mesh("cpu", (world(),)), *([square()] if world() == 4 else [])]


def shared_folder() -> Path:
    """A folder that every rank knows."""
    names = [tempfile.mkdtemp() if rank() == 0 else ""]
    dist.broadcast_object_list(names, 0)
    return Path(names[0])


def assert_equal_on_all_ranks(tree: Any) -> None:
    """Every tensor has the bits that it has on rank 0."""
    own = [leaf.detach() for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    assert own
    first = [torch.clone(leaf, memory_format=torch.contiguous_format) for leaf in own]
    for leaf in first:
        dist.broadcast(leaf, 0)
    assert_same(own, first)
