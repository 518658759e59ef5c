"""States whose next leaves are old ones, views of them, or one another: what donation must get right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]


def state() -> State:
    return {
        "a": torch.randn(4, 4),
        "b": torch.randn(4, 4),
        "c": torch.randn(4, 4),
        "count": torch.tensor(3),
        "flag": torch.tensor([True, False]),
        "half": torch.randn(4, 4).half(),
        "bits": torch.arange(16, dtype=torch.int32).view(4, 4),
        "image": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }


PATTERNS: dict[str, Callable[[State], dict[str, Tensor]]] = {
    "swap": lambda s: {"a": s["b"], "b": s["a"]},
    "swap of clones": lambda s: {"a": s["b"].clone(), "b": s["a"].clone()},
    "rotation": lambda s: {"a": s["b"], "b": s["c"], "c": s["a"]},
    "cur := f, prev := cur, older := prev": lambda s: {"c": s["b"], "b": s["a"], "a": s["a"].abs()},
    "prev := cur, written first": lambda s: {"b": s["a"] * 2, "a": s["b"]},
    "one tensor for two leaves": lambda s: dict.fromkeys("ab", s["a"] + s["c"]),
    "one old tensor for two leaves": lambda s: {"a": s["c"], "b": s["c"], "c": s["a"]},
    "view of another leaf": lambda s: {
        "a": s["b"].t(),
        "b": s["a"][0].expand(4, 4),
        "c": s["a"].reshape(16).view(4, 4),
    },
    "view of itself": lambda s: {"a": s["a"].t(), "b": s["b"].flip(0), "c": s["c"].roll(1, 0)},
    "detach": lambda s: {"a": s["b"].detach(), "b": s["a"].detach().clone().detach()},
    "integers and flags": lambda s: {"count": s["count"] + 1, "flag": s["flag"].flip(0), "a": s["b"] * s["count"]},
    "an old integer": lambda s: {"count": s["count"].clone(), "flag": s["flag"].view(2)},
    "channels_last": lambda s: {"image": s["image"].flip(3) + 1},
    # Rounded: a compiled product may add in another order.
    "read by a product, then written": lambda s: {
        "a": (s["a"] @ s["b"]).round(),
        "b": s["a"],
        "c": (s["b"] @ s["a"]).round(),
    },
    "pieces": lambda s: {"a": torch.cat(s["b"].split(2)[::-1]), "b": torch.stack(s["a"].unbind(1))},
    "there and back": lambda s: {"half": s["half"] * 2, "b": s["a"].double().float(), "a": s["half"].float()},
    "kept after a round trip": lambda s: {
        "a": s["a"] + 1,
        "b": s["a"].double().float(),
        "half": s["half"].float().half(),
    },
    "bits of another leaf": lambda s: {"a": s["a"] + 1, "bits": s["a"].view(torch.int32)},
    "scan along itself": lambda s: {"a": s["a"].cummax(0).values, "b": s["a"].amax(1, keepdim=True).expand(4, 4)},
}


def step_of(pattern: Callable[[State], dict[str, Tensor]]) -> Callable[[State, Any], Any]:
    def step(state: State, batch: Tensor) -> object:
        new = {**state, **pattern(state)}
        old = {"old": state["a"], "row": state["b"][1], "copied": state["c"].clone()[1]}
        return new, {**old, "new": new["a"], "part": new["b"][0], "sum": new["b"][0, 0] + batch.sum()}

    return step
