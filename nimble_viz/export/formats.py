"""One report, one path: which format it is written in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, get_args

from nimble_core.utils.errors import InputError
from nimble_core.utils.files import file_path, write_file
from nimble_viz.export.dot import DRAWN, write_dot
from nimble_viz.export.tables import KINDS, write_table, write_tables
from nimble_viz.export.trace import chrome_json
from nimble_viz.report.data import ReportData

__all__ = ["FORMATS", "Format", "export", "format_of"]

Format = Literal["chrome", "csv", "dot", "svg", "pdf", "png"]

FORMATS: tuple[Format, ...] = get_args(Format)

_SUFFIXES: dict[str, Format] = {
    ".json": "chrome",
    ".gv": "dot",
    **{f".{name}": name for name in FORMATS if name != "chrome"},
}
_KNOWN = (
    "OUT.json (Perfetto, Chrome), a folder or KIND.csv (tables), OUT.gv or OUT.dot (Graphviz), OUT.svg, OUT.pdf or "
    "OUT.png (drawn by Graphviz); a page: report.to_html('OUT.html'), or show REPORT --html OUT.html"
)


def format_of(path: Path) -> Format:
    """Return the format that a path's suffix asks for; a folder, there or not, asks for CSV.

    Raises:
        InputError: a suffix that stands for no format.

    >>> format_of(Path("run.json")), format_of(Path("tables"))
    ('chrome', 'csv')
    """
    if path.is_dir() or not path.suffix:
        return "csv"
    if path.suffix not in _SUFFIXES:
        raise InputError(f"{path.name}: no format has this suffix", fix=f"{_KNOWN}; or give format=")
    return _SUFFIXES[path.suffix]


def export(report: ReportData, path: str | os.PathLike[str], format: str | None = None) -> Path:
    """Write ``report`` to ``path`` in another tool's format, as ``Report.export`` says."""
    target = file_path(path)
    kind = format_of(target) if format is None else format
    if kind not in FORMATS:
        raise InputError(f"there is no format {kind!r}", fix=f"one of {', '.join(FORMATS)}")
    if kind == "csv":
        return _write_csv(report, target)
    if kind == "dot" or kind in DRAWN:
        return write_dot(report, target, kind)

    if not report.timelines:
        raise InputError(
            f"the report of {report.model!r} holds no timelines, so there is nothing to trace",
            fix="export the tables (a folder of CSV files), or take a report of compare() that was not interrupted",
        )
    return write_file(target, chrome_json(report).encode())


def _write_csv(report: ReportData, target: Path) -> Path:
    if target.suffix != ".csv" or target.is_dir():
        return write_tables(report, target)
    if target.stem not in KINDS:
        raise InputError(
            f"{target.name}: a report has several tables", fix=f"give a folder, or name one: {', '.join(KINDS)}"
        )
    return write_table(report, target.stem, target)
