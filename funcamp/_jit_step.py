"""A compiled step: one program for each signature of its batch, the state in storage of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from funcamp import _capture, _tree
from funcamp._mended import mended
from funcamp._outline import Outline, outline
from funcamp._owned import Owned, arranged, own, strides_for
from funcamp._signature import difference, flat, signature
from funcamp._trace import Flat, SharedError, check_compiler, trace
from funcamp._types import Tree
from funcamp._unroll import first_of, unrolled
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
            batch: a pytree; its tensors may have any values, its other leaves are constants of the program. Captured:
                tensors on the host are copied to the state's device, without a wait where their memory is pinned.

        Raises:
            TypeError: a leaf of state is no tensor; step returns no pair; a constant of the batch cannot be hashed.
            ValueError: state is unlike the first one; a batch signature more than `max_signatures`.
            RuntimeError: step cannot be compiled or captured, or reads the host; there is no compiler.
        """
        leaves, spec = flat(batch)
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
                f"{difference(batch, self._last, key)}"
            )
        if self._graphs is not None:
            batch, given = _beside(owned.leaves[0], batch)
        one = batch if unroll is None else first_of(batch, unroll)
        found = outline("jit", self._step, owned.tree, one)
        check_compiler(options.backend, owned.leaves + given)
        strides = strides_for(given)
        given = arranged(given, strides, owned)
        graphs = self._graphs
        with graphs.kept() if graphs is not None else contextlib.nullcontext():
            single, results = self._trace(owned, one, given if unroll is None else [leaf[0] for leaf in given], found)
        owned = self._owned or owned
        metrics, run = len(found.tensors), single
        if unroll is not None:
            run = unrolled(single, len(owned.leaves), metrics, unroll)
        if graphs is None:
            program = _Program(run, found, strides)
            if unroll is not None:
                rest = unrolled(single, len(owned.leaves), metrics, unroll, done=results)
                results = rest([*owned.leaves, *given])
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

        patches = {"triton.cudagraphs": False, "post_grad_custom_pre_pass": SnapshotWriteBacks(options.exact)}
        if options.exact:
            patches |= {"emulate_precision_casts": True, "fallback_random": True}
        # Graphs take the step at their first replay: this one is on clones.
        state = [leaf.clone() if self._graphs is not None else leaf.detach() for leaf in owned.leaves]
        inputs = [leaf.detach() for leaf in given]
        writes = count if donate else 0
        try:
            with mended(exact=options.exact):
                return trace(body, [*state, *inputs], writes, options.backend, patches)
        except SharedError:
            self._owned = own(owned.tree, None, copy=True)
            return self._trace(self._owned, batch, given, found)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RuntimeError(f"jit: step cannot be compiled into one graph: {reason}") from error


def _beside(leaf: Tensor, batch: Tree) -> tuple[Tree, list[Tensor]]:
    """A batch on a leaf's device, and its tensors."""
    leaves, spec = _tree.flatten(batch)
    moved = [value.to(leaf.device) if isinstance(value, Tensor) else value for value in leaves]
    return _tree.unflatten(moved, spec), [value for value in moved if isinstance(value, Tensor)]
