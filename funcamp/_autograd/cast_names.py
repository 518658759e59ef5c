"""Which parameters torch.autocast would cast, and which weights only linear layers read."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

from funcamp._autograd.module_tensors import join

_LAYER = frozenset({"weight", "bias"})


#: Per module class, the parameters that its forward uses only in operations that torch.autocast casts.
_CAST: dict[type[nn.Module], frozenset[str]] = {
    **dict.fromkeys((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), _LAYER),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _LAYER),
    nn.MultiheadAttention: frozenset(
        {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"}
    ),
}


def cast_by_autocast(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's own parameters that only operations which autocast casts use."""
    # GPT-2's layers: a product with the weight transposed. There is none in the model if it was not imported.
    transposed = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    for kind, names in (_CAST if transposed is None else _CAST | {transposed: _LAYER}).items():
        if isinstance(module, kind):
            own = all(
                name not in vars(module) and getattr(type(module), name, None) is getattr(kind, name, None)
                for name in ("forward", "_conv_forward")
            )
            return frozenset(n for n in names if module._parameters.get(n) is not None) if own else frozenset()
    return frozenset()


def linear_weights(model: nn.Module) -> Iterator[str]:
    attention = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    inner = {id(part) for module in attention for part in module.children()}
    for prefix, module in model.named_modules():
        # Attention reads the weight of its projection and does not call the layer.
        if isinstance(module, nn.Linear) and id(module) not in inner and "weight" in cast_by_autocast(module):
            yield join(prefix, "weight")
