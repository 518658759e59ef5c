"""What `funcamp.float8` refuses: what is called, the error, and words that it must have. A refused model is unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from funcamp import _upstream, float8
from funcamp.float8 import product
from tests.float8.models import net
from tests.support.helpers import assert_refused

X, W = torch.ones(4, 16), torch.ones(32, 16)
NET, CONVOLUTION = net(), nn.Sequential(nn.Conv1d(16, 16, 1))
Config: Any = float8.Float8Config
mm: Any = float8.scaled_mm
convert: Any = float8.convert


def with_a_forward_of_its_own() -> nn.Linear:
    layer = nn.Linear(16, 16)
    layer.forward = layer.forward  # type: ignore[method-assign]
    return layer


#: What is called, the error, and its words.
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "granularity": (lambda: Config("block"), ValueError, "granularity must be 'tensor' or 'row'; got 'block'"),
    "dtype": (lambda: float8.quantize(X, torch.half), TypeError, "dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got torch.float16"),
    "float64": (lambda: float8.quantize(X.double()), TypeError, r"x must be a float32, bfloat16 or float16 tensor \(x.float\(\) makes one\)"),
    "nothing": (lambda: float8.quantize(X[:0]), ValueError, "x must have an element"),
    "a product's config": (lambda: mm(X, W, "row"), TypeError, r"config must be a Float8Config \(granularity, power_of_two, emulate\); got 'row'"),
    "a product of integers": (lambda: mm(X, W.long()), TypeError, "weight must be a float32, bfloat16 or float16"),
    "a weight's sizes": (lambda: mm(X, W[:20]), ValueError, r"both multiples of 16.*pad the layer, or keep it in bfloat16; got \(20, 16\)"),
    "an empty weight": (lambda: mm(X, W[:0]), ValueError, "both multiples of 16"),
    "another width": (lambda: mm(torch.ones(4, 32), W), ValueError, r"x must have shape \(..., 16\) on cpu; got a torch.float32 tensor of shape \(4, 32\)"),
    "another device": (lambda: mm(X.to("meta"), W), ValueError, "on cpu; got .* on meta"),
    "no model": (lambda: convert(W), TypeError, "model must be a torch.nn.Module; got a torch.float32 tensor"),
    "a model's config": (lambda: convert(NET, "row"), TypeError, "float8.convert: config must be a Float8Config"),
    "keep one text": (lambda: convert(NET, keep="odd"), TypeError, "keep must be a list of names of modules; got 'odd'"),
    "keep another name": (lambda: convert(NET, keep=["odd", "tail"]), ValueError, r"keep must have names of modules.*got 'tail'"),
    "a layer's sizes": (lambda: convert(NET, keep=["head"]), ValueError, r"multiples of 16.*got 'odd' \(16, 24\): pad these layers, or leave them out with keep=\['head', 'odd'\]"),
    "keep all": (lambda: convert(NET, keep=[""]), ValueError, "got none in Net"),
    "no layer": (lambda: convert(CONVOLUTION), ValueError, "model must have a torch.nn.Linear .* to convert; got none in Sequential"),
    "a layer's own forward": (lambda: convert(with_a_forward_of_its_own()), ValueError, "got none in Linear"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_argument_is_named_with_the_rule_and_the_value(name: str) -> None:
    assert_refused(*REFUSED[name])
    assert not any(isinstance(module, float8.Float8Linear) for module in NET.modules())


def test_a_device_without_float8_products_offers_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for device in ("mps", "cuda"):
        with pytest.raises(RuntimeError, match=f"{device} must have float8 products, and has none.*emulate=True"):
            product.check_device(torch.device(device), Config())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    product.check_device(torch.device("cuda"), Config())
    monkeypatch.setattr(product, "_scaled_mm", _upstream.Missing("torch._scaled_mm"))
    with pytest.raises(RuntimeError, match=r"has no torch\._scaled_mm"):
        mm(X, W)
    assert mm(X, W, Config(emulate=True)).shape == (4, 32)
