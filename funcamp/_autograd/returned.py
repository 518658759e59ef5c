"""What a loss function returns: the loss, and beside it buffers, aux or both."""

from __future__ import annotations

from torch import Tensor

from funcamp import _tree
from funcamp._types import Tree


def loss_in_front(returned: Tree) -> Tensor | None:
    """Return the loss in what a loss function returned, which is not checked yet; None if there is none."""
    loss = returned[0] if isinstance(returned, tuple) and returned else returned
    return loss if isinstance(loss, Tensor) else None


def pair(call: str, name: str, returned: Tree) -> tuple[Tree, Tree]:
    """Return what a loss returned if it is a pair; raise TypeError for anything else.

    Args:
        call: the public function, for errors.
        name: the function that returned it, by the name of its argument.
        returned: what it returned.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        rule = "must return a pair: (loss, aux), (loss, buffers) or (loss, (buffers, aux))"
        raise TypeError(f"{call}: {name} {rule}; got {_tree.brief(returned)}")
    return returned


def loss_and_aux(call: str, returned: Tree, beside: bool) -> tuple[Tensor, Tree]:
    """Return the loss, and what a loss function returned beside it if it returns more.

    Args:
        call: the public function, for errors.
        returned: what the loss function returned.
        beside: whether it returns more than the loss.

    Raises:
        TypeError: it returned no pair, or no floating-point tensor as loss.
    """
    loss, aux = pair(call, "loss_fn", returned) if beside else (returned, ())
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        raise TypeError(
            f"{call}: loss_fn must return a floating-point tensor as loss; got {_tree.describe(loss)}: with "
            "has_aux=True it returns (loss, aux)"
        )
    return loss, aux


def differentiable_loss_and_aux(call: str, returned: Tree, has_aux: bool) -> tuple[Tensor, Tree]:
    """Return the loss and aux that a loss function returned; raise if they cannot be differentiated and returned."""
    loss, aux = loss_and_aux(call, returned, has_aux)
    if loss.dim() != 0:
        got = f"{tuple(loss.shape)}: take its mean() or sum()"
        raise ValueError(f"{call}: loss_fn must return a loss of shape (); got {got}")
    if not loss.requires_grad:
        raise ValueError(
            f"{call}: loss_fn must return a loss that depends on the parameters through differentiable operations; got "
            "one with requires_grad=False, which trains nothing: compute it outside torch.no_grad(), without detach(), "
            "item(), argmax() or a comparison on the way"
        )
    for index, leaf in enumerate(_tree.leaves(aux)):
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{call}: aux{_tree.path_of(aux, index)} must be a tensor; got {_tree.describe(leaf)}")
    return loss, aux


def buffers_and_aux(before: dict[str, Tensor], beside: Tree, has_aux: bool) -> tuple[dict[str, Tensor], Tree]:
    """Return the new buffers and aux of what a loss with buffers returned besides itself.

    Args:
        before: the buffers that it got.
        beside: what it returned.
        has_aux: whether aux is in it.

    Raises:
        TypeError: this is not a dict of buffers, or not a pair with one.
        ValueError: the buffers have other names, shapes or dtypes than those given.
    """
    after = beside
    aux: Tree = ()
    if has_aux:
        if not isinstance(beside, tuple) or len(beside) != 2:
            got = _tree.brief(beside)
            raise TypeError(f"step: loss_fn must return (loss, (buffers, aux)) with both; got {got} besides loss")
        after, aux = beside
    if not isinstance(after, dict):
        raise TypeError(f"step: loss_fn must return its buffers as a dict; got {_tree.brief(after)}")
    for name in {**before, **after}:
        was, now = before.get(name), after.get(name)
        if was is None or now is None or was.shape != now.shape or was.dtype != now.dtype:
            raise ValueError(
                f"step: loss_fn must return buffers like those given; {name!r} was {_tree.describe(was)}, is "
                f"{_tree.describe(now)}: call a model that fills a buffer in its first call once before init, and "
                "leave out a smaller last batch (drop_last=True) if a buffer has the size of the batch"
            )
    return {name: after[name] for name in before}, aux
