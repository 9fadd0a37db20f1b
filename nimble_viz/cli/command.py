"""The command line: ``compare`` or ``diagnose`` a model, ``profile`` a script; ``show``, ``export``, ``annotate``,
``diff``, ``gate``; ``doctor``.

Exit codes: 0 done, 1 the model could not be compared or a replay is wrong, 2 bad usage or input (files that are missing
or damaged and packages that are missing included), 130 interrupted. ``gate``: 1 fail, 3 not decided. ``annotate``: 1 if
not everything matched. ``diagnose``: 1 blockers were found. ``doctor``: 1 something needed is broken. ``profile``: that
of the script.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nimble_core.scheduling.options import Options
from nimble_core.utils.errors import CaptureError, InputError, NimbleError, ReportFileError
from nimble_viz.analysis.labels import visible
from nimble_viz.cli.flags import add_options
from nimble_viz.collect.suggestions import nearest

if TYPE_CHECKING:
    from nimble_viz.cli.doctor import Diagnosis as Health
    from nimble_viz.render.diagnosis import Diagnosis
    from nimble_viz.render.report import Report
    from nimble_viz.render.verdicts import Difference, Gate

__all__ = ["load_factory", "main"]

_NEEDED = ("anywidget", "graphviz", "ipywidgets", "msgspec", "networkx", "nvtx", "plotly", "rich", "scipy", "torch")
"""What pyproject.toml requires: a checkout that was never installed has no metadata to read it from."""

_ABOUT_GATE = (
    "Exit codes: 0 every rule passed, 1 a rule failed, 2 bad usage, an unreadable report or a baseline that does not "
    "compare, 3 not decided: an interval holds the bound, or something was not measured."
)
_ABOUT = "See what ahead-of-time scheduling changes about a PyTorch model."
_FACTORY_FIX = "MODULE:FACTORY: MODULE is importable or a path to a .py file, FACTORY() gives (model, args) or a dict"

_TRAINING = ("target", "loss_fn", "optimizer", "autocast", "scaler", "clip_grad_norm", "accumulate")
_TRAINING_FACTORY = (
    "a dict of model, args and, if needed, kwargs, loss_fn, target, optimizer, autocast, scaler and clip_grad_norm (as "
    "compare takes them; without an optimizer a training step is forward, loss and backward)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (``sys.argv`` if None) and return its exit code.

    Errors that this project raises on purpose are printed as their message, with ``--traceback`` in full, and so are
    missing packages that it requires, whoever imports them; other errors of the user's own code are not caught. A file
    that says nothing, missing or damaged, is never a 1: that is an answer.
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


def load_factory(spec: str) -> Callable[[], Any]:
    """The callable that ``MODULE:FACTORY`` names.

    Args:
        spec: ``MODULE`` is a module's name, or the path of a ``.py`` file; its folder then leads ``sys.path``.

    Raises:
        InputError: not of that form, no such module, or nothing callable of that name in it. Errors inside the module
            are the user's and propagate.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise InputError(f"{spec!r} does not name a factory", fix=_FACTORY_FIX)
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    try:
        factory = getattr(module, name)
    except AttributeError:
        known = nearest(name, _factories(module), most=10, least=0.0)
        fix = f"it has {', '.join(known)}" if known else _FACTORY_FIX
        raise InputError(f"{place} has no {name!r}", fix=fix) from None
    if not callable(factory):
        raise InputError(f"{spec} is not callable", fix=_FACTORY_FIX)
    return typing.cast(Callable[[], Any], factory)


def _factories(module: types.ModuleType) -> list[str]:
    """Functions that the module defines, classes are none; private ones only where there are no others."""
    functions = ((name, value) for name, value in vars(module).items() if inspect.isroutine(value))
    own = [name for name, value in functions if getattr(value, "__module__", "") == module.__name__]
    return [name for name in own if not name.startswith("_")] or own


def _from_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise InputError(f"there is no file {path}", fix=_FACTORY_FIX)
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be imported", fix=_FACTORY_FIX)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _from_name(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise InputError(f"there is no module {name!r}", fix=_FACTORY_FIX) from error


