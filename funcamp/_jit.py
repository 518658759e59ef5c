"""`jit`: a pure step compiled, its state donated, and on a GPU captured into one CUDA graph."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp import _capture, _tree
from funcamp._outline import Outline, outline, signature
from funcamp._owned import Owned, arranged, own, strides_for
from funcamp._trace import Flat, SharedError, trace
from funcamp._types import Tree
from funcamp._writeback import SnapshotWriteBacks


class Options(NamedTuple):
    """The arguments of `jit`, checked."""

    donate: bool
    capture: bool
    unroll: int | None
    exact: bool
    backend: str
    max_signatures: int


class _Program(NamedTuple):
    """A step compiled for one batch signature."""

    run: Flat | _capture.Captured
    outline: Outline
    strides: list[tuple[int, ...]]


class JitStep:
    """A compiled step `(state, batch) -> (state, metrics)`; made by `jit`."""

    def __init__(self, step: Callable[[Any, Any], Any], options: Options) -> None:
        self._step, self._options = step, options
        self._programs: dict[Any, _Program] = {}
        self._owned: Owned | None = None
        self._graphs: _capture.Graphs | None = None
        self._last: Any = None

    def __repr__(self) -> str:
        return f"jit({self._step!r})"

    @property
    def programs(self) -> int:
        """How many batch signatures have been compiled."""
        return len(self._programs)

    def __call__(self, state: Tree, batch: Tree) -> tuple[Any, Any]:
        """Take one step, or as many as `unroll` says. Compiles at the first call for a batch signature. No sync.

        Args:
            state: the last call's, or any with its structure, shapes, dtypes and devices. Donated: consumed.
            batch: a pytree; its tensors may have any values, its other leaves are constants of the program.

        Raises:
            TypeError: a leaf of state is no tensor; step returns no pair; a constant of the batch cannot be hashed.
            ValueError: state is unlike the first one; a batch signature more than `max_signatures`.
            RuntimeError: step cannot be compiled or captured, or reads the host; there is no compiler.
        """
        leaves, spec = _tree.flatten(batch)
        key = (spec, tuple([signature(leaf) for leaf in leaves]))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        owned = self._own(state)
        program = self._programs.get(key)
        if program is None:
            program, results = self._compile(key, owned, batch, given)
            owned = self._owned or owned
        else:
            given = arranged(given, program.strides, owned)
            results = (
                program.run(given)
                if isinstance(program.run, _capture.Captured)
                else program.run([*owned.leaves, *given])
            )
        self._last = key
        metrics, first = list(program.outline.constants), len(results) - len(program.outline.tensors)
        for index, value in zip(program.outline.tensors, results[first:]):
            metrics[index] = value
        if first:  # not donated
            fresh = Owned(owned.filled(results[:first]))
            if self._graphs is None:
                self._owned = fresh
            return fresh.tree, _tree.unflatten(metrics, program.outline.spec)
        return owned.tree, _tree.unflatten(metrics, program.outline.spec)

    def _own(self, state: Tree) -> Owned:
        """The state's leaves, in storage that is this step's to write, or for graphs in their static storage."""
        owned = self._owned
        if owned is not None and owned.is_of(state):
            return owned
        if owned is not None and self._graphs is not None:
            owned.refill(state)
            return owned
        donate, first = self._options.donate, owned is None
        leaf = next((leaf for leaf in _tree.leaves(state) if isinstance(leaf, Tensor)), None)
        if first and self._options.capture and leaf is not None:
            self._graphs = _capture.graphs_for(leaf.device)
        self._owned = own(state, owned, copy=not donate and self._graphs is not None)
        return self._owned

    def _compile(self, key: Any, owned: Owned, batch: Tree, given: list[Tensor]) -> tuple[_Program, list[Tensor]]:
        options, unroll = self._options, self._options.unroll
        if len(self._programs) >= options.max_signatures:
            raise ValueError(
                f"jit: batch must have at most {options.max_signatures} signatures in all (max_signatures); "
                f"{_difference(batch, self._last, key)}"
            )
        one = batch if unroll is None else _first(batch, unroll)
        found = outline("jit", self._step, owned.tree, one)
        _check_compiler(options.backend, owned.leaves + given)
        strides = strides_for(given)
        given = arranged(given, strides, owned)
        graphs = self._graphs
        with graphs.kept() if graphs is not None else contextlib.nullcontext():
            single, results = self._trace(owned, one, _slices(given, 0, unroll), found)
        owned = self._owned or owned
        metrics = len(found.tensors)

        def several(values: list[Tensor], done: list[Tensor] | None = None) -> list[Tensor]:
            state, batches = values[: len(owned.leaves)], values[len(owned.leaves) :]
            rows = []
            for index in range(unroll or 1):
                out = done if done is not None and not index else single([*state, *_slices(batches, index, unroll)])
                state = out[: len(out) - metrics] or state
                rows.append(out[len(out) - metrics :])
            return [*out[: len(out) - metrics], *(torch.stack(column) for column in zip(*rows))]

        run: Flat = single if unroll is None else several
        if graphs is None:
            program = _Program(run, found, strides)
            results = results if unroll is None else several([*owned.leaves, *given], results)
        else:
            program = _Program(_capture.Captured(graphs, run, owned.leaves, given, metrics), found, strides)
            results = program.run(given)
        self._programs[key] = program
        return program, results

    def _trace(self, owned: Owned, batch: Tree, given: list[Tensor], found: Outline) -> tuple[Flat, list[Tensor]]:
        options, donate = self._options, self._options.donate
        count, filled = len(owned.leaves), owned.filled
        flat, spec = _tree.flatten(batch)
        places = [index for index, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        step = self._step

        def body(values: list[Tensor]) -> list[Tensor]:
            whole = list(flat)
            for place, value in zip(places, values[count:]):
                whole[place] = value
            new, metrics = step(filled(values[:count]), _tree.unflatten(whole, spec))
            fresh = [leaf for leaf in _tree.leaves(new) if leaf is not None]
            numbers = _tree.leaves(metrics)
            results = [numbers[place].clone() for place in found.tensors]
            if not donate:
                return [*fresh, *results]
            # All values before the first write; the clones cost nothing where a value is computed.
            snapshots = [new if new is old else new.clone() for new, old in zip(fresh, values)]
            for new, old in zip(snapshots, values):
                if new is not old:
                    old.copy_(new)
            return results

        patches: dict[str, Any] = {"triton.cudagraphs": False}
        if donate:
            patches["post_grad_custom_pre_pass"] = SnapshotWriteBacks()
        if options.exact:
            patches |= {"emulate_precision_casts": True, "fallback_random": True}
        # Graphs take the step at their first replay: this one is on clones.
        state = [leaf.clone() if self._graphs is not None else leaf.detach() for leaf in owned.leaves]
        inputs = [leaf.detach() for leaf in given]
        writes = count if donate else 0
        try:
            return trace(body, [*state, *inputs], writes, options.backend, patches)
        except SharedError:
            self._owned = own(owned.tree, None, copy=True)
            return self._trace(self._owned, batch, given, found)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RuntimeError(f"jit: step cannot be compiled into one graph: {reason}") from error


def jit(
    step: Callable[[Any, Any], tuple[Any, Any]],
    *,
    donate: bool = True,
    capture: bool = True,
    unroll: int | None = None,
    exact: bool = False,
    backend: str = "inductor",
    max_signatures: int = 8,
) -> JitStep:
    """Compile a pure step whole; write the new state into the old one's storage; on a GPU replay it as one CUDA graph.

    The step is traced at the first call for each batch signature: structure, shapes, dtypes, devices, and the values of
    what is no tensor. What it reads besides its arguments is fixed then: Python values and flags for good, tensors by
    reference. Make what changes a leaf of the state or of the batch, or a tensor that is written in place. No call
    syncs, but the first for a signature.

    Args:
        step: `(state, batch) -> (state, metrics)`, pure, any pytrees of tensors; the state it returns has the
            structure, shapes, dtypes and devices of the one it takes. `make_train_step` makes one.
        donate: consume the state passed in: the call returns the same object, with the new values in it. `clone` a
            state first to keep it. False leaves it alone and allocates the new one.
        capture: on CUDA, capture into a graph; the first call warms up on clones. Elsewhere it plays no part.
        unroll: steps in a call; every tensor of the batch holds that many along its first dimension, and metrics come
            back stacked. In one graph on CUDA. None for one step and no such dimension.
        exact: keep the low precision's rounding between fused operations, and eager's random numbers: a compiled step
            then overflows where the eager one does. Slower.
        backend: torch.compile's: "inductor", or "aot_eager" to run without a compiler, slowly.
        max_signatures: batch signatures to compile; one more is an error, for a loop that compiles at every step is
            never meant.

    Returns:
        A `JitStep`: call it as step. On CUDA a state from elsewhere (a checkpoint) is copied into its storage.

    Raises:
        TypeError: step is not callable, or an argument is of another type than said above.
        ValueError: unroll or max_signatures is below 1.

    Example:
        >>> def count(state, batch):
        ...     return {"total": state["total"] + batch.sum()}, {"mean": batch.mean()}
        >>> run = jit(count, backend="aot_eager")
        >>> state, metrics = run({"total": torch.zeros(())}, torch.ones(4))
        >>> state["total"], metrics["mean"]
        (tensor(4.), tensor(1.))
    """
    if not callable(step):
        raise TypeError(f"jit: step must be callable; got {step!r}")
    for name, flag in (("donate", donate), ("capture", capture), ("exact", exact)):
        if not isinstance(flag, bool):
            raise TypeError(f"jit: {name} must be a bool; got {flag!r}")
    for name, number in (("unroll", unroll), ("max_signatures", max_signatures)):
        if name == "unroll" and number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"jit: {name} must be an integer; got {number!r}")
        if number < 1:
            raise ValueError(f"jit: {name} must be 1 or more; got {number}")
    if not isinstance(backend, str):
        raise TypeError(f"jit: backend must be a string; got {backend!r}")
    return JitStep(step, Options(donate, capture, unroll, exact, backend, max_signatures))


def _first(batch: Tree, unroll: int) -> Tree:
    leaves, spec = _tree.flatten(batch)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and (not leaf.dim() or leaf.shape[0] != unroll):
            raise ValueError(
                f"jit: batch{_tree.path_of(batch, index)} must hold {unroll} steps along its first dimension (unroll); "
                f"got {_tree.describe(leaf)}"
            )
    return _tree.unflatten([leaf[0] if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _slices(batch: list[Tensor], index: int, unroll: int | None) -> list[Tensor]:
    return batch if unroll is None else [leaf[index] for leaf in batch]


def _difference(batch: Tree, before: Any, now: Any) -> str:
    """How a batch's signature differs from the last one."""
    if before[0] != now[0]:
        return f"its structure changed from {before[0]} to {now[0]}"
    for index, (old, new) in enumerate(zip(before[1], now[1])):
        if old != new:
            return f"batch{_tree.path_of(batch, index)} changed from {_told(old)} to {_told(new)}"
    return "it went back to an old one"


def _told(leaf: Any) -> str:
    if isinstance(leaf, tuple) and len(leaf) == 3 and isinstance(leaf[1], torch.dtype):
        return f"a {leaf[1]} tensor of shape {tuple(leaf[0])} on {leaf[2]}"
    return f"{leaf!r} (make it a tensor: a number is a constant of the program)"


def _check_compiler(backend: str, leaves: list[Tensor]) -> None:
    if backend != "inductor" or not any(leaf.device.type == "cpu" for leaf in leaves):
        return
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if not any(shutil.which(name) for name in wanted):
        raise RuntimeError(
            "jit: torch.compile needs a C++ compiler on a CPU; found none of "
            f"{', '.join(wanted)}: install g++ or clang, or pass backend='aot_eager'"
        )
