"""Float8 in the step: which layers, their context, and the state of delayed scaling.

The history has amaxes of gradients of the unscaled loss. So it stays right when the loss scale moves: the scale of a
gradient is divided by the loss scale before the step, and its amax is multiplied by the reciprocal after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcamp._autograd.loss import Loss
from funcamp._autograd.module_loss import ModuleLoss
from funcamp._scaler.precision import reciprocal
from funcamp._scaler.state import ScalerState
from funcamp._step.state import TrainState
from funcamp._storage.compute_copies import Plan, float8_leaves, products
from funcamp._storage.policy import Policy
from funcamp._tree import settled
from funcamp._types import Tree
from funcamp.float8.linears import Float8Linears, StandIns
from funcamp.float8.product import Scales
from funcamp.float8.state import check_state, init, update, with_loss_scale, without_loss_scale
from funcamp.float8.weights import weights_in_float8


class Float8Layers:
    """The layers of a step that multiply in float8, if its policy has any."""

    def __init__(self, policy: Policy, loss_fn: Loss) -> None:
        self._policy, self._loss_fn = policy, loss_fn
        self.config = policy.float8
        self.delayed = self.config is not None and self.config.scaling == "delayed"
        if self.config is None:
            return
        if not isinstance(loss_fn, ModuleLoss):
            raise ValueError(
                "make_train_step: policy must have float8 only for a loss of module_loss, whose linear layers it "
                f"finds; got {policy} with {loss_fn!r}: call float8.scaled_mm in a function of your own"
            )
        self._model = loss_fn.model
        parts = [loss_fn.model.get_submodule(name.rpartition(".")[0]) for name in sorted(loss_fn.linear_names)]
        self._stand_ins = StandIns(loss_fn.holder, parts)

    def init(self, plan: Plan, device: torch.device) -> Any:
        """Return the state of delayed scaling, or ().

        Raises:
            ValueError: the policy has float8, and no layer takes it.
        """
        if self.config is None:
            return ()
        if not products(plan):
            raise ValueError(
                f"init: policy must have float8 only with a layer to multiply in it; got {self._policy} and none: a "
                f"Linear layer with sizes that are multiples of 16{self.described()}"
            )
        return init(self.config, len(products(plan)), device=device) if self.delayed else ()

    def described(self) -> str:
        """Return how many linear layers multiply in float8, and why not the others, as the end of a repr."""
        names, linear = self._loss_fn.names or {}, self._loss_fn.linear_names
        if self.config is None:
            return ""
        held = dict(self._model.named_parameters(remove_duplicate=False))  # params() raises if the module has changed
        why = {name: "it is frozen" for name in sorted(linear) if name not in names}
        why |= {
            name: self._policy.no_float8(name, held[name], linear) for name in names if name in linear & held.keys()
        }
        others = "".join(f", not {name}: {reason}" for name, reason in why.items() if reason)
        return f"; float8 in {list(why.values()).count('')} of {len(why)} linear layers{others}"

    def around(self, state: TrainState, stored: Tree) -> Float8Linears | None:
        """Return the context of the forward and the backward pass, if there is one.

        state: with full parameters and this step's copies.
        stored: the parameters as they are stored, perhaps sharded.
        """
        if self.config is None:
            return None
        delayed = None
        if self.delayed:  # all layers' at once: a kernel for each number would take longer than the products
            scale = settled(with_loss_scale(self._scale(state), state.scaler.scale))
            delayed = Scales(scale, settled(reciprocal(scale)))
        made = weights_in_float8(state, stored, self.config, delayed)
        return Float8Linears(self._stand_ins, self.config, delayed, made)

    def _scale(self, state: TrainState) -> Tensor:
        """Return the scales of delayed scaling.

        Raises:
            TypeError: the state has none.
            ValueError: it is of another configuration, or of other layers.
        """
        assert self.config is not None
        scale = check_state("step", state.float8, self.config).scale
        count = len(products(state.copies.plan))
        if scale.shape[0] != count:
            raise ValueError(
                f"step: state.float8 must have a row for each of the {count} layers in float8; got {scale.shape[0]}: "
                "begin anew with state._replace(float8=step.init().float8)"
            )
        return scale

    def by_path(self, state: TrainState) -> dict[str, Tensor]:
        """Return the scales of delayed scaling by the path of the layer; empty without it."""
        if not self.delayed:
            return {}
        plan, scale = state.copies.plan, self._scale(state)
        rows: dict[Any, Tensor] = dict(zip(float8_leaves(plan), scale))
        named = zip(plan.names or (), plan.uses)
        return {name.rpartition(".")[0]: rows[use.leaf].clone() for name, use in named if use.float8}

    def amax(self, state: TrainState) -> Tree:
        """Return zeros to differentiate with respect to; () without delayed scaling."""
        return torch.zeros_like(self._scale(state)) if self.delayed else ()

    def after(self, state: TrainState, amax: Tree, scaler: ScalerState) -> Any:
        """Return the next state of delayed scaling from the amaxes of all micro-batches and ranks."""
        if self.config is None or not self.delayed:
            return state.float8
        unscaled = without_loss_scale(amax, state.scaler.scale)
        return update(state.float8, unscaled, self.config, found_inf=scaler.found_inf)


def begin(linears: Float8Linears | None, plan: Plan, values: list[Tensor], amax: Tree) -> None:
    """Give the context the weights among the inputs of the loss."""
    if linears is not None:
        linears.begin([values[place] for place in products(plan)], amax if isinstance(amax, Tensor) else None)
