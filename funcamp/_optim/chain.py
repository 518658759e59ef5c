"""Several functions of an update as one optimizer: clip, step, average, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import Fixed, integer
from funcamp._optim.by_group import GroupedOptimizer, PureOptimizer, check_optimizer
from funcamp._optim.clip import check_limit, clip_grad_norm, clip_grad_value, coefficient
from funcamp._optim.ema import check_decay, ema_update
from funcamp._optim.stateless import StatelessOptimizer
from funcamp._storage.params import clone
from funcamp._types import Tree

if TYPE_CHECKING:
    from typing_extensions import TypeIs


class Update(NamedTuple):
    """What passes through a chain from part to part."""

    params: Tree
    """The parameters, as far as the parts have moved them."""
    gradients: Tree
    """The unscaled gradients, as far as the parts have changed them."""
    norm: Tensor | None = None
    """The 2-norm of the unscaled gradients, shape (), if it is known; a training step knows it."""


class Transform(Protocol):
    """A part of a chain with a state of its own."""

    def init(self, params: Tree) -> Tree:
        """Return the state before the first step."""
        ...

    def transform(self, update: Update, state: Tree) -> tuple[Update, Tree]:
        """Return the changed update and the next state."""
        ...


#: What a chain is made of. A function has no state; the others have, and `init` makes it.
Part: TypeAlias = PureOptimizer | Transform | Callable[[Update], Update]


class Average(NamedTuple):
    """The state of `average`."""

    average: Tree
    """The average of the parameters, laid out as they are."""


class Every(NamedTuple):
    """The state of `every`."""

    updates: Tensor
    """int64, shape (): the updates so far."""
    state: Tree
    """The state of the part; `()` for one without."""


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
        return self._packed([part.init(params) for part in self._with_state])

    def update(self, params: Tree, grads: Tree, opt_state: Tree) -> tuple[Tree, Tree]:
        """Return the parameters and the state after all parts; see `StatelessOptimizer.update`."""
        update, opt_state = self.transform(Update(params, grads), opt_state)
        return update.params, opt_state

    def transform(self, update: Update, state: Tree) -> tuple[Update, Tree]:
        """Return the update and the state after all parts."""
        old_states = iter(self._unpacked(state))
        new_states = []
        for part in self.parts:
            if is_function(part):
                update, _ = apply_part(part, update, ())
            else:
                update, new_state = apply_part(part, update, next(old_states))
                new_states.append(new_state)
        return update, self._packed(new_states)

    def learning_rate(self, opt_state: Tree) -> Any:
        """Return the learning rate of the next step, of the first part that has one; `()` if none has."""
        for part, state in zip(self._with_state, self._unpacked(opt_state)):
            rate = learning_rate_of(part, state)
            has_rate = not (isinstance(rate, tuple) and len(rate) == 0)
            if has_rate:
                return rate
        return ()

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
            raise ValueError(
                f"update: opt_state must be a tuple with a state for each of {self._with_state!r}; got "
                f"{_tree.brief(state)}: begin an average with state._replace(opt_state=(state.opt_state, "
                "funcamp.average(decay).init(state.params)))"
            )
        return list(state)


def is_function(part: Part) -> TypeIs[Callable[[Update], Update]]:
    """Return whether a part is a function of an update, which has no state."""
    return not hasattr(part, "init")


def is_transform(part: Part) -> TypeIs[Transform]:
    """Return whether a part is an object with `transform`."""
    # An optimizer of funcamp is not asked for the attribute: its AttributeError has its repr, which reads the values of
    # its tensors.
    return not isinstance(part, (StatelessOptimizer, GroupedOptimizer)) and hasattr(part, "transform")


def apply_part(part: Part, update: Update, state: Tree) -> tuple[Update, Tree]:
    """Return the update and the state after one part: a function, a `Transform` or an optimizer.

    Raises:
        TypeError: the part returns something else than an `Update`.
    """
    new_update: Any
    if is_function(part):
        new_update = part(update)
    elif is_transform(part):
        new_update, state = part.transform(update, state)
    else:
        params, state = part.update(update.params, update.gradients, state)
        new_update = update._replace(params=params)
    if not isinstance(new_update, Update):
        raise TypeError(
            f"chain: {part!r} must return an Update, such as update._replace(gradients=...); got "
            f"{_tree.brief(new_update)}"
        )
    # The known norm is that of the former gradients. A later part that needs a norm computes it.
    if new_update.gradients is not update.gradients:
        new_update = new_update._replace(norm=None)
    return new_update, state


def learning_rate_of(part: Part, state: Tree) -> Any:
    """Return the learning rate of a part's next step; `()` if it has none."""
    learning_rate = getattr(part, "learning_rate", None)
    return () if learning_rate is None else learning_rate(state)


