"""What the benchmark of launches says of a model."""

from __future__ import annotations

from typing import Any

from benchmarks.launches import line


def row(**over: float) -> dict[str, Any]:
    return {
        "calls": 300,
        "nodes": 400,
        "streams": 4,
        "times": {"whole": {"median us": 620.4}},
        "host us": {"whole": 69.2},
        "over whole": {ways: {"value": value} for ways, value in over.items()},
    }


def test_the_best_way_is_named() -> None:
    head = "GoogLeNet, float16: 300 calls, 400 nodes, 4 streams; whole 620 µs, launched in 69 µs"
    assert line("GoogLeNet, float16", row(**{"(20,)": 1.05, "(20, 60)": 1.1})) == f"{head}; launched at (20, 60): 1.10x"
    assert line("GoogLeNet, float16", row()) == f"{head}; nowhere to cut"