def _call(spec: str, training: bool) -> tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """Model, positional and keyword inputs, and what else ``compare`` needs for training, by name."""
    made = load_factory(spec)()
    match made:
        case {"model": model, **rest} if rest.keys() <= {"args", "kwargs", *_TRAINING}:
            args, kwargs = rest.get("args", ()), rest.get("kwargs") or {}
            if isinstance(args, tuple | list) and isinstance(kwargs, dict):
                return model, tuple(args), kwargs, {key: rest[key] for key in _TRAINING if key in rest and training}
        case (model, tuple() | list() as args) if not training:
            return model, tuple(args), {}, {}
        case (model, tuple() | list() as args, dict() as kwargs) if not training:
            return model, tuple(args), kwargs, {}
    given = type(made).__name__
    if isinstance(made, dict):
        known = ("model", "args", "kwargs", *_TRAINING)
        unknown = ", ".join(repr(key) for key in made if key not in known)
        given = f"{given} of {', '.join(map(str, made))}{f', with unknown {unknown}' if unknown else ''}"
    if training:
        raise InputError(f"{spec} gave {given}, which does not say how to train", fix=f"return {_TRAINING_FACTORY}")
    if isinstance(made, dict) and "training" in made:
        raise InputError(f"{spec} gave {given}", fix="leave 'training' out, and start with --training")
    raise InputError(
        f"{spec} gave {given}, not (model, args) or (model, args, kwargs)",
        fix="return the model, a tuple of its inputs and, if it takes any, a dict of keyword inputs",
    )


def _warn(text: str) -> None:
    """One line on standard error. Names of files and modules may hold what a terminal would obey."""
    print(visible(text), file=sys.stderr, flush=True)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _compare(given: argparse.Namespace) -> int:
    from nimble_viz.collect.progress import Progress

    options = Options(**{field.name: getattr(given, field.name) for field in fields(Options)})
    _require_places(given.save, given.html)
    model, args, kwargs, more = _call(given.factory, given.training)
    more |= {"training": True} if given.training else {}
    from nimble_viz.collect.compare import compare

    progress = Progress() if given.quiet else None
    report = compare(model, *args, kwargs=kwargs, against=given.against, options=options, progress=progress, **more)
    with _files():
        if given.save is not None:
            report.save(given.save)
        if given.html is not None:
            report.to_html(given.html)
    if not given.quiet:
        _print(report)
    if not report.complete:
        _warn(f"interrupted{_kept(given.save)}")
        return 130
    wrong = [check for check in report.checks if check.differs]
    for check in wrong:
        _warn(f"{check.name}: {check.reason}")
    return 1 if wrong else 0


def _diagnose(given: argparse.Namespace) -> int:
    """All that keeps a model from being prepared: a factory's, or the first that a script calls."""
    from nimble_viz.collect.diagnose import diagnose, diagnose_script

    if given.target.endswith(".py"):
        found = diagnose_script(Path(given.target), given.arguments)
    else:
        model, args, kwargs, _ = _call(given.target, False)
        found = diagnose(model, *args, kwargs=kwargs)
    if given.json:
        _say(found.to_json())
    else:
        _print(found)
    return 0 if found.ok else 1


def _profile(given: argparse.Namespace) -> int:
    """A script run under the profiler, or a trace that it exported; exit code and errors are the script's."""
    _require_places(given.save, given.html)
    # Where the command was given, with its output: a script may go elsewhere, and leave another in sys.stdout.
    save, html = (path and path.absolute() for path in (given.save, given.html))
    stdout = sys.stdout
    ended: int | Exception = 0
    if given.script.suffix == ".nimble":
        raise InputError(f"{given.script} is a report", fix=f"python -m nimble_viz show {given.script}")
    is_trace = given.script.name.endswith((".json", ".json.gz"))
    misplaced = _misplaced(given.arguments, given.options)
    if misplaced and not given.quiet:
        names = f"{', '.join(misplaced)} {'was' if len(misplaced) == 1 else 'were'}"
        went = f"{names} ignored: a trace takes none" if is_trace else f"{names} given to {given.script.name}"
        command = f"python -m nimble_viz profile {' '.join(misplaced.values())} {given.script}"
        _warn(f"{went}; options of ours come before it: {command}")
    if is_trace:
        from nimble_viz.collect.from_trace import from_trace

        with _files():
            report = from_trace(given.script)
    else:
        from nimble_viz.collect.profile import profile_script

        counts = {"warmup": given.warmup, "timed": given.timed, "profiled": given.profiled}
        try:
            report, ended = profile_script(given.script, given.arguments, stop=given.stop, **counts)
        finally:
            sys.stdout = stdout
    with _files():
        if save is not None:
            report.save(save)
        if html is not None:
            report.to_html(html)
    if not given.quiet:
        _print(report)
    if not report.complete:
        _warn(f"interrupted{_kept(save)}")
    if isinstance(ended, Exception):
        raise ended
    return ended


