"""Trace a function of a list of tensors into one graph of aten operations by running it once.

The function runs on tensors without values (torch's fake tensors) under torch's `make_fx`: the graph contains the
operations on tensors. Autograd, torch.func, autocast, hooks, loggers and autograd.Functions act as in
eager mode. Tensors that the function reads besides its arguments become inputs of the graph, by reference. Nothing is
computed, and no random number is drawn.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from funcamp import _tree, _upstream
from funcamp._trace.aliases import Aliases
from funcamp._trace.as_compiled import as_compiled
from funcamp._trace.captured_inputs import captured_as_inputs
from funcamp._trace.host_values import compute_host_values
from funcamp._trace.inner_casts import watch_autocast
from funcamp._trace.interface import Outputs, Role, outputs_of
from funcamp._trace.kept_tensors import give_values_to_kept
from funcamp._trace.open_shapes import has_open_result, is_open
from funcamp._trace.places import Identity, Survey
from funcamp._trace.refusals import assignments_to_data_refused
from funcamp._trace.tensor_subclass import Wrapper, unwrap_all, wrap, wrapper_of
from funcamp._trace.trace_errors import explain
from funcamp._trace.tracing import HostError
from funcamp._trace.until_stable import trace_until_stable
from funcamp._trace.user_line import asks_whether_compiled
from funcamp._trace.watch import TraceWatch
from funcamp._types import Tree
from funcamp._upstream.fake_tensors import FakeTensor, FakeTensorMode
from funcamp._upstream.kernel_layouts import give_kernels_layouts

#: What a trace cannot do without.
_NEEDED_NAMES = (
    FakeTensor,
    FakeTensorMode,
    _upstream.find("torch.utils._python_dispatch.TorchDispatchMode"),
    _upstream.find("torch.utils._python_dispatch.is_traceable_wrapper_subclass"),
)

_aten = torch.ops.aten
#: Context manager: torch writes the Python of a graph when it is first called.
_written_when_called = _upstream.find("torch.fx._lazy_graph_module._use_lazy_graph_module", contextlib.nullcontext)

#: From state and batch to the tensors of the next state, and the metrics.
Traceable: TypeAlias = Callable[[list[Tensor]], tuple[list[Tensor], Tree]]


class Graph(NamedTuple):
    """A traced function."""

    module: fx.GraphModule
    """From the plain parts of the arguments and captured tensors to the plain parts of the results; not recompiled."""
    roles: list[Role]
    """What each of its inputs is; the captured ones are the last."""
    examples: list[Tensor]
    """Fake tensors like its inputs."""
    mode: FakeTensorMode
    """The mode of the examples."""
    captured: list[Tensor]
    """The tensors that it reads besides its arguments."""
    aliases: Aliases
    """Which of its nodes share memory, and which write it."""
    wrappers: list[Wrapper | None]
    """The wrappers of its results."""
    outputs: Outputs
    """What each of its results is."""
    has_subclasses: bool
    """Whether an argument or a result is not a plain tensor."""
    open_operation: str | None
    """The first operation with a shape or strides that follow from values; None if there is none."""
    notes: set[str]
    """What the log has to say of it."""
    changed_places: Set[Identity] = frozenset()
    """The identities of the places in which the step's Python puts another value at every run."""


def trace(
    fn: Traceable,
    args: list[Tensor],
    home: Set[str],
    *,
    in_cuda_graph: bool = False,
    roots: Mapping[str, object] | None = None,
    state_count: int = 0,
) -> Graph:
    """Trace fn for arguments like these.

    Args:
        fn: a function from a list of tensors, state and batch, to a list of tensors, the next state, and a pytree, the
            metrics; may write to its arguments.
        args: distinct tensors without aliases.
        home: the types of device that it must not leave.
        in_cuda_graph: whether it becomes a CUDA graph, which keeps shapes, and what the host has, as it was captured.
        roots: the objects that its Python reaches, by name.
        state_count: the number of args, the first ones, that are the state.

    Raises:
        HostError: an operation moves a tensor from home to another type of device, or reads it; Python draws
            numbers; two runs of it record other operations.
        RuntimeError: fn accumulates gradients in a tensor that is not an argument.
        Exception: any error of fn.
    """
    roots = {} if roots is None else roots
    trace_once = functools.partial(_trace_once, fn, args, home, in_cuda_graph, roots, state_count)
    return trace_until_stable(lambda: _trace_as_compiled_or_eager(trace_once), roots)


