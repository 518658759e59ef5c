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
from funcamp.report.numbers.counted import add, computes, is_countable, nonfinite_among
from funcamp.report.numbers.modules import Modules
from funcamp.report.numbers.operation import BackwardPass, Operation
from funcamp.report.numbers.steps import scaling_calls, step_calls
from funcamp.report.tensors import all_finite
from funcamp.report.torch_names import (
    Args,
    DispatchMode,
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


class Recorder(DispatchMode):
    """A dispatch mode that records each operation of a run.

    Args:
        module: names the operations; None for the first one that is called.
        loss_scale: the factor of the loss; None to find it in the run.
    """

    def __init__(self, module: nn.Module | None = None, loss_scale: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.outputs: dict[str, Stats] = {}
        """The outputs of modules, by path."""
        self.gradients: dict[tuple[str, float], Stats] = {}
        """The gradients of modules' outputs, by path and loss scale."""
        self.passes: list[BackwardPass] = []
        self.loss_scale = 1.0 if loss_scale is None else loss_scale
        self.modules = Modules(module)
        self.end = 0
        """Index of the first operation after the last backward pass."""

        self._is_muted = False
        """Whether what runs now is not part of the run: taps, the scaling of a loss, this recorder."""
        self._looks_for_scale = loss_scale is None
        self._finite_losses: list[bool] = []
        """Whether each loss that was scaled since the last backward pass is finite."""
        self._read_next: Callable[[Tensor], None] | None = None
        """What to do with the result of the next operation, which is not recorded."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager: operations are recorded; hooks on modules, and replaced functions."""
        with contextlib.ExitStack() as stack, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
            for owner, name, function in list(self._replacements()):
                stack.enter_context(replaced(owner, **{name: function}))
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self)
            yield

    def _replacements(self) -> Iterator[tuple[object, str, Callable[..., Any]]]:
        """Yield the functions to replace while this recorder watches: owner, name, and what replaces it."""
        yield torch.autograd, "_engine_run_backward", self._run_backward
        for owner, name, call_eagerly in step_calls():
            yield owner, name, self._wrap_step(call_eagerly)
        for owner, name, scale_of in scaling_calls():
            yield owner, name, self._wrap_scaling(getattr(owner, name), scale_of)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        """Run an operation and record its outputs."""
        keywords = kwargs or {}
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
                gets_infinity=bool(before and before[0]),
                line=location.line,
            )
            self.operations.append(operation)
        return result

    def _is_idle(self) -> bool:
        """Return whether what runs now is not recorded: this recorder's own reads, or a trace."""
        return self._is_muted or is_tracing()

    def _is_in_this_thread(self) -> bool:
        """Return whether the current thread has the mode: a thread that the run starts has none."""
        return any(mode is self for mode in dispatch_modes())

    def _wrap_step(self, call: Callable[_P, _T]) -> Callable[_P, _T]:
        """Wrap the call of a step, whose optimizer's and scaler's operations are not recorded."""

        def call_without_optimizer(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            result = call(*args, **kwargs)
            del self.operations[self.end :]
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
            if isinstance(scale, Tensor) and not is_tracing():
                self._note_losses(tree_leaves([args[1:], kwargs]))
                if self._looks_for_scale:
                    self.loss_scale = self._read(scale, lambda values: values.max().item())  # vmap has a batch of them
            return result

        return scale_loss

    def _note_losses(self, losses: Sequence[object]) -> None:
        """Remember whether each loss is finite, until its backward pass."""
        self._finite_losses += [self._read(loss, all_finite) for loss in losses if is_countable(loss)]

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
        result: object = run_engine(outputs, *args, **kwargs)
        if current_node() is None and self._is_in_this_thread():
            self._end_pass(outputs)
        return result

    def _end_pass(self, outputs: Sequence[object]) -> None:
        """Note a backward pass that has ended."""
        if not self._finite_losses:  # no scaler or step was called: the outputs are the losses
            self._note_losses(outputs)
        operations = [operation for operation in self.operations[self.end :] if operation.backward]
        self.passes.append(BackwardPass(self.loss_scale, all(self._finite_losses), operations))
        self.end = len(self.operations)
        self._finite_losses = []

    def _enter(self, module: nn.Module, _args: Args) -> None:
        """Before a module's forward pass: note that it runs."""
        if not self._is_in_this_thread():
            return
        path = self.modules.path_of(module)
        is_checkpoint = current_node() is not None  # which calls the module again
        self.modules.enter(None if is_checkpoint else path)

    def _leave(self, module: nn.Module, _inputs: Args, outputs: object) -> None:
        """After a module's forward pass: count its outputs, and by a hook their gradients."""
        if not self._is_in_this_thread():
            return
        path = self.modules.leave()
        is_wrapper = hasattr(module, "_orig_mod")  # of torch.compile: the module inside has the same outputs
        if path is None or self._is_idle() or is_wrapper:
            return
        for leaf in tree_leaves(outputs):
            if is_countable(leaf):
                with replaced(self, _is_muted=True):
                    add(self.outputs, path, Stats(self._read(leaf, count)))
                if leaf.requires_grad:
                    _register_hook(leaf, functools.partial(self._add_gradient, path))  # type: ignore[no-untyped-call]

    def _add_gradient(self, path: str, gradient: Tensor) -> None:
        """Count the gradient of a module's output."""
        if not self._is_idle() and is_countable(gradient):
            with replaced(self, _is_muted=True):
                add(self.gradients, (path, self.loss_scale), Stats(self._read(gradient, count)))
