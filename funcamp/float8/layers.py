"""Float8 in the step: which layers, their context, and the state of delayed scaling.

The history has amaxes of gradients of the unscaled loss. So it stays right when the loss scale moves: the scale of a
gradient is divided by the loss scale before the step, and its amax is multiplied by the reciprocal after it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._autograd.loss import Loss
from funcamp._autograd.module_loss import ModuleLoss
from funcamp._autograd.tape import Tape
from funcamp._scaler.precision import reciprocal
from funcamp._step.state import TrainState
from funcamp._storage.inputs import Cast, Inputs
from funcamp._storage.policy import Policy
from funcamp._tree import settled
from funcamp._types import Tree
from funcamp.float8.config import check_config
from funcamp.float8.linears import Float8Linears, StandIns
from funcamp.float8.product import Scales
from funcamp.float8.state import check_state, init, update, with_loss_scale, without_loss_scale
from funcamp.float8.weights import weights_in_float8


class Float8Layers:
    """The layers of a step that multiply in float8: the `Products` of a policy with float8."""

    def __init__(self, policy: Policy, loss_fn: Loss) -> None:
        self.config = check_config("make_train_step", policy.float8)
        if not isinstance(loss_fn, ModuleLoss):
            raise ValueError(
                "make_train_step: policy must have float8 only for a loss of module_loss, whose linear layers it "
                f"finds; got {policy} with {loss_fn!r}: call float8.scaled_mm in a function of your own"
            )
        self._policy = policy
        self._loss_fn = loss_fn
        self._is_delayed = self.config.scaling == "delayed"
        layers = [loss_fn.model.get_submodule(_layer_path(name)) for name in sorted(loss_fn.linear_names)]
        self._stand_ins = StandIns(loss_fn.holder, layers)

    def init(self, inputs: Inputs, device: torch.device) -> Tree:
        """Return the state of delayed scaling, or ().

        Raises:
            ValueError: no layer multiplies in float8.
        """
        count = len(inputs.float8_inputs())
        if not count:
            raise ValueError(
                f"init: policy must have float8 only with a layer to multiply in it; got {self._policy} and none: a "
                f"Linear layer with sizes that are multiples of 16{self.described()}"
            )
        return init(self.config, count, device=device) if self._is_delayed else ()

    def described(self) -> str:
        """Return how many linear layers multiply in float8, and why not the others, as the end of a repr."""
        trained_names = self._loss_fn.names
        linear_names = self._loss_fn.linear_names
        # Not params(), which raises if the module has changed.
        parameters = dict(self._loss_fn.model.named_parameters(remove_duplicate=False))
        reasons_against = {name: "it is frozen" for name in sorted(linear_names) if name not in trained_names}
        for name in trained_names:
            if name in linear_names and name in parameters:
                reasons_against[name] = self._policy.no_float8(name, parameters[name], linear_names)
        in_float8 = list(reasons_against.values()).count("")
        others = "".join(f", not {name}: {reason}" for name, reason in reasons_against.items() if reason)
        return f"; float8 in {in_float8} of {len(reasons_against)} linear layers{others}"

    def prepare(self, state: TrainState, inputs: Inputs, cast: Cast) -> Float8Linears:
        """Return the context of a step, with the operands of all weights.

        inputs: of the loss.
        cast: the parameters, from `Inputs.cast`.
        """
        delayed = None
        tape = Tape(())
        if self._is_delayed:  # all layers' at once: a kernel for each number would take longer than the products
            scale_without_loss_scale = self._scale(state, inputs)
            tape = Tape(torch.zeros_like(scale_without_loss_scale), over_micro_batches="max", over_ranks="max")
            scale = settled(with_loss_scale(scale_without_loss_scale, state.scaler.scale))
            delayed = Scales(scale, settled(reciprocal(scale)))
        weights = weights_in_float8(state.params, inputs, inputs.values(cast), self.config, delayed)
        return Float8Linears(self._stand_ins, self.config, delayed, weights, inputs.float8_inputs(), tape)

    def _scale(self, state: TrainState, inputs: Inputs) -> Tensor:
        """Return the scales of delayed scaling.

        Raises:
            TypeError: the state has none.
            ValueError: it is of another configuration, or of other layers.
        """
        scale = check_state("step", state.float8, self.config).scale
        count = len(inputs.float8_inputs())
        if scale.shape[0] != count:
            raise ValueError(
                f"step: state.float8 must have a row for each of the {count} layers in float8; got {scale.shape[0]}: "
                "begin anew with state._replace(variables=step.init().variables)"
            )
        return scale

    def scales(self, state: TrainState, inputs: Inputs) -> dict[str, Tensor]:
        """Return the scales of delayed scaling by the path of the layer; empty without it."""
        if not self._is_delayed:
            return {}
        scale_by_input: dict[int | None, Tensor] = dict(zip(inputs.float8_inputs(), self._scale(state, inputs)))
        scale_by_path: dict[str, Tensor] = {}
        for name, number, in_float8 in zip(inputs.names or (), inputs.input_of_leaf, inputs.leaf_in_float8):
            if in_float8:
                scale_by_path[_layer_path(name)] = scale_by_input[number].clone()
        return scale_by_path

    def after(self, state: TrainState, record: Tree) -> Tree:
        """Return the next state of delayed scaling from the amaxes of all micro-batches and ranks."""
        if not self._is_delayed:
            return state.float8
        return update(state.float8, without_loss_scale(record, state.scaler.scale), self.config)


def _layer_path(weight_name: str) -> str:
    """Return the path of the layer from the name of its weight: `head` from `head.weight`."""
    return weight_name.rpartition(".")[0]
