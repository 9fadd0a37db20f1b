"""Results files of the benchmark's scripts: what is written is read again, with its environment."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.common import held, options, over, write
from nimble_core.ir.measurement import summarize
from nimble_core.profiling.machine import environment


def test_what_is_written_is_held_and_says_where_it_was_measured(tmp_path: Path) -> None:
    path = options("A script.").parse_args(["--out", str(tmp_path / "results.json")]).out
    assert held(path) == held(None) == {"models": {}}
    write(path, {"models": {"a": 1}}, environment("cpu"))
    found = held(path)
    assert found["models"] == {"a": 1}
    assert found["environment"]["host_cpu"]
    write(None, found, environment("cpu"))  # nowhere to write: nothing happens


def test_an_interval_is_kept_only_where_rounds_are_enough() -> None:
    few, many = (over(summarize("new", [50_000.0] * count), summarize("old", [100_000.0] * count)) for count in (5, 40))
    assert few == {"value": 2.0, "verdict": "undecided"}
    assert many == {"value": 2.0, "verdict": "faster", "low": 2.0, "high": 2.0}
    json.dumps(few, allow_nan=False)
