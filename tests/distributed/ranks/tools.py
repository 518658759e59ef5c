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
from torch.utils._python_dispatch import TorchDispatchMode

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


def counted(fn: Any) -> tuple[Any, Counter[str]]:
    """A function compiled to one graph, and the collectives in it after the first call."""
    found: Counter[str] = Counter()

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            name = str(node.target)
            if name.startswith("_c10d_functional.") and "wait_tensor" not in name:
                found[name.split(".")[1]] += 1
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend=aot_autograd(fw_compiler=count)), found


def collectives(fn: Any, *args: Any) -> Counter[str]:
    """The collectives in the one graph that torch.compile makes of a function."""
    run, found = counted(fn)
    run(*args)
    return found


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if func.namespace == "_c10d_functional" and "wrap" not in name and name != "wait_tensor":
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def called(fn: Any, *args: Any) -> Counter[str]:
    """The collectives that a function calls, not compiled."""
    calls = _Calls()
    with calls:
        fn(*args)
    return calls.found
