"""torch.optim's optimizers as pure functions with an explicit state."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._optim.arguments import is_torchs
from funcamp._optim.class_state import ClassState, Entries, entries_in
from funcamp._optim.dataflow import can_follow
from funcamp._optim.hyperparameters import Hyper, check_value, evaluate
from funcamp._optim.optimizer import OptState, StatelessOptimizer
from funcamp._optim.run import refuse_differentiation
from funcamp._optim.torch_optim.sgd import APPLIED_ENTRY
from funcamp._optim.traits import StoredParam, Traits, probe
from funcamp._storage.params import Params, collapse, expand
from funcamp._types import Kwargs, Tree

#: The leaves of a tree of tensors, from left to right.
Leaves: TypeAlias = list[Tensor | None]


class ClassOptimizer(StatelessOptimizer):
    """A torch.optim class as two pure functions; made by `stateless`.

    Immutable: assigning `lr` raises. Make another one; it continues from any state of this one.
    """

    def __init__(
        self, cls: type[torch.optim.Optimizer], hyperparameters: Kwargs, set_by_scheduler: Kwargs | None = None
    ) -> None:
        self._cls = cls
        self._hyperparameters = hyperparameters
        self._set_by_scheduler = set_by_scheduler or {}
        for name, value in hyperparameters.items():
            check_value("stateless", name, value)
        self._traits: Traits = probe(cls, hyperparameters, self._set_by_scheduler)
        lr_parameter = inspect.signature(cls.__init__).parameters.get("lr")
        self._default_lr = None if lr_parameter is None else lr_parameter.default
        # Dynamo reuses a graph across closures that differ only in a traced function that they capture (similar to
        # https://github.com/pytorch/pytorch/issues/197811) but guards on strings: hence a name instead of the object.
        self._signature = inspect.signature(cls.__init__).parameters
        self._dynamic = list(self._traits.step.dynamic)
        self._arguments = self._traits.step.arguments
        self._key = f"{cls.__qualname__}-{next(_serial)}"
        self._first_state, self._step, self._evaluated = _nonstrict_functions()
        _registry[self._key] = self

    def __repr__(self) -> str:
        arguments = "".join(f", {name}={value!r}" for name, value in self._hyperparameters.items())
        storage = "flat" if self._traits.pointwise else "per tensor"
        return f"stateless({self._cls.__module__}.{self._cls.__qualname__}{arguments}) [{storage}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._cls, self._hyperparameters, self._set_by_scheduler)

    def init(self, params: Tree) -> OptState:
        """Return the optimizer's state before the first step.

        Pure; nothing is lazy; no sync.

        Args:
            params: a pytree of floating-point or complex tensors; None passes through. `Params` are updated group
                by group if the class is elementwise (which `stateless` finds out), otherwise view by view.

        Returns:
            An `OptState`, `applied` 0.

        Raises:
            TypeError: a leaf is an integer tensor, is sparse, or is neither a tensor nor None.

        Example:
            >>> stateless(torch.optim.AdamW).init({"w": torch.ones(2)}).state["exp_avg"]
            {'w': tensor([0., 0.])}
        """
        flat, spec = _tree.parameters("init", "params", params if self._takes_stored(params) else expand(params))
        present = [leaf for leaf in flat if leaf is not None]
        leaf_entries: list[Entries] = [{} for _ in flat]
        shared: Entries = {}
        if present:
            leaves, shared = self._first_state(self._key, present, self._hyper(None, present))
            present_leaves = iter(leaves)
            leaf_entries = [{} if leaf is None else next(present_leaves) for leaf in flat]
        names = list(dict.fromkeys(name for entries in leaf_entries for name in entries))
        state = {name: _tree.unflatten([entries.get(name) for entries in leaf_entries], spec) for name in names}
        device = present[0].device if present else None
        return OptState(torch.zeros((), dtype=torch.int64, device=device), state, shared)

    def update(self, params: Tree, grads: Tree, opt_state: OptState) -> tuple[Tree, OptState]:
        """Apply torch.optim's update rule as a pure function.

        Schedules are evaluated at `opt_state.applied`, which is 0 at the first step. Pure; safe under torch.compile and
        vmap; no sync. As in torch.optim, no gradient flows through it; under torch.func.grad it raises ValueError.

        Args:
            params: the parameters.
            grads: unscaled gradients, same tree and shapes, cast to the parameters' dtypes. For None, the parameter and
                its state do not change.
            opt_state: the state from `init` or the last `update`.

        Returns:
            The new parameters and the new state.

        Raises:
            TypeError: a leaf of params or grads is not a floating-point or complex tensor; opt_state is not an
                `OptState`.
            ValueError: the trees differ in structure, a gradient in shape or device from its parameter, or a
                hyperparameter in device; opt_state is another optimizer's; torch.func differentiates a leaf; a gradient
                is None, and the class is one that follows itself only if all parameters begin together.

        Example:
            >>> sgd = stateless(torch.optim.SGD, lr=0.5)
            >>> params, opt_state = {"w": torch.ones(2)}, sgd.init({"w": torch.ones(2)})
            >>> sgd.update(params, {"w": torch.ones(2)}, opt_state)[0]
            {'w': tensor([0.5000, 0.5000])}
        """
        stored_params = params
        takes_groups = self._takes_stored(params)
        if not takes_groups:
            params = expand(params)
            grads = expand(grads)
        flat, spec = _tree.parameters("update", "params", params)
        flat_grads = self._flat_grads(params, flat, grads)
        entries = self._flat_entries(params, opt_state)
        positions = self._stepping_positions(flat, flat_grads, grads)
        if not positions:
            return stored_params, opt_state._replace(applied=opt_state.applied + 1)
        stepping_params: list[Tensor] = [flat[index] for index in positions]  # type: ignore[misc]  # none is None
        stepping_grads = [flat_grads[index] for index in positions]
        states = _entries_at(positions, entries)
        hyper = self._hyper(opt_state.applied, stepping_params)
        new_params, new_states, shared = self._step(
            self._key, stepping_params, stepping_grads, states, opt_state.shared, hyper
        )
        for index, new_param, new_state in zip(positions, new_params, new_states):
            flat[index] = new_param
            for name, value in new_state.items():
                entries[name][index] = value
        new_entries = {name: _tree.unflatten(values, spec) for name, values in entries.items()}
        new_tree = _tree.unflatten(flat, spec)
        if not takes_groups:
            new_tree = collapse(stored_params, new_tree)
        return new_tree, OptState(opt_state.applied + 1, new_entries, shared)

    def evaluation_params(self, params: Tree, opt_state: OptState) -> Tree:
        """Return the parameters to evaluate with.

        Of a class with `train` and `eval`, such as a schedule-free one, these are what `eval` makes of those in
        training; of any other class they are the parameters. Pure; no sync.

        Args:
            params: the parameters in training.
            opt_state: the state from `init` or the last `update`.

        Returns:
            The parameters, of the same structure.

        Raises:
            TypeError, ValueError: as `update`.

        Example:
            >>> sgd = stateless(torch.optim.SGD, lr=0.5)
            >>> params = {"w": torch.ones(2)}
            >>> sgd.evaluation_params(params, sgd.init(params)) is params
            True
        """
        if not (callable(getattr(self._cls, "train", None)) and callable(getattr(self._cls, "eval", None))):
            return params
        expanded = params if self._takes_stored(params) else expand(params)
        flat, spec = _tree.parameters("evaluation_params", "params", expanded)
        entries = self._flat_entries(expanded, opt_state)
        present = [index for index, leaf in enumerate(flat) if leaf is not None]
        states = _entries_at(present, entries)
        present_params: list[Any] = [flat[index] for index in present]
        hyper = self._hyper(opt_state.applied, present_params)
        for index, param in zip(present, self._evaluated(self._key, present_params, states, opt_state.shared, hyper)):
            flat[index] = param
        return collapse(params, _tree.unflatten(flat, spec))

    def _takes_stored(self, params: Tree) -> bool:
        """Return whether the class updates stored groups as they are, because it is elementwise, not the views in them.

        Also where nothing is stored in groups.
        """
        stored_params: list[StoredParam] = []
        is_sliced = False

        def note(stored: Params) -> Params:
            nonlocal is_sliced
            is_sliced = is_sliced or stored.ranks is not None
            for kind in stored.kinds():  # Dynamo of torch 2.11 knows no starmap
                stored_params.append(StoredParam(*kind))
            return stored

        _tree.map_nodes(Params, note, params)
        takes_groups = self._traits.elementwise(stored_params)
        if is_sliced and not takes_groups and not can_follow():
            raise RuntimeError(_upstream.message("torch.utils._python_dispatch.TorchDispatchMode"))
        return takes_groups

    def _stepping_positions(self, flat: Leaves, flat_grads: Leaves, grads: Tree) -> list[int]:
        """Return the positions of the parameters that take a step.

        Of torch's classes these are the parameters with a gradient. A class of another package may count its steps, or
        go by its parameters: it gets all of them, always.

        Raises:
            ValueError: a gradient is None, and the class follows itself only if all parameters begin together.
        """
        present = [index for index, param in enumerate(flat) if param is not None]
        with_gradient = [index for index in present if flat_grads[index] is not None]
        if not with_gradient and is_torchs(self._cls):
            return []
        if len(with_gradient) < len(present) and not self._traits.takes_late_gradients:
            missing_index = next(index for index in present if flat_grads[index] is None)
            raise ValueError(
                f"update: grads{_tree.path_of(grads, missing_index)} must be a tensor, as all gradients of "
                f"{self._cls.__name__}, which a step as a function follows only if all parameters begin together; got "
                "None: give zeros, or leave the parameter out"
            )
        return with_gradient if is_torchs(self._cls) else present

    def _flat_grads(self, params: Tree, flat: Leaves, grads: Tree) -> Leaves:
        """Return the gradients of the parameters, which are checked.

        Raises:
            TypeError: a gradient is not floating point or complex.
            ValueError: the trees differ in structure, or a gradient in shape or device from its parameter.
        """
        _tree.same_structure("update", ("params", "grads"), (params, grads))
        flat_grads, _ = _tree.tensors("update", "grads", grads)
        for index, (param, grad) in enumerate(zip(flat, flat_grads)):
            if grad is None:
                continue
            if not (grad.is_floating_point() or grad.is_complex()):
                raise TypeError(
                    f"update: grads{_tree.path_of(grads, index)} must be floating point or complex; "
                    f"got {_tree.describe(grad)}"
                )
            if param is None or grad.shape != param.shape or grad.device != param.device:
                raise ValueError(
                    f"update: grads{_tree.path_of(grads, index)} must have its parameter's shape and device; "
                    f"got {_tree.describe(grad)} for {_tree.describe(param)}"
                )
        return flat_grads

    def _flat_entries(self, params: Tree, opt_state: OptState) -> dict[str, Leaves]:
        """Return the entries of the state by name, for each the values of all leaves of the parameters.

        Raises:
            TypeError: opt_state is not an `OptState`.
            ValueError: it is another optimizer's, or of other parameters.
        """
        if not isinstance(opt_state, OptState):
            raise TypeError(f"update: opt_state must be an OptState, as init makes it; got {_tree.brief(opt_state)}")
        if any(leaf is not None for leaf in _tree.leaves(params)):  # a group without parameters has no entries
            self._check_all_entries(opt_state)
        entries: dict[str, Leaves] = {}
        for name, tree in opt_state.state.items():
            _tree.same_structure("update", ("params", f"opt_state.state[{name!r}]"), (params, tree))
            entries[name] = _tree.leaves(tree)
        return entries

    def _check_all_entries(self, opt_state: OptState) -> None:
        """Raise ValueError if a state has the entries of another optimizer."""
        expected_names = self._traits.entries
        names = opt_state.state.keys() - {APPLIED_ENTRY}
        # The expected entries are those of a matrix. They may depend on a parameter's shape: in Adafactor, where a
        # subset or a superset is taken, and in classes of other libraries, where the step checks each parameter.
        if not is_torchs(self._cls):
            is_own = True
        elif self._traits.pointwise:
            is_own = names == expected_names
        else:
            is_own = names <= expected_names or expected_names <= names
        if not is_own:
            raise ValueError(
                f"update: opt_state must hold the entries that {self!r} keeps, {sorted(expected_names)}; got "
                f"{sorted(names)}, another's: begin anew with state._replace(opt_state=optimizer.init(params)), "
                "or keep what both have with step.load_state_dict(saved, like=step.init(), strict=False)"
            )

    def _with(self, hyperparameters: Kwargs, set_by_scheduler: Kwargs) -> StatelessOptimizer:
        return ClassOptimizer(self._cls, hyperparameters, set_by_scheduler)

    def _python_numbers(self, param: Tensor) -> set[str]:
        """Return the entries that are Python's numbers in the class's state_dict."""
        form = self._traits.step.form([param])
        entries = {**entries_in(form.per_param[0]), **entries_in(form.shared)}
        return {name for name, entry in entries.items() if entry.kind != "tensor"}

    def _hyper(self, applied: Tensor | None, params: list[Tensor]) -> Hyper:
        """Return the dynamic hyperparameters after some applied steps (None: 0), on the parameters' device."""
        if not self._traits.step.dynamic or not params:
            return {}
        device = params[0].device
        if applied is None:
            applied = torch.zeros((), dtype=torch.int64, device=device)
        return {
            name: evaluate(name, self._hyperparameters[name], applied, device) for name in self._traits.step.dynamic
        }


