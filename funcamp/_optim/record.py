"""What an instance of an optimizer's class does in a few steps on a few numbers: the truth for a trial."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcamp._optim.arguments import first_line, impure, is_own_refusal, is_torchs
from funcamp._optim.class_state import Changing
from funcamp._optim.containers import leaves_of
from funcamp._optim.instance import instance_of, step_of
from funcamp._optim.instance_state import (
    ATTRIBUTE,
    InstanceState,
    Kind,
    aliases_in,
    is_plain,
    kind_of,
    read_state,
    same,
    snapshot,
    wider,
)
from funcamp._trace.python_state import Form as PythonForm
from funcamp._trace.python_state import survey


class Record(NamedTuple):
    """What an instance of the class does in a few steps."""

    params: list[Tensor]
    """Those before the first step."""
    grads: list[list[Tensor]]
    """Those of each step."""
    results: list[list[Tensor]]
    """The parameters after each step."""
    constructed: InstanceState
    """What the instance holds before the first step."""
    held: list[InstanceState]
    """What it holds after each step."""
    aliases: set[frozenset[str]]
    """What it holds in one memory after these steps, as in `aliases_in`."""
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
#: A class may take matrices only, and those of one shape together.
_MATRICES = ((2, 3), (3, 2), (2, 3))
_SHAPES = (*_MATRICES, (4,), (2, 2, 2, 1))
#: What is tried, one after another: some classes refuse a parameter of shape ().
_TRIALS = ((*_SHAPES, ()), _SHAPES, _MATRICES)


def recorded(cls: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> Record:
    """Take a few steps with an instance of the class.

    Raises:
        TypeError: it raises.
    """
    # float64, or float32 for a class that mixes parameters with tensors of torch's default dtype.
    for shapes in _TRIALS:
        for dtype in (torch.float64, torch.float32):
            try:
                record = _record_of(cls, arguments, shapes, dtype)
                return record if is_torchs(cls) else _with_late_steps(cls, arguments, record)
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


def _record_of(
    cls: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    shapes: Iterable[tuple[int, ...]],
    dtype: torch.dtype,
) -> Record:
    params = [_numbers(shape, dtype, offset) for offset, shape in enumerate(shapes)]
    own_params: list[Tensor] = [nn.Parameter(param.clone()) for param in params]
    torch.manual_seed(SEED)
    optimizer = instance_of(cls, own_params, dict(arguments))
    record = Record(params, [], [], snapshot(read_state(optimizer, own_params)), [], set())
    _refuse_memory_of_parameters(cls, arguments, params, record.constructed)
    step = step_of(optimizer)
    before = forms_of(optimizer)
    for number in range(_STEPS):
        grads = [_numbers(tuple(param.shape), dtype, 10 * number + offset + 3) for offset, param in enumerate(params)]
        for param, grad in zip(own_params, grads):
            param.grad = grad.clone()
        with torch.no_grad():
            step()
        record.grads.append(grads)
        record.results.append([param.detach().clone() for param in own_params])
        held = read_state(optimizer, own_params)
        record.held.append(snapshot(held))
        record.aliases.update(aliases_in(held, own_params))
    for path, form in forms_of(optimizer).items():
        change = before[path].difference(path, form) if path in before else None
        if change is not None:
            raise ElsewhereError(f"its step changes {change[0]}, where it is not followed")
    return record


def _with_late_steps(cls: type[torch.optim.Optimizer], arguments: Mapping[str, Any], record: Record) -> Record:
    """Return a record with steps in which the first parameter has its first gradient when others have taken some."""
    params: list[Tensor] = [nn.Parameter(param.clone()) for param in record.params]
    late_grads: list[list[Tensor | None]] = []
    late_results: list[list[Tensor]] = []
    torch.manual_seed(SEED)
    step = step_of(instance_of(cls, params, dict(arguments)))
    for number, grads in enumerate(record.grads):
        given: list[Tensor | None] = list(grads)
        if number < _LATENESS:
            given[0] = None
        if number in _GAP:
            given[1] = None
        for param, grad in zip(params, given):
            param.grad = None if grad is None else grad.clone()
        try:
            with torch.no_grad():
                step()
        except Exception:
            break  # it has nothing for such a parameter
        late_grads.append(given)
        late_results.append([param.detach().clone() for param in params])
    return record._replace(late_grads=late_grads, late_results=late_results)


class ElsewhereError(Exception):
    """A class keeps something where it cannot be followed, such as a variable of its module."""


def forms_of(optimizer: torch.optim.Optimizer) -> dict[str, PythonForm]:
    """Return what the variables of a user's class and of its functions hold, and attributes that are no values."""
    cls = type(optimizer)
    roots: dict[str, object] = {cls.__name__: cls}
    for name, value in read_state(optimizer, []).shared.items():
        if name.startswith(ATTRIBUTE) and not is_plain(value):
            roots[name] = value
    return {path: PythonForm(slot.value) for path, slot in survey(roots).items()}


def _refuse_memory_of_parameters(
    cls: type[torch.optim.Optimizer], arguments: Mapping[str, Any], params: list[Tensor], constructed: InstanceState
) -> None:
    """Refuse a class whose constructor keeps values of its parameters, which an instance for one step has not."""
    others: list[Tensor] = [nn.Parameter(param + 1) for param in params]
    leaves = leaves_of(snapshot(read_state(instance_of(cls, others, dict(arguments)), others)).shared)
    for name, leaf in leaves_of(constructed.shared).items():
        if kind_of(leaf) is not None and not same(leaf, leaves.get(name)):
            raise ElsewhereError(f"{name} holds values of the parameters that the constructor got")


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
    """Return a tensor with numbers between -1 and 1, others for each offset."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float64).add(0.7 * offset + 0.1).mul(2.3).sin().reshape(shape).to(dtype)


def changing_in(record: Record) -> Changing:
    """Return what changes from step to step."""
    leaves: dict[str, Kind] = {}
    shared: dict[str, Kind] = {}
    names = {key_of(name) for held in record.held for name in held.shared.keys() - record.constructed.shared.keys()}
    for before, after in zip(record.held, record.held[1:]):
        for former, held in zip(before.per_param, after.per_param):
            _note_changes(leaves, leaves_of(former), leaves_of(held))
    for before, after in zip([record.constructed, *record.held], record.held):
        names |= {key_of(name) for name in _note_changes(shared, leaves_of(before.shared), leaves_of(after.shared))}
    names = {name for name in names if all(is_plain(held.shared.get(name)) for held in record.held)}
    return Changing(leaves, shared, frozenset(names))


def _note_changes(kinds: dict[str, Kind], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Note the kinds of the numbers that differ; return the names of everything that differs."""
    changed = [name for name, value in after.items() if name not in before or not same(before[name], value)]
    for name in changed:
        for value in (before.get(name), after[name]):
            kind = kind_of(value)
            if kind is not None and kind != "tensor":
                kinds[name] = wider(kinds.get(name), kind)
    return changed


def key_of(name: str) -> str:
    """Return the key of the container in which an entry is."""
    return name.partition("[")[0]


def distance(tensors: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, relative to the tensor's largest element."""
    if len(tensors) != len(expected):
        return float("inf")
    distances = [0.0]
    for tensor, reference in zip(tensors, expected):
        if reference.numel() == 0:
            continue
        reference = reference.double()
        tensor = tensor.double()
        largest = reference.abs().max().clamp(min=1e-30)
        distance = float((tensor - reference).abs().max() / largest)
        distances.append(float("inf") if distance != distance else distance)
    return max(distances)


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors are equal; NaN equals NaN, of which a path that is not taken may be full."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
