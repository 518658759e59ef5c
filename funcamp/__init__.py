"""Mixed-precision gradient scaling for PyTorch as pure functions on an immutable state."""

from funcamp._clip import clip_grad_norm
from funcamp._grad import scaled_grad_and_value
from funcamp._optim import OptState, StatelessOptimizer, stateless
from funcamp._scaler import all_finite, scale, unscale, unscale_and_check
from funcamp._state import ScalerConfig, ScalerState, init
from funcamp._update import merge, skip_step, update

__version__ = "0.1.0"

__all__ = [
    "OptState",
    "ScalerConfig",
    "ScalerState",
    "StatelessOptimizer",
    "all_finite",
    "clip_grad_norm",
    "init",
    "merge",
    "scale",
    "scaled_grad_and_value",
    "skip_step",
    "stateless",
    "unscale",
    "unscale_and_check",
    "update",
]
