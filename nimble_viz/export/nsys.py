"""A report's timelines as NVTX ranges with their measured times, written after the fact, for Nsight Systems."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nimble_core.ir.program import Call
from nimble_core.ir.timeline import Timeline
from nimble_core.profiling.nvtx import DOMAIN, call_bytes, call_name, colour
from nimble_core.utils.errors import InputError
from nimble_viz.analysis.labels import label_run
from nimble_viz.report.data import ReportData

__all__ = ["write_nsys", "write_timelines"]

_SUFFIX = ".nsys-rep"
_BACKEND = "NSYS_WRITER_BACKEND"
_NO_BACKEND = (
    "pip install <nsight-systems>/target-linux-x64/python/packages/nsys_writer, and set "
    f"{_BACKEND}=<nsight-systems>/host-linux-x64/libNvtxwBackend.so"
)


def write_nsys(
    report: ReportData, path: str | os.PathLike[str], *, merge: str | os.PathLike[str] | None = None
) -> Path:
    """Write the timelines of ``report`` to ``path``, a report of Nsight Systems.

    Args:
        report: with timelines.
        path: ``*.nsys-rep``.
        merge: a report of Nsight Systems that is copied to ``path`` with the timelines beside what it holds; they
            start where it starts. Needs the package ``nsys_writer``.

    Returns:
        ``path``.

    Raises:
        InputError: another suffix, no timelines, or no writer: ``nsys_writer`` or, without ``merge``, nvtx 0.2.16 and
            the environment variable ``NSYS_WRITER_BACKEND``.
        OSError: it cannot be written.
    """
    target = Path(path)
    if target.suffix != _SUFFIX:
        raise InputError(f"{target.name} is no report of Nsight Systems", fix=f"a name that ends in {_SUFFIX}")
    if not report.timelines:
        raise InputError(f"the report of {report.model!r} holds no timelines", fix="take one of compare()")
    if merge is not None and Path(merge).resolve() == target.resolve():
        raise InputError(f"{target} would be read and written at once", fix="write to another file")
    with _session(str(target.with_suffix("")), merge) as session:
        write_timelines(report, session)
    return target


def write_timelines(report: ReportData, session: Any) -> int:
    """Write every span of the report's timelines to ``session`` as a range; return how many.

    ``session`` is one of ``nvtx.writer`` or ``nsys_writer`` that has begun. docs/nsight.md says what a range holds; its
    call is -1 where it has none. Times are nanoseconds since the start of the run.
    """
    domain = session.get_domain(DOMAIN)
    written = 0
    for line in report.timelines:
        calls = report.eager_calls if line.run == "eager" else report.program.calls
        doubt = "" if line.reliable else ", UNRELIABLE"
        run = domain.get_scope(f"{label_run(report, line.run)} ({line.source}{doubt})")
        device = [number for number, lane in enumerate(line.lanes) if lane.kind != "host"]
        for number, lane in enumerate(line.lanes):
            rows = _rows(line, number, calls, colour(device.index(number) if number in device else None))
            stream = session.create_stream(
                f"{line.run}, {number}: {lane.name}", domain=domain, scope=domain.get_scope(lane.name, parent=run)
            )
            with stream:
                _write(domain, stream, rows)
            written += len(rows)
    return written


Row = tuple[int, int, str, str, int, int, int]
"""Start, end, name, category, colour, call, bytes."""


def _rows(line: Timeline, lane: int, calls: tuple[Call, ...], argb: int) -> list[Row]:
    shift = -min(0.0, min((span.start_ns for span in line.spans), default=0.0))
    rows = []
    for span in line.spans:
        if span.lane == lane:
            call = None if span.call is None else calls[span.call]
            name, category = (call_name(call), str(call.phase)) if call else (span.name, "host")
            index, nbytes = (call.index, call_bytes(call)) if call else (-1, 0)
            times = round(span.start_ns + shift), round(span.end_ns + shift)
            rows.append((*times, name, category, argb, index, nbytes))
    return sorted(rows, key=lambda row: row[0])


def _write(domain: Any, stream: Any, rows: list[Row]) -> None:
    """Write ranges, which may overlap, in one batch."""
    if not rows:
        return
    import numpy
    from nvtx import EntryKind, EventKind, PayloadEntryType, numpy_dtype

    strings = {name: domain.get_registered_string(name).handle for name in {row[2] for row in rows}}
    categories = {name: domain.get_category_id(name) for name in dict.fromkeys(row[3] for row in rows)}
    text = PayloadEntryType.REGISTERED_STRING
    fields = [
        ("start", numpy_dtype(numpy.int64, entry_kind=EntryKind.RANGE_BEGIN)),
        ("end", numpy_dtype(numpy.int64, entry_kind=EntryKind.RANGE_END)),
        ("message", numpy_dtype(numpy.uintp, entry_kind=EntryKind.MESSAGE, entry_type=text)),
        ("category", numpy_dtype(numpy.uint32, entry_type=PayloadEntryType.CATEGORY)),
        ("color", numpy_dtype(numpy.uint32, entry_type=PayloadEntryType.COLOR_ARGB)),
        ("call", numpy.int64),
        ("nbytes", numpy.int64),
    ]
    schema = domain.get_schema(numpy.dtype(fields), kind=EventKind.RANGE_STARTEND)
    stream.write_event_batch(
        schema,
        [
            (start, end, strings[name], categories[category], argb, call, nbytes)
            for start, end, name, category, argb, call, nbytes in rows
        ],
    )


def _session(name: str, merge: str | os.PathLike[str] | None) -> Any:
    try:
        import nsys_writer
    except ImportError:
        if merge is not None:
            raise InputError("merging reports needs the package nsys_writer", fix=_NO_BACKEND) from None
    else:
        more = {} if merge is None else {"report_merge": os.fspath(merge)}
        return nsys_writer.Session(name, time_base=nsys_writer.TimeBase.RELATIVE, **more)
    backend = os.environ.get(_BACKEND, "")
    if not backend:
        raise InputError("there is no writer of Nsight Systems reports", fix=_NO_BACKEND)
    from nvtx import writer

    try:
        return writer.Session(name, backend=writer.load_backend(backend))
    except (OSError, writer.WriterError) as error:
        raise InputError(f"{_BACKEND}={backend} cannot be loaded: {error}", fix=_NO_BACKEND) from error
