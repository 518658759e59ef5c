"""Constants that a step makes on the host and copies to the state's device, such as `torch.tensor([1, 2]).to(device)`.

`torch.tensor` makes a constant on the host even if it is given a device. A program would copy it at every call, which a
CUDA graph cannot do from the host. So the constant itself is moved, once.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

_aten: Any = torch.ops.aten


#: What eager code lets read an index on the host, beside tensors of another device.
_INDEXING = (
    _aten.index.Tensor,
    _aten._unsafe_index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._unsafe_index_put.default,
)


def move_constants(module: fx.GraphModule, home: Set[str], fake_mode: FakeTensorMode) -> None:
    """Move the constants of a graph that it reads on another device; the module is not recompiled.

    Args:
        module: the graph.
        home: the types of device to move them to.
        fake_mode: the mode of the values in the graph.
    """
    lifts: Any = module.graph.find_nodes(op="call_function", target=_aten.lift_fresh_copy.default)
    for lift in lifts:
        source = lift.args[0]
        constant = getattr(module, str(source.target), None) if source.op == "get_attr" else None
        if not isinstance(constant, Tensor) or constant.device.type in home:
            continue
        moved: dict[torch.device, fx.Node] = {}
        for user in [*lift.users]:
            device = _device_of_copy(user)
            if device is None or device.type not in home:
                continue
            if device not in moved:
                moved[device] = _lifted_on(device, module, lift, constant, fake_mode)
            user.replace_input_with(lift, moved[device])
        for node in (lift, source):
            if not node.users:
                module.graph.erase_node(node)


def _device_of_copy(user: Any) -> torch.device | None:
    """Return the device that a node copies a tensor to that it reads; None for another node."""
    if user.target is _aten._to_copy.default:
        device: torch.device | None = user.kwargs.get("device")
        return device
    if user.target in _INDEXING:
        indexed: Tensor = user.args[0].meta["val"]
        return indexed.device
    return None


def _lifted_on(
    device: torch.device, module: fx.GraphModule, lift: Any, constant: Tensor, fake_mode: FakeTensorMode
) -> fx.Node:
    """Return a node like `lift`, a fresh copy of a constant, on a device."""
    name = f"{lift.args[0].target}_on_{device.type}"
    value = constant.to(device)
    module.register_buffer(name, value, persistent=False)
    with module.graph.inserting_before(lift):
        read = module.graph.get_attr(name)
        lifted = module.graph.call_function(_aten.lift_fresh_copy.default, (read,))
    with fake_mode:
        read.meta["val"] = fake_mode.from_tensor(value, static_shapes=True)
        lifted.meta["val"] = fake_mode.from_tensor(value, static_shapes=True)
    return lifted
