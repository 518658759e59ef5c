"""What every operation of an eager run holds: a dispatch mode that counts outputs, and hooks that name modules.

The backward pass is told from the forward by autograd's current node; a node's sequence number leads back to the module
whose forward pass made it (`torch._C._current_autograd_node`, `torch.autograd._get_sequence_nr`: no public names, torch
2.11 to 2.13).
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from funcamp import _tap, _tree
from funcamp._counts import count, has_values
from funcamp._grad_scaler import GradScaler
from funcamp._jit_step import JitStep
from funcamp._module import Holder
from funcamp._records import Record, probe
from funcamp._stats import Stats
from funcamp._step import TrainStep

#: Make tensors of nothing, or of another's shape: no numbers of the computation.
_FACTORIES = frozenset(
    f"{kind}{like}" for kind in ("empty", "zeros", "ones", "full", "rand", "randn", "randint") for like in ("", "_like")
) | {
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty_strided",
    "empty_strided",
    "scalar_tensor",
    "arange",
    "eye",
    "uniform_",
    "normal_",
}
#: Give what they take.
_COPIES = frozenset({"clone", "detach", "lift_fresh", "alias", "contiguous", "_unsafe_view", "_reshape_alias"}) | {
    f"{name}_" for name in ("squeeze", "unsqueeze", "t", "transpose", "as_strided", "detach")
}


class Operation(NamedTuple):
    """One output of one operation that `numerics_report` saw."""

    backward: bool
    path: str
    """The module whose forward pass called it, or whose backward pass it is part of; empty outside of modules."""
    name: str
    """Its name among torch's operators: mm, add, native_layer_norm_backward."""
    output: int
    """Which of its outputs."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stats: Stats
    creates: Tensor
    """Bool, shape (2,): whether it holds inf, or NaN, that no input did."""


class Enough(BaseException):
    """Ends a run once the passes asked for are recorded; no `except Exception` of the run's own stops it."""


