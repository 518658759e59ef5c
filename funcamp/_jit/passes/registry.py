"""Passes of layers: a layer registers its own when it is imported, so that `jit` imports no layer."""

from __future__ import annotations

from funcamp._jit.passes.program import Pass

_registered: list[Pass] = []


def register(program_pass: Pass) -> None:
    """Let all programs that are compiled from now on have a further pass, after those of `PIPELINE`."""
    if program_pass.name not in [other.name for other in _registered]:
        _registered.append(program_pass)


def registered() -> tuple[Pass, ...]:
    """Return the passes of layers."""
    return tuple(_registered)
