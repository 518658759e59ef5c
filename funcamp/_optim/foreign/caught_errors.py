"""What a class's source says that no run shows: which errors of Python's arithmetic it catches."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator

from funcamp._optim.foreign.instance import refusal

_OTHER_ERRORS = re.compile("Exception|Overflow|ValueError")
_ARITHMETIC = re.compile(r"math\.|/|%")


def asks_divisors(cls: type) -> bool:
    """Return whether a class catches divisions by 0, which are then questions.

    Raises:
        RefusedError: it catches other errors of Python's arithmetic, which a `Number` never raises.
    """
    asks = False
    for caught, body in _caught(cls):
        if "ZeroDivision" in caught or "Arithmetic" in caught:
            asks = True
        elif _OTHER_ERRORS.search(caught) and _ARITHMETIC.search(body):
            raise refusal(cls, "it may catch errors of Python's arithmetic; ask with `if` instead")
    return asks


def _caught(cls: type) -> Iterator[tuple[str, str]]:
    """Yield the errors that a class's code catches, with the code in which."""
    for base in cls.__mro__:
        if base is object or base.__module__.startswith("torch."):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):
            continue
        for node in ast.walk(ast.parse(source)):
            body = (
                "\n".join(map(ast.unparse, getattr(node, "body", ()))) if isinstance(node, (ast.Try, ast.With)) else ""
            )
            if isinstance(node, ast.Try):
                for handler in node.handlers:
                    yield (ast.unparse(handler.type) if handler.type else "Exception"), body
            elif isinstance(node, ast.With) and "suppress" in ast.unparse(node.items[0].context_expr):
                yield ast.unparse(node.items[0].context_expr), body
