"""Mixed-precision gradient scaling for PyTorch as pure functions on an immutable state."""

from funcamp._by_leaf import found_inf_by_leaf, leaf_names
from funcamp._checkpoint import load, save
from funcamp._clip import clip_grad_norm, clip_grad_value
from funcamp._config import ScalerConfig
from funcamp._copies import clone
from funcamp._custom_function import custom_function
from funcamp._ema import ema_update
from funcamp._exchange import from_state_dict, to_state_dict
from funcamp._flat import FlatParams, matrix_or_vector, ravel
from funcamp._grad import scaled_grad_and_value
from funcamp._grad_scaler import GradScaler
from funcamp._groups import GroupedOptimizer, by_group
from funcamp._jit import jit
from funcamp._jit_step import JitStep
from funcamp._limits import exhausted, saturated
from funcamp._make_step import make_train_step
from funcamp._metrics import MetricReader
from funcamp._module import ModuleLoss, module_loss
from funcamp._optim import OptState, StatelessOptimizer, stateless
from funcamp._policy import Policy
from funcamp._rulebook import init
from funcamp._scaler import all_finite, scale, unscale, unscale_and_check
from funcamp._state import HysteresisState, ScalerState, ToleranceState, WarmUpState
from funcamp._step import TrainStep
from funcamp._train_state import Metrics, TrainState
from funcamp._update import merge, skip_step, update

__version__ = "0.1.0"

__all__ = [
    "FlatParams",
    "GradScaler",
    "GroupedOptimizer",
    "HysteresisState",
    "JitStep",
    "MetricReader",
    "Metrics",
    "ModuleLoss",
    "OptState",
    "Policy",
    "ScalerConfig",
    "ScalerState",
    "StatelessOptimizer",
    "ToleranceState",
    "TrainState",
    "TrainStep",
    "WarmUpState",
    "all_finite",
    "by_group",
    "clip_grad_norm",
    "clip_grad_value",
    "clone",
    "custom_function",
    "ema_update",
    "exhausted",
    "found_inf_by_leaf",
    "from_state_dict",
    "init",
    "jit",
    "leaf_names",
    "load",
    "make_train_step",
    "matrix_or_vector",
    "merge",
    "module_loss",
    "ravel",
    "saturated",
    "save",
    "scale",
    "scaled_grad_and_value",
    "skip_step",
    "stateless",
    "to_state_dict",
    "unscale",
    "unscale_and_check",
    "update",
]
