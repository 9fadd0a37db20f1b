"""Timelines written after the fact: what a writer of NVTX receives of a report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nimble_core.profiling.nvtx import call_bytes, call_name, colour
from nimble_core.utils.errors import InputError
from nimble_viz.analysis.labels import label_run
from nimble_viz.export.nsys import write_nsys
from nimble_viz.render.report import Report
from tests.support.nvtx_tool import built, events
from tests.support.sample_reports import fused_report, sample_report, training_report

numpy = pytest.importorskip("numpy", reason="needs numpy, which nvtx needs for payloads")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``written(report)``: the ranges that a backend received."""
    monkeypatch.setenv("NSYS_WRITER_BACKEND", str(built()))

    def write(report: Report) -> list[dict[str, Any]]:
        log = tmp_path / "log.jsonl"
        log.unlink(missing_ok=True)
        monkeypatch.setenv("NVTX_TOOL_LOG", str(log))
        assert report.export(tmp_path / "out.nsys-rep") == tmp_path / "out.nsys-rep"
        heard = events(log)
        assert heard[0] == heard[0] | {"event": "session", "name": str(tmp_path / "out")}
        assert heard[-1]["event"] == "session end"
        return [one for one in heard if one["event"] == "range"]

    return write


@pytest.mark.compiler
@pytest.mark.parametrize("make", [sample_report, fused_report, training_report])
def test_every_span_is_a_range(written: Any, make: Callable[[int], Report]) -> None:
    report = make(40)
    found = written(report)
    assert {one["domain"] for one in found} == {"nimble"}
    for line in report.timelines:
        calls = report.eager_calls if line.run == "eager" else report.program.calls
        first = min(0.0, *(span.start_ns for span in line.spans))
        device = [number for number, lane in enumerate(line.lanes) if lane.kind != "host"]
        wanted = []
        for span in line.spans:
            call = calls[span.call] if span.call is not None else None
            wanted.append(
                {
                    "scope": f"{label_run(report, line.run)} ({line.source})/{line.lanes[span.lane].name}",
                    "start": round(span.start_ns - first),
                    "end": round(span.end_ns - first),
                    "message": call_name(call) if call else span.name,
                    "category": call.phase if call else "host",
                    "color": colour(device.index(span.lane) if span.lane in device else None),
                    "call": call.index if call else -1,
                    "nbytes": call_bytes(call) if call else 0,
                }
            )
        scope = f"{label_run(report, line.run)} ({line.source})/"
        given = [{name: one[name] for name in wanted[0]} for one in found if one["scope"].startswith(scope)]
        assert sorted(given, key=repr) == sorted(wanted, key=repr)
    assert len(found) == sum(len(line.spans) for line in report.timelines)


@pytest.mark.compiler
def test_a_lane_without_spans(written: Any) -> None:
    report = sample_report(12)
    bare = replace(report.timelines[0], spans=())
    assert len(written(replace(report, timelines=(bare, report.timelines[1])))) == len(report.timelines[1].spans)


@pytest.mark.parametrize(
    ("name", "backend", "merge", "said"),
    [
        ("out.qdrep", "", None, "is no report of Nsight Systems"),
        ("out.nsys-rep", "", None, "there is no writer"),
        ("out.nsys-rep", "/nowhere/libNvtxwBackend.so", None, "cannot be loaded"),
        ("out.nsys-rep", "", "profile.nsys-rep", "needs the package nsys_writer"),
        ("out.nsys-rep", "", "out.nsys-rep", "read and written at once"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, backend: str, merge: str | None, said: str
) -> None:
    monkeypatch.setenv("NSYS_WRITER_BACKEND", backend)
    monkeypatch.setitem(sys.modules, "nsys_writer", None)
    with pytest.raises(InputError, match=said):
        write_nsys(sample_report(3), tmp_path / name, merge=tmp_path / merge if merge else None)
    assert list(tmp_path.iterdir()) == []
