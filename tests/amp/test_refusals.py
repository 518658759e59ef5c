"""What `GradScaler` refuses: what torch's class refuses, in its words, and what only this class does."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from funcamp import GradScaler, ScalerConfig
from tests.support.helpers import assert_same

ANY: Any = None


def optimizer(grad: Any = None) -> Any:
    weight = torch.nn.Parameter(torch.ones(2) if grad is None else grad)
    weight.grad = grad
    return torch.optim.SGD([weight], lr=0.1)


def scaled(scaler: Any) -> Any:
    scaler.scale(torch.zeros(()))
    return scaler


def stepped(scaler: Any) -> Any:
    made = optimizer(torch.ones(2))
    scaled(scaler).step(made)
    return made


def numbers_of(scaler: Any) -> list[float]:
    return [float(number) for number in scaler.state_dict().values()]


TENSORS = {name: torch.tensor(value) for name, value in scaled(GradScaler("cpu", init_scale=8.0)).state_dict().items()}

#: What is called; what torch's class returns or raises is expected.
AS_TORCH: dict[str, Callable[[Any], Any]] = {
    "unscale before scale": lambda scaler: scaler.unscale_(optimizer()),
    "step before scale": lambda scaler: scaler.step(optimizer()),
    "float16 gradient": lambda scaler: scaled(scaler).unscale_(optimizer(torch.ones(2).half())),
    "scale of a number": lambda scaler: scaler.scale(3.0),
    "scale of an iterator": lambda scaler: list(scaler.scale(iter([torch.ones(2).half(), torch.ones(())]))),
    "new scale of two": lambda scaler: (stepped(scaler), scaler.update(torch.ones(2))),
    "new scale with grad": lambda scaler: (stepped(scaler), scaler.update(torch.ones(1, requires_grad=True))),
    "pickle in mid-step": lambda scaler: (stepped(scaler), pickle.dumps(scaler)),
    "empty state dict": lambda scaler: scaler.load_state_dict({}),
    "short state dict": lambda scaler: scaler.load_state_dict({"scale": 1.0}),
    "state dict of tensors": lambda scaler: (scaled(scaler).load_state_dict(TENSORS), numbers_of(scaler)),
    "no numbers, disabled": lambda scaler: type(scaler)("cpu", init_scale=None, enabled=False).state_dict(),
    "growth of 1": lambda scaler: type(scaler)("cpu", growth_factor=1.0),
    "backoff of 1": lambda scaler: type(scaler)("cpu", backoff_factor=1.0),
}


@pytest.mark.parametrize("name", AS_TORCH)
def test_a_call_returns_or_raises_what_torchs_does(name: str) -> None:
    def outcome(scaler: Any) -> Any:
        try:
            return AS_TORCH[name](scaler)
        except Exception as error:
            return type(error), str(error)

    assert_same(outcome(GradScaler("cpu")), outcome(torch.amp.GradScaler("cpu")))


def made(**options: Any) -> Callable[[Any], Any]:
    return lambda scaler: GradScaler("cpu", **options)


def loaded(**entries: Any) -> Callable[[Any], Any]:
    return lambda scaler: scaler.load_state_dict(scaler.state_dict() | {"scale": 5.0} | entries)


#: What is called, the error, and its words.
OWN: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "device": (lambda scaler: GradScaler(ANY), TypeError, "device must be a string, as in torch.amp; got None"),
    "skip": (made(skip="never"), ValueError, 'skip must be "select", "host" or None; got \'never\''),
    "allow_fp16": (made(allow_fp16=1), TypeError, "allow_fp16 must be True or False; got 1"),
    "config and numbers": (made(config=ScalerConfig(), init_scale=4.0), ValueError, "must be left out if config is"),
    "config, disabled": (made(config=4.0, enabled=False), TypeError, "config must be a ScalerConfig; got 4.0"),
    "init_scale": (made(init_scale=0.0), ValueError, "init_scale must be positive and finite"),
    "backoff_factor": (made(backoff_factor=-1.0), ValueError, "backoff_factor must be above 0 and at most 1; got -1.0"),
    "load interval": (loaded(growth_interval=math.inf), TypeError, "growth_interval must be an integer; got inf"),
    "load scale": (loaded(scale=math.nan), ValueError, r"saved\['scale'\] must be 0 or more"),
    "new_scale": (lambda scaler: scaler.update(True), AssertionError, "new_scale should be a float"),
    "no optimizer": (lambda scaler: scaler.step(ANY), TypeError, "optimizer must be a torch.optim.Optimizer"),
}


@pytest.mark.parametrize("name", OWN)
def test_the_argument_is_named_and_nothing_changes(name: str) -> None:
    call, error, words = OWN[name]
    scaler = scaled(GradScaler("cpu"))
    before = scaler.state_dict()
    with pytest.raises(error, match=words):
        call(scaler)
    assert scaler.state_dict() == before
