"""How long a large report takes to save and to load, and how large its file is.

``python -m benchmarks.report_file`` makes reports of 10,000 calls (as they are, and fused, with the eager calls beside
them; both with three timelines), saves and loads each a few times, prints the fastest of each, and fails (exit status
1) where a limit is missed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import ROOT, options, write
from nimble_core.profiling.machine import environment
from nimble_core.utils.units import format_ns
from nimble_viz import load
from nimble_viz.render.report import Report

CALLS = 10_000
LIMIT_S, LIMIT_BYTES = 1.0, 5_000_000
"""Most seconds for saving, and for loading; largest file."""


def reports(calls: int = CALLS) -> dict[str, Callable[[], Report]]:
    """Makers of the reports that are timed, by name; the tests' own samples."""
    sys.path.insert(0, str(ROOT))
    from tests.support.sample_reports import fused_report, sample_report

    return {"eager's kernels": lambda: sample_report(calls, width=8), "fused": lambda: fused_report(calls, width=8)}


def measured(report: Report, rounds: int) -> dict[str, float]:
    """Fastest seconds of saving and of loading, and bytes of the file."""
    saved, loaded = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.nimble"
        for _ in range(rounds):
            began = time.perf_counter()
            report.save(path)
            saved.append(time.perf_counter() - began)
            began = time.perf_counter()
            load(path)
            loaded.append(time.perf_counter() - began)
        size = path.stat().st_size
    return {"save_s": min(saved), "load_s": min(loaded), "bytes": size}


def missed(row: dict[str, float]) -> list[str]:
    """Describe the limits that a row misses."""
    found = [f"{what} {row[what]:.2f} s" for what in ("save_s", "load_s") if row[what] > LIMIT_S]
    return found + [f"{row['bytes']:,.0f} bytes"] * (row["bytes"] > LIMIT_BYTES)


def main() -> int:
    """Measure, print one line for each report; 1 where a limit is missed."""
    parser = options(__doc__)
    parser.add_argument("--calls", type=int, default=CALLS, help=f"calls of each report (default: {CALLS:,})")
    parser.add_argument("--rounds", type=int, default=5, help="of saving and loading (default: 5)")
    given = parser.parse_args()
    stamp, rows = environment("cpu"), dict[str, dict[str, float]]()
    for name, make in reports(given.calls).items():
        rows[name] = row = measured(make(), given.rounds)
        times = f"save {format_ns(row['save_s'] * 1e9)}, load {format_ns(row['load_s'] * 1e9)}, {row['bytes']:,} bytes"
        print(f"{name}, {given.calls:,} calls: {times}", *missed(row), sep="; MISSED: ")
    write(given.out, {"calls": given.calls, "reports": rows}, stamp)
    return int(any(map(missed, rows.values())))


if __name__ == "__main__":
    sys.exit(main())
