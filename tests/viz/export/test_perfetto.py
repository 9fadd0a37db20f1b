"""Perfetto traces, read back with the package's own classes."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nimble_core.utils.errors import InputError
from nimble_viz.export.trace import Slice, Trace, make_trace, perfetto_bytes
from nimble_viz.render.report import Report
from tests.support.sample_reports import HOSTILE, fused_report, sample_report, training_report

REPORTS: dict[str, Callable[[], Report]] = {
    "fused": fused_report,
    "training": training_report,
    "hostile": lambda: sample_report(20, model=HOSTILE, hostile=HOSTILE + "é漢𝔘"),
    "no timelines": lambda: sample_report(20, timelines=False),
}


def read_back(trace: Trace) -> tuple[list[str], list[tuple[str, str]], list[Slice], set[tuple[Slice, Slice]]]:
    """What a reader of the format sees: processes, tracks below what, slices by track, and pairs that flows join.

    Times never decrease, and each track is a stack.
    """
    protos: Any = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="needs perfetto")
    packets = protos.Trace.FromString(perfetto_bytes(trace)).packet
    described = [one.track_descriptor for one in packets if one.HasField("track_descriptor")]
    names = {one.uuid: one.process.process_name if one.HasField("process") else one.name for one in described}
    assert len(names) == len(described)
    tracks = [one.uuid for one in described if one.uuid and not one.HasField("process")]
    around: dict[int, list[int]] = defaultdict(list)
    slices: list[Slice] = []
    ends: dict[int, list[int]] = defaultdict(list)
    now = 0
    for packet in (one for one in packets if one.HasField("track_event")):
        event = packet.track_event
        assert packet.timestamp >= now
        now = packet.timestamp
        if event.type == protos.TrackEvent.TYPE_SLICE_END:
            at = around[event.track_uuid].pop()
            slices[at] = replace(slices[at], end_ns=now)
            continue
        around[event.track_uuid].append(len(slices))
        for flow in (*event.flow_ids, *event.terminating_flow_ids):
            ends[flow].append(len(slices))
        arguments = []
        for one in event.debug_annotations:
            kind = one.WhichOneof("value")
            value = tuple(item.int_value for item in one.array_values) or getattr(one, kind or "")
            arguments.append((one.name, value))
        track = tracks.index(event.track_uuid)
        slices.append(Slice(track, now, -1, event.name, event.categories[0], tuple(arguments)))
    assert not any(around.values())
    parents = [(names[one.parent_uuid], one.name) for one in described if one.uuid in tracks]
    pairs = {(slices[source], slices[target]) for source, target in ends.values()}
    processes = [one.process.process_name for one in described if one.HasField("process")]
    return processes, parents, sorted(slices, key=lambda one: one.track), pairs


@pytest.mark.parametrize("name", list(REPORTS))
def test_round_trip(name: str) -> None:
    trace = make_trace(REPORTS[name]())
    processes, parents, slices, flows = read_back(trace)
    assert processes == [process.name for process in trace.processes]
    assert parents == [(processes[one.process] if one.whole else "run", one.name) for one in trace.tracks]
    assert slices == list(trace.slices)
    assert flows == {(trace.slices[flow.source], trace.slices[flow.target]) for flow in trace.flows}


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace", None)
    with pytest.raises(InputError, match=r"nimble-viz\[export\]"):
        perfetto_bytes(make_trace(sample_report(4)))
