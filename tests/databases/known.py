"""What `jit` refuses of torch's samples, and what differs, with the reason. The lists are exact."""

from __future__ import annotations

#: Results are memory as it was.
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

KNOWN: dict[str, dict[str, int]] = {}

#: Of torch's modules, with "eager" or "jit".
KNOWN_MODULES: dict[str, dict[str, int]] = {}
