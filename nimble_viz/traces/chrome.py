"""Chrome traces as ``torch.profiler`` exports them, decoded into plain events by kind."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from nimble_core.utils.errors import ReportFileError
from nimble_viz.report.file import decode, in_file, unpacked
from nimble_viz.traces.events import PRINT, DeviceEvent, HostEvent

__all__ = ["MAX_BYTES", "Recording", "read_trace"]

MAX_BYTES = 1 << 30
"""A trace that unpacks to more than this is refused."""

_LATEST_US = 1e15
_RUNTIME, _DEVICE = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")
_Key = tuple[str, str]
"""Process and thread of an event."""
_Arrows = Mapping[tuple[_Key, float | None], int]
"""Id of the flow arrow that ends at an event, by its thread and time."""
_A_REPORT = "a report is read by nimble_viz.load(path)"
_TAKE_AGAIN = "export it again: profiler.export_chrome_trace('trace.json.gz')"


@dataclass(frozen=True, slots=True)
class Recording:
    """What a trace file holds; times in nanoseconds from the first event, each kind sorted by start.

    Args:
        operators: those of torch, and the texts of tensors that were marked as such (``PRINT``).
        runtime: calls of the CUDA runtime and driver.
        marks: annotations of the user's and of torch's.
        kernels: what the device did.
        frames: Python functions, ``"model.py(12): forward"``, and modules, ``"nn.Module: Linear_0"``; empty unless
            recorded with ``with_stack=True``.
        backward_of: where each node of autograd's that ran began, to where the operator that made it did: both as
            ``(thread, start_ns)``.
        device: ``"cuda"`` if anything ran on a GPU, or could have.
        device_name: of the GPU, empty if unknown.
        settings: what else the file says about where it was recorded, by name.
        warnings: what was left out, and why.
    """

    operators: tuple[HostEvent, ...]
    runtime: tuple[HostEvent, ...]
    marks: tuple[HostEvent, ...]
    kernels: tuple[DeviceEvent, ...]
    frames: tuple[HostEvent, ...]
    backward_of: Mapping[tuple[int, int], tuple[int, int]]
    device: Literal["cuda", "cpu"]
    device_name: str
    settings: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str | None = None
    name: Any = ""
    pid: Any = None
    tid: Any = None
    ts: float | None = None
    dur: float | None = None
    id: Any = None
    args: dict[str, Any] | None = None


class _File(msgspec.Struct, rename="camel"):
    trace_events: list[_Event]
    device_properties: Any = None
    cuda_runtime_version: Any = msgspec.field(default=None, name="cuda_runtime_version")
    cuda_driver_version: Any = msgspec.field(default=None, name="cuda_driver_version")


_decoder: msgspec.json.Decoder[_File | list[_Event]] = msgspec.json.Decoder(_File | list[_Event])


def read_trace(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> Recording:
    """Read a Chrome trace, gzipped or not, that ``torch.profiler`` exported.

    Of several processes and of several GPUs the busiest is kept, and a warning says so. Kernels without a correlation
    id get that of the flow arrow that ends at them.

    Args:
        path: the file.
        max_bytes: refuse a file that is larger, unpacked.

    Raises:
        ReportFileError: no trace, damaged, or too large; says where.
        OSError: the file cannot be read.
    """
    with in_file(path, fix=_TAKE_AGAIN, instead=_A_REPORT if os.fspath(path).endswith(".nimble") else ""):
        found = decode(_decoder, unpacked(path, max_bytes), "Chrome trace")
        return _recording(found if isinstance(found, _File) else _File(found))


def _recording(file: _File) -> Recording:
    timed = [
        event
        for event in file.trace_events
        if event.ph == "X" and event.cat in ("cpu_op", *_RUNTIME, *_DEVICE, "user_annotation", "python_function")
    ]
    whole = [event for event in timed if _is_whole(event)]
    warnings = []
    if len(whole) < len(timed):
        warnings.append(f"{len(timed) - len(whole)} of {len(timed)} events have no time or no length: left out")
    if not any(event.cat in ("cpu_op", *_DEVICE) for event in whole):
        raise ReportFileError(
            "the trace holds no operators and no kernels",
            fix="profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] while the model runs",
        )
    whole = _busiest(whole, warnings)
    zero = min(event.ts for event in whole if event.ts is not None)
    number: dict[_Key, int] = {}
    for event in whole:
        number.setdefault(_key(event), len(number) + 1)
    arrows: _Arrows = {
        (_key(event), event.ts): _int(event.id)
        for event in file.trace_events
        if event.ph == "f" and event.cat == "ac2g" and event.ts is not None
    }
    whole.sort(key=lambda event: (event.ts or 0.0, -(event.dur or 0.0)))

    def host(*categories: str) -> tuple[HostEvent, ...]:
        """Keep these kinds; a tensor that is printed counts as an operator."""
        own = (one for one in whole if ("cpu_op" if one.name == PRINT else one.cat) in categories)
        return tuple(_host_event(one, zero, number[_key(one)]) for one in own)

    return Recording(
        operators=host("cpu_op"),
        runtime=host(*_RUNTIME),
        marks=host("user_annotation"),
        kernels=tuple(_device_event(event, zero, arrows) for event in whole if event.cat in _DEVICE),
        frames=host("python_function"),
        backward_of=_backward_of(file, zero, number),
        device="cuda" if any(event.cat in (*_DEVICE, "cuda_runtime") for event in whole) else "cpu",
        device_name=_device_name(file.device_properties, whole),
        settings=tuple(
            (name, f"{value // 1000}.{value % 1000 // 10}")
            for name, value in (("cuda", file.cuda_runtime_version), ("cuda of the driver", file.cuda_driver_version))
            if isinstance(value, int) and 0 < value < 10**6
        ),
        warnings=tuple(warnings),
    )


def _span(event: _Event, zero: float) -> tuple[int, int]:
    """Return when an event begins and ends, in nanoseconds from ``zero``."""
    since = (event.ts or 0.0) - zero
    return round(since * 1000), round((since + (event.dur or 0.0)) * 1000)


def _host_event(event: _Event, zero: float, thread: int) -> HostEvent:
    said = event.args or {}
    operator = event.cat == "cpu_op"
    correlation = _int(said.get("External id", said.get("external id")) if operator else said.get("correlation"))
    return HostEvent(str(event.name), *_span(event, zero), thread, correlation)


def _device_event(event: _Event, zero: float, arrows: _Arrows) -> DeviceEvent:
    """Turn an event into one of the device; without a correlation it gets that of the arrow that ends there."""
    said, (start_ns, end_ns) = event.args or {}, _span(event, zero)
    return DeviceEvent(
        name=str(event.name),
        kind=cast(Literal["kernel", "memcpy", "memset"], str(event.cat).removeprefix("gpu_")),
        start_ns=start_ns,
        end_ns=end_ns,
        stream=_int(said.get("stream", event.tid)),
        correlation=_int(said.get("correlation")) or arrows.get((_key(event), event.ts), 0),
        linked=_int(said.get("External id", said.get("external id"))),
    )


def _backward_of(file: _File, zero: float, number: Mapping[_Key, int]) -> dict[tuple[int, int], tuple[int, int]]:
    """Join each node of autograd to the operator that made it, by the arrows between them."""
    made: dict[int, tuple[int, int]] = {}
    ran: dict[int, tuple[int, int]] = {}
    for event in file.trace_events:
        if event.cat == "fwdbwd" and event.ts is not None and _key(event) in number and _in_reach(event.ts):
            side = made if event.ph == "s" else ran
            side[_int(event.id)] = number[_key(event)], _span(event, zero)[0]
    return {at: made[arrow] for arrow, at in ran.items() if arrow in made}


def _is_whole(event: _Event) -> bool:
    """Tell whether an event has a time and a length that a clock gives."""
    return event.ts is not None and _in_reach(event.ts) and event.dur is not None and 0 <= event.dur <= _LATEST_US


def _in_reach(ts: float) -> bool:
    return abs(ts) <= _LATEST_US * 10


def _busiest(events: list[_Event], warnings: list[str]) -> list[_Event]:
    """Keep the process with the most operators and the GPU with the most events."""
    operators = Counter(str(event.pid) for event in events if event.cat == "cpu_op")
    if len(operators) > 1:
        kept, count = operators.most_common(1)[0]
        warnings.append(f"operators of {len(operators)} processes: only process {kept} ({count} operators) is shown")
        events = [event for event in events if event.cat in _DEVICE or str(event.pid) == kept]
    devices = Counter(_device(event) for event in events if event.cat in _DEVICE)
    if len(devices) > 1:
        gpu, count = devices.most_common(1)[0]
        warnings.append(f"kernels on {len(devices)} GPUs: only GPU {gpu} ({count} device events) is shown")
        events = [event for event in events if event.cat not in _DEVICE or _device(event) == gpu]
    return events


def _device(event: _Event) -> int:
    return _int((event.args or {}).get("device", event.pid))


def _device_name(properties: Any, events: list[_Event]) -> str:
    used = next((_device(event) for event in events if event.cat in _DEVICE), 0)
    listed = [one for one in properties if isinstance(one, dict)] if isinstance(properties, list) else []
    named = [one for one in listed if one.get("id", 0) == used] or listed
    return str(named[0].get("name", "")) if named else ""


def _key(event: _Event) -> _Key:
    return str(event.pid), str(event.tid)


def _int(value: Any) -> int:
    """Return a number of the file as an integer, 0 if it is none."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0
