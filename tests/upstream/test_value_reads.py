"""torch's own layers and losses that read a value: compiled they give the numbers of the eager step, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcamp import jit, make_train_step, module_loss, stateless
from tests.support.steps import assert_as_eager, traced

SGD = stateless(torch.optim.SGD, lr=0.1, momentum=0.9)


class Masked(nn.Module):
    """torch's layers with causal masks, and without is_causal, as in torch's tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layers(x, x, src_mask=mask, tgt_mask=mask)


def gaussian(output: Tensor, target: Tensor) -> Tensor:
    mean, spread = output.chunk(2, -1)
    return F.gaussian_nll_loss(mean, target, F.softplus(spread) + 1e-3)


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "transformer": (Masked, F.mse_loss),
    "gaussian_nll_loss": (lambda: nn.Linear(8, 16), gaussian),
}


@pytest.mark.compiled
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_step_has_the_numbers_of_the_eager_one(name: str) -> None:
    make, criterion = CASES[name]
    step = make_train_step(module_loss(make(), criterion), SGD)
    run, state = traced(step), step.init()
    batches = [(torch.randn(4, 6, 8), torch.randn(4, 6, 8)) for _ in range(3)]
    assert_as_eager(step, run, state, batches, 1e-5)
    evaluate = run.also(lambda state, rows: (state, step.loss(state, rows)))
    torch.testing.assert_close(evaluate(state, batches[0])[1], step.loss(state, batches[0]))


def gaussian_nll_loss(x: Tensor) -> Tensor:
    """A function of the same name."""
    return -x if bool((x < 0).any()) else x


VALUE = "must not (read a tensor's value|take a shape from values)"
ADAPTIVE, NORM = nn.AdaptiveLogSoftmaxWithLoss(8, 30, [4, 12], div_value=2.0), nn.BatchNorm1d(8, momentum=None)
LABELS = torch.tensor([0, 5, 20, 1, 2, 3])
REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "adaptive softmax": (
        # contract: "`nn.AdaptiveLogSoftmaxWithLoss` and `BatchNorm(momentum=None)`"
        lambda x: ADAPTIVE(x, LABELS).loss,
        VALUE,
    ),
    "batch norm without momentum": (NORM, VALUE),
    "a function of the same name": (gaussian_nll_loss, VALUE),
    "one_hot": (lambda x: F.one_hot(LABELS), "pass num_classes to one_hot"),
    "bincount": (lambda x: F.cross_entropy(x, LABELS, 1.0 / LABELS.bincount()), r"count in n bins .*index_add"),
}


@pytest.mark.compiled
@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_reads_a_value_is_refused(name: str) -> None:
    function, text = REFUSED[name]
    with pytest.raises(RuntimeError, match=f"(?s)jit: .*{text}"):
        jit(lambda state, x: (state, function(x)), backend="eager")(torch.zeros(()), torch.randn(6, 8))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_encoder_with_padding_is_evaluated_in_bfloat16() -> None:
    class Padded(nn.TransformerEncoder):
        def forward(self, x: Tensor, is_padding: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x, src_key_padding_mask=is_padding)[:, :4]

    model = Padded(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)
    x, is_padding, losses = torch.randn(4, 6, 16), (torch.arange(6) > 3).expand(4, 6).clone(), []
    for policy in (None, "bfloat16"):
        step = make_train_step(module_loss(model, F.mse_loss), SGD, policy=policy)
        losses.append(step.loss(step.init(), (x, is_padding, x[:, :4])).item())
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert torch.backends.mha.get_fastpath_enabled()
