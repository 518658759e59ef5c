"""Linear layers in float8: a scale for each tensor of a product, computed from that tensor.

`convert` changes the linear layers of a model; everything around them stays as it is. `scaled_mm` is their product,
and `quantize` makes one tensor of it. `Float8Config` says how tensors are scaled.
"""

from funcamp.float8.config import Float8Config
from funcamp.float8.linear import Float8Linear, convert
from funcamp.float8.product import scaled_mm
from funcamp.float8.quantized import Quantized, quantize

__all__ = [
    "Float8Config",
    "Float8Linear",
    "Quantized",
    "convert",
    "quantize",
    "scaled_mm",
]
