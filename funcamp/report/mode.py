"""The one dispatch mode of the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from funcamp.report.torch_names import DispatchMode

if TYPE_CHECKING:
    from torch._ops import OpOverload

#: Runs an operation with its arguments and keyword arguments.
Run = Callable[["OpOverload", tuple[Any, ...], dict[str, Any]], object]


def _run(func: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any]) -> object:
    return func(*args, **keywords)


class Mode(DispatchMode):
    """A dispatch mode that gets each operation of a run once, and passes it on to those that watch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run: Run = _run
        """Runs each operation; a recorder records it too."""
        self.look: Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Run], object] | None = None
        """Looks at each operation of the script's own code, and runs it."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if self.look is None:
            return self.run(func, args, kwargs or {})
        return self.look(func, args, kwargs or {}, self.run)
