"""GPT-2 of transformers, with its tied head and its layers of transposed weights: torch's loop, bit for bit."""

from __future__ import annotations

import pytest
import torch

import funcamp
from tests.support.helpers import assert_same, one_thread
from tests.support.trainers import imported

pytestmark = pytest.mark.models

SCALER = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=4)
STEPS = 16


def test_the_run_of_torchs_loop() -> None:
    transformers = imported("transformers")
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    loss_fn = funcamp.module_loss(model)
    sgd = funcamp.stateless(torch.optim.SGD, lr=0.1, momentum=0.9)
    step = funcamp.make_train_step(loss_fn, sgd, SCALER, policy="float16")
    state = step.init()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=4)
    skipped = 0
    with one_thread():
        for number in range(STEPS):
            tokens = torch.randint(32, (2, 8))
            torch.manual_seed(number)  # dropout
            with torch.autocast("cpu", torch.float16):
                loss = model(input_ids=tokens, labels=tokens).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            torch.manual_seed(number)
            state, metrics = step(state, {"input_ids": tokens, "labels": tokens})
            assert_same(metrics.loss, loss.detach())
            assert state.scaler.scale.item() == scaler.get_scale()
            skipped = int(state.skipped)
    assert 0 < skipped < STEPS
    params = state.params.tree()
    assert_same({name: params[name] for name in params}, dict(model.named_parameters()))
