"""A step of a class as a function of tensors: along every path of its Python, from the first step on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcamp._optim.arguments import is_own_refusal
from funcamp._optim.class_state import (
    MISSING,
    ChangedConstantError,
    Changing,
    ClassState,
    Entries,
    Form,
    entries_in,
    entries_of,
)
from funcamp._optim.containers import leaves_of
from funcamp._optim.decisions import Answers, Decisions, TooManyPathsError, along_paths
from funcamp._optim.find_form import find_form
from funcamp._optim.hyperparameters import stand_in
from funcamp._optim.python_names import names_for_numbers
from funcamp._optim.run import StepRun, run_step

#: Steps applied to one parameter: an entry of funcamp's, used if the first step has another formula.
APPLIED_ENTRY = "applied"
#: Which of its forms the state of one parameter has: an entry of funcamp's, if a class adds or removes entries later.
STAGE_ENTRY = "stage"


#: For each parameter its gradient, or None: such a parameter is there, and a class leaves it as it is.
Grads: TypeAlias = Sequence[Tensor | None]


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
    treated_as_nonzero: frozenset[str] = frozenset()
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
        self,
        answers: Answers = (),
        treated_as_zero: frozenset[str] = frozenset(),
        *,
        truthful: bool = False,
        flipped_comparison: int | None = None,
    ) -> Decisions:
        """Return the decisions of a run of the class; arguments as in `Decisions`."""
        return Decisions(
            self.cls.__name__,
            answers,
            self.treated_as_nonzero,
            treated_as_zero,
            asks_divisors=self.asks_divisors,
            truthful=truthful,
            flipped_comparison=flipped_comparison,
        )

    def run(
        self,
        params: list[Tensor],
        grads: Grads,
        state: ClassState | None,
        hyper: dict[str, Any],
        decisions: Decisions,
        form: Form | None = None,
        look: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> StepRun:
        """Take one step along one path; from no state if it is None. A form is that of the state, if it is known."""
        if state is not None and form is None:
            form = self.form(params)
        return run_step(
            self.cls,
            self.arguments,
            hyper,
            params,
            grads,
            state,
            form,
            decisions,
            writes_grads=self.writes_grads,
            wide=self.wide,
            look=look,
        )

    def examples(self, device: str, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the hyperparameters that are tensors, with values; by default those of the arguments."""
        values = {name: self.arguments[name] for name in self.dynamic} if values is None else values
        return {name: stand_in(self.hyperparameters[name], value, device) for name, value in values.items()}

    def form(self, params: list[Tensor]) -> Form:
        """Return how the class stores the state of such parameters."""
        key = tuple((param.shape, param.dtype) for param in params)
        if key not in self._forms:
            self._forms[key] = find_form(self, params)
        return self._forms[key]

    def evaluated(self, params: list[Tensor], state: ClassState, hyper: dict[str, Any]) -> list[Tensor]:
        """Return the parameters to evaluate with: those that the class's `eval` sets."""
        form = self.form(params)
        own_state = _without_ours(state)

        def at_stage(stage: int) -> Stepped:
            def run(decisions: Decisions) -> Stepped:
                step_run = run_step(
                    self.cls,
                    self.arguments,
                    hyper,
                    params,
                    params,
                    own_state,
                    form.at(stage),
                    decisions,
                    wide=self.wide,
                    method="eval",
                )
                return Stepped(step_run.params, own_state)

            return along_paths(run, _select_stepped, self.decisions)

        return _selected_by_stage(at_stage, form, state).params

    def begins_otherwise(self, params: list[Tensor]) -> bool:
        """Return whether the first step of such parameters is, or may be, another formula than later ones."""
        if self.first_step_differs or not self.known_beginnings:
            return self.first_step_differs
        kinds = {(param.shape, param.dtype): param for param in params}
        return any(self.form([param]).operations not in self.known_beginnings for param in kinds.values())

    def is_separable(self, params: list[Tensor]) -> bool:
        """Return whether the step of each parameter depends on no other. A class may treat some shapes together."""
        return self.separable and self.form(params).is_separable

    def __call__(self, params: list[Tensor], grads: Grads, state: ClassState, hyper: dict[str, Any]) -> Stepped:
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
        new_params, new_leaves, shared = list(params), list(state.leaves), state.shared
        with names_for_numbers(self.cls, None):  # once for all
            for index, grad in enumerate(grads):
                alone = self._step([params[index]], [grad], ClassState([state.leaves[index]], state.shared), hyper)
                new_params[index], new_leaves[index] = alone.params[0], alone.state.leaves[0]
                shared = alone.state.shared  # it comes to the same for each
        return Stepped(new_params, ClassState(new_leaves, shared))

    def _step(self, params: list[Tensor], grads: Grads, state: ClassState, hyper: dict[str, Any]) -> Stepped:
        """Take one step; the first one and a later one, selected by the counts of applied steps, if they differ."""
        own_state = _without_ours(state)
        self._check_entries(params, own_state)

        def at_stage(stage: int) -> Stepped:
            return self.along_paths(params, grads, own_state, own_state, hyper, stage)

        later = _selected_by_stage(at_stage, self.form(params), state)
        if not any(APPLIED_ENTRY in entries for entries in (*state.leaves, state.shared)):
            return later
        first = self.along_paths(params, grads, None, own_state, hyper)
        shared = later.state.shared
        if APPLIED_ENTRY in state.shared:
            # A parameter may get its first gradient when the others have taken steps.
            group_count = state.shared[APPLIED_ENTRY]
            late_state = ClassState([{} for _ in params], own_state.shared)
            try:
                late = self.along_paths(params, grads, late_state, own_state, hyper)
            except Exception as error:
                if is_own_refusal(error):
                    raise
                late = first  # it has nothing for a parameter that begins late, or begins all at once
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
        expected_of_leaves = [form.leaf_entries(index) for index in range(len(params))]
        for expected, entries in zip([*expected_of_leaves, entries_in(form.shared)], [*state.leaves, state.shared]):
            if expected.keys() != entries.keys():
                raise ValueError(
                    f"update: opt_state must hold the entries that {self.cls.__name__} keeps, {sorted(expected)}; got "
                    f"{sorted(entries)}, another's: begin anew with "
                    "state._replace(opt_state=optimizer.init(state.params))"
                )

    def along_paths(
        self,
        params: list[Tensor],
        grads: Grads,
        state: ClassState | None,
        like: ClassState,
        hyper: dict[str, Any],
        stage: int = 0,
    ) -> Stepped:
        """Take one step along every path, and select.

        Args:
            params: the parameters.
            grads: their gradients.
            state: the state before; None for a first step, from no state. A parameter without entries takes its first
                step.
            like: the state whose entries a step keeps that does not set them.
            hyper: the hyperparameters that are tensors.
            stage: which of its forms the state has.
        """
        form = self.form(params)

        def run(decisions: Decisions) -> Stepped:
            step_run = self.run(params, grads, state, hyper, decisions, form.at(stage))
            return self.stepped(step_run, form, grads, state, like)

        return along_paths(run, _select_stepped, self.decisions)

    def stepped(
        self, step_run: StepRun, form: Form, grads: Grads, state: ClassState | None, like: ClassState
    ) -> Stepped:
        """Return the results of a run as tensors; of a first step also whether it has begun a parameter's state."""
        params = step_run.params
        leaves: list[Entries] = []
        begun: list[Tensor] = []
        try:
            for index, (held, param) in enumerate(zip(step_run.held.leaves, params)):
                is_first = state is None or not state.leaves[index]
                if is_first and grads[index] is None and not held:  # it has not begun
                    leaves.append(dict(like.leaves[index]))
                    begun.append(torch.zeros((), dtype=torch.int64, device=param.device))
                    continue
                stage = _stage_of(held, form.stages(index))
                leaf_form = form.stages(index)[stage]
                entries = entries_of(held, leaf_form, param, like.leaves[index], is_first=is_first)
                if form.later_leaves:
                    entries = like.leaves[index] | entries
                    entries[STAGE_ENTRY] = torch.full((), stage, dtype=torch.int64, device=param.device)
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


