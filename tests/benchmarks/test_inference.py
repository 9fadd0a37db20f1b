"""The inference suite: what a row holds, what happens to rows that fail, and whether its sums are right."""

from __future__ import annotations

import doctest
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import inference, inference_figure
from benchmarks.inference import OURS, OVERHEAD, STATIC, main, measure, selected, summary
from benchmarks.rows import Row, Settings, sentence
from benchmarks.zoo import SUITE, calibrated

HERE = Path(__file__).parents[2]


def tiny(batch: int, device: torch.device) -> Any:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    return calibrated(model, 8), (torch.randn(batch, 3, 8, 8),), {}


def raises(batch: int, device: torch.device) -> Any:
    raise ValueError("no such weights")


MODELS = {f"test {one.__name__}": one for one in (tiny, raises)}


class Broken:
    name = "torchscript"

    def prepare(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise RuntimeError("not today")


class Stumbles:
    """Right while it is checked, then fails."""

    name = "torchscript"

    def prepare(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        calls = 0

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 10:
                raise RuntimeError("tired")
            return model(*args, **kwargs)

        return run


@pytest.fixture(autouse=True)
def _suite_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))))
    yield
    torch.set_num_threads(threads)
    for name in MODELS:
        SUITE.pop(name, None)


SETTINGS = Settings("cpu", seconds=0.1, models_from=f"{__name__}:MODELS", run="r1")


