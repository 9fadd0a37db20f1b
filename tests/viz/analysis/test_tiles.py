"""The first screen's values: what is said now, prepared and next, of every kind of report."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

import pytest
import torch

import nimble_core
import nimble_viz
from nimble_core.ir.measurement import summarize
from nimble_core.scheduling.policies import POLICIES
from nimble_viz.analysis.tiles import tiles
from nimble_viz.report.data import Bound, EqualityCheck, PeerResult
from tests.support.sample_reports import (
    RENDERED,
    busy_report,
    fused_report,
    plan_report,
    profile_report,
    sample_report,
    timed,
    training_report,
)


def texts(found: dict[str, dict]) -> list[str]:
    return [text for name in ("now", "prepared", "next") for text in (found[name]["figure"], *found[name]["lines"])]


@pytest.mark.parametrize("case", [name for name in RENDERED if "thousand" not in name])
def test_every_report_says_what_to_do_in_code_that_parses(case: str) -> None:
    found = tiles(RENDERED[case]())
    for name in ("now", "prepared", "next"):
        assert found[name]["figure"]
        ast.parse(found[name]["code"])
    assert found["next"]["figure"].endswith(".")
    shares = [row["ns"] for row in found["now"]["rows"]]
    assert sum(shares) == pytest.approx(found["now"]["ns"]) or not shares
    for run in found["picture"]["runs"]:
        assert run["ns"] > 0
        assert run["scale"] > 0


@pytest.mark.parametrize("case", [name for name in RENDERED if "thousand" not in name])
def test_a_policy_is_named_with_its_explanation_only(case: str) -> None:
    for text in texts(tiles(RENDERED[case]())):
        for policy in POLICIES:
            for at in re.finditer(rf"\\b{policy}\\b", text):
                assert text[at.start() - 1] == "(" or policy in ("single", "contention"), text


def test_what_is_faster_is_used_and_the_rest_is_measured_mended_or_left() -> None:
    base = sample_report(24)

    def after(eager: float, nimble: float, **more: object) -> str:
        report = replace(timed(base, {"eager": eager, "single": 1.2 * nimble, "nimble": nimble}, noise=0.01), **more)
        return tiles(report)["next"]["figure"]

    assert after(4e5, 1e5).startswith("Use it")
    assert after(1e5, 4e5).startswith("Stay with eager")
    assert after(1e5, 1e5).startswith("Try compiled kernels")
    assert after(4e5, 1e5, complete=False).startswith("Measure again")
    assert after(4e5, 1e5, checks=()).startswith("Compare outputs")
    wrong = EqualityCheck("nimble", 0.5, 0.01, 0.7, False, "error above tolerance")
    assert after(4e5, 1e5, checks=(wrong,), schedules=base.schedules[1:]).startswith("Find what differs")
    assert tiles(busy_report())["next"]["figure"].startswith("Measure again: load 14 on 2 cores")
    assert tiles(plan_report())["next"]["figure"].startswith("Measure it")


def test_peers_are_named_or_the_code_that_measures_them_is_there() -> None:
    fused = tiles(fused_report())["prepared"]
    assert fused["code"] == ""
    assert "no difference from compile (1.00x to 1.01x)" in fused["lines"][0]
    alone = tiles(sample_report(24))["prepared"]
    assert 'against="compile:reduce-overhead"' in alone["code"]
    report = replace(sample_report(24), peers=(PeerResult("tensorrt", note="not installed"),))
    assert "no peer to compare with: tensorrt, not installed" in tiles(report)["prepared"]["lines"]


def test_host_replays_are_called_that() -> None:
    found = tiles(sample_report(24, device="cpu"))
    assert any(line.startswith("host replay, no GPU: 24 calls") for line in found["prepared"]["lines"])
    assert [row["name"] for row in found["now"]["rows"]] == ["host", "computing", "input"]


def test_a_profile_says_what_compare_would_tell() -> None:
    report = profile_report()
    found = tiles(report)
    assert (found["prepared"]["figure"], found["prepared"]["verdict"]) == ("not measured", "")
    assert "compare(model, " in found["prepared"]["code"]
    assert found["next"]["figure"].startswith("Load data ahead")
    assert [run["run"] for run in found["picture"]["runs"]] == ["eager"]
    bound = replace(report, sampling=replace(report.sampling, bound=Bound(1.0, 98.0, 1.0)))
    assert tiles(bound)["now"]["bound"] == "device-bound"


def test_training_is_prepared_as_a_step() -> None:
    found = tiles(training_report())
    assert found["now"]["of"] == "eager, one training step"
    assert "TrainStep(model, loss_fn, optimizer)" in found["next"]["code"]
    assert "training=True" in found["prepared"]["code"]


def test_the_code_of_a_real_report_runs() -> None:
    model, args = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval(), (torch.randn(2, 8),)
    report = nimble_viz.compare(model, *args, options=nimble_core.Options(tune="off"))
    sure = timed(report, {taken.name: 1e5 / (1 + at) for at, taken in enumerate(report.measurements)}, noise=0.01)
    names: dict[str, object] = {"model": model, "x": args[0], "report": sure}
    exec(tiles(sure)["next"]["code"], names)
    assert torch.allclose(names["net"](*args), model(*args))
    assert "compare(model, x, against=" in tiles(sure)["prepared"]["code"]


@pytest.mark.parametrize(("noise", "again"), [(0.1, False), (3.0, True)])
def test_no_advice_is_taken_from_a_disturbed_profile(noise: float, again: bool) -> None:
    taken = summarize("eager", [1e6 * (1 + noise * (at % 2)) for at in range(40)])
    found = tiles(replace(profile_report(), measurements=(taken,)))
    assert found["next"]["figure"].startswith("Profile again") is again
    assert found["now"]["stable"] is taken.stable


def test_a_profile_names_what_computes_longest() -> None:
    lines = tiles(profile_report())["now"]["lines"]
    assert "most computing: linear 38.2%, mm 38.2%" in lines
    assert "by module: (the model itself) 80.9%, (the optimizer) 19.1%" in lines
    assert not any("computing" in one for one in tiles(sample_report(24))["now"]["lines"])
