"""`TraceWatch`: what one trace checks and notes at each operation, and the values of the tensors that outlive it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_slot,
    track_tensor_tree,
)

from funcamp import _tree, _upstream
from funcamp._trace.aliases import Aliases
from funcamp._trace.interface import Input
from funcamp._trace.kept_tensors import KeptTensors, places_with_tensors
from funcamp._trace.nodes import innermost_tracer, node_in
from funcamp._trace.places import Place
from funcamp._trace.refusals import (
    fake_tensors_of,
    refuse_capture,
    refuse_draw_on_host,
    refuse_move,
    refuse_packing,
    refuse_python_branches,
)
from funcamp._trace.torch_draws import TraceDraws
from funcamp._trace.trace_errors import nested_tensor_error, read_error
from funcamp._trace.tracing import LetsDynamoIn, RequestedViews, current
from funcamp._trace.user_line import line_in_stack
from funcamp._types import Args, Kwargs, Operation
from funcamp._upstream.value_reads import answer_to_read

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    FakeTensor = _upstream.find("torch._subclasses.fake_tensor.FakeTensor")
    FakeTensorMode = _upstream.find("torch._subclasses.fake_tensor.FakeTensorMode")
    TorchDispatchMode = _upstream.find("torch.utils._python_dispatch.TorchDispatchMode")

_aten = torch.ops.aten
_ITEM = _aten._local_scalar_dense.default
_DEVICE = torch.ops.prim.device.default
#: What torch.tensor calls with its tensor, which is a constant of the graph.
_LIFTS = {_aten.lift_fresh.default, _aten.lift_fresh_copy.default, _aten.lift.default}
_PLAIN = {Tensor, torch.nn.Parameter}


class _CapturedTensor(NamedTuple):
    """A tensor that the step reads besides its arguments, and the one without values that the trace has instead."""

    tensor: Tensor
    fake: Tensor


class TraceWatch(LetsDynamoIn, TorchDispatchMode):
    """Watches every operation of a trace: reads, devices, random numbers, captured tensors.

    Args:
        home: the types of device that the step must not leave.
        fake_mode: the mode of the trace's tensors without values.
        in_cuda_graph: whether the trace becomes a CUDA graph, which keeps what the host had when it was captured.
    """

    supports_higher_order_operators = True

    def __init__(self, home: Set[str], fake_mode: FakeTensorMode, *, in_cuda_graph: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._home = home
        self._in_cuda_graph = in_cuda_graph
        self._fake_mode = fake_mode
        self._tracer: Any = None
        self._captured: dict[int, _CapturedTensor] = {}
        """By the id of the tensor that the step reads."""
        self._draws = TraceDraws(self._node_in_any_graph)
        self.notes: set[str] = set()
        """What the log has to say of this trace."""

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Context manager: watch."""
        self._tracer = innermost_tracer()
        outer_recorder = current.recorder
        current.recorder = self
        try:
            with self._draws.region(), self:
                yield
        finally:
            current.recorder = outer_recorder

    def __torch_dispatch__(
        self, func: Operation, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        # Two of three calls only ask for a device, so nothing comes before this.
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        if any(kind.__module__.startswith("torch.nested.") for kind in types):
            raise nested_tensor_error(line_in_stack())
        refuse_python_branches(func, args)
        refuse_packing(func)
        args, kwargs = self._with_fakes(func, args, kwargs)
        if func is _ITEM and (answer := answer_to_read()) is not None:
            return answer
        tags = getattr(func, "tags", ())
        if torch.Tag.data_dependent_output in tags and not _is_known_constant(args[0]):
            raise read_error(line_in_stack())
        if torch.Tag.nondeterministic_seeded in tags:
            result = self._draws.draw(func, args, kwargs)
            if self._in_cuda_graph:
                refuse_draw_on_host(result, self._home)
        else:
            result = func(*args, **kwargs)
        for tensor in fake_tensors_of(result):
            refuse_move(func, tensor, args, kwargs, self._home)
        return result

    # Tensors that the step reads besides its arguments

    def captured_by_fake_id(self) -> dict[int, Tensor]:
        """Return the captured tensors, by the identity of the fake tensors that replace them."""
        return {id(captured.fake): captured.tensor for captured in self._captured.values()}

    def _with_fakes(self, func: Operation, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Replace captured tensors by fake ones, because torch computes some operations on them at once."""
        if func in _LIFTS:
            return args, kwargs
        leaves, spec = _tree.flatten((args, kwargs))
        positions = [index for index, leaf in enumerate(leaves) if type(leaf) in _PLAIN]
        if not positions:
            return args, kwargs
        for index in positions:
            tensor = leaves[index]
            refuse_capture(func, tensor, leaves, self._home, in_cuda_graph=self._in_cuda_graph)
            leaves[index] = self._fake_of(tensor)
        args, kwargs = _tree.unflatten(leaves, spec)
        return args, kwargs

    def _fake_of(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor that stands for a captured one in this trace."""
        if id(tensor) not in self._captured:
            with disable_proxy_modes_tracing():  # from_tensor views its base, which must not be in the graph
                fake = self._fake_mode.from_tensor(tensor, static_shapes=True)
            self._captured[id(tensor)] = _CapturedTensor(tensor, fake)
        return self._captured[id(tensor)].fake

    # Tensors of the graph

    def operations(self) -> frozenset[str]:
        """Return the names of the traced operations, such as "bincount"."""
        nodes = () if self._tracer is None else self._tracer.graph.nodes
        return frozenset(str(node.target).split(".")[1] for node in nodes if str(node.target).startswith("aten."))

    def node_of(self, value: Tensor) -> fx.Node | None:
        """Return the node of a tensor of this graph; None for any other tensor."""
        return node_in(self._tracer, value)

    def _node_in_any_graph(self, value: Tensor) -> fx.Node | None:
        """Return the node of a tensor of this graph or of a graph inside it; None for any other tensor."""
        return self.node_of(value) or node_in(innermost_tracer(), value)

    def slices(self, tensor: Tensor, sizes: Sequence[int], requested: RequestedViews) -> list[Tensor] | None:
        """Record views; None for a tensor of no or another trace, and where derivatives have to pass."""
        if innermost_tracer() is not self._tracer:
            return None
        slot: Any = get_proxy_slot(tensor, self._tracer, None)
        if slot is None or tensor.requires_grad or forward_ad._current_level >= 0:
            return None
        parts = _aten.split_with_sizes.default(slot.proxy, list(sizes))
        views: list[Tensor] = []
        for number, shape in requested:
            part = parts[number]
            count = math.prod(shape)
            if count < sizes[number]:
                part = _aten.slice.Tensor(part, 0, 0, count)
            # The operations are recorded on proxies, without tensors. The view gets one with an offset of zero.
            with disable_proxy_modes_tracing():
                view = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            proxy = _aten.view.default(part, list(shape))
            views.append(track_tensor_tree(view, proxy, constant=None, tracer=self._tracer))
        return views

    # After the trace

    def give_values_to_kept(
        self, places: Iterable[Place], arguments: list[Tensor], inputs: list[Input], state_result_count: int
    ) -> list[Tensor]:
        """Give the tensors of a trace that Python has kept their values, computed from these arguments.

        Args:
            places: where Python may keep them.
            arguments: the plain tensors of the arguments.
            inputs: what each of them is.
            state_result_count: the number of results, the first ones, that are the next state.

        Returns:
            Those that follow from arguments that change from call to call.
        """
        kept_places = places_with_tensors(places, self.node_of)
        if not kept_places:
            return []
        graph = self._tracer.graph
        placeholders = graph.find_nodes(op="placeholder")
        values: dict[fx.Node, Any] = dict(zip(placeholders, arguments))
        values.update(self._captured_values(graph))
        state_nodes = [node for node, argument in zip(placeholders, inputs) if argument.kind == "state"]
        next_state_nodes = graph.output_node().args[0][:state_result_count]
        constant = set(state_nodes) - Aliases(graph).changed(state_nodes, next_state_nodes)
        kept = KeptTensors(self._tracer.root, graph, self.node_of, values, constant)
        kept.put_values_into(kept_places)
        return kept.changing

    def _captured_values(self, graph: fx.Graph) -> dict[fx.Node, Tensor]:
        """Return the values of the nodes that are captured tensors."""
        captured = self.captured_by_fake_id()
        values: dict[fx.Node, Tensor] = {}
        for node in graph.find_nodes(op="get_attr"):
            fake = getattr(self._tracer.root, str(node.target), None)
            if id(fake) in captured:
                values[node] = captured[id(fake)].detach()
        return values


def _is_known_constant(value: object) -> bool:
    """Return whether a trace knows the value of a tensor, as that of `torch.tensor(2.0)`."""
    return getattr(value, "constant", None) is not None
