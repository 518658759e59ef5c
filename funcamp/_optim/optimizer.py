"""An optimizer as two pure functions of trees, and its state."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._check import Fixed
from funcamp._optim.arguments import check_hyperparameters, constructor_arguments
from funcamp._optim.hyperparameters import ANOTHER, Hyper, evaluate, is_dynamic
from funcamp._optim.modes import without_modes
from funcamp._optim.torch_optim.rule import State
from funcamp._storage.params import Params, collapse, expand
from funcamp._types import Kwargs, Tree

#: The leaves of a tree of tensors, from left to right.
Leaves: TypeAlias = "list[Tensor | None]"


class OptState(NamedTuple):
    """An optimizer's state between steps: immutable, a pytree of tensors."""

    applied: Tensor
    """int64, shape (): steps applied so far, the argument of schedules; a skipped step does not advance it."""
    state: dict[str, Tree]
    """torch.optim's entries by its names (exp_avg, step, ...), each a tree like the parameters."""
    shared: State = {}  # noqa: RUF012  a tuple's default, which nothing writes into
    """What a class of another package keeps for all parameters: entries of its group by their names, and of attributes
    as "self.name"."""


class Inputs(NamedTuple):
    """What a step of some parameters begins with."""

    params: list[Tensor]
    grads: list[Any]
    """A tensor for each parameter, or None if the class takes steps without one."""
    states: list[State]
    """The entries of each parameter, and last those that all share."""
    applied: Tensor
    hyper: Hyper


class Stepped(NamedTuple):
    """The results of a step of some parameters."""

    params: list[Tensor]
    states: list[State]
    """The entries of each parameter, and last those that all share."""


