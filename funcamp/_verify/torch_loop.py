"""The ordinary torch loop that a `TrainStep` replaces, written out: `verify` compares the step with it."""

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
from funcamp._types import Tree
from funcamp._verify.compare import Row, copied_to_host


def why_not(step: TrainStep) -> str:
    """Return why there is no torch loop that computes what this step does; "" if there is one."""
    loss_fn = step.loss_fn
    policy = step._options.policy
    parallel = step._options.parallel
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
        self._loss_fn = step.loss_fn
        self._options = step._options
        self._model = step.loss_fn.model
        self._device = state.scaler.scale.device
        saved = step.to_torch(state)
        with torch.no_grad():
            self._model.load_state_dict(saved["model"])
            for name, buffer in self._loss_fn.buffers().items():  # also those that a state_dict lacks
                buffer.copy_(state.buffers[name])
        parameters = dict(self._model.named_parameters())
        # Of two names of one parameter the one under which it is stored.
        self._trained = {name: parameters[name] for name in dict.fromkeys(self._loss_fn.names.values())}

        # Counts, as in the state.
        self._calls = int(state.step)
        self._skipped = int(state.skipped)
        self._consecutive_skips = int(state.consecutive_skips)
        self._applied = self._calls - self._skipped

        self._groups = groups_of("verify", step, state, None)
        self._optimizers = self._make_optimizers(parameters, saved["optimizer"], is_new=self._applied == 0)
        self.follows_rule = torch_has_this_rule(step.config)
        """Whether torch's scaler moves the scale by the step's rule. If not, the loop is given every scale."""
        self._scaler = self._make_scaler(step.config if self.follows_rule else ScalerConfig(), state)
        self._average: dict[str, Tensor] = {}
        """The average of the parameters by name; empty without `ema_decay`."""
        if self._options.ema_decay is not None:
            self._average = {name: value.clone() for name, value in expand(state.ema).items()}
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
        self, parameters: Mapping[str, Tensor], saved: Any, *, is_new: bool
    ) -> list[tuple[torch.optim.Optimizer, list[TorchGroup]]]:
        """Return torch's optimizers, each with its groups: one, or one per label if the classes differ.

        Args:
            parameters: the parameters by name.
            saved: the optimizer's state_dict, or one by label.
            is_new: no step was applied, so that there is no state to load.
        """
        has_several_classes = len({group.optimizer._cls for group in self._groups}) > 1
        groups_by_label: dict[str | None, list[TorchGroup]] = {}
        for group in self._groups:
            label = group.label if has_several_classes else None
            groups_by_label.setdefault(label, []).append(group)
        optimizers: list[tuple[torch.optim.Optimizer, list[TorchGroup]]] = []
        for label, groups in groups_by_label.items():
            param_groups: list[dict[str, object]] = []
            for group in groups:
                params = [parameters[name] for name in group.names]
                param_groups.append({**self._hyperparameters(group), "params": params})
            stateless_optimizer = groups[0].optimizer
            optimizer = stateless_optimizer._cls(param_groups, **stateless_optimizer._arguments)
            if not is_new:
                optimizer.load_state_dict(saved[label] if has_several_classes else saved)
            optimizers.append((optimizer, groups))
        return optimizers

    def _make_scaler(self, config: ScalerConfig, state: TrainState) -> torch.amp.GradScaler:
        """Return torch's scaler with the constants of a configuration, in the state that a step's is in."""
        scaler = torch.amp.GradScaler(
            self._device.type,
            init_scale=float(state.scaler.scale),
            growth_factor=config.growth_factor,
            backoff_factor=config.backoff_factor,
            growth_interval=config.growth_interval,
        )
        scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": int(state.scaler.growth_tracker)})
        return scaler

    def _hyperparameters(self, group: TorchGroup) -> dict[str, object]:
        """Return the hyperparameters of a group at this step: schedules evaluated, tensors as numbers."""
        hyperparameters = hyperparameters_of(group.optimizer, torch.tensor(self._applied, device=self._device))
        if "foreach" in hyperparameters:  # the arithmetic of one tensor at a time, as in the step
            hyperparameters["foreach"] = False
        return hyperparameters

    def step(self, batch: Tree, scale: float | None) -> Row:
        """Train on one batch, and return what there is to compare.

        Args:
            batch: as for the step.
            scale: the scale to use instead of the scaler's own.
        """
        if scale is not None:
            self.scale = scale
        for parameter in self._model.parameters():
            parameter.grad = None
        buffers_before = {name: buffer.clone() for name, buffer in self._loss_fn.buffers().items()}
        loss = self._accumulate(batch)
        self._fill_missing_gradients()
        is_skipped, norm = self._apply()
        self._count_call(is_skipped)
        if is_skipped and not self._loss_fn.keep_buffers:  # as the step does by default
            for name, buffer in self._loss_fn.buffers().items():
                buffer.copy_(buffers_before[name])
        return self._row(loss, is_skipped) | {"grad_norm": norm.cpu()}

    def _fill_missing_gradients(self) -> None:
        """Give zeros to parameters without a gradient, as the step does, and note their names."""
        for name, parameter in self._trained.items():
            if parameter.grad is None:
                self.without_gradient.add(name)
                parameter.grad = torch.zeros_like(parameter)

    def _count_call(self, is_skipped: bool) -> None:
        """Count a step, as the state does; applied ones are counted with the optimizers' steps."""
        self._calls += 1
        self._skipped += is_skipped
        self._consecutive_skips = self._consecutive_skips + 1 if is_skipped else 0

    def _accumulate(self, batch: Tree) -> Tensor:
        """Add up the scaled gradients of all micro-batches; return the mean of their losses."""
        pieces = self._pieces(batch)
        shares = self._shares(pieces)
        mean_loss: Any = 0.0
        for piece, share in zip(pieces, shares):
            with self._autocast():
                loss = self._loss_of(piece)
            # The factors of a step: a float32 tensor with weights, else a division.
            if self._options.weight:
                loss_share = loss * torch.tensor(share, dtype=torch.float32)
            else:
                loss_share = loss / len(pieces)
            self._scaler.scale(loss_share).backward()  # type: ignore[no-untyped-call]
            mean_loss = mean_loss + loss_share.detach()
        return torch.as_tensor(mean_loss).to(loss.dtype)

    def _pieces(self, batch: Tree) -> list[Tree]:
        """Return the micro-batches."""
        if self._options.accumulate == 1:
            return [batch]
        count = next(len(leaf) for leaf in _tree.leaves(batch) if isinstance(leaf, Tensor))
        return _tree.unstacked(batch, count)

    def _shares(self, pieces: list[Tree]) -> list[float]:
        """Return how much of the loss each micro-batch is; NaN for all if all weights are 0."""
        weight = self._options.weight
        weights = [1.0 if weight is None else float(weight(piece)) for piece in pieces]
        total = sum(weights)
        if not total:
            return [math.nan] * len(weights)
        return [weight_of_piece / total for weight_of_piece in weights]

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the region of autocast in which the loss is computed."""
        dtype = self._options.policy.compute_dtype
        if dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype)

    def _loss_of(self, piece: Tree) -> Tensor:
        """Return the loss of a micro-batch."""
        criterion = self._loss_fn.criterion
        args, kwargs, target = arguments_of(piece, has_target=criterion is not None)
        outputs = self._model(*args, **kwargs)
        if criterion is None:
            return loss_in(outputs)
        returned: Any = criterion(outputs, target)
        loss: Tensor = returned[0] if self._loss_fn.has_aux else returned
        return loss

    def _apply(self) -> tuple[bool, Tensor]:
        """Unscale, clip, and take the optimizers' steps; return whether they were skipped, and the gradients' norm."""
        options = self._options
        parameters = self.parameters()
        for optimizer, groups in self._optimizers:
            for param_group, group in zip(optimizer.param_groups, groups):
                for name, value in self._hyperparameters(group).items():
                    if name in param_group:
                        param_group[name] = value
            self._scaler.unscale_(optimizer)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        is_skipped = not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        # In float64, as the step's, which is compared with it.
        norms = [torch.linalg.vector_norm(gradient.double()) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
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
        """Move the average of the parameters after an applied step."""
        for name, average in self._average.items():
            assert self._options.ema_decay is not None
            average.lerp_(self._trained[name], 1 - self._options.ema_decay)

    def _row(self, loss: Tensor, is_skipped: bool) -> Row:
        """Return what there is to compare after a step, by the names that a step's values have."""
        row = {"loss": loss, "found_inf": torch.tensor(float(is_skipped), dtype=torch.float32)}
        counts = {
            "step": self._calls,
            "skipped": self._skipped,
            "consecutive_skips": self._consecutive_skips,
            "applied": self._applied,
        }
        for group in self._groups:
            counts[f"{group.prefix}applied"] = self._applied
        row |= {name: torch.tensor(count, dtype=torch.int64) for name, count in counts.items()}
        if self.follows_rule:
            saved = self._scaler.state_dict()
            row["scaler.scale"] = torch.tensor(saved["scale"], dtype=torch.float32)
            row["scaler.growth_tracker"] = torch.tensor(saved["_growth_tracker"], dtype=torch.int32)
        row |= {f"params.{name}": value for name, value in self._trained.items()}
        row |= {f"buffers.{name}": value for name, value in self._loss_fn.buffers().items()}
        row |= {f"ema.{name}": value for name, value in self._average.items()}
        row |= dict(self._entries())
        return copied_to_host(row)

    def _entries(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the entries of the optimizers' states by the names that the step gives them."""
        for optimizer, groups in self._optimizers:
            for param_group, group in zip(optimizer.param_groups, groups):
                for name, parameter in zip(group.names, param_group["params"]):
                    if not parameter.requires_grad:  # Adagrad has entries for these too
                        continue
                    for entry, value in optimizer.state.get(parameter, {}).items():
                        if isinstance(value, Tensor):
                            yield group.key(entry, name), value


def torch_has_this_rule(config: ScalerConfig) -> bool:
    """Return whether torch's scaler moves the scale by the same rule, within the same bounds: none."""
    has_torchs_factors = config.growth_factor > 1 and config.backoff_factor < 1
    return config.rule == TORCH_RULE and not config.has_bounds and has_torchs_factors
