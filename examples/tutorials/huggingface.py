"""Fine-tune a Hugging Face model: is this text Python code, or is it prose?

    python examples/tutorials/huggingface.py                half a minute; writes huggingface.pt
    python examples/tutorials/huggingface.py --steps 75     stop after 75 of the 150 steps
    python examples/tutorials/huggingface.py --resume       continue from the file

The texts are in Python's own library, so nothing is downloaded. The model is a small BERT with random weights; for your
own work use `AutoModelForSequenceClassification.from_pretrained(...)` in `make_model`, and your tokenizer in `batch`.
"""

from __future__ import annotations

import argparse
import inspect
import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import funcamp

STEPS, BATCH, LENGTH, LR, WARM_UP = 150, 16, 64, 4e-3, 15
PAD = 256  # a token is a byte


def load_texts() -> tuple[list[bytes], list[bytes]]:
    """Return two long texts for training, and two for evaluation: the code of `inspect`, and Python's manual."""
    code = inspect.getsource(inspect).encode()
    prose = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())).encode()[: len(code)]
    cut = len(code) * 4 // 5
    return [code[:cut], prose[:cut]], [code[cut:], prose[cut:]]


def batch(texts: list[bytes], number: int) -> dict[str, Tensor]:
    """Return what a tokenizer and a collator would: snippets of different lengths, padded, and their labels."""
    rng = torch.Generator().manual_seed(number)
    ids, mask = torch.full((BATCH, LENGTH), PAD), torch.zeros(BATCH, LENGTH, dtype=torch.long)
    labels = torch.arange(BATCH) % 2
    for row, label in enumerate(labels.tolist()):
        size = int(torch.randint(LENGTH // 2, LENGTH + 1, (), generator=rng))
        start = int(torch.randint(len(texts[label]) - size, (), generator=rng))
        ids[row, :size] = torch.tensor(list(texts[label][start : start + size]))
        mask[row, :size] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    tokens = {"vocab_size": PAD + 1, "pad_token_id": PAD, "max_position_embeddings": LENGTH}
    config = BertConfig(**size, **tokens, num_labels=2, initializer_range=0.1)
    model: nn.Module = BertForSequenceClassification(config)
    return model.train()


def learning_rate(applied: Tensor) -> Tensor:
    """Return the rate after so many applied steps: a warm-up, then down to zero. A skipped step is not counted."""
    return LR * torch.minimum((applied + 1) / WARM_UP, (STEPS - applied) / (STEPS - WARM_UP)).clamp(0, 1)


def evaluate(step: funcamp.TrainStep, state: funcamp.TrainState, texts: list[bytes]) -> tuple[float, float]:
    """Return loss and accuracy on snippets that were not trained on: plain PyTorch, in float32."""
    batches = [batch(texts, 10_000 + number) for number in range(8)]
    with step.evaluating(state) as model:  # in eval mode, without gradients
        outputs = [model(**one) for one in batches]
    right = [output.logits.argmax(1) == one["labels"] for output, one in zip(outputs, batches)]
    return torch.stack([output.loss for output in outputs]).mean().item(), torch.cat(right).float().mean().item()


def main(
    steps: int = STEPS, file: Path = Path("huggingface.pt"), resume: bool = False, wrap: Any = funcamp.jit
) -> dict[str, float]:
    """Train up to this step, write a checkpoint, and return what was measured. The tests give another `wrap`."""
    train_texts, test_texts = load_texts()
    model = make_model()
    loss_fn = funcamp.module_loss(model)  # no criterion: the model returns its loss
    adamw = funcamp.stateless(torch.optim.AdamW, lr=learning_rate, weight_decay=0.01)
    config = funcamp.ScalerConfig(init_scale=2.0**20)  # too high on purpose: the first steps are skipped
    step = funcamp.make_train_step(loss_fn, adamw, config, policy="float16", max_norm=1.0)
    run = wrap(step)

    state, first = step.init(), 0
    if resume:
        saved = funcamp.load(file)
        state = step.load_state_dict(saved["state"], like=state)
        torch.set_rng_state(saved["rng"])  # for dropout
        first = saved["next"]
    before, _ = evaluate(step, state, test_texts)
    reader = funcamp.MetricReader()
    for number in range(first, steps):
        state, metrics = run(state, batch(train_texts, number))
        reader.put((number, metrics))
        for n, row in reader.ready():  # on a GPU these arrive a few steps late, and the loop does not wait for them
            if n % 10 == 0:
                print(f"step {n:3d}  loss {row.loss:.3f}  lr {row.lr:.2e}  scale {row.scale:g}  skipped {row.skipped}")
    funcamp.save({"state": step.state_dict(state), "rng": torch.get_rng_state(), "next": steps}, file)

    after, accuracy = evaluate(step, state, test_texts)
    model.load_state_dict(loss_fn.state_dict(state.params))  # an ordinary Hugging Face model, with the trained weights
    skipped, scale = int(state.skipped), state.scaler.scale.item()
    return {"loss_before": before, "loss_after": after, "accuracy": accuracy, "skipped": skipped, "scale": scale}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--resume", action="store_true")
    print(main(**vars(parser.parse_args())))