class Recorder(TorchDispatchMode):
    """Records operations while it is active, from the first forward pass on to the end of so many backward passes."""

    def __init__(self, module: nn.Module | None, first: int = 1, passes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.records: dict[str, Record] = {}
        self.loss_scale: Tensor | None = None
        self.module = module
        self._skip, self._passes = first - 1, passes
        self._paths: dict[nn.Module, str] = {} if module is None else _paths(module)
        self._stack: list[str | None] = []
        self._of_node: dict[int, str] = {}
        self._in_backward = self._evaluating = self._muted = self._done = False
        self.seen_backward = False
        self._mark: tuple[str, bool] | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Everything that a run needs: this mode, hooks around modules, compiled functions run eagerly."""
        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with contextlib.ExitStack() as patches, warnings.catch_warnings():
                patches.enter_context(torch.compiler.set_stance("force_eager"))
                patches.enter_context(mock.patch.object(JitStep, "__call__", _eagerly))
                for name in ("count", "count_both", "taken"):
                    patches.enter_context(mock.patch.object(_tap, name, self._muting(getattr(_tap, name))))
                for kind, name, place in _SCALES:
                    noting = self._noting(getattr(kind, name), place)
                    patches.enter_context(mock.patch.object(kind, name, noting))
                patches.enter_context(self)
                warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
                yield
        except Enough:
            pass
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = torch._C._current_autograd_node()
        self._turn(node is not None)
        if self._skip or self._muted:
            return func(*args, **(kwargs or {}))
        before = _found((args, kwargs))
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if self._mark is not None:
            (place, backward), self._mark = self._mark, None
            counted, empty = Stats(count(out)), probe(out.device).forward
            record = Record(empty, counted) if backward else Record(counted, empty)
            self.records[place] = self.records[place] + record if place in self.records else record
            return out
        path = self._path_of(node)
        if path is None or name in _FACTORIES or name in _COPIES or getattr(func, "is_view", False):
            return out
        for index, leaf in enumerate(_tree.leaves(out)):
            if _counts(leaf):
                row = count(leaf)
                creates = torch.stack([row[4] + row[5] > 0, row[3] > 0]) & ~before.to(row.device)
                self.operations.append(
                    Operation(node is not None, path, name, index, leaf.dtype, tuple(leaf.shape), Stats(row), creates)
                )
        return out

    def _muting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call of a tap's, whose operations are none of the run's."""

        def muted(*args: Any) -> Any:
            before, self._muted = self._muted, True
            try:
                return call(*args)
            finally:
                self._muted = before

        return muted

    def _noting(self, call: Callable[..., Any], place: Callable[..., Any]) -> Callable[..., Any]:
        """A call that scales a loss, and what it scales by noted."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            out = call(*args, **kwargs)
            scale = place(*args)
            if isinstance(scale, Tensor) and not self._skip:
                self.loss_scale = scale.detach().clone()
            return out

        return noted

    def _turn(self, in_backward: bool) -> None:
        """Count backward passes by their ends."""
        if self._done:  # caught by an `except BaseException` of the script's
            raise Enough
        ended = self._in_backward and not in_backward
        self._in_backward = in_backward
        self.seen_backward |= in_backward
        if not ended:
            return
        if self._skip:
            self._skip -= 1
        elif self._passes is not None:
            self._passes -= 1
            if not self._passes:
                self._done = True
                raise Enough

    def _path_of(self, node: Any) -> str | None:
        """The module of the operation that runs now; None where it is not part of a pass that is differentiated."""
        if node is None:
            path = self._stack[-1] if self._stack else (None if self._evaluating else "")
        else:
            path = None if self._stack and self._stack[-1] is None else self._of_node.get(node._sequence_nr(), "")
        if path is not None:
            self._of_node.setdefault(torch.autograd._get_sequence_nr() - 1, path)  # type: ignore[attr-defined]
        return path

    def _enter(self, module: nn.Module, _: Any) -> None:
        if isinstance(module, Holder):  # only calls the backward pass
            self._stack.append("")
            return
        if module not in self._paths:  # a root that was not told
            self._add(getattr(module, "_orig_mod", module))
        if not self._stack:
            if self._passes is not None and not self._in_backward and not self.records:
                self.operations.clear()  # what the script did before: initialization, data
            differentiated = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
            self._evaluating = self._passes is not None and not differentiated
        # None: called again by a checkpoint, or in an evaluation
        again = torch._C._current_autograd_node() is not None or self._evaluating
        self._stack.append(None if again else self._paths[getattr(module, "_orig_mod", module)])

    def _add(self, root: nn.Module) -> None:
        """Name the parts of another root after its class; those of the first one by their own paths."""
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
        if path is None or self._skip or outputs is None or isinstance(module, (torch._dynamo.OptimizedModule, Holder)):
            return None
        leaves, spec = _tree.flatten(outputs)
        marked = [_Mark.apply(leaf, self, path) if _counts(leaf) else leaf for leaf in leaves]  # type: ignore[no-untyped-call]
        return _tree.unflatten(marked, spec)

    def mark(self, x: Tensor, path: str, *, backward: bool) -> Tensor:
        """Copy a module's output, or the gradient of it, and count it, under vmap and torch.func too."""
        self._mark = (path, backward)
        try:
            return x.clone()
        finally:
            self._mark = None


#: Calls that scale a loss, and where in their arguments the scale is after them.
_SCALES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (TrainStep, "_gradients", lambda _, state, *__: state.scaler.scale),
    (torch.amp.GradScaler, "scale", lambda scaler, *_: scaler._scale),
    (GradScaler, "scale", lambda scaler, *_: scaler._scale),
)


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
    # A tangent that is zero has no storage.
    return has_values(leaf) and leaf.device.type != "meta" and not leaf._is_zerotensor()


def _found(given: Any) -> Tensor:
    """Bool, shape (2,): whether the inputs of an operation hold inf, or NaN."""
    found = torch.zeros(2, dtype=torch.bool)
    for leaf in _tree.leaves(given):
        if _counts(leaf):
            flags = torch.stack([torch.isinf(leaf).any(), torch.isnan(leaf).any()])
            found = found.to(flags.device) | flags
        elif isinstance(leaf, float):
            found = found | torch.tensor([math.isinf(leaf), math.isnan(leaf)], device=found.device)
    return found


def _eagerly(step: JitStep, state: Any, batch: Any) -> Any:
    """What a call of a `jit` step gives, without a program."""
    if step._options.unroll is None:
        return step._step(state, batch)
    leaves, spec = _tree.flatten(batch)
    rows = []
    for index in range(step._options.unroll):
        piece = [leaf[index] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        state, metrics = step._step(state, _tree.unflatten(piece, spec))
        rows.append(metrics)
    return state, _tree.stacked(rows)
