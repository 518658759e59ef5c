"""Trace a function of a list of tensors into one graph of aten operations by running it once.

The function runs on tensors without values (torch's fake tensors) under torch's `make_fx`: the graph contains the
operations on tensors. Autograd, torch.func, autocast, hooks, loggers and autograd.Functions act as in
eager mode. Tensors that the function reads besides its arguments become inputs of the graph, by reference. Nothing is
computed, and no random number is drawn.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from funcamp import _tree, _upstream
from funcamp._trace.aliases import Aliases
from funcamp._trace.as_compiled import as_compiled
from funcamp._trace.carried_state import CarriedState
from funcamp._trace.host_draws import HostDraws
from funcamp._trace.inner_casts import InnerCasts, watch_autocast
from funcamp._trace.interface import Input, Outputs
from funcamp._trace.kept_tensors import settle
from funcamp._trace.open_shapes import is_open, is_open_node
from funcamp._trace.random_numbers import Draws
from funcamp._trace.tracing import HostError, LetsDynamoIn, Wanted, current
from funcamp._trace.user_line import (
    FIXED,
    INSTEAD,
    READS,
    asks_whether_compiled,
    in_nested_tensor,
    in_stack,
    in_traceback,
)
from funcamp._types import Tree
from funcamp._upstream.bugs.ctc_lengths import of_known_shape
from funcamp._upstream.replaced import replaced

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
else:
    FakeTensor = _upstream.find("torch._subclasses.fake_tensor.FakeTensor")
    FakeTensorMode = _upstream.find("torch._subclasses.fake_tensor.FakeTensorMode")
    TorchDispatchMode = _upstream.find("torch.utils._python_dispatch.TorchDispatchMode")
    is_traceable_wrapper_subclass = _upstream.find("torch.utils._python_dispatch.is_traceable_wrapper_subclass")
#: torch's error for an operation whose result has a shape that follows from values, if there must be none.
_SHAPE = tuple(filter(_upstream.usable, [_upstream.find("torch._subclasses.fake_tensor.DynamicOutputShapeException")]))
#: torch's errors for a number that depends on the values of a fake tensor, and for a branch on a size that does.
_FROM_VALUES = (
    *filter(_upstream.usable, [_upstream.find("torch._subclasses.fake_tensor.DataDependentOutputException")]),
    GuardOnDataDependentSymNode,
)

_log = logging.getLogger("funcamp")
_aten = torch.ops.aten
#: The place of an offset in the memory of the first argument.
_OFFSET = {
    _aten.as_strided.default: 3,
    _aten.as_strided_.default: 3,
    _aten.as_strided_copy.default: 3,
    _aten.as_strided_scatter.default: 4,
}
_READ = _aten._local_scalar_dense.default
_DEVICE = torch.ops.prim.device.default
_MOVES = {_aten._to_copy.default, _aten.copy_.default, _aten.copy.default}
_PLAIN = {Tensor, torch.nn.Parameter}
_DATA: Any = Tensor.data
_CONSTANTS = {_aten.lift_fresh.default, _aten.lift_fresh_copy.default, _aten.lift.default}
_NESTED = (
    "not make nested tensors, whose lengths are values; {line} does: pad to a fixed length, and mask what is "
    "beyond each sequence"
)
#: The types of a branch or a loop body that torch.compile has not made a graph of.
_PYTHON = (FunctionType, MethodType, functools.partial, torch.nn.Module)
_BRANCHES = (
    "not call torch.cond or a relative of it ({name}) while torch.compile is switched off, as it makes graphs of the "
    "branches; {line} does: make the first call outside of torch.compiler.set_stance('force_eager') and of modes such "
    "as FlopCounterMode, without TORCH_COMPILE_DISABLE, or take torch.where on the results, or a Python bool in the "
    "batch"
)
#: Texts of torch's errors when the values or the memory of a fake tensor are read.
_ASKED = (
    "is not supported for tensor subclasses",
    "data is not allocated",
    "Cannot access data pointer",
    "get value out of a tracing tensor",
    "Cannot access storage of",
    "unsupported format string passed to FakeTensor",
)


class Wrapper(NamedTuple):
    """Everything about a tensor subclass (DTensor) except its plain tensors."""

    kind: Any
    inner: dict[str, Wrapper | None]
    beside: dict[str, Any]
    """Attributes that are not tensors: a device mesh, since torch 2.13."""
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


class Graph(NamedTuple):
    """A traced function."""

    module: torch.fx.GraphModule
    """From the plain parts of the arguments and captured tensors to the plain parts of the results; not recompiled."""
    inputs: list[Input]
    """What each of its inputs is."""
    examples: list[Tensor]
    """Fake tensors like its inputs."""
    mode: FakeTensorMode
    """The mode of the examples."""
    captured: list[Tensor]
    """The tensors that it reads besides its arguments."""
    kept: list[Tensor]
    """Tensors that Python has kept of this run, and that follow from arguments that change from call to call."""
    wrappers: list[Wrapper | None]
    """The wrappers of its results."""
    outputs: Outputs
    """What each of its results is."""
    wrapped: bool
    """Whether an argument or a result is not a plain tensor."""
    is_open: bool
    """Whether an operation has a shape or strides that follow from values."""


def trace(
    fn: Callable[[list[Tensor]], tuple[list[Tensor], Tree]],
    args: list[Tensor],
    home: Set[str],
    *,
    fixed_shapes: bool = False,
    carried: CarriedState | None = None,
    state_count: int = 0,
) -> Graph:
    """Trace fn for arguments like these.

    Args:
        fn: a function from a list of tensors, state and batch, to a list of tensors, the next state, and a pytree, the
            metrics; may write to its arguments.
        args: distinct tensors without aliases.
        home: the types of device that it must not leave.
        fixed_shapes: whether it must have no tensor whose shape follows from values, such as `x[x > 0]`.
        carried: the state that its Python keeps from call to call.
        state_count: the number of args, the first ones, that are the state.

    Raises:
        HostError: an operation moves a tensor from home to another type of device, or reads it; Python draws numbers.
        RuntimeError: fn accumulates gradients in a tensor that is not an argument.
        Exception: any error of fn.
    """
    carried = CarriedState({}) if carried is None else carried
    draws = HostDraws()
    run = functools.partial(_traced, fn, args, home, fixed_shapes, carried.record, state_count)
    with draws.watched():
        graph = carried.traced(lambda: _eager_if_it_must(run))
    if (found := draws.found()) is not None:
        names, line = found
        raise HostError(
            f"not draw from {names}, as the program would repeat the numbers at every step; {line} does: draw from "
            "torch's generator, or pass the numbers in the batch"
        )
    return graph


def _eager_if_it_must(run: Callable[..., Graph]) -> Graph:
    """Trace as under a compiler; if the function then fails, and asks whether it is compiled, as in eager mode."""
    try:
        graph = run()
    except Exception as error:
        again = None
        if not isinstance(error, HostError) and asks_whether_compiled(error):
            run = functools.partial(run, is_compiling=False)  # a model may take a mask to be given otherwise
            with contextlib.suppress(Exception):
                again = run()
        if again is None:
            raise
        graph = again
        _log.warning("jit: step fails where torch.compiler.is_compiling() is True, so it is traced as in eager mode")
    return graph


def _traced(
    fn: Callable[[list[Tensor]], tuple[list[Tensor], Tree]],
    args: list[Tensor],
    home: Set[str],
    fixed_shapes: bool,
    record: Callable[[Callable[[Tensor], torch.fx.Node | None]], None],
    state_count: int,
    is_compiling: bool = True,
) -> Graph:
    """Trace once, while torch.compiler.is_compiling() is True if `is_compiling`."""
    for name in (FakeTensor, FakeTensorMode, TorchDispatchMode, is_traceable_wrapper_subclass):
        _upstream.check(name)
    if _upstream.ENDED_THREAD.present:
        stay()
    # Inductor turns scan into a loop whose index depends on no shape; the function's own reads raise below.
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=not fixed_shapes)
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)
    watch = _Watch(home, fake)
    around = [wrapper_of(arg) for arg in args]
    plain: list[Tensor] = []
    inputs: list[Input] = []
    for number, arg in enumerate(args):
        part_input = Input("state", number) if number < state_count else Input("batch", number - state_count)
        for part in parts(arg):
            plain.append(part)
            inputs.append(part_input)
    with fake:  # new tensors, because it is unknown what later arguments share with each other
        examples: list[Tensor] = [
            torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device) for part in plain
        ]
    wrappers: list[Wrapper | None] = []
    outputs: list[Outputs] = []
    returned_parts: list[int] = []

    def flat(*given: Tensor) -> list[Tensor]:
        with watch.on():
            pieces = iter([watch.handle(piece) for piece in given])
            first, rest = fn([with_parts(wrapper, pieces) for wrapper in around])
            record(watch.node_of)
            leaves = _tree.leaves(rest)
            for index, leaf in enumerate(leaves):
                if is_open(leaf) and not isinstance(leaf, Tensor):
                    raise HostError(
                        "return tensors and constants only; metrics"
                        f"{_tree.path_of(rest, index)} is a number that follows from values: return a tensor, such as "
                        "mask.sum() for the size of x[mask]"
                    )
            tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            outputs.append(Outputs(len(first), _tree.builder(rest)))
            returned_parts.append(sum(len(parts(leaf)) for leaf in first))
            results = [*first, *[leaves[index] for index in tensors]]
            wrappers.extend(wrapper_of(result) for result in results)
        return [part for result in results for part in parts(result)]

    try:
        with (
            as_compiled(is_compiling),
            replaced(Tensor, data=property(_DATA.__get__, _set_data)),
            # On a GPU autograd would call backward in another thread, outside these modes.
            torch.autograd.set_multithreading_enabled(False),
            fake,
        ):
            module = _recorded(flat, examples)
    except Exception as error:
        watch.settle(plain, inputs, failed=True)
        if isinstance(error, _SHAPE):
            where = "in a CUDA graph" if fixed_shapes else f"by {error.func}"
            instead = f"{FIXED}, or pass capture=False" if fixed_shapes else FIXED
            raise HostError(f"not take a shape from values {where}; {in_traceback(error)} does: {instead}") from None
        if isinstance(error, RuntimeError) and in_nested_tensor(error):
            raise HostError(_NESTED.format(line=in_traceback(error))) from None
        asked = isinstance(error, (RuntimeError, TypeError)) and any(text in str(error) for text in _ASKED)
        if asked or isinstance(error, _FROM_VALUES):
            raise HostError(f"{READS}; {in_traceback(error)} does: {INSTEAD}") from None
        raise
    _name_dtypes(module.graph)
    real = watch.real()
    _refuse_gradients(real)
    kept = watch.settle(plain, inputs, returned=returned_parts[0])
    captured = _lift(module, real)
    inputs += [Input("captured", number) for number in range(len(captured))]
    if any(isinstance(leaf, FakeTensor) for leaf in captured):
        raise RuntimeError(
            "jit: step must not read a tensor that Python kept of an earlier trace, and that has no values"
        )
    for held in (vars(module), module._parameters, module._buffers):  # AOTAutograd makes inputs of the latter
        for attribute in [key for key, value in held.items() if isinstance(value, FakeTensor)]:
            delattr(module, attribute)
    with fake:
        examples += [fake.from_tensor(leaf.detach(), static_shapes=True) for leaf in captured]
    wrapped, has_open = any([*around, *wrappers]), any(map(is_open_node, module.graph.nodes))
    return Graph(module, inputs, examples, fake, captured, kept, wrappers, outputs[0], wrapped, has_open)


def subgraph(fn: Callable[..., list[Tensor]], args: list[Tensor]) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """Trace a part of a traced function; return its graph and what it reads besides its arguments."""
    module = _recorded(fn, args)
    if isinstance(current.recorder, _Watch):
        current.recorder.settle_part(module)
    captured = _lift(module, {})
    module.recompile()
    return module, captured


def _recorded(fn: Callable[..., list[Tensor]], examples: list[Tensor]) -> torch.fx.GraphModule:
    """Return the operations of one run of fn, with autocast's casts as eager code has them."""
    cache_enabled = torch.is_autocast_cache_enabled()

    def run(*tensors: Tensor) -> list[Tensor]:
        # make_fx disables the cache: a weight that is used twice would be cast twice, and its gradients would be summed
        # in float32 instead of the low precision.
        torch.set_autocast_cache_enabled(cache_enabled)
        with InnerCasts():
            return fn(*tensors)

    watch_autocast()
    with _fresh_casts():
        return make_fx(run, tracing_mode="real")(*examples)


