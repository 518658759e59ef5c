"""What an error of a compiler says: its text, and the operation and the place in the code if they are known."""

from __future__ import annotations

import re
import traceback

_CLASSES = ("Error", "Exception", "Failed", "Unsupported")
#: Inductor's errors name the operation in a separate line.
_OPERATION = re.compile(r"^\s*target: (\S+)", re.MULTILINE)


def reason_of(error: Exception) -> str:
    """Return the first line of an error, where it was raised if that has no text, and the operation if it names one."""
    text = str(error).strip()
    reason = text.splitlines()[0].rstrip(": ") if text else type(error).__name__
    # Inductor puts the classes of the errors inside before the text: "InductorError: LoweringException: AssertionError"
    if all(word.endswith(_CLASSES) for word in reason.replace(":", " ").split()):
        reason += f" without a text{_place(error)}"
    operation = _OPERATION.search(text)
    return reason if operation is None else f"{reason}, at the operation {operation[1]}"


def _place(error: Exception) -> str:
    """Return the innermost line of the error's traceback."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    if not frames:
        return ""
    frame, line = frames[-1]
    return f", raised by {frame.f_globals.get('__name__')}.{frame.f_code.co_name} in line {line}"
