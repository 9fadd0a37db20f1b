"""What is said of a ratio, by any view: the words of its verdict, a value that lies in the interval beside it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_core.ir.measurement import Ratio
from nimble_core.ir.program import Call, Origin
from nimble_viz.analysis.labels import (
    label_call,
    label_operators,
    label_plan,
    label_run,
    ratio_figures,
    ratio_sentence,
    ratio_words,
    split_plan,
)
from nimble_viz.analysis.provenance import (
    module_of,
)
from nimble_viz.analysis.summary import summary, verdict
from nimble_viz.render.dashboard_views import Views, summary_html
from nimble_viz.render.report import Report
from nimble_viz.render.text import plain_text
from nimble_viz.render.verdicts import Rules, diff, gate
from nimble_viz.report.data import EAGER_ALONE, EqualityCheck, PeerResult
from tests.support.sample_reports import (
    fused_report,
    plan_report,
    sample_report,
    timed,
)

_SENTENCE = re.compile(r"(\d+\.\d\d)x (?:faster|slower) than [^;,]*?\((\d+\.\d\d)x to (\d+\.\d\d)x")
_CELL = re.compile(r"(\d+\.\d\d)x \[(\d+\.\d\d)x?, (\d+\.\d\d)x?\]")
_OPEN = re.compile(r"(?:no difference from|undecided against) [^;,]*?\((?:too few samples|\d+\.\d\dx to \d+\.\d\dx)")
_APART = re.compile(r"\d+\.\d\dx ± (?:[\d.]+%|unknown)")
_BOUND = re.compile(r"at (?:least|most) \d+\.\d\dx (?:asked for|allowed)")


_NAMES = ("eager", EAGER_ALONE, "single", "nimble", "compile")
_FACTOR = st.sampled_from((1.0, 1.01, 1.02, 1.03, 1.5)) | st.floats(0.2, 5.0)


@dataclass(frozen=True, slots=True)
class Case:
    """Five ways to run a model on the host, at any ratios and with any noise, of few or of many rounds."""

    factors: tuple[float, ...]
    noise: float
    samples: int
    seed: int
    others: float

    def report(self) -> Report:
        base = sample_report(12, width=2, device="cpu", overhead=False, timelines=False)
        medians = {name: 1e5 * factor for name, factor in zip(_NAMES, self.factors, strict=True)}
        made = timed(base, medians, noise=self.noise, samples=self.samples, seed=self.seed)
        peers = (PeerResult("compile", 3.0, EqualityCheck("compile", 1e-6, 1e-3, 0.5, True)),)
        return replace(made, peers=peers, environment=replace(made.environment, others=self.others))


cases = st.builds(
    Case,
    st.tuples(*[_FACTOR] * len(_NAMES)),
    st.sampled_from((0.0, 0.02, 0.1, 0.5, 1.9)),
    st.sampled_from((1, 6, 15, 16, 33, 64)),
    st.integers(0, 99),
    st.sampled_from((-1.0, 0.0, 9.0)),
)


def written(report: Report, other: Report) -> Iterator[str]:
    """All that is written without columns, and the cells of tables, each with its interval."""
    yield verdict(report)
    tables = summary(report)
    yield from tables["warnings"]
    yield from (row["outcome"] for row in (*tables["peers"], *tables["candidates"]["rows"]))
    advice = tables["advice"]
    yield from (change["why"] for change in advice["changes"]) if advice else ()
    cells = [row[key] for row in tables["speed"] for key in ("eager", "single")]
    cells += [row["ratio"] for row in tables["peers"]] + [row["single"] for row in tables["candidates"]["rows"]]
    yield from (f"{cell['text']} {cell['interval']}" for cell in cells if cell)
    yield re.sub(r"Concurrency there is</th><td>[\d.]+x", "", summary_html(Views(report)))
    yield plain_text(report, 200).split("\n\n")[0]
    found = diff(other, report)
    yield found.to_text(200).split("\n\n")[0]
    yield from (
        " ".join(ratio_figures(one))
        for speed in found.speeds
        for one in (speed.ratio, speed.old_over_eager, speed.new_over_eager)
        if one
    )
    judged = gate(report, Rules(min_speedup=1.0), baseline=other, any_environment=True)
    yield from (one.text for one in judged.verdicts)


def check(text: str) -> None:
    """Each ratio in ``text`` lies in an interval beside it, or is none of two measurements taken in turn."""
    text = " ".join(text.split())
    for pattern in (_SENTENCE, _CELL):
        for value, low, high in pattern.findall(text):
            assert float(low) <= float(value) <= float(high), text
    rest = text
    for pattern in (_SENTENCE, _CELL, _OPEN, _APART, _BOUND):
        rest = pattern.sub("", rest)
    assert not re.search(r"\d\.\d\dx", rest), text


@given(cases, cases)
@settings(max_examples=60)
def test_every_ratio_lies_in_the_interval_that_is_printed_beside_it(case: Case, other: Case) -> None:
    for text in written(case.report(), other.report()):
        check(text)


@pytest.mark.parametrize(
    "text",
    [
        "1.80x faster than eager (1.81x to 1.85x)",
        "1.80x [1.76, 1.79]",
        "1.80x faster than eager",
        "eager: 3 ms, 1.80x over eager",
    ],
)
def test_the_check_fails_where_it_should(text: str) -> None:
    with pytest.raises(AssertionError):
        check(text)


def test_a_ratio_below_one_is_turned_over() -> None:
    slower = Ratio("ours", "theirs", 0.5, 0.4, 0.8)
    assert ratio_words(slower) == "2.00x slower than theirs (1.25x to 2.50x)"
    assert ratio_words(replace(slower, value=1.8, low=1.75, high=1.9), "it") == "1.80x faster than it (1.75x to 1.90x)"
    assert ratio_words(replace(slower, low=0.0, high=math.inf), "it") == "undecided against it (too few samples)"
    same = replace(slower, value=1.0, low=0.99, high=1.01)
    assert ratio_sentence("ours", same, "it", "here") == "ours: no difference from it (0.99x to 1.01x; here)"
    assert ratio_sentence("ours", slower, "it") == "ours is 2.00x slower than it (1.25x to 2.50x)"


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