def group_functions_in(optimizer: object) -> list[Callable[[str, Tensor], str]]:
    """Return the functions by which an optimizer groups parameters: those of every `by_group` in it, each once."""
    group_functions: list[Callable[[str, Tensor], str]] = []
    if isinstance(optimizer, GroupedOptimizer):
        group_functions.append(optimizer.group)
    for part in _parts_of(optimizer):
        group_functions += group_functions_in(part)
    return list(dict.fromkeys(group_functions))


def _parts_of(optimizer: object) -> tuple[Part, ...]:
    """Return what an optimizer is combined from; nothing if it is a single one."""
    if isinstance(optimizer, GroupedOptimizer):
        return tuple(optimizer.optimizers.values())
    if isinstance(optimizer, Chain):
        return optimizer.parts
    if isinstance(optimizer, _Delayed):
        return (optimizer.part,)
    return ()


def only_optimizer_of(optimizer: Any) -> Any:
    """Return the optimizer of a chain that besides only clips or averages; any other optimizer as it is."""
    if not isinstance(optimizer, Chain):
        return optimizer
    optimizers = [part for part in optimizer.parts if not is_function(part) and not _averages(part)]
    return optimizers[0] if len(optimizers) == 1 else optimizer


def _averages(part: Part) -> bool:
    """Return whether a part is the result of `average`, or `every` delays one."""
    if isinstance(part, _Delayed):
        part = part.part
    return isinstance(part, _Averaging)


def is_average_state(state: object) -> bool:
    """Return whether this is the state of `average`, or of one that `every` delays."""
    return isinstance(state, Average) or (isinstance(state, Every) and isinstance(state.state, Average))


