"""Tiny models, data and runs for the trainers of transformers and TRL. They import these packages when called."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from funcamp import to_state_dict
from tests.support.accelerated import forget
from tests.support.helpers import clone
from tests.support.programs import add_folder

os.environ["HF_HUB_OFFLINE"] = "1"  # TRL reports its use otherwise

LETTERS = "abcdefghij"
NUMBERS: dict[str, Any] = {"init_scale": 2.0**24, "growth_interval": 4}
STEPS = 20


def imported(name: str) -> Any:
    """A module that needs transformers, beside any torchvision."""
    for folder in ("examples/clients", "benchmarks"):
        add_folder(folder)
    with importlib.import_module("_public").without_operators():
        importlib.import_module("torchvision")  # which transformers imports later
        return importlib.import_module(name)


def make_model() -> Any:
    """A Llama of one layer, float32."""
    transformers = imported("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=3 + len(LETTERS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.1,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


def make_tokenizer() -> object:
    """One token for each letter."""
    transformers, tokenizers = imported("transformers"), imported("tokenizers")
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def rows(length: Callable[[int], int]) -> list[list[int]]:
    """Sequences of letters in the order of the alphabet."""
    return [[3 + (start + place) % len(LETTERS) for place in range(length(start))] for start in range(96)]


def options(folder: Path, **more: object) -> dict[str, object]:
    """The arguments of every trainer."""
    known: dict[str, object] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "fp16": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "optim": "adamw_torch",
    }
    return known | more


def make_trainer(folder: Path, cls: Any = None, model: object = None, **more: object) -> Any:
    """Transformers' Trainer."""
    transformers = imported("transformers")
    forget()
    data = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in rows(lambda start: 8)]
    chosen = {name: more.pop(name) for name in ("config", "wrap", "compute_loss_func") if name in more}
    args = transformers.TrainingArguments(**options(folder, **more))
    cls = cls or transformers.Trainer
    return cls(model or make_model(), args, train_dataset=data, eval_dataset=data[:8], **chosen)


def make_sft(folder: Path, **more: object) -> object:
    """TRL's trainer on sequences of different lengths."""
    trl, datasets = imported("trl"), imported("datasets")
    forget()
    data = datasets.Dataset.from_list([{"input_ids": row} for row in rows(lambda start: 5 + start % 4)])
    args = trl.SFTConfig(**options(folder, **more), max_length=16, dataset_num_proc=None)
    return trl.SFTTrainer(make_model(), args=args, train_dataset=data, processing_class=make_tokenizer())


def count_vowels(completions: list[str], **_: object) -> list[float]:
    """The reward."""
    return [float(sum(letter in "aei" for letter in text)) for text in completions]


def make_grpo(folder: Path, **more: object) -> object:
    """TRL's trainer of a policy, with a reference model, and two steps on every sample."""
    trl, datasets = imported("trl"), imported("datasets")
    forget()
    make_model().save_pretrained(folder / "policy")  # which the reference model is read from
    policy = imported("transformers").LlamaForCausalLM.from_pretrained(folder / "policy")
    data = datasets.Dataset.from_list([{"prompt": f"{one} {two}"} for one in LETTERS for two in LETTERS])
    sampling = {"num_generations": 4, "max_completion_length": 6, "beta": 0.04, "num_iterations": 2}
    args = trl.GRPOConfig(**options(folder, **more), **sampling)
    return trl.GRPOTrainer(
        policy, reward_funcs=count_vowels, args=args, train_dataset=data, processing_class=make_tokenizer()
    )


TRAINERS: dict[str, Callable[..., Any]] = {
    "trainer": make_trainer,
    "trainer, fused": functools.partial(make_trainer, optim="adamw_torch_fused"),
    "trainer, accumulate": functools.partial(make_trainer, gradient_accumulation_steps=2),
}
if sys.version_info >= (3, 11):  # as TRL needs
    TRAINERS |= {"sft": make_sft, "grpo": make_grpo}


def record(trainer: Any, scaler: Callable[[], object] | None = None) -> list[dict[str, Any]]:
    """What every step leaves, as `train` appends it; with this scaler in Accelerate's slot, or a step's own."""
    if scaler is not None:
        trainer.accelerator.native_amp = True  # on a CPU Accelerate accepts fp16 and trains in float32
        trainer.accelerator.scaler = scaler()
    seen: list[dict[str, object]] = []

    def on_step_end(*_: object, **__: object) -> None:
        held = trainer.accelerator.scaler
        saved = to_state_dict(trainer.train_state.scaler, trainer.config) if held is None else held.state_dict()
        row = {
            "params": clone(dict(trainer.model.named_parameters())),
            "lr": trainer.lr_scheduler.get_last_lr()[0],
            "skipped": bool(trainer.accelerator.optimizer_step_was_skipped),
            "scaler": saved,
        }
        seen.append(row)

    callback = type("Recorder", (imported("transformers").TrainerCallback,), {})()
    callback.on_step_end = on_step_end
    trainer.add_callback(callback)
    return seen
