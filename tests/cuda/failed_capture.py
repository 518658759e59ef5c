"""A step with an operation that no capture takes: `-m tests.cuda.failed_capture`, for it may spoil the process."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from funcamp import jit


@torch.library.custom_op("funcamp_tests::wait", mutates_args=())
def wait(x: Tensor) -> Tensor:
    """A copy; in a capture the host waits for it, which ends the capture."""
    if torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()
    return x.clone()


wait.register_fake(torch.empty_like)


def illegal(state: Any, batch: Tensor) -> Any:
    return {"x": state["x"] + wait(batch).sum()}, batch.mean()


def legal(state: Any, batch: Tensor) -> Any:
    return {"x": state["x"] + batch.sum()}, torch.rand_like(batch)


def either(state: Any, batch: Tensor) -> Any:
    return (illegal if len(batch) == 3 else legal)(state, batch)


def error_of(run: Any, state: Any, size: int) -> str:
    try:
        run(state, torch.ones(size, device="cuda"))
    except RuntimeError as error:
        return str(error)
    return "none"


def main() -> None:
    before = torch.cuda.current_stream()
    run, state = jit(illegal), {"x": torch.zeros((), device="cuda")}
    errors = [error_of(run, state, 2) for _ in range(2)]
    same_stream = [torch.cuda.current_stream() == before]
    drawn = torch.rand(4, device="cuda").tolist()  # "Offset increment outside graph capture" if torch still captures
    kept = state["x"].item()

    several, current = jit(either), {"x": torch.zeros((), device="cuda")}
    rows = []
    for size in (2, 3, 2, 4, 2):  # two programs before and after one that fails share a pool
        if size == 3:
            errors.append(error_of(several, current, size))
        else:
            current, row = several(current, torch.ones(size, device="cuda"))
            rows.append(row.tolist())
    same_stream.append(torch.cuda.current_stream() == before)
    numbers = {"errors": errors, "same_stream": same_stream, "kept": kept, "total": current["x"].item()}
    sys.stdout.write(json.dumps({**numbers, "drawn": drawn, "rows": rows}))


if __name__ == "__main__":
    main()
