"""Which node of a graph a tensor is, and which tensors of a trace Python keeps when the trace ends."""

from __future__ import annotations

import gc
import weakref
from typing import Any, NamedTuple

from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from funcamp._trace.kept_tensors import KeptTensor


class _RecordedTensor(NamedTuple):
    """A tensor that operations of the trace returned."""

    reference: weakref.ref[Tensor]
    node: fx.Node


class RecordedTensors:
    """The tensors that operations of one graph returned, with their nodes; keeps none of them alive."""

    def __init__(self) -> None:
        self._by_id: dict[int, _RecordedTensor] = {}

    def add(self, tensor: Tensor, node: fx.Node) -> None:
        """Note the node of a tensor, also in place of another one."""
        self._by_id[id(tensor)] = _RecordedTensor(weakref.ref(tensor), node)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor's node is noted; an entry may be that of a former tensor with the same id."""
        recorded = self._by_id.get(id(tensor))
        return recorded is not None and recorded.reference() is tensor

    def replace_examples(self, module: fx.GraphModule) -> None:
        """Let a graph's nodes keep other tensors, of the same kind, than those of the trace."""
        for node in module.graph.nodes:
            example = node.meta.get("val")
            if isinstance(example, Tensor) and id(example) in self._by_id:
                node.meta["val"] = example.detach()

    def take_kept(self) -> list[KeptTensor]:
        """Return the tensors that still exist, because Python keeps them, and forget all."""
        if any(reference() is not None for reference, _ in self._by_id.values()):
            gc.collect()  # autograd's nodes and what they refer to form cycles
        kept_tensors: list[KeptTensor] = []
        for reference, node in self._by_id.values():
            tensor = reference()
            if tensor is not None:
                kept_tensors.append(KeptTensor(tensor, node))
        self._by_id.clear()
        return kept_tensors


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
