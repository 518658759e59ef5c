"""The one dispatch mode of the report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from funcamp.report.torch_names import Args, DispatchMode, Kwargs, dispatch_modes

if TYPE_CHECKING:
    from torch._ops import OpOverload

#: Runs an operation with its arguments and keyword arguments.
Run = Callable[["OpOverload", Args, Kwargs], object]


def _run(func: OpOverload, args: Args, keywords: Kwargs) -> object:
    return func(*args, **keywords)


class Mode(DispatchMode):
    """A dispatch mode that gets each operation of a run once, and passes it on to those that watch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run: Run = _run
        """Runs each operation; a recorder records it too."""
        self.look: Callable[[OpOverload, Args, Kwargs, Run], object] | None = None
        """Looks at each operation of the script's own code, and runs it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: everything runs eagerly while the report watches, and torch's check of that costs time."""
        return False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager: operations do not go through this mode, unless they are recorded, or others are inside."""
        if self.run is not _run or dispatch_modes()[-1:] != [self]:
            yield
            return
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def resumed(self) -> Iterator[None]:
        """Context manager: operations go through this mode, also while it is paused."""
        with contextlib.nullcontext() if self in dispatch_modes() else self:
            yield

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        if self.look is None:
            return self.run(func, args, kwargs or {})
        return self.look(func, args, kwargs or {}, self.run)
