"""The viewer in a real browser: no console errors, no network, linked selection, hostile names, themes, size."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import nimble_viz
from nimble_core.ir.timeline import SelfCheck
from nimble_core.utils.units import format_ns
from nimble_viz.analysis.concurrency import in_flight
from nimble_viz.analysis.dag import dag
from nimble_viz.analysis.gaps import gaps, replay_gaps
from nimble_viz.analysis.live_memory import live_memory
from nimble_viz.analysis.overhead import exposed, module_tree
from nimble_viz.analysis.source import hottest, source
from nimble_viz.render.html import fragment, page
from nimble_viz.render.pane import PANES
from tests.support.lab import chromium
from tests.support.sample_reports import (
    CASES,
    RENDERED,
    busy_report,
    fused_report,
    old_report,
    plan_report,
    profile_report,
    sample_report,
    tangled_report,
    training_report,
)

pytestmark = pytest.mark.browser

RECORDINGS = Path(__file__).parents[3] / "examples" / "recordings"
_TABS = ("summary", "overhead", "dag", "timeline", "syncs", "source", "memory")


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with chromium() as launched:
        yield launched


@dataclass
class Opened:
    page: object
    troubles: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture
def opened(browser, tmp_path: Path):
    contexts = []

    def open_text(text: str, *, dark: bool = False, width: int = 1280, framed: bool = False) -> Opened:
        path = tmp_path / "report.html"
        path.write_text(text, encoding="utf-8")
        context = browser.new_context(
            color_scheme="dark" if dark else "light", viewport={"width": width, "height": 800}
        )
        contexts.append(context)
        shown = Opened(context.new_page())
        shown.page.on("console", lambda message: shown.troubles.append(message.text))
        shown.page.on("pageerror", lambda error: shown.troubles.append(str(error)))
        shown.page.on("request", lambda request: shown.requests.append(request.url))
        shown.page.goto(path.as_uri())
        if not framed:
            shown.page.wait_for_function("() => window.nimbleViewer")
        return shown

    yield open_text
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", list(RENDERED))
def test_every_case_shows_every_tab_without_a_word_on_the_console_or_the_network(opened, name):
    shown = opened(page(RENDERED[name]()))
    for tab in _TABS:
        shown.page.click(f"#nv-tab-{tab}")
        assert shown.page.get_attribute(f"#nv-tab-{tab}", "aria-selected") == "true"
        assert shown.page.is_visible(f"#nv-pane-{tab}")
        assert shown.page.inner_text(f"#nv-pane-{tab}").strip()
        shown.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert shown.troubles == []
    assert [url for url in shown.requests if not url.startswith(("file:", "data:"))] == []
    assert shown.page.evaluate("window.hacked") is None


_OF_TEXT = """(word) => [...document.querySelectorAll(".nv-head *, #nv-pane-summary *")]
  .filter((node) => [...node.childNodes].some((one) => one.nodeType === 3 && one.data.includes(word)))
  .map((node) => [getComputedStyle(node), node.textContent])
  .map(([style, text]) => ({ weight: style.fontWeight, colour: style.color, text }))"""
_GOOD = """() => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = "var(--good)";
  return getComputedStyle(probe).color;
}"""


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_undecided_is_bold_or_green_and_what_is_decided_is(opened, dark):
    shown = opened(page(busy_report()), dark=dark)
    good = shown.page.evaluate(_GOOD)
    found = shown.page.evaluate(_OF_TEXT, "undecided")
    assert len(found) >= 6  # the headline, its reason, cells, outcomes
    assert [one for one in found if one["weight"] != "400" or one["colour"] == good] == []
    (head,) = (one for one in found if "undecided against eager (" in one["text"])
    assert "load 14 on 2 cores" in head["text"]
    report = sample_report(24, device="cpu")
    sure = opened(page(report), dark=dark)
    told = sure.page.evaluate(_OF_TEXT, f"{report.ratio('nimble').value:.2f}x")
    assert good in {one["colour"] for one in told}
    assert sure.page.evaluate("getComputedStyle(document.querySelector('.nv-verdict')).fontWeight") == "550"


@pytest.mark.slow
def test_the_summary_shows_what_was_tried_emitted_held_and_worth_it(opened):
    shown = opened(page(CASES["many candidates"]()))
    text = shown.page.inner_text("#nv-pane-summary")
    for part in (
        "Plans that were tried",
        "13 plans more, not captured",
        "emitted as promised: |E'| - |M| =",
        "Width of the DAG: 4",
    ):
        assert part in text
    assert "outputs differ" in shown.page.inner_text("#nv-pane-summary tr.nv-wrong")
    assert shown.page.locator("#nv-pane-summary tr.nv-wrong").count() == 1
    assert "4 streams are worth it" in text
    assert "Saved by reuse" in text
    shown.page.click("text=13 plans more")
    assert shown.page.is_visible("text=contention, 7 streams")
    shown.page.click("#nv-tab-syncs")
    assert "Inside calls" in shown.page.inner_text("#nv-pane-syncs")


@pytest.mark.slow
def test_a_plan_and_an_old_file_show_only_what_they_know(opened):
    for report, missing in (
        (plan_report(), ("Same outputs", "Memory", "Kernels in flight", "Fork", "worth it", "not read")),
        (old_report(), ("Plans that were tried", "Fork", "Saved by reuse")),
    ):
        shown = opened(page(report))
        text = shown.page.inner_text("#nv-pane-summary")
        assert [word for word in missing if word in text] == []
        assert "undefined" not in text
        assert "null" not in text
        shown.page.click("#nv-tab-syncs")
        assert "false" not in shown.page.inner_text("#nv-pane-syncs")
        assert shown.troubles == []


@pytest.mark.slow
def test_a_profile_shows_its_bound_and_says_what_it_has_not(opened):
    shown = opened(page(profile_report()))
    assert "host-bound: 51.8%" in shown.page.inner_text(".nv-verdict")
    text = shown.page.inner_text("#nv-pane-summary")
    for part in ("What an iteration is spent on", "One iteration by phase", "loader", "copy", "Not in this report"):
        assert part in text
    for part in ("Preparation", "Same outputs as eager?", "Over eager", "Plans and synchronisations"):
        assert part not in text
    shown.page.click("#nv-tab-overhead")
    overhead = shown.page.inner_text("#nv-pane-overhead")
    for part in (
        "Tail",
        "Waits for the data loader",
        "Idle: host late, nothing queued",
        "not timed without the profiler",
    ):
        assert part in overhead
    shown.page.click("#nv-tab-dag")
    assert "No DAG here" in shown.page.inner_text("#nv-pane-dag")
    shown.page.click("#nv-tab-syncs")
    syncs = shown.page.inner_text("#nv-pane-syncs")
    assert "Memcpy HtoD (Pageable -> Device)" in syncs
    assert "false" not in syncs
    assert shown.troubles == []


@pytest.mark.slow
def test_arrow_keys_move_between_tabs(opened):
    shown = opened(page(sample_report(10)))
    shown.page.focus("#nv-tab-summary")
    shown.page.keyboard.press("ArrowRight")
    assert shown.page.evaluate("document.activeElement.id") == "nv-tab-overhead"
    shown.page.keyboard.press("End")
    assert shown.page.get_attribute("#nv-tab-memory", "aria-selected") == "true"


@pytest.mark.slow
def test_a_clicked_node_selects_its_row_its_bar_and_its_sync(opened):
    shown = opened(page(sample_report(60)))
    shown.page.click("#nv-tab-dag")
    point = shown.page.evaluate("nimbleViewer.dagPoint(4)")
    shown.page.mouse.click(point["x"], point["y"])
    assert shown.page.evaluate("nimbleViewer.selected()") == 4
    assert "call 4:" in shown.page.inner_text("[aria-live]")
    shown.page.click("#nv-tab-overhead")
    assert shown.page.get_attribute("#nv-pane-overhead .nv-on", "data-call") == "4"
    shown.page.click("#nv-tab-syncs")
    assert "4 addmm" in shown.page.inner_text("#nv-pane-syncs tr.nv-on")


@pytest.mark.slow
def test_a_clicked_bar_or_row_selects_everywhere(opened):
    shown = opened(page(sample_report(60)))
    shown.page.click("#nv-tab-timeline")
    point = shown.page.evaluate("nimbleViewer.timelinePoint('single', 33)")
    shown.page.mouse.click(point["x"], point["y"])
    assert shown.page.evaluate("nimbleViewer.selected()") == 33
    shown.page.click("#nv-tab-overhead")
    shown.page.click("text=By call")
    shown.page.click("#nv-pane-overhead button[data-call='7']")
    assert shown.page.evaluate("nimbleViewer.selected()") == 7
    assert "addmm" in shown.page.inner_text("aside")


@pytest.mark.slow
def test_an_eager_call_marks_the_fused_call_that_stands_for_it_and_back(opened):
    report = fused_report()
    shown = opened(page(report))
    shown.page.click("#nv-tab-overhead")
    shown.page.click("text=By call")
    shown.page.click("#nv-pane-overhead button[data-call='12']")
    assert shown.page.evaluate("nimbleViewer.marked()") == {"calls": [9], "eager": [12]}
    assert "became 9 gelu+layer_norm" in shown.page.inner_text("#nv-pane-overhead .nv-on")
    assert report.program.calls[9].operator in shown.page.inner_text("aside")
    shown.page.click("#nv-tab-timeline")
    for run, call, marked in (("eager", 5, 5), ("inductor, nimble", 5, 5), ("eager", 12, 9)):
        point = shown.page.evaluate(f"nimbleViewer.timelinePoint('{run}', {call})")
        shown.page.mouse.click(point["x"], point["y"])
        assert shown.page.evaluate("nimbleViewer.selected()") == marked
    shown.page.click("#nv-tab-dag")
    point = shown.page.evaluate("nimbleViewer.dagPoint(9)")
    shown.page.mouse.click(point["x"], point["y"])
    assert shown.page.evaluate("nimbleViewer.marked()") == {"calls": [9], "eager": [11, 12]}
    assert "sample_net/modeling.py:32" in shown.page.inner_text("aside")
    shown.page.click("#nv-tab-overhead")
    rows = shown.page.eval_on_selector_all("#nv-pane-overhead .nv-on", "rows => rows.map(row => row.dataset.call)")
    assert sorted(rows) == ["11", "12"]
    shown.page.click("aside button[data-eager='11']")
    assert shown.page.evaluate("nimbleViewer.selectedEager()") == 11
    shown.page.click("#nv-tab-syncs")
    assert "for eager 11 gelu, 12 native_layer_norm" in shown.page.inner_text("#nv-pane-syncs tr.nv-on")
    shown.page.evaluate("nimbleViewer.selectEager(59)")
    assert shown.page.evaluate("nimbleViewer.marked()") == {"calls": [], "eager": [59]}
    assert "No call of the replay stands for it" in shown.page.inner_text("aside")
    assert shown.troubles == []


@pytest.mark.slow
def test_the_tip_of_a_fused_call_says_what_it_stands_for(opened):
    shown = opened(page(fused_report()))
    shown.page.click("#nv-tab-dag")
    for call, part in (
        (9, "eager 12 native_layer_norm in encoder.layer.0.branch3.2"),
        (0, "no eager call explains it"),
    ):
        point = shown.page.evaluate(f"nimbleViewer.dagPoint({call})")
        shown.page.mouse.move(point["x"], point["y"])
        assert part in shown.page.inner_text(".nv-tip")


@pytest.mark.slow
def test_peers_payback_distance_and_provenance_are_on_the_summary(opened):
    text = opened(page(fused_report())).page.inner_text("#nv-pane-summary")
    for part in (
        "Against peers",
        "ours: no difference from it (1.00x to 1.01x)",
        "its time does not count",
        "not installed: no module named 'tensorrt'",
        "Break-even",
        "the compiler failed: ninja: build stopped",
        "Distance to the limit",
        "contention",
        "44 calls (inductor) for 60 eager calls",
        "0.7% of replay time",
    ):
        assert part in text


@pytest.mark.slow
def test_a_clicked_line_selects_its_calls_everywhere_and_a_call_marks_its_line(opened):
    report = sample_report(60)
    own = [call.index for call in report.program.calls if call.origins[0].line == 31]
    shown = opened(page(report))
    shown.page.click("#nv-tab-source")
    shown.page.click("#nv-pane-source details button[data-line='31']")
    assert shown.page.evaluate("nimbleViewer.marked()") == {"calls": own, "eager": own}
    assert "sample_net/modeling.py:31" in shown.page.inner_text("aside")
    assert "b1 = self.gelu(x)" in shown.page.inner_text("aside")
    assert f"{len(own)} calls" in shown.page.inner_text("[aria-live]")
    shown.page.click("#nv-tab-overhead")
    shown.page.click("text=By call")
    rows = shown.page.eval_on_selector_all(
        "#nv-pane-overhead .nv-on", "rows => rows.map(row => Number(row.dataset.call))"
    )
    assert sorted(rows) == own
    shown.page.evaluate("nimbleViewer.select(0)")
    shown.page.click("#nv-tab-source")
    marked = shown.page.eval_on_selector_all("#nv-pane-source .nv-on", "rows => rows.map(row => row.dataset.line)")
    assert set(marked) == {"21"}
    assert shown.troubles == []


@pytest.mark.slow
def test_a_line_of_fused_code_marks_what_its_eager_calls_became(opened):
    report = fused_report()
    eager = [call.index for call in report.eager_calls if call.origins[0].line == 32]
    became = [call.index for call in report.program.calls if set(eager) & set(call.eager)]
    shown = opened(page(report))
    shown.page.evaluate("nimbleViewer.selectLine('sample_net/modeling.py', 32)")
    assert shown.page.evaluate("nimbleViewer.marked()") == {"calls": became, "eager": eager}
    shown.page.click("#nv-tab-source")
    assert "Became" in shown.page.inner_text("aside")
    shown.page.evaluate("nimbleViewer.selectLine('sample_net/modeling.py', 99)")
    assert shown.page.evaluate("nimbleViewer.marked()") == {"calls": [], "eager": []}
    assert not shown.page.is_visible("aside")


@pytest.mark.slow
def test_heat_is_a_number_too_and_lines_are_sorted_by_what_is_asked_for(opened):
    report = sample_report(60)
    found = source(report)
    shown = opened(page(report))
    shown.page.click("#nv-tab-source")
    hot = "#nv-pane-source section.nv-card"
    shares = shown.page.locator(f"{hot} button.nv-hot .nv-meter b").all_inner_texts()
    assert len([text for text in shares if text.endswith("%")]) == len(
        {call.origins[0].line for call in report.program.calls}
    )
    for key, name in (("host", "Host"), ("replay", "Replay"), ("device", "GPU")):
        shown.page.click(f"#nv-pane-source .nv-tools >> text={name}")
        lines = shown.page.eval_on_selector_all(
            f"{hot} button.nv-hot", "rows => rows.map(row => Number(row.dataset.line))"
        )
        assert lines[:5] == [row["line"] for row in hottest(found, key, 5)]
    shown.page.click(f"{hot} >> text=Calls")
    assert shown.page.get_attribute(f"{hot} button[aria-pressed=true]:has-text('Calls')", "aria-pressed") == "true"
    shown.page.fill("#nv-pane-source input[type=search]", "gelu")
    assert shown.page.locator(f"{hot} button.nv-hot").count() == 1
    assert shown.troubles == []


@pytest.mark.slow
def test_code_without_calls_is_folded_and_opens(opened):
    report = sample_report(60)
    long = replace(report.sources[0], lines=(*report.sources[0].lines, *["    # quiet"] * 300))
    shown = opened(page(replace(report, sources=(long,))))
    shown.page.click("#nv-tab-source")
    text = "#nv-pane-source details"
    assert shown.page.locator(f"{text} >> text=# quiet").count() < 10
    shown.page.click(f"{text} .nv-quiet >> nth=-1")
    assert shown.page.locator(f"{text} >> text=# quiet").count() == 300
    shown.page.click("#nv-pane-source >> text=Fold all")
    assert not shown.page.is_visible(f"{text} .nv-lines")
    shown.page.evaluate("nimbleViewer.select(5)")
    assert shown.page.is_visible(f"{text} .nv-lines")


@pytest.mark.slow
def test_a_training_step_has_forward_and_backward_columns(opened):
    shown = opened(page(training_report()))
    shown.page.click("#nv-tab-source")
    head = shown.page.inner_text("#nv-pane-source .nv-top >> nth=0")
    assert "Host, forward" in head
    assert "backward" in head
    shown.page.click("#nv-pane-source details button[data-line='30']")
    assert "backward" in shown.page.inner_text("aside")


@pytest.mark.slow
def test_the_memory_curve_is_walked_clicked_and_zoomed(opened):
    report = sample_report(60)
    shown = opened(page(report))
    shown.page.click("#nv-tab-memory")
    point = shown.page.evaluate("nimbleViewer.memoryPoint(0, 33)")
    shown.page.mouse.move(point["x"], point["y"])
    assert "live during call 33" in shown.page.inner_text(".nv-tip")
    shown.page.mouse.click(point["x"], point["y"])
    assert shown.page.evaluate("nimbleViewer.selected()") == 33
    shown.page.focus("#nv-pane-memory canvas >> nth=0")
    shown.page.keyboard.press("ArrowRight")
    assert shown.page.evaluate("nimbleViewer.selected()") == 34
    shown.page.keyboard.press("+")
    low, high = shown.page.evaluate("nimbleViewer.memoryRange()")
    assert high - low == pytest.approx(1 / 1.5)
    shown.page.keyboard.press("0")
    assert shown.page.evaluate("nimbleViewer.memoryRange()") == [0, 1]
    shown.page.click("#nv-pane-memory tbody .nv-link >> nth=0")
    holder = live_memory(report)["runs"][0]["holders"][0]["call"]
    assert shown.page.evaluate("nimbleViewer.selected()") == holder
    assert shown.page.locator("#nv-pane-memory tr.nv-on").count() >= 1
    assert shown.troubles == []


@pytest.mark.slow
def test_what_a_call_is_not_known_to_hold_is_said(opened):
    shown = opened(page(profile_report()))
    shown.page.click("#nv-tab-memory")
    assert "is not known" in shown.page.inner_text("#nv-pane-memory")


@pytest.mark.slow
@pytest.mark.parametrize("pane", PANES)
def test_a_page_opens_at_the_pane_that_is_asked_for(opened, pane):
    shown = opened(page(sample_report(20), pane))
    assert shown.page.is_visible(f"#nv-pane-{pane}")


@pytest.mark.slow
@pytest.mark.parametrize("pane", ["source", "memory"])
def test_code_and_memory_of_ten_thousand_calls_open(opened, pane):
    report = CASES["ten thousand"]()
    code = "\n".join(f"        b{k} = self.block_{k}(x)  # {'long ' * 6}" for k in range(3_000)).split("\n")
    calls = tuple(
        replace(call, origins=(replace(call.origins[0], line=19 + call.index % 3_000),))
        for call in report.program.calls
    )
    sources = (replace(report.sources[0], lines=("    def forward(self, x):", *code)),)
    shown = opened(page(replace(report, sources=sources, program=replace(report.program, calls=calls))))
    shown.page.click(f"#nv-tab-{pane}")
    shown.page.evaluate("nimbleViewer.select(9876)")
    assert shown.troubles == []


@pytest.mark.slow
def test_timeline_zooms_to_a_microsecond_and_no_further(opened):
    shown = opened(page(sample_report(60)))
    shown.page.click("#nv-tab-timeline")
    shown.page.evaluate("nimbleViewer.zoomTimeline(5000, 5010)")
    low, high = shown.page.evaluate("nimbleViewer.timelineRange()")
    assert high - low == pytest.approx(1000)


@pytest.mark.slow
def test_folding_and_opening_modules(opened):
    shown = opened(page(CASES["thousand"]()))
    shown.page.click("#nv-tab-dag")
    folded = shown.page.evaluate("nimbleViewer.dagBoxes()")
    assert folded < 1_000
    shown.page.click("text=Open all")
    assert shown.page.evaluate("nimbleViewer.dagBoxes()") > 1_000
    shown.page.click("text=Fold all")
    assert shown.page.evaluate("nimbleViewer.dagBoxes()") <= folded


_COLOUR = "#nv-pane-dag select[aria-label=Colour]"


@pytest.mark.slow
def test_colour_is_chosen_with_the_keyboard_and_stays(opened):
    shown = opened(page(training_report()))
    shown.page.click("#nv-tab-dag")
    legend = "#nv-pane-dag .nv-legend"
    assert shown.page.input_value(_COLOUR) == "stream"
    shown.page.focus(_COLOUR)
    for key, told in (("exposed", "device was idle"), ("time", "each call alone"), ("phase", "optimizer")):
        shown.page.keyboard.press("ArrowDown")
        assert shown.page.input_value(_COLOUR) == key
        assert told in shown.page.inner_text(legend)
    shown.page.keyboard.press("ArrowUp")
    shown.page.click("#nv-tab-overhead")
    shown.page.evaluate("nimbleViewer.setTheme('dark')")
    shown.page.click("#nv-tab-dag")
    shown.page.select_option("#nv-pane-dag select[aria-label=Schedule]", "0")
    assert shown.page.input_value(_COLOUR) == "time"
    assert shown.page.evaluate("nimbleViewer.dagColours().key") == "time"
    assert shown.troubles == []


@pytest.mark.slow
def test_a_colour_that_is_not_known_cannot_be_chosen_and_says_why(opened):
    shown = opened(page(plan_report()))
    shown.page.click("#nv-tab-dag")
    barred = shown.page.eval_on_selector_all(f"{_COLOUR} option", "all => all.map(o => [o.disabled, o.textContent])")
    assert barred == [
        [False, "Stream"],
        [True, "Exposed overhead (eager was not profiled)"],
        [True, "GPU time (not measured)"],
        [True, "Phase (all calls are forward)"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_steps_of_the_scale_have_numbers_and_hold_the_values(opened, dark):
    report = sample_report(60)
    shown = opened(page(report), dark=dark)
    shown.page.click("#nv-tab-dag")
    shown.page.select_option(_COLOUR, "time")
    for act in ("text=Open all", "text=Fold all"):
        shown.page.click(f"#nv-pane-dag >> {act}")
        found = shown.page.evaluate("nimbleViewer.dagColours()")
        bounds = found["bounds"]
        steps = shown.page.locator("#nv-pane-dag .nv-steps b").all_inner_texts()
        assert steps == [f"≤ {bound / 1e3:g} µs" for bound in bounds]
        assert 1 < len(bounds) <= 7
        ns = [0.0] * (len(report.program.calls) + 1000)
        columns = dag(report)["columns"]
        size = len(report.program.calls)
        for box, _, _ in found["boxes"]:
            first, last = (box, box) if box < size else (columns["first"][box - size], columns["last"][box - size])
            ns[box] = sum(round(value) for value in report.costs.ns[first : last + 1])
        by_step = {}
        for box, colour, words in found["boxes"]:
            assert words.startswith(format_ns(ns[box]))
            assert ("%" in words) == (box >= size)
            by_step.setdefault(next(k for k, bound in enumerate(bounds) if ns[box] <= bound), set()).add(colour)
        assert all(len(colours) == 1 for colours in by_step.values())
        light = [_lightness(colours.copy().pop()) for _, colours in sorted(by_step.items())]
        assert light == sorted(light, reverse=not dark)
        assert all(abs(a - b) > 0.03 for a, b in itertools.pairwise(light))


def _lightness(colour: str) -> float:
    """Relative luminance by WCAG 2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.slow
