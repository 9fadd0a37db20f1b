"""The viewer in a real browser: no console errors, no network, linked selection, hostile names, themes, size."""

from __future__ import annotations

from dataclasses import replace
from html import escape

import pytest

from nimble_viz.analysis.overhead import grouped
from nimble_viz.analysis.tiles import tiles
from nimble_viz.render.html import fragment, page
from nimble_viz.render.report import PANES
from tests.support.first_screen import FIRST_SCREEN, assert_first_screen
from tests.support.sample_reports import (
    CASES,
    RENDERED,
    busy_report,
    fused_report,
    old_report,
    plan_report,
    profile_report,
    sample_report,
    training_report,
)

pytestmark = pytest.mark.browser
_TABS = ("summary", "overhead", "dag", "timeline", "syncs", "source", "memory")


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
@pytest.mark.parametrize("width", [1400, 700])
@pytest.mark.parametrize("make", [fused_report, profile_report, training_report])
def test_the_first_screen_is_three_tiles_and_one_picture(opened, make, width, dark):
    shown = opened(page(make()), dark=dark, width=width)
    shown.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert_first_screen(shown.page.evaluate(f"({FIRST_SCREEN})(document)"))
    shown.page.click(".nv-picture canvas")
    assert shown.page.is_visible("#nv-pane-timeline")


def test_what_to_do_next_is_copied(opened):
    report = sample_report(60)
    shown = opened(page(report))
    shown.page.evaluate("document.addEventListener('copy', () => { window.copied = getSelection().toString(); })")
    shown.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    shown.page.click(".nv-tile-next .nv-copy")
    assert shown.page.inner_text(".nv-tile-next .nv-copy") == "Copied"
    assert shown.page.evaluate("copied") == tiles(report)["next"]["code"]


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_undecided_is_bold_or_green_and_what_is_decided_is(opened, dark):
    shown = opened(page(busy_report()), dark=dark)
    good = shown.page.evaluate(_GOOD)
    found = shown.page.evaluate(_OF_TEXT, "undecided")
    assert len(found) >= 6  # the headline, its reason, cells, outcomes
    assert [one for one in found if one["weight"] != "400" or one["colour"] == good] == []
    assert found[0]["text"] == "undecided"
    assert "Load 14 on 2 cores" in shown.page.inner_text(".nv-tile-prepared")
    report = sample_report(24, device="cpu")
    sure = opened(page(report), dark=dark)
    told = sure.page.evaluate(_OF_TEXT, f"{report.ratio('nimble').value:.2f}x")
    assert good in {one["colour"] for one in told}
    (figure,) = (one for one in told if one["text"].endswith("x faster"))
    assert (figure["colour"], figure["weight"]) == (good, "600")


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
    shown.page.click("#nv-tab-syncs")
    assert "Inside calls" in shown.page.inner_text("#nv-pane-syncs")
    shown.page.click("#nv-tab-memory")
    assert "Saved by reuse" in shown.page.inner_text("#nv-pane-memory")


