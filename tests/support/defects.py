"""Defects of torch that the library does not work around: it avoids or documents them."""

from __future__ import annotations

from funcamp._upstream import VERSION

#: Inductor loses the offset of a view inside `as_strided`: `_tree.settled` accepts no view.
LOST_OFFSET = VERSION < (2, 13)
#: Inductor draws for dropout and torch.rand in another order: no workaround; documented in `jit(exact=True)`.
SWAPPED_DRAWS = VERSION < (2, 12)
#: Dynamo's None keeps the source of the first `.grad` that is None: no workaround.
SOURCE_ON_NONE = (2, 13) <= VERSION < (2, 15)
#: `NamedTuple._replace` under torch.compile returns an empty tuple: `_scaler.state.replace` names all fields.
#: https://github.com/pytorch/pytorch/issues/158772
EMPTY_REPLACE = VERSION < (2, 12)
