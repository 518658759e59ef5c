"""`python -m funcamp report`: the mistakes of a loop, and a numerics report, of a script, a module or a callable."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

import torch

from funcamp.report import render
from funcamp.report.audit import Auditor
from funcamp._types import name_of
from funcamp._upstream.replaced import replaced
from funcamp.numerics.formats import DTYPES
from funcamp.report.numbers.recorder import Recorder
from funcamp.report.numbers.report import NumericsReport, numerics_report

_NOTHING_RECORDED = "Operations: none recorded; those of threads that the script starts are not."
_FORMATS = {name_of(dtype): dtype for dtype in DTYPES}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "python -m funcamp report [options] target [-- the script's own arguments]"
    parser.add_argument("target", help="script.py, or script.py:callable, or package.module:callable")
    parser.add_argument("-m", dest="is_module", action="store_true", help="the target is a module, as for python -m")
    parser.add_argument("--out", type=Path, default=Path("numerics"), help="folder for report.txt, .png and .html")
    parser.add_argument("--dtype", choices=_FORMATS, default="float16", help="the format whose limits are reported")
    parser.add_argument("--first", type=int, default=1, help="the first backward pass to record, counted from 1")
    parser.add_argument("--passes", type=int, default=1, help="number of passes to record")
    parser.add_argument(
        "--watch",
        type=int,
        default=100,
        help="backward passes in which mistakes are looked for; the script ends before the next (default: 100)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--strict", action="store_true", help="return 1 if the loop has a mistake, for CI")
    parser.add_argument("--loss-scale", type=float, help="factor of the loss, if no scaler or step scales it")


class _NoIPython:
    """Replaces IPython in a notebook that was exported as a script: its magics do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _Run(NamedTuple):
    """The results of a run."""

    report: NumericsReport | None
    """None if no operation was recorded: all backward passes ran in threads that the script started."""
    auditor: Auditor
    ending: BaseException | None
    """The exception that ended the script before its passes were complete."""


def run(parser: argparse.ArgumentParser, args: argparse.Namespace, script_arguments: list[str]) -> int:
    """Record, write the files and print the main results.

    Return 1 if something became inf or NaN that no loss scale avoids, or with `--strict` if the loop has a mistake. If
    the script ended by an exception or an exit, it is raised again afterwards, but no exit of status 0 hides a mistake
    from `--strict`.
    """
    _check_arguments(parser, args)
    args.out = args.out.resolve()  # the script may change the working directory
    # The script may replace or close standard output. With JSON, that is for the JSON only.
    with replaced(sys, stdout=sys.stderr if args.json else sys.stdout, stderr=sys.stderr):
        report, auditor, ending = _record(parser, args, script_arguments)
    output = sys.stderr if sys.stdout.closed else sys.stdout
    dtype = _FORMATS[args.dtype]
    sentences = [_NOTHING_RECORDED] if report is None else report.summary(dtype)
    written_paths = _write_files(args, report, auditor, sentences)
    if args.json:
        results = {"passes": auditor.passes, "findings": render.rows(auditor), "numerics": sentences}
        output.write(json.dumps(results, indent=1) + "\n")
    else:
        files = ", ".join(map(str, written_paths))
        output.write(f"{_findings(auditor)}\n{_main_results(report, sentences)}\nfiles: {files}\n")
    is_failed = args.strict and auditor.has_mistakes()
    if ending is not None and not (is_failed and _is_success(ending)):
        raise ending
    return int(is_failed or (report is not None and _has_lost_numbers(report)))


def _main_results(report: NumericsReport | None, sentences: list[str]) -> str:
    """Return the main results about numbers: sentences, and the module's tree."""
    tree = [] if report is None else ["", report.annotate()]
    return "\n".join([*sentences, *tree]) + "\n"


def _has_lost_numbers(report: NumericsReport) -> bool:
    """Return whether the loss, or a gradient at every scale, is inf or NaN.

    Scaled gradients that overflow are not counted: the scaler skips that step and lowers its scale.
    """
    if report.cause() is not None:
        return True
    return any(not one.finite and one.obstacle and one.loss_scale == 1 for one in report.passes)


