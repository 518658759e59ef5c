"""What an instance of an optimizer's class does in a few steps on a few numbers: the truth for a trial."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from funcamp._optim.arguments import first_line, impure, is_own_refusal, is_torchs
from funcamp._optim.class_state import Changing
from funcamp._optim.containers import leaves_of
from funcamp._optim.instance import instance_of, set_in_group, step_of
from funcamp._optim.instance_state import (
    InstanceState,
    Kind,
    aliases_in,
    container_of,
    is_attribute,
    is_plain,
    kind_of,
    read_state,
    same,
    snapshot,
    wider,
    with_wrapped,
)
from funcamp._trace.python_state import Form as PythonForm
from funcamp._trace.python_state import survey
from funcamp._types import Kwargs


class Record(NamedTuple):
    """What an instance of the class does in a few steps."""

    params: list[Tensor]
    """Those before the first step."""
    grads: list[list[Tensor]]
    """Those of each step."""
    results: list[list[Tensor]]
    """The parameters after each step."""
    initial_state: InstanceState
    """What the instance keeps before the first step."""
    states: list[InstanceState]
    """What it keeps after each step."""
    aliases: set[frozenset[str]]
    """What it keeps in one memory after these steps, as in `aliases_in`."""
    late_grads: Sequence[Sequence[Tensor | None]] = ()
    """Others, in which the first parameter has none before the others have taken some steps."""
    late_results: Sequence[list[Tensor]] = ()
    """The parameters after each step with these, as long as the class does not fail."""


#: Steps of a trial. A class that rectifies, as RAdam does, takes another formula from the sixth on.
_STEPS = 12
#: Steps of a trial before the first parameter has a gradient, and those in which the second has none.
_LATENESS = 3
_GAP = (6, 7)
SEED = 0
#: A class may take matrices only, and those of one shape together; or a matrix and the bias after it.
_MATRICES = ((2, 3), (3, 2), (2, 3))
_SHAPES = ((2, 3), (2,), *_MATRICES[1:], (4,), (2, 2, 2, 1))
#: What is tried, one after another: some classes refuse a parameter of shape ().
_TRIALS = ((*_SHAPES, ()), _SHAPES, _MATRICES)


def recorded(cls: type[torch.optim.Optimizer], arguments: Kwargs, set_by_scheduler: Mapping[str, object]) -> Record:
    """Take a few steps with an instance of the class.

    Raises:
        TypeError: it raises.
    """
    # float64, or float32 for a class that mixes parameters with tensors of torch's default dtype.
    for shapes in _TRIALS:
        for dtype in (torch.float64, torch.float32):
            try:
                make = functools.partial(Loop, cls, arguments, set_by_scheduler)
                _refuse_values_of_parameters(make, _params_of(shapes, dtype))
                record = _record_of(make, _params_of(shapes, dtype))
                return record if is_torchs(cls) else _with_late_steps(make, record)
            except ElsewhereError as error:
                raise impure(
                    cls,
                    f"{error}; keep it in self.state[param], in the group or in an attribute, made by the first step",
                ) from None
            except Exception as error:
                if is_own_refusal(error):
                    raise
                last_error = error
    raise impure(
        cls,
        f"its step fails on a few numbers ({type(last_error).__name__}: {first_line(last_error)}); "
        "use it in an ordinary loop with funcamp.GradScaler",
    ) from last_error


class Loop:
    """torch's loop with an instance of the class, from parameters that it clones.

    Args:
        cls: the class.
        arguments: those of its constructor.
        set_by_scheduler: what a scheduler adds to the parameter group.
        params: the parameters.
        remembers: as in `instance_of`.
    """

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        arguments: Kwargs,
        set_by_scheduler: Mapping[str, object],
        params: list[Tensor],
        *,
        remembers: bool = False,
    ) -> None:
        self.params: list[Tensor] = [nn.Parameter(param.clone()) for param in params]
        torch.manual_seed(SEED)
        self.optimizer = instance_of(cls, self.params, dict(arguments), remembers=remembers)
        set_in_group(self.optimizer, set_by_scheduler)
        self._step = step_of(self.optimizer)

    def set(self, values: Mapping[str, object]) -> None:
        """Set hyperparameters, as a scheduler does."""
        set_in_group(self.optimizer, values)

    def step(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Take a step with clones of these gradients; return the parameters after it."""
        for param, grad in zip(self.params, grads):
            param.grad = None if grad is None else grad.clone()
        with torch.no_grad():
            self._step()
        return [param.detach().clone() for param in self.params]


#: Makes a loop from parameters.
_MakeLoop: TypeAlias = Callable[[list[Tensor]], Loop]


