"""`python -m funcamp report`: the mistakes of the loop of a script or a module."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from pathlib import Path

from funcamp.report.audit import Auditor
from funcamp.report.render import text
from funcamp.report.torch_names import replaced


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "python -m funcamp report [options] script.py [the script's own arguments]"
    parser.add_argument("target", help="the script")
    parser.add_argument("-m", dest="is_module", action="store_true", help="the target is a module, as for python -m")
    parser.add_argument(
        "--watch",
        type=int,
        default=100,
        help="backward passes in which mistakes are looked for; the script ends before the next (default: 100)",
    )
    parser.add_argument("--strict", action="store_true", help="return 1 if the loop has a mistake, for CI")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Watch a script and print its findings. Return 1 with `--strict` if the loop has a mistake, else 0.

    If the script ended by an exception or an exit, it is raised again afterwards, but no exit of status 0 hides a
    mistake from `--strict`.
    """
    _check_arguments(parser, args)
    output = sys.stdout  # the script may replace it
    auditor = Auditor(args.watch)
    ending = _watch(auditor, args)
    if not (auditor.passes or auditor.findings() or ending):
        parser.error(
            f"target must run a backward pass; none was seen in {args.target}, whose own processes are not watched"
        )
    output.write(f"{text(auditor)}\n")
    is_failed = args.strict and auditor.has_mistakes()
    is_success = isinstance(ending, SystemExit) and ending.code in (None, 0)
    # What a script makes of the end of the watch is no failure of it.
    is_of_watch = auditor.has_ended and isinstance(ending, (SystemExit, Exception))
    if ending is not None and not is_of_watch and not (is_failed and is_success):
        raise ending
    return int(is_failed)


def _check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Report a number out of range, or a target that does not exist."""
    if args.watch < 1:
        parser.error(f"--watch must be 1 or more; got {args.watch}")
    if args.is_module:
        # Nothing is imported: the auditor must see the imports of a package.
        first_name = args.target.partition(".")[0]
        if not first_name or importlib.util.find_spec(first_name) is None:
            parser.error(f"target must name a module; there is no {args.target}")
    elif not Path(args.target).is_file():
        parser.error(f"target must be a file; there is none at {args.target}")


def _watch(auditor: Auditor, args: argparse.Namespace) -> BaseException | None:
    """Run a script, or a module as a script; return the exception that ended it, if one did."""
    path = sys.path if args.is_module else [str(Path(args.target).parent.resolve()), *sys.path]
    try:
        with replaced(sys, argv=[args.target, *args.arguments], path=path), auditor.watching():
            if args.is_module:
                runpy.run_module(args.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(os.path.abspath(args.target), run_name="__main__")
    except BaseException as error:
        return error
    return None
