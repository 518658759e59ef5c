"""`numerics_report`: the values of every operation of a training step, and how they fit float16."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from funcamp.numerics.formats import format_of
from funcamp.numerics.record import Record
from funcamp.numerics.statistics import Stats
from funcamp.report.autograd_graph import read_graph
from funcamp.report.numbers import render
from funcamp.report.numbers.counted import add
from funcamp.report.numbers.operation import BackwardPass, Operation
from funcamp.report.numbers.origin import Origin, find_origin
from funcamp.report.numbers.recommendation import NO_VALUES, Recommendation, recommend, sentences_of
from funcamp.report.numbers.recorder import Recorder
from funcamp.report.numbers.render import power
from funcamp.report.torch_names import name_of, tree_leaves

#: The statistics of a row of `NumericsReport.to_rows`, and the fractions that rounding to its dtype would lose.
_STATISTICS = ("count", "mean", "std", "amax", "nan", "posinf", "neginf", "poszero", "negzero")
_FRACTIONS = ("underflow", "subnormal", "overflow")


class NumericsReport:
    """The results of `numerics_report`. Creating and reading it syncs."""

    operations: list[Operation]
    """Every output of every operation, in the order of execution, without views and copies."""
    records: dict[str, Record]
    """The outputs of every module, and their gradients without loss scaling, by path."""
    loss_scale: float
    """The factor of the loss in the run's last backward pass."""
    passes: list[BackwardPass]
    """The backward passes."""

    def __init__(self, recorder: Recorder) -> None:
        self.operations = recorder.operations
        gradients: dict[str, Stats] = {}
        for (path, scale), counted in recorder.gradients.items():
            add(gradients, path, Stats(counted.row.cpu()).rescale(1 / scale))
        outputs = recorder.outputs
        self.records = {path: Record(outputs[path], gradients.get(path, NO_VALUES)) for path in outputs}
        self.passes = recorder.passes
        self.module = recorder.modules.root
        self.loss_scale = self.passes[-1].loss_scale if self.passes else recorder.loss_scale

    def __repr__(self) -> str:
        return f"NumericsReport({self._operation_counts()})"

    def _operation_counts(self) -> str:
        backward = sum(operation.backward for operation in self.operations)
        return f"{len(self.operations) - backward} forward, {backward} backward operations"

    def first_nonfinite(self) -> Origin | None:
        """Return the first operation that created inf or NaN, else the first with NaN, or None.

        An infinity that the program itself writes (a mask) does not count, nor one that an operation gets as input; a
        NaN made of it does. What a module's forward pass makes does not count if the module returns finite values: it
        belongs to a mask. A value that torch masks at once, as in the backward pass of a norm at 0, is reported.
        """
        return find_origin(self._harmful(self.operations))

    def _harmful(self, operations: list[Operation]) -> list[Operation]:
        """Return operations without those of the forward pass of layers whose outputs are finite."""
        finite = {path for path, record in self.records.items() if path and not record.forward.nonfinite}
        return [operation for operation in operations if operation.backward or operation.path not in finite]

    def cause(self) -> Origin | None:
        """Return what makes the loss, or gradients at every scale, non-finite; None if a scale can help.

        A loss that is non-finite before scaling comes from the forward pass. A gradient does if the operation of the
        backward pass that makes it has the range of float32, which no loss scale exceeds.
        """
        for backward_pass in self.passes:
            if not backward_pass.loss_is_finite:
                forward = [operation for operation in self.operations if not operation.backward]
                return find_origin(self._harmful(forward)) or find_origin(forward, any_infinity=True)
            origin = find_origin(backward_pass.operations, any_infinity=True)
            if origin is not None and not origin.operation.needs_loss_scaling:
                return origin
        return None

    def recommend_scale(self, dtype: torch.dtype = torch.float16, headroom: float = 2.0) -> Recommendation:
        """Return the largest power of two at which no gradient of this run overflows, divided by headroom.

            scale = 2^floor(log2(largest / amax / headroom))

        largest is the dtype's largest power of two, amax the largest magnitude of the backward pass in this dtype,
        rounded up to a power of two. If none of it ran in this dtype, all of it counts but values of shape (), because
        the loss itself is in float32.

        Args:
            dtype: the dtype of the planned backward pass.
            headroom: the factor by which gradients of other batches may be larger.

        Returns:
            The scale. `is_upper_bound` is set if the pass overflowed, so that only its finite values are known: run the
            report at a smaller scale, or in float32.

        Raises:
            ValueError: headroom is not a positive number, the pass has no nonzero gradient, or no loss scale helps,
                because the loss or its gradients at every scale are inf or NaN (`cause`).
            TypeError: dtype has no known limits.

        Example:
            >>> report = numerics_report(lambda w: (w * torch.tensor([1.0, 2.0])).sum(), torch.ones(2).requires_grad_())
            >>> report.recommend_scale().scale
            8192.0
        """
        if not 0 < headroom < math.inf:
            raise ValueError(f"recommend_scale: headroom must be a positive number; got {headroom!r}")
        format_of(dtype)
        cause = self.cause()
        if cause is not None:
            raise ValueError(f"recommend_scale: the gradients must be finite at some loss scale; got {cause}")
        advice = recommend(self.passes, dtype, headroom)
        if advice is None:
            raise ValueError("recommend_scale: the report must have finite, nonzero gradients; got none")
        return advice

    def to_rows(self, dtype: torch.dtype = torch.float16) -> list[dict[str, Any]]:
        """Return one dict of numbers and strings per operation: `pandas.DataFrame(report.to_rows())`.

        Args:
            dtype: the dtype of underflow, subnormal and overflow: the fractions of this run's values that rounding to
                it would lose.

        Raises:
            TypeError: dtype has no known limits.
        """
        format_of(dtype)
        return [_row(index, operation, dtype) for index, operation in enumerate(self.operations)]

    def annotate(self) -> str:
        """Return the module's tree with the standard deviations of each part's output and of its gradient.

        Format: `(-> 0.573, <- 0.000296)`, n/a if there is none; `(-> 0.573, <- 0.000296 (2 inf of 24))` with the number
        of inf or NaN. Gradients are without loss scaling.
        """
        return render.annotate(self.module, self.records)

    def summary(self, dtype: torch.dtype = torch.float16) -> list[str]:
        """Return the main results, one sentence each.

        Raises:
            TypeError: dtype has no known limits.
        """
        origin = self.first_nonfinite()
        sentences = [
            f"Operations: {self._operation_counts()}. Loss scale in this run: {power(self.loss_scale)}.",
            f"Non-finite values: {'none made' if origin is None else origin}.",
        ]
        cause = self.cause()
        if cause is not None:
            sentences.append(render.no_scale_helps(cause.operation, str(cause)))
            return sentences
        try:
            advice = self.recommend_scale(dtype)
        except ValueError:
            sentences.append("Loss scale: no finite, nonzero gradient was seen.")
            return sentences
        return sentences + sentences_of(advice, dtype)


