"""Small modules of 8 features from which random models are made: the ways in which people write layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Residual(nn.Module):
    """x + inner(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return x + self.inner(x)


class Twice(Residual):
    """One module used twice."""

    def forward(self, x: Tensor) -> Any:
        return self.inner(torch.tanh(self.inner(x)))


class Checkpointed(Residual):
    """Computed again in the backward pass."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


class Tied(nn.Module):
    """One weight in two layers, one of them transposed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.tanh(self.first(x))) @ self.first.weight.T


class Recurrent(nn.Module):
    """A GRU over two times four features."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.cell(x.unflatten(1, (2, 4)))[0].flatten(1)


class Attention(nn.Module):
    """Self-attention over two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        tokens = x.unflatten(1, (2, 4))
        return self.attention(tokens, tokens, tokens, need_weights=False)[0].flatten(1)


class Convolution(nn.Module):
    """A convolution over eight places."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 2, 3, padding=1, stride=2)

    def forward(self, x: Tensor) -> Any:
        return self.convolution(x[:, None]).flatten(1)


class Average(nn.Module):
    """A running mean in a buffer, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.float().mean(0), alpha=0.1)
        return x - self.mean


class Replaced(Average):
    """A running mean in a buffer, assigned."""

    def forward(self, x: Tensor) -> Tensor:
        out = x - self.mean
        self.mean = self.mean.lerp(x.detach().float().mean(0), 0.1)
        return out


class Counted(nn.Module):
    """An integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / (1 + self.calls)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() < 2)


class Straight(nn.Module):
    """A straight-through estimator, an autograd.Function."""

    def forward(self, x: Tensor) -> Any:
        return _Round.apply(x)


class Gated(nn.Module):
    """A scalar parameter and a vector one, in float32 arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.shift = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > self.gate, x, torch.sigmoid(self.gate) * x) + self.shift


class Embedded(nn.Module):
    """An embedding by the place of the largest feature."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.embedding(x.detach().argmax(-1))


class InPlace(nn.Module):
    """Writes into its own intermediate results."""

    def forward(self, x: Tensor) -> Tensor:
        out = x.clone()
        out[:, 0] = 0
        out[:, 1:3].mul_(2)
        return out.add_(1)


class Masked(nn.Module):
    """Fills by a mask, and takes a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x.masked_fill(x < -1, float("-inf")).clamp(min=-1e4), -1) * 4


class Cached(nn.Module):
    """Makes a table in the first call and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, WIDTH)
        return x * self.table


class Cast(nn.Module):
    """Casts by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.bfloat16) * 2).float() - x.float()


class Pair(nn.Module):
    """A bilinear layer, whose kernel multiplies inside, so that it must be outside of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return self.layer(x.float(), x.float().flip(1))


class Ordered(nn.Module):
    """Sorts, and gathers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.gather(1, x.detach().argsort(dim=1, stable=True)) + x.cumsum(1) / WIDTH


class Hooked(nn.Module):
    """A layer with hooks on its forward pass and on the gradient of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.register_forward_hook(lambda module, args, out: out * 1.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        if out.requires_grad:
            out.register_hook(lambda grad: grad * 0.5)
        return out


class Normed(nn.Module):
    """Products and norms in float32 inside of a region without autocast."""

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            wide = x.float()
            return F.normalize(wide, dim=-1) * wide.norm() / wide.numel() ** 0.5


#: What models are made of: expressions.
BLOCKS = (
    "nn.Linear(8, 8)",
    "nn.Linear(8, 8, bias=False)",
    "nn.LayerNorm(8)",
    "nn.RMSNorm(8)",
    "nn.BatchNorm1d(8)",
    "nn.GroupNorm(2, 8)",
    "nn.GELU()",
    "nn.ReLU(inplace=True)",
    "nn.SiLU()",
    "nn.PReLU()",
    "nn.Dropout(0.2)",
    "nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))",
    "nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))",
    "blocks.Residual(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()))",
    "blocks.Twice(nn.Linear(8, 8))",
    "blocks.Checkpointed(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)))",
    "blocks.Tied()",
    "blocks.Recurrent()",
    "blocks.Attention()",
    "blocks.Convolution()",
    "blocks.Average()",
    "blocks.Replaced()",
    "blocks.Counted()",
    "blocks.Straight()",
    "blocks.Gated()",
    "blocks.Embedded()",
    "blocks.InPlace()",
    "blocks.Masked()",
    "blocks.Cached()",
    "blocks.Cast()",
    "nn.Linear(8, 8).requires_grad_(False)",
    "blocks.Pair()",
    "blocks.Ordered()",
    "blocks.Hooked()",
    "blocks.Normed()",
)
