"""Which parameters torch.autocast would cast: a fact of a module's classes.

The policy of a step casts them in advance. A parameter is not among them if a subclass or an instance overrides
forward, because the override may read it in full precision.
"""

from __future__ import annotations

import sys

from torch import nn

from funcamp._autograd.module_walk import join

_WEIGHT_AND_BIAS = frozenset({"weight", "bias"})

#: Per module class, the parameters that its forward uses only in operations that torch.autocast casts.
_CAST_KEYS_BY_CLASS: dict[type[nn.Module], frozenset[str]] = {
    nn.Linear: _WEIGHT_AND_BIAS,
    nn.Conv1d: _WEIGHT_AND_BIAS,
    nn.Conv2d: _WEIGHT_AND_BIAS,
    nn.Conv3d: _WEIGHT_AND_BIAS,
    nn.ConvTranspose1d: _WEIGHT_AND_BIAS,
    nn.ConvTranspose2d: _WEIGHT_AND_BIAS,
    nn.ConvTranspose3d: _WEIGHT_AND_BIAS,
    # Not the weight of its output projection, which is a Linear and has its own entry.
    nn.MultiheadAttention: frozenset(
        {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"}
    ),
}

#: The methods with which these classes read their parameters.
_FORWARD_METHODS = ("forward", "_conv_forward")


def cast_by_autocast(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of a model that only operations which autocast casts use."""
    names: set[str] = set()
    for prefix, module in model.named_modules():
        names.update(join(prefix, key) for key in _cast_keys(module))
    return frozenset(names)


def _cast_keys(module: nn.Module) -> frozenset[str]:
    """Return the names in a module of its own parameters that autocast would cast."""
    for layer_class, keys in _cast_keys_by_class().items():
        if isinstance(module, layer_class):
            if not _has_forward_of(layer_class, module):
                return frozenset()
            return frozenset(key for key in keys if module._parameters.get(key) is not None)
    return frozenset()


def _cast_keys_by_class() -> dict[type[nn.Module], frozenset[str]]:
    """Return the classes of torch, and that of transformers if a program has imported it."""
    # GPT-2's layers: a product with the weight transposed. There is none in the model if it was not imported.
    transposed_linear = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    if transposed_linear is None:
        return _CAST_KEYS_BY_CLASS
    return {**_CAST_KEYS_BY_CLASS, transposed_linear: _WEIGHT_AND_BIAS}


def _has_forward_of(layer_class: type[nn.Module], module: nn.Module) -> bool:
    """Return whether a module computes with the forward method of this class of torch."""
    for method in _FORWARD_METHODS:
        is_replaced = method in vars(module)
        is_overridden = getattr(type(module), method, None) is not getattr(layer_class, method, None)
        if is_replaced or is_overridden:
            return False
    return True