def _misplaced(arguments: Sequence[str], options: Mapping[str, str]) -> dict[str, str]:
    """Those of ``options``, by name, that a script is given, and how each is written; after ``--`` all is its own."""
    names = [one.partition("=")[0] for one in takewhile(lambda one: one != "--", arguments)]
    return {name: options[name] for name in names if name in options}


def _kept(save: Path | None) -> str:
    return f"; what was measured is in {save}" if save is not None else ""


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
    _print(report)
    return 0


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
    """As a report, a page, or what else the name asks for."""
    if out.suffix == ".nimble":
        report.save(out)
    elif out.suffix == ".html":
        report.to_html(out)
    else:
        report.export(out)


def _diff(given: argparse.Namespace) -> int:
    from nimble_viz.render.report import load

    with _files():
        found = load(given.old).diff(load(given.new))
    if given.json:
        _say(found.to_json())
    else:
        _print(found)
    return 0


def _gate(given: argparse.Namespace) -> int:
    from nimble_core.utils.files import write_file
    from nimble_viz.analysis.gate import Rules
    from nimble_viz.render.report import load
    from nimble_viz.render.verdicts import gate

    rules = Rules(**{field.name: getattr(given, field.name) for field in fields(Rules)})
    files, old = given.files, given.baseline
    if not files and len(old) == 2:  # --baseline OLD REPORT: of two, the last is no baseline
        files, old = old[1:], old[:1]
    if not files:
        raise InputError("no report is named", fix="python -m nimble_viz gate REPORT ... [--baseline OLD ...]")
    with _files():
        baseline = [load(path) for path in old] or None
        found = gate([load(path) for path in files], rules, baseline=baseline, any_environment=given.any_environment)
        if given.markdown is not None:
            write_file(given.markdown, found.to_markdown().encode())
        if given.junit is not None:
            write_file(given.junit, found.to_junit().encode())
    if given.json:
        _say(found.to_json())
    else:
        _print(found)
    return found.exit_code


def _doctor(given: argparse.Namespace) -> int:
    from nimble_viz.cli.doctor import examine

    found = examine()
    if given.json:
        _say(found.to_json())
        return found.exit_code
    try:
        _print(found)
    except ImportError:  # what rich is missing for is among the findings
        _say(found.to_text())
    return found.exit_code


@contextmanager
def _files() -> Iterator[None]:
    """A file that cannot be read or written is an input error."""
    try:
        yield
    except OSError as error:
        named = error.filename and error.strerror
        raise InputError(f"{error.filename}: {error.strerror}" if named else str(error)) from error


def _print(content: Report | Difference | Gate | Diagnosis | Health) -> None:
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
    """Write to standard output, all of it, now: what goes wrong at exit is nobody's to handle.

    A reader that has had enough (head, less) is no error, and the exit code stays what was found out.
    """
    if sys.stdout is None or sys.stdout.closed:
        raise InputError("standard output is closed", fix="give it a terminal, a file or a pipe")
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
        """As usual, with nothing in it that a terminal would obey."""
        super().error(visible(message))