def test_text_on_every_step_can_be_read(opened):
    for dark in (False, True):
        shown = opened(page(CASES["thousand"]()), dark=dark)
        shown.page.click("#nv-tab-dag")
        for colour in ("time", "exposed"):
            shown.page.select_option(_COLOUR, colour)
            inks = shown.page.eval_on_selector_all(
                "#nv-pane-dag .nv-steps b[style]",
                "all => all.map(b => [getComputedStyle(b).backgroundColor, getComputedStyle(b).color])",
            )
            for pair in inks:
                levels = [
                    _lightness("#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", one)[:3]))
                    for one in pair
                ]
                assert (max(levels) + 0.05) / (min(levels) + 0.05) >= 4.5


@pytest.mark.slow
def test_calls_without_a_value_say_so(opened):
    report = fused_report()
    shown = opened(page(report))
    shown.page.click("#nv-tab-dag")
    shown.page.click("#nv-pane-dag >> text=Open all")
    shown.page.select_option(_COLOUR, "exposed")
    words = {box: (colour, said) for box, colour, said in shown.page.evaluate("nimbleViewer.dagColours().boxes")}
    assert words[0] == (None, "not known")
    assert "1 call not among those of profiled eager" in shown.page.inner_text("#nv-pane-dag .nv-legend")
    point = shown.page.evaluate("nimbleViewer.dagPoint(0)")
    shown.page.mouse.move(point["x"], point["y"])
    assert "Exposed overhead: not known" in shown.page.inner_text(".nv-tip")
    point = shown.page.evaluate("nimbleViewer.dagPoint(1)")
    shown.page.mouse.move(point["x"], point["y"])
    assert f"Exposed overhead: {format_ns(exposed(report)[1])}" in shown.page.inner_text(".nv-tip")


