from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import table
from benchmarks.store import Record, read


def record(way: str, us: float, **more: Any) -> Record:
    draw = random.Random(way)
    samples = {
        name: tuple(us * share * draw.uniform(0.9995, 1.0005) for _ in range(count))
        for name, share, count in (("latency_us", 1.0, 64), ("throughput_us", 0.9, 17), ("device_us", 0.8, 17))
    }
    about = {
        "title": "ResNet-50",
        "dtype": "float16",
        "environment": {"device_name": "a GPU", "driver": "1"},
        "rel_err": 0.0,
        "bound": 0.1,
    }
    return Record("resnet50", way, False, "run", **{**about, **samples, **more})


OURS = record("ours", 100.0, date="2026-11-24T10:00:00Z")
EAGER = replace(record("eager", 900.0), device_us=())


def cells(records: list[Record]) -> list[str]:
    """Those of the only row, but for the day."""
    (row,) = [line for line in table.table(records, training=False).splitlines() if line.startswith("| ResNet")]
    model, day, *rest = [cell.strip() for cell in row.strip("|").split("|")]
    assert day == "2026-11-24"
    return [model, *rest]


def test_the_best_right_peer_of_each_measure_is_compared() -> None:
    hand, guarded = record("fr-graph", 150.0), record("fr", 300.0, device_us=(40.0,) * 17)
    wrong = record("ro", 50.0, rel_err=1.0, bound=0.1)
    failed = record("aoti", 10.0, error="RuntimeError")
    partly = record("graphed", 200.0, device_us=(1.0,) * 17, whole=False)
    found = cells([OURS, EAGER, hand, guarded, wrong, failed, partly])
    assert found[1] == "900"
    assert found[2] == "150 / 135 / 40 (Inductor by hand; reduce-overhead with freezing)"
    assert found[3] == "100 / 90 / 80"
    assert [cell[:9] for cell in found[4:]] == ["**1.50x**", "**1.50x**", "**0.50x**"]


def test_every_ratio_has_its_interval_and_only_decided_ones_are_bold() -> None:
    draw = random.Random(1)
    wild = replace(record("fr-graph", 103.0), latency_us=tuple(draw.uniform(50, 200) for _ in range(64)))
    for cell in cells([OURS, EAGER, wild])[4:]:
        value, low, high = map(float, re.findall(r"\d+\.\d+", cell))
        assert low <= value <= high
        assert ("**" in cell) == (low > 1.05 or high < 0.95)
    assert "undecided" in cells([OURS, EAGER, wild])[4]


def test_in_short_means_best_and_worst_are_of_the_rows_that_count() -> None:
    other = {"row": "bert", "title": "BERT"}
    peers = [record("fr-graph", 200.0), record("ro", 400.0)]
    worse = [replace(one, **other) for one in (OURS, record("fr-graph", 50.0), record("ro", 100.0, error="no"))]
    unfinished = [replace(one, row="nasnet-mobile", title="NASNet") for one in (OURS, record("ro", 1.0))]
    text = table.speed([[OURS, EAGER, *peers, *worse, *unfinished]])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[4:]]
    assert [row[:3] for row in rows] == [
        ["eager PyTorch, mean", "1", "9.00x"],
        ['`torch.compile(mode="reduce-overhead")`, mean', "1", "4.00x"],
        ["the fastest peer, mean", "2", "1.00x"],
        ["the fastest peer, best", "any row", "2.00x"],
        ["the fastest peer, worst", "any row", "0.50x"],
    ]
    assert rows[0][4] == "–"  # eager has no device time
    assert table.speed([[]]) == table.NOTHING


def test_the_pages_say_what_the_store_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("store", table.STORES, ids=lambda path: path.name)
def test_stores_hold_what_a_reviewer_asks_for(store: Path) -> None:
    records = read(store)
    assert records
    for one in records:
        assert one.packages["torch"], one.way
        assert one.environment["driver"], one.way
        assert one.environment["host_cpu"], one.way
        assert one.error or (one.latency_us and one.spent_s > 0), one.way
