from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nimble_viz
from nimble_core.ir.call_graph import CallGraph, graph_from_edges
from nimble_core.ir.candidates import Candidate
from nimble_core.ir.costs import Costs, uniform_costs
from nimble_core.ir.measurement import summarize
from nimble_core.ir.program import Access, Call, Origin, Storage, TensorRef
from nimble_core.ir.schedule import Schedule, SyncCounts
from nimble_core.ir.timeline import Lane, Span, Timeline
from nimble_core.scheduling.policies import POLICIES
from nimble_core.scheduling.simulator import H200, simulate
from nimble_core.utils.units import format_percent
from nimble_viz.analysis import concurrency
from nimble_viz.analysis.advice import best_run
from nimble_viz.analysis.candidates import candidates, pays_back
from nimble_viz.analysis.concurrency import graph_width, in_flight
from nimble_viz.analysis.dag import components, dag, lay_out, layers, nest, order, spread_row, stacked
from nimble_viz.analysis.labels import common_module, label_call, label_operators, label_plan, label_run, split_plan
from nimble_viz.analysis.limit import breakdown, distance, limit
from nimble_viz.analysis.memory import memory
from nimble_viz.analysis.overhead import PARTS, overhead
from nimble_viz.analysis.payload import Kept, pack, unpack, view_data
from nimble_viz.analysis.peers import best_peers, peers
from nimble_viz.analysis.provenance import (
    became,
    fused_calls,
    is_layout_copy,
    module_of,
    modules_of,
    nesting_modules,
    provenance,
)
from nimble_viz.analysis.summary import summary, verdict
from nimble_viz.analysis.syncs import COUNTS, hint, host_syncs, promise
from nimble_viz.analysis.timeline import timelines
from nimble_viz.analysis.what_if import what_if
from nimble_viz.report.data import EAGER_ALONE, EngineMemory, EqualityCheck, Memory, PeerResult
from tests.support.sample_reports import (
    CASES,
    RENDERED,
    choice,
    fused_report,
    old_report,
    plan_report,
    sample_report,
    tangled_report,
    timed,
    training_report,
)

EXAMPLES = Path(__file__).parents[3] / "examples" / "recordings"


@pytest.fixture(scope="module", params=list(RENDERED))
def report(request: pytest.FixtureRequest):
    return RENDERED[request.param]()


def test_every_case_is_plain_json_and_keeps_its_calls(report):
    data = json.loads(json.dumps(view_data(report), allow_nan=False))
    assert unpack(data["calls"]["operator"], data) == [call.operator for call in report.program.calls]
    assert unpack(data["dag"]["columns"]["critical"], data) == list(report.critical_path)
    for plan, shown in zip(report.schedules, data["dag"]["plans"], strict=True):
        assert unpack(shown["columns"]["stream"], data) == list(plan.stream)
        pairs = zip(*(unpack(shown["columns"][end], data) for end in ("producer", "consumer")), strict=True)
        assert tuple(pairs) == plan.syncs


def test_ten_thousand_calls_stay_small():
    data = view_data(CASES["ten thousand"]())
    assert len(json.dumps(data, separators=(",", ":"))) < 400 * 10_000


@given(st.one_of(st.lists(st.integers(-5, 10**9)), st.lists(st.text(max_size=4)), st.lists(st.just(7))))
def test_pack_is_undone_by_unpack(column):
    kept = Kept()
    packed = json.loads(json.dumps([pack(column, kept), pack(column[:-1], kept), pack(column, kept)]))
    data = {"strings": list(kept.strings), "columns": json.loads(json.dumps(kept.columns))}
    assert [unpack(one, data) for one in packed] == [column, column[:-1], column]


def test_a_long_column_is_packed_once():
    kept = Kept()
    column = [f"call {k % 70}" for k in range(100)]
    assert pack(column, kept) == pack(list(column), kept) == {"r": 0}
    assert len(kept.columns) == 1


# ---------------------------------------------------------------- verdict and summary


def test_verdict_names_baseline_dtype_batch_and_device():
    sentence = verdict(sample_report(60))
    for word in (
        "nimble replay is",
        "x faster than eager",
        "float16",
        "batch 1",
        "NVIDIA H200",
        "of the critical path",
    ):
        assert word in sentence
    assert "outputs equal eager's" in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_verdict_names_no_limit_that_the_replay_beat():
    base = sample_report(60)
    medians = {"eager": 1.0, "single": 1.0, "nimble": 1.0}
    beaten = replace(base, measurements=tuple(summarize(name, [ns] * 40) for name, ns in medians.items()))
    assert "critical path" not in verdict(beaten)
    assert any("costs are too high" in text for text in summary(beaten)["warnings"])


def test_kernels_launched_ahead_may_beat_the_limit_by_what_they_do_before_they_wait():
    base = sample_report(60)
    bound = limit(base, "nimble")["ns"]
    taken = tuple(replace(one, median_ns=0.9 * bound, spread=0.0) for one in base.measurements)
    base = replace(base, costs=replace(base.costs, spread_ns=()))
    for kernels, doubted in ((0, True), (int(0.1 * bound / 1000), False)):
        plans = tuple(replace(plan, counts=replace(plan.counts, ahead=kernels)) for plan in base.schedules)
        report = replace(base, measurements=taken, schedules=plans, critical_path_ns=bound)
        assert any("costs are too high" in text for text in summary(report)["warnings"]) is doubted
        assert ("of the critical path" in verdict(report)) is not doubted


def test_verdict_says_host_replay_without_a_gpu():
    assert "host replay on Example CPU 8480C, no GPU" in verdict(sample_report(60, device="cpu"))


