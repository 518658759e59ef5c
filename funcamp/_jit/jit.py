"""`jit`: compile a pure step, donate its state, and on a GPU capture it into one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from funcamp import _tree
from funcamp._autograd.loss import Loss
from funcamp._check import boolean, integer
from funcamp._jit.jit_options import JitOptions

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
    without: Collection[str] = (),
    explain: bool = False,
) -> JitStep:
    """Compile a pure step with a donated state; on a GPU replay it as one CUDA graph.

    The step is traced at the first call for each batch signature: structure, shapes, dtypes, devices, the values of
    leaves that are not tensors, and the autocast and the default dtype around the call. Its Python runs then, and up to
    twice more if a run changed something in Python; the last two must record the same operations. It computes from its
    state, its batch and tensors that it reads by reference, and writes nothing but its state. Every call looks at what
    an ordinary loop changes: training flags, layers, hooks, and plain values in the modules, objects and variables of
    the step. After a change it is traced again, and each combination of values that computes something else is a
    program. So anything that changes often must be a leaf of the state or of the batch, or a tensor that is written in
    place. Everything deeper is a constant (docs/contract.md). While a step is traced no other thread may call its
    module or use torch's default generator. Threads that call one jitted step take turns. No sync, except at the first
    call for a signature.

    A first call of more than two seconds reports on stderr what it does and how long it took, or through `logging` if
    the logger "funcamp" is enabled for INFO. `logging.getLogger("funcamp").setLevel("WARNING")` silences it.

    Args:
        step: `(state, batch) -> (state, metrics)`, pure, with any pytrees of tensors. The new state must have the
            structure, shapes, dtypes and devices of the old one. `make_train_step` makes such a step.
        donate: write the new state into the old state's memory. This consumes the state passed in: the call returns the
            same object with the new values. Use `clone` to keep a state. With False the state is not changed and the
            new one is allocated. Only memory that torch allocated for this process is written: the first call copies a
            leaf in other memory (numpy, a memory map, DLPack, a file that `torch.load` read, shared memory), and one
            that shares memory with another leaf or with a tensor that the step reads besides its arguments. A part of
            the batch in the state's memory is read before it is written.
        capture: on CUDA, capture into a graph; the first call warms up on clones. No effect on other devices.
        unroll: number of steps in a call. Every tensor of the batch has that size in its first dimension, and metrics
            are stacked. One graph on CUDA. None for one step without that dimension.
        exact: sum in float16 where torch's own kernels do, and draw eager mode's random numbers: a compiled step then
            overflows when the eager one does. Slower. (On torch 2.11 not the random numbers of a step with
            both dropout and `torch.rand`, because Inductor swaps their order.)
        backend: torch.compile's: "inductor", or "eager" to run the traced operations one by one, without a compiler.
        compile_after: number of calls with a second or later batch signature before it is compiled too. Until then the
            traced operations run one by one, so that the last, smaller batch of an epoch costs a trace and no
            compilation; sums round as in eager mode, and a line of the log at level INFO reports it. 0 compiles every
            program at its first call: choose it if a batch has a Python bool for a part of the step that does not run
            every time (a delayed update), because the program of each value is called often. A captured step always
            compiles at once, with one graph per signature; so does a step on several ranks, which must round alike.
        max_signatures: maximum number of programs. For one more shape or structure of batches, or one more value, of a
            constant in the batch or of what the step reads in Python, the oldest program is dropped, and made again
            when it is needed; the first time the log names what changed.
        without: names of passes, of Inductor's options, and of corrections of torch to leave out, to find the one that
            makes a number wrong or a step slow. Without a correction numbers may be wrong where torch is.
        explain: print each of them that a program gets to stderr, with its reason, when it is compiled.

    Returns:
        A `JitStep`: call it like step. On CUDA a state from elsewhere (a checkpoint) is copied into its storage. Its
        method `also` compiles another step on the same state, such as an evaluation; `release` frees programs, graphs
        and memory, for example before `destroy_process_group()`.

    Raises:
        TypeError: step is not callable, or is a module, a loss or a class; an argument is not of the type given above.
        ValueError: unroll or max_signatures is below 1, or compile_after below 0; torch has no such backend; without
            has an unknown name.

    Example:
        >>> def count(state, batch):
        ...     return {"total": state["total"] + batch.sum()}, {"mean": batch.mean()}
        >>> run = jit(count, backend="eager")
        >>> state, metrics = run({"total": torch.zeros(())}, torch.ones(4))
        >>> state["total"], metrics["mean"]
        (tensor(4.), tensor(1.))
    """
    from funcamp._jit.jit_step import JitStep  # imports torch's compiler, which takes seconds

    check_step("jit", step)
    for name, flag in (("donate", donate), ("capture", capture), ("exact", exact), ("explain", explain)):
        boolean("jit", name, flag)
    if unroll is not None:
        integer("jit", "unroll", unroll, 1)
    integer("jit", "compile_after", compile_after, 0)
    integer("jit", "max_signatures", max_signatures, 1)
    _check_backend(backend)
    options = JitOptions(
        donate=donate,
        capture=capture,
        unroll=unroll,
        exact=exact,
        backend=backend,
        compile_after=compile_after,
        max_signatures=max_signatures,
        without=_names_left_out(without),
        explain=explain,
    )
    return JitStep(step, options)


def check_step(call: str, step: object) -> None:
    """Raise TypeError if this is not a step that can be compiled."""
    from funcamp._jit.jit_step import JitStep

    if not callable(step):
        raise TypeError(f"{call}: step must be callable; got {_tree.brief(step)}")
    if isinstance(step, (nn.Module, Loss, type)):
        given = f"the class {step.__name__}" if isinstance(step, type) else _tree.brief_kind(step)
        raise TypeError(
            f"{call}: step must be a function (state, batch) -> (state, metrics); got {given}: write "
            "jit(make_train_step(module_loss(model, criterion), optimizer)); a forward pass is for torch.compile"
        )
    if isinstance(step, JitStep):
        raise TypeError(f"{call}: step must not be compiled already; got {step!r}")


def _check_backend(backend: object) -> None:
    """Raise TypeError or ValueError if this is not the name of a backend of torch.compile."""
    if not isinstance(backend, str):
        raise TypeError(f"jit: backend must be a string; got {backend!r}")
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        raise ValueError(f"jit: backend must be 'inductor', 'eager', or another that torch has; got {backend!r}")


def _names_left_out(without: Collection[str]) -> frozenset[str]:
    """Return the names to leave out.

    Raises:
        TypeError: they are not a collection.
        ValueError: a name is unknown.
    """
    from funcamp._jit.explain import names

    if isinstance(without, str) or not isinstance(without, Collection):
        raise TypeError(f'jit: without must be a collection of names, such as ("part_inputs",); got {without!r}')
    left_out = frozenset(without)
    if unknown := sorted(left_out - names(), key=str):
        raise ValueError(
            f"jit: without must have names of {', '.join(sorted(names()))}; got {', '.join(map(repr, unknown))}"
        )
    return left_out
