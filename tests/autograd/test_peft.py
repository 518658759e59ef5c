"""Adapters of peft on a frozen base: only they are in the state, and the run is that of torch's loop, bit for bit."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import funcamp
from tests.support.helpers import assert_same, clone
from tests.support.trainers import imported, make_model

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.models,
    # peft's own use of names that transformers deprecates.
    pytest.mark.filterwarnings("ignore:`[a-z_]*gradient_checkpointing[a-z_]*` is deprecated:FutureWarning"),
]

TRACED = functools.partial(funcamp.jit, backend="eager")
NUMBERS: dict[str, Any] = {"init_scale": 2.0**24, "growth_interval": 4}
STEPS = 16


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


def by_torch(model: Any) -> list[Any]:
    """What torch's loop leaves after every step."""
    params = {name: value for name, value in model.named_parameters() if value.requires_grad}
    adamw, scaler = torch.optim.AdamW(params.values(), lr=1e-2), torch.amp.GradScaler("cpu", **NUMBERS)
    seen = []
    for number in range(STEPS):
        torch.manual_seed(number)
        with torch.autocast("cpu", torch.float16):
            loss = model(**batch(number)).loss
        scaler.scale(loss).backward()
        scaler.step(adamw)
        scaler.update()
        adamw.zero_grad()
        seen.append((scaler.get_scale(), clone(params)))
    return seen


@pytest.mark.compiled
@pytest.mark.parametrize("wrap", [lambda step: step, TRACED], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_adapters_are_trained_as_by_torchs_loop_on_a_base_that_is_never_copied(dtype: torch.dtype, wrap: Any) -> None:
    model = make_adapted(dtype)
    base = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    before = {name: (value.data_ptr(), value.detach().clone()) for name, value in base.items()}
    assert {value.dtype for value in base.values()} == {dtype}
    loss_fn, adamw = funcamp.module_loss(model), funcamp.stateless(torch.optim.AdamW, lr=1e-2)
    step = funcamp.make_train_step(loss_fn, adamw, funcamp.ScalerConfig(**NUMBERS), policy="float16")
    run, state = wrap(step), step.init()
    assert len(state.params.tree()) == 4
    assert all("lora_" in name for name in state.params.tree())
    seen = []
    for number in range(STEPS):
        torch.manual_seed(number)
        state, _ = run(state, batch(number))
        seen.append((state.scaler.scale.item(), clone(state.params.tree())))
    for name, value in base.items():
        assert value.data_ptr() == before[name][0]
        assert torch.equal(value, before[name][1])
    expected = by_torch(make_adapted(dtype))
    scales = [scale for scale, _ in expected]
    assert any(b < a for a, b in itertools.pairwise(scales))
    assert any(b > a for a, b in itertools.pairwise(scales))
    assert [scale for scale, _ in seen] == scales
    assert_same(seen, expected)  # an adapter casts its input to its weight's dtype, here float32


def test_trained_adapters_are_saved_by_peft_and_loaded_on_another_base(tmp_path: Path) -> None:
    peft, model = imported("peft"), make_adapted(torch.float32)
    loss_fn, adamw = funcamp.module_loss(model), funcamp.stateless(torch.optim.AdamW, lr=1e-2)
    step = funcamp.make_train_step(loss_fn, adamw, policy="float16")
    state = step.init(consume=True)
    for number in range(3):
        state, _ = step(state, batch(number))
    model.load_state_dict(loss_fn.state_dict(state.params))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 10_000
    loaded = peft.PeftModel.from_pretrained(make_model(), tmp_path)
    with torch.no_grad():
        expected = model.eval()(**batch(9)).logits
        assert_same(loaded.eval()(**batch(9)).logits, expected)
        merged = loaded.merge_and_unload()(**batch(9)).logits
    torch.testing.assert_close(merged, expected)