def test_verdict_says_slower_unstable_interrupted_unequal_and_empty():
    base = sample_report(60)
    medians = {"eager": 100.0, "single": 100.0, "nimble": 200.0}
    slow = replace(base, measurements=tuple(summarize(name, [ns] * 40) for name, ns in medians.items()))
    assert "nimble replay is 2.00x slower than eager (2.00x to 2.00x; float16, " in verdict(slow)
    even = replace(slow, measurements=tuple(summarize(name, [100.0] * 40) for name in medians))
    assert "nimble replay: no difference from eager (1.00x to 1.00x; float16, " in verdict(even)
    few = replace(slow, measurements=tuple(summarize(name, [ns] * 12) for name, ns in medians.items()))
    said = verdict(few)
    assert "nimble replay is undecided against eager (too few samples; float16, " in said
    assert "; undecided: only 12 rounds fitted in the time; raise budget_s; outputs equal" in said
    assert "interrupted" in verdict(CASES["interrupted"]())
    assert "outputs were not compared" in verdict(CASES["interrupted"]())
    failed = replace(base, checks=(EqualityCheck("nimble", 0.5, 0.01, 0.7, False, "error above tolerance"),))
    assert verdict(failed).startswith("The outputs of nimble replay differ from eager's")
    assert "one-stream replay is" in verdict(failed)
    void = replace(base, checks=(EqualityCheck("nimble", 0.0, 0.01, 0.0, False, "void: no effect"),))
    assert "equality with eager NOT shown for nimble replay" in verdict(void)
    assert "No comparison with eager" in verdict(CASES["empty"]())


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
    assert told.startswith("nimble replay")
    rows = {row["name"]: row for row in summary(report)["speed"]}
    assert (rows[EAGER_ALONE]["label"], rows[EAGER_ALONE]["single"]) == ("eager, 1 thread", None)
    assert rows[EAGER_ALONE]["eager"] is not None
    assert summary(report)["peers"] == []
    assert best_run(replace(report, chosen="")) != EAGER_ALONE


def test_an_empty_batch_is_not_compared_with_anything():
    base = sample_report(0, stable=False)
    ref = TensorRef(0, 0, (0, 3), (3, 1), "float32", 4)
    void = EqualityCheck("single", 0.0, 0.01, 0.0, False, "void: there are no outputs to compare")
    program = replace(base.program, storages=(Storage(0, "input"),), inputs=(ref,))
    warned = (f"{void.name}: {void.reason}",)
    report = replace(base, batch=0, program=program, checks=(void,), warnings=warned)
    said = verdict(report)
    assert said.startswith("No comparison with eager (float16, empty batch, ")
    assert said.endswith("the model made no call that reaches the device.")
    tables = summary(report)
    assert [row["eager"] for row in tables["speed"]] == [None] * len(report.measurements)
    assert sum("no outputs to compare" in warning for warning in tables["warnings"]) == 1


@pytest.mark.parametrize("error", [1e300, float("nan"), float("inf")])
def test_errors_that_are_no_numbers_are_said_to_be_none(error: float):
    check = EqualityCheck("nimble", error, 0.01, 0.5, False, "void: eager's own outputs are not finite")
    (row,) = summary(replace(sample_report(20), checks=(check,)))["checks"]
    assert (row["error"], row["tolerance"], row["differs"]) == ("not finite", "1.0e-02", False)


def test_distance_is_replay_over_critical_path():
    report = sample_report(60)
    row = next(row for row in summary(report)["speed"] if row["name"] == "nimble")
    far = report.measurement("nimble").median_ns / report.critical_path_ns
    assert row["distance"] == f"{far:.2f}x ± {report.measurement('nimble').spread + 0.03:.0%}"
    assert summary(report)["speed"][0]["distance"] == ""
    share = 0.97 * report.measurement("nimble").median_ns / report.costs.total_ns
    full = replace(report, costs=replace(report.costs, demand=(share,) * 60))
    assert distance(full, "nimble") == pytest.approx(1 / 0.97)
    assert "at 1.03x ± 4% of the SM-time limit" in verdict(full)


def test_warnings_are_gathered_once():
    report = CASES["unstable"]()
    texts = summary(replace(report, warnings=("twice", "twice")))["warnings"]
    assert texts.count("twice") == 1
    assert any("spread" in text for text in texts)


def test_a_replay_below_its_limit_is_doubted():
    report = sample_report(60)
    assert not any("critical path" in text for text in summary(report)["warnings"])
    beyond = replace(report, critical_path_ns=2 * report.measurement("nimble").median_ns)
    assert "nimble replay took less than the critical path" in "\n".join(summary(beyond)["warnings"])


# ---------------------------------------------------------------- what was tried


def test_the_chosen_candidate_comes_first_then_by_median_then_what_was_not_captured():
    report = sample_report(60)
    shown = candidates(report)
    assert [row["name"] for row in shown["rows"]] == ["nimble", "opara", "single", "critical_path", "torchsched"]
    assert shown["folded"] == []
    best, wrong, single, slower, spent = shown["rows"]
    assert best["outcome"] == "chosen"
    assert best["single"]["text"] == f"{report.ratio('nimble', 'single').value:.2f}x"
    assert wrong["wrong"]
    assert (wrong["outputs"], wrong["outcome"], wrong["single"]) == ("DIFFER", "outputs differ from eager's", None)
    assert re.fullmatch(
        r"2\.\d\dx slower than the chosen plan \(2\.\d\dx to 2\.\d\dx\) when measured again", single["outcome"]
    )
    assert (slower["median"], slower["outcome"]) == ("", "not captured: simulated slower")
    assert spent["outcome"] == "not captured: the budget was spent"


def test_many_candidates_that_were_not_captured_are_folded_by_reason():
    shown = candidates(CASES["many candidates"]())
    assert [row["name"] for row in shown["rows"]] == ["nimble", "opara", "single"]
    assert [len(group["rows"]) for group in shown["folded"]] == [13, 1]
    assert shown["folded"][0]["text"] == ("13 plans more, not captured: simulated slower (1.02 ms to 1.20 ms)")


def test_without_a_choice_there_is_no_table_of_candidates():
    report = sample_report(60)
    assert candidates(old_report()) is None
    assert candidates(replace(report, candidates=report.candidates[:1])) is None


