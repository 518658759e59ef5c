"""The fused kernels of transformer encoders, which do not know autocast on a CPU (torch 2.11 to 2.15)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def without_encoder_kernels(region: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """Context manager: a region of autocast on a CPU, in which `nn.TransformerEncoder` computes layer by layer.

    torch does the same on a GPU. On a CPU it asks whether there is autocast for CUDA, and calls kernels that fail with
    weights of one dtype and values of another.
    """
    are_used = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with region:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(are_used)
