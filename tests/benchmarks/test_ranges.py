"""What the benchmark of ranges makes of its samples."""

from __future__ import annotations

from benchmarks.ranges import ROWS, TOOL, in_turn, table


def test_each_row_has_its_median_and_its_extremes() -> None:
    taken = {"no tool": [dict.fromkeys(ROWS, value) for value in (3.0, 1.0, 2.0)]}
    lines = table(taken).splitlines()
    assert lines[0] == "| µs | no tool |"
    assert len(lines) == 2 + len(ROWS)
    assert all(line.endswith("| 2.00 (1.00 to 3.00) |") for line in lines[2:])
    assert "eager run of 16 calls" in table(taken)


def test_the_tool_is_where_it_is_compiled_from() -> None:
    assert "NVTX" in TOOL.read_text(encoding="utf-8")


def test_both_run_equally_often_and_each_goes_first_as_often() -> None:
    order: list[str] = []
    settled: list[int] = []
    in_turn(lambda: order.append("a"), lambda: order.append("b"), lambda: settled.append(len(order)), 20)
    assert order.count("a") == order.count("b") == 22
    pairs = list(zip(order[::2], order[1::2], strict=True))
    assert pairs.count(("a", "b")) == pairs.count(("b", "a")) == 11
    assert settled == list(range(1, 45))
