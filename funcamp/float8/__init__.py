"""Float8 products as pure functions: a scale for each tensor, as `funcamp` has one for the loss.

`scaled_mm` is the product of a linear layer; `quantize` one tensor. `Float8Config` says how tensors are scaled: by
the present tensor, or by the amaxes of earlier steps, which `init` and `update` keep as a pure state. `torchao`,
`transformer_engine`, `megatron` and `flax` return the configurations of these libraries.
"""

from funcamp.float8.config import Float8Config, flax, megatron, torchao, transformer_engine
from funcamp.float8.product import scaled_mm
from funcamp.float8.quantized import Quantized, quantize
from funcamp.float8.state import Float8State, init, update

__all__ = [
    "Float8Config",
    "Float8State",
    "Quantized",
    "flax",
    "init",
    "megatron",
    "quantize",
    "scaled_mm",
    "torchao",
    "transformer_engine",
    "update",
]