def _parser() -> argparse.ArgumentParser:
    from nimble_viz import __version__

    parser = _Parser(prog="python -m nimble_viz", description=_ABOUT)
    parser.add_argument("--version", action="version", version=f"nimble_viz {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    compare = commands.add_parser("compare", help="measure a model: eager, one-stream and multi-stream replay")
    compare.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help=f"gives (model, args) or (model, args, kwargs), or {_TRAINING_FACTORY}",
    )
    compare.add_argument(
        "--training",
        action="store_true",
        help=f"compare whole training steps; FACTORY gives {_TRAINING_FACTORY}",
    )
    compare.add_argument("--html", type=Path, metavar="PATH", help="write a self-contained page")
    compare.add_argument("--save", type=Path, metavar="PATH", help="write the report (.nimble)")
    compare.add_argument(
        "--against",
        type=_names,
        default=(),
        metavar="PEER,...",
        help="others to measure, e.g. compile,cuda-graph",
    )
    compare.add_argument("--quiet", action="store_true", help="print nothing but errors")
    add_options(compare.add_argument_group("options of the preparation"))
    compare.set_defaults(run=_compare)

    diagnosed = commands.add_parser("diagnose", help="everything that keeps a model from being prepared, at once")
    diagnosed.add_argument("--json", action="store_true", help="print JSON instead")
    diagnosed.add_argument(
        "target", metavar="MODULE:FACTORY", help="as for compare; or SCRIPT.py, whose first call of a module counts"
    )
    diagnosed.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    diagnosed.set_defaults(run=_diagnose)

    profiled = commands.add_parser("profile", help="where the time goes in a script as it is, or in a profiler's trace")
    profiled.add_argument("--html", type=Path, metavar="PATH", help="write a self-contained page")
    profiled.add_argument("--save", type=Path, metavar="PATH", help="write the report (.nimble)")
    profiled.add_argument(
        "--warmup", type=int, default=3, metavar="N", help="iterations to let go by first (default: 3)"
    )
    profiled.add_argument(
        "--timed", type=int, default=10, metavar="N", help="iterations then timed without the profiler (default: 10)"
    )
    profiled.add_argument("--profiled", type=int, default=3, metavar="N", help="iterations then profiled (default: 3)")
    profiled.add_argument("--stop", action="store_true", help="end the script once that is done")
    profiled.add_argument("--quiet", action="store_true", help="print nothing of ours but errors")
    profiled.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file; or TRACE.json, TRACE.json.gz")
    profiled.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    profiled.set_defaults(run=_profile)

    show = commands.add_parser("show", help="print a saved report")
    show.add_argument("file", type=Path, metavar="FILE")
    show.add_argument("--html", type=Path, metavar="PATH", help="write a self-contained page too")
    show.set_defaults(run=_show)

    export = commands.add_parser(
        "export", help="write a saved report for other tools: Perfetto, Chrome trace, Nsight Systems, CSV"
    )
    export.add_argument("file", type=Path, metavar="REPORT")
    export.add_argument("out", type=Path, metavar="OUT", help="*.pftrace, *.json, *.nsys-rep, a folder or calls.csv")
    export.add_argument(
        "--format",
        choices=("perfetto", "chrome", "nsys", "csv", "dot", "svg", "pdf", "png"),
        help="where OUT's suffix does not say",
    )
    export.set_defaults(run=_export)

    annotated = commands.add_parser(
        "annotate", help="join a profile of Nsight Systems, exported to SQLite, to the calls of a saved report"
    )
    annotated.add_argument("file", type=Path, metavar="PROFILE.sqlite", help="nsys export --type sqlite")
    annotated.add_argument("--report", type=Path, metavar="REPORT", required=True, help="a report of the same model")
    annotated.add_argument(
        "-o", "--out", type=Path, metavar="OUT", help="write the report with the profile's replay: *.nimble, *.html, "
        "or what export writes (*.pftrace, *.json, *.nsys-rep, a folder)",
    )  # fmt: skip
    annotated.add_argument("--csv", type=Path, metavar="PATH", help="write each kernel of each replay with its call")
    annotated.add_argument(
        "--plan", dest="run_name", default="", metavar="NAME", help="whose replays (default: the chosen plan's)"
    )
    annotated.set_defaults(run=_annotate)

    changed = commands.add_parser("diff", help="what changed between two saved reports")
    changed.add_argument("old", type=Path, metavar="OLD")
    changed.add_argument("new", type=Path, metavar="NEW")
    changed.add_argument("--json", action="store_true", help="print JSON instead")
    changed.set_defaults(run=_diff)

    _add_gate(commands.add_parser("gate", help="is a saved report good enough? for CI", description=_ABOUT_GATE))

    doctor = commands.add_parser("doctor", help="what works on this machine, what does not, and what to do about it")
    doctor.add_argument("--json", action="store_true", help="print JSON instead")
    doctor.set_defaults(run=_doctor)

    for command in commands.choices.values():
        command.add_argument("--traceback", action="store_true", help="show errors with their traceback")
    profiled.set_defaults(options=_long_options(profiled))
    return parser


def _long_options(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Its own long options but ``--help``, which scripts have as well, and how each is written: ``--html PATH``."""
    found = {}
    for action in parser._actions:  # argparse has no public list of them
        for name in action.option_strings:
            if name.startswith("--") and name != "--help":
                found[name] = f"{name} {action.metavar}" if action.metavar else name
    return found


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
        "--baseline", type=Path, metavar="OLD", nargs="+", default=[], help="earlier reports of the same model; three "
        "a side tell smaller differences",
    )  # fmt: skip
    parser.add_argument("--any-environment", action="store_true", help="compare with a baseline measured elsewhere")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write a Markdown table too")
    parser.add_argument("--junit", type=Path, metavar="PATH", help="write JUnit XML too")
    add_options(parser.add_argument_group("rules"), Rules)
    parser.set_defaults(run=_gate)
