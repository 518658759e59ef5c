"""torch.optim's optimizers as pure functions with an explicit state."""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._check import Fixed
from funcamp._dtensor import is_distributed
from funcamp._optim.hyperparameters import ANOTHER, evaluate, map_items
from funcamp._optim.number import Comparisons
from funcamp._optim.run import (
    LeafState,
    StepRun,
    narrow_counters,
    refuse_differentiation,
    run_step,
    state_before_first_step,
)
from funcamp._optim.traits import Traits, probe
from funcamp._optim.wrong_arguments import check_class, missing, refuse_positional
from funcamp._storage.params import collapse, expand
from funcamp._types import Tree


class OptState(NamedTuple):
    """An optimizer's state between steps: immutable, a pytree of tensors."""

    applied: Tensor
    """int64, shape (): steps applied so far, the argument of schedules; a skipped step does not advance it."""
    state: dict[str, Tree]
    """torch.optim's entries by its names (exp_avg, step, ...), each a tree like the parameters."""


class StatelessOptimizer(Fixed):
    """A torch.optim class as two pure functions; made by `stateless`.

    Immutable: assigning `lr` raises. Make another one; it continues from any state of this one.
    """

    _instead = ANOTHER

    def __init__(self, cls: type[torch.optim.Optimizer], hyperparameters: dict[str, Any]) -> None:
        self._cls = cls
        self._hyperparameters = hyperparameters
        self._traits: Traits = probe(cls, hyperparameters)
        rate = inspect.signature(cls.__init__).parameters.get("lr")
        self._default_rate = None if rate is None else rate.default
        # Dynamo reuses a graph across closures that differ only in a traced function that they capture (similar to
        # https://github.com/pytorch/pytorch/issues/197811) but guards on strings: hence a name instead of the object.
        self._key = f"{cls.__qualname__}-{next(_serial)}"
        self._first_states, self._step = _nonstrict()
        _registry[self._key] = self

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self._hyperparameters.items())
        return f"stateless({self._cls.__module__}.{self._cls.__qualname__}{given})"

    if not TYPE_CHECKING:  # a type checker refuses unknown names itself

        def __getattr__(self, name: str) -> Any:
            raise missing(self, name) if "_hyperparameters" in vars(self) else AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._cls, self._hyperparameters)

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
        flat, spec = _tree.parameters("init", "params", self._stored(params))
        present = [leaf for leaf in flat if leaf is not None]
        states = iter(self._first_states(self._key, present, self._hyper(None, present)))
        by_leaf: list[LeafState] = [{} if leaf is None else next(states) for leaf in flat]
        names = list(dict.fromkeys(name for state in by_leaf for name in state))
        state = {name: _tree.unflatten([leaf.get(name) for leaf in by_leaf], spec) for name in names}
        device = present[0].device if present else None
        return OptState(applied=torch.zeros((), dtype=torch.int64, device=device), state=state)

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
                hyperparameter in device; opt_state is another optimizer's; torch.func differentiates a leaf.

        Example:
            >>> sgd = stateless(torch.optim.SGD, lr=0.5)
            >>> params, opt_state = {"w": torch.ones(2)}, sgd.init({"w": torch.ones(2)})
            >>> sgd.update(params, {"w": torch.ones(2)}, opt_state)[0]
            {'w': tensor([0.5000, 0.5000])}
        """
        like = params
        params, grads = self._stored(params), self._stored(grads)
        flat, spec = _tree.parameters("update", "params", params)
        flat_grads = self._grads(params, flat, grads)
        by_name = self._states(params, opt_state)
        active = [i for i, (p, g) in enumerate(zip(flat, flat_grads)) if p is not None and g is not None]
        if not active:
            return like, OptState(opt_state.applied + 1, opt_state.state)
        chosen: list[Any] = [flat[i] for i in active]
        states: list[LeafState] = [{} for _ in active]
        for name, column in by_name.items():
            for state, i in zip(states, active):
                if column[i] is not None:
                    state[name] = column[i]
        new_params, new_states = self._step(
            self._key,
            chosen,
            [flat_grads[i] for i in active],
            states,
            self._hyper(opt_state.applied, chosen),
        )
        for i, param, state in zip(active, new_params, new_states):
            flat[i] = param
            for name, value in state.items():
                by_name[name][i] = value
        trees = {name: _tree.unflatten(by_name[name], spec) for name in by_name}
        new = _tree.unflatten(flat, spec)
        return (new if self._traits.elementwise else collapse(like, new)), OptState(opt_state.applied + 1, trees)

    def learning_rate(self, opt_state: OptState) -> Any:
        """Return the learning rate of the next step, a float32 tensor of shape (); `()` if there is none.

        A schedule is evaluated at `opt_state.applied`; a tensor is copied. Pure; no sync. The step's metrics contain
        it.

        Args:
            opt_state: the state from `init` or the last `update`.

        Returns:
            The rate, or `()`.

        Raises:
            Nothing.

        Example:
            >>> sgd = stateless(torch.optim.SGD, lr=lambda applied: 0.5 / (1 + applied))
            >>> sgd.learning_rate(sgd.init({"w": torch.ones(2)}))
            tensor(0.5000)
        """
        value = self._hyperparameters.get("lr", self._default_rate)
        if value is None:
            return ()
        if callable(value):
            value = value(opt_state.applied)
        if isinstance(value, Tensor):
            return value.detach().to(torch.float32, copy=True)
        return torch.full((), value, dtype=torch.float32, device=opt_state.applied.device)

    def _stored(self, tree: Tree) -> Tree:
        return tree if self._traits.elementwise else expand(tree)

    def _grads(self, params: Tree, flat: list[Tensor | None], grads: Tree) -> list[Tensor | None]:
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

    def _states(self, params: Tree, opt_state: OptState) -> dict[str, list[Any]]:
        if not isinstance(opt_state, OptState):
            raise TypeError(f"update: opt_state must be an OptState, as init makes it; got {_tree.brief(opt_state)}")
        if any(leaf is not None for leaf in _tree.leaves(params)):  # a group without parameters has no entries
            self._check_entries(opt_state)
        by_name = {}
        for name, tree in opt_state.state.items():
            _tree.same_structure("update", ("params", f"opt_state.state[{name!r}]"), (params, tree))
            by_name[name] = _tree.leaves(tree)
        return by_name

    def _check_entries(self, opt_state: OptState) -> None:
        expected, found = self._traits.entries, opt_state.state.keys() - {APPLIED}
        # Entries may depend on a parameter's shape in Adafactor, and in classes of other libraries.
        exact = (self._traits.elementwise and self._cls.__module__.startswith("torch.optim.")) or not expected
        if not (found == expected if exact else found <= expected or expected <= found):
            raise ValueError(
                f"update: opt_state must hold the entries that {self!r} keeps, {sorted(expected)}; got "
                f"{sorted(found)}, another's: begin anew with state._replace(opt_state=optimizer.init(params)), "
                "or keep what both have with step.load_state_dict(saved, like=step.init(), strict=False)"
            )

    def _hyper(self, applied: Tensor | None, params: list[Tensor]) -> dict[str, Any]:
        if not self._traits.dynamic or not params:
            return {}
        device = params[0].device
        if applied is None:
            applied = torch.zeros((), dtype=torch.int64, device=device)
        return {name: evaluate(name, self._hyperparameters[name], applied, device) for name in self._traits.dynamic}


def stateless(
    optimizer: type[torch.optim.Optimizer], *positional: NoReturn, **hyperparameters: Any
) -> StatelessOptimizer:
    """Return a torch.optim class as a pure optimizer.

    The result has `init(params) -> opt_state` and `update(params, grads, opt_state) -> (params, opt_state)`. The
    class's own `step` runs on clones, with its state set from opt_state, in eager mode and under torch.compile. It does
    not change the caller's tensors. Counters are tensors on the parameters' device, whatever `capturable` is, so no
    step reads a tensor on the host. No global state of torch is set, so other threads may run optimizers. Creating it
    runs the class on a few numbers to find out how it stores its state.

    Args:
        optimizer: SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, Adafactor, RMSprop, ASGD, Rprop or
            Muon of torch.optim, or another subclass of `torch.optim.Optimizer` whose step needs no closure and never
            reads a tensor's value.
        *positional: nothing; parameters are in the state, and hyperparameters have names.
        **hyperparameters: the class's arguments. A number is a constant of the compiled graph; a tensor of shape () is
            an input of it; a callable is a schedule: a pure function of the count of applied steps, int64, shape (), to
            a tensor of shape () or a number (`schedule` makes them from torch's schedulers). Each item of a tuple
            (betas) may be any of the three. The range of a tensor is not checked. A class (of a wrapper's inner
            optimizer) is a constant. capturable is accepted and not used.

    Returns:
        A `StatelessOptimizer`.

    Raises:
        TypeError: optimizer is not such a class; its step needs a closure, reads the host, or stores state that cannot
            become a value; it does not have a given hyperparameter; a tensor or a schedule is given for what chooses
            the algorithm.
        ValueError: a hyperparameter is outside the class's range, or sets fused, foreach or differentiable.

    Example:
        >>> adamw = stateless(torch.optim.AdamW, lr=lambda count: 1e-3 / (1 + count / 100), weight_decay=0.1)
        >>> params = {"w": torch.ones(2)}
        >>> params, opt_state = adamw.update(params, {"w": torch.ones(2)}, adamw.init(params))
        >>> opt_state.applied
        tensor(1)

    References:
        torch/optim, PyTorch 2.11 to 2.15.
    """
    check_class(optimizer)
    refuse_positional(optimizer, positional)
    return StatelessOptimizer(optimizer, hyperparameters)


#: Steps applied to one parameter: a state entry of funcamp, used if the first step has another formula.
APPLIED = "applied"
#: Number of elements per part of the step that finds an optimizer's first state.
_PART = 1 << 20
_serial = itertools.count()
_registry: weakref.WeakValueDictionary[str, StatelessOptimizer] = weakref.WeakValueDictionary()


def _rebuild(cls: type[torch.optim.Optimizer], hyperparameters: dict[str, Any]) -> StatelessOptimizer:
    return stateless(cls, **hyperparameters)


def eager_only(fn: Callable[..., Any], lost: str = "torch._dynamo.nonstrict_trace") -> Callable[..., Any]:
    """Make fn raise under torch.compile, because torch lacks a private name."""
    message = _upstream.message(lost)

    def called(*args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(message)
        return fn(*args)

    return called


@functools.cache
def _nonstrict() -> tuple[Any, Any]:
    # Only when an optimizer is used, because importing torch._dynamo takes a second.
    nonstrict_trace = _upstream.find("torch._dynamo.nonstrict_trace", eager_only)
    return nonstrict_trace(_first_states), nonstrict_trace(_step)


def _first_states(key: str, params: list[Tensor], hyper: dict[str, Any]) -> list[LeafState]:
    optimizer = _registry[key]
    traits = optimizer._traits
    states = []
    for param in params:
        state: LeafState = {}
        # A step's temporaries are several times its input, so run it part by part if possible.
        cut = param.numel() > _PART and traits.elementwise and param.is_contiguous() and not is_distributed(param)
        parts = torch.split(param.view(-1), _PART) if cut else (param,)
        for number, part in enumerate(parts):
            for name, value in first_state(optimizer, part, hyper).items():
                if len(parts) == 1 or not value.dim():
                    state.setdefault(name, value)
                    continue
                if not number:
                    state[name] = torch.empty_like(param, dtype=value.dtype)
                torch.split(state[name].view(-1), _PART)[number].copy_(value)
        if traits.first_step_differs:
            state[APPLIED] = torch.zeros((), dtype=torch.int64, device=param.device)
        states.append(state)
    return states


def _step(
    key: str,
    params: list[Tensor],
    grads: list[Tensor],
    states: list[LeafState],
    hyper: dict[str, Any],
) -> tuple[list[Tensor], list[LeafState]]:
    optimizer = _registry[key]
    traits = optimizer._traits
    refuse_differentiation((*params, *grads))

    applied = [state[APPLIED] for state in states if traits.first_step_differs]
    states = [{name: value for name, value in state.items() if name != APPLIED} for state in states]

    def step(unused: frozenset[str]) -> _Result:
        later, later_states = advance(optimizer, params, grads, states, states, hyper, unused)
        if not traits.first_step_differs:
            return later, later_states
        if unused:  # no step of the other formula
            for state, count in zip(later_states, applied):
                state[APPLIED] = count
            return later, later_states
        fresh, fresh_states = advance(optimizer, params, grads, None, states, hyper)
        for index, count in enumerate(applied):
            first = count == 0
            later[index] = torch.where(first, fresh[index], later[index])
            for name, value in fresh_states[index].items():
                later_states[index][name] = torch.where(first, value, later_states[index][name])
            later_states[index][APPLIED] = count + 1
        return later, later_states

    return by_branch(optimizer, hyper, step)


#: New parameters and states.
_Result = tuple[list[Tensor], list[LeafState]]


def by_branch(
    optimizer: StatelessOptimizer, hyper: dict[str, Any], step: Callable[[frozenset[str]], _Result]
) -> _Result:
    """Take a step with the formula that the values of the hyperparameters choose, without reading them.

    Args:
        optimizer: the optimizer.
        hyper: its hyperparameters that are tensors.
        step: takes the step, with some hyperparameters, named by their labels, unused.
    """
    values: dict[str, Any] = {}
    for name, value in hyper.items():
        map_items(values.__setitem__, name, value)

    def chosen(labels: tuple[str, ...], unused: frozenset[str]) -> _Result:
        if not labels:
            return step(unused)
        label, rest = labels[0], labels[1:]
        params, states = chosen(rest, unused)
        without, states_without = chosen(rest, unused | {label})
        is_zero = values[label] == 0
        params = [torch.where(is_zero, old, new) for old, new in zip(without, params)]
        for state, state_without in zip(states, states_without):
            for name, value in state_without.items():
                state[name] = torch.where(is_zero, value, state[name])
        return params, states

    return chosen(optimizer._traits.branches, frozenset())


def first_state(optimizer: StatelessOptimizer, param: Tensor, hyper: dict[str, Any]) -> LeafState:
    """Return a parameter's state before the first step."""
    step_run = _run(optimizer, [param], [torch.zeros_like(param)], None, hyper)
    return state_before_first_step(step_run.first_values[0], param, optimizer._traits.starts_at_zero)


def advance(
    optimizer: StatelessOptimizer,
    params: list[Tensor],
    grads: list[Tensor],
    start: list[LeafState] | None,
    like: list[LeafState],
    hyper: dict[str, Any],
    unused: frozenset[str] = frozenset(),
) -> tuple[list[Tensor], list[LeafState]]:
    """Return new parameters and states, with the dtypes of the states `like`; `start` is None for a first step."""
    step_run = _run(optimizer, params, grads, start, hyper, unused)
    new_states = []
    for old_state, new_state, param in zip(like, step_run.states, step_run.params):
        new_states.append(narrow_counters(old_state, new_state, param))
    return step_run.params, new_states


def _run(
    optimizer: StatelessOptimizer,
    params: list[Tensor],
    grads: list[Tensor],
    start: list[LeafState] | None,
    hyper: dict[str, Any],
    unused: frozenset[str] = frozenset(),
) -> StepRun:
    traits = optimizer._traits
    return run_step(
        optimizer._cls,
        traits.arguments,
        hyper,
        params,
        grads,
        start,
        writes_grads=traits.writes_grads,
        comparisons=Comparisons(optimizer._cls.__name__, unused),
    )