def parts(value: Tensor) -> list[Tensor]:
    """Return the plain tensors of a tensor subclass that has parts (DTensor), or any other tensor itself."""
    if not is_traceable_wrapper_subclass(value):
        return [value]
    held = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    return [part for tensor in held if isinstance(tensor, Tensor) for part in parts(tensor)]


def wrapper_of(value: Tensor) -> Wrapper | None:
    """Return the wrapper of a tensor subclass; None for a plain tensor."""
    if not is_traceable_wrapper_subclass(value):
        return None
    names, context = value.__tensor_flatten__()
    held = {name: getattr(value, name) for name in names}
    inner = {name: wrapper_of(tensor) for name, tensor in held.items() if isinstance(tensor, Tensor)}
    beside = {name: held[name] for name in held.keys() - inner.keys()}
    return Wrapper(type(value), inner, beside, context, value.size(), value.stride())


def with_parts(wrapper: Wrapper | None, plain: Iterator[Tensor]) -> Tensor:
    """Return a tensor of this wrapper from the next plain ones."""
    if wrapper is None:
        return next(plain)
    inner = {name: with_parts(around, plain) for name, around in wrapper.inner.items()}
    made: Tensor = wrapper.kind.__tensor_unflatten__(
        {**inner, **wrapper.beside}, wrapper.context, wrapper.size, wrapper.stride
    )
    return made


