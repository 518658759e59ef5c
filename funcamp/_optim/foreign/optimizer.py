"""A class of another package as two pure functions: its own step, run on tensors.

A run (`_run`) makes an instance, puts the state in, takes the step, and reads the state. If the class asks about a
number that changes, the step runs both ways and the condition selects (`_paths`). When the optimizer is made, eight
steps are compared with those of the class's own loop (`_compare`), which also shows if a remedy is needed.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._optim.foreign.calls import Calls
from funcamp._optim.foreign.instance import (
    Contents,
    changed,
    contents_of,
    entries_of,
    filled,
    form_of,
    instance,
    is_entry,
    is_same,
    leaves,
    put_shared,
    record,
    recorded_in,
    shared_in,
    step_of,
    tensor_of,
)
from funcamp._optim.foreign.number import (
    FIRST,
    MOST_WAYS,
    SEPARATELY,
    ChangingNumber,
    RefusedError,
    in_a_step,
    too_many_ways,
)
from funcamp._optim.foreign.own_loop import OwnStep, is_near, normal, own_steps
from funcamp._optim.hyperparameters import Hyper, is_dynamic, map_items
from funcamp._optim.modes import without_modes
from funcamp._optim.optimizer import Inputs, OptState, StatelessOptimizer, Stepped
from funcamp._optim.torch_optim.rule import State
from funcamp._storage.params import collapse, expand
from funcamp._types import Tree

#: The shapes of parameters to compare with; matrices only for a class that refuses others.
_SHAPES = (((2, 3), (2,), (48, 32), (2, 3), (32, 48), (2, 2, 2, 1), ()), ((2, 3), (3, 2), (2, 3)))


class ForeignOptimizer(StatelessOptimizer):
    """A class of another package as two pure functions; made by `stateless`."""

    _takes_groups = False
    _needs_gradient = False

    def _prepare(self) -> None:
        #: What the constructor gets: other numbers for tensors and schedules, so that a class which keeps such a number
        #: for itself, beside its group, differs from its own loop.
        self._instance_arguments = {
            name: map_items(_other_number, argument, self.hyperparameters.get(name))
            for name, argument in self.arguments.items()
        }
        #: What an instance keeps after a step, without values, by the kinds of its parameters.
        self._forms: dict[Any, list[Contents]] = {}
        #: The names of what steps change for all parameters.
        self._changing: set[str] = set()
        #: How the class must be run, found by comparing.
        self._remedies: set[str] = set()
        failure: Exception | None = None
        with in_a_step():
            for dtype, shapes in itertools.product((torch.float64, torch.float32), _SHAPES):
                try:
                    return self._try(shapes, dtype)
                except RefusedError:
                    raise
                except Exception as error:  # of the class's own code, which may refuse a shape or a dtype
                    failure = error
        raise RefusedError(self.cls, f"its step fails ({type(failure).__name__}: {failure})") from failure

    def evaluation_params(self, params: Tree, opt_state: OptState) -> Tree:
        """Return the parameters to evaluate with; see `StatelessOptimizer.evaluation_params`."""
        if not (hasattr(self.cls, "train") and hasattr(self.cls, "eval")):
            return params
        expanded = expand(params)
        flat, spec = _tree.parameters("evaluation_params", "params", expanded)
        positions = self._positions(flat, flat)
        if not positions:
            return params
        inputs = self._inputs(positions, flat, flat, self._states(expanded, flat, opt_state), opt_state)
        calls = Calls(self.cls, ())
        optimizer, clones = self._instance(inputs.params, inputs.hyper, calls)
        self._fill(optimizer, clones, inputs, calls)
        self._call(optimizer.eval, calls)
        if calls.path:
            raise RefusedError(self.cls, "its eval branches on a number that changes in training")
        for index, param in zip(positions, clones):
            flat[index] = param
        return collapse(params, _tree.unflatten(flat, spec))

    # An instance.

    def _instance(self, params: list[Tensor], hyper: Hyper, calls: Calls) -> tuple[Any, list[Tensor]]:
        """Return an instance that keeps nothing yet, and its parameters, which are clones."""
        with torch.no_grad(), calls:
            clones = [param.detach().clone() for param in params]
            optimizer = instance(self.cls, clones, self._instance_arguments)
            put_shared(optimizer, _numbers(hyper, calls))
        return optimizer, clones

    def _fill(self, optimizer: Any, clones: list[Tensor], inputs: Inputs, calls: Calls) -> None:
        """Put a state into an instance."""
        form = self._form(inputs.params)
        for part, entries in zip(form, inputs.states):
            self._check_entries({name for name, leaf in leaves(part).items() if is_entry(leaf)}, entries)
        with torch.no_grad(), calls:
            *of_params, shared = [filled(*each, calls) for each in zip(form, inputs.states)]
        put_shared(optimizer, shared)
        for clone, contents in zip(clones, of_params):
            if contents:
                optimizer.state[clone] = contents

    def _call(self, method: Any, calls: Calls) -> None:
        """Call a method of an instance."""
        with torch.no_grad(), calls, in_a_step():
            try:
                method()
            finally:
                if calls.refusal is not None:  # the class may have caught it
                    raise calls.refusal

    # The state before the first step.

    def _first(self, params: list[Tensor], hyper: Hyper) -> list[State]:
        """Return the first values that a step with a zero gradient gives to entries."""
        if SEPARATELY in self._remedies:
            return _joined([self._first_of([param], hyper) for param in params])
        return self._first_of(params, hyper)

    def _first_of(self, params: list[Tensor], hyper: Hyper) -> list[State]:
        """Return these values for parameters that step together."""
        calls = Calls(self.cls, ())
        optimizer, clones = self._instance(params, hyper, calls)
        for clone in clones:
            clone.grad = torch.zeros_like(clone)
        record(optimizer)
        shared = shared_in(optimizer)
        shared_leaves, shared_entries = leaves(shared), entries_of(shared, params[0])
        self._call(step_of(optimizer), calls)
        contents = contents_of(optimizer, clones)

        # The form. Of what all share, what changes is put into every instance, and tensors, which may be written.
        *forms, form = [form_of(self.cls, each) for each in contents]
        tensors = {name for name, part in form.items() if _tree.tensors_in(part)}
        names = (self._changing | tensors | changed(shared_leaves, contents[-1])) - {*self.dynamic}
        form = {name: form.get(name, 0.0) for name in sorted(names)}  # 0.0: only another path makes it
        self._forms[_kinds(params)] = [*forms, form]
        contents[-1] = {name: contents[-1].get(name, 0.0) for name in form}

        # The first value of each entry; the last one of what is not recorded, or had another shape first.
        states = [entries_of(each, params[0]) for each in contents]
        firsts = [entries_of(each, params[0]) for each in recorded_in(optimizer, clones)]
        firsts[-1] |= shared_entries
        for state, first in zip(states, firsts):
            for name, value in first.items():
                if name in state and state[name].shape == value.shape:
                    state[name] = value
        return states

    def _form(self, params: list[Tensor]) -> list[Contents]:
        """Return what an instance with such parameters keeps."""
        key = _kinds(params)
        if key not in self._forms:
            with without_modes():
                self._first_of([torch.zeros(kind.shape, dtype=kind.dtype) for kind in params], self._example_hyper())
        return self._forms[key]

    # A step.

    def _stepped(self, inputs: Inputs) -> Stepped:
        """Take the step along every path, of all parameters together or of each by itself."""
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                f"update: {self.cls.__name__} runs its own Python, which torch.compile does not trace; compile the "
                "step with funcamp.jit"
            )
        if SEPARATELY not in self._remedies:
            return self._paths(inputs, (), [])
        *states, shared = inputs.states
        results = []
        for param, grad, state in zip(inputs.params, inputs.grads, states):
            of_param = inputs._replace(params=[param], grads=[grad], states=[state, shared])
            results.append(self._paths(of_param, (), []))
        return Stepped([result.params[0] for result in results], _joined([result.states for result in results]))

    def _paths(self, inputs: Inputs, answers: tuple[bool, ...], runs: list[Calls]) -> Stepped:
        """Run every path that begins with some answers, and select the one that the values take."""
        calls = Calls(self.cls, answers)
        runs.append(calls)
        result = self._run(inputs, calls)
        if len(runs) + len(calls.path) - len(answers) > MOST_WAYS:  # each new question is one more run at least
            raise too_many_ways(self.cls)
        for index in reversed(range(len(answers), len(calls.path))):
            try:
                other = self._paths(inputs, (*calls.path[:index], not calls.path[index]), runs)
            except ZeroDivisionError:  # its own loop would stop there, so the values never go this way
                continue
            yes, no = (result, other) if calls.path[index] else (other, result)
            result = _selected(calls.conditions[index], yes, no)
        return result

    def _run(self, inputs: Inputs, calls: Calls) -> Stepped:
        """Take one step of an instance."""
        form = self._form(inputs.params)
        optimizer, clones = self._instance(inputs.params, inputs.hyper, calls)
        # An instance that keeps nothing takes its first step.
        if FIRST not in self._remedies or not calls.ask(inputs.applied == 0):
            self._fill(optimizer, clones, inputs, calls)
        for clone, grad in zip(clones, inputs.grads):
            clone.grad = None if grad is None else grad.detach().to(clone.dtype, copy=True)
        before = leaves(shared_in(optimizer))
        self._call(step_of(optimizer), calls)
        *kept, shared = contents_of(optimizer, clones)
        others = sorted(changed(before, shared) - form[-1].keys())
        if others:
            raise RefusedError(self.cls, f"its step changes {', '.join(others)}, which is not followed")
        kept.append({name: shared[name] for name in form[-1] if name in shared})
        states = [self._entries(*each) for each in zip(kept, form, inputs.states)]
        for clone in clones:
            clone.grad = None
        tensors = [*clones, *[tensor for state in states for tensor in state.values()]]
        if len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors):
            raise RefusedError(self.cls, "it keeps one tensor under two names; clone it")
        return Stepped(clones, states)

    def _entries(self, contents: Contents, form: Contents, before: State) -> State:
        """Return the tensors and numbers among what an instance keeps, with shapes and dtypes of before."""
        found, expected = leaves(contents), leaves(form)
        if found.keys() != expected.keys():
            odd = sorted(found.keys() ^ expected.keys())
            raise RefusedError(self.cls, f"its state must have the same entries after every step; odd is {odd}")
        entries: State = {}
        for name, leaf in found.items():
            if is_entry(leaf) and is_entry(expected[name]):
                old = before[name]
                entries[name] = tensor_of(leaf, old).reshape_as(old).to(old)
            elif not is_same(expected[name], leaf):
                raise RefusedError(self.cls, f"its step changes {name!r} to {leaf!r}")
        return entries

    # The comparison with the class's own loop.

    def _try(self, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
        """Find how the class steps, or raise with the reason why it cannot be used."""
        generator = torch.Generator().manual_seed(0)
        params = [normal(shape, generator).to(dtype) for shape in shapes]
        generator_before = torch.get_rng_state()
        steps = own_steps(self.cls, self.arguments, params, generator)
        self._changing = set().union(*[step.changed for step in steps])
        while True:
            self._forms.clear()
            try:
                self._compare(params, steps)
                break
            except RefusedError as error:
                if error.remedy is None or error.remedy in self._remedies:
                    raise
                self._remedies.add(error.remedy)
        # Also in a branch that the own loop did not take: a step takes every one.
        if not torch.equal(torch.get_rng_state(), generator_before):
            raise RefusedError(self.cls, "its step draws random numbers; draw them in a part of a chain")

    def _compare(self, params: list[Tensor], steps: list[OwnStep]) -> None:
        """Raise if some steps are other ones than the class's own loop takes."""
        hyper = self._example_hyper()
        states = self._first(params, hyper)
        current = params
        for number, own in enumerate(steps):
            current, states = self._stepped(Inputs(current, own.grads, states, torch.tensor(number), hyper))
            compared = list(zip(current, own.params, params))
            for entries, own_entries in zip(states, own.states):
                for name in entries.keys() & own_entries.keys():  # a count that is off by one may show late
                    wanted = own_entries[name].to(entries[name].dtype).reshape(entries[name].shape)
                    compared.append((entries[name], wanted, torch.zeros_like(wanted)))
            if not all(is_near(*each) for each in compared):
                why = (
                    f"its step number {number} as a function comes to other numbers than in its own loop: it draws "
                    "random numbers, it keeps something elsewhere, what it computes for one parameter depends on "
                    "another one, or it uses a number of its constructor that is a tensor or a schedule here"
                )
                raise RefusedError(self.cls, why, FIRST)

    def _example_hyper(self) -> Hyper:
        """Return tensors for tensors and schedules, with the numbers that the own loop's constructor gets."""
        as_tensor = functools.partial(torch.tensor, dtype=torch.float64)
        return {name: map_items(as_tensor, self.arguments[name]) for name in self.dynamic}


def _other_number(argument: Any, hyperparameter: object) -> Any:
    return 0.9 * argument if is_dynamic(hyperparameter) else argument


def _numbers(hyper: Hyper, calls: Calls) -> Contents:
    """Return hyperparameters as the class gets them."""

    def number(value: object) -> object:
        return ChangingNumber(value, calls) if isinstance(value, Tensor) else value

    return {name: map_items(number, value) for name, value in hyper.items()}


def _kinds(params: list[Tensor]) -> Any:
    return tuple((tuple(param.shape), param.dtype) for param in params)


def _joined(parts: list[list[State]]) -> list[State]:
    """Return the states of all parameters, and last what they share."""
    return [*[state for part in parts for state in part[:-1]], parts[-1][-1]]


def _selected(condition: Tensor, yes: Stepped, no: Stepped) -> Stepped:
    """Return the results of one path or of another."""

    def pick(one: Tensor, other: Tensor) -> Tensor:
        return one if one is other else torch.where(condition, one.to(other.dtype), other)

    params = [pick(*both) for both in zip(yes.params, no.params)]
    states = []
    for one, other in zip(yes.states, no.states):
        states.append({name: pick(value, other[name]) for name, value in one.items()})
    return Stepped(params, states)
