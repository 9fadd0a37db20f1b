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
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import CaptureError, InputError, NimbleError, ReportFileError
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


def _diagnose(given: argparse.Namespace) -> int:
    """Find everything that keeps a factory's model from being prepared."""
    from nimble_viz.collect.diagnose import diagnose

    model, args, kwargs, _ = made_by(given.factory)
    found = diagnose(model, *args, kwargs=kwargs)
    _answer(found, given.json)
    return 0 if found.ok else 1


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


def _export(given: argparse.Namespace) -> int:
    from nimble_viz.render.report import load

    with _files():
        load(given.file).export(given.out, given.format)
    return 0


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


def _diff(given: argparse.Namespace) -> int:
    from nimble_viz.render.report import load

    with _files():
        old, new = load(given.old), load(given.new)
        if given.html is not None:
            new.to_html(given.html, before=old)
    _answer(old.diff(new), given.json)
    return 0


def _gate(given: argparse.Namespace) -> int:
    from nimble_core.utils.files import write_file
    from nimble_viz.analysis.gate import Rules
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

    from nimble_viz.render.text import MAX_WIDTH, MIN_WIDTH, plain

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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        """Exit as usual, with nothing in the message that a terminal would obey."""
        super().error(visible(message))


def _parser() -> argparse.ArgumentParser:
    from nimble_viz import __version__

    parser = _Parser(prog="python -m nimble_viz", description=_ABOUT)
    parser.add_argument("--version", action="version", version=f"nimble_viz {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (run, add_arguments, about) in _COMMANDS.items():
        command = commands.add_parser(name, help=about, description=_ABOUT_GATE if run is _gate else None)
        add_arguments(command)
        command.add_argument("--traceback", action="store_true", help="show errors with their traceback")
        command.set_defaults(run=run)
    return parser


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help=f"gives (model, args) or (model, args, kwargs), or {TRAINING_FACTORY}",
    )
    parser.add_argument(
        "--training", action="store_true", help=f"compare whole training steps; FACTORY gives {TRAINING_FACTORY}"
    )
    _add_outputs(parser)
    parser.add_argument(
        "--against", type=_names, default=(), metavar="PEER,...", help="others to measure, e.g. compile,cuda-graph"
    )
    add_options(parser.add_argument_group("options of the preparation"))


def _add_diagnose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="as for compare")
    _add_json(parser)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    _add_outputs(parser)
    add_options(parser, Counts)
    parser.add_argument("--stop", action="store_true", help="end the script once that is done")
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file; or TRACE.json, TRACE.json.gz")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE")
    _add_html(parser)
    _add_full(parser)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="REPORT")
    parser.add_argument("out", type=Path, metavar="OUT", help="*.pftrace, *.json, *.nsys-rep, a folder or calls.csv")
    parser.add_argument(
        "--format",
        choices=("perfetto", "chrome", "nsys", "csv", "dot", "svg", "pdf", "png"),
        help="where OUT's suffix does not say",
    )


def _add_annotate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="PROFILE.sqlite", help="nsys export --type sqlite")
    parser.add_argument("--report", type=Path, metavar="REPORT", required=True, help="a report of the same model")
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="OUT",
        help="write the report with the profile's replay: *.nimble, *.html, or what export writes",
    )
    parser.add_argument("--csv", type=Path, metavar="PATH", help="write each kernel of each replay with its call")
    parser.add_argument(
        "--plan", dest="run_name", default="", metavar="NAME", help="whose replays (default: the chosen plan's)"
    )


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    _add_html(parser)
    _add_json(parser)


def _add_gate(parser: argparse.ArgumentParser) -> None:
    from nimble_viz.analysis.gate import Rules

    parser.add_argument(
        "files",
        type=Path,
        metavar="REPORT",
        nargs="*",
        help="one, or several of the same model, each of its own process",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="OLD",
        nargs="+",
        default=[],
        help="earlier reports of the same model; three a side tell smaller differences",
    )
    parser.add_argument("--any-environment", action="store_true", help="compare with a baseline measured elsewhere")
    _add_json(parser)
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write a Markdown table too")
    parser.add_argument("--junit", type=Path, metavar="PATH", help="write JUnit XML too")
    add_options(parser.add_argument_group("rules"), Rules)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    _add_html(parser)
    parser.add_argument("--save", type=Path, metavar="PATH", help="write the report (.nimble)")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    _add_full(parser)


def _add_full(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--full", action="store_true", help="print everything, not only the first twelve lines")
    _add_json(parser)


def _add_html(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=Path, metavar="PATH", help="write a self-contained page")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead")


_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], Callable[[argparse.ArgumentParser], None], str]] = {
    "compare": (_compare, _add_compare, "measure a model: eager, one-stream and multi-stream replay"),
    "diagnose": (_diagnose, _add_diagnose, "everything that keeps a model from being prepared, at once"),
    "profile": (_profile, _add_profile, "where the time goes in a script as it is, or in a profiler's trace"),
    "show": (_show, _add_show, "print a saved report"),
    "export": (_export, _add_export, "write a saved report for Perfetto, Chrome, Nsight Systems, or as CSV"),
    "annotate": (_annotate, _add_annotate, "join a profile of Nsight Systems (SQLite) to the calls of a saved report"),
    "diff": (_diff, _add_diff, "what changed between two saved reports"),
    "gate": (_gate, _add_gate, "is a saved report good enough? for CI"),
    "doctor": (_doctor, _add_json, "what works on this machine, what does not, and what to do about it"),
}
"""What each command runs, its arguments, and what it is for."""
