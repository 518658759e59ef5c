"""No function of the step reads a tensor on the host: traced on tensors without values, where a read raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from funcamp import (
    ScalerConfig,
    all_finite,
    clip_grad_norm,
    init,
    merge,
    scaled_grad_and_value,
    skip_step,
    stateless,
    unscale_and_check,
    update,
)
from tests.support.helpers import to

GRADS: dict[str, Any] = {
    "w": torch.randn(3, 2),
    "h": [torch.randn(4).half(), torch.randn(2).bfloat16()],
    "s": torch.ones(()),
}
CONFIG = ScalerConfig(min_scale=1.0, max_scale=2.0**24)
ADAMW = stateless(torch.optim.AdamW, lr=lambda applied: 1e-3 / (1 + applied))


def train_step(state: Any, params: Any, opt_state: Any, x: torch.Tensor) -> Any:
    grad_fn = scaled_grad_and_value(lambda p, x: (x @ p["w"]).half().float().square().mean())
    (grads, state), loss = grad_fn(state, params, x)
    grads, norm = clip_grad_norm(grads, 1.0)
    new = ADAMW.update(params, grads, opt_state)
    return skip_step(state, new=new, old=(params, opt_state)), update(state, CONFIG), loss, norm


PARAMS = {"w": torch.randn(3, 2)}
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "unscale_and_check": (unscale_and_check, (init(), GRADS)),
    "all_finite": (all_finite, (GRADS,)),
    "update-new_scale": (lambda s, n: update(s, CONFIG, new_scale=n), (init(), torch.ones(1))),
    "merge": (merge, (init(), init(), init())),
    "train_step": (train_step, (init(), PARAMS, ADAMW.init(PARAMS), torch.randn(5, 3))),
}


def trace(fn: Callable[..., Any], args: tuple[Any, ...]) -> torch.fx.GraphModule:
    graph: torch.fx.GraphModule = make_fx(lambda *given: fn(*given), tracing_mode="real")(*to(args, "meta"))
    return graph


@pytest.mark.parametrize("name", CALLS)
def test_call_reads_nothing_on_the_host(name: str) -> None:
    fn, args = CALLS[name]
    graph = trace(fn, args)
    assert len(graph.graph.nodes) > 0
    devices = {
        node.meta["val"].device.type for node in graph.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)
    }
    assert devices == {"meta"}, "a tensor was made on another device than the inputs'"


@pytest.mark.parametrize("read", [lambda x: x.item(), lambda x: x[x > 0]], ids=["item", "mask"])
def test_the_trace_does_raise_on_a_host_read(read: Callable[..., Any]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        trace(lambda s: read(unscale_and_check(s, torch.ones((), device="meta"))[1].found_inf), (init(),))