@pytest.mark.parametrize(
    ("nimble", "outcome"),
    [
        (100.0, "no difference from the chosen plan (1.00x to 1.00x)"),
        (150.0, "1.50x slower than the chosen plan (1.50x to 1.50x)"),
        (50.0, "2.00x faster than the chosen plan (2.00x to 2.00x)"),
    ],
)
def test_why_a_right_candidate_was_not_chosen(nimble, outcome):
    taken = [summarize(name, [ns] * 40) for name, ns in (("single", 100.0), ("nimble", nimble))]
    tried = (
        Candidate("single", 1, 0, measurement=taken[0], chosen=True),
        Candidate("nimble", 4, 9, measurement=taken[1]),
    )
    report = replace(sample_report(60), candidates=tried, chosen="single", measurements=())
    assert candidates(report)["rows"][1]["outcome"] == outcome
    # Where the comparison measured both again, that decides.
    again = tuple(summarize(name, [ns] * 40) for name, ns in (("single", 100.0), ("nimble", 300.0)))
    told = candidates(replace(report, measurements=again))["rows"][1]["outcome"]
    assert told == "3.00x slower than the chosen plan (3.00x to 3.00x) when measured again"


@given(st.floats(0, 1e3), st.floats(1, 1e9), st.floats(1, 1e9))
def test_pays_back_is_the_first_call_at_which_all_calls_together_are_no_slower(cost_s, median, baseline):
    calls = pays_back(cost_s, median, baseline)
    if baseline <= median:
        assert calls is None
        return
    spent = [cost_s * 1e9 - count * (baseline - median) for count in (calls, calls - 1)]
    assert spent[0] <= 1e-6 * cost_s * 1e9
    assert spent[1] > 0 or not calls


def test_candidates_say_when_they_pay_back_and_why_they_were_dropped():
    report = fused_report()
    shown = candidates(report)
    rows = {row["name"]: row for row in shown["rows"]}
    eager, single = report.measurement("eager").median_ns, report.measurement("single").median_ns
    over_eager, over_single = (report.ratio("inductor, nimble", base).value for base in ("eager", "single"))
    assert next(iter(rows)) == "inductor, nimble"
    assert rows["inductor, nimble"]["pays"] == f"after {pays_back(12.34, eager / over_eager, eager):,} calls"
    after = f"after {pays_back(12.319, single / over_single, single):,} calls"
    assert rows["inductor, nimble"]["pays_single"] == after
    assert rows["inductor, nimble"]["single"]["text"] == f"{over_single:.2f}x"
    assert (rows["library, single"]["pays"], rows["single"]["pays_single"]) == ("never", "")
    assert rows["library, nimble"]["outcome"] == "outputs differ from eager's"
    assert (rows["library, nimble"]["error"], rows["library, nimble"]["pays"]) == ("4.0e-01", "")
    assert rows["inductor, max-autotune"]["outcome"] == "the compiler failed: ninja: build stopped"
    assert rows["inductor, opara"]["outcome"] == "not captured: simulated slower"
    assert (shown["fused"], shown["single"], rows["inductor, single"]["kernels"]) == (True, "one stream", "inductor")
    assert not candidates(sample_report(60))["fused"]


def test_what_failed_is_never_folded_away():
    report = sample_report(60)
    failed = Candidate("library, nimble", 0, 0, fuse="library", note="this model cannot be exported: a graph break")
    shown = candidates(replace(report, candidates=(*choice(report.measurements, "nimble", 4, more=6), failed)))
    assert shown["rows"][-1]["outcome"] == failed.note


# ---------------------------------------------------------------- peers


def test_peers_win_lose_tie_differ_or_are_absent():
    report = fused_report()
    ours = report.measurement("inductor, nimble").median_ns
    quick = summarize("compile", [0.8 * ours] * 48)
    report = replace(report, measurements=(*(one for one in report.measurements if one.name != "compile"), quick))
    rows = {row["name"]: row for row in peers(report, report.chosen)}
    assert list(rows) == ["compile", "compile:reduce-overhead", "torchscript", "cuda-graph", "tensorrt"]
    assert rows["compile"]["outcome"].startswith("ours is 1.25x slower than it (1.2")
    assert rows["compile:reduce-overhead"]["outcome"].startswith("ours is 1.60x faster than it (1.5")
    assert "its time does not count" in rows["cuda-graph"]["outcome"]
    assert rows["cuda-graph"]["ratio"] is None
    assert next(row["eager"] for row in summary(report)["speed"] if row["name"] == "cuda-graph") is None
    assert rows["tensorrt"]["outcome"].startswith("not installed")
    assert (rows["tensorrt"]["median"], rows["torchscript"]["prepare"]) == ("", "1.90 s")
    assert "1.25x slower than compile (1.2" in verdict(report)
    even = replace(report, measurements=(*report.measurements[:-1], summarize("compile", [1.005 * ours] * 48)))
    assert peers(even, report.chosen)[0]["outcome"].startswith("ours: no difference from it (1.0")
    assert "no difference from compile (1.0" in verdict(even)
    assert peers(sample_report(60), "nimble") == []
    assert peers(report, "")[0]["outcome"] == "nothing of ours to compare with"


def test_the_verdict_is_about_the_fastest_peer_that_is_right():
    report = fused_report()
    assert best_peers(report) == ["compile"]
    alone = replace(report, peers=(PeerResult("compile:reduce-overhead", 31.0),))
    assert best_peers(alone) == ["compile:reduce-overhead"]
    assert "the fastest peer" not in verdict(alone)
    assert best_peers(replace(report, peers=(PeerResult("tensorrt", note="absent"),))) == []
    assert best_peers(sample_report(60)) == []


def test_no_peer_is_called_the_fastest_that_others_are_as_fast_as():
    report = fused_report()
    twin = replace(report.measurement("compile"), name="torchscript")
    others = tuple(taken for taken in report.measurements if taken.name != "torchscript")
    told = verdict(replace(report, measurements=(*others, twin)))
    assert "), one of the fastest peers, at " in told
    assert "the fastest peer, " not in told


