"""Trace a function of a flat list of tensors into one graph of aten operations, by running its Python once.

The function runs on tensors without values (torch's fake tensors), under torch's `make_fx`: what Python does, it does
at that time, and the graph holds what was done to tensors. Autograd, torch.func, autocast, hooks, loggers and
autograd.Functions act as in eager code. Tensors that the function reads of its own become inputs of the graph, by
reference. Nothing is computed, and no random number is drawn.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from funcamp import _tree, _upstream
from funcamp._types import Tree
from funcamp._user_line import INSTEAD, READS, in_stack, in_traceback

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
else:
    FakeTensor = _upstream.find("torch._subclasses.fake_tensor.FakeTensor")
    FakeTensorMode = _upstream.find("torch._subclasses.fake_tensor.FakeTensorMode")
    TorchDispatchMode = _upstream.find("torch.utils._python_dispatch.TorchDispatchMode")
    is_traceable_wrapper_subclass = _upstream.find("torch.utils._python_dispatch.is_traceable_wrapper_subclass")
#: What torch raises for a branch, a number or a shape that follows from the values of a fake tensor.
_FROM_VALUES = tuple(
    error
    for error in (
        _upstream.find("torch._subclasses.fake_tensor.DataDependentOutputException"),
        _upstream.find("torch._subclasses.fake_tensor.DynamicOutputShapeException"),
    )
    if _upstream.usable(error)
)

_log = logging.getLogger("funcamp")
_aten = torch.ops.aten
#: What torch says of a fake tensor whose values or memory are asked for.
_ASKED = (
    "is not supported for tensor subclasses",
    "data is not allocated",
    "Cannot access data pointer",
    "get value out of a tracing tensor",
    "Cannot access storage of",
)


#: No seed of a user's is as large.
_FIRST = 1 << 63


class HostError(Exception):
    """The function leaves the arguments' type of device, or reads a value on the host."""


class Outline(NamedTuple):
    """A pytree without its tensors."""

    spec: _tree.TreeSpec
    constants: list[Any]
    """Its leaves, with None in place of every tensor."""
    tensors: list[int]
    """The places of the tensors."""


class Wrapper(NamedTuple):
    """What is around the plain tensors of a tensor subclass (DTensor)."""

    kind: Any
    inner: dict[str, Wrapper | None]
    beside: dict[str, Any]
    """What it holds that is no tensor: a mesh of devices, since torch 2.13."""
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


class Graph(NamedTuple):
    """A traced function."""

    module: torch.fx.GraphModule
    """From the plain parts of its arguments, and captured tensors, to the plain parts of its results."""
    examples: list[Tensor]
    """Fake tensors like these inputs."""
    mode: FakeTensorMode
    """Theirs."""
    captured: list[Tensor]
    """What it reads of its own."""
    wrappers: list[Wrapper | None]
    """Those of its results: the list's, then the pytree's."""
    rest: Outline
    """The pytree that the function returned beside its list."""
    wrapped: bool
    """Whether an argument or a result is no plain tensor."""


def trace(fn: Callable[[list[Tensor]], tuple[list[Tensor], Tree]], args: list[Tensor], home: Set[str]) -> Graph:
    """Trace fn for arguments like these.

    Args:
        fn: from a list of tensors to a list of tensors and a pytree; may write to its arguments.
        args: distinct tensors, none an alias of another.
        home: types of device that it must not leave.

    Raises:
        HostError: an operation takes a tensor from home elsewhere, or reads it.
        RuntimeError: fn accumulates gradients in a tensor of its own.
        Exception: what fn raises.
    """
    for name in (FakeTensor, FakeTensorMode, TorchDispatchMode, is_traceable_wrapper_subclass):
        _upstream.check(name)
    # Inductor turns scan into a loop with an index that no shape tells; the function's own reads are refused below.
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False)
    fake, watch = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes), _Watch(home)
    around = [wrapper_of(arg) for arg in args]
    plain = [part for arg in args for part in parts(arg)]
    with fake:  # new ones: what later arguments share with each other is not known now
        examples: list[Tensor] = [
            torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device) for part in plain
        ]
    wrappers: list[Wrapper | None] = []
    outlines: list[Outline] = []

    def flat(*given: Tensor) -> list[Tensor]:
        pieces = iter(given)
        with watch.on():
            first, rest = fn([with_parts(wrapper, pieces) for wrapper in around])
            leaves, spec = _tree.flatten(rest)
            tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            outlines.append(Outline(spec, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], tensors))
            results = [*first, *[leaves[index] for index in tensors]]
            wrappers.extend(wrapper_of(result) for result in results)
        return [part for result in results for part in parts(result)]

    try:
        # On a GPU autograd would call backward in a thread of its own, outside of these modes.
        with _as_if_compiling(), _fresh_casts(), torch.autograd.set_multithreading_enabled(False), fake:
            module = make_fx(flat, tracing_mode="real")(*examples)
    except Exception as error:
        watch.settle(plain, failed=True)
        asked = isinstance(error, RuntimeError) and any(text in str(error) for text in _ASKED)
        if asked or isinstance(error, _FROM_VALUES):
            raise HostError(f"{READS}; {in_traceback(error)} does: {INSTEAD}") from None
        raise
    _refuse_gradients(module)
    watch.settle(plain)
    captured = _lift(module)
    with fake:
        examples += [fake.from_tensor(leaf.detach()) for leaf in captured]
    return Graph(module, examples, fake, captured, wrappers, outlines[0], any([*around, *wrappers]))


