"""A step of a class as a function of tensors: along every path of its Python, from the first step on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp._optim.class_state import (
    MISSING,
    ChangedConstantError,
    Changing,
    ClassState,
    Entries,
    Form,
    entries_in,
    entries_of,
    form_of,
    leaves_of,
)
from funcamp._optim.dataflow import followed
from funcamp._optim.decisions import Decisions, TooManyPathsError, along_paths, every_path
from funcamp._optim.hyperparameters import stand_in
from funcamp._optim.modes import without_modes
from funcamp._optim.python_names import names_for_numbers
from funcamp._optim.run import StepRun, run_step

#: Steps applied to one parameter: an entry of funcamp's, used if the first step has another formula.
APPLIED_ENTRY = "applied"


class Stepped(NamedTuple):
    """The results of a step."""

    params: list[Tensor]
    state: ClassState
    begun: tuple[Tensor, ...] = ()
    """For each parameter whether a first step has begun its state: 1 or 0; () after a later one."""


@dataclass(frozen=True)
class ClassStep:
    """A class with its arguments, as functions of tensors."""

    cls: type[torch.optim.Optimizer]
    hyperparameters: Mapping[str, Any]
    """Those that the user gave, without the values of tensors and schedules."""
    arguments: dict[str, Any]
    """Python values for its constructor; an example if the hyperparameter is a tensor or a schedule."""
    dynamic: tuple[str, ...]
    """Names of the hyperparameters that are tensors or schedules."""
    changing: Changing
    """Its numbers that change from step to step."""
    in_use: frozenset[str] = frozenset()
    """Labels of hyperparameters whose comparison with 0 is no question (`Decisions`)."""
    asks_divisors: bool = False
    """Whether it catches `ZeroDivisionError` (`Decisions`)."""
    first_step_differs: bool = False
    """Whether its first step uses another formula than later ones (SGD with momentum and dampening)."""
    known_beginnings: frozenset[tuple[object, ...]] = frozenset()
    """The operations of first steps in the trial of the class. A parameter with others begins as if its first step
    differed, because a class may begin large ones otherwise. Empty in the trial."""
    separable: bool = False
    """Whether the step of each parameter depends on no other, besides what all share, which depends on none."""
    separate: bool = False
    """Whether each parameter asks questions of its own, and so steps alone: all together have too many paths."""
    writes_grads: bool = True
    """Whether it writes into gradients (Muon does)."""
    wide: bool = True
    """Whether step counters are float64 inside, on a CPU."""
    _forms: dict[Any, Form] = field(default_factory=dict, compare=False)

    def decisions(
        self, answers: tuple[bool, ...] = (), zeros: frozenset[str] = frozenset(), *, truthful: bool = False
    ) -> Decisions:
        """Return what a run is told."""
        return Decisions(
            self.cls.__name__, answers, self.in_use, zeros, asks_divisors=self.asks_divisors, truthful=truthful
        )

    def run(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        state: ClassState | None,
        hyper: dict[str, Any],
        decisions: Decisions,
    ) -> StepRun:
        """Take one step along one path; from no state if it is None."""
        return run_step(
            self.cls,
            self.arguments,
            hyper,
            params,
            grads,
            state,
            None if state is None else self.form(params),
            decisions,
            writes_grads=self.writes_grads,
            wide=self.wide,
        )

    def examples(self, device: str, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the hyperparameters that are tensors, with values; by default those of the arguments."""
        values = {name: self.arguments[name] for name in self.dynamic} if values is None else values
        return {name: stand_in(self.hyperparameters[name], value, device) for name, value in values.items()}

    def form(self, params: list[Tensor]) -> Form:
        """Return how the class stores the state of such parameters, from a first step on tensors without values."""
        key = tuple((param.shape, param.dtype) for param in params)
        if key not in self._forms:
            hyper = self.examples("meta")
            with without_modes():
                empty = [torch.zeros(param.shape, dtype=param.dtype, device="meta") for param in params]
                flow, step_run = followed(
                    [[param] for param in empty], lambda: self.run(empty, empty, None, hyper, self.decisions())
                )
            operations = tuple(operation[0] for operation in flow.operations)
            form = form_of(step_run.held, step_run.first, self.changing)._replace(operations=operations)
            for number, (param, leaf) in enumerate(zip(step_run.params, step_run.held.leaves)):
                tensors = [param, *[value for value in leaves_of(leaf).values() if isinstance(value, Tensor)]]
                if any(flow.sources(tensor) - {number} for tensor in tensors):
                    form = form._replace(is_separable=False)
            if self.changing.shared_names - form.shared.keys():
                form = self._with_entries_of_other_paths(form, empty)
            self._forms[key] = form
        return self._forms[key]

    def _with_entries_of_other_paths(self, form: Form, empty: list[Tensor]) -> Form:
        """Return a form with what all parameters share that only other paths of a first step set."""

        def run(decisions: Decisions) -> Form:
            step_run = self.run(empty, empty, None, self.examples("meta"), decisions)
            return form_of(step_run.held, step_run.first, self.changing)

        shared = dict(form.shared)
        with without_modes():
            for other in every_path(run, self.decisions).values():
                shared = other.shared | shared
        return form._replace(shared=shared)

    def evaluated(self, params: list[Tensor], state: ClassState, hyper: dict[str, Any]) -> list[Tensor]:
        """Return the parameters to evaluate with: those that the class's `eval` sets."""
        form = self.form(params)
        state = ClassState(list(map(_own, state.leaves)), _own(state.shared))

        def run(decisions: Decisions) -> Stepped:
            evaluated = run_step(
                self.cls, self.arguments, hyper, params, params, state, form, decisions, wide=self.wide, method="eval"
            )
            return Stepped(evaluated.params, ClassState([], {}))

        return along_paths(run, _select_stepped, self.decisions).params

    def begins_otherwise(self, params: list[Tensor]) -> bool:
        """Return whether the first step of such parameters is, or may be, another formula than later ones."""
        if self.first_step_differs or not self.known_beginnings:
            return self.first_step_differs
        kinds = {(param.shape, param.dtype): param for param in params}
        return any(self.form([param]).operations not in self.known_beginnings for param in kinds.values())

    def is_separable(self, params: list[Tensor]) -> bool:
        """Return whether the step of each parameter depends on no other. A class may treat some shapes together."""
        return self.separable and self.form(params).is_separable

    def __call__(self, params: list[Tensor], grads: list[Tensor], state: ClassState, hyper: dict[str, Any]) -> Stepped:
        """Take one step of all parameters.

        Args:
            params: the parameters.
            grads: their gradients.
            state: the state, as `first_state` gives it or the last step.
            hyper: the hyperparameters that are tensors.

        Raises:
            TypeError: there are too many paths, or what the class keeps changes in another way than in its trial.
        """
        if not (self.separate and self.is_separable(params)):
            try:
                return self._step(params, grads, state, hyper)
            except TooManyPathsError:
                if not self.is_separable(params):
                    raise
        with names_for_numbers(self.cls, None):  # once for all
            stepped = [
                self._step([param], [grad], ClassState([leaf], state.shared), hyper)
                for param, grad, leaf in zip(params, grads, state.leaves)
            ]
        new_leaves = [one.state.leaves[0] for one in stepped]
        # What all share comes to the same for each.
        return Stepped([one.params[0] for one in stepped], ClassState(new_leaves, stepped[0].state.shared))

    def _step(self, params: list[Tensor], grads: list[Tensor], state: ClassState, hyper: dict[str, Any]) -> Stepped:
        """Take one step; the first one and a later one, selected by the counts of applied steps, if they differ."""
        own_state = ClassState(list(map(_own, state.leaves)), _own(state.shared))
        self._check_entries(params, own_state)
        later = self._along_paths(params, grads, own_state, own_state, hyper)
        if not any(APPLIED_ENTRY in entries for entries in (*state.leaves, state.shared)):
            return later
        first = self._along_paths(params, grads, None, own_state, hyper)
        shared = later.state.shared
        if APPLIED_ENTRY in state.shared:
            # A parameter may get its first gradient when the others have taken steps.
            group_count = state.shared[APPLIED_ENTRY]
            late_state = ClassState([{} for _ in params], own_state.shared)
            try:
                late = self._along_paths(params, grads, late_state, own_state, hyper)
            except (AttributeError, LookupError):  # so it does in its own loop: it has nothing for one that comes late
                late = first
            shared = _select_entries(group_count == 0, first.state.shared, shared)
            shared = shared | {APPLIED_ENTRY: group_count + 1}
            first = _select_stepped(group_count == 0, first, late)
        new_params: list[Tensor] = []
        new_leaves: list[Entries] = []
        for index, former in enumerate(state.leaves):
            new_param, leaf = later.params[index], later.state.leaves[index]
            if APPLIED_ENTRY in former:
                count = former[APPLIED_ENTRY]
                is_first = count == 0
                new_param = _select(is_first, first.params[index], new_param)
                leaf = _select_entries(is_first, first.state.leaves[index], leaf)
                # One with momentum 0 leaves the first step of SGD's momentum to come.
                leaf[APPLIED_ENTRY] = torch.where(is_first, first.begun[index], count + 1)
            new_params.append(new_param)
            new_leaves.append(leaf)
        return Stepped(new_params, ClassState(new_leaves, shared))

    def _check_entries(self, params: list[Tensor], state: ClassState) -> None:
        """Raise ValueError if a state is another optimizer's."""
        form = self.form(params)
        for entries_form, entries in zip([*form.leaves, form.shared], [*state.leaves, state.shared]):
            expected = entries_in(entries_form).keys()
            if expected != entries.keys():
                raise ValueError(
                    f"update: opt_state must hold the entries that {self.cls.__name__} keeps, {sorted(expected)}; got "
                    f"{sorted(entries)}, another's: begin anew with "
                    "state._replace(opt_state=optimizer.init(state.params))"
                )

    def _along_paths(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        state: ClassState | None,
        like: ClassState,
        hyper: dict[str, Any],
    ) -> Stepped:
        """Take one step along every path, and select.

        Args:
            params: the parameters.
            grads: their gradients.
            state: the state before; None for a first step, from no state. A parameter without entries takes its first
                step.
            like: the state whose entries a step keeps that does not set them.
            hyper: the hyperparameters that are tensors.
        """
        form = self.form(params)

        def run(decisions: Decisions) -> Stepped:
            step_run = self.run(params, grads, state, hyper, decisions)
            return self._stepped(step_run, form, params, state, like)

        return along_paths(run, _select_stepped, self.decisions)

    def _stepped(
        self, step_run: StepRun, form: Form, params: list[Tensor], state: ClassState | None, like: ClassState
    ) -> Stepped:
        """Return the results of a run as tensors; of a first step also whether it has begun a parameter's state."""
        leaves: list[Entries] = []
        begun: list[Tensor] = []
        try:
            for index, (held, leaf_form, param) in enumerate(zip(step_run.held.leaves, form.leaves, params)):
                is_first = state is None or not state.leaves[index]
                entries = entries_of(held, leaf_form, param, like.leaves[index], is_first=is_first)
                if is_first:
                    has_begun = entries_in(leaf_form).keys() <= leaves_of(held).keys()
                    begun.append(torch.full((), int(has_begun), dtype=torch.int64, device=param.device))
                leaves.append(entries)
            if state is not None:
                for name, (before, after) in step_run.changed.items():
                    raise ChangedConstantError(name, MISSING if before is None else before, after, is_shared=True)
            shared_held = {name: value for name, value in step_run.held.shared.items() if name in form.shared}
            shared = entries_of(shared_held, form.shared, params[0], like.shared, is_first=state is None)
        except ChangedConstantError as error:
            raise TypeError(f"stateless: {self.cls.__name__} cannot be made pure: {error}") from error
        return Stepped(step_run.params, ClassState(leaves, shared), tuple(begun))


