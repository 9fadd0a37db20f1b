"""Reports that are not consistent in themselves: refused when read and when saved, by the name of the field."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nimble_core.utils.errors import ReportFileError
from nimble_viz import load
from nimble_viz.report.consistency import MAX_SOURCE, check_report
from tests.support.sample_reports import fused_report, profile_report, sample_report

_SAMPLES = {
    "plain": lambda: sample_report(12),
    "fused": lambda: fused_report(20),
    "profile": profile_report,
}

_DAMAGE: tuple[tuple[str, str, Any], ...] = (
    ("plain", "program.calls[3].index", 4),
    ("plain", "program.inputs[0].offset", 10**30),
    ("plain", "program.storages[0].nbytes", -1),
    ("plain", "graph.size", 13),
    ("plain", "environment.others", 1e30),
    ("plain", "timelines[1].streams", [7]),
    ("plain", "work.eager", [1]),
    ("plain", "work.processors.count", 0),
    ("plain", "candidates[0].measurement.samples_ns[0]", 1e30),
    ("plain", "memory.eager_peak", -1),
    ("plain", "sources[0].first", 0),
    ("profile", "sampling.loader_ns", 1e30),
    ("profile", "overhead.calls[0].tail_ns", 1e30),
)
"""A sample, one of its fields, and a value that is wrong there; the error names the field."""

_MISFITS: tuple[tuple[str, str, Any, str], ...] = (
    ("plain", "program.calls[2].accesses[0].ref.storage", 10**6, "program.calls[2].accesses"),
    ("plain", "program.inputs[0].strides", [1], "program.inputs"),
    ("plain", "graph.edges[0]", [1, 0], "graph.edges"),
    ("plain", "graph.kinds", ["RAW"], "graph.kinds"),
    ("plain", "graph.meg[0]", [0, 11], "graph.meg"),
    ("plain", "costs.ns", [1.0], "costs.ns"),
    ("plain", "costs.kernels[0].call", 12, "costs.kernels"),
    ("plain", "costs.demand[3]", 1.5, "costs.demand"),
    ("plain", "critical_path", [2, 1], "critical_path"),
    ("plain", "schedules[0].stream[0]", 5, "schedules[0].stream"),
    ("plain", "schedules[1].order[0]", 1, "schedules[1].order"),
    ("plain", "schedules[1].syncs[0]", [0, 12], "schedules[1].syncs"),
    ("plain", "measurements[0].rounds", [0, 1], "measurements[0].rounds"),
    ("plain", "measurements[1].rounds", [*range(47), 46], "measurements[1].rounds"),
    ("plain", "overhead.calls[0].call", 12, "overhead.calls"),
    ("plain", "timelines[0].spans[1].lane", 9, "timelines[0].spans[1]"),
    ("plain", "timelines[2].check", {"expected": 12, "seen": -1}, "timelines[2].check.seen"),
    ("plain", "sources[0].lines", ["x" * MAX_SOURCE], "sources[0]"),
    ("fused", "program.calls[3].eager", [20], "program.calls[3].eager"),
    ("fused", "eager.calls[3].eager", [0], "eager.calls[3].eager"),
    ("fused", "timelines[1].spans[1].call", 19, "timelines[1].spans[1]"),
    ("profile", "overhead.phases[0].phase", "lunch", "$.report.overhead.phases[0].phase"),
)
"""Likewise where values do not fit each other, or the types: with the place that the error names."""


def _put(tree: dict[str, Any], place: str, value: Any) -> None:
    """Put ``value`` at ``place`` of a report's JSON, e.g. ``"graph.edges[0]"``; one past a list's end appends."""
    *parents, last = [int(step) if step.isdecimal() else step for step in re.findall(r"\w+", place)]
    holder: Any = tree["report"]
    for key in parents:
        holder = holder[key]
    if isinstance(holder, list) and last == len(holder):
        holder.append(value)
    else:
        holder[last] = value


@pytest.mark.parametrize(("sample", "place", "value", "named"), [*((*row, row[1]) for row in _DAMAGE), *_MISFITS])
def test_damage_is_named(tmp_path: Path, sample: str, place: str, value: Any, named: str) -> None:
    path = _SAMPLES[sample]().save(tmp_path / "report.nimble")
    tree = json.loads(gzip.decompress(path.read_bytes()))
    _put(tree, place, value)
    path.write_bytes(gzip.compress(json.dumps(tree).encode()))
    with pytest.raises(ReportFileError) as caught:
        load(path)
    assert caught.value.where == f"{path}, {named}"


def test_an_inconsistent_report_is_not_saved(tmp_path: Path) -> None:
    report = replace(sample_report(3), batch=-1)
    with pytest.raises(ReportFileError, match="cannot be saved") as caught:
        report.save(tmp_path / "report.nimble")
    assert caught.value.where == "batch"
    assert check_report(sample_report(3)) == sample_report(3)
