"""Every optimizer of torch.optim that is a function of its gradients, with options that take its branches."""

from __future__ import annotations

from typing import Any

import torch

optim = torch.optim
CASES: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD-momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "SGD-nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD-dampening": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "Adam": (optim.Adam, {}),
    "Adam-amsgrad": (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (optim.AdamW, {"betas": (0.8, 0.95)}),
    "NAdam": (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (optim.RAdam, {}),
    "Adamax": (optim.Adamax, {}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.3}),
    "Adadelta": (optim.Adadelta, {}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "ASGD": (optim.ASGD, {"t0": 3, "lambd": 0.01}),
    "Rprop": (optim.Rprop, {}),
    "Adafactor": (optim.Adafactor, {"lr": 0.05, "weight_decay": 0.1}),
    "Adafactor-clipped": (optim.Adafactor, {"lr": 2.0, "eps": (1e-3, 0.5), "d": 1.1, "maximize": True}),
    "Muon": (optim.Muon, {"lr": 0.02}),
}