def test_a_peer_that_was_not_shown_to_be_right_is_named_with_that():
    report = fused_report()
    assert "whose outputs were not shown" not in verdict(report)
    doubtful = tuple(
        replace(one, check=replace(one.check, passed=False, reason="void: x")) if one.name == "compile" else one
        for one in report.peers
    )
    told = verdict(replace(report, peers=doubtful))
    assert "), the fastest peer, whose outputs were not shown to be eager's" in told
    alone = replace(report, peers=(PeerResult("compile", 31.0),))
    assert "), whose outputs were not shown to be eager's" in verdict(alone)


# ---------------------------------------------------------------- provenance and labels


def test_every_eager_call_knows_what_it_became_and_back():
    report = fused_report()
    stand = became(report)
    assert len(stand) == 60
    assert all(index in report.program.calls[call].eager for index, calls in enumerate(stand) for call in calls)
    assert sum(map(len, stand)) == sum(len(call.eager) for call in report.program.calls)
    found = provenance(report)
    assert (found["unmapped"], found["gone"], stand[-1]) == (1, 1, ())
    assert found["calls"] == pytest.approx(1 / len(report.program.calls))
    assert found["time"] == pytest.approx(report.costs.ns[0] / report.costs.total_ns)
    assert dict(summary(report)["facts"])["Unmapped (no eager call explains it)"].startswith("1 call: 2.3% of calls")
    assert provenance(replace(report, costs=uniform_costs(report.graph.size)))["time"] is None


@pytest.mark.parametrize(
    ("operator", "read", "copies"),
    [
        ("aten.clone.default", (6,), True),
        ("aten.permute_copy.default", (6,), True),
        ("aten._to_copy.default", (2, 3), True),
        ("aten.contiguous.default", (3, 2), True),
        ("aten.relu.default", (6,), False),
        ("triton_poi_fused_clone_0", (6,), True),
        ("triton_poi_fused__to_copy_permute_view_12", (6,), True),
        ("triton_poi_fused_convolution_28", (6,), True),
        ("triton_tem_fused_convolution_28", (6,), False),
        ("triton_poi_fused_permute_relu_view_8", (6,), False),
        ("triton_per_fused_nll_loss_forward_1", (6,), False),
        ("triton_poi_fused_clone_1", (4,), False),
    ],
)
def test_copies_to_another_layout_are_told_by_operator_and_size(operator, read, copies):
    source, made = (
        TensorRef(at, 0, sizes, tuple(1 for _ in sizes), "float32", 4) for at, sizes in enumerate((read, (6,)))
    )
    call = Call(0, operator, (), (Access(source, False), Access(made, True)))
    assert is_layout_copy(call) == copies
    assert not is_layout_copy(replace(call, eager=(3,)))
    bias = Access(TensorRef(2, 0, (2,), (1,), "float32", 4), False)
    assert not is_layout_copy(replace(call, accesses=(bias, *call.accesses)))


def test_layout_copies_are_counted_apart_from_what_nobody_explains():
    report = fused_report()
    source = Access(report.program.outputs[0], False)
    copy = replace(
        report.program.calls[0], operator="triton_poi_fused_clone_0", accesses=(source, replace(source, write=True))
    )
    other = replace(report, program=replace(report.program, calls=(copy, *report.program.calls[1:])))
    found, facts = provenance(other), dict(summary(other)["facts"])
    assert (found["copies"], found["unmapped"], found["calls"]) == (1, 0, 0.0)
    assert facts["Layout copies (another layout, no eager call)"].startswith("1 call: 2.3% of calls")
    assert facts["Unmapped (no eager call explains it)"].startswith("0 calls")
    rows = fused_calls(other, len(other.program.calls))
    assert [row["kernel"] for row in rows if row["eager"] == "layout copy"] == ["triton_poi_fused_clone_0"]


def test_nothing_fused_needs_no_provenance():
    report = sample_report(60)
    assert provenance(report) is None
    assert fused_calls(report, 5) == []
    assert became(report) == tuple((index,) for index in range(60))
    assert view_data(report)["eager"] is None


def test_fused_calls_are_listed_with_operators_modules_and_lines():
    first = fused_calls(fused_report(), 3)[0]
    assert first["label"] == "gelu+layer_norm"
    assert first["kernel"].startswith("triton_per_fused_gelu_native_layer_norm")
    assert first["source"] == "sample_net/modeling.py:31, 32"
    assert first["eager"].startswith("eager ")


def test_the_page_knows_what_each_call_stands_for():
    report = fused_report()
    data = json.loads(json.dumps(view_data(report)))
    flat = unpack(data["calls"]["for"], data)
    for call, count in zip(report.program.calls, unpack(data["calls"]["stands"], data), strict=True):
        assert tuple(flat[:count]) == call.eager
        del flat[:count]
    assert flat == []
    assert unpack(data["eager"]["operator"], data) == [call.operator for call in report.eager.calls]


def test_a_thousand_fused_calls_stay_small():
    data = view_data(CASES["fused thousand"]())
    assert len(json.dumps(data, separators=(",", ":"))) < 500 * 1_000


def _call(operator, *origins, eager=()):
    made = tuple(Origin(f"aten.{name}.default", module) for name, module in origins)
    return Call(0, operator, (), (), origins=made, eager=eager)


def test_calls_have_short_names():
    triton = "triton_poi_fused__native_batch_norm_relu_3"
    fused = _call(triton, ("_native_batch_norm_legit", "f.0.bn"), ("relu_", "f.0.act"), eager=(1, 2))
    assert label_call(fused) == "bn+relu"
    assert module_of(fused) == "f.0"
    assert label_call(_call(triton)) == "native_batch_norm_relu"
    assert label_call(_call("triton_poi_fused_3")) == "triton"
    assert label_call(_call("aten.convolution.default", ("convolution", "f"))) == "convolution"
    assert label_operators(f"aten.op{k}.default" for k in range(9)) == "op0+op1+op2+op3+5 more"
    assert label_operators(f"aten.op{k}.default" for k in range(5)) == "op0+op1+op2+op3+op4"


