"""The precision policy: which parameters the loss gets in the compute dtype.

torch.autocast casts a weight at its first use in a region and stores the cast in a hidden cache, so the gradients of
several uses are summed in the low precision before they reach the float32 weight. Here the copy is an explicit value
and the gradient is taken with respect to it: the sum is the same, and no cache can become stale.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcamp._check import boolean
from funcamp._types import name_of
from funcamp._upstream.encoder_kernels import without_encoder_kernels

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class Policy:
    """The precision in which the loss computes, and the parameters that get a copy in it.

    Parameters stay in float32. The loss gets copies of the selected ones and runs under torch.autocast, which casts
    activations and does not change the copies. For a loss of `module_loss` these are the weights and biases that
    autocast would cast: those of Linear, convolutions and attention projections whose forward is torch's, and of
    GPT-2's layers, without embeddings and norms. For any other loss they are the float32 tensors of two or more
    dimensions. `keep` and `copy` overrule both by name: put a layer's weight into `keep` if it is also used outside the
    layer (in a penalty).

    Args:
        compute_dtype: torch.float16, torch.bfloat16, or torch.float32 for neither copies nor autocast.
        autocast: whether the loss runs under torch.autocast.
        keep: globs of dotted names, `*` for any characters: these stay float32 (an embedding in your own loss).
        copy: globs of dotted names: these are copied, whatever their module or shape. `keep` takes precedence. A step's
            `init` raises for a glob of either that matches no parameter, trainable or frozen.

    Raises:
        TypeError: a value is not of the type given above.
        ValueError: compute_dtype is another dtype; a glob is empty or contains a comma, bar, equals sign or space.

    Example:
        >>> str(Policy(torch.float16, keep=("embed.*",)))
        'float16,keep=embed.*'
        >>> Policy.parse("bfloat16").compute_dtype
        torch.bfloat16
    """

    compute_dtype: torch.dtype = torch.float16
    autocast: bool = True
    keep: tuple[str, ...] = ()
    copy: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.compute_dtype, torch.dtype):
            raise TypeError(f"Policy: compute_dtype must be a torch.dtype; got {self.compute_dtype!r}")
        if self.compute_dtype not in _DTYPES.values():
            raise ValueError(f"Policy: compute_dtype must be one of {', '.join(_DTYPES)}; got {self.compute_dtype}")
        boolean("Policy", "autocast", self.autocast)
        object.__setattr__(self, "keep", _checked_globs("keep", self.keep))
        object.__setattr__(self, "copy", _checked_globs("copy", self.copy))

    def __str__(self) -> str:
        parts = [name_of(self.compute_dtype)]
        if not self.autocast:
            parts.append("autocast=off")
        if self.keep:
            parts.append(f"keep={'|'.join(self.keep)}")
        if self.copy:
            parts.append(f"copy={'|'.join(self.copy)}")
        return ",".join(parts)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Return the policy that a text describes.

        The form is `dtype[,keep=glob|glob][,copy=glob|glob]`; the dtype is float16, bfloat16 or float32.

        Raises:
            TypeError: text is not a string.
            ValueError: a part of it is invalid.

        Example:
            >>> Policy.parse("float16,keep=embed.*|pos")
            Policy(compute_dtype=torch.float16, autocast=True, keep=('embed.*', 'pos'), copy=())
        """
        if not isinstance(text, str):
            raise TypeError(f"Policy.parse: text must be a string; got {text!r}")
        dtype_name, *option_texts = [part.strip() for part in text.split(",")]
        dtype = _DTYPES.get(dtype_name)
        if dtype is None:
            raise ValueError(f"Policy.parse: text must begin with a dtype, one of {', '.join(_DTYPES)}; got {text!r}")
        options: dict[str, Any] = {}
        for option_text in option_texts:
            name, _, value = option_text.partition("=")
            if name not in ("keep", "copy") or name in options:
                raise ValueError(f"Policy.parse: text must have keep= or copy= once each; got {option_text!r}")
            options[name] = tuple(value.split("|"))
        return cls(dtype, **options)

    def casts(self, name: str, leaf: Tensor, known: frozenset[str] | None) -> bool:
        """Return whether the loss gets the tensor of this name in the compute dtype.

        `known`: the names that autocast would cast, if the loss knows them.
        """
        if self.compute_dtype == torch.float32 or leaf.dtype != torch.float32:
            return False
        if _matches_any(self.keep, name):
            return False
        if _matches_any(self.copy, name):
            return True
        if known is None:
            return leaf.dim() >= 2
        return name in known

    def check_names(self, call: str, names: Sequence[str]) -> None:
        """Raise ValueError if a glob of keep or copy matches no parameter's name: a typo would have no effect."""
        for field, globs in (("keep", self.keep), ("copy", self.copy)):
            for glob in globs:
                if not any(_matches(glob, name) for name in names):
                    first_names = ", ".join(map(repr, names[:4])) + (", ..." if len(names) > 4 else "")
                    raise ValueError(
                        f"{call}: every glob in the policy's {field} must match a parameter's name; got {glob!r}, and "
                        f"the names are {first_names}: correct it ({glob + '.*'!r} for all of a layer) or leave it out"
                    )


def check_policy(call: str, policy: object) -> Policy:
    """Return the policy, created from a string, a dtype or None if needed; raise TypeError for anything else."""
    if isinstance(policy, str):
        return Policy.parse(policy)
    if policy is None or isinstance(policy, torch.dtype):
        return Policy(policy or torch.float32)
    if not isinstance(policy, Policy):
        raise TypeError(f"{call}: policy must be a Policy, a string, a torch.dtype or None; got {policy!r}")
    return policy


def _checked_globs(field: str, globs: object) -> tuple[str, ...]:
    """Return the globs of a field of a policy.

    Raises:
        TypeError: they are not a tuple or list of strings.
        ValueError: one is empty, or has a character that `Policy.parse` needs.
    """
    if not isinstance(globs, (tuple, list)) or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"Policy: {field} must be a tuple of strings; got {globs!r}")
    for glob in globs:
        if not glob or set(glob) & set(",|= "):
            raise ValueError(f"Policy: {field} must hold globs without comma, bar, equals or space; got {glob!r}")
    return tuple(globs)


def _matches_any(globs: Sequence[str], name: str) -> bool:
    return any(_matches(glob, name) for glob in globs)


def _matches(glob: str, name: str) -> bool:
    """Return whether a name is what a glob describes, in which only `*` is special: any characters, dots too."""
    pattern = ".*".join(re.escape(text) for text in glob.split("*"))
    return re.fullmatch(pattern, name, re.DOTALL) is not None


def autocast_of(policy: Policy, device_type: str) -> contextlib.AbstractContextManager[object]:
    """Return the region in which a loss computes, also inside of a caller's; none for a policy without a low dtype."""
    if policy.compute_dtype == torch.float32 or device_type == "meta":  # autocast does not know the meta device
        return contextlib.nullcontext()
    region = torch.autocast(device_type, policy.compute_dtype, enabled=policy.autocast)
    return without_encoder_kernels(region) if device_type == "cpu" and policy.autocast else region
