"""What the CUDA tests measure with, where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.helpers import assert_no_sync


def test_the_mode_does_not_stay_on_where_setting_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        if mode == "error":
            raise UserWarning("Synchronization debug mode is a prototype feature")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.raises(UserWarning, match="prototype"), assert_no_sync():
        raise AssertionError("not reached")
    assert modes == ["error", "default"]
