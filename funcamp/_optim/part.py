"""A part of a chain: a function of an update, an object with a state, or an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from funcamp import _tree
from funcamp._optim.by_group import GroupedOptimizer, PureOptimizer, check_optimizer
from funcamp._optim.optimizer import StatelessOptimizer
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
    """A part of a chain that has a state."""

    def init(self, params: Tree) -> Tree:
        """Return the state before the first step."""
        ...

    def transform(self, update: Update, state: Tree) -> tuple[Update, Tree]:
        """Return the changed update and the next state."""
        ...


#: What a chain is made of. A function has no state; the others have, and `init` makes it.
Part: TypeAlias = PureOptimizer | Transform | Callable[[Update], Update]


def is_function(part: object) -> TypeIs[Callable[[Update], Update]]:
    """Return whether a part is a function of an update, which has no state."""
    return not hasattr(part, "init")


def is_transform(part: object) -> TypeIs[Transform]:
    """Return whether a part is an object with `transform`."""
    # An optimizer of funcamp is not asked for the attribute: its AttributeError has its repr, which reads the values of
    # its tensors.
    return not isinstance(part, (StatelessOptimizer, GroupedOptimizer)) and hasattr(part, "transform")


def apply_part(part: Part, update: Update, state: Tree) -> tuple[Update, Tree]:
    """Return the update and the state after one part: a function, a `Transform` or an optimizer.

    Raises:
        TypeError: the part returns something else than an `Update`.
    """
    new_update: object
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


def learning_rate_of(part: Part, state: Tree) -> Tree:
    """Return the learning rate of a part's next step; `()` if it has none."""
    learning_rate = getattr(part, "learning_rate", None)
    return () if learning_rate is None else learning_rate(state)


def evaluation_params_of(part: Part, params: Tree, state: Tree) -> Tree:
    """Return the parameters with which a part evaluates: the same if it has no others."""
    evaluation_params = getattr(part, "evaluation_params", None)
    return params if evaluation_params is None else evaluation_params(params, state)


def check_part(call: str, name: str, part: object) -> None:
    """Raise TypeError for what is no part of a chain."""
    if is_transform(part):
        return
    # A class is callable too, but is given by mistake for one of its objects.
    if is_function(part) and callable(part) and not isinstance(part, type):
        return
    check_optimizer(call, name, part)


def check_state(part: Part, state: object, state_class: type) -> None:
    """Raise TypeError if a part got the state of another one."""
    if not isinstance(state, state_class):
        raise TypeError(
            f"update: opt_state must have the states of the chain's parts in their order; got {_tree.brief(state)} for "
            f"{part!r}"
        )
