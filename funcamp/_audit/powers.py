"""With which power of the scale a number grows that is computed of gradients.

A norm grows with the scale, a dot product of two gradients with its square, their cosine not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from funcamp._audit.events import Key


class Power(NamedTuple):
    """What a tensor has of the scale, if the gradients that it is computed of are scaled."""

    parameters: tuple[Key, ...]
    """Of the gradients."""
    degree: float = 1.0
    """The power of the scale."""
    reads: tuple[int, ...] = ()
    """The numbers of the reads of gradients, such as norms, that it is computed of."""


#: Results that grow as the largest of their inputs does.
_SAME = {"sum", "mean", "max", "amax", "min", "amin", "maximum", "minimum", "std", "norm", "linalg_vector_norm"}
_SAME |= {"_foreach_norm", "abs", "_foreach_abs", "neg", "clone", "_to_copy", "stack", "cat", "add", "sub", "clamp"}
_SAME |= {"clamp_min", "clamp_max", "view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "detach", "alias"}
_SAME |= {"unbind", "_local_scalar_dense", "histc", "select"}
#: The power of the only input.
_POWERS = {"var": 2.0, "square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
_PRODUCTS = {"mul", "dot", "vdot", "mv", "mm"}
#: The power of the first input less that of the second.
_QUOTIENTS = {"div", "gt", "lt", "ge", "le"}
#: What takes a number to the host, or decides by it.
USES = {"_local_scalar_dense", "histc", "gt", "lt", "ge", "le"}


def degree_of(name: str, arguments: Any, powers: list[Power | None], scales: Iterable[float]) -> float | None:
    """Return the degree of an operation's result; None if the operation is not known.

    It is 0 if a factor may be the scale: a number that a scaler returned, or a tensor of shape (). It is not known for
    a gradient times a number, by which the loop may unscale it.

    Args:
        name: the operation.
        arguments: its arguments, of which those that are tensors have powers.
        powers: of each argument; None for what is not computed of gradients.
        scales: what scalers returned as their scales.
    """
    known = [power.degree for power in powers if power is not None]
    if name in _SAME:
        return max(known, key=abs)
    if name in _POWERS:
        return known[0] * _POWERS[name]
    if name == "pow":
        return known[0] * arguments[1] if isinstance(arguments[1], (int, float)) else None
    if name not in _PRODUCTS | _QUOTIENTS or len(arguments) < 2:
        return None
    first, second = [0.0 if power is None else power.degree for power in powers[:2]]
    if name in USES:
        return first - second
    others = [argument for argument, power in zip(arguments, powers) if power is None]
    is_gradient = not any(power.reads for power in powers if power is not None)
    if is_gradient and any(isinstance(other, (int, float)) for other in others):
        return None
    if any(_may_be_scale(other, scales) for other in others):
        return 0.0
    return first + second if name in _PRODUCTS else first - second


def _may_be_scale(factor: Any, scales: Iterable[float]) -> bool:
    if isinstance(factor, Tensor):
        return factor.dim() == 0
    if not isinstance(factor, (int, float)) or not factor:
        return False
    return any(math.isclose(factor, scale) or math.isclose(factor, 1 / scale) for scale in scales if scale)
