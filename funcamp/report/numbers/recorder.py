"""Record every operation of an eager run: a dispatch mode counts outputs, hooks name modules.

Autograd's current node distinguishes the backward pass from the forward pass; a node's sequence number leads to the
module whose forward pass made it. Every backward pass starts in `torch.autograd._engine_run_backward`; there a finished
one is repeated at other scales.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from funcamp import _tree, _upstream
from funcamp._jit.jit_step import JitStep
from funcamp._step.step import TrainStep
from funcamp._types import Args, Kwargs, Tree
from funcamp._upstream.modes import check_modes, without_modes
from funcamp._upstream.replaced import replaced
from funcamp.float8.linears import layer_of
from funcamp.numerics import taps
from funcamp.numerics.counting import count
from funcamp.report.numbers.backward_passes import BackwardPass, Operation, Trial, examine_pass
from funcamp.report.numbers.engine_call import EngineCall, RunEngine, find_obstacle, function_behind
from funcamp.report.numbers.float8_fit import Multiplied
from funcamp.report.numbers.location import CallSites, is_called_by_library, sequence_number
from funcamp.report.numbers.marks import mark
from funcamp.report.numbers.module_paths import ModulePaths
from funcamp.report.numbers.recording import Recording
from funcamp.report.numbers.replaced_calls import call_eagerly, scaling_calls
from funcamp.report.numbers.values import all_finite, computes, contains_nonfinite, is_countable, largest_item
from funcamp.numerics.statistics import Stats

_current_node = _upstream.find("torch._C._current_autograd_node")
_is_tracing = _upstream.find("torch._C._is_tracing")
_dispatch_modes = _upstream.find("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
_engine = _upstream.find("torch.autograd._engine_run_backward")
if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.utils._python_dispatch import TorchDispatchMode as _Mode
else:
    _Mode = _upstream.find("torch.utils._python_dispatch.TorchDispatchMode")

#: torch's own method: the recorder's hooks are not the script's.
_register_hook = Tensor.register_hook

_T = TypeVar("_T")
_P = ParamSpec("_P")


class _Phase(enum.Enum):
    """What is done with the operations that run now."""

    RECORDING = enum.auto()
    """They are recorded."""
    MUTED = enum.auto()
    """They are not part of the run: those of taps, of scaling a loss, of this recorder."""
    REPEATING = enum.auto()
    """They are those of a backward pass at another loss scale, and recorded separately."""
    DONE = enum.auto()
    """All requested passes are recorded, and the run continues without this recorder. Final."""


class _Replacement(NamedTuple):
    """A function that is replaced while a recorder watches."""

    owner: object
    """The module or class that has it."""
    name: str
    function: Callable[..., object]
    """What replaces it."""


class Recorder(_Mode):
    """Records operations from the first forward pass to the end of the last requested backward pass.

    Args:
        module: names the operations; None for the first one that is called.
        first: the first backward pass to record.
        passes: for a script, the number of passes to record, after which the run continues unrecorded; None for a
            function, of which all passes are recorded.
        loss_scale: the factor of the loss; None to find it in the run.
    """

    def __init__(
        self,
        module: nn.Module | None,
        first: int = 1,
        passes: int | None = None,
        loss_scale: float | None = None,
    ) -> None:
        for private_name in (_current_node, sequence_number, _engine, _is_tracing, _dispatch_modes, _Mode):
            _upstream.check(private_name)
        check_modes()
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        """Of the run; while a backward pass is repeated, of the repetition."""
        self.operands: dict[str, Multiplied] = {}
        """What each linear layer multiplies."""
        self.passes: list[BackwardPass] = []
        self.loss_scale = 1.0 if loss_scale is None else loss_scale
        self.modules = ModulePaths(module)
        self.seen_backward = False
        self.end = 0
        """Index of the first operation after the last backward pass."""

        self._phase = _Phase.RECORDING
        self._passes_to_skip = first - 1
        self._passes_left = passes
        self._is_script = passes is not None
        self._looks_for_scale = loss_scale is None
        self._finite_losses: list[bool] = []
        """Whether each loss that was scaled since the last backward pass is finite."""
        self._read_next: Callable[[Tensor], None] | None = None
        """What to do with the result of the next operation, which is not recorded."""
        self._script_code = ""
        """Code of the script that its backward passes run; empty if none was seen."""

        self._call_sites = CallSites()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager: this mode, hooks on modules, and compiled functions run eagerly."""
        replacements = list(self._replacements())
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        with contextlib.ExitStack() as stack, warnings.catch_warnings():
            for hook in hooks:
                stack.callback(hook.remove)
            for replacement in replacements:
                stack.enter_context(replaced(replacement.owner, **{replacement.name: replacement.function}))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self)
            warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
            yield

    def _replacements(self) -> Iterator[_Replacement]:
        """Yield the functions to replace while this recorder watches."""
        yield _Replacement(JitStep, "__call__", self._wrap_step(call_eagerly))
        yield _Replacement(TrainStep, "__call__", self._wrap_step(TrainStep.__call__))
        yield _Replacement(torch.autograd, "_engine_run_backward", self._wrap_backward(_engine))
        for name in ("count", "count_both", "take_numbers"):
            yield _Replacement(taps, name, self._mute(getattr(taps, name)))
        for scaling_call in scaling_calls():
            function = getattr(scaling_call.owner, scaling_call.name)
            wrapped = self._wrap_scaling(function, scaling_call.scale_after)
            yield _Replacement(scaling_call.owner, scaling_call.name, wrapped)
        yield _Replacement(Tensor, "register_hook", self._noting_code(_register_hook, "hooks of tensors"))
        saved_tensors_hooks = torch.autograd.graph.saved_tensors_hooks
        enter = self._noting_code(saved_tensors_hooks.__enter__, "a checkpoint, or other hooks of saved tensors")
        yield _Replacement(saved_tensors_hooks, "__enter__", enter)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        keywords = kwargs or {}
        if self._read_next is not None:
            read = self._read_next
            self._read_next = None
            result = func(*args, **keywords)
            read(result)
            return result
        if self._is_idle():
            return func(*args, **keywords)
        return self._run_recorded(func, args, keywords)

    def _is_idle(self) -> bool:
        """Return whether what runs now is not recorded."""
        return self._is_left_out() or self._phase is _Phase.MUTED

    def _is_left_out(self) -> bool:
        """Return whether the passes to record have not begun, or are over, or this is no run but a trace."""
        return bool(self._passes_to_skip) or self._phase is _Phase.DONE or _is_tracing()

    def _is_in_this_thread(self) -> bool:
        """Return whether the current thread has this mode: a thread that the script starts has none."""
        return any(mode is self for mode in _dispatch_modes())

    def _run_recorded(self, func: OpOverload, args: Args, keywords: Kwargs) -> object:
        """Run an operation and record its outputs."""
        node = _current_node()
        inputs_contain = contains_nonfinite((args, keywords))  # before the operation, which may write its inputs
        result = func(*args, **keywords)
        location = self._call_sites.locate(node)
        if location.path is None or not computes(func):
            return result
        name = func._schema.name.split("::")[1]
        for index, output in enumerate(_tree.leaves(result)):
            if not is_countable(output):
                continue
            stats = Stats(count(output))
            contains = torch.stack([stats.posinf + stats.neginf > 0, stats.nan > 0])
            operation = Operation(
                backward=node is not None,
                path=location.path,
                name=name,
                output=index,
                dtype=output.dtype,
                shape=tuple(output.shape),
                stats=stats,
                creates=contains & ~inputs_contain.to(contains.device),
                loss_scale=self.loss_scale,
                line=location.line,
            )
            self.recording.operations.append(operation)
        return result

    @contextlib.contextmanager
    def _in_phase(self, phase: _Phase) -> Iterator[None]:
        """Context manager: another phase, unless all is recorded, which is final."""
        before = self._phase
        if before is not _Phase.DONE:
            self._phase = phase
        try:
            yield
        finally:
            if self._phase is not _Phase.DONE:
                self._phase = before

    def _noting_code(self, call: Callable[_P, _T], code: str) -> Callable[_P, _T]:
        """Wrap a call of torch's after which backward passes run code of the script."""

        @functools.wraps(call)
        def noting(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if not is_called_by_library():  # whose own hooks change nothing
                self._script_code = code
            return call(*args, **kwargs)

        return noting

    def _mute(self, call: Callable[_P, _T]) -> Callable[_P, _T]:
        """Wrap a call whose operations are not part of the run."""

        def muted(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if not self._is_in_this_thread():
                return call(*args, **kwargs)
            with self._in_phase(_Phase.MUTED):
                return call(*args, **kwargs)

        return muted

    def _wrap_step(self, call: Callable[_P, _T]) -> Callable[_P, _T]:
        """Wrap the call of a step, whose optimizer's and scaler's operations are not recorded."""

        def call_without_optimizer(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            result = call(*args, **kwargs)
            del self.recording.operations[self.end :]
            return result

        return call_without_optimizer

    def _wrap_scaling(self, call: Callable[_P, _T], scale_after: Callable[[Any], object]) -> Callable[_P, _T]:
        """Wrap a call that scales a loss: record the scale and whether the loss is finite."""
        muted_call = self._mute(call)  # not an operation of the model; it may overflow

        def scale_loss(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            result = muted_call(*args, **kwargs)
            scale = scale_after(args[0])
            if isinstance(scale, Tensor) and not self._is_left_out() and self._is_in_this_thread():
                self._note_losses(_tree.leaves([args[1:], kwargs]))
                if self._looks_for_scale:
                    self.loss_scale = self._read(scale, largest_item)  # vmap has a batch of them
            return result

        return scale_loss

    def _note_losses(self, losses: Sequence[object]) -> None:
        """Remember whether each loss is finite, until its backward pass."""
        for loss in losses:
            if is_countable(loss):
                self._finite_losses.append(self._read(loss, all_finite))

    def _read(self, x: Tensor, read: Callable[[Tensor], _T]) -> _T:
        """Return `read` of a tensor's values, below the wrappers of torch.func."""
        if not (_upstream.transforms_active() or _upstream.is_wrapped(x)):
            with without_modes(), torch.no_grad():  # also without the script's own modes, which may count operations
                return read(x.detach())
        results: list[_T] = []
        self._run_and_read(x.detach, lambda values: results.append(read(values)))
        return results[0]

    def _run_and_read(self, operation: Callable[[], Tensor], read: Callable[[Tensor], None]) -> Tensor:
        """Return an operation's result, and pass it to `read` without the wrappers of torch.func."""
        with replaced(self, _read_next=read):
            return operation()

    def _wrap_backward(self, run_engine: RunEngine) -> RunEngine:
        """Wrap the call that starts every backward pass: count the pass, and repeat it if that helps."""

        def run_backward(
            outputs: Sequence[Tensor | GradientEdge],
            initial_gradients: Sequence[Tensor | None],
            keep_graph: bool,
            create_graph: bool,
            inputs: Sequence[Tensor | GradientEdge],
            *options: object,
            **named_options: object,
        ) -> object:
            call = EngineCall(
                run_engine, outputs, initial_gradients, keep_graph, create_graph, inputs, options, named_options
            )
            is_nested = self._phase is _Phase.REPEATING or _current_node() is not None
            if is_nested or self._phase is _Phase.DONE or not self._is_in_this_thread():
                return call.run(keeps_graph=keep_graph)
            if self._passes_to_skip:
                result = call.run(keeps_graph=keep_graph)
                self._passes_to_skip -= 1
                self._finite_losses = []
                return result
            return self._record_pass(call)

        return run_backward

    def _record_pass(self, call: EngineCall) -> object:
        """Run a backward pass and append the findings about it; return what torch returns."""
        script_code = self._script_code_in(call)
        obstacle = find_obstacle()
        if self._is_script and script_code and not obstacle:
            obstacle = f"that would run the script's code again: {script_code}"
        keeps_graph = call.keeps_graph or not obstacle
        gradients_before = dict(self.recording.gradients)
        result = call.run(keeps_graph=keeps_graph)
        self.seen_backward = True
        if not self._finite_losses:  # no scaler or step was called: the outputs are the losses
            self._note_losses(call.outputs)
        # A pass that is not repeated is read without the script's own modes, which may count operations.
        with self._in_phase(_Phase.MUTED), without_modes() if obstacle else contextlib.nullcontext():
            self.passes.append(self._examine_pass(call, obstacle, gradients_before))
            if self._is_script and keeps_graph and not call.keeps_graph:
                call.free_graph()  # so that a second backward() raises as it does without this recorder
        self._end_pass()
        return result

    def _script_code_in(self, call: EngineCall) -> str:
        """Return which code of the script a backward pass runs; empty if it runs operations of torch only."""
        if not all(type(mode).__module__.startswith("funcamp.") for mode in _dispatch_modes()):
            return "its dispatch modes"
        return self._script_code or function_behind(call.outputs)

    def _end_pass(self) -> None:
        """Prepare for the next backward pass; stop recording after the last one."""
        self._finite_losses = []
        self.end = len(self.recording.operations)
        if self._passes_left is None:
            return
        self._passes_left -= 1
        if not self._passes_left:
            self._phase = _Phase.DONE

    def _examine_pass(self, call: EngineCall, obstacle: str, gradients_before: dict[str, Stats]) -> BackwardPass:
        """Return the findings about the last pass, and correct the recorded gradients if it overflowed.

        call: the call that ran it, with its graph kept unless there is an obstacle.
        obstacle: why it must not be repeated, or empty.
        gradients_before: the recorded gradients before the pass.
        """
        findings, gradients = examine_pass(
            [operation for operation in self.recording.operations[self.end :] if operation.backward],
            self.loss_scale,
            lambda factor: self._try_factor(call, factor),
            loss_is_finite=all(self._finite_losses),
            initial_dtypes=call.initial_dtypes,
            obstacle=obstacle,
        )
        if gradients is not None:
            self.recording.replace_gradients(gradients_before, gradients)
        return findings

    def _try_factor(self, call: EngineCall, factor: float) -> Trial:
        """Repeat the last pass at the loss scale times a factor, and record it separately from the run."""
        recording = Recording()
        loss_scale = self.loss_scale * factor
        with self._in_phase(_Phase.REPEATING), replaced(self, loss_scale=loss_scale, recording=recording):
            gradients = [gradient for gradient in call.repeat(factor) if isinstance(gradient, Tensor)]
            is_finite = all(self._read(gradient, all_finite) for gradient in gradients)
        return Trial(recording.operations, is_finite, recording.gradients)

    def _enter(self, module: nn.Module, args: Args) -> None:
        """Before a module's forward pass: note that it runs, and count the operands of a linear layer."""
        if not self._is_in_this_thread():
            return
        with self._in_phase(_Phase.MUTED):
            self._note_module(module, args)

    def _note_module(self, module: nn.Module, args: Args) -> None:
        """Note that a module runs, and count the operands of a linear layer."""
        layer = layer_of(module)
        path = self.modules.path_of(layer)
        in_backward = _current_node() is not None
        if self._call_sites.is_outside_modules():
            self._begin_root(in_backward)
        # In a backward pass a checkpoint calls the module again.
        is_recorded = not (in_backward or self._call_sites.in_evaluation)
        self._call_sites.enter(path if is_recorded else None)
        if is_recorded and isinstance(layer, nn.Linear) and not self._is_left_out() and args:
            layer_input = args[0]
            # Not the attribute: a parametrization computes it, and spectral norm changes its state by that.
            weight = dict(layer._parameters).get("weight")
            if is_countable(layer_input) and is_countable(weight):
                self._add_operands(path, layer_input, weight)

    def _begin_root(self, in_backward: bool) -> None:
        """At the call of an outermost module: leave out what a script does besides its training steps."""
        if not self._is_script:
            return
        if not (in_backward or self.recording.records or self.seen_backward):
            self.recording.operations.clear()  # of the script's initialization and data loading
        is_differentiated = torch.is_grad_enabled() or _upstream.transforms_active()
        self._call_sites.in_evaluation = not is_differentiated

    def _add_operands(self, path: str, layer_input: Tensor, weight: Tensor) -> None:
        """Count what a linear layer multiplies; the weight once, the inputs of all calls."""
        counted_input = Stats(self._read(layer_input, count))
        counted_weight = Stats(self._read(weight, count))
        earlier = self.operands.get(path)
        if earlier is None:
            self.operands[path] = Multiplied(counted_input, counted_weight, tuple(weight.shape))
        else:
            self.operands[path] = earlier._replace(input=earlier.input + counted_input)

    def _leave(self, module: nn.Module, inputs: Args, outputs: object) -> Tree:
        """After a module's forward pass: count its outputs, now and in the backward pass their gradients."""
        if not self._is_in_this_thread():
            return None
        path = self._call_sites.leave()
        is_wrapper = hasattr(module, "_orig_mod")  # of torch.compile: the module inside has the same outputs
        if path is None or self._is_left_out() or outputs is None or is_wrapper:
            return None
        leaves, spec = _tree.flatten(outputs)
        for index, leaf in enumerate(leaves):
            if not is_countable(leaf):
                continue
            # A copy is needed where hooks do not see the gradient: under torch.func, and of a tensor that is not the
            # module's own.
            if _upstream.transforms_active() or leaf.is_leaf or any(leaf is one for one in _tree.leaves(inputs)):
                leaves[index] = mark(leaf, self, path)
            else:
                self._watch(leaf, path)
        return _tree.unflatten(leaves, spec)

    def _watch(self, x: Tensor, path: str) -> None:
        """Count a module's output, and its gradient by a hook, which leaves the graph as it is.

        A copy would be a second tensor in the graph, at which gradients are added up in another order if the backward
        pass is differentiated too (create_graph=True).
        """
        self._add_output(path, x, backward=False)
        if x.requires_grad:
            _register_hook(  # type: ignore[no-untyped-call]
                x, lambda gradient: self._add_output(path, gradient, backward=True)
            )

    def _add_output(self, path: str, x: Tensor, *, backward: bool) -> None:
        """Count a module's output, or its gradient, if this phase is recorded."""
        if not self._is_idle() and is_countable(x):
            self._read(x, lambda values: self._add_counted(path, Stats(count(values)), backward=backward))

    def mark(self, x: Tensor, path: str, *, backward: bool) -> Tensor:
        """Copy and count a module's output or its gradient, also under vmap and torch.func."""

        def add_to_records(values: Tensor) -> None:
            if self._is_idle():
                return
            self._call_sites.locate(_current_node())
            self._add_counted(path, Stats(count(values)), backward=backward)

        return self._run_and_read(x.clone, add_to_records)

    def _add_counted(self, path: str, counted: Stats, *, backward: bool) -> None:
        """Add the counts of a module's output, or of its gradient, to the recording."""
        if backward:
            self.recording.add_gradient(path, counted, self.loss_scale)
        else:
            self.recording.add_output(path, counted)
