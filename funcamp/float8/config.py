"""How tensors are scaled into float8: Python values only, checked when created; the recipes of other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

from funcamp import _tree
from funcamp._check import boolean, integer

Scaling = Literal["current", "delayed"]
Granularity = Literal["tensor", "row"]
Amax = Literal["max", "most_recent"]

#: The formats of the forward pass and of gradients, with their largest numbers.
FORWARD = torch.float8_e4m3fn
BACKWARD = torch.float8_e5m2
LARGEST = {dtype: torch.finfo(dtype).max for dtype in (FORWARD, BACKWARD)}

#: The sizes that float8 products accept are multiples of this.
MULTIPLE = 16

_CALL = "Float8Config"


def fits(shape: Sequence[int]) -> bool:
    """Return whether the hardware takes a matrix of this shape."""
    return all(size and size % MULTIPLE == 0 for size in shape)


@dataclass(frozen=True)
class Float8Config:
    """The constants of float8 scaling: Python values, hashable, constants of a compiled graph.

    A tensor is stored as E4M3 (inputs and weights) or E5M2 (gradients) of tensor * scale, saturated. The scale comes
    from the largest magnitude (amax) of the tensor itself, or of the tensor in earlier steps.

    Args:
        scaling: "current" computes the scale from the present tensor and has no state. "delayed" uses the scale of
            a `Float8State`, from the amaxes of the steps before.
        granularity: "tensor" for one scale per tensor, "row" for one per row of the operands of each product, along
            the dimension that it sums over, with bfloat16 products; delayed scaling has one per tensor.
        power_of_two: round the current scale down to a power of two.
        history: number of amaxes that delayed scaling remembers, from 1 to 2**20.
        amax: delayed scaling takes the "max" of the history, or its "most_recent" entry.
        margin: delayed scaling leaves this many binades free, from 0 to 8: the scale is divided by 2**margin.
        emulate: multiply in float32 instead, on any device. The same bits as the float8 product on a CPU, slow.

    Raises:
        TypeError: a value is not of the type given above.
        ValueError: a value is out of the range given above; power_of_two or "row" is given with delayed scaling.

    Example:
        >>> Float8Config(granularity="row").scaling
        'current'
    """

    scaling: Scaling = "current"
    granularity: Granularity = "tensor"
    power_of_two: bool = False
    history: int = 1024
    amax: Amax = "max"
    margin: int = 0
    emulate: bool = False

    def __post_init__(self) -> None:
        for name, literal in (("scaling", Scaling), ("granularity", Granularity), ("amax", Amax)):
            value = getattr(self, name)
            choices = get_args(literal)
            if value not in choices:
                raise ValueError(f"{_CALL}: {name} must be {' or '.join(map(repr, choices))}; got {value!r}")
        for name in ("power_of_two", "emulate"):
            boolean(_CALL, name, getattr(self, name))
        integer(_CALL, "history", self.history, 1, 2**20)
        integer(_CALL, "margin", self.margin, 0, 8)
        if self.scaling == "delayed" and (self.by_row or self.power_of_two):
            raise ValueError(
                f"{_CALL}: granularity must be 'tensor' and power_of_two False with delayed scaling, whose scale is "
                f"one per tensor and not rounded; got {self.granularity!r} and {self.power_of_two}"
            )

    def __str__(self) -> str:
        parts: list[str] = [self.scaling]
        for name, value in vars(self).items():
            if name != "scaling" and value != _DEFAULTS[name]:
                parts.append(f"{name}={value}")
        return "|".join(parts)

    @classmethod
    def parse(cls, text: str) -> Float8Config:
        """Return the configuration that prints as `text`: `delayed|history=16|emulate=True`.

        Raises:
            TypeError: text is not a string.
            ValueError: a part of it is invalid.
        """
        if not isinstance(text, str):
            raise TypeError(f"{_CALL}.parse: text must be a string; got {text!r}")
        scaling, *parts = text.split("|")
        arguments: dict[str, Any] = {"scaling": scaling}
        for part in parts:
            name, _, text_value = part.partition("=")
            value = _parse_value(name, text_value)
            if name in arguments or value is None:
                names = ", ".join(_DEFAULTS)
                raise ValueError(
                    f"{_CALL}.parse: text must give each of {names} a valid value, once at most; got {part!r}"
                )
            arguments[name] = value
        return cls(**arguments)

    @property
    def by_row(self) -> bool:
        """Whether every row has a scale."""
        return self.granularity == "row"

    def why_not(self, shape: Sequence[int]) -> str:
        """Return why a weight of this shape does not multiply in float8; "" if it does."""
        return "" if fits(shape) else f"its sizes {tuple(shape)} are not multiples of {MULTIPLE}"


_DEFAULTS: dict[str, object] = {field.name: field.default for field in fields(Float8Config)}


def _parse_value(name: str, text: str) -> bool | int | str | None:
    """Return a field's value from its text; None if there is no such field, or the text is not of its type."""
    default = _DEFAULTS.get(name)
    if isinstance(default, bool):
        return text == "True" if text in ("True", "False") else None
    if isinstance(default, int):
        return int(text) if text.isdecimal() else None
    return text if isinstance(default, str) else None


