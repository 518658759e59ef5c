"""Adapters of peft on a frozen base: only they are in the state, and the run is that of torch's loop, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import funcamp
from tests.support.float16_run import assert_moves
from tests.support.helpers import assert_same
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


def test_trained_adapters_are_saved_by_peft_and_loaded_on_another_base(tmp_path: Path) -> None:
    peft, model = imported("peft"), make_adapted(torch.float32)
    loss_fn, adamw = funcamp.module_loss(model), funcamp.stateless(torch.optim.AdamW, lr=1e-2)
    step = funcamp.make_train_step(loss_fn, adamw, policy="float16")
    state, _ = step(step.init(consume=True), batch(0))
    assert len(state.params.tree()) == 4
    assert all("lora_" in name for name in state.params.tree())
    model.load_state_dict(loss_fn.state_dict(state.params))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 10_000
    loaded = peft.PeftModel.from_pretrained(make_model(), tmp_path)
    with torch.no_grad():
        assert_same(loaded.eval()(**batch(9)).logits, model.eval()(**batch(9)).logits)