def subgraph(fn: Callable[..., list[Tensor]], args: list[Tensor]) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """Trace a part of a function that is being traced: a graph, and what it reads besides its arguments."""
    module = make_fx(fn, tracing_mode="real")(*args)
    return module, _lift(module)


def parts(value: Tensor) -> list[Tensor]:
    """Return the plain tensors of a tensor subclass that has some (DTensor), of another tensor itself."""
    if not is_traceable_wrapper_subclass(value):
        return [value]
    held = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    return [part for tensor in held if isinstance(tensor, Tensor) for part in parts(tensor)]


def wrapper_of(value: Tensor) -> Wrapper | None:
    """Return what is around a tensor's plain tensors; None of a plain one."""
    if not is_traceable_wrapper_subclass(value):
        return None
    names, context = value.__tensor_flatten__()
    held = {name: getattr(value, name) for name in names}
    inner = {name: wrapper_of(tensor) for name, tensor in held.items() if isinstance(tensor, Tensor)}
    beside = {name: held[name] for name in held.keys() - inner.keys()}
    return Wrapper(type(value), inner, beside, context, value.size(), value.stride())


def with_parts(wrapper: Wrapper | None, plain: Iterator[Tensor]) -> Tensor:
    """Return a tensor of the next plain ones."""
    if wrapper is None:
        return next(plain)
    inner = {name: with_parts(around, plain) for name, around in wrapper.inner.items()}
    made: Tensor = wrapper.kind.__tensor_unflatten__(
        {**inner, **wrapper.beside}, wrapper.context, wrapper.size, wrapper.stride
    )
    return made


@contextlib.contextmanager
def _as_if_compiling() -> Iterator[None]:
    """Let torch.compiler.is_compiling say so, which models and torch itself ask before they read a value."""
    flags: Any = torch.compiler
    before, flags._is_compiling_flag = flags._is_compiling_flag, True
    try:
        yield
    finally:
        flags._is_compiling_flag = before


