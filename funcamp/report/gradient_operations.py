"""Operations on gradients and on scaled losses: what a loop writes into gradients, clips, sums, reads and computes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from funcamp.report import events
from funcamp.report.derived import (
    COMPARISONS,
    DECISIONS,
    FOLLOWED,
    HOST_READS,
    PRODUCTS,
    Derived,
    depends_on_scale,
    divides_by_scale,
    joined,
    keeps_scale,
)
from funcamp.report.events import Event, Key
from funcamp.report.lines import calling_line
from funcamp.report.tensors import tensor_arguments
from funcamp.report.torch_names import Args
from funcamp.report.tracked import Tracked

#: Statistics. A check for inf and NaN is none: its `abs` is only compared for equality.
_READS = {"norm", "linalg_vector_norm", "sum", "mean", "max", "amax", "min", "std", "var", "pow"}
_READS |= {"_local_scalar_dense", "square", "dot", "histc"}
_COPIES = {"copy_", "_foreach_copy_"}
#: Writes that are no unscaling if the factor is a tensor of the gradient's shape.
_PRODUCTS = {"mul_", "div_"}
_WRITES = {*_PRODUCTS, "_foreach_mul_", "_foreach_div_", *_COPIES, "_amp_foreach_non_finite_check_and_unscale_"}
_CLIPS = {"clamp", "clamp_min", "clamp_max", "clamp_", "clamp_min_", "clamp_max_"}
_CLIPS |= {"_foreach_clamp_min_", "_foreach_clamp_max_"}
_ZEROS = {"zero_", "_foreach_zero_"}
_CHANGES = _WRITES | _CLIPS | _ZEROS

#: Tests for inf and NaN. `isfinite` compares a tensor with itself, and its sizes with inf.
_TESTS = {"isnan", "isinf", "eq", "ne"}
_COMBINATIONS = {"bitwise_not", "logical_not", "bitwise_and", "bitwise_or", "logical_and", "logical_or", "mul"}
#: By the operation: the positions of the mask and of the gradient.
_REPLACING = {"masked_fill": (1, 0), "masked_fill_": (1, 0), "index_put_": (1, 0), "where": (0, 1)}
_NAN_TO_NUM = {"nan_to_num", "nan_to_num_"}

#: The operations that are looked at; the names in `FOLLOWED` also as their variants in place and for lists.
LOOKED_AT = {*_CHANGES, *_TESTS, *_COMBINATIONS, *_REPLACING, *_NAN_TO_NUM, *FOLLOWED}
LOOKED_AT |= {f"{name}_" for name in FOLLOWED} | {f"_foreach_{name}" for name in FOLLOWED}


class GradientOperations:
    """Reports operations on gradients, on what is computed from them, and on scaled losses.

    Args:
        emit: gets each event.
        tracked: which tensors are gradients or scaled losses.
    """

    def __init__(self, emit: Callable[[Event], None], tracked: Tracked) -> None:
        self._emit = emit
        self._tracked = tracked
        self._overflow_masks = WeakTensorKeyDictionary()
        """Masks of the inf and NaN in gradients, or of all else."""
        self._divided_lines = WeakTensorKeyDictionary()
        """Where each tensor was divided by a scale that is computed from gradients."""
        self._read_ids = itertools.count()

    def check(self, name: str, args: Args, result: object) -> None:
        """Report an operation of `LOOKED_AT` that has run."""
        if name == "_local_scalar_dense":
            self._report_host_read(args[0])
        if name.endswith("_"):
            for written in tensor_arguments(args[:1]):
                self._divided_lines.pop(written, None)  # type: ignore[no-untyped-call]
        if self._makes_overflow_mask(name, args):
            self._overflow_masks.update(dict.fromkeys(tensor_arguments((result,)), True))
        if self._replaces_overflow(name, args):
            self._report_replacement(args, tensor_arguments((result,)))
            return
        is_change = name in _CHANGES and self._report_change(name, args)
        if not is_change:
            self._follow(name.removesuffix("_").removeprefix("_foreach_"), args, result)

    def _report_host_read(self, tensor: object) -> None:
        """Report a number that is read on the host."""
        scaling = self._tracked.scaling_of(tensor)
        self._emit(events.HostRead(calling_line(), None if scaling is None else scaling.scaler))

    def _makes_overflow_mask(self, name: str, args: Args) -> bool:
        """Return whether the result of an operation marks inf and NaN in gradients, or all else."""
        if name in ("eq", "ne"):
            is_with_inf = isinstance(args[1], float) and abs(args[1]) == math.inf
            return (is_with_inf or args[1] is args[0]) and self._is_gradient(args[0])
        if name in _TESTS:
            return self._is_gradient(args[0])
        return name in _COMBINATIONS and all(isinstance(one, Tensor) and one in self._overflow_masks for one in args)

    def _replaces_overflow(self, name: str, args: Args) -> bool:
        """Return whether an operation replaces inf and NaN of gradients by numbers."""
        if name in _NAN_TO_NUM:
            return self._is_gradient(args[0])
        if name not in _REPLACING or len(args) < 3:
            return False
        mask, gradient = [args[position] for position in _REPLACING[name]]
        gradients = args[1:] if name == "where" else [gradient]
        is_mask = any(one in self._overflow_masks for one in tensor_arguments((mask,)))
        return is_mask and any(map(self._is_gradient, gradients))

    def _is_gradient(self, argument: object) -> bool:
        derived = self._tracked.derived(argument) if isinstance(argument, Tensor) else None
        return derived is not None and not derived.read_ids

    def _report_replacement(self, args: Args, results: list[Tensor]) -> None:
        """Report that inf and NaN in gradients are replaced, now or when the loop makes a result the gradient."""
        keys = self._tracked.gradients_among(results)
        if keys:
            self._emit(events.NonfiniteReplaced(calling_line(), keys))
            return
        known = [derived for derived in map(self._tracked.derived, args) if derived is not None]
        for tensor in results:
            self._tracked.remember_derived(tensor, joined(known)._replace(finite_line=calling_line()))

    def _report_change(self, name: str, args: Args) -> bool:
        """Report an operation that writes, clips or clears gradients, and return whether it does."""
        tensors = tensor_arguments(args)
        if name.endswith("_") and not name.startswith("_"):  # `_foreach_mul_` writes a list of tensors
            tensors = tensors[:1]
        keys = self._tracked.gradients_among(tensors)
        if not keys:
            return False
        if name in _CLIPS:
            self._emit(events.Clipped(calling_line(), keys))
        elif name in _ZEROS:
            self._emit(events.Cleared(calling_line(), keys, None))
        elif name in _COPIES:
            copied = tensor_arguments(args[1:2])
            self.report_new_gradients(keys, copied, self._tracked.derived(copied))
        else:
            self._report_product(name, args, keys)
        return True

    def _report_product(self, name: str, args: Args, keys: tuple[Key, ...]) -> None:
        """Report that gradients were multiplied or divided in place."""
        factor = self._tracked.derived(args[1]) if len(args) > 1 else None
        # A mask has a number for each element, which neither scales nor averages.
        is_mask = name in _PRODUCTS and isinstance(args[1], Tensor) and args[1].numel() > 1
        is_divided = factor is None and divides_by_scale(name, args[1], self._tracked.scales)
        divided_line = calling_line() if is_divided else None
        self._emit(events.GradientWritten(calling_line(), keys, is_mask and factor is None, divided_line))
        if not is_mask:
            self._tracked.forget_gradients(tensor_arguments(args[:1]))

    def report_new_gradients(self, keys: tuple[Key, ...], gradients: list[Tensor], derived: Derived | None) -> None:
        """Report that gradients were replaced.

        Args:
            keys: the parameters.
            gradients: the new gradients.
            derived: what they are; None if they are not computed from gradients.
        """
        divided_line = next((self._divided_lines[one] for one in gradients if one in self._divided_lines), None)
        if derived is not None and derived.finite_line is not None:
            self._emit(events.NonfiniteReplaced(derived.finite_line, keys))
        self._emit(events.GradientWritten(calling_line(), keys, derived is not None, divided_line))

    def _follow(self, name: str, args: Args, result: object) -> None:
        """Report a norm or another statistic of gradients, and its use; follow what is computed from it."""
        known = [self._tracked.derived(argument) for argument in args]
        parts = [part for part in known if part is not None]
        if not parts:
            return
        derived = joined(parts)
        results = tensor_arguments((result,))
        if name in _READS and not derived.read_ids:
            derived = self._as_read(derived)
        if name in DECISIONS and depends_on_scale(args, known, self._tracked.scales):
            self._emit(events.Compared(calling_line(), derived.parameters))
        elif name in HOST_READS:
            self._emit(events.ReadsUsed(calling_line(), derived.read_ids))
        elif name not in COMPARISONS and keeps_scale(name, args, known, self._tracked.scales):
            # Gradients without their mean are gradients again.
            if name not in _READS and not all(part.read_ids for part in parts):
                derived = derived._replace(read_ids=())
            for tensor in results:
                if not (tensor.is_leaf and tensor.requires_grad):  # a step by hand, which changes parameters
                    self._tracked.remember_derived(tensor, derived)
            return
        self._tracked.forget_derived(results)
        if name in PRODUCTS and divides_by_scale(name, args[1], self._tracked.scales):
            self._divided_lines.update(dict.fromkeys(results, calling_line()))

    def report_norm(self, norm: object, parameters: tuple[Key, ...]) -> None:
        """Report the norm of gradients that a function of torch has computed."""
        derived = self._as_read(Derived(parameters))
        for tensor in tensor_arguments((norm,)):
            self._tracked.remember_derived(tensor, derived)

    def _as_read(self, derived: Derived) -> Derived:
        """Report that gradients are read, and return what is computed from them, with the read."""
        read_id = next(self._read_ids)
        self._emit(events.GradientRead(calling_line(), derived.parameters, read_id))
        return derived._replace(read_ids=(read_id,))
