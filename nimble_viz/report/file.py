"""Report files, ``docs/report-format.md``: gzip over typed JSON. Reading needs no torch and runs no code from it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from gzip import BadGzipFile, GzipFile, compress
from pathlib import Path
from typing import TypeVar

import msgspec

from nimble_core.utils.errors import ReportFileError
from nimble_core.utils.files import write_file
from nimble_core.utils.gc_pause import collector_paused
from nimble_viz.report.consistency import check_report
from nimble_viz.report.data import SCHEMA_VERSION, ReportData

__all__ = ["MAX_BYTES", "MAX_RATIO", "SMALL", "Wire", "decode", "in_file", "read", "save", "unpacked"]

MAX_BYTES = 512 << 20
"""A file that unpacks to more than this is refused unread."""

MAX_RATIO = 200
"""A file that unpacks to more than 16 MiB and to more than this many times its size is refused unread: reports shrink
to about a ninth, so a small file should not ask for much memory."""

SMALL = 16 << 20
"""What a file may unpack to however small it is."""

_COMPRESSION = 4
_KIND = "nimble report"
_GZIP = b"\x1f\x8b"
_TAKE_AGAIN = "take the report again, or ask for an undamaged copy"
_A_TRACE = "if torch.profiler wrote it: nimble_viz.from_trace(path), or python -m nimble_viz profile FILE"


class _Head(msgspec.Struct):
    nimble_report: int


class Wire(msgspec.Struct):
    """What a file holds: the version of the format, and the report."""

    nimble_report: int
    report: ReportData


Value = TypeVar("Value")

_head = msgspec.json.Decoder(_Head)
_wire = msgspec.json.Decoder(Wire)


def save(report: ReportData, path: str | os.PathLike[str]) -> Path:
    """Write ``report`` to ``path`` and return the path, as ``Report.save`` says; the same report gives the same bytes.

    They are decoded once before they are written, so what is written is readable.
    """
    try:
        data = msgspec.json.encode(Wire(SCHEMA_VERSION, check_report(report)))
        with collector_paused():  # a report is a great many new values without a cycle
            _decode(data)
    except ReportFileError as error:
        raise ReportFileError(f"this report cannot be saved: {error.what}", where=error.where, fix=error.fix) from error
    except (TypeError, ValueError, OverflowError) as error:
        what = f"this report cannot be saved: it holds a value that JSON cannot ({error})"
        raise ReportFileError(what) from error
    return write_file(path, compress(data, _COMPRESSION, mtime=0))


def read(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> ReportData:
    """Read a report that ``save`` wrote; whatever the file holds, return a consistent report or raise.

    Args:
        path: the file.
        max_bytes: refuse a file that unpacks to more.

    Raises:
        ReportFileError: damaged, hostile, not a report, or written by a newer version; says which, and where.
        OSError: the file cannot be read; ``FileNotFoundError`` if there is none.
    """
    trace = os.fspath(path).endswith((".json", ".json.gz"))
    with in_file(path, fix=_TAKE_AGAIN, instead=_A_TRACE if trace else ""):
        data = unpacked(path, max_bytes)
        with collector_paused():  # a report is a great many new values without a cycle
            return check_report(_decode(data))


@contextmanager
def in_file(path: str | os.PathLike[str], *, fix: str, instead: str = "") -> Iterator[None]:
    """Add the file's name to a ReportFileError raised inside, ``fix`` where it has none, or ``instead`` of its own."""
    try:
        yield
    except ReportFileError as error:
        name = os.fspath(path)
        place = f"{name}, {error.where}" if error.where else name
        raise ReportFileError(error.what, where=place, fix=instead or error.fix or fix) from error


def unpacked(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a file, and unpack it if it is a gzip file, without holding more in memory than is allowed.

    Raises:
        ReportFileError: it is damaged, cut short, larger than ``max_bytes``, or unpacks to more than ``MAX_RATIO``
            times its size.
        OSError: it cannot be read.
    """
    with open(os.fspath(path), "rb") as file:  # no number, which open() takes for a descriptor
        packed = file.peek(len(_GZIP)).startswith(_GZIP)
        size = os.fstat(file.fileno()).st_size
        most = min(max_bytes, max(SMALL, MAX_RATIO * size)) if packed else max_bytes
        try:
            with GzipFile(fileobj=file) if packed else file as content:
                data = content.read(most + 1) if size <= max_bytes else b""
        except (EOFError, zlib.error, BadGzipFile) as error:
            raise ReportFileError(f"the file is damaged or cut short: {error}") from error
    if len(data) > most and most < max_bytes:
        raise ReportFileError(
            f"the file unpacks to more than {MAX_RATIO} times its size, which no report or trace does",
            fix="do not trust it; if you do, unpack it yourself (gzip -d)",
        )
    if len(data) > most or size > max_bytes:
        raise ReportFileError(
            f"the file is larger than {max_bytes:,} bytes",
            fix="if you trust it, give max_bytes=…; a trace of fewer iterations is smaller (torch.profiler.schedule)",
        )
    return data


def decode(decoder: msgspec.json.Decoder[Value], data: bytes, kind: str) -> Value:
    """Decode JSON; raise ReportFileError that says what and where if it is not ``kind``."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at ")
        raise ReportFileError(f"not a {kind}, or damaged: {what}", where=place.strip("`")) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportFileError(f"not a {kind}: it does not hold JSON, or is cut short: {error}") from error


def _decode(data: bytes) -> ReportData:
    """Decode the report in ``data``: its types are right, its consistency is not yet checked."""
    version = decode(_head, data, _KIND).nimble_report
    if version > SCHEMA_VERSION:
        raise ReportFileError(
            f"the report has format {version}, this nimble_viz reads up to {SCHEMA_VERSION}",
            fix="upgrade nimble_viz, or save the report again with this version",
        )
    report = decode(_wire, data, _KIND).report
    if version < 1 or report.schema_version != version:
        raise ReportFileError(f"the format is given as {version} and as {report.schema_version}")
    return report
