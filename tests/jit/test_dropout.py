"""The mask of dropout is drawn before a compiled step reads it, whatever the layers around it are fused to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcamp import jit, make_train_step, module_loss, stateless
from tests.support.steps import assert_as_eager


@pytest.mark.thorough(keep=1)
@pytest.mark.inductor
@pytest.mark.parametrize(("norm", "policy"), [(nn.LayerNorm, "bfloat16"), (nn.BatchNorm1d, None)])
def test_a_compiled_step_with_dropout_is_that_of_eager_mode(norm: type[nn.Module], policy: str | None) -> None:
    model = nn.Sequential(nn.Linear(6, 16), norm(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 1))
    step = make_train_step(module_loss(model, F.mse_loss), stateless(torch.optim.SGD, lr=0.01), policy=policy)
    batches = [(torch.randn(8, 6), torch.randn(8, 1))] * 3
    assert_as_eager(step, jit(step, exact=True), step.init(), batches, 1e-5 if policy is None else 1e-2)


#: Tensors that are not contiguous.
LAYOUTS = {
    "turned": torch.ones(6, 16, 16).permute(2, 1, 0),
    "channels last": torch.ones(2, 8, 8, 12).permute(0, 3, 1, 2),
}


@pytest.mark.inductor
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mask_does_not_depend_on_what_memory_contained_before(layout: str) -> None:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return state + 1, F.dropout(x, 0.1)

    run, x = jit(step), LAYOUTS[layout]
    run(torch.zeros(()), x)
    for _ in range(3):  # the mask gets the memory of a tensor that is no longer there
        [torch.full((2**power,), torch.nan) for power in range(4, 16)]
    assert_as_eager(step, run, torch.zeros(()), [x] * 3)
