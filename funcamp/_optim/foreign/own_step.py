"""A class of another package as two pure functions: its own step, run on tensors.

A run (`_run`) makes an instance, puts the state in, takes the step, and reads the state. If the class asks about a
number that changes, the step runs both ways and the condition selects (`_paths`). `optimizer.py` compares with the
class's own loop.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._optim.foreign.calls import Calls
from funcamp._optim.foreign.instance import (
    Contents,
    Form,
    changed_names,
    check_aliases,
    check_constants,
    check_keys,
    cloned,
    filled,
    form_of,
    instance,
    is_entry,
    is_number,
    is_same,
    leaves,
    put_shared,
    record,
    refusal,
    shared_in,
    step_of,
    tensor_of,
)
from funcamp._optim.foreign.number import Number, RefusedError, math_of_numbers
from funcamp._optim.hyperparameters import Hyper, is_dynamic, map_items
from funcamp._optim.modes import without_modes
from funcamp._optim.optimizer import Leaves, OptState, StatelessOptimizer, Stepped, states_at
from funcamp._optim.torch_optim.rule import State
from funcamp._storage.params import collapse, expand
from funcamp._trace.as_compiled import as_eager
from funcamp._types import Tree

_MOST_WAYS = 16
_FakeTensorMode: Any = _upstream.find("torch._subclasses.fake_tensor.FakeTensorMode")


class TooManyWaysError(RefusedError):
    """A step branches in more ways than are run."""


class ChangesError(RefusedError):
    """A step changes something whose name is not yet among what all parameters share."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


class Inputs(NamedTuple):
    """What a step begins with."""

    params: list[Tensor]
    grads: list[Any]
    """A tensor or None for each parameter."""
    states: list[State]
    shared: State | None
    """What all parameters share; None before a first step by its own formula."""
    hyper: Hyper

    def of(self, index: int) -> Inputs:
        """Return those of one parameter."""
        return self._replace(params=[self.params[index]], grads=[self.grads[index]], states=[self.states[index]])


