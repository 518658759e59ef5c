"""torch.optim's classes written out: a file for each update rule. `rule.py` says what a rule is."""

from __future__ import annotations

import torch

from funcamp._optim.torch_optim.adadelta import ADADELTA
from funcamp._optim.torch_optim.adafactor import ADAFACTOR
from funcamp._optim.torch_optim.adagrad import ADAGRAD
from funcamp._optim.torch_optim.adam import ADAM, ADAMW
from funcamp._optim.torch_optim.adamax import ADAMAX
from funcamp._optim.torch_optim.asgd import ASGD
from funcamp._optim.torch_optim.muon import MUON
from funcamp._optim.torch_optim.nadam import NADAM
from funcamp._optim.torch_optim.radam import RADAM
from funcamp._optim.torch_optim.rmsprop import RMSPROP
from funcamp._optim.torch_optim.rprop import RPROP
from funcamp._optim.torch_optim.rule import UpdateRule
from funcamp._optim.torch_optim.sgd import SGD

RULES: dict[type[torch.optim.Optimizer], UpdateRule] = {
    torch.optim.Adadelta: ADADELTA,
    torch.optim.Adafactor: ADAFACTOR,
    torch.optim.Adagrad: ADAGRAD,
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAMW,
    torch.optim.Adamax: ADAMAX,
    torch.optim.ASGD: ASGD,
    torch.optim.Muon: MUON,
    torch.optim.NAdam: NADAM,
    torch.optim.RAdam: RADAM,
    torch.optim.RMSprop: RMSPROP,
    torch.optim.Rprop: RPROP,
    torch.optim.SGD: SGD,
}
