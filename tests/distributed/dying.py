"""An example of which rank 1 dies: `-m tests.distributed.dying SIGNAL CALL EXAMPLE [OPTION ...]`.

The process sends itself the signal at the given call of the model; after a restart nothing dies.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from typing import Any

from tests.support.programs import import_example


def arm(name: str, call: int) -> None:
    """Die at this call, counted from 1."""
    gpt = import_example("_gpt").GPT
    forward, calls = gpt.forward, itertools.count(1)

    def counted(*args: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), getattr(signal, name))
        return forward(*args)

    gpt.forward = counted


if __name__ == "__main__":
    name, call, example, *options = sys.argv[1:]
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        arm(name, int(call))
    import_example(example).main(options)
    import_example("_processes").end()
