"""Run a script as it is under ``profile``."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nimble_core.utils.errors import InputError
from nimble_viz.collect.profile import Profiling
from nimble_viz.collect.sampler import Counts
from nimble_viz.render.report import Report

__all__ = ["profile_script"]


def profile_script(
    path: Path, arguments: list[str], counts: Counts, *, stop: bool = False
) -> tuple[Report, int | Exception]:
    """Run a script under ``profile``; return a Report, and its exit code or the error that ended it.

    Args:
        path: the script; it runs as ``__main__``.
        arguments: its ``sys.argv[1:]``.
        counts: iterations to let go by, to time and to profile.
        stop: end the script once that is done.

    Raises:
        InputError: no such script, no Python, or it ran no operator. Errors of a script that ran none propagate.
        SystemExit: it ran no operator, and ended with an exit code of its own.
    """
    if not path.is_file():
        raise InputError(f"there is no file {path}", fix="give the path of a Python script, then its arguments")
    with path.open("rb") as file:
        if b"\0" in file.read(4096):
            raise InputError(f"{path} is no Python script", fix=f"if it is a report: python -m nimble_viz show {path}")
    code, complete = 0, True
    run = Profiling(counts, subject=path.name, stop=stop)
    try:
        with _script_arguments(path, arguments), run:
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
                if isinstance(ended.code, str):
                    print(ended.code, file=sys.stderr)
            except KeyboardInterrupt:
                code, complete = 130, False
    except Exception as error:
        if run.found:
            return run.report, error
        if code:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(code) from error
        raise
    return replace(run.report, complete=complete), code


@contextmanager
def _script_arguments(path: Path, arguments: list[str]) -> Iterator[None]:
    """Set ``sys.argv`` and ``sys.path`` as for a script that is run by itself; put them back afterwards."""
    argv, first = sys.argv, sys.path[:]
    sys.argv = [str(path), *arguments]
    sys.path[:1] = [str(path.resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, first
