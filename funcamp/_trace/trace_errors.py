"""What torch raises in a trace, as errors that name the user's line and what to write instead."""

from __future__ import annotations

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from funcamp import _upstream
from funcamp._trace.tracing import HostError
from funcamp._trace.user_line import in_nested_tensor, line_in_traceback

#: torch's error for an operation whose result has a shape that follows from values, if there must be none.
_SHAPE_FROM_VALUES = tuple(
    filter(_upstream.usable, [_upstream.find("torch._subclasses.fake_tensor.DynamicOutputShapeException")])
)
#: torch's errors for a number that depends on the values of a fake tensor, and for a branch on a size that does.
_NUMBER_FROM_VALUES = (
    *filter(_upstream.usable, [_upstream.find("torch._subclasses.fake_tensor.DataDependentOutputException")]),
    GuardOnDataDependentSymNode,
)
#: Texts of torch's errors when the values or the memory of a fake tensor are read.
_READ_TEXTS = (
    "is not supported for tensor subclasses",
    "data is not allocated",
    "Cannot access data pointer",
    "get value out of a tracing tensor",
    "Cannot access storage of",
    "unsupported format string passed to FakeTensor",
)
_READS = "not read a tensor's value on the host (no .item(), no branch on a tensor or a size that follows from values)"
_FIXED_SHAPE_INSTEAD = "call the step without jit, or take torch.where or a mask of fixed shape instead"
_METRICS_INSTEAD = f"{_FIXED_SHAPE_INSTEAD}, and return in the metrics what you want to read"
#: What to write instead of functions of torch whose result has a size that follows from values.
_FUNCTIONS_INSTEAD = {
    "one_hot": "pass num_classes to one_hot, which reads the largest index otherwise",
    "bincount": (
        "bincount's result has a size that follows from values: count in n bins with "
        "torch.zeros(n, dtype=x.dtype, device=x.device).index_add(0, x, torch.ones_like(x))"
    ),
}


def read_error(line: str) -> HostError:
    """Return the error for a line that reads the value of a tensor."""
    return HostError(f"{_READS}; {line} does: {_instead(line) or _METRICS_INSTEAD}")


def _instead(line: str) -> str:
    """Return what to write instead of a function that the line names; "" if none is."""
    return next((fix for name, fix in _FUNCTIONS_INSTEAD.items() if f"{name}(" in line), "")


def explain(error: Exception, *, in_cuda_graph: bool) -> HostError | None:
    """Return an error that explains what a trace raised; None if its own text explains it.

    Args:
        error: what the trace raised.
        in_cuda_graph: whether the trace becomes a CUDA graph.
    """
    line = line_in_traceback(error)
    if isinstance(error, _SHAPE_FROM_VALUES):
        where = "in a CUDA graph" if in_cuda_graph else f"by {error.func}"
        instead = _instead(line) or _FIXED_SHAPE_INSTEAD
        if in_cuda_graph:
            instead += ", or pass capture=False"
        return HostError(f"not take a shape from values {where}; {line} does: {instead}")
    if in_nested_tensor(error):
        return HostError(
            f"not make nested tensors, whose lengths are values; {line} does: pad to a fixed length, and mask what is "
            "beyond each sequence"
        )
    if isinstance(error, _NUMBER_FROM_VALUES) or _reads_values(error):
        return read_error(line)
    return None


def _reads_values(error: Exception) -> bool:
    """Return whether an error's text is one of those for reading a tensor without values."""
    return isinstance(error, (RuntimeError, TypeError)) and any(text in str(error) for text in _READ_TEXTS)
