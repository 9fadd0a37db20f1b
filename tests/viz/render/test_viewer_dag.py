"""The graph in a real browser: folding, colours, edges, tools."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from nimble_core.utils.units import format_ns
from nimble_viz.analysis.dag import dag
from nimble_viz.analysis.overhead import exposed
from nimble_viz.render.html import page
from tests.support.sample_reports import (
    CASES,
    fused_report,
    plan_report,
    sample_report,
    tangled_report,
    training_report,
)

pytestmark = pytest.mark.browser


@pytest.mark.slow
def test_folding_and_opening_modules(opened):
    shown = opened(page(CASES["thousand"]()))
    shown.page.click("#nv-tab-dag")
    folded = shown.page.evaluate("nimbleViewer.views.dag.visible()")
    assert folded < 1_000
    shown.page.click("text=Open all")
    assert shown.page.evaluate("nimbleViewer.views.dag.visible()") > 1_000
    shown.page.click("text=Fold all")
    assert shown.page.evaluate("nimbleViewer.views.dag.visible()") <= folded


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
    assert shown.page.evaluate("nimbleViewer.views.dag.colours().key") == "time"
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
        found = shown.page.evaluate("nimbleViewer.views.dag.colours()")
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
    words = {box: (colour, said) for box, colour, said in shown.page.evaluate("nimbleViewer.views.dag.colours().boxes")}
    assert words[0] == (None, "not known")
    assert "1 call not among those of profiled eager" in shown.page.inner_text("#nv-pane-dag .nv-legend")
    point = shown.page.evaluate("nimbleViewer.views.dag.point(0)")
    shown.page.mouse.move(point["x"], point["y"])
    assert "Exposed overhead: not known" in shown.page.inner_text(".nv-tip")
    point = shown.page.evaluate("nimbleViewer.views.dag.point(1)")
    shown.page.mouse.move(point["x"], point["y"])
    assert f"Exposed overhead: {format_ns(exposed(report)[1])}" in shown.page.inner_text(".nv-tip")


@pytest.mark.slow
def test_calls_and_folded_groups_name_their_phase(opened):
    report = training_report()
    shown = opened(page(report))
    shown.page.click("#nv-tab-dag")
    shown.page.select_option(_COLOUR, "phase")
    shown.page.click("#nv-pane-dag >> text=Open all")
    phases = {box: said for box, _, said in shown.page.evaluate("nimbleViewer.views.dag.colours().boxes")}
    assert phases == {call.index: call.phase for call in report.program.calls}
    shown.page.click("#nv-pane-dag >> text=Fold all")
    folded = [said for box, _, said in shown.page.evaluate("nimbleViewer.views.dag.colours().boxes") if box >= 60]
    assert set(folded) >= {"forward", "backward"}
    letters = shown.page.locator("#nv-pane-dag .nv-legend .nv-stream").all_inner_texts()
    assert letters == ["F", "L", "B", "O"]
    assert shown.troubles == []


_CROSSED = """
() => {
  const { boxes, edges } = nimbleViewer.views.dag.drawn(), hits = [];
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
    upper, lower, upper = (shown.page.evaluate(f"nimbleViewer.views.dag.point({call})") for call in (1, 2, 1))
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
    boxes = shown.page.evaluate("nimbleViewer.views.dag.drawn().boxes")
    by_row: dict[float, list[tuple[float, float]]] = {}
    for _, left, top, width, _height in boxes:
        by_row.setdefault(round(top, 3), []).append((left, left + width))
    for spans in by_row.values():
        spans.sort()
        assert all(right <= left for (_, right), (left, _) in itertools.pairwise(spans))
    shown.page.click("text=Fit")
    shown.page.wait_for_selector(".nv-map", state="hidden")


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
