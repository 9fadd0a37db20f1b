"""Terminal text: every case at every width, plain in a pipe, hostile names harmless."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from nimble_core.ir.program import Origin
from nimble_core.ir.schedule import SyncCounts
from nimble_core.utils.units import format_ns
from nimble_viz.analysis.labels import label_plan
from nimble_viz.analysis.source import hottest, source
from nimble_viz.analysis.summary import verdict
from nimble_viz.render.text import plain_text, report_text
from nimble_viz.report.data import EqualityCheck
from tests.support.sample_reports import RENDERED, fused_report, old_report, plan_report, sample_report, training_report


def words(text: str) -> str:
    """``text`` without its line breaks and indents."""
    return " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("case", RENDERED)
def test_fits_its_width_without_control_codes(case: str, width: int) -> None:
    text = plain_text(RENDERED[case](), width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert not [line for line in text.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize(("asked", "given"), [(1, 60), (10_000, 200)])
def test_width_is_bounded(asked: int, given: int) -> None:
    assert plain_text(sample_report(), asked) == plain_text(sample_report(), given)


@pytest.mark.parametrize("case", RENDERED)
def test_the_verdict_comes_first(case: str) -> None:
    report = replace(RENDERED[case](), model="Net")
    assert words(plain_text(report, 200)).startswith(f"nimble_viz: Net {words(verdict(report))}"[:100])


def test_all_sections_of_a_full_report() -> None:
    text = plain_text(sample_report(60, stable=False), 100)
    assert "(unstable)" in text
    for title in (
        "Speed (float16, batch 1, NVIDIA H200)",
        "Equality with eager",
        "Plans that were tried",
        "Streams and synchronisations",
        "Concurrency",
        "Limits",
        "Framework overhead of the eager run",
        "Host synchronisations",
        "Preparation (130 ms)",
        "Device memory",
        "Environment",
        "Warnings",
    ):
        assert f"\n\n{title}" in text


def test_whether_emitted_keeps_the_promise_is_said_and_ends_are_counted_apart() -> None:
    report = sample_report()
    plan = replace(report.schedules[1], meg_edges=90, matched=57, counts=SyncCounts(40, 35, 33, 33, 4, 2, 11, 5))
    text = words(plain_text(replace(report, schedules=(report.schedules[0], plan)), 100))
    assert "nimble replay: emitted as promised: |E'| - |M| = 90 - 57 = 33" in text
    assert "nimble replay, counted apart: fork 4, join 2, inside calls 11, launched ahead 5" in text
    broken = replace(plan, counts=SyncCounts(40, 35, 33, 35))
    text = words(plain_text(replace(report, schedules=(report.schedules[0], broken)), 100))
    assert "emitted 35, 2 waits more than promised" in text


@pytest.mark.parametrize("width", [60, 100])
def test_a_candidate_with_wrong_outputs_is_marked(width: int) -> None:
    text = plain_text(sample_report(), width).split("Plans that were tried")[1].split("Streams and")[0]
    assert re.findall(r"^  (nimble \*|opara|one)", text, re.M) == ["nimble *", "opara", "one"]
    assert len(re.findall("DIFFER", text)) == 1
    assert "Plans that were tried" not in plain_text(old_report(), width)


def test_names_of_plans_do_not_wrap_at_80_columns() -> None:
    text = plain_text(fused_report(), 80).split("Plans that were tried")[1].split("Streams and")[0]
    report = fused_report()
    for one in report.candidates:
        assert re.search(rf"^  {re.escape(label_plan(one.name))}( \*)?( {{2,}}|$)", text, re.M)
    assert re.search(r"inductor, nimble \* +159 µs +12\.3 s +[\d,]+ calls\n", text)
    assert re.search(r"over one stream: 2\.\d\dx \[2\.\d\d, 2\.\d\d\];", words(text))
    assert "the compiler failed: ninja: build stopped" in words(text)
    assert "never breaks even against one stream" in words(text)
    assert "over one stream, of eager's kernels: above 1x is faster; in brackets the 99.5% interval" in words(text)


def test_peers_with_times_preparation_and_outcome() -> None:
    text = plain_text(fused_report(), 80)
    section = text.split("nimble replay (inductor) against peers")[1].split("Equality with")[0]
    assert re.search(r"compile:reduce-overhead +\d+ µs +1\.\d\dx \[1\.\d\d, 1\.\d\d\] +31\.0 s\n", section)
    for part in (
        "ours: no difference from it (1.00x to 1.01x)",
        "its time does not count",
        "not installed: no module named 'tensorrt'",
    ):
        assert part in words(section)
    assert "against peers" not in plain_text(sample_report(), 80)


def test_what_fused_calls_stand_for_and_how_far_the_limit_is() -> None:
    text = words(plain_text(fused_report(), 100))
    assert "- gelu+layer_norm in encoder.layer.0.branch3" in text
    assert "eager 11, 12; sample_net/modeling.py:31, 32; triton_per_fused_gelu_native_layer_norm_9" in text
    assert "1 call: 2.3% of calls, 0.7% of replay time" in text
    assert "above it: contention" in text
    assert "stand for" not in plain_text(sample_report(), 100)


def test_concurrency_and_what_streams_are_worth() -> None:
    text = words(plain_text(sample_report(), 120))
    assert "Width of the DAG 4" in text
    assert "nimble replay 4 streams planned, kernels in flight: 4 at most, 2.00 on average" in text
    assert "How many streams are worth it? 4 streams are worth it" in text
    assert "simulated, not measured" in text
    assert "worth it?" not in plain_text(sample_report(device="cpu"), 120)


def test_memory_shows_the_arena_and_what_reuse_saved() -> None:
    text = plain_text(sample_report(), 100)
    assert re.search(r"nimble replay +46\.0 MiB +114 MiB \(71\.2%\) +64\.0 MiB +164 MiB +\d+\.\d+x\n", text)


def test_a_plan_claims_nothing_that_would_need_a_run() -> None:
    text = plain_text(plan_report(), 100)
    for title in ("Speed", "Equality with", "Plans that were tried", "Device memory"):
        assert f"\n{title}" not in text
    assert "in flight:" not in text
    assert "worth it?" not in text


def test_ratios_carry_their_interval() -> None:
    ratio = sample_report().ratio("nimble")
    assert ratio is not None
    text = plain_text(sample_report(), 120)
    assert f"{ratio.value:.2f}x" in text
    assert f"[{ratio.low:.2f}, {ratio.high:.2f}]" in text


def test_a_check_that_failed_is_not_called_equal() -> None:
    check = EqualityCheck("nimble", float("nan"), 1e-3, 0.5, False, "outputs are not finite")
    text = plain_text(replace(sample_report(), checks=(check,)), 100)
    assert re.search(r"nimble replay +DIFFERS +not finite", text)
    assert "outputs are not finite" in text


def test_operators_are_sorted_by_overhead_and_the_largest_fills_the_bar() -> None:
    report = sample_report(60)
    assert report.overhead is not None
    text = plain_text(report, 120)
    table = text.split("operator ")[1].splitlines()[2:7]
    bars = [len(re.sub("[^█▓▒░]", "", row)) for row in table]
    assert bars == sorted(bars, reverse=True)
    assert bars[0] == 24


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_hottest_lines_stand_in_order_with_their_code(width: int) -> None:
    report = sample_report(60)
    found = source(report)
    assert found is not None
    text = plain_text(report, width).split("\n\nHottest lines\n")[1].split("\n\n")[0]
    rows = hottest(found, "host", 5)
    at = [text.index(f"{row['file']}:{row['line']}  {row['name']}\n") for row in rows]
    assert at == sorted(at)
    assert [format_ns(row["value"]) in text for row in rows] == [True] * 5
    assert re.search(r"29\.\d%|28\.\d%", text)
    assert "b0 = self.project(x)\n" in text
    assert "host time of the profiled eager iteration" in words(text)


def test_without_a_profile_the_hottest_lines_are_those_of_the_replay_and_without_code_there_are_none() -> None:
    text = plain_text(sample_report(60, overhead=False), 80)
    assert re.search(r"Hottest lines\n +replay +share", text)
    assert "Hottest lines" not in plain_text(replace(sample_report(60), sources=()), 80)
    assert "Hottest lines" not in plain_text(plan_report(), 80)
    assert "forward and backward together" in words(plain_text(training_report(), 80))


def test_markup_and_escapes_in_names_are_only_text() -> None:
    report = sample_report(6)
    origin = (Origin("aten.add", "[red]layer[/nothing]\x1b[2J\u202e"),)
    calls = tuple(replace(call, origins=origin) for call in report.program.calls)
    report = replace(report, model="[bold]Net[/]\x1b]0;title\x07", program=replace(report.program, calls=calls))
    screen = io.StringIO()
    Console(file=screen, width=100, force_terminal=True).print(report_text(report))
    assert "[bold]Net[/]\N{REPLACEMENT CHARACTER}]0;title" in screen.getvalue()
    assert "[red]layer[/nothing]\N{REPLACEMENT CHARACTER}[2J" in screen.getvalue()
    assert "\x1b]" not in screen.getvalue()
    assert "\x1b[2J" not in screen.getvalue()


def test_colours_only_on_a_terminal() -> None:
    colour, pipe = io.StringIO(), io.StringIO()
    Console(file=colour, force_terminal=True, color_system="standard", width=80).print(sample_report())
    Console(file=pipe, force_terminal=False, width=80, _environ={}).print(sample_report())
    assert "\x1b[" in colour.getvalue()
    assert "\x1b[" not in pipe.getvalue()