def test_runs_and_plans_have_names_that_tell_whose_kernels_they_run():
    report = fused_report()
    assert [label_run(report, taken.name) for taken in report.measurements[:4]] == [
        "eager", "one-stream replay (unfused)", "one-stream replay (inductor)", "nimble replay (inductor)",
    ]  # fmt: skip
    assert label_run(report, "compile") == "compile"
    assert label_run(sample_report(60), "single") == "one-stream replay"
    assert label_run(plan_report(), "nimble") == "nimble"
    assert label_plan("inductor, single") == "inductor, one stream"
    assert split_plan("library, contention, 4 streams") == ("library", "contention, 4 streams")
    assert split_plan("opara, 4 streams") == ("none", "opara, 4 streams")
    assert "1.41x faster than one-stream replay (inductor)" in verdict(report)


@given(st.lists(st.lists(st.sampled_from("ab"), max_size=4).map(".".join), min_size=1, max_size=5))
def test_the_common_module_holds_all(modules):
    common = common_module(modules)
    assert all(f"{module}.".startswith(f"{common}." if common else "") for module in modules)
    steps = common.split(".") if common else []
    longer = {tuple(module.split(".")[: len(steps) + 1]) for module in modules}
    assert len(longer) > 1 or len(next(iter(longer))) == len(steps) or not any(modules)


def test_an_unmapped_call_does_not_tear_its_module_apart():
    report = fused_report()
    calls = list(report.program.calls)
    calls[3] = replace(calls[3], origins=(), eager=())
    torn = replace(report, program=replace(report.program, calls=tuple(calls)))
    assert nesting_modules(torn)[3] == "encoder.layer.0"
    assert nesting_modules(torn)[0] == module_of(calls[1])
    assert nesting_modules(sample_report(60)) == [call.module for call in sample_report(60).program.calls]


# ---------------------------------------------------------------- distance to the limit


def _made(spans, streams, edges, ns, wall, *, syncs=()):
    """A breakdown of calls given as ``(start, end)``, on these streams."""
    size = len(spans)
    lanes = tuple(Lane(str(k), "stream") for k in range(max(streams) + 1))
    plan = Schedule("mine", tuple(streams), tuple(range(size)), syncs)
    placed = sorted(
        (Span(streams[k], float(start), float(end), k, "k") for k, (start, end) in enumerate(spans)),
        key=lambda span: span.start_ns,
    )
    line = Timeline("mine", "measured", "clock", lanes, tuple(placed))
    return breakdown(graph_from_edges(size, edges), plan, Costs(tuple(map(float, ns)), "given"), line, float(wall))


def test_gaps_contention_waits_and_launch_are_told_apart():
    # 0 and 1 beside each other, both slowed by half; 2 waits for 1 across streams; 3 follows 2 on its stream.
    found = _made(
        [(10, 40), (12, 42), (50, 60), (63, 70)], [0, 1, 0, 0], [(0, 2), (1, 2), (2, 3)], [20, 20, 10, 7], 75,
        syncs=((1, 2),),
    )  # fmt: skip
    assert found.calls == (1, 2, 3)
    assert (found.alone, found.contention, found.waits, found.gaps, found.launch) == (37, 10, 8, 3, 17)


def test_a_call_of_two_kernels_has_its_gap_inside():
    graph, plan = CallGraph(1, (), (), ()), Schedule("mine", (0,), (0,), ())
    spans = (Span(0, 0.0, 4.0, 0, "a"), Span(0, 6.0, 9.0, 0, "b"), Span(0, 9.0, 99.0, None, "memset"))
    line = Timeline("mine", "measured", "clock", (Lane("0", "stream"),), spans)
    found = breakdown(graph, plan, Costs((7.0,), "given"), line, 12.0)
    assert (found.alone, found.contention, found.gaps, found.launch) == (7, 0, 2, 3)
    assert breakdown(graph, plan, Costs((7.0,), "given"), replace(line, spans=spans[2:]), 12.0) is None


@given(st.integers(1, 8), st.integers(0, 10**6))
def test_a_breakdown_adds_up_to_the_wall_time(width, seed):
    report = sample_report(30, width=width)
    line = report.timelines[-1]
    wall = line.length_ns + seed
    found = breakdown(report.graph, report.schedules[-1], report.costs, line, wall)
    parts = found.alone + found.contention + found.gaps + found.waits + found.launch
    assert parts == pytest.approx(wall)
    assert all(u < v for u, v in itertools.pairwise(found.calls))


@given(st.floats(0.0, 0.3), st.floats(0.0, 0.3))
def test_what_measurements_vary_by_is_no_part_of_a_breakdown(spread, apart):
    report = sample_report(30)
    line = report.timelines[-1]
    wall = line.length_ns * (1 + apart)
    found = breakdown(report.graph, report.schedules[-1], report.costs, line, wall, spread)
    rest = apart * line.length_ns
    if abs(rest - spread * wall) > 1e-6 * wall:
        assert found.launch == pytest.approx(rest if rest > spread * wall else 0.0)
    assert found.contention == 0.0  # calls ran as long as alone, up to rounding
    slower = tuple(replace(one, end_ns=one.end_ns + apart * (one.end_ns - one.start_ns)) for one in line.spans)
    found = breakdown(report.graph, report.schedules[-1], report.costs, replace(line, spans=slower), wall, spread)
    if abs(apart - found.doubt) > 1e-6:  # isolated times vary by 3%
        assert (found.contention > 0) == (apart > found.doubt)


