"""Chrome trace-event JSON: opens in ``chrome://tracing`` and ui.perfetto.dev, needs no package.

Source: "Trace Event Format", the Chromium project: complete events (``X``), flows (``s``, ``f``), metadata (``M``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from nimble_viz.export.trace import Argument, Trace

__all__ = ["chrome_events", "chrome_json"]


def chrome_json(trace: Trace) -> str:
    """Return the trace as one JSON object; ASCII, no NaN."""
    told = {"traceEvents": list(chrome_events(trace)), "displayTimeUnit": "ns", "otherData": dict(trace.arguments)}
    return json.dumps(told, separators=(",", ":"), allow_nan=False)


def chrome_events(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield metadata, slices by track, then flows.

    ``pid`` is the process and ``tid`` the track, both from 1.

    ``ts`` and ``dur`` are microseconds, of which every reader gets the whole nanoseconds back. A flow starts and ends
    with the start of the slices that it joins.
    """
    for index, process in enumerate(trace.processes):
        for name, value in (
            ("process_name", {"name": process.name}),
            ("process_labels", {"labels": ", ".join(process.labels)}),
            ("process_sort_index", {"sort_index": index}),
        ):
            yield {"ph": "M", "name": name, "pid": index + 1, "args": value}
    for index, track in enumerate(trace.tracks):
        place = {"pid": track.process + 1, "tid": index + 1}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": track.name}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": index}}
    for one in trace.slices:
        yield {
            "ph": "X",
            "name": one.name,
            "cat": one.category,
            **_place(trace, one.track),
            "ts": _microseconds(one.start_ns),
            "dur": _microseconds(one.end_ns - one.start_ns),
            "args": _arguments(one.arguments),
        }
    for index, flow in enumerate(trace.flows):
        for phase, at in (("s", flow.source), ("f", flow.target)):
            one = trace.slices[at]
            event = {"ph": phase, "id": index + 1, "name": flow.kind, "cat": flow.kind, **_place(trace, one.track)}
            yield event | {"ts": _microseconds(one.start_ns)} | ({"bp": "e"} if phase == "f" else {})


def _place(trace: Trace, track: int) -> dict[str, int]:
    return {"pid": trace.tracks[track].process + 1, "tid": track + 1}


def _arguments(arguments: tuple[Argument, ...]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in arguments}


def _microseconds(ns: int) -> int | float:
    """Return microseconds that give ``ns`` again when multiplied by 1000 and truncated.

    >>> _microseconds(12_000), _microseconds(1_500)
    (12, 1.5)
    """
    whole, rest = divmod(ns, 1000)
    if not rest:
        return whole
    us = ns / 1000
    return us if int(us * 1000) == ns else math.nextafter(us, math.inf)
