"""Read Chrome trace events back: tracks, slices and flows, with times in whole nanoseconds."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from nimble_viz.export.trace import chrome_json
from nimble_viz.render.report import Report

__all__ = ["Slice", "Told", "Track", "ns", "told_of"]

_MORE = re.compile(r" \(\d+\)( \[\d+\])?$")
"""What the name of a lane's further rows ends with."""


@dataclass(frozen=True, slots=True)
class Track:
    """A row; ``lane`` is None for that of the whole run, and for phases."""

    process: int
    name: str
    lane: int | None


@dataclass(frozen=True, slots=True)
class Slice:
    track: int
    start_ns: int
    end_ns: int
    name: str
    category: str
    arguments: dict[str, Any]


@dataclass(slots=True)
class Told:
    """What a file says; flows are ``(kind, source, target)``, the latter places among the slices."""

    processes: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    tracks: list[Track] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    flows: list[tuple[str, int, int]] = field(default_factory=list)
    other: dict[str, str] = field(default_factory=dict)


def ns(us: float) -> int:
    """As trace processors of older versions read a time: truncated."""
    return int(us * 1000.0)


def told_of(report: Report) -> Told:
    """Read what ``report`` is exported as."""
    text = chrome_json(report)
    assert text.isascii()
    whole = json.loads(text)
    found, events, starts = Told(other=whole["otherData"]), whole["traceEvents"], {}
    for event in events:
        if event["name"] == "process_name":
            found.processes.append(event["args"]["name"])
            assert event["pid"] == len(found.processes)
        elif event["name"] == "process_labels":
            found.labels.append(event["args"]["labels"])
        elif event["name"] == "thread_name":
            found.tracks.append(_track(found.tracks, event))
            assert event["tid"] == len(found.tracks)
        elif event["ph"] == "X":
            start, track = ns(event["ts"]), event["tid"] - 1
            assert event["pid"] == found.tracks[track].process + 1
            one = Slice(track, start, start + ns(event["dur"]), event["name"], event["cat"], event["args"])
            found.slices.append(one)
        elif event["ph"] == "s":
            starts[event["id"]] = event
        elif event["ph"] == "f":
            begun = starts.pop(event["id"])
            assert (event["bp"], event["name"], begun["cat"]) == ("e", begun["name"], event["cat"])
            found.flows.append((event["cat"], _at(found, begun), _at(found, event)))
    assert not starts
    return found


def _track(before: list[Track], event: dict[str, Any]) -> Track:
    process, name = event["pid"] - 1, event["args"]["name"]
    lanes = [one.lane for one in before if one.process == process]
    if not lanes or re.fullmatch(r"phases( \(\d+\))?", name):
        return Track(process, name, None)
    last = -1 if lanes[-1] is None else lanes[-1]
    return Track(process, name, last if last >= 0 and _MORE.search(name) else last + 1)


def _at(found: Told, event: dict[str, Any]) -> int:
    place = event["tid"] - 1, ns(event["ts"])
    return next(at for at, one in enumerate(found.slices) if (one.track, one.start_ns) == place)
