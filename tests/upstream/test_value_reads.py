"""torch's own layers and losses that read a value: compiled they give the numbers of the eager step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from funcamp import jit, make_train_step, module_loss, stateless
from tests.support.helpers import clone

SGD = stateless(torch.optim.SGD, lr=0.1, momentum=0.9)


class Masked(nn.Module):
    """torch's layers with a causal mask, and without is_causal, as in torch's tutorial."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layer: Any = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        if kind == "encoder":
            self.layers: nn.Module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        elif kind == "decoder":
            layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.layers = nn.TransformerDecoder(layer, 2)
        else:
            self.layers = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        if self.kind == "encoder":
            return self.layers(x, mask=mask)
        return self.layers(x, x, tgt_mask=mask)


class Gaussian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Any:
        mean, spread = self.linear(x).chunk(2, -1)
        return mean, F.softplus(spread) + 1e-3


def gaussian_loss(output: Any, target: Tensor) -> Tensor:
    return F.gaussian_nll_loss(output[0], target, output[1])


def batch() -> Any:
    return torch.randn(4, 6, 8), torch.randn(4, 6, 8)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[], Any]]] = {
    "encoder": (lambda: Masked("encoder"), F.mse_loss, batch),
    "decoder": (lambda: Masked("decoder"), F.mse_loss, batch),
    "transformer": (lambda: Masked("transformer"), F.mse_loss, batch),
    "gaussian_nll_loss": (Gaussian, gaussian_loss, batch),
}


@pytest.mark.compiled
@pytest.mark.parametrize("policy", [None, "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_step_has_the_numbers_of_the_eager_one(name: str, policy: Any) -> None:
    make_model, criterion, make_batch = CASES[name]
    torch.manual_seed(0)
    step = make_train_step(module_loss(make_model(), criterion), SGD, policy=policy)
    run = jit(step, backend="eager")
    state, eager_state = step.init(), step.init()
    for _ in range(3):
        rows = make_batch()
        eager_state, eager = step(eager_state, rows)
        state, metrics = run(state, rows)
        tolerance: Any = {"rtol": 1e-5, "atol": 1e-6} if policy is None else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(metrics.loss, eager.loss, **tolerance)
        torch.testing.assert_close(tree_leaves(state), tree_leaves(eager_state), **tolerance)
    evaluate = run.also(lambda state, rows: (state, step.loss(state, rows)))
    torch.testing.assert_close(evaluate(state, rows)[1], step.loss(clone(eager_state), rows), **tolerance)


READ: dict[str, tuple[nn.Module, Any]] = {
    "adaptive softmax": (
        nn.AdaptiveLogSoftmaxWithLoss(8, 30, [4, 12], div_value=2.0),
        (torch.ones(3, 8), torch.tensor([0, 5, 20])),
    ),
    "batch norm without momentum": (nn.BatchNorm1d(8, momentum=None), torch.randn(3, 8)),
}


@pytest.mark.compiled
@pytest.mark.parametrize("name", READ)
def test_a_layer_that_reads_a_value_is_refused(name: str) -> None:
    model, batch = READ[name]

    def loss(params: Any, rows: Any) -> Tensor:
        output: Any = torch.func.functional_call(model, params, rows)
        scalar: Tensor = output.loss if name == "adaptive softmax" else output.square().sum()
        return scalar

    step = make_train_step(loss, SGD)
    with pytest.raises(RuntimeError, match=r"jit: step must not (read a tensor's value|take a shape from values)"):
        jit(step, backend="eager")(step.init(dict(model.named_parameters())), batch)


@pytest.mark.compiled
def test_a_function_of_the_same_name_is_refused() -> None:
    def gaussian_nll_loss(x: Tensor) -> Tensor:
        return -x if bool((x < 0).any()) else x

    with pytest.raises(RuntimeError, match="must not read a tensor's value"):
        jit(lambda state, x: (state, gaussian_nll_loss(x)), backend="eager")(torch.zeros(()), torch.ones(3))


FIXES = {
    "one_hot": (lambda x: F.one_hot(x).sum(), "pass num_classes to one_hot"),
    "bincount": (
        lambda x: F.cross_entropy(torch.ones(6, 6), x, weight=1.0 / x.bincount().float()),
        r"count in n bins .*index_add",
    ),
}


@pytest.mark.compiled
@pytest.mark.parametrize("name", FIXES)
def test_the_refusal_of_a_size_that_follows_from_values_names_the_fix(name: str) -> None:
    fn, fix = FIXES[name]

    with pytest.raises(RuntimeError, match=fix):
        jit(lambda state, x: (state, fn(x)), backend="eager")(torch.zeros(()), torch.arange(6))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_encoder_with_padding_is_evaluated_in_bfloat16() -> None:
    torch.manual_seed(0)

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor, is_padding: Tensor) -> Any:
            return self.encoder(x, src_key_padding_mask=is_padding)

    def loss_of_tokens(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output[:, :4], target[:, :4])

    model = Padded()
    is_padding = (torch.arange(6) > 3).expand(4, 6).clone()
    x = torch.randn(4, 6, 16)
    losses = {}
    for policy in (None, "bfloat16"):
        step = make_train_step(module_loss(model, loss_of_tokens), SGD, policy=policy)
        state = step.init()
        losses[policy] = [step.loss(state, (x, is_padding, x)).item() for _ in range(3)]
        assert len(set(losses[policy])) == 1
    assert losses["bfloat16"][0] == pytest.approx(losses[None][0], rel=2e-2)
    assert torch.backends.mha.get_fastpath_enabled()