@functools.cache
def stay() -> None:
    """Enter a FakeTensorMode in a thread that never ends, because torch refers to the first one."""
    entered = threading.Event()

    def first() -> None:
        with FakeTensorMode():
            entered.set()
        threading.Event().wait()

    threading.Thread(target=first, name="funcamp-stay", daemon=True).start()
    entered.wait()


@contextlib.contextmanager
def _fresh_casts() -> Iterator[None]:
    """Context manager: separate the autocast cache of a graph from that of the code around it."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """Set `tensor.data`, which torch does not dispatch."""
    if isinstance(current.recorder, _Watch):
        current.recorder.set_data(tensor, value)
    else:
        _DATA.__set__(tensor, value)


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    def place(tensor: Tensor) -> tuple[Any, ...]:
        storage = tensor.untyped_storage()._cdata
        return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype

    return type(one) in (FakeTensor, *_PLAIN) and type(other) in (FakeTensor, *_PLAIN) and place(one) == place(other)


def _name_dtypes(graph: torch.fx.Graph) -> None:
    """Name the dtype of tensors made of nothing, as the function may change the default dtype while it runs."""
    for node in graph.nodes:
        schema, made = getattr(node.target, "_schema", None), node.meta.get("val")
        if schema is None or not isinstance(made, Tensor):
            continue
        takes = any(argument.name == "dtype" and argument.kwarg_only for argument in schema.arguments)
        if takes and not any(isinstance(other.meta.get("val"), Tensor) for other in node.all_input_nodes):
            node.kwargs = {**node.kwargs, "dtype": made.dtype}


def _refuse_gradients(real: Mapping[int, Tensor]) -> None:
    for leaf in real.values():
        if leaf.is_leaf and isinstance(leaf.grad, FakeTensor):
            leaf.grad = None
            raise RuntimeError(
                "jit: step must not call backward() on tensors other than its arguments, whose .grad only this "
                f"trace would see; got {_tree.describe(leaf)}: take torch.autograd.grad, or gradients with respect to "
                "the state"
            )


def _lift(module: torch.fx.GraphModule, real: Mapping[int, Tensor]) -> list[Tensor]:
    """Turn the tensors in a graph into inputs, except constants that it copies at once (torch.tensor).

    The module is not recompiled.
    """
    captured: list[Tensor] = []
    inputs: dict[int, torch.fx.Node] = {}
    graph = module.graph
    # It may be one of those that are erased, so nothing is erased before all inputs are in the graph.
    first = next(node for node in graph.nodes if node.op != "placeholder")
    replaced: list[torch.fx.Node] = []
    for node in graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        constant = node.users and all(user.target is _aten.lift_fresh_copy.default for user in node.users)
        if not isinstance(value, Tensor) or constant:
            continue
        value = real.get(id(value), value)
        if id(value) not in inputs:
            with graph.inserting_before(first):
                made = graph.placeholder(f"captured_{len(captured)}")
            made.meta = dict(node.meta)
            inputs[id(value)] = made
            captured.append(value)
        node.replace_all_uses_with(inputs[id(value)])
        replaced.append(node)
    for node in replaced:
        graph.erase_node(node)
    for node in reversed(graph.nodes):
        if node.target is _aten.clone.default and not node.users:
            graph.erase_node(node)
    return captured


def _leave_examples(module: torch.fx.GraphModule, made: Mapping[int, Any]) -> None:
    """Let a graph's nodes keep other tensors, of the same kind, than those that a trace made."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and id(value) in made:
            node.meta["val"] = value.detach()


