"""A part of a chain: a function of an update, an object with a state, or an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._memory import MemoryMark, memory_of
from funcamp._optim.arguments import EXAMPLE
from funcamp._storage.params import collapse, expand
from funcamp._types import Tree


class Update(NamedTuple):
    """What passes through a chain from part to part.

    A part of the user's own gets trees of parameters in their shapes, the others also trees in groups (`Params`).
    """

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
    return _called(part, part.init, expand(params)) if _is_own(part) else part.init(params)


def apply_part(part: Part, update: Update, state: Tree) -> tuple[Update, Tree]:
    """Return the update and the state after one part: a function, a `Transform` or an optimizer.

    Raises:
        TypeError: the part returns something else than an `Update`.
        ValueError: it has written into what it got, or returns parameters or gradients of another form.
    """
    new, new_state = (_applied_in_shapes if _is_own(part) else _applied)(part, update, state)
    # The known norm is that of the former gradients. A later part that needs a norm computes it.
    if new.gradients is not update.gradients:
        new = new._replace(norm=None)
    return new, new_state


def _applied_in_shapes(part: Part, update: Update, state: Tree) -> tuple[Update, Tree]:
    in_shapes = update._replace(params=expand(update.params), gradients=expand(update.gradients))
    new, new_state = _called(part, partial(_applied, part), in_shapes, state)
    params = _stored(part, "params", update.params, in_shapes.params, new.params)
    gradients = _stored(part, "gradients", update.gradients, in_shapes.gradients, new.gradients)
    return new._replace(params=params, gradients=gradients), new_state


def _called(part: Part, call: Callable[..., Any], in_shapes: Tree, *state: Tree) -> Any:
    """Return what a call of the user's own part returns; it gets a copy of a tree, so that the tree keeps its items.

    Raises:
        ValueError: it has written into what it is given.
    """
    given = (_tree.unflatten(*_tree.flatten(in_shapes)), *state)
    if torch.compiler.is_dynamo_compiling():  # Dynamo does not read the version of a tensor
        return call(*given)
    marks_before = _marks(given)
    result = call(*given)
    if _marks(given) != marks_before:
        raise ValueError(
            f"chain: {part!r} must not write into the parameters, the gradients or the state that it gets: a skipped "
            "step could not undo it, and a clip would not see it: compute new tensors, such as g * 0.5 instead of "
            "g.mul_(0.5), torch.where(mask, 0, g) instead of g[mask] = 0, and a new dict instead of grads['w'] = g"
        )
    return result


def _stored(part: Part, name: str, before: Tree, in_shapes: Tree, new: Tree) -> Tree:
    """Return what the user's own part makes of a tree in shapes, stored as the tree was before.

    Raises:
        ValueError: it has another structure, or a leaf another shape, or a parameter another dtype.
    """
    names = f"the {name} that it gets", "those that it returns"
    _tree.same_structure(f"chain: {part!r}", names, (in_shapes, new))
    pairs = list(zip(_tree.leaves(in_shapes), _tree.leaves(new)))
    if all(old is leaf for old, leaf in pairs):
        return before
    for index, (old, leaf) in enumerate(pairs):
        if _form(old, name) != _form(leaf, name):
            raise ValueError(
                f"chain: {part!r} must return {name}{_tree.path_of(new, index)} as it got it, {_tree.describe(old)}; "
                f"got {_tree.describe(leaf)}: return what does not change too, zeros for no gradient, and cast by "
                ".to(p.dtype)"
            )
    return collapse(before, new)


def _form(leaf: object, name: str) -> object:
    """Return what of a leaf a part must not change."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.shape, leaf.dtype if name == "params" else None


def _marks(given: Tree) -> list[tuple[int, MemoryMark]]:
    """Return what changes if a tensor of a tree is written, or another one is put in its place."""
    return [(id(tensor), memory_of(tensor)) for tensor in _tree.tensors_in(given)]


def _applied(part: Part, update: Update, state: Tree) -> tuple[Update, Tree]:
    new_update: object
    if is_function(part):
        new_update = part(update)
    elif hasattr(part, "transform"):
        new_update, state = part.transform(update, state)
    else:
        result = part.update(update.params, update.gradients, state)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"chain: {part!r} must return (params, state) from update; got {_tree.brief(result)}")
        new_update, state = update._replace(params=result[0]), result[1]
    if not isinstance(new_update, Update):
        raise TypeError(
            f"chain: {part!r} must return an Update, such as update._replace(gradients=...); got "
            f"{_tree.brief(new_update)}"
        )
    return new_update, state


def _is_own(part: Part) -> bool:
    """Return whether a part is the user's own."""
    return not str(getattr(part, "__module__", "")).startswith("funcamp.")


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
    in_shapes = expand(params)
    return _stored(part, "params", params, in_shapes, _called(part, evaluation_params, in_shapes, state))


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