def _params_of(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    return [numbers_like(shape, dtype, offset) for offset, shape in enumerate(shapes)]


def _record_of(make_loop: _MakeLoop, params: list[Tensor]) -> Record:
    """Return a record without late gradients.

    Raises:
        ElsewhereError: the class keeps something where it cannot be followed.
    """
    loop = make_loop(params)
    record = Record(params, [], [], snapshot(read_state(loop.optimizer, loop.params)), [], set())
    before = forms_of(loop.optimizer)
    for number in range(_STEPS):
        grads = grads_of_step(params, number)
        record.grads.append(grads)
        record.results.append(loop.step(grads))
        state = read_state(loop.optimizer, loop.params)
        record.states.append(snapshot(state))
        record.aliases.update(aliases_in(state, loop.params))
    change = first_change(before, forms_of(loop.optimizer))
    if change is not None:
        raise ElsewhereError(f"its step changes {change}, where it is not followed")
    return record


def grads_of_step(params: list[Tensor], number: int) -> list[Tensor]:
    """Return the gradients of a step of a trial."""
    return [
        numbers_like(tuple(param.shape), param.dtype, 10 * number + offset + 3) for offset, param in enumerate(params)
    ]


def _with_late_steps(make_loop: _MakeLoop, record: Record) -> Record:
    """Return a record with steps in which the first parameter has its first gradient when others have taken some."""
    late_grads: list[list[Tensor | None]] = []
    late_results: list[list[Tensor]] = []
    loop = make_loop(record.params)
    for number, all_grads in enumerate(record.grads):
        grads: list[Tensor | None] = list(all_grads)
        if number < _LATENESS:
            grads[0] = None
        if number in _GAP:
            grads[1] = None
        try:
            result = loop.step(grads)
        except Exception:
            break  # the class fails for a parameter that begins late: the record has the steps until then
        late_grads.append(grads)
        late_results.append(result)
    return record._replace(late_grads=late_grads, late_results=late_results)


class ElsewhereError(Exception):
    """A class keeps something where it cannot be followed, such as a variable of its module."""


def forms_of(optimizer: torch.optim.Optimizer) -> dict[str, PythonForm]:
    """Return what the variables of a user's class and of its functions hold, and attributes that are no values."""
    cls = type(optimizer)
    roots: dict[str, object] = {cls.__name__: cls}
    for name, value in read_state(optimizer, []).shared.items():
        if is_attribute(name) and not is_plain(value):
            roots[name] = value
    slots = survey(roots, into_libraries=True)
    known_optimizers = with_wrapped(optimizer).values()
    for path, slot in slots.items():
        is_in_instance = not path.startswith(cls.__name__)
        is_optimizer = isinstance(slot.value, torch.optim.Optimizer) and is_in_instance
        if is_optimizer and not any(slot.value is known for known in known_optimizers):
            raise ElsewhereError(f"it keeps an optimizer as {path}, which is not followed")
    return {path: PythonForm(slot.value) for path, slot in slots.items()}


def first_change(before: Mapping[str, PythonForm], after: Mapping[str, PythonForm]) -> str | None:
    """Return what of `forms_of` has changed first, as the form describes it; None if nothing has."""
    for path, form in after.items():
        difference = before[path].difference(path, form) if path in before else None
        if difference is not None:
            return difference[0]
    return None


def _refuse_values_of_parameters(make_loop: _MakeLoop, params: list[Tensor]) -> None:
    """Refuse a class whose constructor keeps values of its parameters, which an instance for one step has not."""
    loop, other_loop = make_loop(params), make_loop([param + 1 for param in params])
    other_leaves = leaves_of(read_state(other_loop.optimizer, other_loop.params).shared)
    for name, leaf in leaves_of(read_state(loop.optimizer, loop.params).shared).items():
        if kind_of(leaf) is not None and not same(leaf, other_leaves.get(name)):
            raise ElsewhereError(f"{name} holds values of the parameters that the constructor got")


def numbers_like(shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
    """Return a tensor with numbers between -1 and 1, others for each offset; a matrix has full rank."""
    count = torch.Size(shape).numel()
    position = torch.arange(count, dtype=torch.float64) + (0.7 * offset + 0.1)
    return (position * (2.3 + 0.17 * position)).sin().reshape(shape).to(dtype)


# What changes from step to step: a number among it, such as a count, becomes a tensor of the state.


def changing_in(record: Record) -> Changing:
    """Return what changes from step to step."""
    per_param: dict[str, Kind] = {}
    shared: dict[str, Kind] = {}
    initial = record.initial_state
    names = {container_of(name) for state in record.states for name in state.shared.keys() - initial.shared.keys()}
    # The first step makes the state of a parameter, so that only the changes of later ones count.
    for before, after in zip(record.states, record.states[1:]):
        for old_contents, contents in zip(before.per_param, after.per_param):
            _note_changes(per_param, leaves_of(old_contents), leaves_of(contents))
    for before, after in zip([initial, *record.states], record.states):
        changed_names = _note_changes(shared, leaves_of(before.shared), leaves_of(after.shared))
        names |= set(map(container_of, changed_names))
    names = {name for name in names if all(is_plain(state.shared.get(name)) for state in record.states)}
    return Changing(per_param, shared, frozenset(names))


def _note_changes(kinds: dict[str, Kind], before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Note the kinds of the numbers that differ; return the names of everything that differs."""
    changed = [name for name, value in after.items() if name not in before or not same(before[name], value)]
    for name in changed:
        for value in (before.get(name), after[name]):
            kind = kind_of(value)
            if kind is not None and kind != "tensor":
                kinds[name] = wider(kinds.get(name), kind)
    return changed
