"""Hugging Face's Trainer with funcamp, in two ways.

    python examples/clients/hf_trainer.py           replace the scaler
    python examples/clients/hf_trainer.py --step    replace the step

Replace the scaler of any Trainer, TRL's too: `trainer.accelerator.scaler = funcamp.GradScaler()` before `train()`.

Or use `StepTrainer`: the forward and backward pass, clipping, the optimizer and the scale are one compiled step.
Arguments, data, logging, evaluation, callbacks and checkpoints are Trainer's. It is for one process and for models that
return their loss. Pad batches to a few lengths: each shape is one program.

Watch the grad_norm in the log: the first scale is too high on purpose, so it is infinite until the scale fits.
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import funcamp


class StepTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose training step is a funcamp step, with this configuration of the scaler, compiled by `wrap`."""

    optimizer: Any
    metrics: funcamp.Metrics

    def __init__(
        self, *args: Any, config: funcamp.ScalerConfig = funcamp.ScalerConfig(), wrap: Any = funcamp.jit, **options: Any
    ) -> None:
        self.config, self.wrap = config, wrap
        self.window: list[dict[str, Any]] = []  # micro-batches
        super().__init__(*args, **options)
        other_losses = {
            "label_smoothing_factor": self.args.label_smoothing_factor != 0.0,
            "compute_loss_func": self.compute_loss_func is not None,
            "compute_loss": type(self).compute_loss is not Trainer.compute_loss,
        }
        for name, is_given in other_losses.items():
            if is_given:
                raise ValueError(
                    f"StepTrainer: {name} must be Trainer's default, because the step takes the loss that the model "
                    "returns: compute the loss in the model's forward pass, or use Trainer with funcamp.GradScaler"
                )

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        # Accelerate must neither autocast nor scale: the step does.
        args: dict[str, Any] = super()._build_accelerator_args(**options)
        return args | {"mixed_precision": "no"}

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Evaluate in the precision of the step."""
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.args.mixed_precision)
        return torch.autocast(self.args.device.type, dtype, dtype is not None, cache_enabled)

    def create_optimizer(self, *_: Any) -> Any:
        """Make the step from the Trainer's arguments, and the optimizer that Trainer sees."""
        if self.optimizer is None:
            cls, numbers = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.lr = torch.tensor(numbers.pop("lr"), device=self.args.device)
            numbers.pop("fused", None)
            decayed = set(self.get_decay_parameter_names(self.model))
            optimizer = funcamp.by_group(
                {
                    "decay": funcamp.stateless(cls, lr=self.lr, **numbers, weight_decay=self.args.weight_decay),
                    "no decay": funcamp.stateless(cls, lr=self.lr, **numbers, weight_decay=0.0),
                },
                group=lambda name, _: "decay" if name in decayed else "no decay",
            )
            self.step = funcamp.make_train_step(
                funcamp.module_loss(self.model),
                optimizer,
                self.config,
                policy={"fp16": "float16", "bf16": "bfloat16"}.get(self.args.mixed_precision),
                max_norm=self.args.max_grad_norm or None,
                accumulate=self.args.gradient_accumulation_steps,
            )
            self.train_state = self.step.init(consume=True)  # self.model has the trained values after every step
            self.run = self.wrap(self.step)
            self.optimizer = StepOptimizer(self)
        return self.optimizer

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Keep a micro-batch, or take the step with the last one; return the loss."""
        inputs = dict(self._prepare_inputs(inputs))
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            # The model divides its sum over tokens by this; the step takes the mean over micro-batches.
            parts = self.current_gradient_accumulation_steps
            inputs["num_items_in_batch"] = torch.as_tensor(num_items_in_batch / parts)
        self.window.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batch = inputs
        if self.args.gradient_accumulation_steps > 1:
            batch = {name: torch.stack([one[name] for one in self.window]) for name in inputs}
        self.window = []
        model.train()
        self.lr.fill_(self._get_learning_rate())
        self.train_state, self.metrics = self.run(self.train_state, batch)
        self.optimizer._is_overflow = self.metrics.found_inf != 0  # the schedule does not advance at skipped steps
        return self.metrics.loss

    def _get_grad_norm(self, *_: Any, **__: Any) -> Tensor:
        return self.metrics.grad_norm


class StepOptimizer(torch.optim.Optimizer):
    """What Trainer sees of the step's optimizer: groups for the schedule, and the state for a checkpoint."""

    def __init__(self, trainer: StepTrainer) -> None:
        super().__init__(trainer.model.parameters(), {"lr": trainer.args.learning_rate})
        self.trainer = trainer

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: `training_step` has taken the step."""

    def state_dict(self) -> dict[str, Any]:
        """Return moments, counts and the scale; parameters and buffers are in the model's own file."""
        saved = self.trainer.step.state_dict(self.trainer.train_state)
        return {name: value for name, value in saved.items() if not name.startswith(("params.", "buffers."))}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from this, with the parameters and buffers that the model has."""
        step, own = self.trainer.step, self.trainer.train_state
        self.trainer.train_state = step.load_state_dict(step.state_dict(own) | saved, like=own, consume=True)


def make_parts(length: int = 32) -> tuple[GPT2LMHeadModel, list[dict[str, Tensor]]]:
    """Return a small GPT-2 with random weights, and the source of `inspect` as sequences of bytes."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=256, n_positions=length, n_embd=32, n_layer=2, n_head=2, **ends)
    text = torch.tensor(list(inspect.getsource(inspect).encode()))
    rows = text[: len(text) // length * length].view(-1, length)
    return GPT2LMHeadModel(config), [{"input_ids": row, "labels": row} for row in rows]


def main(steps: int = 60, step: bool = False, folder: str = "demo-out/hf_trainer", wrap: Any = funcamp.jit) -> float:
    """Train, print Trainer's log, and return the last loss."""
    model, rows = make_parts()
    args = TrainingArguments(
        folder, max_steps=steps, fp16=True, learning_rate=3e-3, logging_steps=steps // 6, save_strategy="no",
        gradient_accumulation_steps=2, report_to=[], disable_tqdm=True, dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    if step:
        config = funcamp.ScalerConfig(init_scale=2.0**24)
        trainer: Trainer = StepTrainer(model, args, train_dataset=rows, config=config, wrap=wrap)
    else:
        trainer = Trainer(model, args, train_dataset=rows)
        device = trainer.accelerator.device.type
        trainer.accelerator.scaler = funcamp.GradScaler(device, init_scale=2.0**24)
        if device == "cpu":
            trainer.accelerator.native_amp = True  # on a CPU Accelerate accepts fp16 and silently trains in float32
    trainer.train()
    losses: list[float] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < 0.8 * losses[0], losses
    return losses[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--step", action="store_true")
    main(**vars(parser.parse_args()))
