"""A step of a small model."""

from __future__ import annotations

from typing import Any

import torch

from funcamp import jit, make_train_step, module_loss, stateless
from tests.support.models import Task

SGD = stateless(torch.optim.SGD, lr=0.1)


def build(task: Task, optimizer: object = SGD, *, keep_buffers: bool = False, **options: Any) -> Any:
    """A step of a task."""
    return make_train_step(module_loss(task.model, task.criterion, keep_buffers=keep_buffers), optimizer, **options)


def eager(step: object) -> Any:
    """A step that is called as it is."""
    return step


def traced(step: Any) -> Any:
    """A step that is traced and donates its state, whose operations run one by one: nothing is compiled."""
    return jit(step, backend="eager")
