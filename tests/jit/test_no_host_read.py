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
    make_train_step,
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


def loss_fn(params: Any, x: torch.Tensor) -> Any:
    return (x @ params["w"]).half().float().square().mean()


STEP = make_train_step(loss_fn, ADAMW, CONFIG, max_norm=1.0)
PARAMS, X = {"w": torch.randn(3, 2)}, torch.randn(5, 3)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "unscale_and_check": (unscale_and_check, (init(), GRADS)),
    "all_finite": (all_finite, (GRADS,)),
    "update-new_scale": (lambda s, n: update(s, CONFIG, new_scale=n), (init(), torch.ones(1))),
    "merge": (merge, (init(), init(), init())),
    "clip_grad_norm": (lambda grads: clip_grad_norm(grads, 1.0), (GRADS,)),
    "skip_step": (lambda s, new, old: skip_step(s, new=new, old=old), (init(), GRADS, GRADS)),
    "scaled_grad_and_value": (scaled_grad_and_value(loss_fn), (init(), PARAMS, X)),
    "step": (STEP, (STEP.init(PARAMS), X)),
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
