"""The verdict, and the tables behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nimble_core.ir.costs import limit_ns
from nimble_core.ir.measurement import summarize
from nimble_core.ir.program import Storage, TensorRef
from nimble_viz.analysis.advice import best_run
from nimble_viz.analysis.limit import distance, distance_text
from nimble_viz.analysis.summary import summary
from nimble_viz.analysis.tiles import verdict
from nimble_viz.report.data import EAGER_ALONE, EqualityCheck
from tests.support.sample_reports import CASES, sample_report, timed
from tests.support.tables import shown


def test_kernels_launched_ahead_may_beat_the_limit_by_what_they_do_before_they_wait():
    base = sample_report(60)
    bound = limit_ns(base.costs, base.critical_path_ns)
    taken = tuple(replace(one, median_ns=0.9 * bound, spread=0.0) for one in base.measurements)
    base = replace(base, costs=replace(base.costs, spread_ns=()))
    for kernels, doubted in ((0, True), (int(0.1 * bound / 1000), False)):
        plans = tuple(replace(plan, counts=replace(plan.counts, ahead=kernels)) for plan in base.schedules)
        report = replace(base, measurements=taken, schedules=plans, critical_path_ns=bound)
        assert any("costs are too high" in text for text in summary(report)["warnings"]) is doubted


def test_verdict_says_slower_unstable_interrupted_unequal_and_empty():
    base = sample_report(60)
    medians = {"eager": 100.0, "single": 100.0, "nimble": 200.0}
    slow = replace(base, measurements=tuple(summarize(name, [ns] * 40) for name, ns in medians.items()))
    assert "The prepared model is 2.00x slower than eager (2.00x to 2.00x; float16, " in verdict(slow)
    even = replace(slow, measurements=tuple(summarize(name, [100.0] * 40) for name in medians))
    assert "The prepared model: no difference from eager (1.00x to 1.00x; float16, " in verdict(even)
    few = replace(slow, measurements=tuple(summarize(name, [ns] * 12) for name, ns in medians.items()))
    said = verdict(few)
    assert "The prepared model is undecided against eager (too few samples; float16, " in said
    assert "; only 12 rounds fitted in the time; raise budget_s; outputs equal" in said
    assert "interrupted" in verdict(CASES["interrupted"]())
    assert "outputs were not compared" in verdict(CASES["interrupted"]())
    failed = replace(base, checks=(EqualityCheck("nimble", 0.5, 0.01, 0.7, False, "error above tolerance"),))
    assert verdict(failed).startswith("Outputs of nimble replay differ from eager's: those times do not count; the pre")
    void = replace(base, checks=(EqualityCheck("nimble", 0.0, 0.01, 0.0, False, "void: no effect"),))
    assert "equality with eager NOT shown for nimble replay" in verdict(void)
    assert "no call that reaches the device" in verdict(CASES["empty"]())


@pytest.mark.parametrize(
    ("alone", "nimble", "noise", "said"),
    [
        (1.0, 1.0, 0.02, "eager with one thread is as fast (torch.set_num_threads(1)): the gain is only fewer threads"),
        (1.0, 1.5, 0.02, "eager with one thread is faster (torch.set_num_threads(1)): the gain is only fewer threads"),
        (1.0, 1.0, 0.8, "eager with one thread may be as fast (torch.set_num_threads(1)): the gain may be only fewer "),
        (1.0, 0.8, 0.02, ""),  # faster than that, too
        (4.0, 1.0, 0.02, ""),  # threads did not cost anything
        (1.0, 4.0, 0.02, ""),  # nothing was gained
    ],
)
def test_a_gain_of_fewer_threads_is_called_that(alone, nimble, noise, said):
    report = timed(
        sample_report(24, device="cpu"),
        {"eager": 4e5, EAGER_ALONE: alone * 1e5, "single": 1e5, "nimble": nimble * 1e5},
        noise=noise,
    )
    told = verdict(report)
    assert ("one thread" in told) == bool(said)
    assert f"; {said}" in told or not said
    assert told.startswith("The prepared model")
    row = shown(summary(report)["speed"])["eager, 1 thread"]
    assert row["Over one stream"] == ""
    assert row["Over eager"] != ""
    assert summary(report)["peers"] is None
    assert best_run(replace(report, chosen="")) != EAGER_ALONE


def test_an_empty_batch_is_not_compared_with_anything():
    base = sample_report(0, stable=False)
    ref = TensorRef(0, 0, (0, 3), (3, 1), "float32", 4)
    void = EqualityCheck("single", 0.0, 0.01, 0.0, False, "void: there are no outputs to compare")
    program = replace(base.program, storages=(Storage(0, "input"),), inputs=(ref,))
    warned = (f"{void.name}: {void.reason}",)
    report = replace(base, batch=0, program=program, checks=(void,), warnings=warned)
    said = verdict(report)
    assert said == "The model made no call that reaches the device; float16, empty batch, NVIDIA H200."
    tables = summary(report)
    assert not any("Over eager" in row for row in shown(tables["speed"]).values())
    assert sum("no outputs to compare" in warning for warning in tables["warnings"]) == 1


def test_distance_is_replay_over_critical_path():
    report = sample_report(60)
    far = report.measurement("nimble").median_ns / report.critical_path_ns
    reached = dict(summary(report)["facts"])["Distance to the limit"]
    assert f"nimble replay {far:.2f}x ± {report.measurement('nimble').spread + 0.03:.0%}" in reached
    assert "eager" not in reached
    share = 0.97 * report.measurement("nimble").median_ns / report.costs.total_ns
    full = replace(report, costs=replace(report.costs, demand=(share,) * 60))
    assert distance(full, "nimble") == pytest.approx(1 / 0.97)
    assert distance_text(full, "nimble") == "1.03x ± 4%"


def test_warnings_are_gathered_once():
    report = CASES["unstable"]()
    texts = summary(replace(report, warnings=("twice", "twice")))["warnings"]
    assert texts.count("twice") == 1
    assert any("spread" in text for text in texts)
