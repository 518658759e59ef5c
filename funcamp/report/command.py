"""`python -m funcamp report`: the mistakes of a loop and the numbers of a step, of a script or a module."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from funcamp.numerics.formats import DTYPES
from funcamp.report import render
from funcamp.report.audit import Auditor
from funcamp.report.mode import Mode
from funcamp.report.numbers.recorder import Recorder
from funcamp.report.numbers.report import NumericsReport
from funcamp.report.torch_names import name_of, replaced

_NOTHING_RECORDED = "Operations: none recorded; those of threads that the script starts are not."
_FORMATS = {name_of(dtype): dtype for dtype in DTYPES}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "python -m funcamp report [options] script.py [-- the script's own arguments]"
    parser.add_argument("target", help="the script")
    parser.add_argument("-m", dest="is_module", action="store_true", help="the target is a module, as for python -m")
    parser.add_argument("--out", type=Path, default=Path("numerics"), help="folder for report.txt and report.png")
    parser.add_argument("--dtype", choices=_FORMATS, default="float16", help="the format whose limits are reported")
    parser.add_argument("--first", type=int, default=1, help="the backward pass to record, counted from 1")
    parser.add_argument(
        "--watch",
        type=int,
        default=100,
        help="backward passes in which mistakes are looked for; the script ends before the next (default: 100)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--strict", action="store_true", help="return 1 if the loop has a mistake, for CI")
    parser.add_argument("--loss-scale", type=float, help="factor of the loss, if no scaler or step scales it")


class _Run(NamedTuple):
    """The results of a run."""

    report: NumericsReport | None
    """None if no operation was recorded: all backward passes ran in threads that the script started."""
    auditor: Auditor
    ending: BaseException | None
    """The exception that ended the script before its passes were complete."""


def run(parser: argparse.ArgumentParser, args: argparse.Namespace, script_arguments: list[str]) -> int:
    """Watch a script, write the files and print the main results.

    Return 1 if something became inf or NaN that no loss scale avoids, or with `--strict` if the loop has a mistake. If
    the script ended by an exception or an exit, it is raised again afterwards, but no exit of status 0 hides a mistake
    from `--strict`.
    """
    _check_arguments(parser, args)
    args.out = args.out.resolve()  # the script may change the working directory
    # The script may replace or close standard output. With JSON, that is for the JSON only.
    with replaced(sys, stdout=sys.stderr if args.json else sys.stdout, stderr=sys.stderr):
        report, auditor, ending = _watch(parser, args, script_arguments)
    output = sys.stderr if sys.stdout.closed else sys.stdout
    sentences = [_NOTHING_RECORDED] if report is None else report.summary(_FORMATS[args.dtype])
    tree = "" if report is None else f"\n{report.annotate()}\n"
    findings = "\n".join([render.text(auditor), "", *sentences, tree])
    written_paths = _write_files(args, report, findings)
    if args.json:
        results = {"passes": auditor.passes, "findings": render.rows(auditor), "numerics": sentences}
        output.write(json.dumps(results, indent=1) + "\n")
    else:
        output.write(f"{findings}\nfiles: {', '.join(map(str, written_paths))}\n")
    is_failed = args.strict and auditor.has_mistakes()
    is_success = isinstance(ending, SystemExit) and ending.code in (None, 0)
    if ending is not None and not (is_failed and is_success):
        raise ending
    return int(is_failed or (report is not None and _has_lost_numbers(report)))


def _has_lost_numbers(report: NumericsReport) -> bool:
    """Return whether the loss, or a gradient at every scale, is inf or NaN.

    Scaled gradients that overflow are not counted: the scaler skips that step and lowers its scale.
    """
    return report.cause() is not None or any(one.overflows and one.loss_scale == 1 for one in report.passes)


def _check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Report a number out of range, a target that does not exist or a folder that cannot be made; make it."""
    for name in ("first", "watch"):
        number = getattr(args, name)
        if number < 1:
            parser.error(f"--{name} must be 1 or more; got {number}")
    if args.loss_scale is not None and not 0 < args.loss_scale < float("inf"):
        parser.error(f"--loss-scale must be a positive number; got {args.loss_scale}")
    if args.is_module:
        # Nothing is imported: the auditor must see the imports of a package.
        first_name = args.target.partition(".")[0]
        if not first_name or importlib.util.find_spec(first_name) is None:
            parser.error(f"target must name a module; there is no {args.target}")
    elif not Path(args.target).is_file():
        parser.error(f"target must be a file; there is none at {args.target}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out must be a folder that can be written; got {args.out} ({error.strerror})")


def _write_files(args: argparse.Namespace, report: NumericsReport | None, findings: str) -> list[Path]:
    """Write the report as text, and as a picture if matplotlib is installed; return the files."""
    text_path, picture_path = args.out / "report.txt", args.out / "report.png"
    dtype = _FORMATS[args.dtype]
    table = "" if report is None else f"\n{report.table(dtype)}\n"
    text_path.write_text(f"{findings}{table}", encoding="utf-8")
    if report is None:
        return [text_path]
    try:
        return [text_path, report.plot(picture_path, dtype)]
    except ImportError as error:  # without matplotlib there is no picture
        sys.stderr.write(f"{error}\n")
        return [text_path]


def _watch(parser: argparse.ArgumentParser, args: argparse.Namespace, script_arguments: list[str]) -> _Run:
    """Run a script, or a module as a script; return the results."""
    auditor = Auditor(max(args.watch, args.first))
    mode = Mode()
    recorder = Recorder(mode, None, args.first, 1, args.loss_scale)
    ending: BaseException | None = None
    path = sys.path if args.is_module else [str(Path(args.target).parent.resolve()), *sys.path]
    try:
        # The auditor comes last, so that the script's calls reach it first, and the recorder's own calls do not.
        with (
            replaced(sys, argv=[args.target, *script_arguments], path=path),
            recorder.watching(),
            auditor.watching(mode),
        ):
            if args.is_module:
                runpy.run_module(args.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(args.target, run_name="__main__")
    except BaseException as error:
        if not (recorder.seen_backward or auditor.passes or auditor.findings()):
            raise
        ending = error
    if auditor.passes < args.first and not (recorder.recording.operations or ending):
        parser.error(
            f"target must run a backward pass, {args.first} or more of them; none was seen in {args.target}, whose "
            "own processes are not watched"
        )
    return _Run(NumericsReport(recorder) if recorder.recording.operations else None, auditor, ending)


def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error without the frames of this library and of runpy, through which the script's calls go."""
    trace = None if isinstance(error, SyntaxError) else _of_the_script(trace)
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    folder = str(Path(__file__).parents[1]) + os.sep
    while trace is not None and (
        trace.tb_frame.f_code.co_filename.startswith(folder) or trace.tb_frame.f_globals.get("__name__") == "runpy"
    ):
        trace = trace.tb_next
    if trace is not None:
        trace.tb_next = _of_the_script(trace.tb_next)
    return trace