def _trace_as_compiled_or_eager(trace_once: Callable[[], Graph]) -> Graph:
    """Trace as under a compiler; if the function then fails, and asks whether it is compiled, as in eager mode."""
    try:
        with as_compiled(True):
            return trace_once()
    except Exception as error:
        if isinstance(error, HostError) or not asks_whether_compiled(error):
            raise
        # If is_compiling() is True, a model may assume that a mask is given.
        graph: Graph | None = None
        with contextlib.suppress(Exception), as_compiled(False):
            graph = trace_once()
        if graph is None:  # raise the error of the first run
            raise
    graph.notes.add("step fails where torch.compiler.is_compiling() is True, so it is traced as in eager mode")
    return graph


def _trace_once(
    fn: Traceable,
    args: list[Tensor],
    home: Set[str],
    in_cuda_graph: bool,
    roots: Mapping[str, object],
    state_count: int,
) -> Graph:
    """Trace by one run of the function. The arguments are those of `trace`."""
    _prepare_torch()

    # Tensors without values like the arguments, and what watches the operations on them.
    fake_mode = _new_fake_mode(in_cuda_graph=in_cuda_graph)
    watch = TraceWatch(home, fake_mode, in_cuda_graph=in_cuda_graph)
    arguments, roles = _unwrap_arguments(args, state_count)
    with fake_mode:  # new ones, because it is unknown what later arguments share with each other
        examples = [_new_like(argument) for argument in arguments]

    # One run, recorded.
    plain_function = _PlainFunction(fn, [wrapper_of(arg) for arg in args], watch)
    module = _record(plain_function, examples, fake_mode, in_cuda_graph=in_cuda_graph)
    _name_dtypes(module.graph)

    # The tensors that it reads besides its arguments are further inputs.
    captured = captured_as_inputs(module, watch.captured)
    roles += ["captured"] * len(captured)
    with fake_mode:  # with a ShapeEnv, torch makes symbols of sizes if they are not said to be static
        examples += [fake_mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in captured]

    # Tensors without values that its Python keeps get values.
    places = Survey(roots).places.values()
    values = [*arguments, *captured]
    give_values_to_kept(places, watch.node_of, module, roles, values, plain_function.outputs)

    # Copies for draws that did not come are left out; a CUDA graph runs nothing on the host.
    _erase_unused_copies(module.graph)
    if in_cuda_graph and "cpu" not in home:
        compute_host_values(module, arguments[0].device, fake_mode)

    return Graph(
        module=module,
        roles=roles,
        examples=examples,
        mode=fake_mode,
        captured=captured,
        aliases=Aliases(module.graph),
        wrappers=plain_function.wrappers,
        outputs=plain_function.outputs,
        has_subclasses=any(plain_function.argument_wrappers) or any(plain_function.wrappers),
        open_operation=next((str(node.target) for node in module.graph.nodes if has_open_result(node)), None),
        notes=_notes_on_settings(),
    )


def _prepare_torch() -> None:
    """Raise RuntimeError if torch lacks what a trace needs; start the thread that some versions need."""
    for name in _NEEDED_NAMES:
        _upstream.check(name)
    if _upstream.ENDED_THREAD:
        stay()


@functools.cache
def stay() -> None:
    """Enter a FakeTensorMode in a thread that never ends, because torch refers to the first one."""
    entered = threading.Event()

    def enter_and_wait() -> None:
        with FakeTensorMode():
            entered.set()
        threading.Event().wait()

    threading.Thread(target=enter_and_wait, name="funcamp-stay", daemon=True).start()
    entered.wait()


def _new_fake_mode(*, in_cuda_graph: bool) -> FakeTensorMode:
    """Return a mode for the tensors of one trace."""
    # The watch refuses the function's own reads of values.
    shape_env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=not in_cuda_graph)
    # torch.tensor passes its constant as it is.
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env)
    give_kernels_layouts(fake_mode)
    return fake_mode


def _notes_on_settings() -> set[str]:
    """Return what the log has to say of torch's settings."""
    note = (
        "a program does not check gradients for NaN as torch.autograd.set_detect_anomaly asks for: call the step "
        "without jit to find the operation"
    )
    return {note} if torch.is_anomaly_enabled() else set()


