"""Record every operation of an eager run: a dispatch mode counts outputs, hooks name modules.

Autograd's current node distinguishes the backward pass from the forward pass; a node's sequence number leads to the
module whose forward pass made it. Every backward pass starts in `torch.autograd._engine_run_backward`; there a finished
one is repeated at other scales.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from funcamp import _tree, _upstream
from funcamp._jit.jit_step import JitStep
from funcamp._scaler import scale as scaling
from funcamp._step.step import TrainStep
from funcamp._upstream.replaced import replaced
from funcamp.float8.linears import layer_of
from funcamp.numerics import taps
from funcamp.numerics.counting import count, has_values
from funcamp.numerics.record import Record, probe
from funcamp.numerics.report.float8_fit import Multiplied
from funcamp.numerics.report.passes import Operation, Pass, Trial, combined, largest, narrow
from funcamp.numerics.statistics import Stats

#: Operations that create tensors, possibly with another's shape, or return their input's values: not results of the
#: computation, as little as those of views and of `resize_`.
_NO_RESULTS = re.compile(
    r"(new_)?(empty|zeros|ones|full|rand|randn|randint|arange|eye|scalar_tensor)(_like|_strided|_permuted)?|"
    r"(uniform|normal)_|clone|_unsafe_view"
)


_current_node = _upstream.find("torch._C._current_autograd_node")
_sequence_number = _upstream.find("torch.autograd._get_sequence_nr")
_engine = _upstream.find("torch.autograd._engine_run_backward")
if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as _Mode
else:
    _Mode = _upstream.find("torch.utils._python_dispatch.TorchDispatchMode")


class Enough(BaseException):
    """Ends a run after the requested passes; a BaseException, so that `except Exception` misses it."""


class Recorder(_Mode):
    """Records operations from the first forward pass to the end of the last requested backward pass.

    Args:
        module: names the operations; None for the first one that is called.
        first: the first backward pass to record.
        passes: number of passes to record; None for all.
        loss_scale: the factor of the loss; None to find it in the run.
    """

    def __init__(
        self,
        module: nn.Module | None,
        first: int = 1,
        passes: int | None = None,
        loss_scale: float | None = None,
    ) -> None:
        for name in (_current_node, _sequence_number, _engine, _Mode):
            _upstream.check(name)
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.records: dict[str, Record] = {}
        self.operands: dict[str, Multiplied] = {}
        """What each linear layer multiplies."""
        self.gradients: dict[str, Stats] = {}  # of modules' outputs, without loss scaling
        self.passes: list[Pass] = []
        self.loss_scale = 1.0 if loss_scale is None else loss_scale
        self.module = module
        self._looks_for_scale = loss_scale is None
        self._finite_losses: list[bool] = []
        self.end = 0
        """Index of the first operation after the last backward pass."""
        self._skip, self._passes = first - 1, passes
        self._paths: dict[nn.Module, str] = {} if module is None else _paths(module)
        self._stack: list[str | None] = []
        self._of_node: dict[int, tuple[str, tuple[str, int] | None]] = {}
        self._evaluating = self._muted = self._repeating = self._done = False
        self.seen_backward = False
        self._reading: Callable[[Tensor], None] | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager: this mode, hooks on modules, and compiled functions run eagerly."""
        wrapped = [
            (JitStep, "__call__", self._cutting(_eagerly)),
            (TrainStep, "__call__", self._cutting(TrainStep.__call__)),
            (torch.autograd, "_engine_run_backward", self._around_backward(_engine)),
            *((taps, name, self._muting(getattr(taps, name))) for name in ("count", "count_both", "taken")),
            *((owner, name, self._noting(getattr(owner, name), place)) for owner, name, place in _scales()),
        ]
        hooks = (
            register_module_forward_pre_hook(self._muting(self._enter)),
            register_module_forward_hook(self._leave, always_call=True),
        )
        with contextlib.suppress(Enough), contextlib.ExitStack() as stack, warnings.catch_warnings():
            for hook in hooks:
                stack.callback(hook.remove)
            for owner, name, value in wrapped:
                stack.enter_context(replaced(owner, **{name: value}))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self)
            warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._done:  # an `except BaseException` of the script caught it
            raise Enough
        if self._reading is not None:
            read, self._reading = self._reading, None
            out = func(*args, **(kwargs or {}))
            read(out)
            return out
        if self._skip or self._muted:
            return func(*args, **(kwargs or {}))
        node = _current_node()
        before = _found((args, kwargs))
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        path, line = self._place_of(node)
        if path is None or func.is_view or torch.Tag.inplace_view in func.tags or _NO_RESULTS.fullmatch(name):
            return out
        for index, leaf in enumerate(_tree.leaves(out)):
            if _counts(leaf):
                row = count(leaf)
                creates = torch.stack([row[4] + row[5] > 0, row[3] > 0]) & ~before.to(row.device)
                about = (node is not None, path, name, index, leaf.dtype, tuple(leaf.shape))
                self.operations.append(Operation(*about, Stats(row), creates, self.loss_scale, line))
        return out

    def _muting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call whose operations are not part of the run."""

        def muted(*args: Any, **kwargs: Any) -> Any:
            with replaced(self, _muted=True):
                return call(*args, **kwargs)

        return muted

    def _cutting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the call of a step, whose optimizer's and scaler's operations are not recorded."""

        def cutting(*args: Any, **kwargs: Any) -> Any:
            out = call(*args, **kwargs)
            del self.operations[self.end :]
            return out

        return cutting

    def _noting(self, call: Callable[..., Any], place: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call that scales a loss: record the scale and whether the loss is finite."""
        scaled = self._muting(call)  # not an operation of the model; it may overflow

        def noted(*args: Any, **kwargs: Any) -> Any:
            out = scaled(*args, **kwargs)
            scale = place(args[0])
            if isinstance(scale, Tensor) and not self._skip:
                losses = _tree.leaves([args[1:], kwargs])
                self._finite_losses += [self._look(leaf, _is_finite) for leaf in losses if _counts(leaf)]
                if self._looks_for_scale:
                    self.loss_scale = self._look(scale, lambda plain: plain.max().item())  # vmap has a batch of them
            return out

        return noted

    def _look(self, x: Tensor, read: Callable[[Tensor], Any]) -> Any:
        """Return `read` of a tensor's values, below the wrappers of torch.func."""
        found: list[Any] = []
        self._through(x.detach, lambda plain: found.append(read(plain)))
        return found[0]

    def _through(self, operation: Callable[[], Tensor], read: Callable[[Tensor], None]) -> Tensor:
        """Return an operation's result, and pass it to `read` without the wrappers of torch.func."""
        with replaced(self, _reading=read):
            return operation()

    def _around_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the call that starts every backward pass: count the pass, and repeat it if that helps."""

        def run_backward(
            outputs: Any, seeds: Any, keep: bool, create: bool, inputs: Any, *rest: Any, **how: Any
        ) -> Any:
            if self._done:
                raise Enough
            nested = self._repeating or _current_node() is not None
            if nested or self._skip:
                out = run(outputs, seeds, keep, create, inputs, *rest, **how)
                if not nested:
                    self._skip, self._finite_losses = self._skip - 1, []
                return out
            obstacle, before = _obstacle(), dict(self.gradients)
            out = run(outputs, seeds, keep or not obstacle, create, inputs, *rest, **how)
            self.seen_backward = True

            def again(scale: float) -> Sequence[Tensor | None]:
                with torch.no_grad():
                    scaled = tuple(seed if seed is None else seed * scale for seed in seeds)
                return run(outputs, scaled, True, False, tuple(inputs or leaves_behind(outputs)), True, False)  # type: ignore[no-any-return]

            finite = self._finite_losses or [self._look(leaf, _is_finite) for leaf in outputs if _counts(leaf)]
            formats = [seed.dtype for seed in seeds if isinstance(seed, Tensor)]
            self.passes.append(self._muting(self._look_again)(again, all(finite), formats, obstacle, before))
            self._finite_losses, self.end = [], len(self.operations)
            if self._passes is not None:
                self._passes -= 1
                if not self._passes:
                    self._done = True
                    raise Enough
            return out

        return run_backward

    def _look_again(
        self,
        again: Callable[[float], Sequence[Tensor | None]],
        loss_is_finite: bool,
        formats: list[torch.dtype],
        obstacle: str,
        before: dict[str, Stats],
    ) -> Pass:
        """Return the findings about the last pass, repeated if it overflowed or may at a larger scale."""
        scale = self.loss_scale
        operations = [one for one in self.operations[self.end :] if one.backward]
        clean = not any(one.stats.nonfinite > 0 for one in operations)
        if obstacle or not loss_is_finite or (clean and not narrow(operations)):
            return Pass(scale, loss_is_finite, clean, None, operations, obstacle)

        def trial(place: int) -> Trial:
            if clean and place == 0:
                return Trial(operations, True, {})
            factor = 2.0**place
            apart: dict[str, Any] = {"operations": [], "records": {}, "gradients": {}}  # not part of the run
            with replaced(self, loss_scale=scale * factor, _muted=False, _repeating=True, **apart):
                grads = again(factor)
                finite = all(self._look(grad, _is_finite) for grad in grads if isinstance(grad, Tensor))
                return Trial(self.operations, finite, self.gradients)

        # Seeds, and the scale times them, must be normal numbers.
        lowest = max([-120, *(math.frexp(torch.finfo(dtype).tiny)[1] for dtype in formats)])
        highest = min([127, *(math.frexp(torch.finfo(dtype).max)[1] for dtype in formats)]) - math.frexp(scale)[1]
        try:
            place, best = largest(trial, lowest, max(highest, 0))
        except Exception as error:  # of a user's hook, or of a function that allows only one backward pass
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return Pass(scale, True, clean, None, operations, lines[0])
        if place is None:
            return Pass(scale, True, False, None, best.operations)
        evidence = best.operations
        if place < 0:
            evidence, self.gradients = combined(operations, evidence), before
            for path, gradient in best.gradients.items():
                _add(self.gradients, path, gradient)
        return Pass(scale, True, place >= 0, scale * 2.0**place, evidence)

    def _place_of(self, node: Any) -> tuple[str | None, tuple[str, int] | None]:
        """Return the module and line of the current operation; no module if it is in no differentiated pass."""
        if node is None:
            path, line = self._stack[-1] if self._stack else (None if self._evaluating else ""), _line()
        else:
            path, line = self._of_node.get(node._sequence_nr(), ("", None))
            if self._stack and self._stack[-1] is None:
                path = None
        if path is not None:
            self._of_node.setdefault(_sequence_number() - 1, (path, line))
        return path, line

    def _enter(self, module: nn.Module, args: Any) -> None:
        module = layer_of(module)
        if module not in self._paths:  # another root
            self._name(getattr(module, "_orig_mod", module))
        if not self._stack:
            in_backward = _current_node() is not None
            if self._passes is not None and not in_backward and not self.records:
                self.operations.clear()  # of the script's initialization and data loading
            differentiated = torch.is_grad_enabled() or _upstream.transforms_active()
            self._evaluating = self._passes is not None and not differentiated
        # None: called again by a checkpoint, or in an evaluation
        again = _current_node() is not None or self._evaluating
        self._stack.append(None if again else self._paths[getattr(module, "_orig_mod", module)])
        if isinstance(module, nn.Linear) and not again and not self._skip and args:
            inputs, weight = (Stats(self._look(value, count)) for value in (args[0], module.weight))
            found = Multiplied(inputs, weight, tuple(module.weight.shape))
            path = self._stack[-1] or ""
            known = self.operands.get(path)
            self.operands[path] = found if known is None else known._replace(input=known.input + found.input)

    def _name(self, root: nn.Module) -> None:
        """Name the parts of another root after its class; the first root's parts have their plain paths."""
        prefix, number = "", 1
        if self.module is None:
            self.module = root
        else:
            prefix = f"<{type(root).__name__}>"
            while prefix in self._paths.values():
                number += 1
                prefix = f"<{type(root).__name__} {number}>"
        for part, path in _paths(root).items():
            self._paths.setdefault(part, ".".join(filter(None, (prefix, path))))

    def _leave(self, module: nn.Module, _: Any, outputs: Any) -> Any:
        path = self._stack.pop()
        if not self._stack:
            self._evaluating = False
        if path is None or self._skip or outputs is None or hasattr(module, "_orig_mod"):
            return None
        leaves, spec = _tree.flatten(outputs)
        marked = [_Mark.apply(leaf, self, path) if _counts(leaf) else leaf for leaf in leaves]  # type: ignore[no-untyped-call]
        return _tree.unflatten(marked, spec)

    def mark(self, x: Tensor, path: str, *, backward: bool) -> Tensor:
        """Copy and count a module's output or its gradient, also under vmap and torch.func."""

        def note(plain: Tensor) -> None:
            if self._skip or self._muted:
                return
            self._place_of(_current_node())
            counted, empty = Stats(count(plain)), probe(plain.device).forward
            if backward:
                _add(self.gradients, path, counted.rescale(1 / self.loss_scale))
            _add(self.records, path, Record(empty, counted) if backward else Record(counted, empty))

        return self._through(x.clone, note)


def _scales() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield calls that scale a loss, and how to get the scale from their first argument afterwards."""
    yield scaling, "scaled", lambda state: state.scale
    kinds: list[type] = [torch.amp.GradScaler]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if "scale" in vars(kind):
            yield kind, "scale", lambda scaler: scaler._scale


def _obstacle() -> str:
    """Return why a backward pass must not be repeated; empty if it may."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "other ranks may not repeat it too"
    return ""


def leaves_behind(outputs: Sequence[Any]) -> list[Tensor]:
    """Return the leaves that a backward pass from these outputs reaches."""
    found, seen = [], set()
    stack = [getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        stack.extend(following for following, _ in node.next_functions)
    return found


def _line() -> tuple[str, int] | None:
    """Return the innermost current line outside torch and this library."""
    frame = sys._getframe(1) if hasattr(sys, "_getframe") else None
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "funcamp"):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


_Sum = TypeVar("_Sum", Record, Stats)


def _add(sums: dict[str, _Sum], path: str, one: _Sum) -> None:
    sums[path] = sums[path] + one if path in sums else one


def _is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x.coalesce().values() if x.layout == torch.sparse_coo else x).all())