def test_far_from_the_limit_one_sentence_says_why():
    report = fused_report()
    found = limit(report, report.chosen)
    assert found["distance"] > 1.3
    assert found["sentence"].startswith(f"{found['over']} of the limit")
    assert found["parts"][0]["name"] == "contention"
    assert "contention" in found["sentence"]
    single = limit(report, "inductor, single")
    assert single["parts"][0]["name"] == "order"
    noisy = [ns * report.critical_path_ns for ns in (1.0, 1.5, 2.0)] * 15
    doubtful = limit(replace(report, measurements=(summarize(report.chosen, noisy),)), report.chosen)
    assert (doubtful["over"], doubtful["sentence"]) == ("1.50x ± 67%", "")
    near = replace(report, measurements=(summarize(report.chosen, [1.2 * report.critical_path_ns] * 9),))
    assert limit(near, report.chosen)["sentence"] == ""
    assert "not watched" in limit(replace(report, timelines=()), report.chosen)["sentence"]
    assert limit(report, "eager") is None
    assert limit(replace(report, critical_path_ns=0.0), report.chosen) is None


def test_on_one_stream_nothing_contends():
    report = sample_report(20)
    line = report.timeline("single")
    spans = tuple(replace(one, start_ns=3 * one.start_ns, end_ns=3 * one.end_ns) for one in line.spans)
    wall = summarize("single", [3.0 * line.length_ns] * 9)
    slow = replace(report, timelines=(replace(line, spans=spans),), measurements=(wall,))
    found = limit(slow, "single")
    assert "slowdown" in [part["name"] for part in found["parts"]]
    assert "contention" not in [part["name"] for part in found["parts"]]
    assert re.search(r"calls one after another take 3\.\d\dx ± 3% of their time alone", found["sentence"])
    assert "side by side" not in found["sentence"]


def test_where_resources_bind_contention_below_the_limit_is_no_excess():
    report = sample_report(60)
    full = replace(report, costs=replace(report.costs, demand=(1.0,) * 60))
    found = limit(full, "nimble")
    assert (found["bound"], found["ns"]) == ("SM time of all calls over SMs", pytest.approx(report.costs.total_ns))
    assert all(part["ns"] > 0 for part in found["parts"])
    assert "order" not in [part["name"] for part in found["parts"]]


# ---------------------------------------------------------------- concurrency, what-if, memory


def test_width_is_exact_up_to_a_bound_and_says_so_above(monkeypatch):
    report = CASES["wide"]()
    assert graph_width(report.graph) == (12, "12")
    monkeypatch.setattr(concurrency, "EXACT_CALLS", 59)
    bound, text = graph_width(report.graph)
    assert bound <= 12
    assert text.startswith(f"at least {bound} ")


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), max_size=12))
def test_in_flight_is_what_a_clock_would_count(drawn):
    lanes = (Lane("0", "stream"), Lane("host", "host"))
    spans = sorted(
        (Span(0, float(at), float(at + long), None, "k") for at, long in drawn), key=lambda one: one.start_ns
    )
    line = Timeline("mine", "measured", "clock", lanes, (*spans, Span(1, 90.0, 99.0, None, "host")))
    most, mean = in_flight(line)
    counted = [sum(span.start_ns <= at < span.end_ns for span in spans) for at in range(31)]
    assert most == max(counted)
    assert mean == pytest.approx(sum(counted) / line.length_ns)


def test_what_if_answers_with_simulated_times():
    report = sample_report(60)
    asked = what_if(report)
    assert [row["streams"] for row in asked["rows"]] == [1, 2, 3, 4]
    plan = POLICIES["nimble"](report.graph, report.costs, max_streams=3)
    assert asked["rows"][2]["ns"] == simulate(report.graph, plan, report.costs, H200).length_ns
    assert asked["answer"].endswith("(simulated)")
    assert [row["streams"] for row in asked["rows"] if row["enough"]] == [asked["enough"]]
    fastest = min(row["ns"] for row in asked["rows"])
    assert all(row["ns"] > 1.02 * fastest for row in asked["rows"] if row["streams"] < asked["enough"])


def test_what_if_is_not_asked_without_gpu_costs_or_choice():
    report = sample_report(60)
    assert what_if(CASES["host"]()) is None
    assert what_if(CASES["narrow"]()) is None
    assert what_if(CASES["ten thousand"]()) is None
    assert what_if(replace(report, costs=uniform_costs(60))) is None
    assert what_if(replace(report, chosen="single"))["policy"] == "contention"
    assert "was not recorded" in what_if(old_report())["note"]
    assert "was not recorded" not in what_if(report)["note"]


def test_one_stream_is_enough_where_waits_cost_more_than_calls():
    report = sample_report(60, width=2)
    asked = what_if(replace(report, costs=Costs((100.0,) * 60, "given")))
    assert asked["enough"] == 1
    assert asked["answer"].startswith("One stream is enough")


def test_memory_says_what_reuse_saved():
    report = sample_report(60)
    single, nimble = memory(report)["engines"]
    assert nimble["label"] == "nimble replay"
    assert [nimble[key] for key in ("arena", "unshared", "saved", "workspaces", "held")] == [
        "46.0 MiB", "160 MiB", "114 MiB (71.2%)", "64.0 MiB", "164 MiB",
    ]  # fmt: skip
    assert not single["chosen"]
    assert ("Held by nimble replay", "164 MiB") in memory(old_report())["facts"]
    assert memory(old_report())["engines"] == []
    assert memory(CASES["host"]()) is None
    none = replace(report, memory=Memory(planned=(EngineMemory("nimble", 512, 500, 0),)))
    assert memory(none)["engines"][0]["saved"] == "nothing"