@pytest.mark.slow
def test_a_plan_and_an_old_file_show_only_what_they_know(opened):
    for report, missing in (
        (plan_report(), ("Equality with eager", "Memory", "Kernels in flight", "Fork", "not read")),
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
    now = " ".join(shown.page.inner_text(".nv-tile-now").split())
    assert "host-bound host 51.8% 518 µs device 26.2% 262 µs input 22.0% 220 µs" in now
    assert "from nimble_viz import compare" in shown.page.inner_text(".nv-tile-prepared pre")
    text = shown.page.inner_text("#nv-pane-summary")
    for part in (
        "What was profiled",
        "What computes",
        "One iteration by phase",
        "loader",
        "copy",
        "Not in this report",
    ):
        assert part in text
    for part in ("Preparation", "Equality with eager", "Over eager", "Streams and synchronisations"):
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
    point = shown.page.evaluate("nimbleViewer.views.dag.point(4)")
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
    point = shown.page.evaluate("nimbleViewer.views.timeline.point('single', 33)")
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
        point = shown.page.evaluate(f"nimbleViewer.views.timeline.point('{run}', {call})")
        shown.page.mouse.click(point["x"], point["y"])
        assert shown.page.evaluate("nimbleViewer.selected()") == marked
    shown.page.click("#nv-tab-dag")
    point = shown.page.evaluate("nimbleViewer.views.dag.point(9)")
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
        point = shown.page.evaluate(f"nimbleViewer.views.dag.point({call})")
        shown.page.mouse.move(point["x"], point["y"])
        assert part in shown.page.inner_text(".nv-tip")


@pytest.mark.slow
def test_peers_payback_distance_and_provenance_are_on_the_summary(opened):
    text = opened(page(fused_report())).page.inner_text("#nv-pane-summary")
    for part in (
        "against peers",
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
@pytest.mark.parametrize("make", [fused_report, lambda: sample_report(60, device="cpu")])
def test_an_icicle_leads_from_a_module_down_to_a_call(opened, make):
    report = make()
    shown = opened(page(report))
    shown.page.click("#nv-tab-overhead")
    ice = shown.page.locator("#nv-pane-overhead .nv-ice button")
    roots = [row["name"].partition(".")[0] for row in grouped(report, "module")]
    assert ice.nth(1).get_attribute("aria-label").partition(".")[0] in roots
    kinds = {one.partition("-ice-")[2] for one in ice.evaluate_all("nodes => nodes.map((node) => node.className)")}
    gpu = report.environment.device == "cuda"
    assert kinds == ({"module", "operator", "kernel"} if gpu else {"module", "operator"})
    last = shown.page.locator("#nv-pane-overhead .nv-ice-operator").first
    name = last.get_attribute("aria-label")
    last.click()
    wide = shown.page.locator(f"#nv-pane-overhead .nv-ice-operator[aria-label='{name}']").first.bounding_box()
    assert wide["width"] == pytest.approx(ice.first.bounding_box()["width"], abs=2)
    marked = shown.page.evaluate("nimbleViewer.marked()")["eager"]
    assert marked
    assert {report.eager_calls[call].label for call in marked} == {name}
    shown.page.click("#nv-pane-overhead .nv-icicle >> text=Host time")
    assert shown.page.get_attribute("#nv-pane-overhead .nv-icicle button:has-text('Host')", "aria-pressed") == "true"
    assert shown.troubles == []


@pytest.mark.slow
def test_calls_of_the_optimizer_are_not_put_down_to_the_model_itself(opened):
    report = training_report()
    calls = tuple(replace(call, origins=()) if call.phase == "optimizer" else call for call in report.program.calls)
    shown = opened(page(replace(report, program=replace(report.program, calls=calls))))
    shown.page.click("#nv-tab-overhead")
    ice = shown.page.locator("#nv-pane-overhead .nv-ice-module")
    assert "(the optimizer)" in ice.evaluate_all("nodes => nodes.map((node) => node.getAttribute('aria-label'))")
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
@pytest.mark.parametrize("name", ["two streams", "fused"])
@pytest.mark.parametrize("width", [400, 2560])
def test_no_sideways_scrolling_of_the_page(opened, width, name):
    shown = opened(page(CASES[name]()), width=width)
    shown.page.evaluate("nimbleViewer.select(1)")
    for tab in _TABS:
        shown.page.click(f"#nv-tab-{tab}")
        assert shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# What a saved notebook's output is put in: a page, VS Code's page with its policy, Colab's frame of another origin.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src https: data:; "
    "font-src https:; connect-src https:; child-src https: data:"
)
_AROUND = {
    "page": lambda output: output,
    "VS Code": lambda output: f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">{output}',
    "Colab": lambda output: f'<iframe class="outer" sandbox="allow-scripts" srcdoc="{escape(output)}"></iframe>',
}


@pytest.mark.slow
@pytest.mark.parametrize("where", _AROUND)
def test_the_frame_of_a_notebook_works_in_its_sandbox(opened, where):
    shown = opened(f"<!doctype html><title>t</title>{_AROUND[where](fragment(sample_report(60)))}", framed=True)
    around = shown.page.frame_locator(".outer") if where == "Colab" else shown.page
    frame = around.frame_locator("iframe")
    frame.locator("#nv-tab-dag").click()
    assert frame.locator("#nv-pane-dag canvas[role=img]").is_visible()
    assert shown.troubles == []
    assert around.locator("summary").inner_text() == "Summary as text"


@pytest.mark.slow
def test_ten_thousand_calls_open(opened):
    shown = opened(page(CASES["ten thousand"]()))
    shown.page.click("#nv-tab-dag")
    assert shown.page.evaluate("nimbleViewer.views.dag.visible()") > 0
    assert "modules folded" in shown.page.inner_text("#nv-pane-dag")
    shown.page.select_option("#nv-pane-dag select[aria-label=Colour]", "exposed")
    assert shown.page.locator("#nv-pane-dag .nv-steps b").count() > 0
    shown.page.evaluate("nimbleViewer.select(9876)")
    assert shown.page.evaluate("nimbleViewer.views.dag.visible()") > 0
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
    low, high = shown.page.evaluate("nimbleViewer.views.timeline.range()")
    shown.page.keyboard.press("w")
    near, far = shown.page.evaluate("nimbleViewer.views.timeline.range()")
    assert far - near < high - low
    shown.page.keyboard.press("d")
    assert shown.page.evaluate("nimbleViewer.views.timeline.range()")[0] > near
    shown.page.keyboard.press("/")
    shown.page.keyboard.type("wasd?")
    assert shown.page.input_value("#nv-pane-timeline input[type=search]") == "wasd?"
    shown.page.focus("#nv-tab-timeline")
    shown.page.keyboard.press("?")
    assert "zoom in, zoom out" in shown.page.inner_text(".nv-help")
    shown.page.keyboard.press("Escape")
    assert not shown.page.is_visible(".nv-help")
    assert shown.troubles == []
