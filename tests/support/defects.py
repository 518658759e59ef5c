"""Defects of torch that the library does not work around: it avoids or documents them."""

from __future__ import annotations

from funcamp._upstream import VERSION

#: Inductor draws for dropout and torch.rand in another order: no workaround; documented in `jit(exact=True)`.
SWAPPED_DRAWS = VERSION < (2, 12)
#: Dynamo's None keeps the source of the first `.grad` that is None: no workaround.
SOURCE_ON_NONE = (2, 13) <= VERSION < (2, 15)
