"""A class of torch.optim as two pure functions, by its update rule."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._optim.arguments import WITHOUT_EFFECT, torch_optimizer
from funcamp._optim.hyperparameters import Hyper, is_dynamic, map_items
from funcamp._optim.optimizer import Inputs, StatelessOptimizer, Stepped
from funcamp._optim.torch_optim import RULES
from funcamp._optim.torch_optim.rule import Arguments, State
from funcamp._scaler.state import widen
from funcamp._types import Kwargs


class RuleOptimizer(StatelessOptimizer):
    """A class of torch.optim as two pure functions, by its update rule; made by `stateless`."""

    constants: Kwargs
    """All arguments of the class: the defaults too, and numbers in place of tensors and schedules."""
    entry_names: list[list[str]]
    """The names of the entries of a vector, and of a matrix."""

    _needs_gradient = True

    def _prepare(self) -> None:
        self._rule = RULES[self.cls]
        self._takes_groups = self._rule.elementwise
        self._refuse_unknown()
        self.constants = {name: value for name, value in self._torch_group().items() if name not in WITHOUT_EFFECT}
        h = Arguments(self.constants)
        self.entry_names = [[*self._rule.init(torch.zeros(shape), h)] for shape in ((2,), (2, 2))]

    def _refuse_unknown(self) -> None:
        """Raise TypeError or ValueError for what the rule does not know, perhaps of a newer torch."""
        for name, value in self.hyperparameters.items():
            if name not in (*self._rule.arguments, *WITHOUT_EFFECT):
                raise TypeError(
                    f"stateless: {self.cls.__name__} must be given without {name}, which torch has and funcamp has not"
                )
            if is_dynamic(value) and name in self._rule.constants:
                raise TypeError(f"stateless: {name} must be a constant; got {_tree.brief(value)}")

    def _torch_group(self) -> Kwargs:
        """Return torch's parameter group; raise TypeError or ValueError if the class refuses a value."""
        try:
            return torch_optimizer(self.cls, self.arguments).param_groups[0]
        except (TypeError, ValueError) as error:
            got = ", ".join(f"{name}={_tree.brief(value)}" for name, value in self.hyperparameters.items())
            raise type(error)(
                f"stateless: {self.cls.__name__} refuses its hyperparameters: {error}; got {got}"
            ) from error

    def _first(self, params: list[Tensor], hyper: Hyper) -> list[State]:
        h = self._h(hyper)
        states: list[State] = []
        for param in params:
            self._check_param(param)
            states.append(_as_param(self._rule.init(_as_real(param), h), param))
        return [*states, {}]

    def _check_param(self, param: Tensor) -> None:
        """Raise TypeError or ValueError for a parameter that the rule does not take."""
        name = self.cls.__name__
        if param.is_complex() and not self._rule.takes_complex:
            raise TypeError(
                f"init: params must be real, as {name} does not support complex parameters; got {_tree.describe(param)}"
            )
        if self._rule.dims not in (None, param.dim()):
            raise ValueError(
                f"init: params must have {self._rule.dims} dimensions for {name}; got {_tree.describe(param)}: give "
                "others to another optimizer, with by_group"
            )

    def _stepped(self, inputs: Inputs) -> Stepped:
        h = self._h(inputs.hyper)
        *states, shared = inputs.states
        new_params, new_states = [], []
        for param, grad, state in zip(inputs.params, inputs.grads, states):
            # int, because Dynamo of torch 2.11 does not index a list with a bool.
            self._check_entries({*self.entry_names[int(param.dim() >= 2)]}, state)
            new_param, new_state = self._one_stepped(param.detach(), grad.detach().to(param.dtype), state, h)
            new_params.append(new_param)
            new_states.append(new_state)
        return Stepped(new_params, [*new_states, shared])

    def _one_stepped(self, param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
        """Return one parameter and its state after a step."""
        if param.is_complex():
            real_state = {name: _as_real(value) for name, value in state.items()}
            new_param, new_state = self._one_stepped(_as_real(param), _as_real(grad), real_state, h)
            return torch.view_as_complex(new_param), _as_param(new_state, param)
        if getattr(h, "maximize", False):  # not Muon
            grad = -grad
        count = {"step": state["step"] + 1} if "step" in state else {}
        new_param, new_state = self._rule.step(param, grad, state, h)
        return new_param, count | new_state

    def _h(self, hyper: Hyper) -> Arguments:
        """Return the class's arguments in a step."""
        return Arguments(self.constants | {name: map_items(_wide, value) for name, value in hyper.items()})


def _wide(value: object) -> object:
    return widen(value.detach()) if isinstance(value, Tensor) else value


def _as_real(tensor: Tensor) -> Tensor:
    """Return a tensor as rules compute with it: a complex one as its real view."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _as_param(state: State, param: Tensor) -> State:
    """Return what a rule keeps of a parameter, complex where it is like the real view of a complex one."""
    if not param.is_complex():
        return state
    shape = (*param.shape, 2)
    return {name: torch.view_as_complex(value) if value.shape == shape else value for name, value in state.items()}