_without_modes: Any = _upstream.find("torch.utils._python_dispatch._disable_current_modes")


class _Watch(LetsDynamoIn, TorchDispatchMode):
    """Watches every operation of a trace: reads, devices, random numbers, captured and kept tensors."""

    supports_higher_order_operators = True

    def __init__(self, home: Set[str], mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._home, self._mode = home, mode
        self._tracer: Any = None
        self._made: dict[int, tuple[weakref.ref[Tensor], torch.fx.Node]] = {}
        self._made_in_part: dict[int, tuple[weakref.ref[Tensor], torch.fx.Node]] = {}
        """The same in a graph inside the graph, such as the body of a scan, until that is traced."""
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self._slices: set[int] = set()
        self._draws = Draws(self.node_of)
        self._told_of_anomaly_mode = False

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Context manager: watch."""
        mode: Any = get_proxy_mode()
        self._tracer = mode.tracer
        before, current.recorder = current.recorder, self
        try:
            with self._draws.region(), self:
                yield
        finally:
            current.recorder = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # two of three calls, so keep this fast
            return args[0].fake_device
        if any(kind.__module__.startswith("torch.nested.") for kind in types):
            raise HostError(_NESTED.format(line=in_stack()))
        if any(isinstance(arg, _PYTHON) and not isinstance(arg, torch.fx.GraphModule) for arg in args):
            # torch.compile makes graphs of branches and loop bodies, whose inputs are all that they read. torch's own
            # trace of a Python function would fix the values of what it reads besides its operands.
            raise HostError(_BRANCHES.format(name=getattr(func, "__name__", func), line=in_stack()))
        if func in _OFFSET:
            self._refuse_offset(func, args, kwargs or {})
        args, kwargs = self._without_values(func, args, kwargs or {})
        func = of_known_shape(func, args)
        if func is _READ and self._is_anomaly_check(args[0]):
            return False
        tags = getattr(func, "tags", ())
        # torch.tensor(2.0).item() is a constant.
        if torch.Tag.data_dependent_output in tags and getattr(args[0], "constant", None) is None:
            raise HostError(f"{READS}; {in_stack()} does: {INSTEAD}")
        draws = torch.Tag.nondeterministic_seeded in tags
        out = self._draws.draw(func, args, kwargs) if draws else func(*args, **kwargs)
        for value in (out,) if isinstance(out, Tensor) else out if isinstance(out, (tuple, list)) else ():
            if isinstance(value, FakeTensor):
                self._look(func, value, args, kwargs)
        return out

    def _is_anomaly_check(self, value: Tensor) -> bool:
        """Return whether anomaly mode asks if a gradient is NaN; a program cannot raise, and goes on without this."""
        node = self.node_of(value) if torch.is_anomaly_check_nan_enabled() else None
        if node is None or node.target is not _aten._is_any_true.default:
            return False
        if not self._told_of_anomaly_mode:
            self._told_of_anomaly_mode = True
            _log.warning(
                "jit: a program does not check gradients for NaN as torch.autograd.set_detect_anomaly asks for: call "
                "the step without jit to find the operation"
            )
        return True

    def _refuse_offset(self, func: Any, args: Any, kwargs: Any) -> None:
        given = kwargs.get("storage_offset", [*args, None, None][_OFFSET[func]])
        if given is not None and args[0].untyped_storage()._cdata in self._slices:
            raise HostError(
                f"not pass the offset of a parameter in memory, which differs between trace and state; {in_stack()} "
                "does: call as_strided without storage_offset, or with a clone of the parameter"
            )

    def _without_values(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Replace captured tensors by fake ones, because torch computes some operations on them at once."""
        if func in _CONSTANTS:
            return args, kwargs
        leaves, spec = _tree.flatten((args, kwargs))
        real = [index for index, leaf in enumerate(leaves) if type(leaf) in _PLAIN]
        if not real:
            return args, kwargs
        for index in real:
            leaf = leaves[index]
            if leaf.layout != torch.strided:
                raise HostError(
                    f"read strided tensors only, besides its arguments; {in_stack()} reads {_tree.describe(leaf)}: "
                    "make it dense, or pass its indices and values as a leaf of the batch each"
                )
            if leaf.is_meta and self._needs_values(func, leaves):
                raise HostError(
                    f"read tensors with values only, besides its arguments; {in_stack()} reads {_tree.describe(leaf)}: "
                    "give it values (to_empty, load_state_dict) before the first call. torch itself makes such a "
                    "tensor for vmap(hessian(f)): take vmap(jacrev(jacrev(f)))"
                )
            if id(leaf) not in self._seen:
                with disable_proxy_modes_tracing():  # from_tensor views its base, which must not be in the graph
                    self._seen[id(leaf)] = leaf, self._mode.from_tensor(leaf, static_shapes=True)
            leaves[index] = self._seen[id(leaf)][1]
        args, kwargs = _tree.unflatten(leaves, spec)
        return args, kwargs

    def _needs_values(self, func: Any, leaves: list[Any]) -> bool:
        """Return whether an operation that reads a tensor on meta has a result with values.

        torch.func computes shapes on the meta device, and zeros_like takes no more than a shape from there.
        """
        copied = func is _aten._to_copy.default
        return any(
            (isinstance(leaf, Tensor) and leaf.device.type in self._home)
            or (copied and isinstance(leaf, torch.device) and leaf.type in self._home)
            for leaf in leaves
        )

    def real(self) -> dict[int, Tensor]:
        """Return the captured tensors, by the identity of the fake tensors that replace them."""
        return {id(fake): leaf for leaf, fake in self._seen.values()}

    def slices(self, tensor: Tensor, sizes: Sequence[int], wanted: Wanted) -> list[Tensor] | None:
        """Record views; None for a tensor of no or another trace, and where derivatives have to pass."""
        mode: Any = get_proxy_mode()
        found: Any = get_proxy_slot(tensor, self._tracer, None) if mode and mode.tracer is self._tracer else None
        if found is None or tensor.requires_grad or forward_ad._current_level >= 0:
            return None
        split, views = _aten.split_with_sizes.default(found.proxy, list(sizes)), []
        for number, shape in wanted:
            part, count = split[number], math.prod(shape)
            if count < sizes[number]:
                part = _aten.slice.Tensor(part, 0, 0, count)
            with disable_proxy_modes_tracing():
                view = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            proxy = _aten.view.default(part, list(shape))
            views.append(track_tensor_tree(view, proxy, constant=None, tracer=self._tracer))
            self._made[id(view)] = weakref.ref(view), proxy.node
            self._slices.add(view.untyped_storage()._cdata)
        return views

    def set_data(self, tensor: Tensor, value: Tensor) -> None:
        """Record `tensor.data = value` for a tensor that the step made: from now on it is the node of value.

        Raises:
            HostError: the step did not make the tensor: eager code would leave its former memory as it was, and a
                program can only write into it.
        """
        mode: Any = get_proxy_mode()
        slot: Any = get_proxy_slot(tensor, mode.tracer, None) if mode else None
        if _is_same_memory(tensor, value):  # Module.to does this
            return
        if not isinstance(tensor, FakeTensor) or (slot is not None and slot.proxy.node.op == "placeholder"):
            raise HostError(
                f"not assign to .data of a tensor that it did not make; {in_stack()} does, for "
                f"{_tree.describe(tensor)}: write into it with copy_, or assign a new tensor to the name or attribute"
            )
        with torch.no_grad():
            value = value.detach()
        _DATA.__set__(tensor, value)
        tensor.constant = None
        if mode:
            slot = get_proxy_slot(value, mode.tracer)
            set_proxy_slot(tensor, mode.tracer, slot)
            if id(tensor) in self._made:  # not in the body of a scan
                self._made[id(tensor)] = weakref.ref(tensor), slot.proxy.node

    def handle(self, argument: Tensor) -> Tensor:
        """Return another tensor for an argument, which exists for as long as Python keeps it.

        The arguments themselves exist until the trace ends, so they do not show what the step has kept of them.
        """
        with disable_proxy_modes_tracing():
            handle = argument.detach()
        slot: Any = get_proxy_slot(argument, self._tracer)
        set_proxy_slot(handle, self._tracer, slot)
        self._made[id(handle)] = weakref.ref(handle), slot.proxy.node
        return handle

    def node_of(self, value: Tensor) -> torch.fx.Node | None:
        found: Any = get_proxy_slot(value, self._tracer, None)
        return None if found is None else found.proxy.node

    def _look(self, func: Any, out: FakeTensor, args: Any, kwargs: Any) -> None:
        device = out.fake_device
        # torch.func computes shapes on the meta device, but moves nothing there.
        if device.type not in self._home and (device.type != "meta" or func in _MOVES):
            given = [leaf for leaf in _tree.leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if any(leaf.device.type in self._home for leaf in given):
                why = ", as torch does for vmap(hessian(f)): take vmap(jacrev(jacrev(f)))" * (device.type == "meta")
                raise HostError(f"stay on one type of device; {in_stack()} moves a tensor to {device.type}{why}")
        if not any(out is arg for arg in args) or id(out) in self._made:
            node = self.node_of(out)
            if node is not None:
                self._made[id(out)] = weakref.ref(out), node
                return
            mode: Any = get_proxy_mode()
            slot: Any = get_proxy_slot(out, mode.tracer, None) if mode else None
            if slot is not None:
                self._made_in_part[id(out)] = weakref.ref(out), slot.proxy.node

    def settle(
        self, given: list[Tensor], inputs: list[Input], *, failed: bool = False, returned: int = 0
    ) -> list[Tensor]:
        """Give the tensors of a trace that Python has kept their values, computed from these arguments.

        Args:
            given: the arguments.
            inputs: what each of them is.
            failed: whether the trace failed.
            returned: the number of results, the first ones, that are the next state.

        Returns:
            Those that follow from arguments that change from call to call.
        """
        self._leave_to_graphs()
        if any(ref() is not None for ref, _ in self._made.values()):
            gc.collect()  # autograd's nodes and what they refer to form cycles
        kept: list[Any] = [(ref(), node) for ref, node in self._made.values() if ref() is not None]
        self._made.clear()
        if not kept:
            return []
        # Weak references to them prevent swap_tensors.
        self._tracer.tensor_tracker.clear()
        kept[0][0].fake_mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        graph, root, real = self._tracer.graph, self._tracer.root, self.real()
        placeholders = graph.find_nodes(op="placeholder")
        values: dict[torch.fx.Node, Any] = dict(zip(placeholders, given))
        for node in graph.find_nodes(op="get_attr"):
            value = getattr(root, str(node.target), None)
            if id(value) in real:
                values[node] = real[id(value)].detach()
        constant: set[torch.fx.Node] = set()
        if not failed:
            state = [node for node, argument in zip(placeholders, inputs) if argument.kind == "state"]
            results = graph.output_node().args[0][:returned]
            constant = set(state) - Aliases(graph).changed(state, results)
        return settle(kept, root, values, failed=failed, constant=constant)

    def settle_part(self, module: torch.fx.GraphModule) -> None:
        """Give tensors their values that Python has kept of a graph inside the graph, if they follow from constants."""
        made, self._made_in_part = self._made_in_part, {}
        with _without_modes():  # the trace around it goes on
            _leave_examples(module, made)
            if any(ref() is not None for ref, _ in made.values()):
                gc.collect()
            kept: list[Any] = [(ref(), node) for ref, node in made.values() if ref() is not None]
            made.clear()
            if kept:
                settle(kept, module, {}, failed=True)

    def _leave_to_graphs(self) -> None:
        """Give graphs inside the graph, such as the body of a scan, examples that are not tensors of the trace."""
        for module in self._tracer.root.modules():
            if isinstance(module, torch.fx.GraphModule):
                _leave_examples(module, self._made)
