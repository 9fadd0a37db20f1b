"""The benchmark of report files: what it measures, and that it notices a limit that is missed."""

from __future__ import annotations

from benchmarks.report_file import LIMIT_BYTES, LIMIT_S, measured, missed, reports


def test_small_reports_are_measured() -> None:
    for make in reports(20).values():
        row = measured(make(), 1)
        assert min(row.values()) > 0


def test_what_is_missed_is_named() -> None:
    fine = {"save_s": LIMIT_S, "load_s": LIMIT_S, "bytes": LIMIT_BYTES}
    assert missed(fine) == []
    assert missed({**fine, "load_s": 1.5}) == ["loading 1.50 s"]
    assert missed({**fine, "save_s": 1.5, "bytes": LIMIT_BYTES + 1}) == ["saving 1.50 s", "5,000,001 bytes"]
