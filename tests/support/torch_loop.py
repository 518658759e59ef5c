"""torch's loop of automatic mixed precision: on named parameters, with a module; steps of funcamp beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from funcamp import ScalerConfig, make_train_step, module_loss, stateless
from tests.support.helpers import assert_close, assert_same, clone, values_of


class TorchLoop:
    """An optimizer of torch's kind on clones of named parameters.

    Args:
        cls: its class.
        params: the parameters by name.
        **arguments: its arguments after the parameters.
    """

    def __init__(self, cls: Any, params: Mapping[str, Tensor], **arguments: Any) -> None:
        self.leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        self.optimizer: Any = cls(self.leaves.values(), **arguments)

    def step(self, grads: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Take a step with clones of the gradients; return the parameters after it."""
        self.put(grads)
        self.optimizer.step()
        return self.params()

    def put(self, grads: Mapping[str, Tensor | None]) -> None:
        """Give the parameters clones of these gradients."""
        for name, leaf in self.leaves.items():
            grad = grads[name]
            leaf.grad = None if grad is None else grad.clone()

    def params(self) -> dict[str, Tensor]:
        """The parameters now; the next step writes into them."""
        return {name: leaf.detach() for name, leaf in self.leaves.items()}


class ScaledLoop(TorchLoop):
    """The same with a scaler: gradients are given as `backward` of a scaled loss leaves them."""

    def __init__(self, scaler: Any, cls: Any, params: Mapping[str, Tensor], **arguments: Any) -> None:
        super().__init__(cls, params, **arguments)
        self.scaler = scaler
        scaler.scale(torch.zeros(()))

    def step(
        self, grads: Mapping[str, Tensor | None], *, max_norm: float | None = None, new_scale: Any = None
    ) -> dict[str, Tensor]:
        """Take a step, clipped after `unscale_` if there is a max_norm; return the parameters after it."""
        self.put(grads)
        if max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(list(self.leaves.values()), max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update(new_scale)
        return self.params()


def randn_like(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Random gradients for named parameters."""
    return {name: torch.randn_like(value) for name, value in params.items()}


def linear_loss(params: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Tensor:
    """A loss with these gradients: their product with the parameters."""
    return torch.stack([(params[name] * gradients[name]).sum() for name in params]).sum()


def linear_step(optimizer: Any, config: ScalerConfig = ScalerConfig(), **options: Any) -> Any:
    """A step whose batch is the gradients."""
    return make_train_step(linear_loss, optimizer, config, policy=None, **options)


#: A module and its criterion; without one the module returns its loss.
Made = tuple[nn.Module, Callable[[Any, Any], Any] | None]


def loss_of_batch(model: nn.Module, criterion: Callable[[Any, Any], Any] | None, batch: Any) -> Tensor:
    """The loss as a loop of torch computes it, in each form that `module_loss` takes."""
    loss: Any
    if criterion is None:
        returned: Any = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        loss = returned["loss"] if isinstance(returned, Mapping) else getattr(returned, "loss", returned)
    else:
        *inputs, target = batch
        loss = criterion(model(*inputs), target)
    return loss  # type: ignore[no-any-return]


def scaler_for(config: ScalerConfig, device: str) -> torch.amp.GradScaler:
    """torch's scaler with a configuration's numbers."""
    return torch.amp.GradScaler(
        device, config.init_scale, config.growth_factor, config.backoff_factor, config.growth_interval
    )


def advance(scaler: torch.amp.GradScaler) -> tuple[float, float]:
    """Update the scaler; return the scale of the step that ends, and whether a gradient of it was not finite."""
    before = scaler.get_scale()
    scaler.update()
    return before, float(scaler.get_scale() < before)


class Scaled:
    """An optimizer of torch's and a scaler of its own."""

    def __init__(self, optimizer: Any, config: ScalerConfig, device: str = "cpu") -> None:
        self.optimizer = optimizer
        self.scaler = scaler_for(config, device)

    def take(self, *losses: Tensor, max_norm: float | None = None) -> tuple[float, float]:
        """Take a step by the mean of losses of micro-batches; return the scale, and whether it was skipped."""
        self.optimizer.zero_grad()
        for loss in losses:
            self.scaler.scale(loss / len(losses)).backward()
        if max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            params = [param for group in self.optimizer.param_groups for param in group["params"]]
            torch.nn.utils.clip_grad_norm_(params, max_norm)
        self.scaler.step(self.optimizer)
        return advance(self.scaler)


class AmpLoop(Scaled):
    """torch's loop, as its automatic mixed precision examples have it.

    Args:
        model: the module that is trained.
        criterion: the loss of its output and a target; None if the module returns its loss.
        optimizer: torch's optimizer of its parameters.
        config: the numbers of torch's scaler.
        dtype: the precision of torch.autocast; None for no region.
        device: where the module is.
    """

    def __init__(
        self,
        model: Any,
        criterion: Any,
        optimizer: Any,
        config: ScalerConfig,
        dtype: torch.dtype | None = torch.float16,
        device: str = "cpu",
    ) -> None:
        super().__init__(optimizer, config, device)
        self.model, self.criterion, self.dtype, self.device = model, criterion, dtype, device

    def step(self, *pieces: Any, max_norm: float | None = None) -> tuple[Tensor, float, float]:
        """Take a step over micro-batches; return the mean of their losses, their scale, and whether it was skipped."""
        losses = []
        for piece in pieces:
            with torch.autocast(self.device, self.dtype, enabled=self.dtype is not None):
                losses.append(loss_of_batch(self.model, self.criterion, piece))
        mean = torch.stack([loss.detach() for loss in losses]).mean()
        return mean, *self.take(*losses, max_norm=max_norm)


def assert_as_torchs_loop(
    make: Callable[[], Made],
    batches: Iterable[Any],
    wrap: Callable[[Any], Any] = lambda step: step,
    *,
    policy: str | None = None,
    optimizer: tuple[Any, dict[str, Any]] = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    config: Mapping[str, Any] = MappingProxyType({"init_scale": 1.0}),
    engine: Any = None,
    change: Callable[[Any], Any] = lambda loss_fn: loss_fn,
    keep_buffers: bool = False,
    flat: bool = True,
    accumulate: int = 1,
    max_norm: float | None = None,
    relative: float = 0.0,
    relative_of_losses: float | None = None,
) -> list[float]:
    """Train a module in torch's loop of automatic mixed precision and by a step; return the scales.

    Losses, scales, parameters and buffers must be equal bit for bit, or within a fraction of their norm. A skipped step
    must change neither parameters nor the optimizer's state. The step's module must stay as it is, but for what it adds
    to itself, and no result may require a gradient.

    Args:
        make: makes the module, which is called once for the loop and once for the step.
        batches: a batch for every step, or a list of micro-batches.
        wrap: what makes the step that is called, such as `jit`.
        policy: of the step; the loop has an autocast of this dtype.
        optimizer: torch's class and its arguments.
        config: the arguments of the scaler.
        engine: of the loss.
        change: what makes the loss of the step from that of `module_loss`.
        keep_buffers: of the loss; torch's loop keeps those of a skipped step too.
        flat: how the step stores its parameters.
        accumulate: the number of micro-batches.
        max_norm: of the gradients, for both.
        relative: the fraction.
        relative_of_losses: another one for the losses.
    """
    cls, arguments = optimizer
    torch.manual_seed(0)
    model, criterion = make()
    torch.manual_seed(0)
    own, own_criterion = make()
    before = clone(values_of(model))
    loss_fn = module_loss(model, criterion, engine=engine, keep_buffers=keep_buffers)
    options: dict[str, Any] = {"policy": policy, "accumulate": accumulate, "max_norm": max_norm}
    step = make_train_step(change(loss_fn), stateless(cls, **arguments), ScalerConfig(**config), **options)
    run, state, scales = wrap(step), step.init(flat=flat), []
    trained = [value for value in own.parameters() if value.requires_grad]
    dtype = None if policy is None else getattr(torch, policy)
    loop = AmpLoop(own, own_criterion, cls(trained, **arguments), step.config, dtype)
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        loss, _, _ = loop.step(*(batch if accumulate > 1 else [batch]), max_norm=max_norm)
        torch.manual_seed(number)
        kept = clone(state)
        state, metrics = run(state, tuple(map(torch.stack, zip(*batch))) if accumulate > 1 else batch)
        assert_close(metrics.loss, loss, relative if relative_of_losses is None else relative_of_losses)
        scales.append(loop.scaler.get_scale())
        assert state.scaler.scale.item() == scales[-1]
        if metrics.found_inf:
            assert_same((state.params, state.opt_state), (kept.params, kept.opt_state))
        assert not any(leaf.requires_grad for leaf in _pytree.tree_leaves((state, metrics)))
    assert_close(loss_fn.state_dict(state.params, state.buffers), dict(own.state_dict()), relative)
    assert_same({name: values_of(model)[name] for name in before}, before)
    return scales