@pytest.mark.parametrize(
    ("emitted", "minimum", "kept", "text"),
    [
        (3, True, True, "emitted as promised: |E'| - |M| = 9 - 6 = 3"),
        (5, True, False, "emitted 5, 2 waits more than promised (|E'| - |M| = 9 - 6 = 3)"),
        (7, False, True, "emitted as planned: 7"),
        (6, False, False, "emitted 6, 1 wait fewer than planned (7)"),
    ],
)
def test_emitted_is_held_against_the_promise(emitted, minimum, kept, text):
    plan = replace(
        sample_report(60).schedules[1],
        minimum_syncs=minimum,
        meg_edges=9,
        matched=6,
        counts=SyncCounts(9, 8, 7, emitted),
    )
    assert promise(plan) == {"kept": kept, "text": text}
    assert promise(replace(plan, counts=SyncCounts(9, 8, 7))) is None


# ---------------------------------------------------------------- overhead, timelines, syncs


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_overhead_parts_and_remainder_add_up_to_the_profiled_run(device):
    view = overhead(sample_report(60, device=device))
    parts = sum(view["totals"][part] for part in PARTS) + (view["totals"]["work"] if view["serial"] else 0)
    assert parts + view["remainder_ns"] == pytest.approx(view["profiled_ns"], abs=5 * 60)
    assert view["serial"] == (device == "cpu")


def test_nothing_profiled_is_none():
    report = CASES["nothing profiled"]()
    assert overhead(report) is None
    assert host_syncs(report) is None
    assert timelines(report) == []


def test_timelines_start_at_zero_eager_first_and_mark_distortion():
    shown = timelines(sample_report(60))
    assert [line["run"] for line in shown] == ["eager", "single", "nimble"]
    assert all(min(line["columns"]["start"]) == 0 for line in shown)
    assert shown[0]["distorted"]
    assert not shown[2]["distorted"]
    assert all((lane["idle"] is None) == (lane["kind"] == "host") for line in shown for lane in line["lanes"])
    assert all(0 <= lane["idle"] < 1 for line in shown for lane in line["lanes"] if lane["kind"] != "host")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_how_long_the_device_was_idle_is_one_number(device):
    """What the profile of eager found is what overhead, timeline and the lane of its only stream show."""
    report = sample_report(60, device=device)
    eager = replace(report.timeline("eager"), profiled_ns=report.overhead.profiled_ns)
    report = replace(report, timelines=(eager, *report.timelines[1:]))
    shown, *replays = timelines(report)
    share = report.overhead.device_idle_share
    assert shown["idle"] == share > 0
    assert dict(overhead(report)["facts"])["Device idle"] == format_percent(share)
    assert [lane["idle"] for lane in shown["lanes"]] == ([None, round(share, 4)] if device == "cuda" else [None])
    for line in replays:  # busy while any of the streams is
        assert 0 <= line["idle"] <= min(lane["idle"] for lane in line["lanes"])
    alone = next(line for line in replays if len(line["lanes"]) == 1)
    assert alone["idle"] == alone["lanes"][0]["idle"]


def test_host_syncs_come_with_advice():
    rows = host_syncs(sample_report(60))
    assert rows[0]["source"] == "sample_net/modeling.py:44"
    assert all(row["hint"] for row in rows)
    assert "pinned" in hint("cudaMemcpyAsync (device to host)")
    assert "once after the loop" in hint("aten::item") == hint("aten::item", "forward")
    assert "fused=True" in hint("aten::item", "optimizer")
    assert "fused=True" in {row["phase"]: row["hint"] for row in host_syncs(training_report())}["optimizer"]


def test_overhead_inside_the_phases_is_told_apart_from_that_of_calls():
    facts = dict(overhead(training_report())["facts"])
    assert facts["Framework overhead"] != facts["Overhead inside the phases"]
    assert facts["Overhead inside the phases"].endswith(", calls or not")
    assert "Overhead inside the phases" not in dict(overhead(sample_report(60))["facts"])


def test_the_environment_says_what_the_step_was_cast_to():
    report = training_report()
    where = replace(report.environment, settings=(("autocast", "False"), ("grad_enabled", "True")))
    plain = replace(report, environment=where)
    assert dict(summary(plain)["environment"])["autocast"] == "False"
    cast = dict(summary(replace(plain, dtype="float32 under bfloat16 autocast"))["environment"])
    assert (cast["autocast"], cast["grad_enabled"]) == ("bfloat16", "True")
    assert [key for key, _, _ in COUNTS] == ["full", "meg", "planned", "emitted"]


# ---------------------------------------------------------------- layout


@st.composite
def dags(draw):
    size = draw(st.integers(1, 30))
    pairs = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)).filter(lambda pair: pair[0] < pair[1])
    return size, sorted(draw(st.sets(pairs, max_size=60)))


@given(dags(), st.sampled_from([1.0, 0.15, 3.0]))
def test_layout_keeps_edges_downward_and_boxes_apart(drawn, last):
    size, edges = drawn
    row, width = layers(size, edges), [*[1.0] * (size - 1), last]
    assert all(row[u] < row[v] for u, v in edges)
    assert set(row) == set(range(max(row) + 1))
    position = order(row, edges, width)
    for line in set(row):
        members = sorted((box for box in range(size) if row[box] == line), key=lambda box: position[box])
        for left, right in itertools.pairwise(members):
            assert position[right] - position[left] >= (width[left] + width[right]) / 2 - 1e-9
    assert (row, position) == (layers(size, edges), order(row, edges, width))


@given(dags())
def test_a_source_waits_next_to_its_first_reader_unless_it_reads_from_outside(drawn):
    size, edges = drawn
    sources = [box for box in range(size) if all(v != box for _, v in edges)]
    row = layers(size, edges)
    for box in sources:
        readers = [row[v] for u, v in edges if u == box]
        assert row[box] == (min(readers) - 1 if readers else 0)
    fixed = layers(size, edges, set(sources))
    assert all(fixed[box] == 0 for box in sources)


