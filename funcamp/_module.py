"""A torch.nn.Module and a criterion as a loss function of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

#: Modules whose own parameters go into operations that torch.autocast casts to the low precision, and nowhere else.
_CAST = (
    nn.Linear,
    nn.Bilinear,
    nn.MultiheadAttention,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class ModuleLoss:
    """`criterion(model(*inputs), target)` as a function of the module's parameters; made by `module_loss`.

    `(params, batch) -> loss`, or for a module with buffers `(params, buffers, batch) -> (loss, buffers)`, where batch
    is a tuple `(*inputs, target)`. Nothing in the module is written.
    """

    def __init__(self, model: nn.Module, criterion: Callable[[Any, Any], Tensor]) -> None:
        self.model, self.criterion = model, criterion
        named = dict(model.named_parameters(remove_duplicate=False))
        canonical = {id(value): name for name, value in reversed(named.items())}
        self.names: dict[str, str] = {n: canonical[id(p)] for n, p in named.items() if p.requires_grad}
        """Every trainable parameter's name, to the name under which it is stored (another one where it is tied)."""
        self.cast_names: frozenset[str] = frozenset(
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, _CAST)
            for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
        )
        """The names of those that torch.autocast would cast."""
        self.has_buffers = next(model.buffers(), None) is not None

    def __repr__(self) -> str:
        return f"module_loss({type(self.model).__name__}, {self.criterion!r})"

    def __call__(self, params: dict[str, Tensor], *buffers_and_batch: Any) -> Any:
        """The loss; with buffers, the loss and the buffers after the forward pass."""
        *given, batch = buffers_and_batch
        values = dict(params)
        if self.has_buffers:
            values |= {name: value.clone() for name, value in given[0].items()}
        *inputs, target = batch
        # Names that are all given need no tying, and tying would undo two precisions of one tensor.
        tie = len(params) < len(self.names)
        outputs = functional_call(self.model, values, tuple(inputs), tie_weights=tie)
        loss = self.criterion(outputs, target)
        return (loss, {name: values[name] for name in given[0]}) if self.has_buffers else loss

    def params(self) -> dict[str, Tensor]:
        """The module's trainable parameters under their names, tied ones once, detached."""
        return {stored: self.model.get_parameter(stored).detach() for stored in dict.fromkeys(self.names.values())}

    def buffers(self) -> dict[str, Tensor]:
        """The module's buffers under their names, detached."""
        return {name: value.detach() for name, value in self.model.named_buffers()}


def module_loss(model: nn.Module, criterion: Callable[[Any, Any], Tensor]) -> ModuleLoss:
    """Turn a module and a criterion into a loss function for `make_train_step`.

    loss = criterion(model(*inputs), target) for a batch `(*inputs, target)`. The module gives the code, its training
    flags and its frozen parameters; values come from the parameters and buffers passed. Its gradients, hooks on
    parameters and `requires_grad` afterwards play no part. No sync of its own.

    Args:
        model: the module. Modules that write buffers (BatchNorm in training) work: the new ones are returned.
        criterion: `(output, target) -> loss`, a floating-point tensor of shape (): `torch.nn.functional.cross_entropy`.

    Returns:
        A `ModuleLoss`.

    Raises:
        TypeError: model is no Module, or criterion is not callable.

    Example:
        >>> loss_fn = module_loss(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss)
        >>> zeros = {name: torch.zeros_like(value) for name, value in loss_fn.params().items()}
        >>> loss_fn(zeros, (torch.ones(3, 2), torch.ones(3, 1)))
        tensor(1.)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"module_loss: model must be a torch.nn.Module; got {model!r}")
    if not callable(criterion):
        raise TypeError(f"module_loss: criterion must be callable; got {criterion!r}")
    return ModuleLoss(model, criterion)
