"""What the benchmark of counters zeroed at once says of its rows, and how it makes the way without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import counters
from benchmarks.counters import AT_ONCE, EACH, both, line, main, sharing
from nimble_core.runtime.host.device import HostDevice
from tests.support.benchmark_rows import asked_rows


def test_both_ways_are_measured_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "SECONDS", 0.05)
    x = torch.randn(8, 8)
    found = both(HostDevice(), {AT_ONCE: lambda: x @ x, EACH: lambda: (x @ x) @ x})
    assert set(found["times"]) == {AT_ONCE, EACH}
    graphs = {AT_ONCE: [{"fills before a call": 1}], EACH: [{"fills before a call": 5}, {"fills before a call": 4}]}
    said = line("A, tf32", {"graphs": graphs, "times": {"step": found}})
    assert said.startswith("A, tf32: step ")
    assert said.endswith(" µs); fills 9 to 1")


def test_the_way_without_lays_out_as_ever() -> None:
    asked: list[bool] = []

    def lay_out(device: object, recording: object, schedule: object, *, stagger: bool = True) -> None:
        asked.append(stagger)

    nothing: Any = None
    sharing(lay_out)(nothing, nothing, nothing)
    sharing(lay_out)(nothing, nothing, nothing, stagger=True)
    assert asked == [False, False]


def test_rows_that_the_file_holds_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    asked = asked_rows(monkeypatch, {"graphs": {AT_ONCE: [], EACH: []}, "times": {}})
    main(["--out", str(out), "--models", "BERT-base 128", "--row", "float32, 1, library"])
    main(["--out", str(out), "--models", "BERT-base 128", "GPT-2 128"])
    assert asked[0] == ("benchmarks.counters", "--models", "BERT-base 128", "--row", "float32, 1, library")
    rows = [f"{name}, {row}" for name in ("BERT-base 128", "GPT-2 128") for row in counters.ROWS[name]]
    assert sorted(json.loads(out.read_text())["rows"]) == sorted(rows)
    assert len(asked) == len(rows)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
