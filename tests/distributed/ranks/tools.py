"""What the cases share."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch.utils import _pytree

from tests.support.helpers import bits


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def mine(batch: Any) -> Any:
    """This rank's part of a batch."""
    return _pytree.tree_map(lambda leaf: leaf.chunk(world())[rank()], batch)


def assert_equal_on_all_ranks(tree: Any) -> None:
    """Every tensor has the bits that it has on rank 0."""
    leaves = [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    assert leaves
    for leaf in leaves:
        own = bits(leaf.detach()).reshape(-1).view(torch.uint8)
        first = own.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, own), f"rank {rank()}: {leaf}"


def collectives(fn: Any, *args: Any) -> Counter[str]:
    """The collectives in the one graph that torch.compile makes of a function."""
    found: Counter[str] = Counter()

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            name = str(node.target)
            if name.startswith("_c10d_functional.") and "wait_tensor" not in name:
                found[name.split(".")[1]] += 1
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    torch.compile(fn, fullgraph=True, backend=aot_autograd(fw_compiler=count))(*args)
    return found
