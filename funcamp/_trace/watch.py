"""`TraceWatch`: what one trace checks and notes at each operation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
)

from funcamp import _tree, _upstream
from funcamp._trace.refusals import (
    fake_tensors_of,
    refuse_branches,
    refuse_capture,
    refuse_draw_on_host,
    refuse_move,
    refuse_packing,
    refuse_sparse,
    refuse_waiting,
)
from funcamp._trace.tensor_subclass import PLAIN_TENSORS
from funcamp._trace.torch_draws import TraceDraws
from funcamp._trace.trace_errors import read_error
from funcamp._trace.tracing import current
from funcamp._trace.user_line import line_in_stack
from funcamp._types import Args, Kwargs, Operation
from funcamp._upstream.fake_tensors import FakeTensor, FakeTensorMode
from funcamp._upstream.value_reads import answer_to_read

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = _upstream.find("torch.utils._python_dispatch.TorchDispatchMode")

_aten = torch.ops.aten
_ITEM = _aten._local_scalar_dense.default
_DEVICE = torch.ops.prim.device.default
_ZEROS = _aten.zeros.default
_META = torch.device("meta")
#: What torch.tensor calls with its tensor, which is a constant of the graph.
_LIFTS = {_aten.lift_fresh.default, _aten.lift_fresh_copy.default, _aten.lift.default}


class TraceWatch(TorchDispatchMode):
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
        self.captured: dict[int, Tensor] = {}
        """The tensors that the step reads besides its arguments, by the id of the fake tensor that replaces each."""
        self._fakes: dict[int, Tensor] = {}
        """The fake tensors, by the id of the tensor that each replaces."""
        self._draws = TraceDraws()

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Context manager: watch."""
        proxy_mode: Any = get_proxy_mode()
        self._tracer = proxy_mode.tracer
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
        refuse_branches(func, args)
        refuse_packing(func)
        refuse_waiting(func)
        tags = getattr(func, "tags", ())
        draws = torch.Tag.nondeterministic_seeded in tags
        if func is _ZEROS and kwargs.get("device") == _META:
            # Memory for zeros that have none, such as the derivative of torch.sgn, on what C++ takes for the device.
            kwargs = {**kwargs, "device": torch.device(next(iter(self._home)))}
        args, kwargs = self._with_fakes(func, args, kwargs)
        if func is _ITEM and (answer := answer_to_read()) is not None:
            return answer
        if torch.Tag.data_dependent_output in tags and not _is_known_constant(args[0]):
            raise read_error(line_in_stack())
        if draws:
            result = self._draws.draw(func, args, kwargs)
            if self._in_cuda_graph:
                refuse_draw_on_host(result, self._home)
        else:
            result = func(*args, **kwargs)
        for tensor in fake_tensors_of(result):
            refuse_sparse(tensor)
            refuse_move(func, tensor, args, kwargs, self._home)
        return result

    # Tensors that the step reads besides its arguments

    def _with_fakes(self, func: Operation, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Replace captured tensors by fake ones, because torch computes some operations on them at once."""
        if func in _LIFTS:
            return args, kwargs
        leaves, spec = _tree.flatten((args, kwargs))
        positions = [index for index, leaf in enumerate(leaves) if type(leaf) in PLAIN_TENSORS]
        if not positions:
            return args, kwargs
        for index in positions:
            tensor = leaves[index]
            refuse_capture(func, tensor, self._home, in_cuda_graph=self._in_cuda_graph)
            leaves[index] = self._fake_of(tensor)
        args, kwargs = _tree.unflatten(leaves, spec)
        return args, kwargs

    def _fake_of(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor that stands for a captured one in this trace."""
        if id(tensor) not in self._fakes:
            with disable_proxy_modes_tracing():  # from_tensor views its base, which must not be in the graph
                fake = self._fake_mode.from_tensor(tensor, static_shapes=True)
            self._fakes[id(tensor)] = fake
            self.captured[id(fake)] = tensor
        return self._fakes[id(tensor)]

    def node_of(self, value: Tensor) -> fx.Node | None:
        """Return the node of a tensor of this graph; None for any other tensor."""
        slot: Any = get_proxy_slot(value, self._tracer, None)
        return None if slot is None else slot.proxy.node


def _is_known_constant(value: object) -> bool:
    """Return whether a trace knows the value of a tensor, as that of `torch.tensor(2.0)`."""
    return getattr(value, "constant", None) is not None