def _own(entries: Entries) -> Entries:
    """Return the entries of the class, without the count of funcamp."""
    return {name: value for name, value in entries.items() if name != APPLIED_ENTRY}


def _select_stepped(condition: Tensor, one: Stepped, other: Stepped) -> Stepped:
    """Return the results of one path where a condition is true, else the other's."""
    leaves = [_select_entries(condition, *both) for both in zip(one.state.leaves, other.state.leaves)]
    params = [_select(condition, *both) for both in zip(one.params, other.params)]
    shared = _select_entries(condition, one.state.shared, other.state.shared)
    begun = tuple([_select(condition, *both) for both in zip(one.begun, other.begun)])
    return Stepped(params, ClassState(leaves, shared), begun)


def _select(condition: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return one where a condition is true, else the other."""
    return one if one is other else torch.where(condition, one, other.to(one.dtype))


def _select_entries(condition: Tensor, one: Entries, other: Entries) -> Entries:
    """Return the entries of one where a condition is true, else the other's; an entry that only one has, as it is."""
    both = {name: _select(condition, value, other[name]) for name, value in one.items() if name in other}
    return {**other, **one, **both}


def nothing(params: list[Tensor]) -> ClassState:
    """Return the state of a class before its first step."""
    return ClassState([{} for _ in params], {})