class OwnStep(StatelessOptimizer):
    """The own step of a class as a function."""

    def _prepare(self) -> None:
        #: Whether it catches divisions by 0, which are then questions. No run shows it, but the source.
        self._asks_divisors = any("ZeroDivisionError" in _source_of(base) for base in self._cls.__mro__)
        #: What the constructor gets: other numbers for tensors and schedules, so that a class which keeps such a number
        #: for itself, beside its group, differs from its own loop.
        self._instance_arguments = dict(self._arguments)
        for name in self._dynamic:
            self._instance_arguments[name] = map_items(
                _other_number, name, self._arguments[name], self._hyperparameters[name]
            )
        self._forms: dict[Any, Form] = {}
        #: The names of what a step changes for all parameters.
        self._shared_names: frozenset[str] = frozenset()
        #: Whether the first step is another formula.
        self._first_differs = False
        #: Whether parameters step one by one, because each asks its own questions.
        self._is_separate = False
        #: Whether values are known, so that one path suffices: while the class is tried.
        self._reads_answers = False

    def _takes_groups(self) -> bool:
        return False

    def _check_entries(self, flat: Leaves, opt_state: OptState) -> None:
        """Leave the check to the step, which knows what each parameter has."""

    def _positions(self, flat: Leaves, flat_grads: Leaves) -> list[int]:  # noqa: ARG002  it may count steps
        return [index for index, param in enumerate(flat) if param is not None]

    def evaluation_params(self, params: Tree, opt_state: OptState) -> Tree:
        """Return the parameters to evaluate with; see `StatelessOptimizer.evaluation_params`."""
        if not (callable(getattr(self._cls, "train", None)) and callable(getattr(self._cls, "eval", None))):
            return params
        expanded = expand(params)
        flat, spec = _tree.parameters("evaluation_params", "params", expanded)
        positions = self._positions(flat, flat)
        states = states_at(positions, self._columns(expanded, flat, opt_state))
        present: list[Any] = [flat[index] for index in positions]
        calls = self._calls(())
        optimizer, clones = self._filled_instance(present, states, opt_state.shared, calls)
        put_shared(optimizer, _numbers(self._hyper(opt_state.applied, present), calls))
        with torch.no_grad(), calls, math_of_numbers():
            optimizer.eval()
        if calls.path:
            raise refusal(self._cls, "its eval branches on a number that changes in training")
        for index, param in zip(positions, clones):
            flat[index] = param
        return collapse(params, _tree.unflatten(flat, spec))

    # The state before the first step.

    def _first(self, params: list[Tensor], hyper: Hyper) -> tuple[list[State], State]:
        """Return the first values that a step with a zero gradient gives to entries."""
        if not self._is_separate:
            return self._first_of(params, hyper)
        each = [self._first_of([param], hyper) for param in params]
        return [states[0] for states, _ in each], each[-1][1]

    def _first_of(self, params: list[Tensor], hyper: Hyper) -> tuple[list[State], State]:
        """Return these values for parameters that step together."""
        calls = self._calls(())
        with torch.no_grad(), calls:
            clones = [param.detach().clone() for param in params]
            for clone in clones:
                clone.grad = torch.zeros_like(clone)
            optimizer = instance(self._cls, clones, self._instance_arguments)
            record(optimizer)
            before = cloned(shared_in(optimizer))
            put_shared(optimizer, _numbers(hyper, calls))
            self._call(optimizer, calls)
        kept = [dict(optimizer.state.get(clone, {})) for clone in clones]
        for contents in kept:
            for name, value in contents.items():
                check_constants(self._cls, name, value)
        after = shared_in(optimizer)
        check_aliases(self._cls, [*clones, *[leaf for one in (*kept, after) for leaf in leaves(one).values()]])
        # What the first step changes is put into every instance, also if it is no number: a flag, for example.
        names = (self._shared_names | changed_names(before, after)) - set(self._dynamic)
        shared = {name: after.get(name, 0.0) for name in sorted(names)}  # 0.0: only another path makes it
        first_group = optimizer.param_groups[0].first
        first_shared = {name: before.get(name, first_group.get(name)) for name in shared}
        self._forms[_kinds(params)] = Form([form_of(contents) for contents in kept], form_of(shared))
        states = []
        for param, clone, contents in zip(params, clones, kept):
            first = getattr(optimizer.state.get(clone), "first", contents)
            states.append(_entries_before(first, contents, param))
        return states, _entries_before(first_shared, shared, params[0])

    def _form(self, params: list[Tensor]) -> Form:
        """Return what an instance with such parameters keeps."""
        key = _kinds(params)
        if key not in self._forms:
            with without_modes(), _FakeTensorMode():
                empty = [torch.zeros(param.shape, dtype=param.dtype) for param in params]
                self._first_of(empty, example_hyper(self))
        return self._forms[key]

    # A step.

    def _stepped(
        self, params: list[Tensor], grads: list[Any], states: list[State], opt_state: OptState, hyper: Hyper
    ) -> Stepped:
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                f"update: {self._cls.__name__} runs its own Python, which torch.compile does not trace; compile the "
                "step with funcamp.jit"
            )
        inputs = Inputs(params, grads, states, opt_state.shared, hyper)
        if not self._first_differs or (self._reads_answers and opt_state.applied > 0):
            return self._all_paths(inputs)
        if any(grad is None for grad in grads):
            raise ValueError(
                f"update: grads must all be tensors, because the first step of {self._cls.__name__} is another "
                "formula; got None: give zeros, or leave the parameter out"
            )
        first = self._all_paths(inputs._replace(states=[{} for _ in params], shared=None))
        return _selected(opt_state.applied == 0, first, self._all_paths(inputs))

    def _all_paths(self, inputs: Inputs) -> Stepped:
        """Take the step along every path, of all parameters together or of each by itself."""
        if not self._is_separate:
            return self._paths(inputs, (), [])
        each = [self._paths(inputs.of(index), (), []) for index in range(len(inputs.params))]
        return Stepped([one.params[0] for one in each], [one.states[0] for one in each], each[-1].shared)

    def _paths(self, inputs: Inputs, answers: tuple[bool, ...], runs: list[Calls]) -> Stepped:
        """Run every path that begins with some answers, and select the one that the values take."""
        calls = self._calls(answers)
        runs.append(calls)
        result = self._run(inputs, calls)
        if self._reads_answers:
            return result
        if len(runs) + len(calls.path) - len(answers) > _MOST_WAYS:  # each new question is one more run at least
            raise TooManyWaysError(
                f"stateless: {self._cls.__name__} cannot be made pure: its step branches on numbers that change in "
                f"training in more than {_MOST_WAYS} ways"
            )
        for index in reversed(range(len(answers), len(calls.path))):
            try:
                other = self._paths(inputs, (*calls.path[:index], not calls.path[index]), runs)
            except ZeroDivisionError:  # its own loop would stop there, so the values never go this way
                continue
            yes, no = (result, other) if calls.path[index] else (other, result)
            result = _selected(calls.conditions[index], yes, no)
        return result

    def _calls(self, answers: tuple[bool, ...]) -> Calls:
        given = None if self._reads_answers else answers
        return Calls(self._cls.__name__, given, asks_divisors=self._asks_divisors)

    def _filled_instance(
        self, params: list[Tensor], states: list[State], shared: State | None, calls: Calls
    ) -> tuple[Any, list[Tensor]]:
        """Return an instance with a state, and its parameters, which are clones."""
        form = self._form(params)
        with torch.no_grad(), calls:
            clones = [param.detach().clone() for param in params]
            optimizer = instance(self._cls, clones, self._instance_arguments)
            if shared is not None:  # else it is as before its first step
                put_shared(optimizer, filled(form.shared, shared, calls))
                for clone, contents, entries in zip(clones, form.per_param, states):
                    if contents:
                        optimizer.state[clone] = filled(contents, entries, calls)
        return optimizer, clones

    def _run(self, inputs: Inputs, calls: Calls) -> Stepped:
        """Take one step of an instance."""
        params, grads, states, shared, hyper = inputs
        form = self._form(params)
        optimizer, clones = self._filled_instance(params, states, shared, calls)
        with torch.no_grad(), calls:
            for clone, grad in zip(clones, grads):
                clone.grad = None if grad is None else grad.detach().to(clone.dtype, copy=True)
            put_shared(optimizer, _numbers(hyper, calls))
            before = leaves(shared_in(optimizer))
            versions = {name: leaf._version for name, leaf in before.items() if isinstance(leaf, Tensor)}
            self._call(optimizer, calls)
        after = shared_in(optimizer)
        self._refuse_changes(form, before, versions, leaves(after))
        new_states = []
        for clone, contents, entries in zip(clones, form.per_param, states):
            new_states.append(self._entries(dict(optimizer.state.get(clone, {})), contents, entries, clone))
            clone.grad = None
        kept_shared = {name: after[name] for name in form.shared if name in after}
        new_shared = self._entries(kept_shared, form.shared, shared or {}, clones[0])
        check_keys(self._cls, optimizer)
        check_aliases(self._cls, [*clones, *[tensor for one in (*new_states, new_shared) for tensor in one.values()]])
        return Stepped(clones, new_states, new_shared)

    def _call(self, optimizer: Any, calls: Calls) -> None:
        check_keys(self._cls, optimizer)
        with math_of_numbers(), as_eager(), torch.compiler.set_stance("force_eager"):
            try:
                step_of(optimizer)()
            finally:
                if calls.refusal is not None:  # the class may have caught it
                    raise calls.refusal

    def _entries(self, contents: Contents, form: Contents, before: State, like: Tensor) -> State:
        """Return the tensors and numbers among what an instance keeps, of the kinds that they had before."""
        found, expected = leaves(contents), leaves(form)
        if found.keys() != expected.keys():
            odd = sorted(found.keys() ^ expected.keys())
            raise refusal(self._cls, f"its state must have the same entries after every step; odd is {odd}")
        entries: State = {}
        for name, leaf in found.items():
            if not is_entry(expected[name]):
                if not is_same(expected[name], leaf):
                    raise refusal(self._cls, f"its step changes {name!r} to {leaf!r}")
                continue
            if not is_entry(leaf):
                raise refusal(self._cls, f"its state entry {name!r} must be a tensor or a number after every step")
            tensor = tensor_of(leaf, like)
            if is_number(expected[name]) and tensor.numel() == 1:
                tensor = tensor.reshape(())
            if name in before:
                if tensor.shape != before[name].shape:
                    raise refusal(self._cls, f"its state entry {name!r} changes its shape")
                tensor = tensor.to(before[name].dtype)
            entries[name] = tensor
        return entries

    def _refuse_changes(self, form: Form, before: Contents, versions: dict[str, int], after: Contents) -> None:
        """Raise ChangesError if a step changed what all share and is no entry."""
        for name in before.keys() | after.keys():
            container = name.partition("[")[0]
            if container in form.shared:
                continue
            is_kept = name in before and name in after and is_same(before[name], after[name])
            if not is_kept or (name in versions and after[name]._version != versions[name]):
                raise ChangesError(
                    container, str(refusal(self._cls, f"its step changes {name}, which is not followed"))
                )


