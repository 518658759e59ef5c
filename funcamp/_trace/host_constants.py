"""Compute once, when a step is traced for a CUDA graph, what the step computes on the host.

A CUDA graph runs nothing on the host. Host values cannot change between calls: the trace refuses to read a tensor on
the host besides the arguments, to move a tensor there, and to draw random numbers there. So every host value follows
from constants such as `torch.tensor([1.0, 2.0])`. With a device argument too, torch makes such a constant on the host
and then copies it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from funcamp import _tree
from funcamp._trace.tracing import HostError

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

_aten: Any = torch.ops.aten


def compute_host(
    module: fx.GraphModule, home: Set[str], fake_mode: FakeTensorMode, captured: Mapping[fx.Node, Tensor]
) -> None:
    """Replace what a graph computes on the host by constants; the module is not recompiled.

    Args:
        module: the graph.
        home: the types of device that are not the host.
        fake_mode: the mode of the values in the graph.
        captured: tensors by their placeholders; of those on the host only shapes are read.

    Raises:
        HostError: it reads memory that is not torch's, such as that of an array of numpy.
    """
    host = _Host(module, home, fake_mode)
    for node in list(module.graph.nodes):
        if node.op == "placeholder":
            if node in captured and captured[node].device.type not in home:
                host.values[node] = captured[node]
        elif node.op == "get_attr":
            host.read(node)
        elif node.op == "call_function" and not host.compute(node):
            host.replace_inputs(node)
    host.replace_inputs(module.graph.output_node(), keep_device=True)
    host.erase()


class _Host:
    """The values of nodes on the host, computed in the order of the graph, writes included.

    Args:
        module: the graph.
        home: the types of device that are not the host.
        fake_mode: the mode of the values in the graph.
    """

    def __init__(self, module: fx.GraphModule, home: Set[str], fake_mode: FakeTensorMode) -> None:
        self.values: dict[fx.Node, Any] = {}
        self._module = module
        self._home = home
        self._fake_mode = fake_mode
        self._lifted: dict[tuple[fx.Node, int, str], fx.Node] = {}
        """Constants in the graph, by what they are copies of: a node, how often it was written, the device."""

    def read(self, node: fx.Node) -> None:
        """Note the value of a constant, if it is on the host."""
        value = getattr(self._module, str(node.target), None)
        if not isinstance(value, Tensor) or value.device.type in self._home or value.is_meta:
            return  # not a tensor with values on the host
        if not value.untyped_storage().resizable():
            raise HostError(
                "read no array of numpy, nor other memory that is not torch's, as a CUDA graph keeps the values of "
                "its capture: make a tensor of it on the device before the first call, or pass it in the batch"
            )
        self.values[node] = value

    def compute(self, node: fx.Node) -> bool:
        """Compute a node whose results are on the host; return whether it is one."""
        results = _tree.tensors_in(node.meta.get("val"))
        if not results or any(result.device.type in self._home for result in results):
            return False
        if any(source not in self.values for source in node.all_input_nodes):
            return False
        target: Any = node.target
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        with torch.no_grad():
            self.values[node] = target(*args, **kwargs)
        return True

    def replace_inputs(self, node: fx.Node, *, keep_device: bool = False) -> None:
        """Make a node read constants instead of values on the host."""
        device = None if keep_device else self._device_of(node)
        for source in node.all_input_nodes:
            value = self.values.get(source)
            if isinstance(value, Tensor) and source.op != "placeholder":
                node.replace_input_with(source, self._constant(source, value, device or value.device))

    def _device_of(self, node: fx.Node) -> torch.device | None:
        """Return the device of a node's results or inputs that is not the host; None if all are on the host."""
        result = node.meta.get("val")
        inputs = [source.meta.get("val") for source in node.all_input_nodes]
        for tensor in _tree.tensors_in((result, inputs)):
            if tensor.device.type in self._home:
                return tensor.device
        return None

    def _constant(self, source: fx.Node, value: Tensor, device: torch.device) -> fx.Node:
        """Return a node with the present values of a host tensor, on a device."""
        key = source, value._version, str(device)
        if key not in self._lifted:
            constant = value.detach().clone().to(device)
            name = f"host_constant_{len(self._lifted)}"
            self._module.register_buffer(name, constant, persistent=False)
            first_node = next(node for node in self._module.graph.nodes if node.op != "placeholder")
            with self._module.graph.inserting_before(first_node):
                read = self._module.graph.get_attr(name)
                lifted = self._module.graph.call_function(_aten.lift_fresh_copy.default, (read,))
            with self._fake_mode:
                fake = self._fake_mode.from_tensor(constant, static_shapes=True)
            read.meta["val"] = lifted.meta["val"] = fake
            self._lifted[key] = lifted
        return self._lifted[key]

    def erase(self) -> None:
        """Erase what was computed."""
        for node in reversed(list(self._module.graph.nodes)):
            if node in self.values and node.op != "placeholder" and not node.users:
                self._module.graph.erase_node(node)