class StatelessOptimizer(Fixed):
    """A class of torch.optim.Optimizer as two pure functions of trees; made by `stateless`.

    Immutable: assigning `lr` raises. Make another one; it continues from any state of this one. What the class does
    with tensors is in two subclasses: `torch_optim/optimizer.py` and `foreign/optimizer.py`.
    """

    cls: type[torch.optim.Optimizer]
    dynamic: list[str]
    """The names of hyperparameters that are tensors or schedules."""
    arguments: Kwargs
    """What the class's constructor gets: numbers in place of tensors and schedules."""

    _instead = ANOTHER
    _takes_groups: bool
    """Whether a stored group is stepped as one tensor."""
    _needs_gradient: bool
    """Whether a parameter takes no step without one; a class may count then."""

    def __init__(self, cls: type[torch.optim.Optimizer], hyperparameters: Kwargs) -> None:
        self.cls = cls
        self._hyperparameters = hyperparameters
        self.dynamic = [name for name, value in hyperparameters.items() if is_dynamic(value)]
        signature = inspect.signature(cls).parameters
        self._default_lr = signature["lr"].default if "lr" in signature else None
        check_hyperparameters(cls, hyperparameters, signature)
        self.arguments = constructor_arguments(hyperparameters, signature)
        with without_modes():
            self._prepare()

    @property
    def hyperparameters(self) -> MappingProxyType[str, Any]:
        """Return what the user gave, read only."""
        return MappingProxyType(self._hyperparameters)

    def python_parts(self) -> dict[str, object]:
        """Return the functions that the user gave, such as a learning rate's, by name."""
        dynamic = {name: self._hyperparameters[name] for name in self.dynamic}
        return {name: value for name, value in dynamic.items() if not isinstance(value, Tensor)}

    def __repr__(self) -> str:
        arguments = "".join(f", {name}={value!r}" for name, value in self._hyperparameters.items())
        storage = "flat" if self._takes_groups else "per tensor"
        return f"stateless({self.cls.__module__}.{self.cls.__qualname__}{arguments}) [{storage}]"

    if not TYPE_CHECKING:  # a type checker refuses unknown names itself

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"an optimizer of funcamp has no {name!r}: it is no torch.optim.Optimizer; call update, and "
                "funcamp.schedule for a scheduler of torch"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.cls, self._hyperparameters)

    def init(self, params: Tree) -> OptState:
        """Return the optimizer's state before the first step.

        Pure; nothing is lazy; no sync.

        Args:
            params: a pytree of floating-point or complex tensors; None passes through. `Params` are updated group
                by group if the class is elementwise, otherwise view by view.

        Returns:
            An `OptState`, `applied` 0.

        Raises:
            TypeError: a leaf is an integer tensor, is sparse, or is neither a tensor nor None; or is complex, and the
                class takes no complex parameters.

        Example:
            >>> stateless(torch.optim.AdamW).init({"w": torch.ones(2)}).state["exp_avg"]
            {'w': tensor([0., 0.])}
        """
        flat, spec = _tree.parameters("init", "params", self._taken(params))
        present = [leaf.detach() for leaf in flat if leaf is not None]
        applied = torch.zeros((), dtype=torch.int64, device=present[0].device if present else None)
        states, shared = [], {}
        if present:
            with torch.no_grad():
                *states, shared = self._first(present, self.hyper(applied))
        states_left = iter(states)
        states = [{} if leaf is None else next(states_left) for leaf in flat]
        return OptState(applied, _by_name(states, spec), shared)

    def update(self, params: Tree, grads: Tree, opt_state: OptState) -> tuple[Tree, OptState]:
        """Apply torch.optim's update rule as a pure function.

        Schedules are evaluated at `opt_state.applied`, which is 0 at the first step. Pure; safe under torch.compile and
        vmap, but vmap returns no state that contains None, as Adafactor's and `by_group`'s do; no sync. As in
        torch.optim, no gradient flows through it; under torch.func.grad it raises ValueError.

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
        # What takes a step: the leaves of the trees that have a gradient.
        stored_params = params
        params, grads = self._taken(params), self._taken(grads)
        flat, spec = _tree.parameters("update", "params", params)
        flat_grads = _flat_grads(params, flat, grads)
        states = self._states(params, flat, opt_state)
        positions = self._positions(flat, flat_grads)
        if not positions:
            return stored_params, opt_state._replace(applied=opt_state.applied + 1)

        with torch.no_grad():
            inputs = self._inputs(positions, flat, flat_grads, states, opt_state)
            refuse_differentiation([*inputs.params, *inputs.grads])
            stepped = self._stepped(inputs)

        # The trees again. The other leaves are as they were.
        *new_states, shared = stepped.states
        for index, new_param, new_state in zip(positions, stepped.params, new_states):
            flat[index], states[index] = new_param, states[index] | new_state
        new_params = _tree.unflatten(flat, spec)
        if not self._takes_groups:
            new_params = collapse(stored_params, new_params)
        return new_params, OptState(opt_state.applied + 1, _by_name(states, spec), shared)

    def learning_rate(self, opt_state: OptState) -> Tree:
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
        rate = self._hyperparameters.get("lr", self._default_lr)
        if rate is None:
            return ()
        if callable(rate):
            rate = rate(opt_state.applied)
        if isinstance(rate, Tensor):
            return rate.detach().to(torch.float32, copy=True)
        return torch.full((), rate, dtype=torch.float32, device=opt_state.applied.device)

    def evaluation_params(self, params: Tree, opt_state: OptState) -> Tree:  # noqa: ARG002  what a subclass needs
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
        return params

    # What the class does with tensors.

    def _prepare(self) -> None:
        """Find how the class steps; raise TypeError or ValueError if it cannot be used, or not with its arguments."""
        raise NotImplementedError

    def _first(self, params: list[Tensor], hyper: Hyper) -> list[State]:
        """Return the state of each parameter before the first step, and last what all share."""
        raise NotImplementedError

    def _stepped(self, inputs: Inputs) -> Stepped:
        """Return the parameters and their states after a step, and last what all share."""
        raise NotImplementedError

    # Trees.

    def _taken(self, tree: Tree) -> Tree:
        """Return the tensors that the class steps: stored groups, or the parameters in them."""
        return tree if self._takes_groups else expand(tree)

    def _states(self, params: Tree, flat: Leaves, opt_state: OptState) -> list[State]:
        """Return the entries of every leaf of the parameters by name; none for None.

        Raises:
            TypeError: opt_state is not an `OptState`.
            ValueError: it is another optimizer's, or of other parameters.
        """
        if not isinstance(opt_state, OptState):
            raise TypeError(f"update: opt_state must be an OptState, as init makes it; got {_tree.brief(opt_state)}")
        states: list[State] = [{} for _ in flat]
        for name, tree in opt_state.state.items():
            is_stored = isinstance(params, Params) and isinstance(tree, Params)
            if is_stored and params.layout is not tree.layout:
                raise ValueError(
                    f"update: params must be stored in the groups of opt_state; got {params!r} and, in opt_state, "
                    f"{tree!r}: store other values by state.params.ravel(tree), and for other groups or another "
                    "init(flat=) begin anew with step.init(tree)"
                )
            _tree.same_structure("update", ("params", f"opt_state.state[{name!r}]"), (params, tree))
            for state, value in zip(states, _tree.leaves(tree)):
                if value is not None:
                    state[name] = value
        return states

    def _check_entries(self, expected: set[str], entries: dict[str, Any]) -> None:
        """Raise ValueError for a state with other entries, which another optimizer made."""
        if entries.keys() != expected:
            raise ValueError(
                f"update: opt_state must hold the entries that {self!r} keeps, {sorted(expected)}; got "
                f"{sorted(entries)}, another's: begin anew with state._replace(opt_state=optimizer.init(params))"
            )

    def _positions(self, flat: Leaves, flat_grads: Leaves) -> list[int]:
        """Return the positions of the parameters that take a step."""
        deciding = flat_grads if self._needs_gradient else flat
        return [index for index, leaf in enumerate(deciding) if leaf is not None]

    def _inputs(
        self, positions: list[int], flat: Leaves, flat_grads: Leaves, states: list[State], opt_state: OptState
    ) -> Inputs:
        """Return what a step of the parameters at some positions begins with."""
        params: list[Any] = [flat[index] for index in positions]
        grads = [flat_grads[index] for index in positions]
        states = [*[states[index] for index in positions], opt_state.shared]
        return Inputs(params, grads, states, opt_state.applied, self.hyper(opt_state.applied))

    def hyper(self, applied: Tensor) -> Hyper:
        """Return the hyperparameters that are tensors and schedules, after some applied steps."""
        return {name: evaluate(name, self._hyperparameters[name], applied) for name in self.dynamic}


def _by_name(states: list[State], spec: _tree.TreeSpec) -> dict[str, Tree]:
    """Return the entries of leaves as a tree for each name."""
    names: dict[str, None] = {}
    for state in states:
        names |= dict.fromkeys(state)
    return {name: _tree.unflatten([state.get(name) for state in states], spec) for name in names}


def _flat_grads(params: Tree, flat: Leaves, grads: Tree) -> Leaves:
    """Return the gradients of the parameters, which are checked.

    Raises:
        TypeError: a gradient is not floating point or complex.
        ValueError: the trees differ in structure, or a gradient in shape or device from its parameter.
    """
    _tree.same_structure("update", ("params", "grads"), (params, grads))
    flat_grads, _ = _tree.parameters("update", "grads", grads)
    for index, (param, grad) in enumerate(zip(flat, flat_grads)):
        if grad is not None and (param is None or grad.shape != param.shape or grad.device != param.device):
            raise ValueError(
                f"update: grads{_tree.path_of(grads, index)} must have its parameter's shape and device; "
                f"got {_tree.describe(grad)} for {_tree.describe(param)}"
            )
    return flat_grads


def refuse_differentiation(tensors: Iterable[Tensor | None]) -> None:
    """Raise ValueError if torch.func differentiates a tensor: the gradient would silently be zero."""
    if torch.compiler.is_dynamo_compiling():
        return
    for tensor in tensors:
        inner = tensor
        while inner is not None and _upstream.is_wrapped(inner):
            if _upstream.is_differentiated(inner):
                raise ValueError(
                    "update: params and grads must not be differentiated, as no gradient flows through a torch.optim "
                    f"step; detach them, or write the inner update by hand; got {type(tensor).__name__} under "
                    "torch.func.grad, vjp or jacrev"
                )
            inner = _upstream.unwrapped(inner)