def check_config(call: str, config: object, scaling: Scaling | None = None) -> Float8Config:
    """Return the configuration if it is a `Float8Config` with this scaling.

    Raises:
        TypeError: it is something else.
        ValueError: it has the other scaling.
    """
    if not isinstance(config, Float8Config):
        names = ", ".join(field.name for field in fields(Float8Config))
        raise TypeError(f"{call}: config must be a Float8Config ({names}); got {_tree.brief(config)}")
    if scaling is not None and config.scaling != scaling:
        fix = "for example float8.transformer_engine()" if scaling == "delayed" else "for example Float8Config()"
        raise ValueError(f"{call}: config must have {scaling} scaling ({fix}); got {config.scaling!r}")
    return config


def torchao(recipe_name: str = "tensorwise", *, emulate: bool = False) -> Float8Config:
    """Return current scaling as torchao's recipes have it.

    The scale is f32(largest / max(f64(amax), 1e-12)), bit for bit torchao's. Its "rowwise" recipe rounds scales down
    to powers of two, as here, and has E4M3 gradients; here gradients are E5M2. No sync.

    Args:
        recipe_name: "tensorwise" or "rowwise".
        emulate: as in `Float8Config`.

    Raises:
        ValueError: recipe_name is another name.

    Example:
        >>> torchao("rowwise").power_of_two
        True

    References:
        torchao/float8/config.py and float8_utils.py, pytorch/ao at 36027d8.
    """
    if recipe_name not in ("tensorwise", "rowwise"):
        raise ValueError(f"torchao: recipe_name must be 'tensorwise' or 'rowwise'; got {recipe_name!r}")
    if recipe_name == "rowwise":
        return Float8Config(granularity="row", power_of_two=True, emulate=emulate)
    return Float8Config(emulate=emulate)


def transformer_engine(
    margin: int = 0, amax_history_len: int = 1024, amax_compute_algo: Amax = "max", *, emulate: bool = False
) -> Float8Config:
    """Return delayed scaling by the rule of TransformerEngine's `DelayedScaling`, with its defaults.

    One difference: a step that is skipped, or an amax that is not finite, never enters the history. There a single
    infinite amax keeps the scale until it leaves the history. No sync.

    Args:
        margin: as in `Float8Config`.
        amax_history_len: the history of `Float8Config`.
        amax_compute_algo: the amax of `Float8Config`.
        emulate: as in `Float8Config`.

    Raises:
        TypeError: a value has another type.
        ValueError: a value is out of range.

    Example:
        >>> transformer_engine(amax_history_len=16).history
        16

    References:
        transformer_engine/common/recipe/delayed_scaling.cu and __init__.py, NVIDIA/TransformerEngine at d0067d0.
    """
    return Float8Config("delayed", history=amax_history_len, amax=amax_compute_algo, margin=margin, emulate=emulate)


def megatron(
    fp8_margin: int = 0,
    fp8_amax_history_len: int = 1,
    fp8_amax_compute_algo: Amax = "most_recent",
    *,
    emulate: bool = False,
) -> Float8Config:
    """Return delayed scaling with the defaults of Megatron-LM: the amax of the last step.

    The rule is `transformer_engine`'s. No sync.

    Args:
        fp8_margin: the margin of `Float8Config`.
        fp8_amax_history_len: the history of `Float8Config`.
        fp8_amax_compute_algo: the amax of `Float8Config`.
        emulate: as in `Float8Config`.

    Raises:
        TypeError: a value has another type.
        ValueError: a value is out of range.

    Example:
        >>> megatron().amax
        'most_recent'

    References:
        megatron/core/transformer/transformer_config.py, NVIDIA/Megatron-LM.
    """
    return transformer_engine(fp8_margin, fp8_amax_history_len, fp8_amax_compute_algo, emulate=emulate)


def flax(amax_history_length: int = 1024, *, emulate: bool = False) -> Float8Config:
    """Return delayed scaling as flax's `Fp8DotGeneralOp` has it.

    The rule is `transformer_engine`'s. flax stores the reciprocal of the scale and computes it at the start of the
    next step, from the same amaxes. Differences: an amax of 0 does not enter the history, because a layer that is
    not used has it, and a scale beyond float32 becomes float32's largest number, not infinity. No sync.

    Args:
        amax_history_length: the history of `Float8Config`.
        emulate: as in `Float8Config`.

    Raises:
        TypeError: a value has another type.
        ValueError: a value is out of range.

    Example:
        >>> flax() == transformer_engine()
        True

    References:
        flax/linen/fp8_ops.py, flax 0.12.
    """
    return transformer_engine(0, amax_history_length, emulate=emulate)