@given(dags(), st.integers(0, 3))
def test_every_edge_that_passes_a_row_has_a_lane_there(drawn, seed):
    size, edges = drawn
    names = [call.module for call in tangled_report(seed, size).program.calls]
    boxes = nest(names)
    layout = lay_out(boxes, edges)
    held = {(lane.within, lane.source, lane.first + k) for lane in layout.lanes for k in range(len(lane.places))}
    height: dict[int, int] = {}
    for box, around in enumerate(boxes.parent):
        height[around] = max(height.get(around, 0), layout.row[box] + 1)
    for u, v in edges:
        up, down = _chain(boxes.parent, u), _chain(boxes.parent, v)
        while up[-1] == down[-1]:
            up.pop()
            down.pop()
        needed = [(box, layout.row[box] + 1, height[boxes.parent[box]]) for box in up[:-1]]
        needed += [(box, 0, layout.row[box]) for box in down[:-1]]
        needed.append((up[-1], layout.row[up[-1]] + 1, layout.row[down[-1]]))
        for box, begin, end in needed:
            assert all((boxes.parent[box], u, row) in held for row in range(begin, end))
    assert layout == lay_out(boxes, edges)


def test_lanes_of_a_graph_of_long_edges_stay_few():
    size = 3_000
    edges = sorted({(v - 1, v) for v in range(1, size)} | {(v // 2, v) for v in range(2, size)})
    layout = lay_out(nest([""] * size), edges)
    assert 0 < sum(len(lane.places) for lane in layout.lanes) <= 2 * size + 4_000


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=20))
def test_spread_row_keeps_the_mean_and_what_already_fits(wanted):
    spread = spread_row(wanted, [1.0] * len(wanted))
    assert sum(spread) == pytest.approx(sum(wanted), abs=1e-6)
    apart = [10.0 * k for k in range(len(wanted))]
    assert spread_row(apart, [2.0] * len(wanted)) == apart


@given(st.lists(st.lists(st.sampled_from(["a", "b", "layer", "0", "1"]), max_size=4).map(".".join), max_size=40))
def test_groups_are_nested_runs_of_one_module(modules):
    boxes = nest(modules)
    for group, (first, last) in enumerate(zip(boxes.first, boxes.last, strict=True)):
        assert last > first
        around = boxes.parent[boxes.calls + group]
        if around >= 0:
            assert around < boxes.calls + group
            outer = around - boxes.calls
            assert boxes.first[outer] <= first
            assert last <= boxes.last[outer]
            assert (boxes.first[outer], boxes.last[outer]) != (first, last)
        steps = components(boxes.name[group])
        for module in modules[first : last + 1]:
            path = components(module)
            assert any(path[at : at + len(steps)] == steps for at in range(len(path)))


def test_edges_between_boxes_point_down(report):
    columns = dag(report)["columns"]
    parent, row = columns["parent"], columns["row"]
    for u, v in report.graph.meg[:2000]:
        chain_u, chain_v = _chain(parent, u), _chain(parent, v)
        while chain_u and chain_v and chain_u[-1] == chain_v[-1]:
            chain_u.pop()
            chain_v.pop()
        assert row[chain_u[-1]] < row[chain_v[-1]]


def _chain(parent, box):
    chain = [box]
    while parent[box] >= 0:
        box = parent[box]
        chain.append(box)
    return chain


def test_a_call_of_several_blocks_says_which():
    fused = _call("triton_poi_fused_add_3", ("add", "cells.3.lefts.0"), ("relu", "cells.4.before"), eager=(1, 2))
    assert modules_of(fused) == "cells.3–4"
    assert module_of(fused) == "cells"
    assert components(modules_of(fused)) == ("cells.3–4",)


def test_parts_of_a_module_that_others_come_between_are_told_apart():
    report = nimble_viz.load(EXAMPLES / "nasnet-a-mobile-h200.nimble")
    columns = dag(report)["columns"]
    whole = Counter(columns["name"][group] for group in range(len(columns["name"])) if columns["parts"][group] > 1)
    assert whole["cells.0"] == 2
    for name, many in whole.items():
        own = [group for group, other in enumerate(columns["name"]) if other == name]
        assert [(columns["part"][group], columns["parts"][group]) for group in own] == [
            (k + 1, many) for k in range(many)
        ]
    assert "cells" not in columns["name"]
    clip = dag(nimble_viz.load(EXAMPLES / "clip-h200.nimble"))["columns"]
    assert "encoder.layers.0" in clip["name"]


def test_repeated_blocks_are_counted():
    columns = dag(sample_report(14 * 4))["columns"]
    blocks = [alike for name, alike in zip(columns["name"], columns["alike"], strict=True) if name.startswith("layer")]
    assert blocks == [4, 4, 4, 4]


@given(st.lists(st.integers(0, 5), max_size=12), st.data())
def test_boxes_without_edges_lie_below_each_other_beside_the_others(rows: list[int], data: st.DataObject) -> None:
    tied = data.draw(st.sets(st.sampled_from(range(len(rows)))) if rows else st.just(set[int]()))
    found = stacked(rows, tied)
    assert all(found[box] == rows[box] for box in tied)
    free = [found[box] for box in range(len(rows)) if box not in tied]
    tall = max([rows[box] + 1 for box in tied], default=0)
    assert free == sorted(free)
    assert max(free, default=-1) < max(tall, math.isqrt(max(len(free) - 1, 0)) + 1)
    if free:
        assert max(Counter(free).values()) <= max(1, math.ceil(len(free) / max(tall, 1)))


def test_the_graph_opens_on_the_plan_that_the_verdict_is_about() -> None:
    training = nimble_viz.load(EXAMPLES / "resnet18-training-h200.nimble")
    opens = dag(training)["opens"]
    assert training.schedules[opens].policy == "inductor, contention" == best_run(training)
    assert opens < len(training.schedules) - 1
    for plan in training.schedules:
        chosen = replace(training, chosen=plan.policy, checks=())
        assert training.schedules[dag(chosen)["opens"]] == plan
    bert = nimble_viz.load(EXAMPLES / "bert-h200.nimble")
    assert dag(replace(bert, measurements=()))["opens"] == len(bert.schedules) - 1
    assert dag(replace(bert, schedules=()))["opens"] == -1
