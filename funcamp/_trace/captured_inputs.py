"""Turn the tensors that a step reads besides its arguments into inputs of its graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, fx

from funcamp import _tree
from funcamp._upstream.fake_tensors import FakeTensor

_aten = torch.ops.aten


def captured_as_inputs(module: fx.GraphModule, captured_by_fake_id: Mapping[int, Tensor]) -> list[Tensor]:
    """Turn captured tensors into inputs of a graph, after all others; return them in this order.

    Args:
        module: the graph. It is not recompiled.
        captured_by_fake_id: the captured tensors, by the ids of the fake tensors that stand for them in the graph.

    Raises:
        RuntimeError: the step has called backward() on one, or one is from an earlier trace.
    """
    _refuse_gradients(captured_by_fake_id.values())
    captured = _lift(module, captured_by_fake_id)
    if any(isinstance(tensor, FakeTensor) for tensor in captured):
        raise RuntimeError(
            "jit: step must not read a tensor that its Python has kept of an earlier run, in a function's cache or "
            "an object of a package: make it before the first call, or keep it in a buffer"
        )
    _delete_fake_constants(module)
    return captured


def _refuse_gradients(captured: Iterable[Tensor]) -> None:
    """Raise RuntimeError if the function has called backward() on a tensor that is not an argument."""
    for tensor in captured:
        if tensor.is_leaf and isinstance(tensor.grad, FakeTensor):
            tensor.grad = None
            raise RuntimeError(
                "jit: step must not call backward() on tensors other than its arguments, whose .grad only this "
                f"trace would see; got {_tree.describe(tensor)}: take torch.autograd.grad, or gradients with respect "
                "to the state"
            )


def _lift(module: fx.GraphModule, captured_by_fake_id: Mapping[int, Tensor]) -> list[Tensor]:
    """Turn the tensors in a graph into inputs, except constants that it copies at once (torch.tensor); return them."""
    graph = module.graph
    captured: list[Tensor] = []
    inputs: dict[int, fx.Node] = {}
    lifted_nodes: list[fx.Node] = []
    # It may be one of those that are erased, so nothing is erased before all inputs are in the graph.
    first_node = next(node for node in graph.nodes if node.op != "placeholder")
    for node in graph.find_nodes(op="get_attr"):
        attribute = getattr(module, str(node.target), None)
        if not isinstance(attribute, Tensor) or _is_copied_constant(node):
            continue
        tensor = captured_by_fake_id.get(id(attribute), attribute)
        if id(tensor) not in inputs:
            with graph.inserting_before(first_node):
                placeholder = graph.placeholder(f"captured_{len(captured)}")
            placeholder.meta = dict(node.meta)
            inputs[id(tensor)] = placeholder
            captured.append(tensor)
        node.replace_all_uses_with(inputs[id(tensor)])
        lifted_nodes.append(node)
    for node in lifted_nodes:
        graph.erase_node(node)
    return captured


def _is_copied_constant(node: fx.Node) -> bool:
    """Return whether a graph does nothing with a constant but copy it, as that of `torch.tensor(2.0)`."""
    return bool(node.users) and all(user.target is _aten.lift_fresh_copy.default for user in node.users)


def _delete_fake_constants(module: fx.GraphModule) -> None:
    """Delete a module's fake tensors, which are inputs now: AOTAutograd makes inputs of parameters and buffers."""
    for attributes in (vars(module), module._parameters, module._buffers):
        fakes = [name for name, value in attributes.items() if isinstance(value, FakeTensor)]
        for name in fakes:
            delattr(module, name)
