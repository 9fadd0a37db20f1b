"""What the benchmark of launches says of its rows."""

from __future__ import annotations

from benchmarks.launching import BEFORE, OURS, PROFILER, line


def test_a_row_says_what_each_state_of_the_process_costs() -> None:
    times = {
        BEFORE: {"launch us": 8.0, "replay us": 1074.0},
        OURS: {"launch us": 8.4, "replay us": 1074.0},
        PROFILER: {"launch us": 350.2, "replay us": 1495.6},
    }
    assert line("NASNet-A mobile, float16, contention", {"nodes": 1290, "streams": 9, "times": times}) == (
        "NASNet-A mobile, float16, contention: 1290 nodes on 9 streams; launched before 8 µs of 1074, "
        "after ours 8 µs of 1074, after torch.profiler 350 µs of 1496"
    )
