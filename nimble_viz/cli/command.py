"""The command line, ``python -m nimble_viz COMMAND``.

Exit codes: 0 done, 1 the model could not be compared or a replay is wrong, 2 bad usage or input (files that are missing
or damaged and packages that are missing included), 130 interrupted. ``gate``: 1 fail, 3 not decided. ``annotate``: 1 if
not everything matched. ``diagnose``: 1 blockers were found. ``doctor``: 1 something needed is broken. ``profile``: that
of the script.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import CaptureError, InputError, NimbleError, ReportFileError
from nimble_core.utils.tracebacks import full_tracebacks
from nimble_viz.analysis.gate import Rules
from nimble_viz.analysis.labels import visible
from nimble_viz.cli.arguments import add_options, option_values
from nimble_viz.cli.factory import TRAINING_FACTORY, made_by
from nimble_viz.collect.sampler import Counts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nimble_viz.render.diagnosis import Diagnosis
    from nimble_viz.render.report import Report
    from nimble_viz.render.verdicts import Difference, Gate

__all__ = ["main"]

_NEEDED = ("anywidget", "graphviz", "ipywidgets", "msgspec", "networkx", "nvtx", "plotly", "rich", "scipy", "torch")
"""What pyproject.toml requires: a checkout that was never installed has no metadata to read it from."""

_ABOUT_GATE = (
    "Exit codes: 0 every rule passed, 1 a rule failed, 2 bad usage, an unreadable report or a baseline that does not "
    "compare, 3 not decided: an interval holds the bound, or something was not measured."
)
_ABOUT = "See what ahead-of-time scheduling changes about a PyTorch model."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (``sys.argv`` if None) and return its exit code.

    Errors that this project raises on purpose, and missing packages that it requires, are printed as their message, or
    in full with ``--traceback``. Other errors, such as those of the user's own code, are not caught. A missing or
    damaged file never gives 1, which is an answer.
    """
    given = _parser().parse_args(argv)
    try:
        with full_tracebacks() if given.traceback else nullcontext():
            return int(given.run(given))
    except NimbleError as error:
        if given.traceback:
            raise
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, CaptureError) and given.run is _compare and not given.training:
            _warn(f"all blockers at once: python -m nimble_viz diagnose {given.factory}")
        return 2 if isinstance(error, InputError | ReportFileError) else 1
    except ModuleNotFoundError as error:
        if given.traceback or error.name not in _NEEDED:  # a part of an installed package has a dot in its name
            raise
        fix = f"pip install {error.name}"
        print(f"error: {error.name} is not installed, and nimble_viz needs it: {fix}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted before anything was measured", file=sys.stderr)
        return 130


def _warn(text: str) -> None:
    """Write a line to standard error. Names of files and modules may hold what a terminal would obey."""
    print(visible(text), file=sys.stderr, flush=True)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


_Argument = tuple[tuple[str, ...], dict[str, Any]]
"""What ``add_argument`` is given."""
_Run = Callable[[argparse.Namespace], int]
_COMMANDS: list[tuple[_Run, str, tuple[_Argument, ...], tuple[str, type] | None]] = []
"""Each command: what it runs, what it is for, its arguments and options."""


def _command(about: str, *arguments: _Argument, options: tuple[str, type] | None = None) -> Callable[[_Run], _Run]:
    """Make a function a command; ``options`` is a group's title and the dataclass that it is made from."""

    def add(run: _Run) -> _Run:
        _COMMANDS.append((run, about, arguments, options))
        return run

    return add


def _argument(*names: str, **how: Any) -> _Argument:
    return names, how


def _path(*names: str, **how: Any) -> _Argument:
    return names, {"type": Path, **how}


def _switch(name: str, about: str) -> _Argument:
    return (name,), {"action": "store_true", "help": about}


_JSON = _switch("--json", "print JSON instead")
_FULL = _switch("--full", "print everything, not only the first twelve lines")
_HTML = _path("--html", metavar="PATH", help="write a self-contained page")
_OUTPUTS = (
    _HTML,
    _path("--save", metavar="PATH", help="write the report (.nimble)"),
    _switch("--quiet", "print nothing but errors"),
    _FULL,
    _JSON,
)


@_command(
    "measure a model: eager, one-stream and multi-stream replay",
    _argument("factory", metavar="MODULE:FACTORY", help=f"gives (model, args[, kwargs]) or {TRAINING_FACTORY}"),
    _switch("--training", f"compare whole training steps; FACTORY gives {TRAINING_FACTORY}"),
    *_OUTPUTS,
    _argument("--against", type=_names, default=(), metavar="PEER,...", help="others to measure: compile,cuda-graph"),
    options=("options of the preparation", Options),
)
def _compare(given: argparse.Namespace) -> int:
    from nimble_viz.collect.progress import Progress

    options = Options(**option_values(given))
    _require_places(given.save, given.html)
    model, args, kwargs, more = made_by(given.factory, given.training)
    more |= {"training": True} if given.training else {}
    from nimble_viz.collect.compare import compare

    progress = Progress() if given.quiet else None
    report = compare(model, *args, kwargs=kwargs, against=given.against, options=options, progress=progress, **more)
    _deliver(report, given.save, given.html, given)
    if not report.complete:
        return 130
    wrong = [check for check in report.checks if check.differs]
    for check in wrong:
        _warn(f"{check.name}: {check.reason}")
    return 1 if wrong else 0


