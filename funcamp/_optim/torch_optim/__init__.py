"""torch.optim's classes written out: a file for each family of update rules. `rule.py` says what a rule is."""

from __future__ import annotations

from torch import optim

from funcamp._optim.torch_optim import adafactor, adagrad, adam, muon, rprop, sgd
from funcamp._optim.torch_optim.rule import UpdateRule

RULES: dict[type[optim.Optimizer], UpdateRule] = {
    optim.Adadelta: adagrad.ADADELTA,
    optim.Adafactor: adafactor.ADAFACTOR,
    optim.Adagrad: adagrad.ADAGRAD,
    optim.Adam: adam.ADAM,
    optim.AdamW: adam.ADAMW,
    optim.Adamax: adam.ADAMAX,
    optim.ASGD: sgd.ASGD,
    optim.Muon: muon.MUON,
    optim.NAdam: adam.NADAM,
    optim.RAdam: adam.RADAM,
    optim.RMSprop: adagrad.RMSPROP,
    optim.Rprop: rprop.RPROP,
    optim.SGD: sgd.SGD,
}
