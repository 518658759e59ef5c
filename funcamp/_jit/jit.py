"""`jit`: a pure step compiled, its state donated, and on a GPU captured into one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from funcamp import _tree
from funcamp._autograd.loss import Loss
from funcamp._check import boolean, integer

if TYPE_CHECKING:
    from funcamp._jit.jit_step import JitStep


def jit(
    step: Callable[[Any, Any], tuple[Any, Any]],
    *,
    donate: bool = True,
    capture: bool = True,
    unroll: int | None = None,
    exact: bool = False,
    backend: str = "inductor",
    compile_after: int = 100,
    max_signatures: int = 8,
) -> JitStep:
    """Compile a pure step whole; write the new state into the old one's storage; on a GPU replay it as one CUDA graph.

    The step is traced at the first call for each batch signature: structure, shapes, dtypes, devices, the values of
    what is no tensor, and an autocast around the call. What it reads besides its arguments is fixed then: Python values
    and flags for good, tensors by reference. Make what changes a leaf of the state or of the batch, or a tensor that is
    written in place. While a step is traced no other thread may draw from torch's default generator; threads that call
    one jitted step take turns. No call syncs, but the first for a signature.

    A first call of more than two seconds says on stderr what it does and how long it took; through `logging` where
    "funcamp" has a handler at level INFO. `logging.getLogger("funcamp").setLevel("WARNING")` silences it.

    Args:
        step: `(state, batch) -> (state, metrics)`, pure, any pytrees of tensors; the state it returns has the
            structure, shapes, dtypes and devices of the one it takes. `make_train_step` makes one.
        donate: consume the state passed in: the call returns the same object, with the new values in it. `clone` a
            state first to keep it. False leaves it alone and allocates the new one. Only memory that torch allocated
            for this process is written: the first call copies a leaf over other memory (numpy, a memory map, DLPack,
            a file that `torch.load` read, shared memory), or that shares memory with another leaf or with a tensor
            that step reads of its own. A part of the batch in the state's memory is read before it is written.
        capture: on CUDA, capture into a graph; the first call warms up on clones. Elsewhere it plays no part.
        unroll: steps in a call; every tensor of the batch holds that many along its first dimension, and metrics come
            back stacked. In one graph on CUDA. None for one step and no such dimension.
        exact: keep the low precision's rounding between fused operations, and eager's random numbers: a compiled step
            then overflows where the eager one does. Slower. (Random numbers not on torch 2.11 in a step with both
            dropout and `torch.rand`: Inductor swaps their turns.)
        backend: torch.compile's: "inductor", or "eager" to run the traced operations one by one, without a compiler.
        compile_after: calls of a second or later batch signature before it is compiled too. Until then what was traced
            runs operation by operation, so that the last, smaller batch of an epoch costs a trace and no compilation;
            its sums round as in eager code. 0 compiles at once. A captured step always does: one graph a signature.
        max_signatures: batch signatures to trace; one more is an error, for a loop that traces at every step is never
            meant.

    Returns:
        A `JitStep`: call it as step. On CUDA a state from elsewhere (a checkpoint) is copied into its storage.

    Raises:
        TypeError: step is not callable, or a module, a loss or a class; an argument is of another type than said above.
        ValueError: unroll or max_signatures is below 1, or compile_after below 0.

    Example:
        >>> def count(state, batch):
        ...     return {"total": state["total"] + batch.sum()}, {"mean": batch.mean()}
        >>> run = jit(count, backend="eager")
        >>> state, metrics = run({"total": torch.zeros(())}, torch.ones(4))
        >>> state["total"], metrics["mean"]
        (tensor(4.), tensor(1.))
    """
    from funcamp._jit.jit_step import JitStep, Options  # imports torch's compiler, which takes seconds

    if not callable(step):
        raise TypeError(f"jit: step must be callable; got {_tree.brief(step)}")
    if isinstance(step, (nn.Module, Loss, type)):
        kind = "class" if isinstance(step, type) else "loss" if isinstance(step, Loss) else "module"
        name = step.__name__ if isinstance(step, type) else type(step).__name__
        raise TypeError(
            f"jit: step must be a function (state, batch) -> (state, metrics); got the {kind} {name}: write "
            "jit(make_train_step(module_loss(model, criterion), optimizer)); a forward pass is for torch.compile"
        )
    if isinstance(step, JitStep):
        raise TypeError(f"jit: step must not be compiled already; got {step!r}")
    for name, flag in (("donate", donate), ("capture", capture), ("exact", exact)):
        boolean("jit", name, flag)
    if unroll is not None:
        integer("jit", "unroll", unroll, 1)
    integer("jit", "compile_after", compile_after, 0)
    integer("jit", "max_signatures", max_signatures, 1)
    if not isinstance(backend, str):
        raise TypeError(f"jit: backend must be a string; got {backend!r}")
    return JitStep(step, Options(donate, capture, unroll, exact, backend, compile_after, max_signatures))
