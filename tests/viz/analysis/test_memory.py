"""Planned memory, engine by engine."""

from __future__ import annotations

from dataclasses import replace

from nimble_viz.analysis.memory import memory
from nimble_viz.report.data import EngineMemory, Memory
from tests.support.sample_reports import (
    CASES,
    old_report,
    sample_report,
)


def test_memory_says_what_reuse_saved():
    report = sample_report(60)
    single, nimble = memory(report)["engines"]
    assert nimble["label"] == "nimble replay"
    assert [nimble[key] for key in ("arena", "unshared", "saved", "workspaces", "held")] == [
        "46.0 MiB", "160 MiB", "114 MiB (71.2%)", "64.0 MiB", "164 MiB",
    ]  # fmt: skip
    assert not single["chosen"]
    assert ("Held by nimble replay", "164 MiB") in memory(old_report())["facts"]
    assert memory(old_report())["engines"] == []
    assert memory(CASES["host"]()) is None
    none = replace(report, memory=Memory(planned=(EngineMemory("nimble", 512, 500, 0),)))
    assert memory(none)["engines"][0]["saved"] == "nothing"
