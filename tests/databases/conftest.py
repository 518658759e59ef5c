"""Which runs collect the tests of torch's databases."""

from __future__ import annotations

from funcamp import _upstream

# Samples and refusals differ from version to version of torch, and the lists in `known.py` are exact.
collect_ignore_glob = [] if _upstream.VERSION == (2, 13) else ["test_*.py"]
