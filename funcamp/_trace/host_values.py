"""What a graph for a CUDA graph has on the host: it is computed once, after the trace.

A CUDA graph runs nothing on the host. Host values cannot change between calls: the trace refuses to read a tensor on
the host besides the arguments, to move a tensor there, and to draw random numbers there. So every host value follows
from constants such as `torch.tensor([1.0, 2.0])`. With a device argument too, torch makes such a constant on the host
and then copies it. An operation on the device that reads a host value reads a constant of the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from funcamp import _tree
from funcamp._trace.autocast_regions import without_autocast
from funcamp._upstream.fake_tensors import FakeTensorMode


def compute_host_values(module: fx.GraphModule, device: torch.device, fake_mode: FakeTensorMode) -> None:
    """Compute what a graph has on the host; put constants on the device in its place, and on the host for results."""
    graph = module.graph
    output = graph.output_node()
    interpreter = fx.Interpreter(module, garbage_collect_values=False)
    values = interpreter.env
    with torch.no_grad(), without_autocast():
        # In the order of the graph, as some operations write what others read.
        for node in list(graph.nodes):
            is_on_host = _is_on_host(module, node)
            if is_on_host and values.keys() >= set(node.all_input_nodes):
                values[node] = interpreter.run_node(node)
                continue
            where = torch.device("cpu") if is_on_host or node is output else device
            for source in node.all_input_nodes:
                if source in values:
                    value = values[source].detach().to(where, copy=True)
                    with graph.inserting_before(node):
                        constant = _constant(module, value, fake_mode)
                    node.replace_input_with(source, constant)
    for node in reversed(values):
        graph.erase_node(node)


def _is_on_host(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node is a constant on the host, or an operation all of whose results are."""
    if node.op not in ("get_attr", "call_function"):
        return False
    is_constant = node.op == "get_attr"
    tensors = _tree.tensors_in(getattr(module, str(node.target), None) if is_constant else node.meta.get("val"))
    return bool(tensors) and all(tensor.device.type == "cpu" for tensor in tensors)


def _constant(module: fx.GraphModule, value: Tensor, fake_mode: FakeTensorMode) -> fx.Node:
    """Add a constant to a graph, and return a copy of it, as `torch.tensor` makes."""
    name = f"host_value_{len(module.graph.nodes)}"
    module.register_buffer(name, value)
    constant = module.graph.get_attr(name)
    copy = module.graph.call_function(torch.ops.aten.lift_fresh_copy.default, (constant,))
    with fake_mode:
        fake = fake_mode.from_tensor(value, static_shapes=True)
    constant.meta["val"] = copy.meta["val"] = fake
    return copy
