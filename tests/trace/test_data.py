"""`tensor.data = value` during a trace: what changes nothing is accepted, and other threads assign as ever.

What is refused is in tests/jit/test_refusals.py.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from funcamp import jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same

OTHER = torch.zeros(2)


def assign() -> None:
    OTHER.data = torch.ones(3)


class Moved(nn.Module):
    """`Module.to` assigns the tensors that are there already."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.slow = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        self.slow.to(x.device)
        thread = threading.Thread(target=assign)
        thread.start()
        thread.join()
        return self.first(x) + self.slow(x)


def test_the_same_memory_may_be_assigned_and_other_threads_assign() -> None:
    step = make_train_step(module_loss(Moved(), nn.functional.mse_loss), stateless(torch.optim.SGD))
    batch = torch.randn(6, 4), torch.randn(6, 4)
    assert_same(jit(step, backend="eager", donate=False)(step.init(), batch), step(step.init(), batch))
    assert OTHER.tolist() == [1.0, 1.0, 1.0]
