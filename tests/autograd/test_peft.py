"""Adapters of peft on a frozen base: only they are in the state, and the run is that of torch's loop, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.float16_run import assert_moves
from tests.support.steps import eager, traced
from tests.support.torch_loop import assert_as_torchs_loop
from tests.support.trainers import imported, make_model

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.models,
    # peft's own use of names that transformers deprecates.
    pytest.mark.filterwarnings("ignore:`[a-z_]*gradient_checkpointing[a-z_]*` is deprecated:FutureWarning"),
]


def make_adapted(dtype: torch.dtype) -> Any:
    """A Llama whose base has this dtype, with adapters in float32."""
    peft = imported("peft")
    base = make_model().to(dtype)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(base, config).train()


def batch(number: int) -> dict[str, Tensor]:
    tokens = torch.randint(3, 13, (4, 8), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "labels": tokens}


@pytest.mark.compiled
@pytest.mark.parametrize(("dtype", "wrap"), [(torch.float32, eager), (torch.float16, traced)])
def test_adapters_are_trained_as_by_torchs_loop(dtype: torch.dtype, wrap: Any) -> None:
    """No value of a base is changed; an adapter casts its input to its weight's dtype, here float32."""
    scales = assert_as_torchs_loop(
        lambda: (make_adapted(dtype), None),
        map(batch, range(16)),
        wrap,
        policy="float16",
        optimizer=(torch.optim.AdamW, {"lr": 1e-2}),
        config={"init_scale": 2.0**24, "growth_interval": 4},
    )
    assert_moves(scales)