def asked(out: Path, *more: str, models: str = "test tiny") -> list[str]:
    return [
        "--out", str(out), "--models", models, "--dtypes", "float32", "--batches", "1", "--device", "cpu",
        "--peers", "torchscript", "--seconds", "0.1", "--models-from", f"{__name__}:MODELS", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    found = measure(Row("test tiny", "float32", 2, ("torchscript", "cuda-graph")), SETTINGS)
    SUITE.pop("test tiny", None)
    return dict(json.loads(json.dumps(found)))


def test_a_row_says_who_took_how_long_and_whether_all_are_right(row: dict[str, Any]) -> None:
    measured = {"eager", OURS, STATIC, "torchscript", inference.REPLAY, inference.UNFUSED}
    assert set(row["times"]) == measured
    for taken in row["times"].values():
        assert taken["samples"] >= 5
        assert 0 < taken["quartiles us"][0] <= taken["median us"] <= taken["quartiles us"][1]
    for way, name in inference.WAYS.items():
        assert set(row["speed"][way]) == {"eager", "torchscript"}
        medians = row["times"]["torchscript"]["median us"], row["times"][name]["median us"]
        assert row["speed"][way]["torchscript"]["value"] == pytest.approx(medians[0] / medians[1])
    assert set(row["equality"]) == {OURS, STATIC, "unfused"}
    assert row["equality"]["unfused"]["passed"]
    assert inference.equal(row)
    assert row["equality"][OURS]["reference"] == "float64"
    assert (row["batch"], row["run"], row["environment"]["host_cpu"] != "") == (2, "r1", True)
    assert row["preparation"][OURS]["s"] >= sum(row["preparation"][OURS]["steps s"].values()) * 0.9
    ours = row["ours"]
    assert sum(one["chosen"] for one in ours["candidates"]) == 1
    assert ours["eager calls"] >= ours["calls"] > 0
    assert ours["limit"]["us"] >= ours["limit"]["critical path us"] > 0
    assert ours["limit"]["distance"] == pytest.approx(row["times"][inference.REPLAY]["median us"] / ours["limit"]["us"])
    assert bool(ours["limit"]["why"]) == (ours["limit"]["distance"] > 1.3)


def test_a_peer_that_is_not_for_this_machine_is_left_out_with_the_reason(row: dict[str, Any]) -> None:
    assert row["peers"]["torchscript"]["measured"]
    assert row["peers"]["torchscript"]["equality"]["passed"]
    assert not row["peers"]["cuda-graph"]["measured"]
    assert "CUDA" in row["peers"]["cuda-graph"]["note"]
    assert "CUDA" in summary({"a": row})["peers left out"]["cuda-graph on a"]


@pytest.mark.parametrize(("broken", "reason"), [(Broken, "not today"), (Stumbles, "tired")])
def test_a_peer_that_fails_leaves_the_others(broken: type, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "peer", lambda name: broken())
    found = measure(Row("test tiny", "float32", 1, ("torchscript",)), SETTINGS)
    assert "torchscript" not in found["times"]
    assert set(found["speed"]["copies"]) == {"eager"}
    assert reason in found["peers"]["torchscript"]["note"]


def test_rows_are_kept_and_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.json"
    assert main(asked(out, "--in-process", "--run", "first")) == 0
    results = json.loads(out.read_text())
    (key,) = results["rows"]
    assert key == "test tiny, float32, batch 1"
    assert main(asked(out, "--in-process", "--run", "second")) == 0
    assert json.loads(out.read_text()) == results
    assert main(asked(out, "--in-process", "--run", "third", "--again")) == 0
    assert json.loads(out.read_text())["rows"][key]["run"] == "third"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["results.json", "results.md"]
    assert "| test tiny | float32 | 1 |" in out.with_suffix(".md").read_text()
    capsys.readouterr()
    assert main(["--out", str(out), "--show"]) == 0
    assert "test tiny" in capsys.readouterr().out


@pytest.mark.slow
def test_a_row_has_a_process_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    assert main(asked(out, models="test tiny,test raises")) == 1
    results = json.loads(out.read_text())
    assert list(results["rows"]) == ["test tiny, float32, batch 1"]
    (failed,) = results["failed"].values()
    assert failed["reason"] == "ValueError: no such weights"
    assert "failed: test raises, float32, batch 1" in out.with_suffix(".md").read_text()


def test_warming_compiles_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setitem(inference.JOBS, "warm", lambda row, _: seen.append(row) or {"wall s": 1.0, "notes": {}})
    out, cache = tmp_path / "results.json", tmp_path / "cache"
    cache.mkdir()
    (cache / "a.best_config").write_text("{}")
    (cache / "a.py").write_text("")
    peers = ["--peers", "compile,compile:max-autotune"]
    assert main(asked(out, "--in-process", "--warm-only", "--jobs", "2", "--cache", str(cache), *peers)) == 0
    assert sorted(row.peers for row in seen) == [("compile",), (OURS,)]
    assert [path.name for path in cache.iterdir()] == ["a.py"]
    assert main(asked(out, "--in-process", "--warm-only", "--jobs", "1", "--cache", str(cache), *peers)) == 0
    assert seen[-1].peers == (OURS, "compile", "compile:max-autotune")
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler: g++")
def test_compiled_ahead_in_a_process_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, cache = tmp_path / "results.json", tmp_path / "cache"
    assert main(asked(out, "--warm-only", "--cache", str(cache))) == 0
    assert capsys.readouterr().out.startswith("[1/1] test tiny, float32, batch 1: compiled in")
    assert any(path.is_file() for path in cache.rglob("*"))


def test_a_row_says_whether_products_were_in_tf32() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    for dtype in ("float32", "tf32"):
        found = measure(Row("test tiny", dtype, 1, ()), SETTINGS)
        assert ("matmul.allow_tf32", str(dtype == "tf32")) in found["environment"]["settings"]
        assert set(found["speed"]["copies"]) == {"eager"}
    assert torch.backends.cuda.matmul.allow_tf32 is before


def test_rows_by_default() -> None:
    rows = selected(list(SUITE))
    keys = {row.key: row for row in rows}
    assert len(keys) == len(rows)
    assert [row.batch for row in rows] == sorted(row.batch for row in rows)
    for name in SUITE:
        assert {f"{name}, {dtype}, batch 1" for dtype in ("float32", "float16")} <= set(keys)
        assert (f"{name}, tf32, batch 1" in keys) == (name in inference.PRODUCTS)
    named = (inference.PRODUCTS, inference.AUTOTUNED, inference.BATCHED, inference.WIDE)
    assert {name for names in named for name in names} <= set(SUITE)
    assert {row.model for row in rows if row.batch != 1} == set(inference.BATCHED)
    assert {row.model for row in rows if "compile:max-autotune" in row.peers} == set(inference.AUTOTUNED)
    assert all(row.peers[0] == "eager-tuned" for row in rows)


def test_examples_in_the_code() -> None:
    assert doctest.testmod(inference) == (0, 1)


def test_rows_as_asked_for() -> None:
    rows = selected(["a1", "a2", "b"], patterns=["a*"], dtypes=["tf32"], batches=[4], peers=["compile", "eager-tuned"])
    assert rows == [Row(name, "tf32", 4, ("eager-tuned", "compile")) for name in ("a1", "a2")]
    with pytest.raises(SystemExit):
        main(["--out", "x", "--peers", "no-such-peer"])
    assert main(["--out", "x", "--models", "no such model"]) == 2
    assert main(["--models", "DARTS"]) == 2


# -- sums on rows made up here -------------------------------------------------------------------------------------


def made(
    model: str = "A", dtype: str = "float32", batch: int = 1, *, ours: float = 100.0, static: float = 90.0,
    distance: float | None = 1.1, passed: bool = True, why: str = "", unfused_s: float = 0.2, **peers: float,
) -> dict[str, Any]:  # fmt: skip
    """A row in which everyone took what it says, µs; ``RO`` and ``MA`` are short for compiled peers."""
    names = {"RO": OVERHEAD, "MA": inference.AUTOTUNE}
    medians = {"eager": 1000.0, **{names.get(name, name): us for name, us in peers.items()}}
    times = {**medians, OURS: ours, STATIC: static}
    ratios = {
        way: {
            name: {"value": us / us_ours, "low": 0.9 * us / us_ours, "high": 1.1 * us / us_ours, "stable": True}
            for name, us in medians.items()
        }
        for way, us_ours in (("copies", ours), ("static", static))
    }
    return {
        "model": model,
        "dtype": dtype,
        "batch": batch,
        "run": "r",
        "environment": {
            "device_name": "NVIDIA H200", "host_cpu": "Some CPU", "torch": "2.11", "python": "3.12.1",
            "date": "2026-01-02T03:04:05+00:00",
        },
        "times": {name: {"median us": us, "warnings": []} for name, us in times.items()},
        "speed": ratios,
        "equality": {name: {"passed": passed, "reason": "" if passed else "differs"} for name in (OURS, STATIC)},
        "peers": {name: {"measured": True, "note": "", "prepare s": 2.0} for name in medians if name != "eager"},
        "preparation": {OURS: {"s": 4.0}, "unfused": {"s": unfused_s}},
        "ours": {
            "chosen": "inductor, nimble",
            "limit": {"distance": distance, "us": 80.0, "why": why} if distance else None,
            "back to back us": 84.0,
        },
        "wall s": 1.0,
    }  # fmt: skip


def verdicts(*rows: dict[str, Any]) -> dict[str, dict[str, Any]]:
    keyed = {f"{row['model']}, {row['dtype']}, batch {row['batch']}": row for row in rows}
    return {one["target"]: one for one in summary(keyed)["targets"]}


def found(start: str, *rows: dict[str, Any]) -> dict[str, Any]:
    (one,) = (target for what, target in verdicts(*rows).items() if what.startswith(start))
    return one


def test_means_are_geometric_by_batch_and_of_the_rows_that_have_the_peer() -> None:
    rows = [made("A", RO=200.0), made("B", RO=800.0), made("C"), made("A", batch=8, RO=100.0)]
    over = summary({str(i): row for i, row in enumerate(rows)})["speed over"]
    assert over["batch 1"][OVERHEAD]["copies"] == {"value": pytest.approx(4.0), "rows": 2}
    assert over["batch 1"][OVERHEAD]["static"]["value"] == pytest.approx(4.0 / 0.9)
    assert over["batch 1"]["eager"]["copies"] == {"value": pytest.approx(10.0), "rows": 3}
    assert over["batch 1"][inference.BEST]["copies"]["value"] == pytest.approx((2 * 8 * 10) ** (1 / 3))
    wrong = summary({"x": made("X", ours=1.0, RO=100.0, passed=False), "a": rows[0]})["speed over"]["batch 1"]
    assert wrong[OVERHEAD]["copies"] == {"value": pytest.approx(2.0), "rows": 1}
    assert over["batch 8"][OVERHEAD]["copies"] == {"value": pytest.approx(1.0), "rows": 1}
    assert over["batch 1"]["torchscript"]["copies"] == {"value": None, "rows": 0}


def test_the_bar_holds_on_every_row_or_not_at_all() -> None:
    fine, short = made("A", RO=98.5), made("B", torchscript=95.0, RO=300.0)
    assert found("at least 0.98x", fine)["copies"]["met"] is True
    bar = found("at least 0.98x", fine, short)
    assert bar["copies"] == {
        "value": pytest.approx(0.95), "where": "B, float32, batch 1", "met": False,
        "below": {"B, float32, batch 1": pytest.approx(0.95)},
    }  # fmt: skip
    assert bar["static"]["met"] is True
    assert bar["static"]["value"] == pytest.approx(95 / 90)
    assert found("at least 0.98x", {**short, "batch": 8})["copies"]["met"] is None


def test_means_wanted() -> None:
    assert found(f"geometric mean over {OVERHEAD}", made(RO=139.0))["copies"]["met"] is False
    assert found(f"geometric mean over {OVERHEAD}", made(RO=139.0))["static"]["met"] is True
    assert found(f"geometric mean over {OVERHEAD}", made())["copies"]["met"] is None
    assert found(f"geometric mean over {inference.AUTOTUNE}", made(MA=126.0))["copies"]["met"] is True
    assert found(f"geometric mean over {inference.AUTOTUNE}", made(MA=124.0))["copies"]["met"] is False


def test_wide_models_are_judged_in_half_precision_and_all_together() -> None:
    wide = [made(name, "float16", RO=210.0) for name in inference.WIDE]
    assert found("at least 2x", *wide)["copies"]["met"] is True
    assert found("at least 2x", *wide[:2])["copies"]["met"] is None
    assert found("at least 2x", *wide[:2], made(inference.WIDE[2], "float16", RO=199.0))["copies"]["met"] is False
    assert found("at least 2x", made(inference.WIDE[0], "float16", RO=199.0))["copies"]["met"] is False
    assert found("at least 2x", *wide, made(inference.WIDE[0], "float32", RO=10.0))["copies"]["met"] is True


def test_the_headline_names_the_host() -> None:
    fast = made("NASNet-A mobile", ours=1000 / 22.4)
    headline = found("more than 22.34x", fast, made("NASNet-A mobile", "float16", ours=50.0), made("A", ours=1.0))
    assert headline["copies"]["met"] is True
    assert headline["copies"]["where"] == "NASNet-A mobile, float32, batch 1"
    assert headline["copies"]["host cpu"] == ["Some CPU"]
    assert headline["static"]["met"] is False
    assert found("more than 22.34x", made("A"))["copies"]["met"] is None


def test_distances_count_where_they_are_known_and_have_to_be_explained() -> None:
    rows = [
        made("A", distance=1.1),
        made("B", distance=1.15),
        made("C", distance=1.4, why="waits"),
        made("D", distance=None),
    ]
    assert found("distance to limit", *rows)["all"] == {"value": 1.15, "rows": 3, "met": True}
    assert found("no distance above 1.3", *rows)["all"]["met"] is True
    assert found("no distance above 1.3", made(distance=1.4))["all"]["met"] is False
    assert found("distance to limit", made(distance=1.16))["all"]["met"] is False
    assert found("distance to limit", made(distance=None))["all"]["met"] is None
    far = summary({"c": rows[2]})["distance to limit"]
    assert far == {"median": 1.4, "median, back to back": pytest.approx(1.05), "known": 1, "explained": {"c": "waits"}}


def test_what_launching_ahead_brings_is_said_of_the_rows_that_tell() -> None:
    rows = [made("A"), made("B"), made("C")]
    rows[0]["ours"]["launched ahead"] = {"kernels": 7, "us": 100.0, "without us": 121.0}
    rows[1]["ours"]["launched ahead"] = {"kernels": 7, "us": 100.0, "without us": 100.0}
    rows[2]["ours"]["launched ahead"] = None
    (said,) = (one for one in inference.table({row["model"]: row for row in rows}) if one.startswith("launched ahead"))
    assert said == "launched ahead: replays geometric mean 1.100x as fast as without, 1.000x to 1.210x (2 rows)"
    assert not any("launched ahead" in one for one in inference.table({"C": rows[2]}))


def test_a_row_that_is_not_right_has_no_speed() -> None:
    wrong = made("NASNet-A mobile", ours=1.0, passed=False, RO=1000.0)
    assert found("outputs are eager's", made(), wrong)["all"] == {"value": 0.5, "rows": 2, "met": False}
    assert found("outputs are eager's", made())["all"]["met"] is True
    assert found("more than 22.34x", wrong)["copies"]["met"] is None
    assert found(f"geometric mean over {OVERHEAD}", made(RO=100.0), wrong)["copies"]["value"] == pytest.approx(1.0)
    assert summary({"x": wrong})["not shown equal to eager"] == {f"{name} on x": "differs" for name in (OURS, STATIC)}


def test_an_unstable_headline_says_what_it_may_be() -> None:
    mobile = made("NASNet-A mobile", ours=1.0, RO=1000.0)
    assert "quartiles" not in found("more than 22.34x", mobile)["copies"]
    mobile["speed"]["copies"]["eager"] |= {"stable": False, "low": 22.18, "high": 28.45}
    said = found("more than 22.34x", mobile)["copies"]
    assert said["quartiles"] == [22.18, 28.45]
    assert sentence("so fast", said).endswith("(unstable: quartiles 22.2 to 28.4)")


def test_nothing_measured_says_so() -> None:
    for target in summary({})["targets"]:
        assert {target[way]["met"] for way in ("all", "copies", "static") if way in target} == {None}
    assert inference.table({})
    assert inference.markdown({})


def test_the_table_says_who_is_best_and_what_is_missed() -> None:
    rows = {"a": made(RO=120.0, torchscript=95.0), "b": made("B", "float16", passed=False, distance=None)}
    text = "\n".join(inference.table(rows))
    first, second = (line for line in text.splitlines() if line.startswith(("A ", "B ")))
    assert " ".join(first.split()) == "A float32 1 1000 torchscript 95 120 100 90 0.95x 1.20x inductor, nimble 1.10 yes"
    assert second.split()[3:6] == ["1000", "eager", "1000"]
    assert second.split()[-1] == "no"
    assert "NVIDIA H200, Some CPU, torch 2.11, Python 3.12.1; runs 2026-01-02 r" in text
    assert "MISSED: at least 0.98x of the best peer on every row (copies): 0.95 on a; below: a" in text
    assert "met: at least 0.98x of the best peer on every row (static): 1.06 on a" in text
    assert "| A | float32 | 1 | 1000 | torchscript | 95 | 120 | 100 | 90 | 0.95x | 1.20x |" in "\n".join(
        inference.markdown(rows)
    )


# -- the figure ----------------------------------------------------------------------------------------------------


def test_bars_are_over_reduce_overhead_and_by_model(tmp_path: Path) -> None:
    rows = [made("A", RO=200.0, MA=160.0), made("A", "float16", RO=300.0), made("B", RO=120.0), made("C")]
    keyed = {
        f"{i}": row for i, row in enumerate([*rows, made("D", batch=8, RO=100.0), made("E", passed=False, RO=9.0)])
    }
    bars, missing = inference_figure.bars(keyed)
    assert list(bars) == ["A", "B"]
    assert bars["A"]["float32"] == inference_figure.Bar(2.0, 1.8, 2.2, 200 / 160)
    assert bars["A"]["float32"].labels == ("2.00×", "1.60×")
    assert bars["A"]["float16"].best == 1.0
    assert inference_figure.Bar(1.2, 1.0, 1.3, 1.203, stable=False).labels == ("1.20×†", "0.998×")
    assert inference_figure.mean(bars, "float32") == pytest.approx((1.549, 1.549, 1.549, 1.118, True), abs=1e-3)
    assert inference_figure.mean(bars, "tf32") is None
    assert missing == ["C, float32", "E, float32"]
    results, out = tmp_path / "results.json", tmp_path / "out.svg"
    results.write_text(json.dumps({"rows": keyed, "failed": {}}))
    inference_figure.main([str(results), str(out)])
    once = out.read_bytes()
    assert b"<svg" in once
    inference_figure.main([str(results), str(out)])
    assert out.read_bytes() == once
    note = inference_figure.footnote(keyed, missing)
    assert note.count("NVIDIA H200") == 1
    assert "sound check: C, float32; E, float32." in note
    assert "unstable" in inference_figure.footnote(keyed, [], unstable=True)


def test_a_figure_of_nothing_is_refused(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"rows": {"c": made("C")}, "failed": {}}))
    with pytest.raises(SystemExit, match="reduce-overhead"):
        inference_figure.main([str(results), str(tmp_path / "out.svg")])
