"""A torch.nn.Module and a criterion as a loss function of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

_LAYER = frozenset({"weight", "bias"})

#: Modules, and those of their own parameters that go into operations which torch.autocast casts, and nowhere else.
_CAST: dict[type[nn.Module], frozenset[str]] = {
    nn.Linear: _LAYER,
    nn.Conv1d: _LAYER,
    nn.Conv2d: _LAYER,
    nn.Conv3d: _LAYER,
    nn.ConvTranspose1d: _LAYER,
    nn.ConvTranspose2d: _LAYER,
    nn.ConvTranspose3d: _LAYER,
    nn.MultiheadAttention: frozenset(
        {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"}
    ),
}


class ModuleLoss:
    """`criterion(model(*inputs), target)` as a function of the module's parameters; made by `module_loss`.

    `(params, batch) -> loss`, or for a module with buffers `(params, buffers, batch) -> (loss, buffers)`, where batch
    is a tuple `(*inputs, target)`. Nothing in the module is written.
    """

    def __init__(self, model: nn.Module, criterion: Callable[[Any, Any], Tensor]) -> None:
        self.model, self.criterion = model, criterion
        # One name for each place in a module: functional_call goes wrong where one place is given under two names.
        places = [(prefix, module) for prefix, module in model.named_modules()]
        named = {
            _join(prefix, n): p for prefix, module in places for n, p in module._parameters.items() if p is not None
        }
        kept = {_join(prefix, n): b for prefix, module in places for n, b in module._buffers.items() if b is not None}
        self.names: dict[str, str] = {n: s for n, s in _first_names(named).items() if named[n].requires_grad}
        """Every trainable parameter's name, to the name under which it is stored (another one where it is tied)."""
        self.buffer_names: dict[str, str] = _first_names(kept)
        """The same for buffers."""
        self.cast_names: frozenset[str] = frozenset(
            _join(prefix, name) for prefix, module in places for name in _cast_by_autocast(module)
        )
        """The names of those that torch.autocast would cast."""
        self.has_buffers = bool(kept)

    def __repr__(self) -> str:
        return f"module_loss({type(self.model).__name__}, {self.criterion!r})"

    def __call__(self, params: dict[str, Tensor], *buffers_and_batch: Any) -> Any:
        """The loss; with buffers, the loss and the buffers after the forward pass."""
        *given, batch = buffers_and_batch
        if len(given) != self.has_buffers:
            wanted = "params, buffers and batch" if self.has_buffers else "params and batch"
            raise TypeError(f"{self!r}: must be called with {wanted}; got {1 + len(buffers_and_batch)} arguments")
        values = dict(params)
        for name, stored in self.names.items():
            if name not in params and stored in params:
                values[name] = params[stored]
        if self.has_buffers:
            fresh = {name: value.clone() for name, value in given[0].items()}
            values |= {name: fresh[stored] for name, stored in self.buffer_names.items()}
        *inputs, target = batch
        # Ties are made above: torch's tying would undo two precisions of one tensor.
        outputs = functional_call(self.model, values, tuple(inputs), tie_weights=False)
        loss = self.criterion(outputs, target)
        return (loss, {name: values[name] for name in given[0]}) if self.has_buffers else loss

    def holding(self, params: dict[str, Tensor], after: Any, run: Callable[[], Any]) -> Any:
        """Call run while the module holds these parameters, and copies of the buffers after its forward pass.

        For a backward pass that calls the module again (`torch.utils.checkpoint`): it has to meet the values that
        torch's own loop has then, and may write buffers that nobody keeps.
        """
        values = {f"model.{name}": params[name if name in params else stored] for name, stored in self.names.items()}
        fresh = {name: buffer.detach().clone() for name, buffer in (after if self.has_buffers else {}).items()}
        values |= {f"model.{name}": fresh[stored] for name, stored in self.buffer_names.items()}
        values |= {f"model.{name}": value for name, value in params.items() if name not in self.names}  # what taps read
        return functional_call(Holder(self.model, run), values, (), tie_weights=False)

    def params(self) -> dict[str, Tensor]:
        """The module's trainable parameters under their names, tied ones once, detached."""
        return {stored: self.model.get_parameter(stored).detach() for stored in dict.fromkeys(self.names.values())}

    def buffers(self) -> dict[str, Tensor]:
        """The module's buffers under their names, shared ones once, detached."""
        stored = dict.fromkeys(self.buffer_names.values())
        return {name: self.model.get_buffer(name).detach() for name in stored}

    def state_dict(self, params: Any, buffers: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What the module's own `state_dict` is with these values in it: `model.load_state_dict` takes it, strictly.

        Args:
            params: the parameters, by stored name or as a `FlatParams` (`TrainState.params`, `TrainState.ema`).
            buffers: the buffers by stored name; None for the module's own.

        Raises:
            KeyError: a parameter is missing.
        """
        tree = params.tree() if hasattr(params, "tree") else params
        values = {**(buffers or {}), **{name: tree[name] for name in dict.fromkeys(self.names.values())}}
        stored = {
            id(self.model.get_parameter(name) if name in tree else self.model.get_buffer(name)): value
            for name, value in values.items()
        }
        own = self.model.state_dict(keep_vars=True)
        return {
            name: stored.get(id(value), value).detach().clone() if isinstance(value, Tensor) else value
            for name, value in own.items()
        }


class Holder(nn.Module):
    """Calls a function as its forward, so that `functional_call` puts values into a module around that."""

    def __init__(self, model: nn.Module, run: Callable[[], Any]) -> None:
        super().__init__()
        self.model, self._run = model, run

    def forward(self) -> Any:
        return self._run()


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
        TypeError: model is no Module, or under fully_shard, DDP or FSDP; criterion is not callable.
        ValueError: an embedding in it has max_norm, which writes its weight in the forward pass.

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
    for name, module in model.named_modules():
        if hasattr(module, "set_requires_gradient_sync") or hasattr(module, "no_sync"):
            raise TypeError(
                "module_loss: model must be the module itself, not under fully_shard, DDP or FSDP, whose hooks on own "
                f"parameters a function of parameters passes by; got {name or 'the module'} so. "
                "Use make_train_step(..., parallel=distributed.DataParallel(shard=True)), or their loop with GradScaler"
            )
        if getattr(module, "max_norm", None) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"module_loss: model must not write its parameters in the forward pass; got max_norm={module.max_norm} "
                f"in {name or 'the module'}, which renormalizes its weight in place"
            )
    return ModuleLoss(model, criterion)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _first_names(named: dict[str, Any]) -> dict[str, str]:
    """Every name to the first one of the same tensor."""
    first = {id(value): name for name, value in reversed(named.items())}
    return {name: first[id(value)] for name, value in named.items()}


def _cast_by_autocast(module: nn.Module) -> frozenset[str]:
    """The names of a module's own parameters that its forward gives to operations autocast casts, and to no other."""
    for kind, names in _CAST.items():
        if isinstance(module, kind):
            own = all(
                name not in vars(module) and getattr(type(module), name, None) is getattr(kind, name, None)
                for name in ("forward", "_conv_forward")
            )
            return frozenset(n for n in names if module._parameters.get(n) is not None) if own else frozenset()
    return frozenset()