class _PlainFunction:
    """A step as a function from plain tensors to plain tensors, which is watched while it runs.

    Args:
        fn: the step.
        argument_wrappers: the wrappers of its arguments.
        watch: what watches it.
    """

    wrappers: list[Wrapper | None]
    """Those of the results of its run."""
    outputs: Outputs
    """What each of the results is."""

    def __init__(
        self,
        fn: Traceable,
        argument_wrappers: list[Wrapper | None],
        watch: TraceWatch,
    ) -> None:
        self.argument_wrappers = argument_wrappers
        self._fn = fn
        self._watch = watch

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Run the function on the plain tensors of its arguments, and return those of its results."""
        with self._watch.on():
            plain_tensors = iter(tensors)
            next_state, metrics = self._fn([wrap(wrapper, plain_tensors) for wrapper in self.argument_wrappers])
            _refuse_open_numbers(metrics)
            results = [*next_state, *_tree.tensors_in(metrics)]
            self.wrappers = [wrapper_of(result) for result in results]
            self.outputs = outputs_of(len(next_state), metrics)
        return unwrap_all(results)


def _unwrap_arguments(args: list[Tensor], state_count: int) -> tuple[list[Tensor], list[Role]]:
    """Return the plain tensors of arguments, the first of which are the state, and what each of them is."""
    state = unwrap_all(args[:state_count])
    batch = unwrap_all(args[state_count:])
    roles: list[Role] = ["state"] * len(state)
    roles += ["batch"] * len(batch)
    return [*state, *batch], roles


def _new_like(tensor: Tensor) -> Tensor:
    """Return a new tensor of the same shape, strides, dtype and device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _refuse_open_numbers(metrics: Tree) -> None:
    """Raise HostError if a metric is a number that follows from values."""
    for index, leaf in enumerate(_tree.leaves(metrics)):
        if is_open(leaf) and not isinstance(leaf, Tensor):
            raise HostError(
                "return tensors and constants only; metrics"
                f"{_tree.path_of(metrics, index)} is a number that follows from values: return a tensor, such as "
                "mask.sum() for the size of x[mask]"
            )


def _record(
    fn: Callable[..., list[Tensor]], examples: list[Tensor], fake_mode: FakeTensorMode, *, in_cuda_graph: bool
) -> fx.GraphModule:
    """Return the operations of one run of fn on tensors without values.

    Raises:
        HostError: fn does what a program cannot.
        Exception: any error of fn.
    """
    try:
        with (
            assignments_to_data_refused(),
            torch.autograd.set_detect_anomaly(False),  # its check reads values
            # On a GPU autograd would call backward in another thread, outside these modes.
            torch.autograd.set_multithreading_enabled(False),
            fake_mode,
        ):
            return _record_with_casts(fn, examples)
    except Exception as error:
        explanation = explain(error, in_cuda_graph=in_cuda_graph)
        if explanation is None:
            raise
        raise explanation from None


def _record_with_casts(fn: Callable[..., list[Tensor]], examples: list[Tensor]) -> fx.GraphModule:
    """Return the operations of one run of fn, with autocast's casts as eager code has them."""
    cache_enabled = torch.is_autocast_cache_enabled()

    def run(*tensors: Tensor) -> list[Tensor]:
        # make_fx disables the cache: a weight that is used twice would be cast twice, and its gradients would be summed
        # in float32 instead of the low precision.
        torch.set_autocast_cache_enabled(cache_enabled)
        return fn(*tensors)

    watch_autocast()
    with _separate_autocast_cache(), _written_when_called(True):
        # "real" means as they are: the examples are fake already.
        return make_fx(run, tracing_mode="real")(*examples)


@contextlib.contextmanager
def _separate_autocast_cache() -> Iterator[None]:
    """Context manager: separate the autocast cache of a graph from that of the code around it."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


# What is done to a graph after its trace


def _name_dtypes(graph: fx.Graph) -> None:
    """Set the dtype of new tensors explicitly: torch leaves out that of some zeros; a step may change the default."""
    for node in graph.nodes:
        result = node.meta.get("val")
        schema = getattr(node.target, "_schema", None)
        if schema is None or node.all_input_nodes or not isinstance(result, Tensor):
            continue
        if any(argument.name == "dtype" and argument.kwarg_only for argument in schema.arguments):
            node.update_kwarg("dtype", result.dtype)


def _erase_unused_copies(graph: fx.Graph) -> None:
    """Erase the copies of random numbers that nothing draws again."""
    for node in reversed(graph.nodes):
        if node.target is _aten.clone.default and not node.users:
            graph.erase_node(node)
