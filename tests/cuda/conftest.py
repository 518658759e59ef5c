"""What the CUDA tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@pytest.fixture
def deterministic() -> Iterator[None]:
    """The same kernels in a step and in the loop that it is compared with."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.backends.cudnn.deterministic = before
