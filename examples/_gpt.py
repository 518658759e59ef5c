"""The data and the model of train_gpt.py: bytes of the standard library, a small GPT in torch.nn."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # bytes


def load_bytes(limit: int = 3_000_000) -> tuple[Tensor, Tensor]:
    """Return the sources of the running Python, uint8: training files and separate validation files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    total = 0
    for number, path in enumerate(sorted(root.rglob("*.py"))):
        if total >= limit:
            break
        if skip & set(path.relative_to(root).parts):
            continue
        try:
            text = path.read_bytes()
        except OSError:
            continue
        parts[number % 20 == 0].append(text)
        total += len(text)
    if not parts[False] or not parts[True]:
        raise SystemExit(
            f"train_gpt: the standard library's sources must be readable; found {total} bytes under {root}"
        )
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(parts[key])), dtype=torch.uint8) for key in (False, True))
    return train, held_out


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """float of shape (batch, time, width) to the same."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class GPT(nn.Module):
    """Next-byte prediction: embeddings, blocks, a linear head."""

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.bytes, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 0.02 / (2 * layers) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 of shape (batch, time) to logits of shape (batch, time, 256)."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def batch_at(text: Tensor, step: int, seed: int, batch: int, context: int, device: str) -> tuple[Tensor, Tensor]:
    """Return inputs and next bytes of random windows, a function of seed and step, so that runs resume."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(text.numel() - context - 1, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long().to(device, non_blocking=True)
    return windows[:, :-1], windows[:, 1:]
