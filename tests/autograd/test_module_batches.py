"""Batches of `module_loss`: with a criterion, and of models that return their loss, as Hugging Face's do."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import jit, make_train_step, module_loss
from tests.support.helpers import assert_same
from tests.support.steps import SGD, eager, eager_and_traced, traced
from tests.support.torch_loop import assert_as_torchs_loop

Encoding = collections.UserDict  # what transformers.BatchEncoding is


@dataclasses.dataclass
class Returned:
    loss: Tensor


class Words(nn.Module):
    """A language model of Hugging Face's form."""

    def __init__(self, form: str = "dict") -> None:
        super().__init__()
        self.form, self.words, self.head = form, nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None) -> Any:
        x = self.words(input_ids)
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        loss = F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())
        return {"dict": {"loss": loss}, "attribute": Returned(loss), "scalar": loss}[self.form]


def batch_of(kind: Callable[..., Any], index: int, *leading: int) -> Any:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(11, (*leading, 4, 5), generator=generator)
    return kind({"input_ids": ids, "attention_mask": torch.ones(*leading, 4, 5), "labels": ids})


@pytest.mark.parametrize(
    ("form", "kind", "wrap"),
    [
        ("dict", dict, eager),
        ("attribute", Encoding, eager),
        ("scalar", dict, eager),
        ("scalar", Encoding, traced),
    ],
)
def test_a_model_that_returns_its_loss_is_trained_as_by_torch(form: str, kind: Any, wrap: Any) -> None:
    batches = [batch_of(kind, index) for index in range(3)]
    assert_as_torchs_loop(lambda: (Words(form), None), batches, wrap, policy="bfloat16")


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [dict, Encoding])
def test_a_mapping_is_one_signature_and_has_micro_batches(kind: Any) -> None:
    step = make_train_step(module_loss(Words()), SGD, accumulate=2)
    run, state = jit(step, backend="eager"), step.init()
    for index in range(2):
        expected = step(state, batch_of(kind, index, 2))
        state, metrics = run(state, batch_of(kind, index, 2))
        assert_same((state, metrics), expected)
    assert run.programs == 1


class Item(NamedTuple):
    x: Tensor
    y: Tensor


class Norm(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


IDS, X, Y = batch_of(dict, 0)["input_ids"], torch.ones(2, 4), torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("make", "criterion", "batches"),
    [
        (Words, None, [{"input_ids": IDS, "labels": IDS}, (IDS, None, IDS), [IDS, None, IDS]]),
        (lambda: Norm(4, 4), None, [X, (X,), {"x": X}]),
        (lambda: nn.Linear(4, 4), F.mse_loss, [(X, Y), [X, Y], Item(X, Y)]),
    ],
)
def test_forms_of_one_batch(make: Callable[[], nn.Module], criterion: Any, batches: list[Any]) -> None:
    step = make_train_step(module_loss(make(), criterion), SGD)
    state = step.init()
    assert len({float(step.loss(state, batch)) for batch in batches}) == 1


@eager_and_traced
def test_a_criterion_reads_several_entries_of_a_mapping(wrap: Any) -> None:
    def weighted(output: Tensor, given: dict[str, Tensor]) -> Tensor:
        return (given["weight"] * (output - given["target"]).square()).mean()

    batch = {"x": torch.randn(3, 4), "target": torch.randn(3, 2), "weight": torch.rand(3, 2)}
    assert_as_torchs_loop(lambda: (nn.Linear(4, 2), weighted), [(batch["x"], batch)], wrap)