def chain(*parts: Any) -> Chain:
    """Combine functions of an update with an optimizer: they run one after the other.

    The result has the `init` and `update` of an optimizer: use it in `make_train_step`, in `by_group`, or by itself. A
    part is one of three things. An optimizer (`stateless`, `by_group`, your own) moves the parameters. A function
    `(Update) -> Update` changes gradients or parameters: `clip_by_norm`, `clip_by_value`, or your own, such as
    `lambda update: update._replace(gradients=...)`. An object with `init(params) -> state` and `transform(update,
    state) -> (update, state)` also remembers something: `average`, `every`. Pure if its parts are; no sync.

    Args:
        *parts: in their order; a chain counts as its parts. The state is a tuple of the states of the parts that have
            one, or the state itself if only one has: `chain(clip_by_norm(1.0), adamw)` continues from adamw's.

    Returns:
        A `Chain`.

    Raises:
        TypeError: there is no part, or a part is none of these.

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


def check_part(call: str, name: str, part: Any) -> None:
    """Raise TypeError for what is no part of a chain."""
    if is_transform(part):
        return
    # A class is callable too, but is given by mistake for one of its objects.
    if is_function(part) and callable(part) and not isinstance(part, type):
        return
    check_optimizer(call, name, part)


@dataclass(frozen=True)
class _ClipByNorm:
    max_norm: float | Tensor

    def __repr__(self) -> str:
        return f"clip_by_norm({self.max_norm})"

    def __call__(self, update: Update) -> Update:
        if update.norm is None:
            clipped_gradients, _ = clip_grad_norm(update.gradients, self.max_norm)
            return update._replace(gradients=clipped_gradients)
        factor = coefficient(self.max_norm, update.norm)
        float32_factor = _tree.settled(factor.float())

        def clip(gradient: Tensor) -> Tensor:
            is_double = gradient.dtype in (torch.float64, torch.complex128)
            return gradient * (factor if is_double else float32_factor)

        flat_gradients, spec = _tree.flatten(update.gradients)
        return update._replace(gradients=_tree.map_leaves(clip, flat_gradients, spec))


def clip_by_norm(max_norm: float | Tensor) -> Callable[[Update], Update]:
    """Return a part of a chain that scales gradients so that their 2-norm is at most max_norm.

    grad = grad * min(1, max_norm / (norm + 1e-6)), as `clip_grad_norm`. The norm is that of the gradients that the part
    gets: inside `by_group` those of its group. As the first part of a training step's chain it takes the norm that the
    step has read already, and works with slices over ranks; anywhere else it reads the gradients once more. No sync.

    Args:
        max_norm: a positive Python number, or a tensor of shape ().

    Returns:
        A function of an `Update`.

    Raises:
        TypeError: max_norm is neither a number nor a tensor.
        ValueError: max_norm is a number that is not positive, or a tensor of another shape.

    Example:
        >>> clipped = chain(clip_by_norm(1.0), stateless(torch.optim.SGD, lr=1.0))
        >>> params = {"w": torch.zeros(2)}
        >>> clipped.update(params, {"w": torch.tensor([3.0, 4.0])}, clipped.init(params))[0]
        {'w': tensor([-0.6000, -0.8000])}

    References:
        `torch.nn.utils.clip_grad_norm_`, torch/nn/utils/clip_grad.py, PyTorch 2.13.
    """
    check_limit("clip_by_norm", "max_norm", max_norm)
    return _ClipByNorm(max_norm)


@dataclass(frozen=True)
class _ClipByValue:
    max_value: float | Tensor

    def __repr__(self) -> str:
        return f"clip_by_value({self.max_value})"

    def __call__(self, update: Update) -> Update:
        return update._replace(gradients=clip_grad_value(update.gradients, self.max_value))


def clip_by_value(max_value: float | Tensor) -> Callable[[Update], Update]:
    """Return a part of a chain that clamps every element of the gradients to [-max_value, max_value].

    As `clip_grad_value`. No sync.

    Args:
        max_value: a positive Python number, or a tensor of shape ().

    Returns:
        A function of an `Update`.

    Raises:
        TypeError: max_value is neither a number nor a tensor; when used: a gradient is complex.
        ValueError: max_value is a number that is not positive, or a tensor of another shape.

    Example:
        >>> clipped = chain(clip_by_value(1.0), stateless(torch.optim.SGD, lr=1.0))
        >>> params = {"w": torch.zeros(2)}
        >>> clipped.update(params, {"w": torch.tensor([3.0, -0.5])}, clipped.init(params))[0]
        {'w': tensor([-1.0000,  0.5000])}

    References:
        `torch.nn.utils.clip_grad_value_`, torch/nn/utils/clip_grad.py, PyTorch 2.13.
    """
    check_limit("clip_by_value", "max_value", max_value)
    return _ClipByValue(max_value)


@dataclass(frozen=True)
class _Averaging:
    decay: float

    def __repr__(self) -> str:
        return f"average({self.decay})"

    def init(self, params: Tree) -> Average:
        """Return the parameters themselves, in memory of their own."""
        return Average(clone(params))

    def transform(self, update: Update, state: Average) -> tuple[Update, Average]:
        """Move the average toward the parameters."""
        _check_state(self, state, Average)
        return update, Average(ema_update(state.average, update.params, self.decay))


def average(decay: float) -> Transform:
    """Return a part of a chain that keeps an exponential moving average of the parameters.

    average = average + (1 - decay) * (params - average), as `ema_update`, after the parts before it have moved the
    parameters: an optimizer comes first. The average begins as the parameters. It is a target network with polyak
    coefficient 1 - decay, too. In a training step `TrainState.ema` is the average. No sync.

    Args:
        decay: a Python number in [0, 1]; 0.999 averages over about a thousand steps.

    Returns:
        A part of a chain, whose state is an `Average`: a pytree with the field `average`.

    Raises:
        TypeError: decay is not a number.
        ValueError: decay is out of range.

    Example:
        >>> averaged = chain(stateless(torch.optim.SGD, lr=1.0), average(0.5))
        >>> params = {"w": torch.zeros(1)}
        >>> averaged.update(params, {"w": torch.ones(1)}, averaged.init(params))[1][1].average
        {'w': tensor([-0.5000])}

    References:
        `get_ema_multi_avg_fn`, torch/optim/swa_utils.py, PyTorch 2.13, which uses the same lerp.
    """
    check_decay("average", "decay", decay)
    return _Averaging(decay)


@dataclass(frozen=True)
class _Delayed:
    interval: int
    part: Part

    def __repr__(self) -> str:
        return f"every({self.interval}, {self.part!r})"

    def init(self, params: Tree) -> Every:
        """Return the part's state and a count of 0."""
        present = [leaf for leaf in _tree.leaves(params) if leaf is not None]
        device = present[0].device if present else None
        updates = torch.zeros((), dtype=torch.int64, device=device)
        part_state = () if is_function(self.part) else self.part.init(params)
        return Every(updates, part_state)

    def transform(self, update: Update, state: Every) -> tuple[Update, Every]:
        """Compute the part's update, and keep it at every interval-th call."""
        _check_state(self, state, Every)
        part_update, part_state = apply_part(self.part, update, state.state)
        updates = state.updates + 1
        is_due = updates % self.interval == 0
        params = _select(is_due, "params", part_update.params, update.params)
        gradients = _select(is_due, "gradients", part_update.gradients, update.gradients)
        new_state = Every(updates, _select(is_due, "state", part_state, state.state))
        return update._replace(params=params, gradients=gradients), new_state

    def learning_rate(self, state: Every) -> Any:
        """Return the part's learning rate; `()` if it has none."""
        return learning_rate_of(self.part, state.state)