@contextlib.contextmanager
def _fresh_casts() -> Iterator[None]:
    """Keep an autocast around the call from meeting its copies of fake weights, and the trace from real ones."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _refuse_gradients(module: torch.fx.GraphModule) -> None:
    for node in module.graph.find_nodes(op="get_attr"):
        leaf = getattr(module, str(node.target))
        if isinstance(leaf, Tensor) and leaf.is_leaf and isinstance(leaf.grad, FakeTensor):
            leaf.grad = None
            raise RuntimeError(
                "jit: step must not call backward() on tensors of its own, whose .grad only this trace would see; "
                f"got {_tree.describe(leaf)}: take torch.autograd.grad, or gradients with respect to the state"
            )


def _lift(module: torch.fx.GraphModule) -> list[Tensor]:
    """Make inputs of the tensors that a graph holds, but for constants that it copies at once (torch.tensor)."""
    captured: list[Tensor] = []
    inputs: dict[int, torch.fx.Node] = {}
    graph = module.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        constant = node.users and all(user.target is _aten.lift_fresh_copy.default for user in node.users)
        if not isinstance(value, Tensor) or constant:
            continue
        if id(value) not in inputs:
            with graph.inserting_before(first):
                made = graph.placeholder(f"captured_{len(captured)}")
            made.meta = dict(node.meta)
            inputs[id(value)] = made
            captured.append(value)
        node.replace_all_uses_with(inputs[id(value)])
        graph.erase_node(node)
    module.recompile()
    return captured


class _Watch(TorchDispatchMode):
    """Looks at every operation of a trace: reads, devices, random numbers, and what outlives the trace."""

    supports_higher_order_operators = True

    def __init__(self, home: Set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._home = home
        self._tracer: Any = None
        self._made: dict[int, tuple[weakref.ref[Tensor], torch.fx.Node]] = {}
        self._drawn: dict[Any, Any] = {}

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Watch in this region, with the generator's seed standing for the position in its sequence."""
        mode: Any = get_proxy_mode()
        self._tracer, before = mode.tracer, torch.get_rng_state()
        torch.default_generator.manual_seed(_FIRST)
        try:
            with self:
                yield
        finally:
            torch.set_rng_state(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tags = getattr(func, "tags", ())
        # torch.tensor(2.0).item() is a constant. Of a captured tensor make_fx would read the value of now.
        if torch.Tag.data_dependent_output in tags and getattr(args[0], "constant", None) is None:
            raise HostError(f"{READS}; {in_stack()} does: {INSTEAD}")
        draws = torch.Tag.nondeterministic_seeded in tags
        out = self._draw(func, args, kwargs) if draws else func(*args, **kwargs)
        for value in (out,) if isinstance(out, Tensor) else out if isinstance(out, (tuple, list)) else ():
            if isinstance(value, FakeTensor):
                self._look(value, args, kwargs)
        return out

    def _look(self, out: Tensor, args: Any, kwargs: Any) -> None:
        if out.device.type not in self._home:
            given = [leaf for leaf in _tree.leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if any(leaf.device.type in self._home for leaf in given):
                raise HostError(f"stay on one type of device; {in_stack()} moves a tensor to {out.device.type}")
        if not any(out is arg for arg in args) or id(out) in self._made:
            found: Any = get_proxy_slot(out, self._tracer, None)
            if found is not None:
                self._made[id(out)] = weakref.ref(out), found.proxy.node

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Random numbers; those drawn before if the generator was set back, as `torch.utils.checkpoint` does.

        Otherwise a block that is computed again would have other masks than its forward pass.
        """
        turn = torch.default_generator.initial_seed()
        leaves = _tree.leaves((args, kwargs))
        if turn < _FIRST or any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise RuntimeError(
                "jit: step must draw from torch's default generator and not seed it, for the state of a generator "
                f"cannot be part of a program; {in_stack()} does: seed before the call, or pass a seed's numbers in "
                "the batch"
            )
        torch.default_generator.manual_seed(turn + 1)
        alike = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        key = turn, func, str(alike)
        # Copies are kept, since what was drawn may be written (dropout divides it); unused, a compiler drops them.
        if not func._schema.is_mutable:
            if key in self._drawn:
                return _copies(self._drawn[key])
            out = func(*args, **kwargs)
            self._drawn[key] = _copies(out)
            return out
        # Eager code fills memory in its order; made functional, the call would fill a contiguous tensor.
        target = args[0]
        memory = target.permute(sorted(range(target.dim()), key=target.stride, reverse=True))
        if key in self._drawn:
            memory.copy_(self._drawn[key])
        else:
            func(memory, *args[1:], **kwargs)
            self._drawn[key] = memory.clone()
        return target

    def settle(self, given: list[Tensor], *, failed: bool = False) -> None:
        """Give the tensors that Python has kept of a trace, in a module's cache for instance, values from these inputs.

        Args:
            given: the plain arguments of the function.
            failed: the trace has failed, and its frames are still there: only what depends on no argument can be meant.
        """
        self._drawn.clear()
        if any(ref() is not None for ref, _ in self._made.values()):
            gc.collect()  # autograd's nodes and what they hold refer to each other
        alive: list[tuple[Any, torch.fx.Node]] = [(ref(), node) for ref, node in self._made.values()]
        alive = [(kept, node) for kept, node in alive if kept is not None]
        self._made.clear()
        if not alive:
            return
        # Weak references to them stand in the way of swap_tensors.
        self._tracer.tensor_tracker.clear()
        alive[0][0].fake_mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        values: dict[torch.fx.Node, Any] = dict(zip(self._tracer.graph.find_nodes(op="placeholder"), given))
        fixed: list[str] = []
        for kept, node in alive:
            needed = _behind(node)
            if any(other.op == "placeholder" for other in needed):
                if failed:
                    continue
                fixed.append(_tree.describe(kept))
            with torch.no_grad():
                for other in self._tracer.graph.nodes:
                    if other in needed and other not in values:
                        values[other] = _value(other, self._tracer.root, values)
            try:
                torch.utils.swap_tensors(kept, values[node].clone())  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                if failed:
                    continue
                raise RuntimeError(
                    f"jit: step must not keep {_tree.describe(kept)} in Python where torch refers to it too ({error}); "
                    "return it in the metrics instead"
                ) from None
        if fixed:
            _log.warning(
                "jit: Python keeps tensors of the step that follow from its arguments, and later calls will not change "
                "them: %s. Return what you want to see in the metrics",
                ", ".join(fixed[:4]) + ", ..." * (len(fixed) > 4),
            )


def _copies(out: Any) -> Any:
    leaves, spec = _tree.flatten(out)
    return _tree.unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _behind(node: torch.fx.Node) -> set[torch.fx.Node]:
    """A node and all that it is computed from."""
    found, rest = {node}, [node]
    while rest:
        for other in rest.pop().all_input_nodes:
            if other not in found:
                found.add(other)
                rest.append(other)
    return found


def _value(node: torch.fx.Node, root: Any, values: dict[torch.fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return getattr(root, str(node.target))
    target: Any = node.target
    args: list[Any] = [torch.fx.map_arg(arg, values.__getitem__) for arg in node.args]
    if getattr(getattr(target, "_schema", None), "is_mutable", False):
        args[0] = args[0].clone()  # nothing that a user holds is written
    return target(*args, **torch.fx.map_arg(dict(node.kwargs), values.__getitem__))
