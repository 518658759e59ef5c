"""A part of a chain: a function of an update, an object with a state, or an optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._memory import MemoryMark, memory_of
from funcamp._optim.arguments import EXAMPLE
from funcamp._storage.params import collapse, expand
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
    """A part of a chain that has a state."""

    def init(self, params: Tree) -> Tree:
        """Return the state before the first step."""
        ...

    def transform(self, update: Update, state: Tree) -> tuple[Update, Tree]:
        """Return the changed update and the next state."""
        ...


#: What a chain is made of: a function of an update, which has no state, a `Transform`, or an optimizer, an object with
#: `init(params) -> state` and `update(params, grads, state) -> (params, state)`. One of the user's own gets every
#: parameter in its shape, as it may take a norm of each; the others take groups of them, `Params`.
Part: TypeAlias = Any


def is_function(part: Part) -> bool:
    """Return whether a part is a function of an update, which has no state."""
    return not hasattr(part, "init")


def first_state(part: Part, params: Tree) -> Tree:
    """Return the state of a part before the first step; `()` for a function."""
    if is_function(part):
        return ()
    return part.init(expand(params) if _is_own(part) else params)


def apply_part(part: Part, update: Update, state: Tree) -> tuple[Update, Tree]:
    """Return the update and the state after one part: a function, a `Transform` or an optimizer.

    Raises:
        TypeError: the part returns something else than an `Update`.
        ValueError: it has written into what it got.
    """
    if not _is_own(part):
        return _applied(part, update, state)
    in_shapes = update._replace(params=expand(update.params), gradients=expand(update.gradients))
    # Dynamo does not read the version of a tensor.
    is_compared = not torch.compiler.is_dynamo_compiling()
    marks_before = _marks(in_shapes, state) if is_compared else []
    new_update, new_state = _applied(part, in_shapes, state)
    if is_compared and _marks(in_shapes, state) != marks_before:
        raise ValueError(
            f"chain: {part!r} must not write into the parameters, the gradients or the state that it gets: a skipped "
            "step could not undo it, and a clip would not see it: compute new tensors, such as g * 0.5 instead of "
            "g.mul_(0.5), and torch.where(mask, 0, g) instead of g[mask] = 0"
        )
    params = _stored(update.params, in_shapes.params, new_update.params)
    gradients = _stored(update.gradients, in_shapes.gradients, new_update.gradients)
    return new_update._replace(params=params, gradients=gradients), new_state


def _stored(before: Tree, in_shapes: Tree, new: Tree) -> Tree:
    """Return what a part makes of a tree, stored as the tree is: the tree itself if the part returned what it got."""
    return before if new is in_shapes else collapse(before, new)


def _marks(update: Update, state: Tree) -> list[tuple[int, MemoryMark]]:
    """Return what changes if a tensor of an update or a state is written, or another one is put in its place."""
    return [(id(tensor), memory_of(tensor)) for tensor in _tree.tensors_in((update, state))]


def _applied(part: Part, update: Update, state: Tree) -> tuple[Update, Tree]:
    new_update: object
    if is_function(part):
        new_update = part(update)
    elif hasattr(part, "transform"):
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


def _is_own(part: Part) -> bool:
    """Return whether a part is the user's own."""
    return not type(part).__module__.startswith("funcamp.")


def learning_rate_of(part: object, state: Tree) -> Tree:
    """Return the learning rate of a part's next step; `()` if it has none."""
    learning_rate = getattr(part, "learning_rate", None)
    return () if learning_rate is None else learning_rate(state)


def is_rate(rate: Tree) -> bool:
    """Return whether there is a learning rate; `()` says that there is none."""
    return not (isinstance(rate, tuple) and len(rate) == 0)


def evaluation_params_of(part: object, params: Tree, state: Tree) -> Tree:
    """Return the parameters with which a part evaluates: the same if it has no others."""
    evaluation_params = getattr(part, "evaluation_params", None)
    if evaluation_params is None:
        return params
    if not _is_own(part):
        return evaluation_params(params, state)
    return collapse(params, evaluation_params(expand(params), state))


def check_part(call: str, name: str, part: object) -> None:
    """Raise TypeError for what is no part of a chain."""
    # A class is callable too, but is given by mistake for one of its objects.
    if not hasattr(part, "transform") and (not is_function(part) or not callable(part) or isinstance(part, type)):
        check_optimizer(call, name, part)


def check_optimizer(call: str, name: str, optimizer: object) -> None:
    """Raise TypeError if a value has no init and update."""
    # A class has both methods too, but its objects are meant.
    if isinstance(optimizer, type) or not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise TypeError(
            f"{call}: {name} must be a pure optimizer with init and update; got {_tree.brief(optimizer)}: write "
            f"{EXAMPLE}"
        )
