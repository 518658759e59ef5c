"""torch.optim's classes written out: a file for each update rule. `rule.py` says what a rule is."""

from __future__ import annotations

from torch import optim

from funcamp._optim.torch_optim import (
    adadelta,
    adafactor,
    adagrad,
    adam,
    adamax,
    asgd,
    muon,
    nadam,
    radam,
    rmsprop,
    rprop,
    sgd,
)
from funcamp._optim.torch_optim.rule import UpdateRule

RULES: dict[type[optim.Optimizer], UpdateRule] = {
    optim.Adadelta: adadelta.ADADELTA,
    optim.Adafactor: adafactor.ADAFACTOR,
    optim.Adagrad: adagrad.ADAGRAD,
    optim.Adam: adam.ADAM,
    optim.AdamW: adam.ADAMW,
    optim.Adamax: adamax.ADAMAX,
    optim.ASGD: asgd.ASGD,
    optim.Muon: muon.MUON,
    optim.NAdam: nadam.NADAM,
    optim.RAdam: radam.RADAM,
    optim.RMSprop: rmsprop.RMSPROP,
    optim.Rprop: rprop.RPROP,
    optim.SGD: sgd.SGD,
}
