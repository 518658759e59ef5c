"""Run the cases of some seeds, and cut down those that fail.

    python -m tests.fuzz 0:200 [--backend inductor]

With "eager", which compiles nothing, the compiled step must be equal to the eager one to the bit. With "inductor" it is
compiled with exact=True and may differ by rounding; a seed then takes a minute.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from typing import Any

import torch

from tests.fuzz.case import Case, case_of, smaller


def failure(case: Case, backend: dict[str, Any]) -> str:
    """Return how a case fails, as the kind of the error and its text; "" if it does not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(case.script(), f"<seed {case.seed}>", "exec"), {"BACKEND": backend, "__name__": "__fuzz__"})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def cut_down(case: Case, backend: dict[str, Any]) -> Case:
    """Return the smallest case found that fails with an error of the same kind."""
    kind = failure(case, backend).split(" at step")[0][:60]
    progress = True
    while progress:
        progress = False
        for simpler in smaller(case):
            if failure(simpler, backend).split(" at step")[0][:60] == kind:
                case, progress = simpler, True
                break
    return case


def backend_of(name: str) -> dict[str, Any]:
    """Return the options of `jit`."""
    return {"backend": "eager"} if name == "eager" else {"backend": name, "exact": True}


def main() -> int:
    """Run; return 1 if a seed fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("seeds", help="first:last, without the last, or one seed")
    parser.add_argument("--backend", default="eager")
    args = parser.parse_args()
    first, _, last = args.seeds.partition(":")
    logging.getLogger("funcamp").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    backend, failed = backend_of(args.backend), 0
    for seed in range(int(first), int(last or int(first) + 1)):
        found = failure(case_of(seed), backend)
        if not found:
            print(f"seed {seed}: equal", flush=True)
            continue
        failed += 1
        print(
            f"seed {seed}: {found}\n\nBACKEND = {backend}",
            cut_down(case_of(seed), backend).script(),
            sep="\n",
            flush=True,
        )
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