def numerics_report(
    fn: Callable[..., Any], *args: Any, module: nn.Module | None = None, loss_scale: float | None = None, **kwargs: Any
) -> NumericsReport:
    """Run a function once, eagerly, and count the values of every operation.

    To inspect a model, not for a loop: it takes several times as long as the run, and syncs. It writes nothing that the
    function does not write itself: gradients come from `torch.autograd.grad`.

    Args:
        fn: any function: a loss, whose backward pass is then also run; a function that differentiates itself
            (torch.func, `backward()`); a `TrainStep`. Compiled functions run eagerly.
        *args: passed to fn.
        module: the module whose paths name the operations; by default the first one that is called.
        loss_scale: the factor of fn's loss. By default the factor used by a step, `scale` or a GradScaler in fn; 1 if
            there is none.
        **kwargs: passed to fn.

    Returns:
        A `NumericsReport`.

    Raises:
        TypeError: fn is not callable, or module is not a Module.
        ValueError: loss_scale is not a positive number.
        RuntimeError: no operation was recorded.
        Exception: any error of fn.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> report = numerics_report(lambda x: model(x).mean(), torch.ones(2, 4))
        >>> [one.name for one in report.operations if not one.backward]
        ['addmm', 'relu', 'mean']
        >>> report.first_nonfinite() is None
        True

    References:
        The idea: `analyse_module` of unit-scaling, 0.3 (`unit_scaling/utils.py`).
    """
    if not callable(fn):
        raise TypeError(f"numerics_report: fn must be callable; got {fn!r}")
    if module is not None and not isinstance(module, nn.Module):
        raise TypeError(f"numerics_report: module must be a torch.nn.Module; got {module!r}")
    if loss_scale is not None and not 0 < loss_scale < math.inf:
        raise ValueError(f"numerics_report: loss_scale must be a positive number; got {loss_scale}")
    recorder = Recorder(module, loss_scale)
    with recorder.watching():
        result = fn(*args, **kwargs)
        if not recorder.passes:
            _differentiate(result)
    if not recorder.operations:
        raise RuntimeError("numerics_report: fn must run operations on floating-point tensors; none was seen")
    return NumericsReport(recorder)


def _differentiate(result: object) -> None:
    """Run the backward pass of a loss that has a graph; drop the gradients."""
    losses = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if losses and losses[0].dim() == 0 and losses[0].grad_fn is not None:
        leaves = read_graph(losses[:1]).leaves
        if leaves:
            torch.autograd.grad(losses[0], leaves, allow_unused=True)


def _row(index: int, operation: Operation, dtype: torch.dtype) -> render.Row:
    """Return an operation as numbers and strings, for `NumericsReport.to_rows`."""
    stats = operation.stats
    return {
        "index": index,
        "direction": "backward" if operation.backward else "forward",
        "module": operation.path,
        "operation": operation.name,
        "output": operation.output,
        "dtype": name_of(operation.dtype),
        "shape": operation.shape,
        **{name: getattr(stats, name).item() for name in _STATISTICS},
        **{name: getattr(stats, name)(dtype).item() for name in _FRACTIONS},
        "creates": operation.creates,
    }