class _Mark(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, recorder: Recorder, path: str) -> Tensor:
        return recorder.mark(x, path, backward=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        _, ctx.recorder, ctx.path = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.recorder.mark(grad, ctx.path, backward=True), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:  # noqa: ARG004
        return tangent.clone()


def _paths(root: nn.Module) -> dict[nn.Module, str]:
    return {part: f".{path}".replace("._orig_mod", "").lstrip(".") for path, part in root.named_modules()}


def _counts(leaf: Any) -> bool:
    # A zero tangent has no storage.
    return has_values(leaf) and leaf.device.type != "meta" and not leaf._is_zerotensor()


def _found(given: Any) -> Tensor:
    """Return whether an operation's inputs contain inf, or NaN; bool, shape (2,)."""
    found = torch.zeros(2, dtype=torch.bool)
    for leaf in _tree.leaves(given):
        if _counts(leaf):
            value = leaf.float() if leaf.dtype.itemsize == 1 else leaf  # torch has no isinf of float8
            flags = torch.stack([torch.isinf(value).any(), torch.isnan(value).any()])
            found = found.to(flags.device) | flags
        elif isinstance(leaf, float):
            found = found | torch.tensor([math.isinf(leaf), math.isnan(leaf)], device=found.device)
    return found


def _eagerly(step: JitStep, state: Any, batch: Any) -> Any:
    """Return the result of a `jit` step's call, computed eagerly."""
    if step._options.unroll is None:
        return step._step(state, batch)
    leaves, spec = _tree.flatten(batch)
    rows = []
    for index in range(step._options.unroll):
        piece = [leaf[index] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        state, metrics = step._step(state, _tree.unflatten(piece, spec))
        rows.append(metrics)
    return state, _tree.stacked(rows)
