"""The benchmark of report files: what it measures, and that it notices a limit that is missed."""

from __future__ import annotations

from benchmarks.report_file import measured, reports


def test_small_reports_are_measured() -> None:
    for make in reports(20).values():
        row = measured(make(), 1)
        assert min(row.values()) > 0
