"""What is said of a ratio, by any view: the words of its verdict, a value that lies in the interval beside it."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.measurement import Ratio
from nimble_core.ir.program import Call, Origin
from nimble_viz.analysis.labels import (
    explained,
    label_call,
    label_operators,
    label_plan,
    label_run,
    ratio_figures,
    ratio_sentence,
    ratio_words,
    split_plan,
)
from nimble_viz.analysis.provenance import module_of
from tests.support.sample_reports import fused_report, plan_report, sample_report


def test_a_ratio_below_one_is_turned_over() -> None:
    slower = Ratio("ours", "theirs", 0.5, 0.4, 0.8)
    assert ratio_words(slower) == "2.00x slower than theirs (1.25x to 2.50x)"
    assert ratio_words(replace(slower, value=1.8, low=1.75, high=1.9), "it") == "1.80x faster than it (1.75x to 1.90x)"
    assert ratio_words(replace(slower, low=0.0, high=math.inf), "it") == "undecided against it (too few samples)"
    same = replace(slower, value=1.0, low=0.99, high=1.01)
    assert ratio_sentence("ours", same, "it", "here") == "ours: no difference from it (0.99x to 1.01x; here)"
    assert ratio_sentence("ours", slower, "it") == "ours is 2.00x slower than it (1.25x to 2.50x)"


@given(st.lists(st.floats(0.05, 20.0), min_size=3, max_size=3))
def test_a_printed_ratio_lies_in_the_interval_beside_it(ends: list[float]) -> None:
    low, value, high = sorted(ends)
    one = Ratio("ours", "theirs", value, low, high)
    for text in (ratio_words(one), " ".join(ratio_figures(one))):
        *printed, least, most = map(float, re.findall(r"\d+\.\d\d", text))
        assert all(least <= number <= most for number in printed)


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
    assert explained(report, report.chosen) == (
        "44 compiled calls for 60 of eager on 4 streams, as few waits as full concurrency allows (nimble)"
    )
    assert explained(report, "inductor, single") == "44 compiled calls for 60 of eager on one stream"
    assert explained(sample_report(1), "single") == "1 call on one stream"
