"""Lightning's Trainer in tests: on a CPU, without files and bars, and without its warnings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

IGNORED = [
    # Lightning's own use of a deprecated part of torch 2.13's pytree.
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
    # The data is in memory: worker processes would cost more than they bring.
    pytest.mark.filterwarnings("ignore:The '[a-z_]+' does not have many workers:UserWarning"),
]


def trainer(folder: Path, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
