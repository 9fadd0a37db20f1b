"""The benchmark of report files: what it measures, and that it notices a limit that is missed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.report_file import LIMIT_BYTES, LIMIT_S, ROOT, measured, missed, reports


def test_limits_are_those_of_the_documentation() -> None:
    assert (LIMIT_S, LIMIT_BYTES) == (1.0, 5_000_000)
    assert "more than a second or 5 MB" in " ".join((ROOT / "docs" / "report-format.md").read_text("utf-8").split())


def test_small_reports_are_measured() -> None:
    for make in reports(20).values():
        row = measured(make(), 1)
        assert min(row.values()) > 0


def test_what_is_missed_is_named() -> None:
    fine = {"save_s": LIMIT_S, "load_s": LIMIT_S, "bytes": LIMIT_BYTES}
    assert missed(fine) == []
    assert missed({**fine, "load_s": 1.5}) == ["loading 1.50 s"]
    assert missed({**fine, "save_s": 1.5, "bytes": LIMIT_BYTES + 1}) == ["saving 1.50 s", "5,000,001 bytes"]


def test_the_command_runs(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.report_file", "--calls", "20", "--cold", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 2
    assert "20 calls: save" in done.stdout
    found = json.loads(out.read_text())
    assert set(found["reports"]) == set(reports())
    assert found["calls"] == 20
    assert found["environment"]["host_cpu"]
