"""Several functions of an update as one optimizer: clip, step, average, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import Fixed, integer
from funcamp._optim.by_group import GroupedOptimizer, check_optimizer
from funcamp._optim.clip import check_limit, clip_grad_norm, clip_grad_value, coefficient
from funcamp._optim.ema import check_decay, ema_update
from funcamp._optim.stateless import StatelessOptimizer
from funcamp._storage.params import clone
from funcamp._types import Tree


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

    parts: tuple[Any, ...]

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts
        self._with_state = [part for part in parts if hasattr(part, "init")]

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
        states = iter(self._unpacked(state))
        after = []
        for part in self.parts:
            if hasattr(part, "init"):
                update, part_state = apply(part, update, next(states))
                after.append(part_state)
            else:
                update, _ = apply(part, update, ())
        return update, self._packed(after)

    def learning_rate(self, opt_state: Tree) -> Any:
        """Return the learning rate of the next step, of the first part that has one; `()` if none has."""
        for part, state in zip(self._with_state, self._unpacked(opt_state)):
            rate_of = getattr(part, "learning_rate", None)
            rate = () if rate_of is None else rate_of(state)
            if not (isinstance(rate, tuple) and not rate):
                return rate
        return ()

    def _packed(self, states: list[Tree]) -> Tree:
        return states[0] if len(states) == 1 else tuple(states)

    def _unpacked(self, state: Tree) -> list[Tree]:
        count = len(self._with_state)
        if count == 1:
            return [state]
        # An OptState is a tuple too, of a chain with one state.
        if type(state) is not tuple or len(state) != count:
            raise ValueError(
                f"update: opt_state must be a tuple with a state for each of {self._with_state!r}; got "
                f"{_tree.brief(state)}: begin an average with state._replace(opt_state=(state.opt_state, "
                "funcamp.average(decay).init(state.params)))"
            )
        return list(state)


def is_transform(part: Any) -> bool:
    """Return whether a part is an object with `transform`; without asking an optimizer, whose error is a long text."""
    return not isinstance(part, (StatelessOptimizer, GroupedOptimizer)) and hasattr(part, "transform")


def apply(part: Any, update: Update, state: Tree) -> tuple[Update, Tree]:
    """Return the update and the state after one part: a function, a `Transform` or an optimizer."""
    after: Any
    if not hasattr(part, "init"):
        after = part(update)
    elif is_transform(part):
        after, state = part.transform(update, state)
    else:
        params, state = part.update(update.params, update.gradients, state)
        after = update._replace(params=params)
    if not isinstance(after, Update):
        raise TypeError(
            f"chain: {part!r} must return an Update, such as update._replace(gradients=...); got {_tree.brief(after)}"
        )
    if after.gradients is not update.gradients:  # the norm was that of the former ones
        after = after._replace(norm=None)
    return after, state


def group_functions_in(optimizer: Any) -> list[Callable[[str, Tensor], str]]:
    """Return the functions by which an optimizer groups parameters: those of every `by_group` in it, each once."""
    if isinstance(optimizer, GroupedOptimizer):
        found, parts = [optimizer.group], tuple(optimizer.optimizers.values())
    elif isinstance(optimizer, Chain):
        found, parts = [], optimizer.parts
    elif isinstance(optimizer, _Delayed):
        found, parts = [], (optimizer.part,)
    else:
        return []
    for part in parts:
        found += group_functions_in(part)
    return list(dict.fromkeys(found))


def optimizer_in(optimizer: Any) -> Any:
    """Return the optimizer of a chain that besides only clips or averages; any other optimizer as it is."""
    if not isinstance(optimizer, Chain):
        return optimizer
    others = [part for part in optimizer.parts if hasattr(part, "init") and not _is_average(part)]
    return others[0] if len(others) == 1 else optimizer


def _is_average(part: Any) -> bool:
    return isinstance(part, _Averaging) or (isinstance(part, _Delayed) and isinstance(part.part, _Averaging))


def is_average(state: object) -> bool:
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
    flat: list[Any] = []
    for number, part in enumerate(parts):
        check_part("chain", f"parts[{number}]", part)
        flat += part.parts if isinstance(part, Chain) else [part]
    return Chain(tuple(flat))


def check_part(call: str, name: str, part: Any) -> None:
    """Raise TypeError for what is no part of a chain."""
    if is_transform(part) or (callable(part) and not hasattr(part, "init") and not isinstance(part, type)):
        return
    check_optimizer(call, name, part)


@dataclass(frozen=True)
class _ClipByNorm:
    max_norm: float | Tensor

    def __repr__(self) -> str:
        return f"clip_by_norm({self.max_norm})"

    def __call__(self, update: Update) -> Update:
        if update.norm is None:
            return update._replace(gradients=clip_grad_norm(update.gradients, self.max_norm)[0])
        wide = coefficient(self.max_norm, update.norm)
        factor = _tree.settled(wide.float())

        def clip(leaf: Tensor) -> Tensor:
            return leaf * (wide if leaf.dtype in (torch.float64, torch.complex128) else factor)

        return update._replace(gradients=_tree.map_leaves(clip, *_tree.flatten(update.gradients)))


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
        _check_kind(self, state, Average)
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
    part: Any

    def __repr__(self) -> str:
        return f"every({self.interval}, {self.part!r})"

    def init(self, params: Tree) -> Every:
        """Return the part's state and a count of 0."""
        device = next((leaf.device for leaf in _tree.leaves(params) if leaf is not None), None)
        state = self.part.init(params) if hasattr(self.part, "init") else ()
        return Every(torch.zeros((), dtype=torch.int64, device=device), state)

    def transform(self, update: Update, state: Every) -> tuple[Update, Every]:
        """Compute the part's update, and keep it at every interval-th call."""
        _check_kind(self, state, Every)
        after, part_state = apply(self.part, update, state.state)
        updates = state.updates + 1
        is_due = updates % self.interval == 0
        params = _select(is_due, "params", after.params, update.params)
        gradients = _select(is_due, "gradients", after.gradients, update.gradients)
        new = update._replace(params=params, gradients=gradients)
        return new, Every(updates, _select(is_due, "state", part_state, state.state))

    def learning_rate(self, state: Every) -> Any:
        """Return the part's learning rate; `()` if it has none."""
        rate = getattr(self.part, "learning_rate", None)
        return () if rate is None else rate(state.state)


def _check_kind(part: Any, state: object, kind: type) -> None:
    """Raise TypeError if a part got the state of another one."""
    if not isinstance(state, kind):
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
    leaves, spec = _tree.flatten(new)
    chosen: list[Tensor | None] = []
    for index, (leaf, other) in enumerate(zip(leaves, _tree.leaves(old))):
        if leaf is not other and (leaf is None or other is None or leaf.shape != other.shape):
            raise ValueError(
                f"every: the part must keep the shapes of {name}; at {_tree.path_of(new, index)} it has "
                f"{_tree.describe(leaf)} for {_tree.describe(other)}"
            )
        chosen.append(leaf if leaf is other else torch.where(condition, leaf, other))
    return _tree.unflatten(chosen, spec)


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
