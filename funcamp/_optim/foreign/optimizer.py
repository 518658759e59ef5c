"""A class of another package as two pure functions: its own step, run on tensors.

A run (`_run`) makes an instance, puts the state in, takes the step, and reads the state. If the class asks about a
number that changes, the step runs both ways and the condition selects (`_paths`). When the optimizer is made, eight
steps are compared with those of the class's own loop (`_compare`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcamp import _tree
from funcamp._optim.foreign.calls import Calls
from funcamp._optim.foreign.instance import (
    Contents,
    changed,
    cloned,
    contents_of,
    filled,
    form_of,
    instance,
    is_entry,
    is_same,
    leaves,
    put_shared,
    record,
    shared_in,
    step_of,
    tensor_of,
)
from funcamp._optim.foreign.number import MOST_WAYS, SEPARATELY, Number, RefusedError, in_a_step, too_many_ways
from funcamp._optim.hyperparameters import Hyper, is_dynamic, map_items
from funcamp._optim.modes import without_modes
from funcamp._optim.optimizer import Inputs, OptState, StatelessOptimizer, Stepped
from funcamp._optim.torch_optim.rule import State
from funcamp._storage.params import collapse, expand
from funcamp._trace.as_compiled import as_eager
from funcamp._types import Tree

#: A remedy: the first step is another formula.
_FIRST = "another first step"

_STEPS = 8
#: The parameters of a trial; matrices only for a class that refuses others.
_TRIALS = (((2, 3), (2,), (48, 32), (2, 3), (32, 48), (2, 2, 2, 1), ()), ((2, 3), (3, 2), (2, 3)))


class OwnStep(NamedTuple):
    """A step of the class's own loop in the trial."""

    grads: list[Tensor]
    params: list[Tensor]
    """The parameters after it."""
    contents: list[Contents]
    """What the instance keeps after it, of each parameter, and last for all."""


