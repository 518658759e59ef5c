"""Bad input to `funcamp.float8` raises an error that names the call, the argument, the rule, the value and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from funcamp import _upstream, float8

X, W = torch.ones(4, 16), torch.ones(32, 16)
DELAYED = float8.transformer_engine(amax_history_len=2)
STATE = float8.init(DELAYED, 1)
mm: Any = float8.scaled_mm

# fmt: off
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "scaling": (lambda: float8.Float8Config("late"), ValueError, "scaling must be 'current' or 'delayed'; got 'late'"),  # type: ignore[arg-type]
    "granularity": (lambda: float8.Float8Config(granularity="block"), ValueError, "must be 'tensor' or 'row'"),  # type: ignore[arg-type]
    "history": (lambda: float8.transformer_engine(amax_history_len=0), ValueError, "history must be 1 to"),
    "margin": (lambda: float8.transformer_engine(margin=9), ValueError, "margin must be 0 to 8; got 9"),
    "delayed rows": (lambda: float8.Float8Config("delayed", "row"), ValueError, "granularity must be 'tensor' and .* with delayed scaling.*got 'row' and False"),
    "delayed powers": (lambda: float8.Float8Config("delayed", power_of_two=True), ValueError, "power_of_two False with delayed.*got 'tensor' and True"),
    "recipe": (lambda: float8.torchao("blockwise"), ValueError, "'tensorwise' or 'rowwise'; got 'blockwise'"),
    "init current": (lambda: float8.init(float8.Float8Config(), 1), ValueError, r"delayed scaling \(for example float8.transformer_engine\(\)\); got 'current'"),
    "init config": (lambda: float8.init("delayed", 1), TypeError, "config must be a Float8Config.*got 'delayed'"),  # type: ignore[arg-type]
    "init products": (lambda: float8.init(DELAYED, -1), ValueError, "products must be 0 or more"),
    "update state": (lambda: float8.update((W, W), W, DELAYED), TypeError, "state must be a Float8State"),  # type: ignore[arg-type]
    "update history": (lambda: float8.update(STATE, STATE.scale, float8.transformer_engine()), ValueError, r"state.history must have shape \(1024, 1, 3\); got \(2, 1, 3\)"),
    "update amax": (lambda: float8.update(STATE, STATE.scale[0], DELAYED), ValueError, r"amax must have shape \(1, 3\); got \(3,\)"),
    "update dtype": (lambda: float8.update(STATE, STATE.scale.double(), DELAYED), TypeError, "amax must be a float32 tensor"),
    "update flag": (lambda: float8.update(STATE, STATE.scale, DELAYED, found_inf=W), TypeError, r"found_inf must be a tensor of shape \(\)"),
    "quantize dtype": (lambda: float8.quantize(X, torch.float16), TypeError, "dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got torch.float16"),
    "quantize wide": (lambda: float8.quantize(X.double()), TypeError, r"x must be a float32, bfloat16 or float16 tensor \(x.float\(\) makes one\)"),
    "quantize empty": (lambda: float8.quantize(X[:0]), ValueError, "x must have an element"),
    "quantize scale": (lambda: float8.quantize(X, scale=2.0), TypeError, "scale must be a float32 tensor or None; got 2.0"),  # type: ignore[arg-type]
    "quantize both": (lambda: float8.quantize(X, scale=W[0, 0], dim=1), ValueError, "dim and power_of_two must not be given with a scale"),
    "product dtype": (lambda: mm(X.long(), W), TypeError, "x must be a float32, bfloat16 or float16"),
    "product weight": (lambda: mm(X, W[:20]), ValueError, r"both multiples of 16.*pad the layer, or keep it in bfloat16; got \(20, 16\)"),
    "product empty": (lambda: mm(X, W[:0]), ValueError, "both multiples of 16"),
    "product shape": (lambda: mm(torch.ones(4, 32), W), ValueError, r"x must have shape \(..., 16\) on cpu; got a torch.float32 tensor of shape \(4, 32\)"),
    "product device": (lambda: mm(X.to("meta"), W), ValueError, "on cpu; got .* on meta"),
    "product no scale": (lambda: mm(X, W, DELAYED), TypeError, r"scale must be a float32 tensor of shape \(3,\); got None"),
    "product scale": (lambda: mm(X, W, DELAYED, scale=STATE.scale, amax=STATE.scale[0]), ValueError, r"scale must have shape \(3,\); got \(1, 3\)"),
    "product current": (lambda: mm(X, W, scale=STATE.scale[0]), ValueError, "scale and amax must not be given with current scaling"),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_named(name: str) -> None:
    call, error, message = CASES[name]
    with pytest.raises(error, match=f"(?s){message}"):
        call()


def test_a_device_without_float8_products_offers_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    from funcamp.float8 import product

    for device, by_row in (("mps", False), ("xpu", False), ("cuda", False)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        config = float8.Float8Config(granularity="row" if by_row else "tensor")
        with pytest.raises(RuntimeError, match=f"{device} must have float8 products, and has none.*emulate=True"):
            product.check_device(torch.device(device), config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    product.check_device(torch.device("cuda"), float8.Float8Config())
    monkeypatch.setattr(product, "_scaled_mm", _upstream.Missing("torch._scaled_mm"))
    with pytest.raises(RuntimeError, match=r"has no torch\._scaled_mm"):
        mm(X, W)
    assert mm(X, W, float8.Float8Config(emulate=True)).shape == (4, 32)
