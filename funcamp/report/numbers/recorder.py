"""Record every operation of an eager run: a dispatch mode counts outputs, hooks name modules.

Autograd's current node distinguishes the backward pass from the forward pass; a node's sequence number leads to the
module whose forward pass made it. Every backward pass starts in `torch.autograd._engine_run_backward`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from funcamp.numerics.counting import count
from funcamp.numerics.statistics import Stats
from funcamp.report.mode import Mode
from funcamp.report.numbers.counted import Recording, add, computes, is_countable, is_finite, nonfinite_among
from funcamp.report.numbers.float8_fit import Multiplied
from funcamp.report.numbers.modules import Modules
from funcamp.report.numbers.operation import BackwardPass, Operation
from funcamp.report.numbers.steps import scaling_calls, step_calls
from funcamp.report.torch_names import (
    Args,
    Kwargs,
    current_node,
    dispatch_modes,
    is_tracing,
    is_wrapped,
    replaced,
    run_engine,
    transforms_active,
    tree_leaves,
    without_modes,
)

if TYPE_CHECKING:
    from torch._ops import OpOverload

#: torch's own method: the recorder's hooks are not the script's.
_register_hook = Tensor.register_hook

_T = TypeVar("_T")
_P = ParamSpec("_P")


class Recorder:
    """Records operations from the first forward pass to the end of the last requested backward pass.

    Args:
        mode: gives it the operations of the run.
        module: names the operations; None for the first one that is called.
        first: the first backward pass to record.
        passes: for a script, the number of passes to record, after which the run continues unrecorded; None for a
            function, of which all passes are recorded.
        loss_scale: the factor of the loss; None to find it in the run.
    """

    def __init__(
        self,
        mode: Mode,
        module: nn.Module | None = None,
        first: int = 1,
        passes: int | None = None,
        loss_scale: float | None = None,
    ) -> None:
        self.recording = Recording()
        self.operands: dict[str, Multiplied] = {}
        """What each linear layer multiplies."""
        self.passes: list[BackwardPass] = []
        self.loss_scale = 1.0 if loss_scale is None else loss_scale
        self.modules = Modules(module)
        self.seen_backward = False
        self.end = 0
        """Index of the first operation after the last backward pass."""

        self._mode = mode
        self._is_muted = False
        """Whether what runs now is not part of the run: taps, the scaling of a loss, this recorder."""
        self._is_done = False
        """Whether all requested passes are recorded, and the run continues without this recorder."""
        self._passes_to_skip = first - 1
        self._passes_left = passes
        self._is_script = passes is not None
        self._looks_for_scale = loss_scale is None
        self._finite_losses: list[bool] = []
        """Whether each loss that was scaled since the last backward pass is finite."""
        self._read_next: Callable[[Tensor], None] | None = None
        """What to do with the result of the next operation, which is not recorded."""
        self._until_done = contextlib.ExitStack()
        """What ends when all requested passes are recorded."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager: hooks on modules, and replaced functions."""
        with contextlib.ExitStack() as stack, self._until_done, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
            for owner, name, function in list(self._replacements()):
                stack.enter_context(replaced(owner, **{name: function}))
            self._until_done.callback(register_module_forward_pre_hook(self._enter).remove)
            self._until_done.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            self._until_done.enter_context(replaced(self._mode, run=self.run_operation))
            yield

    def _replacements(self) -> Iterator[tuple[object, str, Callable[..., Any]]]:
        """Yield the functions to replace while this recorder watches: owner, name, and what replaces it."""
        yield torch.autograd, "_engine_run_backward", self._run_backward
        for owner, name, call_eagerly in step_calls():
            yield owner, name, self._wrap_step(call_eagerly)
        for owner, name, scale_of in scaling_calls():
            yield owner, name, self._wrap_scaling(getattr(owner, name), scale_of)

    def run_operation(self, func: OpOverload, args: Args, keywords: Kwargs) -> object:
        """Run an operation and record its outputs."""
        if self._read_next is not None:
            read = self._read_next
            self._read_next = None
            result = func(*args, **keywords)
            read(result)
            return result
        if self._is_idle():
            return func(*args, **keywords)
        node = current_node()
        # An operation may write its inputs.
        before = nonfinite_among((args, keywords)) if func._schema.is_mutable else None
        result = func(*args, **keywords)
        location = self.modules.locate(node)
        if location.path is None or not computes(func):
            return result
        for index, output in enumerate(tree_leaves(result)):
            if not is_countable(output):
                continue
            stats = Stats(count(output))
            creates = ""
            if stats.nonfinite > 0:
                before = before or nonfinite_among((args, keywords))
                kinds = ("inf", bool(stats.posinf + stats.neginf > 0)), ("NaN", bool(stats.nan > 0))
                creates = " ".join([kind for (kind, is_in), was_in in zip(kinds, before) if is_in and not was_in])
            operation = Operation(
                backward=node is not None,
                path=location.path,
                name=func._schema.name.split("::")[1],
                output=index,
                dtype=output.dtype,
                shape=tuple(output.shape),
                stats=stats,
                creates=creates,
                loss_scale=self.loss_scale,
                line=location.line,
            )
            self.recording.operations.append(operation)
        return result

    def _is_idle(self) -> bool:
        """Return whether what runs now is not recorded."""
        return self._is_muted or self._is_left_out()

    def _is_left_out(self) -> bool:
        """Return whether the passes to record have not begun, or are over, or this is no run but a trace."""
        return bool(self._passes_to_skip) or self._is_done or is_tracing()

    def _is_in_this_thread(self) -> bool:
        """Return whether the current thread has the mode: a thread that the script starts has none."""
        return any(mode is self._mode for mode in dispatch_modes())

    def _wrap_step(self, call: Callable[_P, _T]) -> Callable[_P, _T]:
        """Wrap the call of a step, whose optimizer's and scaler's operations are not recorded."""

        def call_without_optimizer(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            result = call(*args, **kwargs)
            del self.recording.operations[self.end :]
            return result

        return call_without_optimizer

    def _wrap_scaling(self, call: Callable[_P, _T], scale_of: Callable[[Any], object]) -> Callable[_P, _T]:
        """Wrap a call that scales a loss: record the scale and whether the loss is finite."""

        @functools.wraps(call)
        def scale_loss(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if not self._is_in_this_thread():
                return call(*args, **kwargs)
            with replaced(self, _is_muted=True):  # not an operation of the model; it may overflow
                result = call(*args, **kwargs)
            scale = scale_of(args[0])
            if isinstance(scale, Tensor) and not self._is_left_out():
                self._note_losses(tree_leaves([args[1:], kwargs]))
                if self._looks_for_scale:
                    self.loss_scale = self._read(scale, lambda values: values.max().item())  # vmap has a batch of them
            return result

        return scale_loss

    def _note_losses(self, losses: Sequence[object]) -> None:
        """Remember whether each loss is finite, until its backward pass."""
        self._finite_losses += [self._read(loss, is_finite) for loss in losses if is_countable(loss)]

    def _read(self, x: Tensor, read: Callable[[Tensor], _T]) -> _T:
        """Return `read` of a tensor's values, below the wrappers of torch.func."""
        if not (transforms_active() or is_wrapped(x)):
            with without_modes(), torch.no_grad():  # also without the script's own modes, which may count operations
                return read(x.detach())
        results: list[_T] = []
        with replaced(self, _read_next=lambda values: results.append(read(values))):
            x.detach()  # which the mode gets without the wrappers
        return results[0]

    def _run_backward(self, outputs: Any, *args: Any, **kwargs: Any) -> object:
        """Run a backward pass in place of torch's function, and note that it has ended."""
        if current_node() is not None or self._is_done or not self._is_in_this_thread():
            return run_engine(outputs, *args, **kwargs)
        result: object = run_engine(outputs, *args, **kwargs)
        if self._passes_to_skip:
            self._passes_to_skip -= 1
        else:
            self._end_pass(outputs)
        self._finite_losses = []
        return result

    def _end_pass(self, outputs: Sequence[object]) -> None:
        """Note a backward pass that has ended; stop recording after the last one."""
        self.seen_backward = True
        if not self._finite_losses:  # no scaler or step was called: the outputs are the losses
            self._note_losses(outputs)
        operations = [operation for operation in self.recording.operations[self.end :] if operation.backward]
        self.passes.append(BackwardPass(self.loss_scale, all(self._finite_losses), operations))
        self.end = len(self.recording.operations)
        if self._passes_left is not None:
            self._passes_left -= 1
            if not self._passes_left:
                self._is_done = True
                self._until_done.close()

    def _enter(self, module: nn.Module, args: Args) -> None:
        """Before a module's forward pass: note that it runs, and count the operands of a linear layer."""
        if not self._is_in_this_thread():
            return
        path = self.modules.path_of(module)
        in_backward = current_node() is not None
        if self.modules.is_outside():
            self._begin_root(in_backward)
        # In a backward pass a checkpoint calls the module again.
        is_recorded = not (in_backward or self.modules.in_evaluation)
        self.modules.enter(path if is_recorded else None)
        if is_recorded and isinstance(module, nn.Linear) and not (self._is_script or self._is_left_out()) and args:
            # Not the attribute: a parametrization computes it, and spectral norm changes its state by that.
            weight = dict(module._parameters).get("weight")
            if is_countable(args[0]) and is_countable(weight):
                with replaced(self, _is_muted=True):
                    self._add_operands(path, args[0], weight)

    def _begin_root(self, in_backward: bool) -> None:
        """At the call of an outermost module: leave out what a script does besides its training steps."""
        if not self._is_script:
            return
        if not (in_backward or self.recording.outputs or self.seen_backward):
            self.recording.operations.clear()  # of the script's initialization and data loading
        self.modules.in_evaluation = not (torch.is_grad_enabled() or transforms_active())

    def _add_operands(self, path: str, layer_input: Tensor, weight: Tensor) -> None:
        """Count what a linear layer multiplies; the weight once, the inputs of all calls."""
        counted = Stats(self._read(layer_input, count))
        earlier = self.operands.get(path)
        if earlier is None:
            self.operands[path] = Multiplied(counted, Stats(self._read(weight, count)), tuple(weight.shape))
        else:
            self.operands[path] = earlier._replace(input=earlier.input + counted)

    def _leave(self, module: nn.Module, _inputs: Args, outputs: object) -> None:
        """After a module's forward pass: count its outputs, and by a hook their gradients."""
        if not self._is_in_this_thread() or self.modules.is_outside():
            return
        path = self.modules.leave()
        is_wrapper = hasattr(module, "_orig_mod")  # of torch.compile: the module inside has the same outputs
        if path is None or self._is_idle() or is_wrapper:
            return
        for leaf in tree_leaves(outputs):
            if is_countable(leaf):
                with replaced(self, _is_muted=True):
                    add(self.recording.outputs, path, Stats(self._read(leaf, count)))
                if leaf.requires_grad:
                    _register_hook(leaf, functools.partial(self._add_gradient, path))  # type: ignore[no-untyped-call]

    def _add_gradient(self, path: str, gradient: Tensor) -> None:
        """Count the gradient of a module's output."""
        if not self._is_idle() and is_countable(gradient):
            with replaced(self, _is_muted=True):
                add(self.recording.gradients, (path, self.loss_scale), Stats(self._read(gradient, count)))