def _source_of(cls: type) -> str:
    """Return the source of a class; the empty string if there is none."""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


def example_hyper(optimizer: StatelessOptimizer) -> Hyper:
    """Return tensors for the tensors and schedules of an optimizer, with the numbers that its constructor gets."""

    def tensor(_: str, value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float64)

    return {name: map_items(tensor, name, optimizer._arguments[name]) for name in optimizer._dynamic}


def _other_number(_: str, argument: Any, hyperparameter: object) -> Any:
    return 0.9 * argument if is_dynamic(hyperparameter) else argument


def _numbers(hyper: Hyper, calls: Calls) -> Contents:
    """Return hyperparameters as the class gets them."""

    def number(_: str, value: object) -> object:
        return Number(value, calls) if isinstance(value, Tensor) else value

    return {name: map_items(number, name, value) for name, value in hyper.items()}


def _kinds(params: list[Tensor]) -> Any:
    return tuple((tuple(param.shape), param.dtype) for param in params)


def _entries_before(first: Contents, last: Contents, like: Tensor) -> State:
    """Return the entries before the first step, from the first values of what there is after it."""
    first_leaves, entries = leaves(first), {}
    for name, leaf in leaves(last).items():
        if is_entry(leaf):
            value = first_leaves.get(name)
            after = tensor_of(leaf, like)
            first_tensor = tensor_of(value, like) if is_entry(value) else after
            entries[name] = first_tensor if first_tensor.shape == after.shape else after
    return entries


def _selected(condition: Tensor, yes: Stepped, no: Stepped) -> Stepped:
    """Return the results of one path or of another."""

    def pick(one: Tensor, other: Tensor) -> Tensor:
        return one if one is other else torch.where(condition, one.to(other.dtype), other)

    def entries(one: State, other: State) -> State:
        return {name: pick(value, other[name]) for name, value in one.items()}

    return Stepped(
        [pick(*both) for both in zip(yes.params, no.params)],
        [entries(*both) for both in zip(yes.states, no.states)],
        entries(yes.shared, no.shared),
    )
