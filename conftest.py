"""What the docstrings' examples may assume: torch, and funcamp's public names."""

import pytest
import torch

import funcamp
from funcamp import distributed


@pytest.fixture(autouse=True)
def _names(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace["torch"] = torch
    doctest_namespace["distributed"] = distributed
    doctest_namespace["presets"] = funcamp.presets
    doctest_namespace.update({name: getattr(funcamp, name) for name in funcamp.__all__})
