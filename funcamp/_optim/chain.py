"""Several functions of an update as one optimizer: clip, step, average, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from funcamp import _tree
from funcamp._check import Fixed
from funcamp._optim.average import Average, Averaging
from funcamp._optim.by_group import GroupedOptimizer
from funcamp._optim.clip import Clipping
from funcamp._optim.every import Delayed, Every
from funcamp._optim.part import (
    Part,
    Update,
    apply_part,
    check_part,
    evaluation_params_of,
    first_state,
    is_function,
    is_rate,
    learning_rate_of,
)
from funcamp._types import Tree


class Chain(Fixed):
    """Several parts as one optimizer; made by `chain`."""

    _instead = "Call chain with other parts: the new one continues from the same state"

    parts: tuple[Part, ...]

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts
        self._with_state = [part for part in parts if not is_function(part)]

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.parts))})"

    def init(self, params: Tree) -> Tree:
        """Return the states of the parts that have one: of a single part its state, of several a tuple of theirs."""
        return self._packed([first_state(part, params) for part in self._with_state])

    def update(self, params: Tree, grads: Tree, opt_state: Tree) -> tuple[Tree, Tree]:
        """Return the parameters and the state after all parts; see `StatelessOptimizer.update`."""
        update, opt_state = self.transform(Update(params, grads), opt_state)
        return update.params, opt_state

    def transform(self, update: Update, state: Tree) -> tuple[Update, Tree]:
        """Return the update and the state after all parts."""
        old_states = iter(self._unpacked(state))
        new_states = []
        for part in self.parts:
            has_state = not is_function(part)
            update, new_state = apply_part(part, update, next(old_states) if has_state else ())
            if has_state:
                new_states.append(new_state)
        return update, self._packed(new_states)

    def learning_rate(self, opt_state: Tree) -> Tree:
        """Return the learning rate of the next step, of the first part that has one; `()` if none has."""
        for part, state in zip(self._with_state, self._unpacked(opt_state)):
            rate = learning_rate_of(part, state)
            if is_rate(rate):
                return rate
        return ()

    def evaluation_params(self, params: Tree, opt_state: Tree) -> Tree:
        """Return the parameters to evaluate with, as all parts make them; see `StatelessOptimizer`."""
        for part, state in zip(self._with_state, self._unpacked(opt_state)):
            params = evaluation_params_of(part, params, state)
        return params

    def _packed(self, states: list[Tree]) -> Tree:
        """Return the states of the parts as the state of the chain."""
        return states[0] if len(states) == 1 else tuple(states)

    def _unpacked(self, state: Tree) -> list[Tree]:
        """Return the states of the parts that have one: the inverse of `_packed`.

        Raises:
            ValueError: the state is not a tuple of as many states.
        """
        expected_count = len(self._with_state)
        if expected_count == 1:
            return [state]
        # Not isinstance: an OptState, the state of a chain in which only one part has a state, is a tuple too.
        if type(state) is not tuple or len(state) != expected_count:
            states_before = "*state.opt_state" if type(state) is tuple else "state.opt_state"
            raise ValueError(
                f"update: opt_state must be a tuple with a state for each of {self._with_state!r}; got "
                f"{_tree.brief(state)}: begin an average with state._replace(opt_state=({states_before}, "
                "funcamp.average(decay).init(state.params)))"
            )
        return list(state)


def all_in(optimizer: object) -> Iterator[object]:
    """Yield an optimizer, and everything that it is combined from."""
    yield optimizer
    for part in _parts_of(optimizer):
        yield from all_in(part)


def _parts_of(optimizer: object) -> tuple[Part, ...]:
    """Return what an optimizer is combined from; nothing if it is a single one."""
    if isinstance(optimizer, GroupedOptimizer):
        return tuple(optimizer.optimizers.values())
    if isinstance(optimizer, Chain):
        return optimizer.parts
    if isinstance(optimizer, Delayed):
        return (optimizer.part,)
    return ()


def group_functions_in(optimizer: object) -> list[Callable[[str, Tensor], str]]:
    """Return the functions by which an optimizer groups parameters: those of every `by_group` in it, each once."""
    return list(dict.fromkeys(part.group for part in all_in(optimizer) if isinstance(part, GroupedOptimizer)))


def single_parts_in(optimizer: object) -> list[object]:
    """Return the functions and optimizers that an optimizer is combined from at last; a single one is itself."""
    return [part for part in all_in(optimizer) if not _parts_of(part)]


def check_nothing_is_clipped_last(call: str, optimizer: object) -> None:
    """Raise ValueError for a chain that clips gradients which no later part reads."""
    for chained in all_in(optimizer):
        readers = [part for part in _parts_of(chained) if not _averages(part)]
        if isinstance(chained, Chain) and readers and isinstance(readers[-1], Clipping):
            raise ValueError(
                f"{call}: optimizer must have a part after {readers[-1]!r} that reads the clipped gradients, such as "
                f"stateless(torch.optim.AdamW); got {chained!r}"
            )


def check_averages_are_found(call: str, optimizer: object) -> None:
    """Raise ValueError for an average in a group, or in a chain that `every` delays, where an evaluation has none."""
    own_parts = optimizer.parts if isinstance(optimizer, Chain) else (optimizer,)
    averages = [part for part in all_in(optimizer) if isinstance(part, Averaging)]
    if len(averages) > sum(map(_averages, own_parts)):
        raise ValueError(
            f"{call}: optimizer must have its averages as parts of its outermost chain, from where TrainState.ema and "
            f"evaluating take them; got {optimizer!r}: write chain(by_group(...), average(decay)), or "
            "every(k, average(decay)) there"
        )


def only_optimizer_of(optimizer: Any) -> Any:
    """Return the optimizer of a chain whose other parts only clip or average; any other optimizer as it is."""
    if not isinstance(optimizer, Chain):
        return optimizer
    optimizers = [part for part in optimizer.parts if not is_function(part) and not _averages(part)]
    return optimizers[0] if len(optimizers) == 1 else optimizer


def _averages(part: Part) -> bool:
    """Return whether a part is the result of `average`, or `every` delays one."""
    if isinstance(part, Delayed):
        part = part.part
    return isinstance(part, Averaging)


def average_in(part_state: object) -> Average | None:
    """Return the state of `average`, also of one that `every` delays; None for the state of another part."""
    state = part_state.state if isinstance(part_state, Every) else part_state
    return state if isinstance(state, Average) else None


def chain(*parts: Any) -> Chain:
    """Combine functions of an update with an optimizer: they run one after the other.

    The result has the `init` and `update` of an optimizer: use it in `make_train_step`, in `by_group`, or by itself. A
    part is one of three things. An optimizer (`stateless`, `by_group`, your own) moves the parameters. A function
    `(Update) -> Update` changes gradients or parameters: `clip_by_norm`, `clip_by_value`, or your own, such as
    `lambda update: update._replace(gradients=...)`. An object with `init(params) -> state` and `transform(update,
    state) -> (update, state)` also remembers something: `average`, `every`. No part may write into what it gets.
    Pure if its parts are; no sync.

    Args:
        *parts: in their order; a chain counts as its parts. The state is a tuple of the states of the parts that have
            one, or the state itself if only one has: `chain(clip_by_norm(1.0), adamw)` continues from adamw's.

    Returns:
        A `Chain`.

    Raises:
        TypeError: there is no part, or a part is none of these.
        ValueError: when used: a part has written into what it gets; under your own torch.compile this is not seen.

    Example:
        >>> sgd = stateless(torch.optim.SGD, lr=1.0)
        >>> clipped = chain(clip_by_value(0.5), sgd, average(0.75))
        >>> params = {"w": torch.zeros(1)}
        >>> params, opt_state = clipped.update(params, {"w": torch.ones(1)}, clipped.init(params))
        >>> params, opt_state[1].average
        ({'w': tensor([-0.5000])}, {'w': tensor([-0.1250])})

    References:
        `optax.chain`, optax 0.2, whose transforms change updates; here an optimizer returns the new parameters.
    """
    if not parts:
        raise TypeError("chain: parts must be given, such as clip_by_norm(1.0) and an optimizer; got none")
    flat_parts: list[Part] = []
    for index, part in enumerate(parts):
        check_part("chain", f"parts[{index}]", part)
        if isinstance(part, Chain):
            flat_parts += part.parts
        else:
            flat_parts.append(part)
    return Chain(tuple(flat_parts))
