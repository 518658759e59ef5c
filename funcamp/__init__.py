"""Mixed-precision gradient scaling for PyTorch as pure functions on an immutable state."""

import importlib
from typing import Any

from funcamp import float8 as float8
from funcamp import presets as presets
from funcamp import rules as rules
from funcamp._amp.grad_scaler import GradScaler
from funcamp._autograd.loss import loss
from funcamp._autograd.module_loss import module_loss
from funcamp._autograd.scaled_grad import scaled_grad_and_value
from funcamp._io.checkpoint import load, save
from funcamp._io.metric_reader import MetricReader
from funcamp._jit.jit import jit
from funcamp._layers import register_passes as _register_passes
from funcamp._optim.average import average, ema_update
from funcamp._optim.by_group import by_group
from funcamp._optim.chain import chain
from funcamp._optim.clip import clip_by_norm, clip_by_value, clip_grad_norm, clip_grad_value
from funcamp._optim.every import every
from funcamp._optim.part import Update
from funcamp._optim.schedule import schedule
from funcamp._optim.stateless import stateless
from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.first_state import init
from funcamp._scaler.scale import all_finite, found_inf_by_leaf, leaf_names, scale, unscale, unscale_and_check
from funcamp._scaler.skip_step import skip_step
from funcamp._scaler.state import ScalerState
from funcamp._scaler.state_dict import from_state_dict, to_state_dict
from funcamp._scaler.update import exhausted, merge, saturated, update
from funcamp._step.make import make_train_step
from funcamp._step.state import Metrics, TrainState
from funcamp._step.step import TrainStep
from funcamp._step_file.load_step import load_step
from funcamp._storage.params import Params, clone, ravel
from funcamp._verify.verify import verify

__version__ = "0.1.0"

__all__ = [
    "GradScaler",
    "MetricReader",
    "Metrics",
    "Params",
    "ScalerConfig",
    "ScalerState",
    "TrainState",
    "TrainStep",
    "Update",
    "all_finite",
    "average",
    "by_group",
    "chain",
    "clip_by_norm",
    "clip_by_value",
    "clip_grad_norm",
    "clip_grad_value",
    "clone",
    "ema_update",
    "every",
    "exhausted",
    "found_inf_by_leaf",
    "from_state_dict",
    "init",
    "jit",
    "leaf_names",
    "load",
    "load_step",
    "loss",
    "make_train_step",
    "merge",
    "module_loss",
    "ravel",
    "saturated",
    "save",
    "scale",
    "scaled_grad_and_value",
    "schedule",
    "skip_step",
    "stateless",
    "to_state_dict",
    "unscale",
    "unscale_and_check",
    "update",
    "verify",
]

_register_passes("_cpu")


def __getattr__(name: str) -> Any:
    """Import funcamp.distributed, funcamp.numerics and funcamp.report when they are first used."""
    if name in ("distributed", "numerics", "report"):
        return importlib.import_module(f"funcamp.{name}")
    raise AttributeError(f"module 'funcamp' has no attribute {name!r}")
