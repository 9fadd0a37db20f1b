"""A report in a few thousand characters, for programs: what was found, what bounds it, what to do next."""

from __future__ import annotations

import math
from typing import Any, Literal

from nimble_viz.analysis.advice import advice
from nimble_viz.analysis.labels import label_run, shortened
from nimble_viz.analysis.overhead import computing, grouped
from nimble_viz.analysis.phases import spent
from nimble_viz.analysis.tiles import verdict
from nimble_viz.report.data import ReportData

__all__ = ["brief"]

_SCHEMA = 1
_ROWS = 5
_RUNS = 12
_CHARACTERS = 200


def brief(report: ReportData) -> dict[str, Any]:
    """Return what a reader needs who sees nothing else, as JSON can hold it; times in µs, shares from 0 to 1.

    At most 12 kB. ``docs/report-format.md`` describes each key.
    """
    found = spent(report)
    return {
        "schema": _SCHEMA,
        "model": _cut(report.model),
        "device": _cut(report.environment.device_name),
        "complete": report.complete,
        "verdict": verdict(report),
        "bound": found["bound"] if found else None,
        "spent": {row["name"]: _us(row["ns"]) for row in found["rows"]} if found else None,
        "chosen": report.chosen,
        "runs": [_run(report, one.name) for one in report.measurements[:_RUNS]],
        "next": [
            {"do": one.what, "run": one.run, "at_most_us": _us(one.gain_ns), "basis": one.basis, "why": _cut(one.why)}
            for one in advice(report).changes[:_ROWS]
        ],
        "computes": {"operators": _computing(report, "operator"), "modules": _computing(report, "module")},
        "overhead": _overhead(report),
        "waits": _waits(report),
        "equal": [{"run": one.name, "passed": one.passed, "reason": _cut(one.reason)} for one in report.checks[:_RUNS]],
        "warnings": [_cut(one) for one in report.warnings[:_ROWS]],
        "torch": report.environment.torch,
    }


def _run(report: ReportData, name: str) -> dict[str, Any]:
    taken = report.measurement(name)
    assert taken is not None
    over = report.ratio(name) if name != "eager" else None
    return {
        "name": name,
        "what": label_run(report, name),
        "median_us": _us(taken.median_ns),
        "spread": round(taken.spread, 4),
        "stable": taken.stable,
        "peer": any(peer.name == name for peer in report.peers),
        "over_eager": over
        and {
            "ratio": _finite(over.value),
            "low": _finite(over.low),
            "high": _finite(over.high),
            "verdict": over.verdict,
        },
    }


def _computing(report: ReportData, by: Literal["operator", "module"]) -> list[dict[str, Any]]:
    return [
        {"name": _cut(row["name"]), "calls": row["calls"], "us": _us(row["work"]), "share": round(row["share"], 4)}
        for row in computing(report, by)[:_ROWS]
    ]


def _overhead(report: ReportData) -> dict[str, Any] | None:
    profile = report.overhead
    if profile is None:
        return None
    return {
        "us": _us(profile.overhead_ns),
        "share": round(profile.overhead_ns / profile.profiled_ns, 4) if profile.profiled_ns else None,
        "device_idle": round(profile.device_idle_share, 4),
        "operators": [
            {"name": _cut(row["name"]), "calls": row["calls"], "us": _us(row["overhead"])}
            for row in grouped(report, "operator")[:_ROWS]
        ],
    }


def _waits(report: ReportData) -> list[dict[str, Any]]:
    found = sorted(report.overhead.host_syncs, key=lambda one: -one.total_ns) if report.overhead else []
    return [
        {"kind": one.kind, "count": one.count, "us": _us(one.total_ns), "where": _cut(one.source)}
        for one in found[:_ROWS]
    ]


def _us(ns: float) -> float:
    return round(ns / 1e3, 3)


def _finite(value: float) -> float | None:
    """JSON knows no infinity."""
    return round(value, 4) if math.isfinite(value) else None


def _cut(text: str) -> str:
    return shortened(text, _CHARACTERS)
