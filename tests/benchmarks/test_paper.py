"""The page about the paper says what the store does, by rule; and its rows are what they claim to be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from benchmarks import cyclegan, paper
from benchmarks.models import Training
from benchmarks.paper_rows import LARGE, PUBLISHED, ROWS
from benchmarks.store import Record, read, write
from benchmarks.table import NOTHING
from nimble_core.ir.measurement import Ratio

COUNTS = {"calls": 9, "edges": 12, "matched": 6, "full": 20, "planned": 6, "emitted": 6, "width": 4, "streams": 4}
SECONDS = {"record s": 0.1, "capture single s": 0.1, "check equality s": 5.0}


def record(row: str, way: str, us: float, **more: object) -> Record:
    samples = {name: (us * share,) * 64 for name, share in (("latency_us", 1.0), ("host_us", 0.9))}
    samples |= dict.fromkeys(("throughput_us", "device_us"), (us * 0.8,) * 64)
    about = {"environment": {"device_name": "a GPU"}, "date": "2026-12-01", "rel_err": 0.0, "bound": 1.0}
    return Record(row, way, False, "run", **{**samples, **about, **more})  # type: ignore[arg-type]


def measured(row: str, *, several: float, streams: float = 200.0, planned: int = 6) -> list[Record]:
    held = {**COUNTS, **SECONDS, "planned": planned}
    eager = record(row, "eager", 1000.0, work={"calls": 100, "flops": 8_000_000})
    others = [record(row, "one-stream", 250.0), record(row, "compile", 400.0)]
    others.append(record(row, "streams", streams, counts=held, prepare_s=6.0))
    return [eager, *others, *(record(row, way, several, prepare_s=8.0) for way in ("several", "drop-in-several"))]


def claims(*records: Record) -> dict[str, list[str]]:
    lines = paper.claims(paper.rows_of(records)).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {claim: rest for claim, *rest in cells}


def test_a_verdict_follows_from_the_figures() -> None:
    assert [paper.verdict(here, 4.0) for here in (4.0, 3.0, 1.0)] == ["holds", "holds less", "does not hold"]
    found = {several: claims(*measured("resnet50", several=several)) for several in (100.0, 500.0, 1100.0)}
    said = {several: one["ResNet-50: faster than eager"] for several, one in found.items()}
    assert [one[:3] for one in said.values()] == [
        ["4.32x", "10.00x", "holds"], ["4.32x", "2.00x", "holds less"], ["4.32x", "0.91x", "does not hold"],
    ]  # fmt: skip
    assert said[100.0][3] == "the GPU idles for 80% of eager's time, whose host takes 9.0 µs a call"
    assert said[500.0][3].endswith("; what was published shows from 21.6 µs a call on")


def test_no_way_is_held_to_more_than_eager_is_to_itself() -> None:
    eager, *others = (replace(one, rel_err=5e-3, bound=3e-3) for one in measured("resnet50", several=300.0))
    told = {own: paper.rows_of([replace(eager, rel_err=own), *others])["resnet50"] for own in (0.0, 2e-3, 4e-3)}
    assert [paper.counts(ways["several"]) for ways in told.values()] == [False, False, True]
    assert all(paper.counts(ways["eager"]) for ways in told.values())


def test_over_a_host_that_changes_its_speed_the_ends_are_those_of_most_calls() -> None:
    """Its median may be anywhere between: stretches of a hundred calls are not a hundred samples of it."""
    host = tuple(us for us in (900.0, 1800.0) for _ in range(100)) * 2
    eager, *others = measured("resnet50", several=300.0)
    found = claims(replace(eager, latency_us=host), *others)["ResNet-50: faster than eager"]
    assert found[:3] == ["4.32x", "3.00 to 6.00x", "depends on the host"]
    assert found[3].endswith("; what was published shows from 13.0 µs a call on")


def test_a_speed_whose_interval_holds_two_verdicts_is_undecided() -> None:
    cases = {(0.9, 1.5): "undecided", (1.1, 1.5): "holds less", (3.0, 5.0): "undecided", (4.1, 9.0): "holds"}
    assert {ends: paper.judged(Ratio("several", "graph", sum(ends) / 2, *ends), 4.0) for ends in cases} == cases
    over_eager = cases | {(3.0, 5.0): "depends on the host"}
    assert {ends: paper.judged(Ratio("several", "eager", sum(ends) / 2, *ends), 4.0) for ends in cases} == over_eager


def test_claims_about_all_models() -> None:
    found = claims(*measured("resnet50", several=100.0), *measured("darts", several=200.0, streams=100.0, planned=8))
    assert found["streams alone gain"][1:3] == ["2.50x at most", "holds"]
    assert found["preparation, mean"][1:3] == ["0.20 s", "holds"]
    assert found["the fewest synchronisations"][1:3] == [
        "2 more than the fewest; waits on every hazard: 2.86 times as many", "holds less",
    ]  # fmt: skip
    more = [
        replace(one, counts={**one.counts, "emitted": 7} if one.counts else {}) for one in measured("darts", several=1)
    ]
    assert claims(*more)["the fewest synchronisations"][1].startswith("1 more"), "counted in the captured graph as well"
    assert found["faster than a compiler"][1] == "torch.compile: 2.83x, mean"
    assert "streams gain more with concurrency" not in found, "of equal concurrency there is no rank"


def test_a_plan_of_one_stream_gains_nothing_over_one_stream() -> None:
    found = [replace(one, counts=one.counts and {**one.counts, "streams": 1}) for one in measured("darts", several=1.0)]
    rows = paper.rows_of(found)
    assert [one.speed for one in paper.gains(rows)] == [1.0]
    assert "| the same plan |" in paper.streams(rows)
    assert claims(*found)["streams alone gain"][3] == "0 of 1 models gain"


def test_large_models_are_to_gain_less_and_small_kernels_to_gain() -> None:
    small = measured("train-resnet50-b32", several=400.0)
    cases = [("train-bert", 900.0, "holds"), ("train-bert", 300.0, "does not hold")]
    cases += [("train-cyclegan", 900.0, "holds"), ("train-cyclegan", 1000.0, "does not hold")]
    for name, several, said in cases:
        found = claims(*small, *measured(name, several=several))
        (claim,) = [rest for what, rest in found.items() if what.startswith(ROWS[name].title)]
        assert claim[2] == said, (name, several)


def test_wrong_failed_and_missing_ways_are_said_and_not_counted() -> None:
    eager, *_ = measured("resnet50", several=100.0)
    ways = [replace(record("resnet50", way, 10.0), **{name: value})
            for way, name, value in (("graph", "rel_err", 2.0), ("compile", "error", "no"))]  # fmt: skip
    (row,) = paper.ladder(paper.rows_of([eager, *ways]), training=False).splitlines()[2:]
    assert row == "| ResNet-50 | 1000 | – | failed | wrong | – | – | – | – | 4.32x |"
    assert claims(eager, *ways) == {}


def test_other_hosts_show_other_ratios() -> None:
    rows = paper.rows_of(measured("resnet50", several=100.0))
    assert paper.host(rows["resnet50"]) == (9.0, 100)
    assert [paper.ratio_at(rows["resnet50"], "several", us) for us in (1, 2, 5)] == [2.0, 2.0, 5.0]
    assert "| 9.0 | 100 | 900 | 200 | 80% | 10.00x | 2.00x | 5.00x | 10.00x | 20.00x |" in paper.hosts(rows)


def test_the_page_says_what_the_store_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert paper.main(["--check"]) == 0, capsys.readouterr().err
    page, store = tmp_path / "paper.md", tmp_path / "store.jsonl.gz"
    page.write_text(paper.PAGE.read_text())
    assert paper.main(["--store", str(store)], page) == 0
    assert page.read_text().count(NOTHING) >= 7, "no store: not measured, and no failure"
    write(store, measured("resnet50", several=100.0))
    assert paper.main(["--check", "--store", str(store)], page) == 1
    assert paper.main(["--store", str(store)], page) == paper.main(["--check", "--store", str(store)], page) == 0
    assert "10.00x" in page.read_text()
    for mark in paper.parts({}):
        assert page.read_text().count(f"<!-- {mark} -->") == 2, mark


def test_every_published_figure_has_its_row_and_results_are_of_rows() -> None:
    assert {*PUBLISHED, *LARGE} <= {*ROWS}
    assert {row.dtype for row in ROWS.values()} == {"strict"}
    assert {one.row for one in read(paper.STORE)} <= {*ROWS}


@pytest.mark.parametrize("name", ["resnet50", "train-bert", "train-resnet50-imagenet"])
def test_a_row_of_each_kind_is_small_when_asked(name: str) -> None:
    given = ROWS[name].build("cpu", True)
    if isinstance(given, Training):
        (x, target), model = given.batch(), given.make()
        given.loss_fn(model(x), target).backward()
        assert any(one.grad is not None and one.grad.any() for one in model.parameters())
    else:
        assert given.model(*given.fresh()[0]).isfinite().all()


def test_one_step_of_cyclegan_has_the_gradients_of_its_two_steps() -> None:
    torch.manual_seed(0)
    given = cyclegan.training(1, "cpu", True)
    x, weights = given.batch()
    model, apart = given.make(), given.make()
    given.loss_fn(model(x), weights).backward()
    a, b = x.chunk(2)
    judges = [apart.judge_a, apart.judge_b]
    fake_b, fake_a = apart.to_b(a), apart.to_a(b)
    far = functional.l1_loss
    loss = 10 * (far(apart.to_a(fake_b), a) + far(apart.to_b(fake_a), b))
    loss = loss + 5 * (far(apart.to_a(a), a) + far(apart.to_b(b), b))
    for judge, fake in zip(judges, (fake_a, fake_b), strict=True):
        judge.requires_grad_(False)
        loss = loss + (judge(fake) - 1).square().mean()
    loss.backward()
    for judge, real, fake in zip(judges, (a, b), (fake_a, fake_b), strict=True):
        judge.requires_grad_(True)
        ((judge(real) - 1).square().mean() / 2 + judge(fake.detach()).square().mean() / 2).backward()
    for one, other in zip(model.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