def _without_ours(state: ClassState) -> ClassState:
    """Return the entries of the class, without those of funcamp."""

    def own(entries: Entries) -> Entries:
        return {name: value for name, value in entries.items() if name not in (APPLIED_ENTRY, STAGE_ENTRY)}

    return ClassState(list(map(own, state.leaves)), own(state.shared))


def _stage_of(held: Mapping[str, Any], stages: list[dict[str, Any]]) -> int:
    """Return the number of the form whose entries and constants a parameter's state has; 0 if it has that of none."""
    names = leaves_of(held).keys()
    return next((number for number, form in enumerate(stages) if leaves_of(form).keys() == names), 0)


def _selected_by_stage(at_stage: Callable[[int], Stepped], form: Form, state: ClassState) -> Stepped:
    """Return the results of a step for each parameter from the form that its state has.

    What all share is that of the first parameter: the others have the same form, but for late gradients.
    """
    stepped = at_stage(0)
    for stage in range(1, form.stage_count):
        other = at_stage(stage)
        chosen = [entries[STAGE_ENTRY] == stage for entries in state.leaves]
        params = [_select(*all_three) for all_three in zip(chosen, other.params, stepped.params)]
        leaves = [_select_entries(*all_three) for all_three in zip(chosen, other.state.leaves, stepped.state.leaves)]
        shared = _select_entries(chosen[0], other.state.shared, stepped.state.shared)
        stepped = Stepped(params, ClassState(leaves, shared))
    return stepped


def _select_stepped(condition: Tensor, one: Stepped, other: Stepped) -> Stepped:
    """Return the results of one path where a condition is true, else the other's."""
    leaves = [_select_entries(condition, *both) for both in zip(one.state.leaves, other.state.leaves)]
    params = [_select(condition, *both) for both in zip(one.params, other.params)]
    shared = _select_entries(condition, one.state.shared, other.state.shared)
    begun = tuple([_select(condition, *both) for both in zip(one.begun, other.begun)])
    return Stepped(params, ClassState(leaves, shared), begun)


def _select(condition: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return one where a condition is true, else the other.

    Raises:
        TypeError: they are tensors of other shapes or dtypes; a number may be of any dtype.
    """
    if one is other:
        return one
    if one.dim() and other.dim() and (one.shape != other.shape or one.dtype != other.dtype):
        raise TypeError(
            "stateless: the class cannot be made pure: on one path of its step a tensor of its state is of "
            f"{one.dtype} and shape {tuple(one.shape)}, on another of {other.dtype} and shape {tuple(other.shape)}; "
            "keep one shape and dtype, or use it in an ordinary loop with funcamp.GradScaler"
        )
    return torch.where(condition, one, other.to(one.dtype))


def _select_entries(condition: Tensor, one: Entries, other: Entries) -> Entries:
    """Return the entries of one where a condition is true, else the other's; an entry that only one has, as it is."""
    both = {name: _select(condition, value, other[name]) for name, value in one.items() if name in other}
    return {**other, **one, **both}


def nothing(params: list[Tensor]) -> ClassState:
    """Return the state of a class before its first step."""
    return ClassState([{} for _ in params], {})
