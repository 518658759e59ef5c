"""A pass under no_grad and one with a gradient of the same module in one autocast region, in either order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.steps import eager_and_traced
from tests.support.torch_loop import assert_as_torchs_loop


class Both(nn.Module):
    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, plain: Tensor, noisy: Tensor) -> Any:
        """The output with a gradient and the one without, which may come first."""
        outputs = {}
        for requires in (False, True) if self.is_first else (True, False):
            with torch.set_grad_enabled(requires):
                outputs[requires] = self.net(noisy if requires else plain)
        return outputs[True], outputs[False]


def criterion(outputs: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
    output, target = outputs
    return (weight * (output.float() - target.float()).square()).mean()


@pytest.mark.compiled
@pytest.mark.parametrize("engine", ["func", "autograd"])
@eager_and_traced
@pytest.mark.parametrize("is_first", [True, False])
def test_a_step_is_torchs_loop(is_first: bool, engine: Any, wrap: Any) -> None:
    """Older torch put the cast of a weight under no_grad into the cache, and its gradient was lost."""
    plain, noise = torch.randn(2, 16, 8)
    batches = [(plain, plain + noise, torch.rand(16, 4))] * 2
    config = {"init_scale": 2.0**10}
    assert_as_torchs_loop(
        lambda: (Both(is_first), criterion), batches, wrap, policy="float16", engine=engine, config=config
    )
