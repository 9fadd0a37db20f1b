"""The inference suite's part of the README: what a row becomes, and what is said about all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.inference import OVERHEAD
from benchmarks.inference_readme import BEGIN, further_table, main, main_table, rendered, replaced
from benchmarks.readme import END
from tests.benchmarks.test_inference import made
from tests.repository.test_readme import differences


def keyed(*rows: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{row['model']}, {row['dtype']}, batch {row['batch']}": row for row in rows}


def text(*rows: dict[str, Any]) -> str:
    return rendered(keyed(*rows), "all.md", "figure.svg")


def said(*rows: dict[str, Any]) -> str:
    return " ".join(text(*rows).split())


def test_a_model_is_a_line_and_a_dtype_a_group_of_columns() -> None:
    rows = keyed(made("A", RO=120.0), made("B", RO=200.0), made("B", "float16", RO=300.0, MA=99.7))
    head, ruler, *lines = main_table(rows)
    assert head.startswith("| model | float16: ours | eager | reduce-overhead | best peer | float32: ours |")
    assert ruler.count("---") == head.count("|") - 1
    assert lines == [
        "| B | **100** | 1000 (10.0x) | 300 (3.00x) | 100¹ (0.997x) "
        "| **100** | 1000 (10.0x) | 200 (2.00x) | 200 (2.00x) |",
        "| A | – | – | – | – | **100** | 1000 (10.0x) | 120 (1.20x) | 120 (1.20x) |",
        "| **geometric mean** |  | **10.0x** | **3.00x** | **0.997x** |  | **10.0x** | **1.55x** | **1.55x** |",
    ]
    assert "`compile:reduce-overhead`, ¹ `compile:max-autotune`." in said(*rows.values())


def test_other_dtypes_and_batches_are_a_table_of_their_own() -> None:
    plain, tf32, large = made("A", RO=200.0), made("A", "tf32", RO=300.0), made("A", batch=8, RO=400.0)
    assert further_table(keyed(plain)) == []
    assert "<details>" not in text(plain)
    assert further_table(keyed(plain, large, tf32))[2:] == [
        "| A, tf32, batch 1 | **100** | 1000 (10.0x) | 300 (3.00x) | 300 (3.00x) |",
        "| A, float32, batch 8 | **100** | 1000 (10.0x) | 400 (4.00x) | 400 (4.00x) |",
    ]
    assert all("400" not in line for line in main_table(keyed(plain, large)))
    every = keyed(plain, large, tf32)
    assert differences(rendered(every, "all.md", "figure.svg"), every) == []
    assert "batch 1, 2 rows" in said(plain, large, tf32)
    assert "batch 8, 1 row (" in said(plain, large, tf32)


def test_what_was_not_shown_to_be_right_has_no_speed() -> None:
    wrong = made("A", passed=False, RO=200.0)
    assert main_table(keyed(wrong))[2:] == [
        "| A | ~~100~~ | 1000 | 200 | 200 |",
        "| **geometric mean** |  | – | – | – |",
    ]
    assert "struck out" in said(wrong)
    assert "Worst row" not in said(wrong)
    assert differences(text(wrong), keyed(wrong)) == []


def test_what_is_unstable_is_marked() -> None:
    shaky = made("A", RO=200.0)
    assert "†" not in text(shaky)
    shaky["speed"]["copies"][OVERHEAD]["stable"] = False
    assert "200 (2.00x†)" in text(shaky)
    assert "† unstable" in text(shaky)


def test_what_is_missed_is_said_with_what_was_reached() -> None:
    missed = said(
        made("NASNet-A mobile", ours=90.0, static=50.0, distance=1.5, why="gaps", unfused_s=0.4, RO=200.0),
        made("BERT-base 128", RO=99.0),
    )
    assert "more than 22.34x over eager on NASNet-A mobile: 11.11 (20 with static outputs) on NASNet-A mobile" in missed
    assert "on the median row: 1.3 (1.05 by the GPU's clock and replays in a row)." in missed
    assert "at most 0.35 s on average" not in missed
    assert "**Worst row**: 0.99x of the best peer's speed, on BERT-base 128, float32, batch 1." in missed
    assert "1 of 2 rows are above 1.3 times theirs" in missed
    reached = said(made("NASNet-A mobile", "float16", ours=30.0, static=20.0, distance=1.1, RO=200.0))
    assert "missed" not in reached
    assert "Far from" not in reached


def test_peers_left_out_and_rows_not_measured_are_named() -> None:
    row = made("ResNet-50", RO=200.0)
    row["peers"]["torchscript"] = {"measured": False, "note": "not today"}
    sentences = said(row)
    assert "beside all rows: torchscript on ResNet-50, float32, batch 1." in sentences
    missing = sentences.partition("**Not measured**: ")[2]
    assert "DenseNet-121; " in missing
    assert "`float16`" in missing
    assert "batch 32" in missing
    assert "ResNet-50" not in missing
    some = said(row, made("ResNet-50", "float16", RO=1.0), made("DARTS", RO=1.0)).partition("**Not measured**: ")[2]
    assert "DARTS, float16, batch 1" in some


def test_preparation_is_ours_and_the_usual_best_peers() -> None:
    first, second = made("A", RO=200.0), made("B", RO=200.0)
    first["preparation"]["ours"]["s"], second["preparation"]["ours"]["s"] = 3.0, 5.0
    without = made("C", RO=200.0)
    without["peers"][OVERHEAD]["measured"] = False
    without["preparation"]["ours"]["s"] = 100.0
    assert "ours 4.0 s in the median, 3.0 to 5.0 s; `compile:reduce-overhead` 2.0 s" in said(first, second, without)


def test_only_what_is_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "sub" / "results.json"
    results.parent.mkdir()
    results.write_text(json.dumps({"rows": keyed(made("A", RO=200.0)), "failed": {}}))
    page.write_text(f"before\n{BEGIN}old\n{END}\nafter\n")
    main([str(results), str(page)])
    once = page.read_text()
    assert once.startswith(f"before\n{BEGIN}![")
    assert once.endswith(f".\n{END}\nafter\n")
    assert "(sub/results.md)" in once.replace("\n", " ")
    assert "old" not in once
    main([str(results), str(page)])
    assert page.read_text() == once


def test_a_page_without_markers_and_results_without_rows_are_refused() -> None:
    with pytest.raises(SystemExit, match="inference results"):
        replaced(f"{END}\n{BEGIN}", "text")
    with pytest.raises(SystemExit, match="no row"):
        rendered({}, "", "")
