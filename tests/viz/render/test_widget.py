"""The widget: its traits, and the page's own code around them in a browser."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.utils.errors import InputError
from nimble_viz.render.widget import ReportWidget, Selection
from tests.support.first_screen import FIRST_SCREEN, assert_first_screen
from tests.support.lab import chromium
from tests.support.sample_reports import RENDERED, fused_report, sample_report
from tests.support.widget_page import widget_page

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("case", [name for name in RENDERED if "thousand" not in name])
def test_every_report_makes_one(case: str) -> None:
    report = RENDERED[case]()
    made = report.dashboard()
    state = made.get_state()
    json.dumps({name: value for name, value in state.items() if name != "_data"}, default=str)
    assert made.plan in {"", *(plan.policy for plan in report.schedules)}


def test_fused_calls_and_eager_calls_find_each_other() -> None:
    made = fused_report().dashboard()
    made.select(9)
    assert made.selected == Selection((9,), (11, 12))
    made.select_eager(12)
    assert made.selected == Selection((9,), (12,))
    made.clear()
    assert not made.selected


@given(calls=st.lists(st.integers(-3, 70)))
def test_selections_hold_calls_that_are_there_once(calls: list[int]) -> None:
    WIDE.select(*calls)
    assert WIDE.selected.calls == tuple(dict.fromkeys(call for call in calls if 0 <= call < 60))


@pytest.mark.parametrize("wrong", ["conv", 2.0, [1, 2]])
def test_what_is_no_call_cannot_be_selected(wrong: object) -> None:
    made = sample_report(20).dashboard()
    for select in (made.select, made.select_eager):
        with pytest.raises(InputError, match=r"is no number of a call\n.*from 0 to 19"):
            select(1, wrong)
    assert not made.selected


def test_plans_are_those_there_are() -> None:
    made = sample_report(20).dashboard()
    made.plan = "single"
    with pytest.raises(InputError, match=r"no schedule 'nimbel'\n.*one of single, nimble"):
        made.plan = "nimbel"
    assert made.plan == "single"


def test_a_what_if_is_returned_and_kept_and_a_refusal_keeps_nothing() -> None:
    made = sample_report(60).dashboard()
    assert made.what_if("opara", 2) is made.simulated
    assert made.get_state()["simulated"]["text"] == str(made.simulated)
    other = sample_report(60, device="cpu").dashboard()
    with pytest.raises(InputError, match="nothing can be simulated"):
        other.what_if("nimble", 2)
    assert other.simulated is None


def test_a_loaded_report_needs_no_torch(tmp_path: Path) -> None:
    path = sample_report(20).save(tmp_path / "a.nimble")
    code = (
        f"import sys; sys.modules['torch'] = None; import nimble_viz; d = nimble_viz.load({str(path)!r}).dashboard(); "
        "d.select(3); print(d.selected.calls, 'plotly' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "(3,) False\n"


# -- in a browser --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    contexts = []

    def show(widget: ReportWidget, *, dark: bool = False, width: int = 1280) -> Any:
        path = tmp_path / "widget.html"
        path.write_text(widget_page(widget, dark=dark), encoding="utf-8")
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}))
        shown = contexts[-1].new_page()
        shown.on("pageerror", lambda error: pytest.fail(str(error)))
        shown.goto(path.as_uri())
        shown.wait_for_function("() => window.viewer")
        return shown

    yield show
    for context in contexts:
        context.close()


@pytest.mark.browser
@pytest.mark.slow
def test_clicks_reach_the_kernel_and_code_reaches_the_page(opened: Any) -> None:
    shown = opened(fused_report().dashboard("dag"))
    point = shown.evaluate("viewer.views.dag.point(9)")
    shown.mouse.click(point["x"], point["y"])
    assert shown.evaluate("model.get('selected')") == {"calls": [9], "eager": [11, 12]}
    shown.evaluate("model.set('selected', { calls: [5, 7], eager: [5, 6] })")
    assert shown.evaluate("viewer.marked()") == {"calls": [5, 7], "eager": [5, 6]}
    assert shown.inner_text("aside h2") == "2 calls"
    shown.evaluate("model.set('selected', { calls: [], eager: [] })")
    assert not shown.is_visible("aside")
    assert shown.evaluate("saved.filter((name) => name === 'selected').length") == 3  # nothing is told twice


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 700])
def test_the_first_screen_is_that_of_the_page(opened: Any, width: int, dark: bool) -> None:
    shown = opened(fused_report().dashboard(), dark=dark, width=width)
    shown.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    root = "document.querySelector('.nimble-viewer').shadowRoot"
    assert_first_screen(shown.evaluate(f"() => ({FIRST_SCREEN})({root})"))
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.browser
@pytest.mark.slow
def test_schedule_and_theme_are_linked_both_ways(opened: Any) -> None:
    shown = opened(sample_report(60).dashboard("dag"), dark=True)
    assert shown.evaluate("model.get('dark') && viewer.dark()")
    shown.evaluate("model.set('dark', false)")
    assert not shown.evaluate("viewer.dark()")
    assert shown.evaluate("model.get('plan')") == "nimble"
    shown.select_option("#nv-pane-dag select[aria-label=Schedule]", "0")
    assert shown.evaluate("model.get('plan')") == "single"
    shown.evaluate("model.set('plan', 'nimble')")
    assert shown.input_value("#nv-pane-dag select[aria-label=Schedule]") == "1"
    assert not shown.is_visible(".nv-theme")


@pytest.mark.browser
@pytest.mark.slow
def test_a_what_if_is_asked_for_shown_and_removed(opened: Any) -> None:
    made = sample_report(60).dashboard("timeline")
    shown = opened(made)
    runs = shown.locator("#nv-pane-timeline section h3")
    before = runs.count()
    shown.select_option("select[aria-label='Policy to simulate']", "opara")
    shown.fill("input[aria-label='Streams, at most']", "2")
    shown.click("text=Simulate >> nth=0")
    assert shown.evaluate("sent") == [{"policy": "opara", "streams": 2}]
    made.what_if("opara", 2)
    shown.evaluate("(value) => model.set('simulated', value)", made.get_state()["simulated"])
    assert runs.count() == before + 1
    assert "SIMULATED, not measured" in shown.inner_text("#nv-pane-timeline")
    shown.click("text=Remove")
    assert shown.evaluate("model.get('simulated')") is None
    assert runs.count() == before


@pytest.mark.browser
@pytest.mark.slow
def test_what_cannot_be_simulated_is_said_where_it_would_stand(opened: Any) -> None:
    shown = opened(sample_report(20, device="cpu").dashboard("timeline"))
    assert "nothing can be simulated, how calls on this host" in shown.inner_text("#nv-pane-timeline")
    assert shown.locator("button:has-text('Simulate')").count() == 0


@pytest.mark.browser
@pytest.mark.slow
def test_styles_stay_inside_and_the_view_ends(opened: Any) -> None:
    shown = opened(sample_report(20).dashboard(), width=700)
    family = "(node) => getComputedStyle(node).fontFamily"
    assert shown.locator(".nv-root").evaluate(family) != shown.locator("body").evaluate(family)
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shown.evaluate("end()")
    assert shown.locator(".nimble-viewer").count() == 0
    shown.evaluate("model.set('selected', { calls: [1], eager: [1] })")  # nobody is left to hear it


WIDE = sample_report(60).dashboard()
