"""Small models that train in seconds, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.helpers import to


class Task(NamedTuple):
    """A model with its criterion and its batches."""

    model: nn.Module
    criterion: Callable[[Any, Any], Tensor]
    batch: Callable[[int], tuple[Tensor, Tensor]]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float().flatten(0, -2), target.flatten())


def mlp(dropout: float = 0.0) -> Task:
    torch.manual_seed(0)
    hidden = [nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Tanh()]
    return Task(nn.Sequential(*hidden, nn.Linear(16, 4)), cross_entropy, _images((16, 8)))


def cnn() -> Task:
    # No bias before a BatchNorm: its gradient is noise around 0, which AdamW would make steps of.
    torch.manual_seed(0)
    first = [nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.GELU()]
    second = [nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten()]
    model = nn.Sequential(*first, *second, nn.Linear(36, 4))
    return Task(model, cross_entropy, _images((4, 2, 7, 7)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # A key's bias has no gradient but noise, which AdamW would make steps of.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class Tied(nn.Module):
    """A transformer whose head is its embedding and whose one block is applied twice."""

    def __init__(self, words: int = 12, width: int = 16) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(words, width), Block(width)
        self.positions = nn.Parameter(torch.randn(1, 6, width) * 0.1)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Any:
        x = self.words(tokens) + self.positions
        return self.head(self.norm(self.block(self.block(x))))


def tied() -> Task:
    torch.manual_seed(0)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(12, (4, 7), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return Task(Tied(), cross_entropy, batch)


def on_gpu(task: Task) -> Task:
    """The task on a GPU."""
    return Task(task.model.cuda(), task.criterion, lambda number: to(task.batch(number), "cuda"))


def _images(shape: tuple[int, ...]) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(shape, generator=generator), torch.randint(4, shape[:1], generator=generator)

    return batch


class TwoRoundings(nn.Linear):
    """A linear layer as vmap computes it: product and sum are float16 numbers, each rounded."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) + self.bias.to(torch.float16)


def with_two_roundings(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """The models that make makes, their linear layers computed like that."""

    def make_model(*args: object) -> nn.Module:
        model = make(*args)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.__class__ = TwoRoundings
        return model

    return make_model
