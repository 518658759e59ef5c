"""The linear layers of a model in float8: another class for a layer that keeps its parameters, names and hooks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from funcamp import _tree
from funcamp.float8.config import MULTIPLE, Float8Config, check_config, fits
from funcamp.float8.product import scaled_mm


class Float8Linear(nn.Linear):
    """A `torch.nn.Linear` that multiplies in float8; made by `convert`.

    y = scaled_mm(x, weight) + bias. Input and output have the shapes of a Linear's, (..., in) and (..., out). Raises
    what `scaled_mm` raises. No sync.

    Example:
        >>> from funcamp import float8
        >>> layer = torch.nn.Linear(16, 32)
        >>> float8.convert(layer)
        ['']
        >>> layer
        Float8Linear(in_features=16, out_features=32, bias=True, granularity='tensor')
    """

    float8: Float8Config

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # Linear's name
        """Return the product with the weight, and the bias added, in the dtype of the product."""
        y = scaled_mm(input, self.weight, self.float8)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Return what a Linear shows, and how tensors are scaled."""
        return f"{super().extra_repr()}, granularity={self.float8.granularity!r}"


def convert(model: nn.Module, config: Float8Config = Float8Config(), *, keep: Sequence[str] = ()) -> list[str]:
    """Make the linear layers of a model multiply in float8, in place; return their names.

    Each `torch.nn.Linear` becomes a `Float8Linear`: the same object with the same parameters, hooks and names in the
    state_dict. Convert before the loss and the step are made. Subclasses of Linear are left as they are, because they
    compute in their own way (that of torch.nn.MultiheadAttention is never called); so are layers with a `forward` of
    their own. No sync.

    Args:
        model: a module, or one Linear.
        config: how tensors are scaled.
        keep: names of modules whose linear layers stay as they are, such as the head or a block.

    Returns:
        The names of the converted layers, as in `model.named_modules()`.

    Raises:
        TypeError: an argument has another type.
        ValueError: keep names no module of the model; a layer's size is not a multiple of 16; there is no layer to
            convert. The model is then unchanged.

    Example:
        >>> from funcamp import float8
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 10))
        >>> float8.convert(model, keep=["2"])
        ['0']

    References:
        torchao/float8/float8_linear_utils.py, pytorch/ao at 36027d8.
    """
    call = "float8.convert"
    if not isinstance(model, nn.Module):
        raise TypeError(f"{call}: model must be a torch.nn.Module; got {_tree.brief(model)}")
    config = check_config(call, config)
    kept = _modules_in(call, model, keep)
    layers: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        # Not subclasses, nor a layer whose instance has another forward: the class would not change what it computes.
        if type(module) is nn.Linear and "forward" not in vars(module) and module not in kept:
            layers[name] = module
    if not layers:
        raise ValueError(
            f"{call}: model must have a torch.nn.Linear (not a subclass, nor one that keep names) to convert; got none "
            f"in {type(model).__name__}"
        )
    misfits = {name: tuple(layer.weight.shape) for name, layer in layers.items() if not fits(layer.weight.shape)}
    if misfits:
        listed = ", ".join(f"{name!r} {shape}" for name, shape in misfits.items())
        raise ValueError(
            f"{call}: the sizes of every layer must be multiples of {MULTIPLE}, as float8 products need it; got "
            f"{listed}: pad these layers, or leave them out with keep={[*keep, *misfits]}"
        )
    for layer in layers.values():
        layer.__class__ = Float8Linear
        layer.float8 = config  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            # In eval mode it would read the weights of its linear layers instead of calling them.
            module.activation_relu_or_gelu = 0
    return list(layers)


def _modules_in(call: str, model: nn.Module, keep: Sequence[str]) -> set[nn.Module]:
    """Return the modules that `keep` names, and all inside of them."""
    if not isinstance(keep, (list, tuple)) or not all(isinstance(name, str) for name in keep):
        raise TypeError(f"{call}: keep must be a list of names of modules; got {keep!r}")
    modules = dict(model.named_modules(remove_duplicate=False))
    kept: set[nn.Module] = set()
    for name in keep:
        if name not in modules:
            raise ValueError(
                f"{call}: keep must have names of modules, as model.named_modules() has them; got {name!r}"
            )
        kept.update(modules[name].modules())
    return kept
