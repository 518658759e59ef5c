"""What the benchmarks train: a residual MLP, a CNN with BatchNorm and a GPT, from launch-bound to bandwidth-bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 16
VOCABULARY = 256
IMAGE = 16  # pixels a side


class Size(NamedTuple):
    """A model of one kind: its number of blocks, its width, the batch, and for a GPT the tokens of a sequence."""

    kind: str
    blocks: int
    width: int
    batch: int
    context: int = 0
    vocabulary: int = VOCABULARY
    steps: int = 10
    """In one timing."""

    @property
    def items(self) -> int:
        """What one step trains on: tokens of a GPT, rows or images of the others."""
        return self.batch * self.context if self.kind.startswith("gpt") else self.batch


CPU_SIZES = {
    "MLP 0.14 M": Size("mlp", 4, 64, 32, steps=60),
    "MLP 3.2 M": Size("mlp", 6, 256, 64, steps=20),
    "MLP 38 M": Size("mlp", 8, 768, 64, steps=4),
    "CNN 0.02 M": Size("cnn", 4, 24, 8, steps=40),
    "CNN 0.4 M": Size("cnn", 6, 88, 8, steps=8),
    "CNN 2.7 M": Size("cnn", 8, 192, 8, steps=3),
    "GPT 0.14 M": Size("gpt", 2, 64, 2, 64, steps=30),
    "GPT 3.3 M": Size("gpt", 4, 256, 2, 64, steps=10),
    "GPT 26 M": Size("gpt", 8, 512, 1, 64, steps=3),
}
GPU_SIZES = {
    "MLP 0.14 M": Size("mlp", 4, 64, 32, steps=100),
    "MLP 3.2 M": Size("mlp", 6, 256, 256, steps=100),
    "MLP 134 M": Size("mlp", 16, 1024, 1024, steps=20),
    "CNN 0.02 M": Size("cnn", 4, 24, 32, steps=100),
    "CNN 2.7 M": Size("cnn", 8, 192, 128, steps=30),
    "CNN 19 M": Size("cnn", 8, 512, 256, steps=10),
    "GPT 3.3 M": Size("gpt", 4, 256, 4, 256, steps=50),
    "GPT 124 M, 1,024 tokens": Size("gpt", 12, 768, 1, 1024, 50304, steps=20),
    "GPT 124 M, 16,384 tokens": Size("gpt", 12, 768, 16, 1024, 50304, steps=10),
    "GPT 355 M, 8,192 tokens": Size("gpt", 24, 1024, 8, 1024, 50304, steps=5),
}

PROGRAM_SIZES = {name: GPU_SIZES[name] for name in ("MLP 0.14 M", "MLP 134 M", "GPT 124 M, 16,384 tokens")} | {
    "GPT 1.3 B, 8,192 tokens": Size("gpt", 24, 2048, 8, 1024, 50304, steps=5),
}
"""Those whose program on a GPU is counted without one, and then compared with what is measured there."""


class MLPBlock(nn.Module):
    """x + W2 gelu(W1 norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, width) to the same."""
        hidden: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + hidden


class CNNBlock(nn.Module):
    """relu(x + norm(conv(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, width, height, width of the image) to the same."""
        return F.relu(x + self.norm(self.conv(x)))


class CNN(nn.Module):
    """A stem that halves the image, blocks, the mean over the image, a linear head."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.blocks = nn.Sequential(*(CNNBlock(width) for _ in range(blocks)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, 3, 16, 16) to (batch, classes)."""
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


class GPTBlock(nn.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm and added to its input; heads of width 32 or 64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(width // 64, 2)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, time, width) to the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class GPT(nn.Module):
    """Embeddings, blocks, and the embedding as the head."""

    def __init__(self, blocks: int, width: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.Sequential(*(GPTBlock(width) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 of shape (batch, time) to logits."""
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))
        return logits


def build(size: Size, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A fresh model with fixed weights, and one batch."""
    torch.manual_seed(0)
    makers: dict[str, Callable[[], nn.Module]] = {
        "mlp": lambda: nn.Sequential(
            *(MLPBlock(size.width) for _ in range(size.blocks)), nn.Linear(size.width, CLASSES)
        ),
        "cnn": lambda: CNN(size.blocks, size.width),
        "gpt": lambda: GPT(size.blocks, size.width, size.context, size.vocabulary),
    }
    model = makers[size.kind]()
    if size.kind == "gpt":
        windows = torch.randint(size.vocabulary, (size.batch, size.context + 1))
        x, y = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    else:
        shape = (size.width,) if size.kind == "mlp" else (3, IMAGE, IMAGE)
        x, y = torch.randn(size.batch, *shape), torch.randint(CLASSES, (size.batch,))
    return model.to(device), x.to(device), y.to(device)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """In float32."""
    return F.cross_entropy(logits.float().flatten(0, -2), target.flatten())
