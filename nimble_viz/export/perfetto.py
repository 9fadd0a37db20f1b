"""Perfetto's own trace format (protobuf): opens in ui.perfetto.dev, and in its trace processor as SQL tables.

Source: Perfetto's documentation, "Writing TrackEvent Protos Synthetically".
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from nimble_core.utils.errors import InputError
from nimble_viz.export.trace import Trace, Value, edges_in_time

__all__ = ["perfetto_bytes"]

_SEQUENCE = 1


def perfetto_bytes(trace: Trace) -> bytes:
    """Serialize the trace as a ``perfetto.protos.Trace``.

    A run is a process, its first track a child of it, and the others children of that one: viewers keep the order of
    tracks below a track, not below a process. A slice is a begin and an end, in the order of time.

    Raises:
        InputError: the ``perfetto`` package is not installed.
    """
    protos = _protos()
    out = protos.Trace()
    packet = _packet(out)
    packet.sequence_flags = protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    packet.first_packet_on_sequence = True
    packet.track_descriptor.uuid = 0
    packet.track_descriptor.process_ordering = protos.TrackDescriptor.PROCESS_ORDERING_EXPLICIT
    _write_tracks(trace, protos, out)
    _write_slices(trace, protos, out)
    return bytes(out.SerializeToString())


def _write_tracks(trace: Trace, protos: Any, out: Any) -> None:
    for index, process in enumerate(trace.processes):
        descriptor = _packet(out).track_descriptor
        descriptor.uuid = _process_uuid(index)
        descriptor.description = "\n".join((trace.title, *process.labels))
        descriptor.process.pid = index + 1
        descriptor.process.process_name = process.name
        descriptor.process.process_labels.extend(process.labels)
        descriptor.sibling_order_rank = index
    around = 0
    for index, track in enumerate(trace.tracks):
        descriptor = _packet(out).track_descriptor
        descriptor.uuid = _track_uuid(trace, index)
        if track.whole:
            descriptor.parent_uuid = _process_uuid(track.process)
            descriptor.child_ordering = protos.TrackDescriptor.EXPLICIT
            around = descriptor.uuid
        else:
            descriptor.parent_uuid = around
        descriptor.name = track.name
        descriptor.sibling_order_rank = index


def _write_slices(trace: Trace, protos: Any, out: Any) -> None:
    leaving: dict[int, list[int]] = defaultdict(list)
    arriving: dict[int, list[int]] = defaultdict(list)
    for index, flow in enumerate(trace.flows):
        leaving[flow.source].append(index + 1)
        arriving[flow.target].append(index + 1)
    for time_ns, index, begins in edges_in_time(trace):
        one = trace.slices[index]
        packet = _packet(out)
        packet.timestamp = time_ns
        event = packet.track_event
        event.track_uuid = _track_uuid(trace, one.track)
        if not begins:
            event.type = protos.TrackEvent.TYPE_SLICE_END
            continue
        event.type = protos.TrackEvent.TYPE_SLICE_BEGIN
        event.name = one.name
        event.categories.append(one.category)
        event.flow_ids.extend(leaving[index])
        event.terminating_flow_ids.extend(arriving[index])
        for name, value in one.arguments:
            _set_value(event.debug_annotations.add(name=name), value)


def _set_value(annotation: Any, value: Value) -> None:
    if isinstance(value, str):
        annotation.string_value = value
    elif isinstance(value, bool):
        annotation.bool_value = value
    elif isinstance(value, int):
        annotation.int_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    else:
        for item in value:
            annotation.array_values.add(int_value=item)


def _packet(out: Any) -> Any:
    packet = out.packet.add()
    packet.trusted_packet_sequence_id = _SEQUENCE
    return packet


def _process_uuid(process: int) -> int:
    return process + 1


def _track_uuid(trace: Trace, track: int) -> int:
    return len(trace.processes) + track + 1


def _protos() -> Any:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError as error:
        raise InputError(
            f"a Perfetto trace needs the package perfetto: {error}",
            fix="pip install 'nimble-viz[export]', or export to .json, which needs no package",
        ) from error
    return perfetto_trace_pb2
