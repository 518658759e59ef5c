"""The ordinary torch loop that a `TrainStep` stands for, written out: what `verify` compares the step with."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._autograd.module_batch import arguments_of, loss_in
from funcamp._autograd.module_loss import ModuleLoss
from funcamp._optim.chain import Chain
from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.rules import TORCH_RULE
from funcamp._step.state import TrainState
from funcamp._step.step import TrainStep
from funcamp._step.torch_groups import TorchGroup, groups_of, hyperparameters_of
from funcamp._storage.params import expand
from funcamp._verify.compare import Row


def why_not(step: TrainStep) -> str:
    """Return why there is no torch loop that computes what this step does; "" if there is one."""
    loss_fn, options = step.loss_fn, step._options
    policy, parallel = options.policy, options.parallel
    if not isinstance(loss_fn, ModuleLoss) or loss_fn.model is not loss_fn.made_of:
        return "the loss is not of module_loss"
    if policy.float8 is not None:
        return "torch's loop has no float8 products"
    if policy.keep or policy.copy or not policy.autocast:
        return "the policy names parameters, which torch.autocast cannot"
    if parallel.size > 1 or parallel.shard or parallel.reduce is not None:
        return "the step communicates with other processes"
    if isinstance(step.optimizer, Chain):
        return "the optimizer is a chain"
    try:
        groups_of("verify", step, step.init(), None)
    except TypeError:
        return "the optimizer is not made by stateless"
    return ""


class TorchLoop:
    """`torch.autocast`, `torch.amp.GradScaler` and the optimizers' own classes around a module.

    Changes the module. `PythonState` puts it back.

    Args:
        step: the step; see `why_not`.
        state: the state that it starts from.
    """

    def __init__(self, step: TrainStep, state: TrainState) -> None:
        assert isinstance(step.loss_fn, ModuleLoss)
        self._step, self._loss_fn, self._options = step, step.loss_fn, step._options
        self._model = step.loss_fn.model
        self._device = state.scaler.scale.device
        saved = step.to_torch(state)
        with torch.no_grad():
            self._model.load_state_dict(saved["model"])
            for name, buffer in self._loss_fn.buffers().items():  # also those that a state_dict lacks
                buffer.copy_(state.buffers[name])
        named = dict(self._model.named_parameters())
        self._trained = {stored: named[stored] for stored in dict.fromkeys(self._loss_fn.names.values())}
        self._parts = groups_of("verify", step, state, None)
        self._calls, self._skips, self._skips_in_a_row = (
            int(state.step),
            int(state.skipped),
            int(state.consecutive_skips),
        )
        self._applied = self._calls - self._skips
        self._optimizers = self._make_optimizers(named, saved["optimizer"], is_new=self._applied == 0)
        config = step.config
        self.follows_rule = is_torchs_rule(config)
        """Whether torch's scaler moves the scale by the step's rule. If not, the loop is given every scale."""
        rule = config if self.follows_rule else ScalerConfig()
        self._scaler = torch.amp.GradScaler(
            self._device.type,
            init_scale=float(state.scaler.scale),
            growth_factor=rule.growth_factor,
            backoff_factor=rule.backoff_factor,
            growth_interval=rule.growth_interval,
        )
        self._scaler.load_state_dict({**self._scaler.state_dict(), "_growth_tracker": int(state.scaler.growth_tracker)})
        average = None if self._options.ema_decay is None else expand(state.ema)
        self._average: dict[str, Tensor] | None = (
            None if average is None else {n: t.clone() for n, t in average.items()}
        )
        self.without_gradient: set[str] = set()
        """The parameters that got no gradient. A step gives them zeros, so that weight decay moves them."""

    @property
    def scale(self) -> float:
        """The scale of the next step."""
        return float(self._scaler.get_scale())

    @scale.setter
    def scale(self, scale: float) -> None:
        self._scaler.scale(torch.ones((), device=self._device))  # torch creates the scale at the first call
        self._scaler.update(scale)

    def parameters(self) -> list[Tensor]:
        """Return the trained parameters."""
        return list(self._trained.values())

    def _make_optimizers(
        self, named: Mapping[str, Tensor], saved: Any, *, is_new: bool
    ) -> list[tuple[torch.optim.Optimizer, list[TorchGroup]]]:
        """Return torch's optimizers, each with its parameter groups: one, or one per label if the classes differ."""
        by_class: dict[Any, list[TorchGroup]] = {}
        several = len({part.optimizer._cls for part in self._parts}) > 1
        for part in self._parts:
            by_class.setdefault(part.label if several else None, []).append(part)
        made = []
        for label, parts in by_class.items():
            groups = [{**self._numbers(part), "params": [named[name] for name in part.names]} for part in parts]
            optimizer = parts[0].optimizer._cls(groups, **parts[0].optimizer._traits.arguments)
            if not is_new:
                optimizer.load_state_dict(saved[label] if several else saved)
            made.append((optimizer, parts))
        return made

    def _numbers(self, part: TorchGroup) -> dict[str, Any]:
        """Return the hyperparameters of a group at this step: schedules evaluated, tensors as numbers."""
        numbers = hyperparameters_of(part.optimizer, torch.tensor(self._applied, device=self._device))
        if "foreach" in numbers:  # the arithmetic of one tensor at a time, as in the step
            numbers["foreach"] = False
        return numbers

    def step(self, batch: Any, scale: float | None) -> Row:
        """Train on one batch, and return what there is to compare.

        Args:
            batch: as for the step.
            scale: the scale to use instead of the scaler's own.
        """
        if scale is not None:
            self.scale = scale
        for parameter in self._model.parameters():
            parameter.grad = None
        buffers = {name: buffer.clone() for name, buffer in self._loss_fn.buffers().items()}
        losses = self._accumulate(batch)
        for name, parameter in self._trained.items():
            if parameter.grad is None:
                self.without_gradient.add(name)
                parameter.grad = torch.zeros_like(parameter)
        is_skipped, norm = self._apply()
        self._calls += 1
        self._skips += is_skipped
        self._skips_in_a_row = self._skips_in_a_row + 1 if is_skipped else 0
        if is_skipped and not self._loss_fn.keep_buffers:  # as the step does by default
            for name, buffer in self._loss_fn.buffers().items():
                buffer.copy_(buffers[name])
        return self._row(losses, is_skipped) | {"grad_norm": norm.cpu()}

    def _accumulate(self, batch: Any) -> Tensor:
        """Add up the scaled gradients of all micro-batches; return the mean of their losses."""
        pieces, factors = self._pieces(batch)
        total: Any = 0.0
        for piece, factor in zip(pieces, factors):
            with self._autocast():
                loss = self._loss_of(piece)
            part = loss * torch.tensor(factor, dtype=torch.float32) if self._options.weight else loss / len(pieces)
            self._scaler.scale(part).backward()  # type: ignore[no-untyped-call]
            total = total + part.detach()
        return torch.as_tensor(total).to(loss.dtype)

    def _pieces(self, batch: Any) -> tuple[list[Any], list[float]]:
        """Return the micro-batches and the share of each in the loss."""
        options = self._options
        if options.accumulate == 1:
            pieces = [batch]
        else:
            leaves, spec = _tree.flatten(batch)
            count = next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor))
            pieces = [
                _tree.unflatten([leaf[number] if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
                for number in range(count)
            ]
        weights = [float(options.weight(piece)) if options.weight else 1.0 for piece in pieces]
        total = sum(weights)
        return pieces, [weight / total if total else math.nan for weight in weights]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = self._options.policy.compute_dtype
        return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(self._device.type, dtype)

    def _loss_of(self, piece: Any) -> Tensor:
        criterion = self._loss_fn.criterion
        inputs, named, target = arguments_of(piece, has_target=criterion is not None)
        outputs = self._model(*inputs, **named)
        if criterion is None:
            return loss_in(outputs)
        loss: Any = criterion(outputs, target)
        found: Tensor = loss[0] if self._loss_fn.has_aux else loss
        return found

    def _apply(self) -> tuple[bool, Tensor]:
        """Unscale, clip, and take the optimizers' steps; return whether they were skipped, and the gradients' norm."""
        options, parameters = self._options, self.parameters()
        for optimizer, parts in self._optimizers:
            for group, part in zip(optimizer.param_groups, parts):
                group |= {name: value for name, value in self._numbers(part).items() if name in group}
            self._scaler.unscale_(optimizer)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        is_skipped = not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one.double()) for one in gradients]))
        if options.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, float(options.max_norm))
        if options.max_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, float(options.max_value))
        if not is_skipped:
            for optimizer, _ in self._optimizers:
                self._scaler.step(optimizer)
            self._applied += 1
            self._move_average()
        self._scaler.update()
        return is_skipped, norm.float()

    @torch.no_grad()
    def _move_average(self) -> None:
        for name, average in (self._average or {}).items():
            assert self._options.ema_decay is not None
            average.lerp_(self._trained[name], 1 - self._options.ema_decay)

    def _row(self, loss: Tensor, is_skipped: bool) -> Row:
        row = {"loss": loss, "found_inf": torch.tensor(float(is_skipped), dtype=torch.float32)}
        counts = {"step": self._calls, "skipped": self._skips, "consecutive_skips": self._skips_in_a_row}
        counts |= {"applied": self._applied} | {f"{part.prefix}applied": self._applied for part in self._parts}
        row |= {name: torch.tensor(count, dtype=torch.int64) for name, count in counts.items()}
        if self.follows_rule:
            saved = self._scaler.state_dict()
            row["scaler.scale"] = torch.tensor(saved["scale"], dtype=torch.float32)
            row["scaler.growth_tracker"] = torch.tensor(saved["_growth_tracker"], dtype=torch.int32)
        row |= {f"params.{name}": value for name, value in self._trained.items()}
        row |= {f"buffers.{name}": value for name, value in self._loss_fn.buffers().items()}
        row |= {f"ema.{name}": value for name, value in (self._average or {}).items()}
        row |= dict(self._entries())
        return {name: value.detach().to("cpu", copy=True) for name, value in row.items()}

    def _entries(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the entries of the optimizers' states by the names that the step gives them."""
        for optimizer, parts in self._optimizers:
            for group, part in zip(optimizer.param_groups, parts):
                for name, parameter in zip(part.names, group["params"]):
                    if not parameter.requires_grad:  # Adagrad has entries for these too
                        continue
                    for entry, value in optimizer.state.get(parameter, {}).items():
                        if isinstance(value, Tensor):
                            yield part.key(entry, name), value


def is_torchs_rule(config: ScalerConfig) -> bool:
    """Return whether torch's scaler moves the scale by the same rule."""
    has_bounds = config.min_scale is not None or config.max_scale is not None
    can_torch = config.growth_factor > 1 and config.backoff_factor < 1
    return config.rule == TORCH_RULE and not has_bounds and can_torch
