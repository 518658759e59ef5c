"""The outcome of a rule, checked once, when a configuration is made with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._scaler.rule import Outcome
from funcamp._scaler.state import ScalerState, tensors_of, with_counters

if TYPE_CHECKING:
    from funcamp._scaler.config import ScalerConfig


def check_outcome(config: ScalerConfig) -> None:
    """Call the rule of a configuration with a first state on the CPU, and check what it returns.

    Raises:
        TypeError: it does not return an `Outcome`, or a field is not a tensor of the right dtype.
        ValueError: the counters are not those that the rule starts with, or a field has another shape than ().
    """
    counters = config.rule.first_counters()
    state = ScalerState(
        scale=torch.tensor(config.init_scale, dtype=torch.float32, device="cpu"),
        growth_tracker=torch.tensor(0, dtype=torch.int32, device="cpu"),
        found_inf=torch.tensor(0.0, dtype=torch.float32, device="cpu"),
    )
    outcome: object = config.rule.outcome(with_counters(state, tensors_of(counters, "cpu")), config)
    rule = f"ScalerConfig: the rule {config.rule.name} must return"
    if not isinstance(outcome, Outcome):
        raise TypeError(
            f"{rule} a rules.Outcome; got {_tree.brief(outcome)}: "
            "write Outcome(scale, growth_tracker, backs_off, grows)"
        )
    if outcome.counters.keys() != counters.keys():
        raise ValueError(
            f"{rule} the counters of its first_counters, {', '.join(counters) or 'none'}; "
            f"got {', '.join(outcome.counters) or 'none'}"
        )
    dtypes = {"scale": torch.float32, "growth_tracker": torch.int32, "backs_off": torch.bool, "grows": torch.bool}
    fields = {name: getattr(outcome, name) for name in dtypes} | dict(outcome.counters)
    for name, value in fields.items():
        dtype = dtypes.get(name, torch.int32)
        if isinstance(value, bool) and dtype == torch.bool:  # as of a rule that never grows
            continue
        error = TypeError if not isinstance(value, Tensor) or value.dtype != dtype else ValueError
        if error is TypeError or value.dim() != 0:
            raise error(f"{rule} an outcome whose {name} is a {dtype} tensor of shape (); got {_tree.describe(value)}")