@_command(
    "everything that keeps a model from being prepared, at once",
    _argument("factory", metavar="MODULE:FACTORY", help="as for compare"),
    _argument("--training", action="store_true", help=argparse.SUPPRESS),
    _JSON,
)
def _diagnose(given: argparse.Namespace) -> int:
    """Find everything that keeps a factory's model from being prepared."""
    from nimble_viz.collect.diagnose import diagnose

    if given.training:
        fix = f"for training: python -m nimble_viz compare {given.factory} --training, whose error names what to change"
        raise InputError("diagnose looks at the forward pass alone", fix=fix)
    model, args, kwargs, _ = made_by(given.factory)
    found = diagnose(model, *args, kwargs=kwargs)
    _answer(found, given.json)
    return 0 if found.ok else 1


@_command(
    "where the time goes in a script as it is, or in a profiler's trace",
    *_OUTPUTS,
    _switch("--stop", "end the script once that is done"),
    _path("script", metavar="SCRIPT", help="a Python file; or TRACE.json, TRACE.json.gz"),
    _argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"),
    options=("iterations of a loop", Counts),
)
def _profile(given: argparse.Namespace) -> int:
    """Profile a script, or read a trace that a profiler exported; exit code and errors are the script's."""
    _require_places(given.save, given.html)
    # Where the command was given, with its output: a script may go elsewhere, and leave another in sys.stdout.
    save, html = (path and path.absolute() for path in (given.save, given.html))
    stdout = sys.stdout
    ended: int | Exception = 0
    if given.script.suffix == ".nimble":
        raise InputError(f"{given.script} is a report", fix=f"python -m nimble_viz show {given.script}")
    if given.script.name.endswith((".json", ".json.gz")):
        from nimble_viz.collect.from_trace import from_trace

        with _files():
            report = from_trace(given.script)
    else:
        from nimble_viz.collect.profile import profile_script

        counts = Counts(**option_values(given, Counts))
        try:
            report, ended = profile_script(given.script, given.arguments, counts, stop=given.stop)
        finally:
            sys.stdout = stdout
    _deliver(report, save, html, given)
    if isinstance(ended, Exception):
        raise ended
    return ended


def _deliver(report: Report, save: Path | None, html: Path | None, given: argparse.Namespace) -> None:
    """Write the report where it was asked for, print it, and say if it is not complete."""
    with _files():
        if save is not None:
            report.save(save)
        if html is not None:
            report.to_html(html)
    if not given.quiet:
        _summarise(report, given)
    if not report.complete:
        _warn("interrupted" if save is None else f"interrupted; what was measured is in {save}")


