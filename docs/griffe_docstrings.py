"""Prepare docstrings for mkdocstrings.

It knows `Examples:` but not `Example:`, and warns about a `Raises:` without an exception. In `Returns:` it reads the
text before a colon as a type.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension


class Docstrings(Extension):
    """Rewrite a docstring when it is loaded."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r"^Raises:\n +Nothing\.\n\n", "", text, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"(?<=\nReturns:\n)([^\n:]+):(?= )", r"\1&#58;", text)
