"""Chrome trace events: JSON that loads, with the slices and arrows of the Trace."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_viz.export.trace import _microseconds, chrome_json, make_trace
from tests.support.sample_reports import HOSTILE, fused_report, sample_report, training_report

REPORTS = {
    "cuda": lambda: sample_report(60),
    "cpu": lambda: sample_report(60, device="cpu"),
    "fused": fused_report,
    "training": training_report,
    "hostile": lambda: sample_report(20, model=HOSTILE, hostile=HOSTILE),
    "5000 calls": lambda: sample_report(5_000, width=8),
    "no timelines": lambda: sample_report(20, timelines=False),
}


def ns(us: float) -> int:
    """As trace processors of older versions read a time: truncated."""
    return int(us * 1000.0)


@pytest.mark.parametrize("name", list(REPORTS))
def test_slices_and_flows_are_those_of_the_trace(name: str) -> None:
    trace = make_trace(REPORTS[name]())
    told = json.loads(chrome_json(trace))
    events: list[dict[str, Any]] = told["traceEvents"]
    slices = [
        (event["tid"] - 1, ns(event["ts"]), ns(event["ts"]) + ns(event["dur"]), event["name"], event["cat"])
        for event in events
        if event["ph"] == "X"
    ]
    assert slices == [(one.track, one.start_ns, one.end_ns, one.name, one.category) for one in trace.slices]
    assert all(event["pid"] == trace.tracks[event["tid"] - 1].process + 1 for event in events if event["ph"] == "X")
    given_ = [event["args"] for event in events if event["ph"] == "X"]
    wanted = [
        {key: list(value) if isinstance(value, tuple) else value for key, value in one.arguments}
        for one in trace.slices
    ]
    assert given_ == wanted
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {index + 1: track.name for index, track in enumerate(trace.tracks)}
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {index + 1: process.name for index, process in enumerate(trace.processes)}
    assert told["otherData"]["model"] == dict(trace.arguments)["model"]


def test_flows_start_and_end_in_their_slices() -> None:
    trace = make_trace(sample_report(60))
    events = json.loads(chrome_json(trace))["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys() == set(range(1, len(trace.flows) + 1))
    assert Counter(event["cat"] for event in starts.values()) == Counter(flow.kind for flow in trace.flows)
    for index, flow in enumerate(trace.flows):
        for event, at in ((starts[index + 1], flow.source), (ends[index + 1], flow.target)):
            assert (event["tid"] - 1, ns(event["ts"])) == (trace.slices[at].track, trace.slices[at].start_ns)
        assert ends[index + 1]["bp"] == "e"


@given(st.integers(0, 10**13))
def test_times_are_read_back_exactly(time_ns: int) -> None:
    us = json.loads(json.dumps(_microseconds(time_ns)))
    assert int(us * 1000.0) == round(us * 1000.0) == time_ns