def _require_places(*paths: Path | None) -> None:
    """Raise InputError for files that could not be written, before anything is measured for them."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"there is no folder {path.parent} to write {path.name} in", fix="make it first")
        if path is not None and path.is_dir():
            raise InputError(f"{path} is a folder", fix=f"name a file in it: {path / 'report.nimble'}")


@_command("print a saved report", _path("file", metavar="FILE"), _HTML, _FULL, _JSON)
def _show(given: argparse.Namespace) -> int:
    from nimble_viz.render.report import load

    with _files():
        report = load(given.file)
        if given.html is not None:
            report.to_html(given.html)
    _summarise(report, given)
    return 0


def _summarise(report: Report, given: argparse.Namespace) -> None:
    if given.json:
        _say(json.dumps(report.summary(), ensure_ascii=False))
    else:
        from nimble_viz.render.text import report_text

        _print(report_text(report, full=given.full))


@_command(
    "write a saved report for Perfetto, Chrome, Nsight Systems, or as CSV",
    _path("file", metavar="REPORT"),
    _path("out", metavar="OUT", help="*.json, a folder or calls.csv"),
)
def _export(given: argparse.Namespace) -> int:
    from nimble_viz.render.report import load

    with _files():
        load(given.file).export(given.out)
    return 0


@_command(
    "join a profile of Nsight Systems (SQLite) to the calls of a saved report",
    _path("file", metavar="PROFILE.sqlite", help="nsys export --type sqlite"),
    _path("--report", metavar="REPORT", required=True, help="a report of the same model"),
    _path("-o", "--out", metavar="OUT", help="write the report with the profile's replay, as *.nimble or an export"),
    _path("--csv", metavar="PATH", help="write each kernel of each replay with its call"),
    _argument("--plan", dest="run_name", default="", metavar="NAME", help="whose replays (default: the chosen plan's)"),
)
def _annotate(given: argparse.Namespace) -> int:
    from nimble_viz.collect.annotate import annotate

    with _files():
        found = annotate(given.file, given.report, given.run_name)
        if given.out is not None:
            _write(found.report, given.out)
        if given.csv is not None:
            found.to_csv(given.csv)
    _say(found.to_text())
    return found.exit_code


def _write(report: Report, out: Path) -> None:
    """Write a report, a page, or another format, as the name asks."""
    if out.suffix == ".nimble":
        report.save(out)
    elif out.suffix == ".html":
        report.to_html(out)
    else:
        report.export(out)


@_command(
    "what changed between two saved reports", _path("old", metavar="OLD"), _path("new", metavar="NEW"), _HTML, _JSON
)
def _diff(given: argparse.Namespace) -> int:
    from nimble_viz.render.report import load

    with _files():
        old, new = load(given.old), load(given.new)
        if given.html is not None:
            new.to_html(given.html, before=old)
    _answer(old.diff(new), given.json)
    return 0


@_command(
    "is a saved report good enough? for CI",
    _path("files", metavar="REPORT", nargs="*", help="one, or several of the same model, each of its own process"),
    _path("--baseline", metavar="OLD", nargs="+", default=[], help="earlier reports of it; three tell more than one"),
    _switch("--any-environment", "compare with a baseline measured elsewhere"),
    _JSON,
    _path("--markdown", metavar="PATH", help="write a Markdown table too"),
    _path("--junit", metavar="PATH", help="write JUnit XML too"),
    options=("rules", Rules),
)
def _gate(given: argparse.Namespace) -> int:
    from nimble_core.utils.files import write_file
    from nimble_viz.render.report import load
    from nimble_viz.render.verdicts import gate

    rules = Rules(**option_values(given, Rules))
    files, old = given.files, given.baseline
    if not files and len(old) == 2:  # --baseline OLD REPORT: of two, the last is no baseline
        files, old = old[1:], old[:1]
    if not files:
        raise InputError("no report is named", fix="python -m nimble_viz gate REPORT ... [--baseline OLD ...]")
    with _files():
        baseline = [load(path) for path in old] or None
        reports = [load(path) for path in files]
        found = gate(reports, rules, baseline=baseline, any_environment=given.any_environment)
        if given.markdown is not None:
            write_file(given.markdown, found.to_markdown().encode())
        if given.junit is not None:
            write_file(given.junit, found.to_junit().encode())
    _answer(found, given.json)
    return found.exit_code


@_command("what works on this machine, what does not, and what to do about it", _JSON)
def _doctor(given: argparse.Namespace) -> int:
    from nimble_viz.cli.doctor import examine

    found = examine()
    _say(found.to_json() if given.json else found.to_text())
    return found.exit_code


@contextmanager
def _files() -> Iterator[None]:
    """Turn an error of reading or writing a file into an InputError."""
    try:
        yield
    except OSError as error:
        named = error.filename and error.strerror
        raise InputError(f"{error.filename}: {error.strerror}" if named else str(error)) from error


def _answer(found: Difference | Gate | Diagnosis, as_json: bool) -> None:
    if as_json:
        _say(found.to_json())
    else:
        _print(found)


def _print(content: RenderableType) -> None:
    from rich.console import Console

    from nimble_viz.render.layout import MAX_WIDTH, MIN_WIDTH, plain

    console = Console()
    if not console.is_terminal:
        _say(plain(content))
        return
    console.width = max(MIN_WIDTH, min(console.width, MAX_WIDTH))
    with console.capture() as drawn:
        console.print(content)
    _say(drawn.get())


def _say(content: str) -> None:
    """Write to standard output and flush it; a reader that has had enough (head, less) is no error."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show µ shows ?
    try:
        sys.stdout.write(content)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries again at exit
        if not isinstance(error, BrokenPipeError):
            raise InputError(f"standard output: {error.strerror}", fix="make room, or write elsewhere") from error


def _parser() -> argparse.ArgumentParser:
    from nimble_viz import __version__

    parser = argparse.ArgumentParser(prog="python -m nimble_viz", description=_ABOUT)
    parser.add_argument("--version", action="version", version=f"nimble_viz {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for run, about, arguments, options in _COMMANDS:
        name = run.__name__.removeprefix("_")
        command = commands.add_parser(name, help=about, description=_ABOUT_GATE if name == "gate" else None)
        for names, how in (*arguments, _switch("--traceback", "show errors with their traceback")):
            command.add_argument(*names, **how)
        if options is not None:
            add_options(command.add_argument_group(options[0]), options[1])
        command.set_defaults(run=run)
    return parser
