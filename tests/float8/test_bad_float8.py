"""Bad input to `funcamp.float8` raises an error that names the call, the argument, the rule, the value and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from funcamp import _upstream, float8
from tests.float8.models import net

X, W = torch.ones(4, 16), torch.ones(32, 16)
mm: Any = float8.scaled_mm
convert: Any = float8.convert


def with_a_forward_of_its_own() -> nn.Linear:
    layer = nn.Linear(16, 16)
    layer.forward = layer.forward  # type: ignore[method-assign]
    return layer


# fmt: off
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "granularity": (lambda: float8.Float8Config("block"), ValueError, "granularity must be 'tensor' or 'row'; got 'block'"),  # type: ignore[arg-type]
    "power": (lambda: float8.Float8Config(power_of_two=1), TypeError, "power_of_two must be"),  # type: ignore[arg-type]
    "quantize dtype": (lambda: float8.quantize(X, torch.float16), TypeError, "dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got torch.float16"),
    "quantize wide": (lambda: float8.quantize(X.double()), TypeError, r"x must be a float32, bfloat16 or float16 tensor \(x.float\(\) makes one\)"),
    "quantize empty": (lambda: float8.quantize(X[:0]), ValueError, "x must have an element"),
    "product config": (lambda: mm(X, W, "row"), TypeError, "config must be a Float8Config.*got 'row'"),
    "product dtype": (lambda: mm(X.long(), W), TypeError, "x must be a float32, bfloat16 or float16"),
    "product weight": (lambda: mm(X, W[:20]), ValueError, r"both multiples of 16.*pad the layer, or keep it in bfloat16; got \(20, 16\)"),
    "product empty": (lambda: mm(X, W[:0]), ValueError, "both multiples of 16"),
    "product shape": (lambda: mm(torch.ones(4, 32), W), ValueError, r"x must have shape \(..., 16\) on cpu; got a torch.float32 tensor of shape \(4, 32\)"),
    "product device": (lambda: mm(X.to("meta"), W), ValueError, "on cpu; got .* on meta"),
    "model": (lambda: convert(W), TypeError, "model must be a torch.nn.Module; got a torch.float32 tensor"),
    "config": (lambda: convert(net(), "row"), TypeError, r"config must be a Float8Config \(granularity, power_of_two, emulate\); got 'row'"),
    "keep one text": (lambda: convert(net(), keep="odd"), TypeError, "keep must be a list of names of modules; got 'odd'"),
    "keep unknown": (lambda: convert(net(), keep=["odd", "tail"]), ValueError, r"keep must have names of modules.*got 'tail'"),
    "sizes": (lambda: convert(net(), keep=["head"]), ValueError, r"multiples of 16.*got 'odd' \(16, 24\): pad these layers, or leave them out with keep=\['head', 'odd'\]"),
    "no layer": (lambda: convert(nn.Sequential(nn.Conv1d(16, 16, 1))), ValueError, "model must have a torch.nn.Linear .* to convert; got none in Sequential"),
    "only kept": (lambda: convert(net(), keep=[""]), ValueError, "got none in Net"),
    "own forward": (lambda: convert(with_a_forward_of_its_own()), ValueError, "got none in Linear"),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_named(name: str) -> None:
    call, error, message = CASES[name]
    with pytest.raises(error, match=f"(?s){message}"):
        call()


def test_a_refused_model_is_unchanged() -> None:
    model = net()
    with pytest.raises(ValueError, match="'odd'"):
        convert(model)
    assert not any(isinstance(module, float8.Float8Linear) for module in model.modules())


def test_a_device_without_float8_products_offers_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    from funcamp.float8 import product

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for device in ("mps", "xpu", "cuda"):
        with pytest.raises(RuntimeError, match=f"{device} must have float8 products, and has none.*emulate=True"):
            product.check_device(torch.device(device), float8.Float8Config())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    product.check_device(torch.device("cuda"), float8.Float8Config())
    monkeypatch.setattr(product, "_scaled_mm", _upstream.Missing("torch._scaled_mm"))
    with pytest.raises(RuntimeError, match=r"has no torch\._scaled_mm"):
        mm(X, W)
    assert mm(X, W, float8.Float8Config(emulate=True)).shape == (4, 32)
