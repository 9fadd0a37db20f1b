"""Perfetto traces, read back with the package's own classes."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import pytest

from nimble_core.utils.errors import InputError
from nimble_viz.export.perfetto import perfetto_bytes
from nimble_viz.export.trace import Trace, make_trace
from tests.support.sample_reports import HOSTILE, fused_report, sample_report, training_report

REPORTS = {
    "cuda": lambda: sample_report(60),
    "cpu": lambda: sample_report(60, device="cpu"),
    "fused": fused_report,
    "training": training_report,
    "hostile": lambda: sample_report(20, model=HOSTILE, hostile=HOSTILE + "é漢𝔘"),
    "5000 calls": lambda: sample_report(5_000, width=8),
    "no timelines": lambda: sample_report(20, timelines=False),
}


def protos() -> Any:
    return pytest.importorskip(
        "perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="needs the package perfetto (extra export)"
    )


class Read:
    """A Perfetto trace as a reader of the format sees it: one sequence, interned texts, a stack per track."""

    def __init__(self, data: bytes) -> None:
        self.trace = protos().Trace.FromString(data)
        self.processes: dict[int, tuple[str, tuple[str, ...]]] = {}
        self.tracks: dict[int, tuple[int, str, int]] = {}
        self.slices: list[tuple[int, int, int, str, str, tuple[tuple[str, Any], ...]]] = []
        self.leaving: dict[int, int] = {}
        self.arriving: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._categories: dict[int, str] = {}
        self._keys: dict[int, str] = {}
        self._texts: dict[int, str] = {}
        self._open: dict[int, list[int]] = defaultdict(list)
        now = 0
        for packet in self.trace.packet:
            assert packet.trusted_packet_sequence_id == 1
            if packet.HasField("track_descriptor"):
                self._describe(packet.track_descriptor)
            elif packet.HasField("track_event"):
                assert packet.timestamp >= now
                now = packet.timestamp
                self._event(packet)
        assert not any(self._open.values())

    def _describe(self, one: Any) -> None:
        assert one.uuid not in self.processes.keys() | self.tracks.keys()
        if one.uuid == 0:
            assert one.process_ordering == protos().TrackDescriptor.PROCESS_ORDERING_EXPLICIT
        elif one.HasField("process"):
            self.processes[one.uuid] = one.process.process_name, tuple(one.process.process_labels)
        else:
            self.tracks[one.uuid] = one.parent_uuid, one.name, one.sibling_order_rank

    def _event(self, packet: Any) -> None:
        event, new = packet.track_event, packet.interned_data
        for table, known in (
            (new.event_names, self._names),
            (new.event_categories, self._categories),
            (new.debug_annotation_names, self._keys),
        ):
            for entry in table:
                assert entry.iid not in known
                known[entry.iid] = entry.name
        for entry in new.debug_annotation_string_values:
            self._texts[entry.iid] = entry.str.decode()
        around = self._open[event.track_uuid]
        if event.type == protos().TrackEvent.TYPE_SLICE_END:
            at = around.pop()
            self.slices[at] = (*self.slices[at][:2], packet.timestamp, *self.slices[at][3:])
            return
        assert event.type == protos().TrackEvent.TYPE_SLICE_BEGIN
        at = len(self.slices)
        around.append(at)
        for flow in event.flow_ids:
            assert flow not in self.leaving
            self.leaving[flow] = at
        for flow in event.terminating_flow_ids:
            assert flow in self.leaving, "an arrow must leave before it arrives"
            self.arriving[flow] = at
        (category,) = event.category_iids
        arguments = tuple((self._keys[one.name_iid], self._value(one)) for one in event.debug_annotations)
        name = self._names[event.name_iid]
        self.slices.append((event.track_uuid, packet.timestamp, -1, name, self._categories[category], arguments))

    def _value(self, one: Any) -> Any:
        if one.array_values:
            return tuple(item.int_value for item in one.array_values)
        kind = one.WhichOneof("value")
        return self._texts[one.string_value_iid] if kind == "string_value_iid" else getattr(one, kind)


def check_equal(read: Read, trace: Trace) -> None:
    """Whether ``read`` says all that ``trace`` does, and no more."""
    assert list(read.processes.values()) == [(process.name, process.labels) for process in trace.processes]
    uuids = list(read.processes)
    whole = {track.process: uuid for uuid, track in zip(read.tracks, trace.tracks, strict=True) if track.whole}
    assert list(read.tracks.values()) == [
        (uuids[track.process] if track.whole else whole[track.process], track.name, index)
        for index, track in enumerate(trace.tracks)
    ]
    place = {uuid: index for index, uuid in enumerate(read.tracks)}
    found = sorted(range(len(read.slices)), key=lambda at: place[read.slices[at][0]])
    assert [(place[read.slices[at][0]], *read.slices[at][1:]) for at in found] == [
        (one.track, one.start_ns, one.end_ns, one.name, one.category, one.arguments) for one in trace.slices
    ]
    back = {at: index for index, at in enumerate(found)}
    assert [(back[read.leaving[flow]], back[read.arriving[flow]]) for flow in sorted(read.leaving)] == [
        (flow.source, flow.target) for flow in trace.flows
    ]


@pytest.mark.parametrize("name", list(REPORTS))
def test_round_trip(name: str) -> None:
    trace = make_trace(REPORTS[name]())
    check_equal(Read(perfetto_bytes(trace)), trace)


def test_the_round_trip_can_fail() -> None:
    read = Read(perfetto_bytes(make_trace(sample_report(60))))
    with pytest.raises(AssertionError):
        check_equal(read, make_trace(sample_report(59)))


def test_each_text_is_written_once() -> None:
    data = perfetto_bytes(make_trace(sample_report(600)))
    assert data.count(b"native_layer_norm_kernel<float>") == 1
    assert data.count(b"bytes_written") == 1


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace", None)
    with pytest.raises(InputError, match=r"nimble-viz\[export\]"):
        perfetto_bytes(make_trace(sample_report(4)))
