"""Which parameters torch.autocast would cast, and which weights only linear layers read: a fact of a module's classes.

The policy of a step casts the first in advance, and multiplies by the second in float8. A parameter is in neither set
if a subclass or an instance has a forward method of its own, because that may read it in full precision.
"""

from __future__ import annotations

import sys

from torch import nn

from funcamp._autograd.module_walk import join

_WEIGHT_AND_BIAS = frozenset({"weight", "bias"})
_OF_ATTENTION = frozenset({"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"})
_LAYERS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)

#: Per module class, the parameters that its forward uses only in operations that torch.autocast casts.
_CAST_IN: dict[type[nn.Module], frozenset[str]] = {
    **dict.fromkeys(_LAYERS, _WEIGHT_AND_BIAS),
    nn.MultiheadAttention: _OF_ATTENTION,
}

#: The methods with which these classes read their parameters.
_FORWARD_METHODS = ("forward", "_conv_forward")


def cast_by_autocast(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of a model that only operations which autocast casts use."""
    names: set[str] = set()
    for prefix, module in model.named_modules():
        names.update(join(prefix, key) for key in _cast_keys(module))
    return frozenset(names)


def read_by_linear_layers(model: nn.Module) -> frozenset[str]:
    """Return the names of the weights that only a linear layer's own forward multiplies by."""
    # Attention reads the weight of its projection and does not call the layer.
    of_attention: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            of_attention.update(map(id, module.children()))
    names: set[str] = set()
    for prefix, module in model.named_modules():
        is_called = isinstance(module, nn.Linear) and id(module) not in of_attention
        if is_called and "weight" in _cast_keys(module):
            names.add(join(prefix, "weight"))
    return frozenset(names)


def _cast_keys(module: nn.Module) -> frozenset[str]:
    """Return the names in a module of its own parameters that autocast would cast."""
    for kind, keys in _cast_in().items():
        if isinstance(module, kind):
            if not _has_forward_of(kind, module):
                return frozenset()
            return frozenset(key for key in keys if module._parameters.get(key) is not None)
    return frozenset()


def _cast_in() -> dict[type[nn.Module], frozenset[str]]:
    # GPT-2's layers: a product with the weight transposed. There is none in the model if it was not imported.
    transposed = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    if transposed is None:
        return _CAST_IN
    return {**_CAST_IN, transposed: _WEIGHT_AND_BIAS}


def _has_forward_of(kind: type[nn.Module], module: nn.Module) -> bool:
    """Return whether a module computes with the forward method of this class of torch."""
    for method in _FORWARD_METHODS:
        is_replaced = method in vars(module)
        is_overridden = getattr(type(module), method, None) is not getattr(kind, method, None)
        if is_replaced or is_overridden:
            return False
    return True