def _check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Report a number out of range, or a folder that cannot be written; make the folder."""
    for name in ("first", "passes", "watch"):
        number = getattr(args, name)
        if number < 1:
            parser.error(f"--{name} must be 1 or more; got {number}")
    if args.loss_scale is not None and not 0 < args.loss_scale < float("inf"):
        parser.error(f"--loss-scale must be a positive number; got {args.loss_scale}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out must be a folder that can be written; got {args.out} ({error.strerror})")


def _write_files(
    args: argparse.Namespace, report: NumericsReport | None, auditor: Auditor, sentences: list[str]
) -> list[Path]:
    """Write the report as text, as a page, and as a picture if matplotlib is installed; return the files."""
    dtype = _FORMATS[args.dtype]
    text_path = args.out / "report.txt"
    main_results = _main_results(report, sentences)
    if report is None:
        text_path.write_text(f"{render.text(auditor)}\n\n{main_results}", encoding="utf-8")
        return [text_path]
    page_path = args.out / "report.html"
    picture_path = args.out / "report.png"
    text_path.write_text(f"{render.text(auditor)}\n\n{main_results}\n{_table(report, dtype)}", encoding="utf-8")
    written_paths = [text_path, page_path]
    picture = b""
    try:
        report.plot(picture_path, dtype)
        picture = picture_path.read_bytes()
        written_paths.append(picture_path)
    except ImportError as error:  # without matplotlib there is no picture
        sys.stderr.write(f"{error}\n")
    report._write_page(page_path, dtype, f"Numerics of {args.target}", picture, render.text(auditor))
    return written_paths


def _is_success(ending: BaseException) -> bool:
    """Return whether a script ended as by `sys.exit(0)`."""
    return isinstance(ending, SystemExit) and ending.code in (None, 0)


def _record(parser: argparse.ArgumentParser, args: argparse.Namespace, script_arguments: list[str]) -> _Run:
    """Run the target; return the results."""
    auditor = Auditor(max(args.watch, args.first + args.passes - 1))
    file, _, name = args.target.rpartition(":")
    is_script = args.is_module or name.endswith(".py")
    if is_script:
        return _record_script(parser, args, script_arguments, auditor)
    if not file or script_arguments:
        parser.error(f"target must be a script, or a callable without arguments after a colon; got {args.target!r}")
    function = _import_callable(parser, file, name)
    with auditor.watching():
        report = numerics_report(function, loss_scale=args.loss_scale)
    return _Run(report, auditor, None)


def _record_script(
    parser: argparse.ArgumentParser, args: argparse.Namespace, script_arguments: list[str], auditor: Auditor
) -> _Run:
    """Run a script, or a module as a script; return the results."""
    script = Path(args.target)
    if not (args.is_module or script.is_file()):
        parser.error(f"target must be a file; there is none at {script}")
    recorder = Recorder(None, args.first, args.passes, args.loss_scale)
    ending: BaseException | None = None
    if args.is_module:
        _check_module(parser, args.target)
    path = sys.path if args.is_module else _search_path(script)
    try:
        # The auditor comes last, so that the script's calls reach it first, and the recorder's own calls do not.
        with replaced(sys, argv=[str(script), *script_arguments], path=path), recorder.watching(), auditor.watching():
            if args.is_module:
                runpy.run_module(args.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(script), _exported_names(script), run_name="__main__")
    except BaseException as error:
        if not (recorder.seen_backward or auditor.passes or auditor.findings()):
            raise
        ending = error
    if auditor.passes < args.first and not (recorder.recording.operations or ending):
        parser.error(
            f"target must run a backward pass, {args.first} or more of them; none was seen in {args.target}, whose "
            "own processes are not watched"
        )
    report = NumericsReport(recorder) if recorder.recording.operations else None
    return _Run(report, auditor, ending)


def from_the_script(trace: TracebackType | None, error: BaseException) -> TracebackType | None:
    """Return a traceback from the script's first frame on; all of it if no frame is the script's."""
    library_folder = str(Path(__file__).parents[1]) + os.sep
    remaining = trace
    while remaining is not None:
        frame = remaining.tb_frame
        in_library = frame.f_code.co_filename.startswith(library_folder)
        in_runpy = frame.f_globals.get("__name__") == "runpy"
        if not (in_library or in_runpy):
            return remaining
        remaining = remaining.tb_next
    # A script that cannot be parsed has no frame; its error names the line itself.
    return None if isinstance(error, SyntaxError) else trace


def without_auditor(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of the auditor, through which the script's calls go."""
    folder = str(Path(render.__file__).parent) + os.sep
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(folder):
        trace = trace.tb_next
    if trace is not None:
        trace.tb_next = without_auditor(trace.tb_next)
    return trace


def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error without the frames that lead to the script."""
    trace = without_auditor(from_the_script(trace, error))
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _exported_names(script: Path) -> dict[str, type[_NoIPython]]:
    """Return the names that an exported notebook expects; none for any other script."""
    is_notebook = "get_ipython()" in script.read_text(encoding="utf-8", errors="replace")
    return {"get_ipython": _NoIPython} if is_notebook else {}


def _search_path(script: Path) -> list[str]:
    """Return `sys.path` as Python sets it for a script: the script's folder first."""
    return [str(script.parent.resolve()), *sys.path]


def _check_module(parser: argparse.ArgumentParser, name: str) -> None:
    """Report a module that does not exist. Nothing is imported: the auditor must see the imports of a package."""
    first_name = name.partition(".")[0]
    if not first_name or importlib.util.find_spec(first_name) is None:
        parser.error(f"target must name a module; there is no {name}")


def _import_callable(parser: argparse.ArgumentParser, file: str, name: str) -> Callable[..., object]:
    """Return a callable by its name in a file or in a module."""
    if file.endswith(".py"):
        if not Path(file).is_file():
            parser.error(f"target must be a file; there is none at {file}")
        with replaced(sys, path=_search_path(Path(file))):
            function = runpy.run_path(file).get(name)
    else:
        try:
            function = getattr(importlib.import_module(file), name, None)
        except ModuleNotFoundError as error:
            parser.error(f"target must name a module; {error}")
    if not callable(function):
        parser.error(f"target must name a callable; {file} has no such {name!r}")
    return function  # type: ignore[no-any-return]


def _findings(auditor: Auditor) -> str:
    """Return the findings: a table if rich is installed, else paragraphs."""
    try:
        from rich.console import Console
    except ImportError:
        return f"{render.text(auditor)}\n"
    if not auditor.findings():
        return f"{render.headline(auditor)}\n"
    text = io.StringIO()
    Console(file=text, width=max(120, Console().width), color_system=_colors()).print(render.table(auditor))
    return text.getvalue()


def _colors() -> Literal["auto"] | None:
    """Return whether a table has colors, in the form that rich takes."""
    return "auto" if sys.stdout.isatty() else None


def _table(report: NumericsReport, dtype: torch.dtype) -> str:
    """Return the table of operations as text; without rich, a line per operation."""
    try:
        from rich.console import Console
    except ImportError:
        return "\n".join(str(row) for row in report.to_rows(dtype)) + "\n"
    text = io.StringIO()
    Console(width=200, file=text).print(report.table(dtype))
    return text.getvalue()