_serial = count()
_registry: weakref.WeakValueDictionary[str, ClassOptimizer] = weakref.WeakValueDictionary()


def _rebuild(cls: type[torch.optim.Optimizer], hyperparameters: Kwargs, set_by_scheduler: Kwargs) -> ClassOptimizer:
    return ClassOptimizer(cls, hyperparameters, set_by_scheduler)


def eager_only(fn: Callable[..., Any], lost: str = "torch._dynamo.nonstrict_trace") -> Callable[..., Any]:
    """Make fn raise under torch.compile, because torch lacks a private name."""
    message = _upstream.message(lost)

    def eager_fn(*args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(message)
        return fn(*args)

    return eager_fn


@functools.cache
def _nonstrict_functions() -> tuple[Any, Any, Any]:
    """Return `_first_state` and `_step`, which Dynamo puts into a graph without tracing their Python."""
    # Only when an optimizer is used, because importing torch._dynamo takes a second.
    nonstrict_trace = _upstream.find("torch._dynamo.nonstrict_trace", eager_only)
    return nonstrict_trace(_first_state), nonstrict_trace(_step), nonstrict_trace(_evaluated)


def _entries_at(positions: list[int], entries: dict[str, Leaves]) -> list[Entries]:
    """Return the entries of the parameters at some positions, each by name."""
    states: list[Entries] = [{} for _ in positions]
    for name, values in entries.items():
        for state, index in zip(states, positions):
            value = values[index]
            if value is not None:
                state[name] = value
    return states


def _first_state(key: str, params: list[Tensor], hyper: Hyper) -> tuple[list[Entries], Entries]:
    """Return the entries of each parameter before the first step, and those that all share."""
    state = _registry[key]._traits.first_state(params, hyper)
    return state.per_param, state.shared


def _step(
    key: str,
    params: list[Tensor],
    grads: list[Tensor | None],
    states: list[Entries],
    shared: Entries,
    hyper: Hyper,
) -> tuple[list[Tensor], list[Entries], Entries]:
    """Return the parameters, their entries and the shared ones after a step."""
    refuse_differentiation([*params, *[grad for grad in grads if grad is not None]])
    stepped = _registry[key]._traits.step(params, grads, ClassState(states, shared), hyper)
    return stepped.params, stepped.state.per_param, stepped.state.shared


def _evaluated(key: str, params: list[Tensor], states: list[Entries], shared: Entries, hyper: Hyper) -> list[Tensor]:
    """Return the parameters to evaluate with."""
    return _registry[key]._traits.step.evaluated(params, ClassState(states, shared), hyper)