def _check_state(part: Part, state: object, state_class: type) -> None:
    """Raise TypeError if a part got the state of another one."""
    if not isinstance(state, state_class):
        raise TypeError(
            f"update: opt_state must have the states of the chain's parts in their order; got {_tree.brief(state)} for "
            f"{part!r}"
        )


def _select(condition: Tensor, name: str, new: Tree, old: Tree) -> Tree:
    """Return the new tree where the condition holds, else the old one; the old one itself if the new one is the same.

    Raises:
        ValueError: they differ in structure, or in a None.
    """
    if new is old:
        return old
    _tree.same_structure("every", (f"the former {name}", f"the part's {name}"), (old, new))
    new_leaves, spec = _tree.flatten(new)
    selected: list[Tensor | None] = []
    for index, (new_leaf, old_leaf) in enumerate(zip(new_leaves, _tree.leaves(old))):
        if new_leaf is old_leaf:
            selected.append(new_leaf)
            continue
        if new_leaf is None or old_leaf is None or new_leaf.shape != old_leaf.shape:
            raise ValueError(
                f"every: the part must keep the shapes of {name}; at {_tree.path_of(new, index)} it has "
                f"{_tree.describe(new_leaf)} for {_tree.describe(old_leaf)}"
            )
        selected.append(torch.where(condition, new_leaf, old_leaf))
    return _tree.unflatten(selected, spec)


def every(interval: int, part: Any) -> Transform:
    """Return a part of a chain that acts at every interval-th update, and rests in between with its state.

    For a delayed actor or target network: `by_group({"critic": adam, "actor": chain(every(2, adam))})`. The first
    update that counts is number `interval`. The part is computed at every update and selected, without a sync; a
    skipped training step does not count.

    Args:
        interval: a positive integer.
        part: an optimizer or another part of a chain.

    Returns:
        A part of a chain, whose state is an `Every`: the number of updates and the part's state.

    Raises:
        TypeError: interval is not an integer, or part is no part of a chain.
        ValueError: interval is below 1.

    Example:
        >>> delayed = chain(every(2, stateless(torch.optim.SGD, lr=1.0)))
        >>> params, opt_state = {"w": torch.zeros(1)}, delayed.init({"w": torch.zeros(1)})
        >>> for _ in range(3):
        ...     params, opt_state = delayed.update(params, {"w": torch.ones(1)}, opt_state)
        >>> params
        {'w': tensor([-1.])}

    References:
        Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods", 2018: the delayed actor.
    """
    interval = integer("every", "interval", interval, 1)
    check_part("every", "part", part)
    return _Delayed(interval, part)
