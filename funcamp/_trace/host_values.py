"""What a step for a CUDA graph computes on the host: at once, when it is traced.

A CUDA graph runs nothing on the host. Host values cannot change between calls: the trace refuses to read a tensor on
the host besides the arguments, to move a tensor there, and to draw random numbers there. So every host value follows
from constants such as `torch.tensor([1.0, 2.0])`. With a device argument too, torch makes such a constant on the host
and then copies it. An operation on the device that reads a host value reads a constant of the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from funcamp import _tree, _upstream
from funcamp._memory import Memory
from funcamp._types import Args, Kwargs, Operation

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

_aten = torch.ops.aten
_outside_of_trace = _upstream.find("torch.utils._python_dispatch._disable_current_modes")


class HostValues:
    """The tensors with values that a trace has made on the host."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        """All of them, so that nothing else gets their addresses."""
        self._memory = Memory()

    def has(self, value: object) -> bool:
        """Return whether a value is one of these tensors, or a view of one."""
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout != torch.strided:
            return False
        return self._memory.meets(value)

    def follows(self, func: Operation, args: Args, kwargs: Kwargs) -> bool:
        """Return whether an operation has its results on the host, from these tensors or from none."""
        device = kwargs.get("device")
        if getattr(func, "namespace", None) != "aten" or (device is not None and device.type != "cpu"):
            return False
        if func is _aten.lift_fresh.default and type(args[0]) is Tensor:  # what torch.tensor has made
            return args[0].device.type == "cpu"
        return all(map(self.has, _tree.tensors_in((args, kwargs))))

    def compute(self, func: Operation, args: Args, kwargs: Kwargs) -> Any:
        """Return what an operation returns."""
        with _outside_of_trace():
            result = func(*args, **kwargs)
        for tensor in _tree.tensors_in(result):
            self._tensors.append(tensor)
            self._memory.add(tensor)
        return result

    def constant(self, tensor: Tensor) -> Tensor:
        """Return a constant of the graph that has the present values of one of these tensors."""
        with _outside_of_trace():
            values = tensor.detach().clone()
        constant: Tensor = _aten.lift_fresh_copy.default(values)
        return constant


def move_constants(module: fx.GraphModule, device: torch.device, fake_mode: FakeTensorMode) -> None:
    """Move the constants of a graph to the device of the operations that read them; those that it returns stay."""
    output = module.graph.output_node()
    for node in module.graph.find_nodes(op="get_attr"):
        constant = getattr(module, str(node.target))
        if not isinstance(constant, Tensor) or any(output in copy.users for copy in node.users):
            continue
        moved = constant.to(device)
        setattr(module, str(node.target), moved)
        with fake_mode:
            fake = fake_mode.from_tensor(moved, static_shapes=True)
        for copy in (node, *node.users):
            copy.meta["val"] = fake
