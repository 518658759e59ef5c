"""Which node of a graph a tensor of a trace is."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot


def innermost_tracer() -> Any:
    """Return torch's tracer of the graph that is recorded now, such as a branch of torch.cond; None without one."""
    proxy_mode: Any = get_proxy_mode()
    return None if proxy_mode is None else proxy_mode.tracer


def node_in(tracer: Any, tensor: Tensor) -> fx.Node | None:
    """Return the node of a tensor in the graph of a tracer; None without a tracer, and for any other tensor."""
    if tracer is None:
        return None
    slot: Any = get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy.node