class ForeignOptimizer(StatelessOptimizer):
    """A class of another package as two pure functions; made by `stateless`."""

    _takes_groups = False

    def _prepare(self) -> None:
        #: What the constructor gets: other numbers for tensors and schedules, so that a class which keeps such a number
        #: for itself, beside its group, differs from its own loop.
        self._instance_arguments = {
            name: map_items(_other_number, name, argument, self._hyperparameters.get(name))
            for name, argument in self._arguments.items()
        }
        #: What an instance keeps after a step, without values, by the kinds of its parameters.
        self._forms: dict[Any, list[Contents]] = {}
        #: The names of what steps change for all parameters, also if it is no number: a flag, for example.
        self._changing: set[str] = set()
        #: How the class must be run, found in the trial.
        self._remedies: set[str] = set()
        failure: Exception | None = None
        with as_eager(), in_a_step():
            for dtype, shapes in itertools.product((torch.float64, torch.float32), _TRIALS):
                try:
                    return self._try(shapes, dtype)
                except RefusedError:
                    raise
                except Exception as error:  # of the class's own code, which may refuse a shape or a dtype
                    failure = error
        raise RefusedError(self._cls, f"its step fails ({type(failure).__name__}: {failure})") from failure

    def evaluation_params(self, params: Tree, opt_state: OptState) -> Tree:
        """Return the parameters to evaluate with; see `StatelessOptimizer.evaluation_params`."""
        if not (callable(getattr(self._cls, "train", None)) and callable(getattr(self._cls, "eval", None))):
            return params
        expanded = expand(params)
        flat, spec = _tree.parameters("evaluation_params", "params", expanded)
        positions = self._positions(flat, flat)
        inputs = self._inputs(positions, flat, flat, self._states(expanded, flat, opt_state), opt_state)
        calls = Calls(self._cls, ())
        optimizer, clones = self._filled_instance(inputs, calls)
        self._call(optimizer.eval, calls)
        if calls.path:
            raise RefusedError(self._cls, "its eval branches on a number that changes in training")
        for index, param in zip(positions, clones):
            flat[index] = param
        return collapse(params, _tree.unflatten(flat, spec))

    # The state before the first step.

    def _first(self, params: list[Tensor], hyper: Hyper) -> list[State]:
        """Return the first values that a step with a zero gradient gives to entries."""
        if SEPARATELY in self._remedies and len(params) > 1:
            return _joined([self._first_of([param], hyper) for param in params])
        return self._first_of(params, hyper)

    def _first_of(self, params: list[Tensor], hyper: Hyper) -> list[State]:
        """Return these values for parameters that step together."""
        calls = Calls(self._cls, ())
        with torch.no_grad(), calls:
            clones = [param.detach().clone() for param in params]
            for clone in clones:
                clone.grad = torch.zeros_like(clone)
            optimizer = instance(self._cls, clones, self._instance_arguments)
            record(optimizer)
            shared = shared_in(optimizer)
            before, leaves_before = cloned(shared), leaves(shared)
            put_shared(optimizer, _numbers(hyper, calls))
        self._call(step_of(optimizer), calls)
        contents = contents_of(optimizer, clones)
        *forms, form = [form_of(self._cls, each) for each in contents]
        # What changes is put into every instance, and tensors, which may be written.
        tensors = {name for name, part in form.items() if _tree.tensors_in(part)}
        names = (self._changing | tensors | changed(leaves_before, contents[-1])) - {*self._dynamic}
        form = {name: form.get(name, 0.0) for name in sorted(names)}  # 0.0: only another path makes it
        self._forms[_kinds(params)] = [*forms, form]
        firsts = [getattr(optimizer.state.get(clone), "first", {}) for clone in clones]
        firsts.append(optimizer.param_groups[0].first | before)
        contents[-1] = {name: contents[-1].get(name, 0.0) for name in form}
        return [_entries_before(*each, params[0]) for each in zip(firsts, contents)]

    def _form(self, params: list[Tensor]) -> list[Contents]:
        """Return what an instance with such parameters keeps."""
        key = _kinds(params)
        if key not in self._forms:
            with without_modes():
                self._first_of([torch.zeros(kind.shape, dtype=kind.dtype) for kind in params], self._example_hyper())
        return self._forms[key]

    # A step.

    def _stepped(self, inputs: Inputs) -> Stepped:
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                f"update: {self._cls.__name__} runs its own Python, which torch.compile does not trace; compile the "
                "step with funcamp.jit"
            )
        if _FIRST not in self._remedies:
            return self._all_paths(inputs)
        first = self._all_paths(inputs._replace(is_first=True))
        return _selected(inputs.applied == 0, first, self._all_paths(inputs))

    def _all_paths(self, inputs: Inputs) -> Stepped:
        """Take the step along every path, of all parameters together or of each by itself."""
        if SEPARATELY not in self._remedies:
            return self._paths(inputs, (), [])
        results = [self._paths(inputs.of(index), (), []) for index in range(len(inputs.params))]
        params = [result.params[0] for result in results]
        return Stepped(params, _joined([result.states for result in results]))

    def _paths(self, inputs: Inputs, answers: tuple[bool, ...], runs: list[Calls]) -> Stepped:
        """Run every path that begins with some answers, and select the one that the values take."""
        calls = Calls(self._cls, answers)
        runs.append(calls)
        result = self._run(inputs, calls)
        if len(runs) + len(calls.path) - len(answers) > MOST_WAYS:  # each new question is one more run at least
            raise too_many_ways(self._cls)
        for index in reversed(range(len(answers), len(calls.path))):
            try:
                other = self._paths(inputs, (*calls.path[:index], not calls.path[index]), runs)
            except ZeroDivisionError:  # its own loop would stop there, so the values never go this way
                continue
            yes, no = (result, other) if calls.path[index] else (other, result)
            result = _selected(calls.conditions[index], yes, no)
        return result

    def _filled_instance(self, inputs: Inputs, calls: Calls) -> tuple[Any, list[Tensor]]:
        """Return an instance with a state, and its parameters, which are clones."""
        form = self._form(inputs.params)
        with torch.no_grad(), calls:
            clones = [param.detach().clone() for param in inputs.params]
            optimizer = instance(self._cls, clones, self._instance_arguments)
            if not inputs.is_first:
                for part, entries in zip(form, inputs.states):
                    self._check_entries({name for name, leaf in leaves(part).items() if is_entry(leaf)}, entries)
                *of_params, shared = [filled(*each, calls) for each in zip(form, inputs.states)]
                put_shared(optimizer, shared)
                for clone, contents in zip(clones, of_params):
                    if contents:
                        optimizer.state[clone] = contents
            put_shared(optimizer, _numbers(inputs.hyper, calls))
        return optimizer, clones

    def _run(self, inputs: Inputs, calls: Calls) -> Stepped:
        """Take one step of an instance."""
        form = self._form(inputs.params)
        optimizer, clones = self._filled_instance(inputs, calls)
        for clone, grad in zip(clones, inputs.grads):
            clone.grad = None if grad is None else grad.detach().to(clone.dtype, copy=True)
        before = leaves(shared_in(optimizer))
        self._call(step_of(optimizer), calls)
        *kept, shared = contents_of(optimizer, clones)
        others = sorted(changed(before, shared) - form[-1].keys())
        if others:
            raise RefusedError(self._cls, f"its step changes {', '.join(others)}, which is not followed")
        kept.append({name: shared[name] for name in form[-1] if name in shared})
        states = [self._entries(*each) for each in zip(kept, form, inputs.states)]
        for clone in clones:
            clone.grad = None
        tensors = [*clones, *[tensor for state in states for tensor in state.values()]]
        if len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors):
            raise RefusedError(self._cls, "it keeps one tensor under two names; clone it")
        return Stepped(clones, states)

    def _call(self, method: Any, calls: Calls) -> None:
        with torch.no_grad(), calls, in_a_step(), as_eager():
            try:
                method()
            finally:
                if calls.refusal is not None:  # the class may have caught it
                    raise calls.refusal

    def _entries(self, contents: Contents, form: Contents, before: State) -> State:
        """Return the tensors and numbers among what an instance keeps, with shapes and dtypes of before."""
        found, expected = leaves(contents), leaves(form)
        if found.keys() != expected.keys():
            odd = sorted(found.keys() ^ expected.keys())
            raise RefusedError(self._cls, f"its state must have the same entries after every step; odd is {odd}")
        entries: State = {}
        for name, leaf in found.items():
            if is_entry(leaf) and is_entry(expected[name]):
                old = before[name]
                entries[name] = tensor_of(leaf, old).reshape_as(old).to(old)
            elif not is_same(expected[name], leaf):
                raise RefusedError(self._cls, f"its step changes {name!r} to {leaf!r}")
        return entries

    # The trial.

    def _try(self, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
        """Find how the class steps, or raise with the reason why it cannot be used."""
        generator = torch.Generator().manual_seed(0)
        params = [_normal(shape, generator).to(dtype) for shape in shapes]
        generator_before = torch.get_rng_state()
        own_steps = self._own_steps(params, generator)
        self._refuse_draws(generator_before)
        while True:
            self._forms.clear()
            try:
                self._compare(params, own_steps)
                return self._refuse_draws(generator_before)  # in a branch
            except RefusedError as error:
                if error.remedy is None or error.remedy in self._remedies:
                    raise
                self._remedies.add(error.remedy)

    def _refuse_draws(self, generator_before: Tensor) -> None:
        """Raise if torch's generator is in another state than before."""
        if not torch.equal(torch.get_rng_state(), generator_before):
            raise RefusedError(self._cls, "its step draws random numbers; draw them in a part of a chain")

    def _own_steps(self, params: list[Tensor], generator: torch.Generator) -> list[OwnStep]:
        """Take the steps of the class's own loop, and find what they change for all parameters."""
        owns: list[Any] = [nn.Parameter(param.clone()) for param in params]
        optimizer = instance(self._cls, owns, self._arguments)
        means = [_normal(param.shape, generator) for param in params]
        steps = []
        for number in range(_STEPS):
            size = (1.0, 0.3, 30.0, 1.0, 1e-3)[number % 5]
            grads = [((mean + _normal(mean.shape, generator)) * size).to(params[0].dtype) for mean in means]
            if number == 5:  # no other parameter depends on this gradient if they step one by one
                grads[0] *= 1e4
            for own, grad in zip(owns, grads):
                own.grad = grad.clone()
            before = leaves(shared_in(optimizer))
            with torch.no_grad():
                step_of(optimizer)()
            self._changing |= changed(before, shared_in(optimizer))
            if not all(own.isfinite().all() for own in owns):
                raise RefusedError(self._cls, "its own loop comes to numbers that are not finite")
            contents = [cloned(each) for each in contents_of(optimizer, owns)]
            steps.append(OwnStep(grads, [own.detach().clone() for own in owns], contents))
        return steps

    def _compare(self, params: list[Tensor], own_steps: list[OwnStep]) -> None:
        """Raise if some steps are other ones than the class's own loop takes."""
        hyper = self._example_hyper()
        states = self._first(params, hyper)
        current = params
        for number, own in enumerate(own_steps):
            current, states = self._stepped(Inputs(current, own.grads, states, torch.tensor(number), hyper))
            for found, wanted, start in zip(current, own.params, params):
                self._check_near(number, found, wanted, start)
            for entries, contents in zip(states, own.contents):
                for name, leaf in leaves(contents).items():
                    if name in entries and is_entry(leaf):  # a count that is off by one may show late
                        wanted = tensor_of(leaf, params[0]).to(entries[name].dtype).reshape(entries[name].shape)
                        self._check_near(number, entries[name], wanted, torch.zeros_like(wanted))

    def _check_near(self, number: int, found: Tensor, wanted: Tensor, start: Tensor) -> None:
        """Raise if a tensor is far from what it is in the own loop, by its size or by the way that it went."""
        found, wanted, start = found.double(), wanted.double(), start.double()  # one may be a mask
        most_apart = 1e-5 * _largest(wanted - start) + 5e-7 * _largest(wanted)
        if not torch.allclose(found, wanted, rtol=0.0, atol=most_apart, equal_nan=True):
            why = (
                f"its step number {number} as a function comes to other numbers than in its own loop: it keeps "
                "something elsewhere, what it computes for one parameter depends on another one, or it uses a number "
                "of its constructor that is a tensor or a schedule here"
            )
            raise RefusedError(self._cls, why, _FIRST)

    def _example_hyper(self) -> Hyper:
        """Return tensors for tensors and schedules, with the numbers that the own loop's constructor gets."""
        return {name: map_items(_float64, name, self._arguments[name]) for name in self._dynamic}


def _float64(_: str, value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


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


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max())


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