@pytest.mark.slow
def test_calls_and_folded_groups_name_their_phase(opened):
    report = training_report()
    shown = opened(page(report))
    shown.page.click("#nv-tab-dag")
    shown.page.select_option(_COLOUR, "phase")
    shown.page.click("#nv-pane-dag >> text=Open all")
    phases = {box: said for box, _, said in shown.page.evaluate("nimbleViewer.dagColours().boxes")}
    assert phases == {call.index: call.phase for call in report.program.calls}
    shown.page.click("#nv-pane-dag >> text=Fold all")
    folded = [said for box, _, said in shown.page.evaluate("nimbleViewer.dagColours().boxes") if box >= 60]
    assert set(folded) >= {"forward", "backward"}
    letters = shown.page.locator("#nv-pane-dag .nv-legend .nv-stream").all_inner_texts()
    assert letters == ["F", "L", "B", "O"]
    assert shown.troubles == []


_CROSSED = """
() => {
  const { boxes, edges } = nimbleViewer.dagDrawn(), hits = [];
  for (const { a, b, way } of edges) {
    const points = [];
    for (let k = 0; k < way.length; k += 3) {
      const [x, top, bottom, next, low] = way.slice(k, k + 5);
      if (bottom < top - 1e-6 || low < bottom - 1e-6) hits.push([a, b, "upward"]);
      for (let t = 0; t <= 1; t += 1 / Math.max(2, (bottom - top) / 8)) points.push([x, top + t * (bottom - top)]);
      for (let t = 0; t <= 1 && next !== undefined; t += 0.02) {
        points.push([x + t * t * (3 - 2 * t) * (next - x), bottom + (1.5 * t * (1 - t) + t ** 3) * (low - bottom)]);
      }
    }
    for (const [box, left, top, width, height] of boxes) {
      const inside = ([x, y]) => x > left + 0.5 && x < left + width - 0.5 && y > top + 0.5 && y < top + height - 0.5;
      if (box !== a && box !== b && points.some(inside)) hits.push([a, b, box]);
    }
  }
  return [edges.length, hits];
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_edge_runs_behind_a_box(opened, seed):
    shown = opened(page(tangled_report(seed)))
    shown.page.click("#nv-tab-dag")
    for act in ("text=Fold all", "text=Open all", "text=Transitive edges"):
        shown.page.click(act)
        drawn, crossed = shown.page.evaluate(_CROSSED)
        assert drawn > 0
        assert crossed == []
    assert shown.troubles == []


@pytest.mark.slow
def test_an_edge_says_what_it_is(opened):
    shown = opened(page(CASES["narrow"]()))
    shown.page.click("#nv-tab-dag")
    upper, lower, upper = (shown.page.evaluate(f"nimbleViewer.dagPoint({call})") for call in (1, 2, 1))
    shown.page.mouse.move(upper["x"], (upper["y"] + lower["y"]) / 2)
    text = shown.page.inner_text(".nv-tip")
    assert "must wait" in text
    assert "from 1 addmm" in text
    assert "to 2 gelu" in text


@pytest.mark.slow
def test_boxes_and_the_map_do_not_hide_each_other(opened):
    shown = opened(page(CASES["thousand"]()))
    shown.page.click("#nv-tab-dag")
    assert shown.page.is_visible(".nv-map")
    shown.page.click("text=Open all")
    boxes = shown.page.evaluate("nimbleViewer.dagDrawn().boxes")
    by_row: dict[float, list[tuple[float, float]]] = {}
    for _, left, top, width, _height in boxes:
        by_row.setdefault(round(top, 3), []).append((left, left + width))
    for spans in by_row.values():
        spans.sort()
        assert all(right <= left for (_, right), (left, _) in itertools.pairwise(spans))
    shown.page.click("text=Fit")
    shown.page.wait_for_selector(".nv-map", state="hidden")


@pytest.mark.slow
def test_an_idle_stretch_says_which_call_waited_for_which_and_why(opened):
    report = sample_report(60)
    line, plan = report.timeline("nimble"), report.schedule("nimble")
    gap = max(gaps(report.graph, plan, line), key=lambda one: one.unready_ns)
    zero = line.spans[0].start_ns
    shown = opened(page(report))
    shown.page.click("#nv-tab-timeline")
    width = gap.end_ns - gap.start_ns
    shown.page.evaluate(f"nimbleViewer.zoomTimeline({gap.start_ns - zero - width}, {gap.end_ns - zero + width})")
    waiter = shown.page.evaluate(f"nimbleViewer.timelinePoint('nimble', {gap.call})")
    board = shown.page.locator("#nv-pane-timeline canvas").last.bounding_box()
    middle = board["x"] + 168 + (board["width"] - 168 - 8) / 2
    shown.page.mouse.move(middle, waiter["y"])
    text = shown.page.inner_text(".nv-tip")
    assert waiter["x"] > middle
    assert f"before call {gap.call} " in text
    assert f"waited for call {gap.awaited} " in text
    assert "nothing ready" in text


@pytest.mark.slow
def test_figures_of_a_run_open_below_its_lanes_and_lead_to_calls(opened):
    report = sample_report(60)
    line = report.timeline("nimble")
    seen = replace(line, streams=tuple(20 + span.lane for span in line.spans), check=SelfCheck(60, 60, "graph node id"))
    shown = opened(page(replace(report, timelines=(*report.timelines[:-1], seen))))
    shown.page.click("#nv-tab-timeline")
    shown.page.locator(".nv-figures summary").last.click()
    text = shown.page.locator(".nv-figures").last.inner_text()
    assert "60 kernels seen, 60 nodes expected" in text
    point = shown.page.evaluate("nimbleViewer.timelinePoint('nimble', 33)")
    shown.page.mouse.move(point["x"], point["y"])
    assert f"ran on stream {20 + report.schedule('nimble').stream[33]} of the device" in shown.page.inner_text(
        ".nv-tip"
    )
    shown.page.locator(".nv-figures").last.locator(".nv-link").first.click()
    assert shown.page.evaluate("nimbleViewer.selected()") >= 0


@pytest.mark.slow
def test_an_unreliable_replay_is_marked_and_has_no_gaps(opened):
    report = sample_report(60)
    lines = [replace(line, reliable=False, note="59 of 60 nodes seen in every replay") for line in report.timelines]
    shown = opened(page(replace(report, timelines=tuple(lines))))
    shown.page.click("#nv-tab-timeline")
    assert shown.page.locator("#nv-pane-timeline h3 >> text=unreliable: self-check failed").count() == 3
    assert "59 of 60 nodes seen" in shown.page.inner_text("#nv-pane-timeline")
    shown.page.locator(".nv-figures summary").last.click()
    assert "not derived: kernels are missing" in shown.page.locator(".nv-figures").last.inner_text()


@pytest.mark.slow
def test_the_timeline_zooms_to_the_replays_and_back(opened):
    report = sample_report(60)
    shown = opened(page(report))
    shown.page.click("#nv-tab-timeline")
    shown.page.click("text=Fit all")
    _, whole = shown.page.evaluate("nimbleViewer.timelineRange()")
    shown.page.click("text=Fit replays")
    low, high = shown.page.evaluate("nimbleViewer.timelineRange()")
    longest = max(line.length_ns for line in report.timelines if line.run != "eager")
    assert low == 0
    assert high == pytest.approx(1.02 * longest)
    shown.page.click("text=Fit all")
    assert shown.page.evaluate("nimbleViewer.timelineRange()")[1] == pytest.approx(whole)


@pytest.mark.slow
def test_the_timeline_opens_where_the_replays_can_be_read(opened):
    report = sample_report(60)
    shown = opened(page(report))
    shown.page.click("#nv-tab-timeline")
    rest = shown.page.locator("#nv-pane-timeline .nv-rest")
    longest = max(line.length_ns for line in report.timelines if line.run != "eager")
    assert shown.page.evaluate("nimbleViewer.timelineRange()") == [0, pytest.approx(1.02 * longest)]
    assert [rest.nth(at).is_visible() for at in range(rest.count())] == [True, False, False]
    assert "goes on to the right" in rest.first.inner_text()
    assert shown.page.get_attribute("text=Fit replays", "aria-pressed") == "true"
    rest.first.click()
    assert shown.page.evaluate("nimbleViewer.timelineRange()")[1] > report.timeline("eager").length_ns
    assert not rest.first.is_visible()
    assert shown.page.get_attribute("text=Fit all", "aria-pressed") == "true"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["googlenet-h200", "nasnet-a-mobile-h200", "resnet18-training-h200"])
def test_the_page_derives_what_runs_side_by_side_and_where_gaps_are(opened, name):
    report = nimble_viz.load(RECORDINGS / f"{name}.nimble")
    shown = opened(page(report))
    for line in report.timelines:
        derived = shown.page.evaluate(f"nimbleViewer.derived({line.run!r})")
        assert max(derived["flights"]["running"]) == in_flight(line)[0]
        assert derived["flights"]["running"][-1] == 0
        gaps = [gap for gap in replay_gaps(report, line) if gap.call is not None]
        assert derived["gaps"]["call"] == [gap.call for gap in gaps]
        assert derived["gaps"]["lane"] == [gap.lane for gap in gaps]
        zero = min(span.start_ns for span in line.spans)
        assert derived["gaps"]["start"] == pytest.approx([gap.start_ns - zero for gap in gaps], abs=1)
        assert derived["gaps"]["length"] == pytest.approx([gap.end_ns - gap.start_ns for gap in gaps], abs=1)


@pytest.mark.slow
def test_modules_hold_what_is_in_them(opened):
    report = sample_report(120)
    shown = opened(page(report))
    shown.page.click("#nv-tab-overhead")
    shown.page.click("#nv-pane-overhead >> text=By module")
    rows = shown.page.locator("#nv-pane-overhead button.nv-row")
    first = rows.filter(has=shown.page.locator(".nv-fold:text-matches('[▸▾]')")).first
    key = first.get_attribute("data-key")
    row = shown.page.locator(f"#nv-pane-overhead button.nv-row[data-key='{key}']")

    def total(one) -> int:
        return int(one.locator(".nv-num").last.inner_text().replace(",", ""))

    if row.get_attribute("aria-expanded") == "true":
        row.press("ArrowLeft")
    assert row.get_attribute("aria-expanded") == "false"
    before = rows.count()
    row.locator(".nv-fold").click()
    assert row.get_attribute("aria-expanded") == "true"
    assert rows.count() > before
    inside = module_tree(report)[0].inside
    assert key == module_tree(report)[0].path
    assert total(row) == len(module_tree(report)[0].eager) == sum(len(one.eager) for one in inside)
    shown.page.select_option("[aria-label='Levels of modules']", label="1")
    assert rows.count() == len(module_tree(report))
    shown.page.evaluate("nimbleViewer.select(17)")
    assert shown.page.locator("#nv-pane-overhead .nv-row.nv-on").count() == 1
    assert shown.troubles == []


@pytest.mark.slow
def test_calls_of_the_optimizer_are_not_put_down_to_the_model_itself(opened):
    report = training_report()
    calls = tuple(replace(call, origins=()) if call.phase == "optimizer" else call for call in report.program.calls)
    shown = opened(page(replace(report, program=replace(report.program, calls=calls))))
    shown.page.click("#nv-tab-overhead")
    shown.page.click("#nv-pane-overhead >> text=By module")
    names = shown.page.locator("#nv-pane-overhead .nv-row .nv-name").all_inner_texts()
    assert "(the optimizer)" in names
    assert "(the model itself)" not in names
    assert "Unattributed" in shown.page.inner_text("#nv-pane-overhead .nv-legend")
    shown.page.click("#nv-tab-timeline")
    lengths = shown.page.locator("#nv-pane-timeline .nv-section h3").all_inner_texts()
    assert ["the bare replay" in text for text in lengths] == [False, True, True]


@pytest.mark.slow
def test_an_optimizer_whose_calls_eager_did_not_make_has_one_row(opened):
    report = CASES["eager optimizer"]()
    name, told = "optimizer", "eager runs other operators: 0 of 2 calls found"
    first, second = report.overhead.shared
    shown = opened(page(report))
    shown.page.click("#nv-tab-overhead")
    rows = shown.page.locator("#nv-pane-overhead .nv-row .nv-name")
    for by in ("By operator", "By call"):
        shown.page.click(f"#nv-pane-overhead >> text={by}")
        names = [text.splitlines() for text in rows.all_inner_texts()]
        assert [one[:2] for one in names].count([name, told]) == 1
    assert not any(one[0].startswith((f"{first} ", f"{second} ")) for one in names)
    shown.page.click("#nv-pane-overhead >> text=By module")
    names = rows.all_inner_texts()
    assert "(the optimizer)" in names
    assert "c1" not in names
    shown.page.evaluate(f"nimbleViewer.select({first})")
    assert f"{name} ({told})" in shown.page.inner_text(".nv-detail")
    assert shown.troubles == []


@pytest.mark.slow
def test_themes_follow_the_system_and_the_button(opened):
    shown = opened(page(sample_report(10)), dark=True)
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = shown.page.evaluate(ground)
    shown.page.click(".nv-theme")
    assert shown.page.get_attribute("html", "data-theme") == "light"
    assert shown.page.evaluate(ground) != dark
    shown.page.click(".nv-theme")
    assert shown.page.get_attribute("html", "data-theme") == "dark"
    assert shown.page.evaluate(ground) == dark


@pytest.mark.slow
def test_the_theme_of_the_page_around_is_followed_until_another_is_chosen(opened):
    shown = opened(page(sample_report(10)))
    button, theme = shown.page.locator(".nv-theme"), "document.documentElement.dataset.theme"
    shown.page.evaluate("nimbleViewer.setTheme('dark')")
    assert (button.inner_text(), shown.page.evaluate(theme)) == ("Theme: auto", "dark")
    button.click()
    shown.page.evaluate("nimbleViewer.setTheme('dark')")
    assert (button.inner_text(), shown.page.evaluate(theme)) == ("Theme: light", "light")


@pytest.mark.slow
def test_the_tools_of_the_graph_lie_in_one_row(opened):
    shown = opened(page(CASES["two streams"]()), width=1250)
    shown.page.click("#nv-tab-dag")
    tools = shown.page.locator("#nv-pane-dag .nv-tools")
    assert tools.bounding_box()["height"] < 50
    fit = shown.page.locator("#nv-pane-dag button[aria-label='Fit everything']").bounding_box()
    stage = shown.page.locator("#nv-pane-dag .nv-stage").bounding_box()
    assert stage["y"] < fit["y"] < stage["y"] + stage["height"] - fit["height"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [500, 800, 1100, 1440])
def test_a_long_name_of_a_plan_gives_way_in_the_tools(opened, width):
    report = CASES["two streams"]()
    name = "a_policy_that_balances_streams_by_memory_and_by_time_and_by_more, 4 streams"
    plans = tuple(replace(one, policy=name) if one.policy == report.chosen else one for one in report.schedules)
    shown = opened(page(replace(report, schedules=plans, chosen=name)), width=width)
    shown.page.click("#nv-tab-dag")
    tools = shown.page.locator("#nv-pane-dag .nv-tools")
    assert tools.bounding_box()["height"] < (50 if width in (500, 1440) else 80)
    picker = tools.locator("select[aria-label=Schedule]")
    picker.select_option(str([one.policy for one in plans].index(name)))
    assert picker.bounding_box()["width"] > 120
    assert name.partition(",")[0] in picker.get_attribute("title")
    (tops,) = {tuple(box.bounding_box()["y"] for box in tools.locator("label:has(input)").all())}
    assert len(set(tops)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two streams", "fused"])
@pytest.mark.parametrize("width", [400, 2560])
def test_no_sideways_scrolling_of_the_page(opened, width, name):
    shown = opened(page(CASES[name]()), width=width)
    shown.page.evaluate("nimbleViewer.select(1)")
    for tab in _TABS:
        shown.page.click(f"#nv-tab-{tab}")
        assert shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_the_frame_of_a_notebook_works_in_its_sandbox(opened):
    shown = opened(f"<!doctype html><title>t</title>{fragment(sample_report(60))}", framed=True)
    frame = shown.page.frame_locator("iframe")
    frame.locator("#nv-tab-dag").click()
    assert frame.locator("#nv-pane-dag canvas[role=img]").is_visible()
    assert shown.troubles == []
    assert shown.page.inner_text("summary") == "Summary as text"


@pytest.mark.slow
def test_ten_thousand_calls_open(opened):
    shown = opened(page(CASES["ten thousand"]()))
    shown.page.click("#nv-tab-dag")
    assert shown.page.evaluate("nimbleViewer.dagBoxes()") > 0
    assert "modules folded" in shown.page.inner_text("#nv-pane-dag")
    shown.page.select_option(_COLOUR, "exposed")
    assert shown.page.locator("#nv-pane-dag .nv-steps b").count() > 0
    shown.page.evaluate("nimbleViewer.select(9876)")
    assert shown.page.evaluate("nimbleViewer.dagBoxes()") > 0
    assert shown.troubles == []


@pytest.mark.slow
def test_an_address_leads_to_a_view_and_a_call_and_follows_them(opened):
    shown = opened(page(sample_report(60)))
    shown.page.goto(shown.page.url.partition("#")[0] + "#view=timeline&call=20")
    shown.page.wait_for_function("() => nimbleViewer.selected() === 20")
    assert shown.page.is_visible("#nv-pane-timeline")
    shown.page.click("#nv-tab-dag")
    shown.page.evaluate("nimbleViewer.select(7)")
    assert shown.page.url.endswith("#view=dag&call=7")
    shown.page.reload()
    shown.page.wait_for_function("() => window.nimbleViewer")
    assert shown.page.evaluate("nimbleViewer.selected()") == 7
    assert shown.page.is_visible("#nv-pane-dag")
    assert shown.troubles == []


@pytest.mark.slow
def test_keys_search_zoom_move_and_are_listed(opened):
    shown = opened(page(sample_report(60)))
    shown.page.click("#nv-tab-timeline")
    low, high = shown.page.evaluate("nimbleViewer.timelineRange()")
    shown.page.keyboard.press("w")
    near, far = shown.page.evaluate("nimbleViewer.timelineRange()")
    assert far - near < high - low
    shown.page.keyboard.press("d")
    assert shown.page.evaluate("nimbleViewer.timelineRange()")[0] > near
    shown.page.keyboard.press("/")
    shown.page.keyboard.type("wasd?")
    assert shown.page.input_value("#nv-pane-timeline input[type=search]") == "wasd?"
    shown.page.focus("#nv-tab-timeline")
    shown.page.keyboard.press("?")
    assert "zoom in, zoom out" in shown.page.inner_text(".nv-help")
    shown.page.keyboard.press("Escape")
    assert not shown.page.is_visible(".nv-help")
    assert shown.troubles == []
