"""The training suite's part of the README: what a row becomes, what is said of targets, and that it is the file's."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme
from benchmarks.readme import END
from benchmarks.rows import Row, read
from benchmarks.training import DROP_IN, OURS, OVERHEAD, TUNED, WITH_LOSS, best_peer, equal, summary
from benchmarks.training_readme import (
    BEGIN,
    RESULTS,
    main,
    missed,
    rendered,
    replaced,
    rows_table,
    targets_table,
)
from tests.support.training_rows import full, keyed, results, suite

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def text(*rows: dict[str, Any], **more: Any) -> str:
    return rendered(results(*rows, **more), "all.md", "figure.svg")


def said(*rows: dict[str, Any], **more: Any) -> str:
    return " ".join(text(*rows, **more).split())


def lines(*rows: dict[str, Any]) -> list[str]:
    return rows_table(keyed(*rows), keyed(*rows))[2:]


def test_examples_in_the_code() -> None:
    found = doctest.testmod(readme)
    assert found.failed == 0
    assert found.attempted >= 3


# -- the README ----------------------------------------------------------------------------------------------------


def shown(page: str) -> dict[str, list[str]]:
    """Cells of every row of the tables in a page, by model, dtype and batch."""
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 12 and cells[2].isdigit():
            found[f"{cells[0]}, {cells[1]}, batch {cells[2]}"] = cells[3:]
    return found


def differences(page: str, rows: dict[str, Any]) -> set[str]:
    """Rows of the tables that are not those of a results file: missing, unknown, or with other figures."""
    cells = shown(page)
    wrong = cells.keys() ^ rows.keys()
    for key in cells.keys() & rows.keys():
        row = rows[key]
        for place, name in enumerate((OURS, DROP_IN, "eager", TUNED, OVERHEAD, best_peer(row))):
            numbers = re.findall(r"[\d.]+", cells[key][place])
            took = [f"{row['times'][name]['median us']:.0f}"] if name in row["times"] else []
            if place >= 2:
                speeds = [
                    row["times"][name]["median us"] / row["times"][mine]["median us"]
                    for way, mine in (("step", OURS), ("drop-in", DROP_IN))
                    if name in row["times"] and equal(row, way)
                ]
                near = [
                    abs(float(one) - of) <= 0.006 * max(of, 1) for one, of in zip(numbers[1:], speeds, strict=False)
                ]
                if not all(near) or len(numbers) != len(took) + len(speeds):
                    wrong.add(key)
            if numbers[:1] != took:
                wrong.add(key)
    return set(wrong)


def test_the_readme_says_what_its_command_writes() -> None:
    """Also where nothing was measured: then it says that."""
    found = read(RESULTS)
    written = rendered(found, "benchmarks/results/training-h200.md", "docs/images/training.svg")
    assert replaced(README, written) == README, "run: python -m benchmarks.training_readme"
    part = README[README.index(BEGIN) :].partition(END)[0]
    assert differences(part, found["rows"]) == set()
    assert ("Not measured yet" in part) == (not found["rows"])


def test_rows_that_differ_from_the_file_would_be_noticed() -> None:
    rows = suite("tf32", "bf16")
    page = rendered(results(*rows.values()), "all.md", "figure.svg")
    assert len(rows) == len(shown(page)) == 30
    assert differences(page, rows) == set()
    for key, row in rows.items():
        assert differences(page, {name: one for name, one in rows.items() if name != key}) == {key}
        for name in (OURS, DROP_IN, "eager", TUNED):
            times = {**row["times"], name: {"median us": row["times"][name]["median us"] + 1}}
            assert differences(page, {**rows, key: {**row, "times": times}}) == {key}


def test_nothing_measured_is_said_without_links() -> None:
    page = text()
    assert page.startswith("Not measured yet: `benchmarks/results/training-h200.json` holds no row.")
    assert "](" not in page


# -- tables --------------------------------------------------------------------------------------------------------


def test_a_row_is_a_line_and_a_group_ends_with_its_means() -> None:
    rows = (
        full("A CIFAR", RO=120.0, **{TUNED: 390.0}),
        full("B CIFAR", RO=270.0, eager=900.0, **{"compile-step": 99.7}),
        full("C", memory=None),
    )
    assert lines(*rows) == [
        "| A CIFAR | tf32 | 32 | **100** | 120 | 400 (4.00x, 3.33x) | 390 (3.90x, 3.25x) | 120 (1.20x, 1.00x) "
        "| 120¹ (1.20x, 1.00x) | 1.10x, 1.10x | nimble | yes |",
        "| B CIFAR | tf32 | 32 | **100** | 120 | 900 (9.00x, 7.50x) | – | 270 (2.70x, 2.25x) "
        "| 100 (0.997x, 0.83x) | 1.10x, 1.10x | nimble | yes |",
        "| **geometric mean, CIFAR, tf32** |  |  |  |  | 6.00x, 5.00x | 3.90x, 3.25x | 1.80x, 1.50x "
        "| 1.09x, 0.91x | 1.10x, 1.10x |  |  |",
        "| C | tf32 | 32 | **100** | 120 | 400 (4.00x, 3.33x) | – | – | 400² (4.00x, 3.33x) | – | nimble | yes |",
        "| **geometric mean, large, tf32** |  |  |  |  | 4.00x, 3.33x | – | – | 4.00x, 3.33x | – |  |  |",
    ]
    assert "The best peer is `compile-step`, ¹ `compile:reduce-overhead`, ² `eager`." in said(*rows)


def test_other_precisions_are_a_table_of_their_own() -> None:
    page = text(full(RO=120.0), full(dtype="bf16", RO=130.0))
    first, _, further = page.partition("<details>")
    assert "| A CIFAR | tf32 |" in first
    assert "| A CIFAR | bf16 |" in further.partition("</details>")[0]
    assert "<details>" not in text(full(RO=120.0))
    alone = text(full(dtype="bf16", RO=130.0))
    assert shown(alone).keys() == {"A CIFAR, bf16, batch 32"}


def test_what_was_not_shown_to_learn_what_eager_does_has_no_speed() -> None:
    wrong, void, gone = full(passed=False, RO=200.0), full("B CIFAR"), full("C CIFAR")
    void["losses"][OURS] |= {"passed": False, "differs": False, "reason": "void: eager's losses move too little"}
    del gone["times"][OURS], gone["losses"][OURS], gone["memory"][OURS]
    gone |= {"ours": {}, "speed": {**gone["speed"], "step": {}}}
    gone["ways"][OURS] |= {"measured": False, "note": "RuntimeError: not today"}
    first, second, third, mean = lines(wrong, void, gone)
    assert first.startswith("| A CIFAR | tf32 | 32 | ~~100~~ | ~~120~~ | 400 | – | 200 | 200¹ |")
    assert first.endswith("| no |")
    assert second.startswith("| B CIFAR | tf32 | 32 | ~~100~~ | 120 | 400 (–, 3.33x) |")
    assert second.endswith("| void, yes |")
    assert third.startswith("| C CIFAR | tf32 | 32 | – | 120 | 400 (–, 3.33x) |")
    assert third.endswith("| –, 1.10x | – | –, yes |")
    assert "| –, 3.33x |" in mean
    page = said(wrong, void, gone)
    assert "struck out" in page
    assert "losses are eager's on every row, by A CIFAR, tf32, batch 32 (differs); B CIFAR" in page
    assert "(void: eager's losses move too little); C CIFAR, tf32, batch 32 (RuntimeError: not today)" in page
    assert "**Left out**, with the reason beside all rows: ours, whole step on C CIFAR, tf32, batch 32." in page


def test_what_is_unstable_is_marked() -> None:
    shaky = full(RO=200.0)
    assert "†" not in text(shaky)
    shaky["speed"]["step"][OVERHEAD]["stable"] = False
    assert "200 (2.00x†, 1.67x)" in text(shaky)
    assert "† unstable" in text(shaky)


# -- targets -------------------------------------------------------------------------------------------------------


def test_targets_are_said_for_both_ways_as_the_summary_has_them() -> None:
    rows = keyed(full("MobileNetV2 CIFAR", RO=117.6, drop_in=111.0), full("B", eager=95.0))
    head, _, *body = targets_table(rows)
    assert head == "| target | whole step | drop-in |"
    targets = summary(rows)["targets"]
    assert len(body) == len(targets)
    for line, target in zip(body, targets, strict=True):
        what, *ways = (cell.strip() for cell in line.strip("|").split("|"))
        assert what == target["target"]
        for cell, way in zip(ways, ("step", "drop-in"), strict=True):
            word = {True: "met: ", False: "**missed**: ", None: "not measured"}[target[way]["met"]]
            assert cell.startswith(word)
    assert body[0].endswith("| met: 2 of 2 rows | met: 2 of 2 rows |")
    assert "| met: 4.000x on MobileNetV2 CIFAR, tf32, batch 32 | **missed**: 3.604x on" in body[1]


def test_a_miss_by_little_does_not_read_as_met() -> None:
    (line,) = (one for one in targets_table(keyed(full(RO=97.9))) if "at least 0.98x" in one)
    assert "**missed**: 0.979x" in line


@pytest.mark.parametrize("learns", [True, False])
def test_a_drop_in_that_misses_says_what_it_takes_with_the_loss_inside(learns: bool) -> None:
    row = full(RO=100.0, drop_in=110.0, memory=1.5)
    speed = {name: dict(one, value=one["value"] * 110 / 96) for name, one in row["speed"]["drop-in"].items()}
    row["speed"]["drop-in with loss"] = speed
    row["losses"][WITH_LOSS] = {"passed": learns, "differs": not learns, "reason": "differs"}
    row["memory"][WITH_LOSS] = {"bytes": 1, "over eager": 1.2}
    found = " ".join(one for one in missed(keyed(row)) if "by the drop-in" in one)
    assert ("; with the loss inside of the module 1.042x; the whole step 1.00x" in found) == learns
    assert ("; with the loss inside of the module 1.200x" in found) == learns


def test_a_miss_names_its_rows_worst_first_and_what_they_know_of_why() -> None:
    rows = keyed(
        full("A CIFAR", compile=95.0, memory=1.5), full("B CIFAR", RO=90.0, distance=None), full("C CIFAR", memory=1.6)
    )
    found = {one.partition(",")[0]: one for one in missed(rows) if "by the whole step" in one}
    speed = found["**Missed** by the whole step: at least 0.98x of the best peer on every row"]
    assert speed.endswith(
        ", by B CIFAR, tf32, batch 32 (0.900x of `compile:reduce-overhead`); A CIFAR, tf32, batch 32 (0.950x of "
        "`compile`; 100 µs: limit 80, replay above it 10, most of it gaps, outside the replay 10)."
    )
    memory = found["**Missed** by the whole step: peak memory at most 1.25x of eager's"]
    assert memory.endswith(
        ", by C CIFAR, tf32, batch 32 (1.600x: 200 MB, 150 of them the engine's); "
        "A CIFAR, tf32, batch 32 (1.500x: 200 MB, 150 of them the engine's)."
    )
    (mean,) = (one for one in missed(rows) if "at least 1.25x" in one and "whole step" in one)
    assert mean.endswith("CIFAR-10's shapes at least 1.25x: 0.900x.")
    (drop_in,) = (one for one in missed(rows) if "drop-in: at least 0.98x" in one)
    assert "(0.750x of `compile:reduce-overhead`; the whole step 0.90x)" in drop_in
    assert missed(keyed(full("MobileNetV2 CIFAR", RO=180.0, drop_in=105.0))) == []


def test_of_many_rows_that_miss_the_worst_are_explained_and_all_are_named() -> None:
    rows = keyed(*(full("A CIFAR", batch=batch, RO=90.0 - batch) for batch in (1, 2, 3, 4, 5)), full("B", compile=97.0))
    (one,) = (one for one in missed(rows) if "by the whole step: at least 0.98x" in one)
    assert [f"A CIFAR, tf32, batch {batch} (0.{90 - batch}0x of" in one for batch in (5, 4, 3)] == [True] * 3
    assert one.count("limit 80") == 3
    assert one.endswith("; A CIFAR, tf32 (batch 2: 0.880x, batch 1: 0.890x); B, tf32 (batch 32: 0.970x).")


def test_a_large_model_is_held_to_eager() -> None:
    (step, _) = (one for one in missed(keyed(full("C", eager=99.0, compile=50.0))) if "large models" in one)
    assert "by C, tf32, batch 32 (0.990x of eager; 100 µs: limit 80" in step


# -- sentences -----------------------------------------------------------------------------------------------------


def test_means_are_those_of_the_summary_by_group() -> None:
    page = said(full(RO=120.0), full("B CIFAR", RO=270.0), full("C", "bf16"))
    assert (
        "**Geometric means**, CIFAR, tf32, 2 rows, whole step (drop-in): 1.80x over `compile:reduce-overhead` (1.50x), "
        "1.80x over the best peer (1.50x), 4.00x over eager (3.33x)." in page
    )
    assert "large, bf16, 1 row, whole step (drop-in): 4.00x over the best peer" in page


def test_failed_rows_rows_not_measured_and_digits_are_named() -> None:
    digits = {
        "device": "cuda", "images": {"train": 1438, "test": 359}, "alike": True,
        "eager": {"accuracies": [0.97], "losses": [0.1], "seconds": 2.0},
        "ours": {"accuracies": [0.98], "losses": [0.1], "seconds": 1.0, "batches": [30, 64]},
    }  # fmt: skip
    page = rendered(
        {
            **results(full("ResNet-18 CIFAR", RO=120.0), digits=digits),
            "failed": {"x, tf32, batch 1": {"reason": "late"}},
        },
        "all.md",
        "figure.svg",
    )
    page = " ".join(page.split())
    assert "**Failed**: x, tf32, batch 1 (late)." in page
    assert "accuracy 0.9700 in eager, 0.9800 by ours (alike)" in page
    missing = page.partition("**Not measured**: ")[2]
    assert "CycleGAN 256; " in missing
    assert "`bf16`" in missing
    assert "batch 64" in missing
    assert "batch 1;" not in missing
    assert "ResNet-18 CIFAR" not in missing
    assert "**Not measured**" not in said(*suite("tf32", "bf16", "float32").values())


# -- the command ---------------------------------------------------------------------------------------------------


def test_only_what_is_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page, file = tmp_path / "page.md", tmp_path / "sub" / "results.json"
    other = f"<!-- inference results -->\nkept\n{END}\n"
    page.write_text(f"{other}{BEGIN}old\n{END}\nafter\n")
    main([str(file), str(page)])
    assert page.read_text().startswith(f"{other}{BEGIN}Not measured yet")
    file.parent.mkdir()
    file.write_text(json.dumps(results(full(RO=200.0))))
    main([str(file), str(page)])
    once = page.read_text()
    assert once.startswith(f"{other}{BEGIN}![")
    assert once.endswith(f".\n{END}\nafter\n")
    assert "(sub/results.md)" in once.replace("\n", " ")
    assert "old" not in once
    main([str(file), str(page)])
    assert page.read_text() == once
    with pytest.raises(SystemExit, match="training results"):
        replaced(other, "text")


def test_keys_are_those_of_the_suite() -> None:
    assert keyed(full()).keys() == {Row("A CIFAR", "tf32", 32, ()).key}


# -- what the first tables do not show -----------------------------------------------------------------------------


def in_a_row(row: dict[str, Any], step: float, drop_in: float) -> dict[str, Any]:
    speed = {way: {"eager": {"value": value}} for way, value in (("step", step), ("drop-in", drop_in))}
    return {**row, "in a row": {"speed": speed}}


def test_steps_in_a_row_are_quoted_beside_those_that_are_waited_for() -> None:
    assert "in a row" not in said(full())
    page = said(in_a_row(full(), 2.0, 1.0), in_a_row(full("B CIFAR"), 8.0, 4.0), full("C CIFAR"))
    assert "**10 steps in a row**, of which only the last is waited for, CIFAR, tf32, 2 rows" in page
    assert "4.00x over the best peer (2.00x), 4.00x over eager (2.00x)." in page
    least = "whole step 2.000x on A CIFAR, tf32, batch 32, drop-in 1.000x on A CIFAR, tf32, batch 32."
    assert f"**Least of the best peer, 10 steps in a row**: {least}" in page


def test_graph_breaks_are_counted() -> None:
    assert "Graph breaks" not in said(full())
    rows = [full(), full("B CIFAR")]
    for row in rows:
        row["ways"]["compile-step"] = {"measured": True, "prepare s": 1.0, "note": "graph breaks: 2; and more"}
    assert "**Graph breaks** of Dynamo: 2 in `compile-step` on 2 rows." in said(*rows)
