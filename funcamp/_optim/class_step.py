"""A step of a class as a function of tensors: along every path of its Python, from the first step on."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcamp._optim.arguments import is_own_refusal, is_torchs
from funcamp._optim.class_state import (
    ChangedConstantError,
    Changing,
    ClassState,
    Entries,
    Form,
    entries_in,
    entries_of,
)
from funcamp._optim.containers import leaves_of
from funcamp._optim.decisions import Answers, Decisions, Instruction, TooManyPathsError, along_paths
from funcamp._optim.find_form import find_form
from funcamp._optim.hyperparameters import Hyper, is_start_known, stand_in
from funcamp._optim.instance_state import MISSING, Contents
from funcamp._optim.modes import without_modes
from funcamp._optim.positions import ignores_positions
from funcamp._optim.python_names import names_for_numbers
from funcamp._optim.run import StepRun, run_step
from funcamp._optim.torch_optim.sgd import APPLIED_ENTRY
from funcamp._types import Kwargs

#: Steps applied to one parameter: an entry of funcamp's, used if the first step has another formula.
#: Which of its forms the state of one parameter has: an entry of funcamp's, if a class adds or removes entries later.
STAGE_ENTRY = "funcamp_stage"


#: For each parameter its gradient, or None: the class sees such a parameter, and does not change it.
Grads: TypeAlias = Sequence[Tensor | None]
#: The shapes and dtypes of parameters, which decide how a class stores their state.
_Kinds: TypeAlias = tuple[tuple[tuple[int, ...], torch.dtype], ...]


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
    hyperparameters: Mapping[str, object]
    """Those that the user gave, without the values of tensors and schedules."""
    arguments: Kwargs
    """Python values for its constructor; an example if the hyperparameter is a tensor or a schedule."""
    dynamic: tuple[str, ...]
    """Names of the hyperparameters that are tensors or schedules."""
    changing: Changing
    """Its numbers that change from step to step."""
    set_by_scheduler: Mapping[str, object] = field(default_factory=dict)
    """What a scheduler has added to its parameter group, such as `initial_lr`."""
    treated_as_nonzero: frozenset[str] = frozenset()
    """Labels of hyperparameters whose comparison with 0 is no question (`Decisions`)."""
    asks_divisors: bool = False
    """Whether it catches `ZeroDivisionError` (`Decisions`)."""
    first_step_differs: bool = False
    """Whether its first step uses another formula than later ones (SGD with momentum and dampening)."""
    known_first_operations: set[tuple[object, ...]] = field(default_factory=set)
    """The operations of first steps in the trials of the class, one for each dtype. A parameter with others begins as
    if its first step differed, because a class may begin large ones otherwise. Empty in the trial."""
    separable: bool = False
    """Whether the step of each parameter depends only on it and on what all share, which depends on no parameter."""
    steps_separately: bool = False
    """Whether each parameter asks separate questions, and so steps separately: together they have too many paths."""
    writes_grads: bool = True
    """Whether it writes into gradients (Muon does)."""
    wide_counters: bool = True
    """Whether step counters are float64 inside, on a CPU."""
    _forms: dict[_Kinds, Form] = field(default_factory=dict, compare=False)
    _ignoring_positions: dict[_Kinds, bool] = field(default_factory=dict, compare=False)

    @property
    def are_starts_known(self) -> bool:
        """Whether a loop's optimizer would be made with the same arguments, whatever is a tensor or a schedule."""
        return all(is_start_known(self.hyperparameters[name]) for name in self.dynamic)

    def decisions(
        self,
        answers: Answers = (),
        treated_as_zero: frozenset[str] = frozenset(),
        *,
        flipped_instruction: Instruction | None = None,
        truthful: bool = False,
        flipped_comparison: int | None = None,
        unknown_example: float = math.nan,
        hides_known_examples: bool = False,
    ) -> Decisions:
        """Return the decisions of a run of the class; arguments as in `Decisions`."""
        return Decisions(
            self.cls.__name__,
            answers,
            self.treated_as_nonzero,
            treated_as_zero,
            asks_divisors=self.asks_divisors,
            flipped_instruction=flipped_instruction,
            truthful=truthful,
            flipped_comparison=flipped_comparison,
            unknown_example=unknown_example,
            hides_known_examples=hides_known_examples,
        )

    def run(
        self,
        params: list[Tensor],
        grads: Grads,
        state: ClassState | None,
        hyper: Hyper,
        decisions: Decisions,
        form: Form | None = None,
        observe: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> StepRun:
        """Take one step along one path. A state of None is a first step; a form is that of the state, if known."""
        if state is not None and form is None:
            form = self.form(params)
        run = functools.partial(
            run_step,
            self.cls,
            self.arguments,
            {**self.set_by_scheduler, **hyper},
            params,
            grads,
            state,
            form,
            decisions,
            writes_grads=self.writes_grads,
            wide_counters=self.wide_counters,
            constructs_with_numbers=state is None and not self.are_starts_known,
            observe=observe,
        )
        return decisions.along_a_path_that_ends(run)

    def examples(self, device: str, values: Mapping[str, object] | None = None) -> Hyper:
        """Return the hyperparameters that are tensors, with values; by default those of the arguments."""
        values = {name: self.arguments[name] for name in self.dynamic} if values is None else values
        with without_modes():  # a trace asks for them too, and the class's step must not see its fake tensors
            return {name: stand_in(self.hyperparameters[name], value, device) for name, value in values.items()}

    def form(self, params: list[Tensor]) -> Form:
        """Return how the class stores the state of such parameters."""
        key = _kinds_of(params)
        if key not in self._forms:
            self._forms[key] = find_form(self, params)
        return self._forms[key]

    def evaluated(self, params: list[Tensor], state: ClassState, hyper: Hyper) -> list[Tensor]:
        """Return the parameters to evaluate with: those that the class's `eval` sets."""
        form = self.form(params)
        class_state = _without_entries_of_funcamp(state)

        def at_stage(stage: int) -> Stepped:
            def run(decisions: Decisions) -> Stepped:
                step_run = run_step(
                    self.cls,
                    self.arguments,
                    {**self.set_by_scheduler, **hyper},
                    params,
                    params,
                    class_state,
                    form.at(stage),
                    decisions,
                    wide_counters=self.wide_counters,
                    method="eval",
                )
                return Stepped(step_run.params, class_state)

            return along_paths(run, _select_stepped, self.decisions)

        return _selected_by_stage(at_stage, form, state).params

    def first_step_may_differ(self, params: list[Tensor]) -> bool:
        """Return whether the first step of such parameters is, or may be, another formula than later ones."""
        if self.first_step_differs or not self.known_first_operations:
            return self.first_step_differs
        kinds = {(param.shape, param.dtype): param for param in params}
        return any(self.form([param]).operations not in self.known_first_operations for param in kinds.values())

    def is_separable(self, params: list[Tensor]) -> bool:
        """Return whether the step of each parameter depends on no other. A class may treat some shapes together."""
        return self.separable and self.form(params).is_separable and self.ignores_positions(_kinds_of(params))

    def ignores_positions(self, kinds: _Kinds) -> bool:
        """Return whether the step of each of such parameters is the same wherever it stands among the others."""
        if len(kinds) < 2 or is_torchs(self.cls):
            return True
        if kinds not in self._ignoring_positions:
            with without_modes():
                params = [torch.zeros(shape, dtype=dtype, device="meta") for shape, dtype in kinds]
            self._ignoring_positions[kinds] = ignores_positions(self, params)
        return self._ignoring_positions[kinds]

    def __call__(self, params: list[Tensor], grads: Grads, state: ClassState, hyper: Hyper) -> Stepped:
        """Take one step of all parameters.

        Args:
            params: the parameters.
            grads: their gradients.
            state: the state, as `first_state` gives it or the last step.
            hyper: the hyperparameters that are tensors.

        Raises:
            TypeError: there are too many paths, or what the class keeps changes in another way than in its trial.
        """
        if not (self.steps_separately and self.is_separable(params)):
            try:
                return self._step(params, grads, state, hyper)
            except TooManyPathsError:
                if not self.is_separable(params):
                    raise
        new_params, new_entries, shared = list(params), list(state.per_param), state.shared
        with names_for_numbers(self.cls, None):  # once for all
            for index, grad in enumerate(grads):
                param_state = ClassState([state.per_param[index]], state.shared)
                stepped = self._step([params[index]], [grad], param_state, hyper)
                new_params[index], new_entries[index] = stepped.params[0], stepped.state.per_param[0]
                shared = stepped.state.shared  # the same from each, because the class is separable
        return Stepped(new_params, ClassState(new_entries, shared))

    def _step(self, params: list[Tensor], grads: Grads, state: ClassState, hyper: Hyper) -> Stepped:
        """Take one step; the first one and a later one, selected by the counts of applied steps, if they differ."""
        class_state = _without_entries_of_funcamp(state)
        self._check_entries(params, class_state)

        def at_stage(stage: int) -> Stepped:
            return self.along_paths(params, grads, class_state, class_state, hyper, stage)

        later = _selected_by_stage(at_stage, self.form(params), state)
        if not any(APPLIED_ENTRY in entries for entries in (*state.per_param, state.shared)):
            return later
        first = self.along_paths(params, grads, None, class_state, hyper)
        shared = later.state.shared
        if APPLIED_ENTRY in state.shared:
            # A parameter may get its first gradient when the others have taken steps.
            group_count = state.shared[APPLIED_ENTRY]
            late_state = ClassState([{} for _ in params], class_state.shared)
            try:
                late = self.along_paths(params, grads, late_state, class_state, hyper)
            except Exception as error:
                if is_own_refusal(error):
                    raise
                late = first  # the class fails for a parameter that begins late, or begins all at once
            shared = _select_entries(group_count == 0, first.state.shared, shared)
            shared = shared | {APPLIED_ENTRY: group_count + 1}
            first = _select_stepped(group_count == 0, first, late)
        return self._select_first_steps(state, first, later._replace(state=ClassState(later.state.per_param, shared)))

    def _select_first_steps(self, state: ClassState, first: Stepped, later: Stepped) -> Stepped:
        """Return the later step, but the first one for each parameter that has not applied any."""
        new_params: list[Tensor] = []
        new_entries: list[Entries] = []
        for index, entries_before in enumerate(state.per_param):
            new_param, entries = later.params[index], later.state.per_param[index]
            if APPLIED_ENTRY in entries_before:
                count = entries_before[APPLIED_ENTRY]
                is_first = count == 0
                new_param = _select(is_first, first.params[index], new_param)
                entries = _select_entries(is_first, first.state.per_param[index], entries)
                # A step with momentum 0 does not begin SGD's buffer: the first step with a momentum does.
                entries[APPLIED_ENTRY] = torch.where(is_first, first.begun[index], count + 1)
            new_params.append(new_param)
            new_entries.append(entries)
        return Stepped(new_params, ClassState(new_entries, later.state.shared))

    def _check_entries(self, params: list[Tensor], state: ClassState) -> None:
        """Raise ValueError if a state is another optimizer's."""
        form = self.form(params)
        expected_of_params = [form.param_entries(index) for index in range(len(params))]
        for expected, entries in zip([*expected_of_params, entries_in(form.shared)], [*state.per_param, state.shared]):
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
        hyper: Hyper,
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
        new_entries: list[Entries] = []
        begun: list[Tensor] = []
        try:
            for index, (contents, param) in enumerate(zip(step_run.state.per_param, step_run.params)):
                is_first = state is None or not state.per_param[index]
                if is_first and grads[index] is None and not contents:  # it has not begun
                    new_entries.append(dict(like.per_param[index]))
                    begun.append(_integer(0, param))
                    continue
                stage = _stage_of(contents, form.stages(index))
                stage_form = form.stages(index)[stage]
                entries = entries_of(contents, stage_form, param, like.per_param[index], is_first=is_first)
                if form.later_forms:
                    entries = like.per_param[index] | entries | {STAGE_ENTRY: _integer(stage, param)}
                if is_first:
                    has_begun = entries_in(stage_form).keys() <= leaves_of(contents).keys()
                    begun.append(_integer(int(has_begun), param))
                new_entries.append(entries)
            if state is not None:
                for name, (before, after) in step_run.changed.items():
                    raise ChangedConstantError(name, MISSING if before is None else before, after, is_shared=True)
            contents = {name: value for name, value in step_run.state.shared.items() if name in form.shared}
            shared = entries_of(contents, form.shared, step_run.params[0], like.shared, is_first=state is None)
        except ChangedConstantError as error:
            raise TypeError(f"stateless: {self.cls.__name__} cannot be made pure: {error}") from error
        return Stepped(step_run.params, ClassState(new_entries, shared), tuple(begun))


def _kinds_of(params: Sequence[Tensor]) -> _Kinds:
    return tuple((param.shape, param.dtype) for param in params)


def _integer(value: int, like: Tensor) -> Tensor:
    """Return an int64 tensor of shape () on a tensor's device."""
    return torch.full((), value, dtype=torch.int64, device=like.device)


def _without_entries_of_funcamp(state: ClassState) -> ClassState:
    """Return the entries of the class only."""

    def of_class(entries: Entries) -> Entries:
        return {name: value for name, value in entries.items() if name not in (APPLIED_ENTRY, STAGE_ENTRY)}

    return ClassState(list(map(of_class, state.per_param)), of_class(state.shared))


def _stage_of(contents: Contents, stages: list[Contents]) -> int:
    """Return the number of the form whose entries and constants a parameter's state has; 0 if it has that of none."""
    names = leaves_of(contents).keys()
    return next((number for number, form in enumerate(stages) if leaves_of(form).keys() == names), 0)


def _selected_by_stage(at_stage: Callable[[int], Stepped], form: Form, state: ClassState) -> Stepped:
    """Return the results of a step for each parameter from the form that its state has.

    What all share is that of the first parameter: without late gradients the others have the same form.
    """
    stepped = at_stage(0)
    for stage in range(1, form.stage_count):
        other = at_stage(stage)
        has_stage = [entries[STAGE_ENTRY] == stage for entries in state.per_param]
        params = [_select(*arguments) for arguments in zip(has_stage, other.params, stepped.params)]
        entries_of_params = zip(has_stage, other.state.per_param, stepped.state.per_param)
        per_param = [_select_entries(*arguments) for arguments in entries_of_params]
        shared = _select_entries(has_stage[0], other.state.shared, stepped.state.shared)
        stepped = Stepped(params, ClassState(per_param, shared))
    return stepped


def _select_stepped(condition: Tensor, if_true: Stepped, if_false: Stepped) -> Stepped:
    """Return the results of one path if a condition is true, else those of another."""
    entries_of_both = zip(if_true.state.per_param, if_false.state.per_param)
    per_param = [_select_entries(condition, *both) for both in entries_of_both]
    shared = _select_entries(condition, if_true.state.shared, if_false.state.shared)
    params = [_select(condition, *both) for both in zip(if_true.params, if_false.params)]
    begun = tuple([_select(condition, *both) for both in zip(if_true.begun, if_false.begun)])
    return Stepped(params, ClassState(per_param, shared), begun)


def _select(condition: Tensor, if_true: Tensor, if_false: Tensor) -> Tensor:
    """Return a tensor of one path if a condition is true, else that of another.

    Raises:
        TypeError: they are tensors of other shapes or dtypes; a number may be of any dtype.
    """
    if if_true is if_false:
        return if_true
    are_numbers = if_true.dim() == 0 or if_false.dim() == 0
    if not are_numbers and (if_true.shape != if_false.shape or if_true.dtype != if_false.dtype):
        raise TypeError(
            "stateless: the class cannot be made pure: on one path of its step a tensor of its state is of "
            f"{if_true.dtype} and shape {tuple(if_true.shape)}, on another of {if_false.dtype} and shape "
            f"{tuple(if_false.shape)}; "
            "keep one shape and dtype, or use it in an ordinary loop with funcamp.GradScaler"
        )
    return torch.where(condition, if_true, if_false.to(if_true.dtype))


def _select_entries(condition: Tensor, if_true: Entries, if_false: Entries) -> Entries:
    """Return the entries of one path if a condition is true, else those of another; what only one has, as it is."""
    selected = {name: _select(condition, value, if_false[name]) for name, value in if_true.items() if name in if_false}
    return {**if_false, **if_true, **selected}


def empty_state(params: list[Tensor]) -> ClassState:
    """Return the state of a class before its first step."""
    return ClassState([{} for _ in params], {})
