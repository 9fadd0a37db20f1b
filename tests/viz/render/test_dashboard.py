"""The dashboard without a browser: its figures' data from the values of the views, and the links between its panes."""

from __future__ import annotations

import gzip
import html
import re
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly.graph_objects import FigureWidget

from nimble_core.ir.costs import uniform_costs
from nimble_core.scheduling.policies import POLICIES
from nimble_core.scheduling.simulator import H200, simulate
from nimble_core.scheduling.verify_schedule import check_schedule
from nimble_core.utils.errors import InputError
from nimble_core.utils.units import format_bytes
from nimble_viz import load
from nimble_viz.analysis.live_memory import live_memory
from nimble_viz.analysis.overhead import PARTS, grouped, module_tree
from nimble_viz.analysis.source import hottest
from nimble_viz.render import dashboard_code as code
from nimble_viz.render import dashboard_figures as figures
from nimble_viz.render import dashboard_views as told
from nimble_viz.render.dashboard import MOST_ROWS, PANES, Dashboard
from nimble_viz.render.dashboard_views import Selection, Views
from nimble_viz.render.report import Report
from tests.support.sample_reports import HOSTILE, RENDERED, fused_report, plan_report, profile_report, sample_report

ROOT = Path(__file__).parents[3]
LIGHT = figures.palette(False)
RECORDINGS = sorted((ROOT / "examples" / "recordings").glob("*.nimble"))


@lru_cache(maxsize=32)
def views_of(case: str) -> Views:
    return Views(load(ROOT / "examples" / "recordings" / case) if case.endswith(".nimble") else RENDERED[case]())


@pytest.fixture
def board() -> Dashboard:
    return Dashboard(sample_report(60))


def click(board: Dashboard, pane: str, trace: int, point: int) -> None:
    """What the browser's message does: call the handlers that are registered on a trace."""
    shown = board._figures[pane].data[trace]
    assert shown._click_callbacks, shown.name
    for handler in shown._click_callbacks:
        handler(shown, SimpleNamespace(point_inds=[point]), None)


def clickable(board: Dashboard, pane: str) -> list[int]:
    return [at for at, trace in enumerate(board._figures[pane].data) if trace.customdata is not None]


def rings(board: Dashboard) -> list[tuple[float, float]]:
    marks = board._figures["DAG"].data[-1]
    return list(zip(marks.x or (), marks.y or (), strict=True))


def words(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", markup))


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize("dark", [False, True])
def test_colours_are_those_of_the_page(dark: bool) -> None:
    colours = figures.palette(dark)
    script = (ROOT / "nimble_viz" / "render" / "viewer" / "viewer.js").read_text(encoding="utf-8")
    assert len(colours.streams) == 8
    assert f"{'dark' if dark else 'light'}: [{', '.join(map(repr, colours.streams))}]".replace("'", '"') in script
    wanted = {
        *PARTS,
        "work",
        "surface",
        "text",
        "line",
        "idle",
        "select",
        "sync",
        "critical",
        "edge",
        "forward",
        "loss",
    }
    assert wanted <= set(colours.named)


def test_themes_differ() -> None:
    assert figures.palette(True)["surface"] != figures.palette(False)["surface"]


@pytest.mark.parametrize("by", ["call", "operator", "module"])
@pytest.mark.parametrize("case", ["wide", "host", "fused", "training", "eager optimizer", "googlenet-h200.nimble"])
def test_overhead_bars_add_up_to_the_profile(case: str, by: figures.Grouping) -> None:
    views = views_of(case)
    rows = figures.overhead_rows(views, by, "overhead")
    drawn = figures.overhead_figure(views, rows[:40], by, LIGHT)
    bars = {trace.name: sum(trace.y if by == "call" else trace.x) for trace in drawn.data if trace.type == "bar"}
    for part in PARTS:
        assert bars.get(part, 0) == pytest.approx(sum(row[part] for row in rows[:40]) / 1e3)
    assert sum(row["overhead"] for row in rows) == pytest.approx(views.report.overhead.overhead_ns, rel=1e-3)
    assert sorted(call for row in rows for call in row["eager"]) == known(views)


def known(views: Views) -> list[int]:
    """Calls that the profile has a time of, their own or one together."""
    assert views.report.overhead is not None
    return sorted({*views.overhead_row, *views.report.overhead.shared})


@pytest.mark.parametrize("case", ["wide", "training", "eager optimizer", "fused", "clip-h200.nimble"])
@pytest.mark.parametrize("by", ["operator", "module"])
def test_groups_hold_as_many_calls_as_the_view_says(case: str, by: figures.Grouping) -> None:
    views = views_of(case)
    rows = {row["name"]: len(row["eager"]) for row in figures.overhead_rows(views, by, "overhead")}
    assert rows == {row["name"]: row["calls"] for row in grouped(views.report, by)}


@pytest.mark.parametrize("case", ["wide", "training", "eager optimizer", "fused", "clip-h200.nimble"])
@pytest.mark.parametrize("order", ["overhead", "exposed", "work", "program"])
def test_a_module_holds_what_the_modules_in_it_hold(case: str, order: str) -> None:
    views = views_of(case)
    roots = module_tree(views.report, order)
    assert sorted(call for row in roots for call in row.eager) == known(views)
    for root in roots:
        for row in root:
            assert all(one.depth == row.depth + 1 for one in row.inside)
            assert len(row.inside) != 1
            for part in row.sums:
                if row.inside:
                    assert row.sums[part] == pytest.approx(sum(one.sums[part] for one in row.inside))
            ranked = [one.eager[0] if order == "program" else -one.sums[order] for one in row.inside if not one.own]
            assert ranked == sorted(ranked)
    shown = figures.overhead_rows(views, "tree", order)
    names = {row["name"] for row in shown}
    paths = [row.path for root in roots for row in root if not row.own]
    assert [row["name"] for row in shown if "(calls" not in row["name"]] == [one for one in paths if one in names]
    assert {root.path for root in roots} <= names
    figures.overhead_figure(views, shown, "tree", LIGHT)


@given(order=st.sampled_from(["overhead", "exposed", "work"]), by=st.sampled_from(["call", "operator", "module"]))
def test_overhead_rows_are_sorted(order: str, by: figures.Grouping) -> None:
    rows = figures.overhead_rows(views_of("wide"), by, order)
    assert [row[order] for row in rows] == sorted((row[order] for row in rows), reverse=True)


def test_what_the_overhead_figure_leaves_out_is_said() -> None:
    views = views_of("ten thousand")
    rows = figures.overhead_rows(views, "call", "overhead")
    drawn = figures.overhead_figure(views, rows, "call", LIGHT)
    assert len(drawn.data[0].x) == figures.MOST_BARS
    assert f"{len(rows) - figures.MOST_BARS:,} with less are left to the page" in drawn.layout.xaxis.title.text


@given(opened=st.sets(st.integers(60, 100)), case=st.sampled_from(["wide", "training", "fused", "clip-h200.nimble"]))
def test_every_call_is_seen_as_one_box_of_the_dag(opened: set[int], case: str) -> None:
    views = views_of(case)
    box_of = figures.visible_boxes(views, frozenset(opened))
    drawn = figures.dag_figure(views, frozenset(opened), views.plans[-1], "stream", LIGHT)
    nodes = [box for trace in drawn.data if trace.customdata is not None for box in trace.customdata]
    assert sorted(nodes) == sorted(set(box_of))
    for call, box in enumerate(box_of):
        first, last = (
            (box, box) if box < views.size else (views.graph[at][box - views.size] for at in ("first", "last"))
        )
        assert first <= call <= last
        assert box not in opened


def test_the_open_dag_has_the_edges_and_waits_of_the_report() -> None:
    views = views_of("wide")
    everything = frozenset(range(views.size, len(views.graph["parent"])))
    drawn = figures.dag_figure(views, everything, views.plans[-1], "stream", LIGHT, transitive=True)
    lines = {trace.name: trace.x.count(None) for trace in drawn.data if trace.mode == "lines"}
    plan = views.report.schedule("nimble")
    assert lines["synchronisations"] == len(set(plan.syncs))
    assert lines["edges of the MEG"] == len(set(views.report.graph.meg) - set(plan.syncs))
    assert lines["critical path"] == len(views.report.critical_path) - 1
    assert lines["transitive hazards"] == len(set(views.report.graph.edges) - set(views.report.graph.meg))


def test_edges_go_from_left_to_right() -> None:
    views = views_of("clip-h200.nimble")
    drawn = figures.dag_figure(views, figures.opened_boxes(views), views.plans[-1], "stream", LIGHT)
    edges = next(trace for trace in drawn.data if trace.name == "edges of the MEG")
    assert all(a is None or b is None or a < b for a, b in zip(edges.x, edges.x[1:], strict=False))


@given(most=st.integers(1, 400), case=st.sampled_from(["wide", "thousand", "clip-h200.nimble", "training"]))
def test_no_more_modules_are_opened_than_asked_for(most: int, case: str) -> None:
    views = views_of(case)
    closed = len(set(figures.visible_boxes(views, frozenset())))
    shown = len(set(figures.visible_boxes(views, figures.opened_boxes(views, most))))
    assert shown <= max(most, closed)


def test_what_the_dag_leaves_out_is_said() -> None:
    views = views_of("ten thousand")
    everything = frozenset(range(views.size, len(views.graph["parent"])))
    drawn = figures.dag_figure(views, everything, views.plans[-1], "stream", LIGHT)
    assert drawn.layout.xaxis.title.text == "the first 1,500 boxes; 8,500 more are left to the page"


@pytest.mark.parametrize("colour", ["stream", "exposed", "time", "phase"])
def test_colour_is_never_alone_in_the_dag(colour: str) -> None:
    views = views_of("training")
    drawn = figures.dag_figure(views, figures.opened_boxes(views), views.plans[-1], colour, LIGHT)
    for trace in (trace for trace in drawn.data if trace.customdata is not None):
        assert isinstance(trace.text, tuple)
        assert all(trace.text)


@pytest.mark.parametrize("case", ["wide", "host", "training", "fused", "googlenet-h200.nimble"])
def test_timeline_bars_are_the_spans_of_the_runs(case: str) -> None:
    views = views_of(case)
    drawn = figures.timeline_figure(views, views.runs, {}, LIGHT)
    for line in views.report.timelines:
        bars = next(trace for trace in drawn.data if trace.meta == line.run)
        zero = min(span.start_ns for span in line.spans)
        wanted = sorted((span.start_ns - zero, span.end_ns - span.start_ns, span.call) for span in line.spans)
        found = sorted((b * 1e3, x * 1e3, call) for b, x, call in zip(bars.base, bars.x, bars.customdata, strict=True))
        for (start, length, call), (at, long, of) in zip(wanted, found, strict=True):
            assert (at, long) == (pytest.approx(start, abs=1), pytest.approx(length, abs=1))
            assert of == (-1 if call is None else call)


def test_eager_is_above_replay_on_one_axis_and_waits_connect_lanes() -> None:
    views = views_of("wide")
    plan = views.plans[-1]
    drawn = figures.timeline_figure(views, views.runs, {plan["policy"]: plan}, LIGHT)
    rows = {trace.meta: trace.y for trace in drawn.data if trace.meta}
    assert max(rows["eager"]) < min(rows["single"]) <= max(rows["single"]) < min(rows["nimble"])
    connectors = next(trace for trace in drawn.data if trace.name and trace.name.startswith("synchronisation"))
    assert connectors.x.count(None) == len(plan["producer"]) == len(views.report.schedule("nimble").syncs)
    line = views.report.timeline("nimble")
    zero = min(span.start_ns for span in line.spans)
    runs = {span.call: ((span.start_ns - zero) / 1e3, (span.end_ns - zero) / 1e3) for span in line.spans}
    for at, (producer, consumer) in enumerate(zip(plan["producer"], plan["consumer"], strict=True)):
        start, end = connectors.x[3 * at : 3 * at + 2]
        assert start == pytest.approx(runs[producer][1], abs=2e-3)
        assert end == pytest.approx(runs[consumer][0], abs=2e-3)


def test_idle_is_shaded_behind_lanes_of_the_device_only() -> None:
    views = views_of("wide")
    (eager,) = (run for run in views.runs if run["run"] == "eager")
    shade = figures.timeline_figure(views, [eager], {}, LIGHT).data[0]
    assert shade.hovertext == (f"GPU stream 7: idle {eager['lanes'][1]['idle']:.1%} of this run",)


def test_long_runs_are_drawn_as_blocks_and_this_is_said() -> None:
    views = views_of("ten thousand")
    run = views.runs[-1]
    drawn = figures.timeline_figure(views, [run], {}, LIGHT)
    bars = next(trace for trace in drawn.data if trace.meta == run["run"])
    assert len(bars.x) <= figures.MOST_SPANS + len(run["lanes"])
    said = "4 neighbours drawn as one block, synchronisations left to the page"
    assert said in drawn.layout.annotations[0].text
    marks = figures.timeline_marks([run], views.of_calls([5_000]), LIGHT)
    assert len(marks.x) == 1


@pytest.mark.parametrize("case", ["hostile", "fused hostile"])
def test_names_stay_text(case: str) -> None:
    board = Dashboard(RENDERED[case]())
    board.select(3)
    board.what_if("nimble", 2)
    texts = [board._told.value, board._sync_count.value, told.summary_html(board.views)]
    texts += [told.syncs_html(board.views), told.host_syncs_html(board.views)]
    texts += [board._hot.content, board._code.content, board._holders.content]
    for drawn in board._plain.values():
        texts += [str(text) for trace in drawn.data for text in trace.hovertext or ()]
        texts += [note.text for note in drawn.layout.annotations]
    assert any(html.escape(HOSTILE, quote=False) in text or html.escape(HOSTILE) in text for text in texts)
    assert not any("<script" in text or "<img" in text for text in texts)


# ---------------------------------------------------------------- what if


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "single"])
def test_what_if_is_the_policy_simulated(policy: str) -> None:
    views = views_of("googlenet-h200.nimble")
    report = views.report
    found = told.simulate_plan(views, policy, 3)
    plan = check_schedule(report.graph, POLICIES[policy](report.graph, report.costs, max_streams=3), report.program)
    line = simulate(report.graph, plan, report.costs, H200)
    assert found.run["length_ns"] == line.length_ns
    assert found.plan["stream"] == plan.stream
    assert max(found.plan["stream"]) < 3
    assert found.run["source"] == "simulated"
    assert found.facts[0][0] == "SIMULATED, not measured"
    measured = [text for name, text in found.facts if name.startswith("Measured: ")]
    assert len(measured) == len(report.measurements) - len(report.peers)


@given(streams=st.integers(1, 32), policy=st.sampled_from(sorted(POLICIES)))
def test_what_if_keeps_the_cap_and_says_it_is_simulated(streams: int, policy: str) -> None:
    views = views_of("wide")
    found = told.simulate_plan(views, policy, streams)
    assert max(found.plan["stream"]) < streams
    drawn = figures.timeline_figure(views, [found.run], {found.plan["policy"]: found.plan}, LIGHT)
    assert "SIMULATED, not measured" in drawn.layout.annotations[0].text
    assert all(text.endswith("SIMULATED, not measured") for text in next(t for t in drawn.data if t.meta).hovertext)


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (lambda: sample_report(60, device="cpu"), "how calls on this host slow each other down is not known"),
        (plan_report, "times were not measured"),
        (profile_report, "profile of code as it is"),
        (lambda: sample_report(0), "no call that reaches the device"),
        (lambda: sample_report(5_001), "more than 5,000 calls"),
        (lambda: replace(sample_report(20), costs=uniform_costs(20)), "times were not measured"),
    ],
)
def test_what_cannot_be_simulated_is_said(report, why: str) -> None:
    board = Dashboard(report())
    board.what_if("nimble", 2)
    assert board.simulated is None
    assert why in words(board._why.value)
    assert board._simulate.disabled


@pytest.mark.parametrize(
    ("policy", "streams", "said"),
    [
        ("nimbel", 2, r"no policy 'nimbel' to simulate\n.*one of single, nimble, "),
        (None, 2, "no policy None"),
        ("nimble", 0, "streams=0 is no number of streams"),
        ("nimble", "2", r"streams='2' is no number of streams\n.*a whole number, 1 or more"),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_if_says_what_there_is(device: str, policy: str, streams: int, said: str) -> None:
    board = Dashboard(sample_report(20, device=device))
    with pytest.raises(InputError, match=said):
        board.what_if(policy, streams)
    assert board.simulated is None


@pytest.mark.parametrize("wrong", ["conv", 2.0, [1, 2]])
def test_what_is_no_call_cannot_be_selected(wrong: object) -> None:
    board = Dashboard(sample_report(20))
    for select in (board.select, board.select_eager):
        with pytest.raises(InputError, match=r"is no number of a call\n.*from 0 to 19"):
            select(1, wrong)
    assert not board.marked


def test_what_if_is_shown_below_the_measured_runs_and_removed(board: Dashboard) -> None:
    measured = [trace.meta for trace in board._figures["Timeline"].data if trace.meta]
    assert measured == ["eager", "nimble"]
    board._policy.value, board._streams.value = "opara", 2
    name = board.simulated.plan["policy"]
    assert name == "what if: opara, 2 streams"
    assert [trace.meta for trace in board._figures["Timeline"].data if trace.meta] == [*measured, name]
    assert "SIMULATED, not measured" in words(board._figures_text.value)
    board._without.click()
    assert [trace.meta for trace in board._figures["Timeline"].data if trace.meta] == measured
    assert board._figures_text.value == ""


# ---------------------------------------------------------------- links


def test_a_selection_is_marked_in_every_pane(board: Dashboard) -> None:
    board.select(17)
    row = next(at for at, row in enumerate(board._rows) if row["eager"] == (17,))
    assert board._figures["Overhead"].data[-1].x == (row,)
    assert len(rings(board)) == 1
    marks = board._figures["Timeline"].data[-1]
    assert len(marks.x) == 3  # on the host, on the GPU, and in the replay
    assert board._calls.value == (17,)
    said = words(board._told.value)
    call = board.report.program.calls[17]
    for wanted in (
        call.operator,
        "17 of 60",
        call.module,
        f"{call.origins[0].file}:{call.origins[0].line}",
        "float16[8, 64]",
    ):
        assert wanted in said


def test_plotly_is_brought_once_by_each_dashboard(board: Dashboard) -> None:
    """Not by one for all: a page that was opened late, or did not restore widgets, would not have it."""
    for one in (board, Dashboard(board.report)):
        states = [figure.get_state() for figure in one._figures.values()]
        assert all(len(state["_esm"]) < 2_000 for state in states)
        assert {state["_ground"] for state in states} == {f"IPY_MODEL_{one._ground.model_id}"}
        packed = one._ground.get_state()["plotly"]
        assert gzip.decompress(packed).decode() == str(FigureWidget._esm)
        assert len(packed) < 2_000_000


def test_small_figures_name_what_they_draw() -> None:
    views = views_of("two streams")
    drawn = figures.dag_figure(views, frozenset(), views.plans[-1], "stream", LIGHT)
    assert next(trace for trace in drawn.data if trace.name == "names").text == ("layer.0", "layer.1", "layer.2")
    rows = figures.overhead_rows(views, "call", "program")
    bars = figures.overhead_figure(views, rows, "call", LIGHT)
    assert [text.split()[0] for text in bars.layout.xaxis.ticktext] == [str(row["eager"][0]) for row in rows]
    assert not figures.overhead_figure(views_of("thousand"), rows * 9, "call", LIGHT).layout.xaxis.showticklabels


def test_figures_are_sent_whole_until_the_page_has_drawn_them(
    board: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    widget, sent = board._figures["DAG"], []
    monkeypatch.setattr(widget, "send_state", lambda key=None: sent.append(key))
    board.select(3)
    assert ["_widget_data", "_widget_layout"] in sent
    state = widget.get_state(["_widget_data"])["_widget_data"]
    assert [trace.get("name") for trace in state] == [trace.name for trace in widget.data]
    assert len(state[-1]["x"]) == 1
    widget._js2py_layoutDelta = {"layout_delta": {}, "layout_edit_id": 0}  # what the page says when it has drawn it
    sent.clear()
    board.select(4)
    assert ["_widget_data", "_widget_layout"] not in sent


def test_clearing_takes_the_marks_away(board: Dashboard) -> None:
    board.select(17)
    assert not board._clear.disabled
    board._clear.click()
    assert board.marked == Selection()
    assert all(not widget.data[-1].x for widget in board._figures.values())
    assert "Nothing is selected" in board._told.value


@pytest.mark.parametrize("pane", ["Overhead", "DAG", "Timeline"])
def test_every_drawn_trace_with_calls_can_be_clicked(board: Dashboard, pane: str) -> None:
    assert clickable(board, pane)
    for trace in clickable(board, pane):
        board.clear()
        click(board, pane, trace, 1)
        assert board.marked.calls, board._figures[pane].data[trace].name


def test_clicking_a_bar_marks_its_node_and_its_spans(board: Dashboard) -> None:
    click(board, "Overhead", 0, 4)
    assert board.marked.calls == board._rows[4]["eager"]
    assert len(rings(board)) == 1
    assert len(board._figures["Timeline"].data[-1].x) == 3


def test_clicking_a_span_marks_its_bar(board: Dashboard) -> None:
    at = next(at for at, trace in enumerate(board._figures["Timeline"].data) if trace.meta == "nimble")
    click(board, "Timeline", at, 9)
    call = board._figures["Timeline"].data[at].customdata[9]
    assert board.marked.calls == (call,)
    assert board._rows[board._figures["Overhead"].data[-1].x[0]]["eager"] == (call,)


def test_a_bar_of_a_group_selects_all_its_calls(board: Dashboard) -> None:
    board._by.value = "operator"
    click(board, "Overhead", 0, 0)
    name = board._rows[0]["name"]
    assert {board.report.program.calls[call].label for call in board.marked.calls} == {name}
    assert len(board.marked.calls) == board._rows[0]["calls"] > 1
    assert f"{len(board.marked.calls)} calls" in words(board._told.value)


def test_a_folded_module_opens_and_selects_its_calls() -> None:
    board = Dashboard(load(ROOT / "examples" / "recordings" / "clip-h200.nimble"))
    board._fold.click()
    groups = next(
        at for at in clickable(board, "DAG") if board._figures["DAG"].data[at].customdata[0] >= board.views.size
    )
    before = len(set(figures.visible_boxes(board.views, board._opened)))
    box = board._figures["DAG"].data[groups].customdata[0]
    click(board, "DAG", groups, 0)
    at = box - board.views.size
    assert board.marked.calls == tuple(range(board.views.graph["first"][at], board.views.graph["last"][at] + 1))
    assert len(set(figures.visible_boxes(board.views, board._opened))) > before
    assert rings(board)
    board._unfold.click()
    assert board._opened == figures.opened_boxes(board.views)


def test_rows_of_lists_select(board: Dashboard) -> None:
    board._syncs.index = 2
    producer, consumer = board.marked.calls
    assert (producer, consumer) in board.report.schedule("nimble").syncs
    assert len(rings(board)) == 2
    board._find.value = "cat"
    assert all(board.report.program.calls[call].label == "cat" for _, (call,) in board._calls.options)
    board._calls.index = 1
    assert board.marked.calls == board._calls.options[1][1]


def test_filling_a_list_selects_nothing(board: Dashboard) -> None:
    board.select(8)
    board._find.value = "nothing is called this"
    assert board._calls.options == ()
    assert board.marked.calls == (8,)


def test_waits_of_the_selection_come_first(board: Dashboard) -> None:
    producer, consumer = board.report.schedule("nimble").syncs[-1]
    board.select(consumer)
    assert consumer in board._syncs.options[0][1]
    assert "of the selection, listed first" in board._sync_count.value
    assert producer != consumer


def test_fused_calls_and_eager_calls_find_each_other() -> None:
    report = fused_report()
    board = Dashboard(report)
    fused = next(call for call in report.program.calls if len(call.eager) > 1)
    board.select(fused.index)
    assert board.marked.eager == fused.eager
    assert "Stands for" in words(board._told.value)
    click(board, "Overhead", 0, next(at for at, row in enumerate(board._rows) if row["eager"] == (fused.eager[0],)))
    assert board.marked.eager == (fused.eager[0],)
    assert fused.index in board.marked.calls
    assert "Became" in words(board._told.value)


@given(calls=st.lists(st.integers(-3, 70)), case=st.sampled_from(["wide", "fused", "training"]))
def test_selections_hold_calls_that_are_there_once(calls: list[int], case: str) -> None:
    views = views_of(case)
    found = views.of_calls(calls)
    assert set(found.calls) == {call for call in calls if 0 <= call < views.size}
    assert len(set(found.calls)) == len(found.calls)
    back = views.of_eager(found.eager)
    assert {call for call in found.calls if views.report.program.calls[call].eager or not views.fused} <= set(
        back.calls
    )


def test_another_schedule_changes_dag_timeline_and_syncs(board: Dashboard) -> None:
    board._plan.value = 0
    assert [trace.meta for trace in board._figures["Timeline"].data if trace.meta] == ["eager", "single"]
    assert not any(trace.name == "synchronisations" for trace in board._figures["DAG"].data)
    assert board._syncs.options == ()
    assert "0 synchronisations" in board._sync_count.value


def test_the_theme_follows_the_page_and_keeps_the_selection(board: Dashboard) -> None:
    board.select(5)
    board._ground.dark = True
    dark = figures.palette(True)
    assert {widget.layout.paper_bgcolor for widget in board._figures.values()} == {dark["surface"]}
    assert len(rings(board)) == 1
    click(board, "DAG", clickable(board, "DAG")[0], 2)  # handlers are registered anew
    assert board.marked.calls == (2,)


def test_the_dag_moves_to_a_selection_out_of_sight() -> None:
    board = Dashboard(load(ROOT / "examples" / "recordings" / "clip-h200.nimble"))
    board.select(board.views.size - 1)
    ((x, y),) = rings(board)
    low, high = board._figures["DAG"].layout.xaxis.range
    assert low <= x <= high
    low, high = board._figures["DAG"].layout.yaxis.range
    assert low <= y <= high


# ---------------------------------------------------------------- code and memory


def keys(markup: str) -> list[str]:
    return re.findall(r'data-key="([^"]*)"', markup)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_every_line_with_calls_is_a_row_once_and_finds_its_calls(path: Path) -> None:
    views = views_of(path.name)
    found = keys(code.code_html(views))
    assert sorted(found) == sorted(f"line {row}" for row in range(len(views.on_line)))
    placed = sorted(call for calls in views.on_line for call in calls)
    origins = [one.origins[0] if one.origins else None for one in views.report.eager_calls]
    assert placed == [call for call, origin in enumerate(origins) if origin and origin.file]
    for row, calls in enumerate(views.on_line):
        assert len(calls) == sum(
            views.code["lines"][name][row] for name in ("calls", "calls_backward") if name in views.code["lines"]
        )
        assert views.lines_of(views.of_eager(calls)) == [row]


@pytest.mark.parametrize("by", ["host", "exposed", "device", "replay"])
def test_the_hottest_lines_are_those_of_the_view(by: str) -> None:
    views = views_of("resnet18-training-h200.nimble")
    shown = code.hottest_html(views, by)
    wanted = hottest(views.code, by, code.MOST_HOT)
    rows = [f"line {views.row_of_line[row['file'], row['line']]}" for row in wanted]
    assert [key for key in keys(shown) if key.startswith("line")] == rows
    assert re.findall(r'data-key="sort (\w+)" aria-pressed="true"', shown) == [by]


def test_a_line_selects_its_calls_and_is_marked_by_each_of_them() -> None:
    board = Dashboard(load(ROOT / "examples" / "recordings" / "googlenet-h200.nimble"))
    row = max(range(len(board.views.on_line)), key=lambda row: len(board.views.on_line[row]))
    board._pick_key(f"line {row}")
    assert board.marked.eager == tuple(board.views.on_line[row])
    assert board._code.marked == board._hot.marked == [f"line {row}"]
    assert rings(board)
    board.select(board.marked.calls[-1])
    assert f"line {row}" in board._code.marked
    assert board.views.text_of_line(row).strip() in words(board._told.value)
    board.clear()
    assert board._code.marked == []


@pytest.mark.parametrize("key", ["line 99999", "line -1", "sort nothing", "call x", "", "line"])
def test_keys_that_are_of_no_row_select_nothing(board: Dashboard, key: str) -> None:
    before = board._hot.content
    board._pick_key(key)
    assert (board.marked, board._hot.content) == (Selection(), before)


def test_heads_sort() -> None:
    board = Dashboard(load(ROOT / "examples" / "recordings" / "googlenet-h200.nimble"))
    board._pick_key("sort replay")
    assert board._hot.content == code.hottest_html(board.views, "replay")


@pytest.mark.parametrize("case", ["wide", "fused", "training", "resnet18-training-h200.nimble"])
def test_steps_of_memory_are_the_live_bytes_of_each_run(case: str) -> None:
    views = views_of(case)
    for run, wanted in zip(views.live["runs"], live_memory(views.report)["runs"], strict=True):
        drawn = figures.memory_figure(views, run, LIGHT)
        unit = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}[drawn.layout.yaxis.title.text]
        assert [y * unit for y in drawn.data[0].y] == pytest.approx(wanted["columns"]["live"])
        assert list(drawn.data[0].customdata) == wanted["columns"]["call"]
        assert {f"{label}: {format_bytes(nbytes)}" for label, nbytes in wanted["marks"]} <= {
            trace.name for trace in drawn.data
        }
        assert keys(code.holders_html(run)) == [f"call {row['call']}" for row in wanted["holders"]]


def test_a_marked_call_shows_how_long_its_results_live() -> None:
    views = views_of("wide")
    run = views.live["runs"][-1]
    at = max(range(len(run["columns"]["held"])), key=run["columns"]["held"].__getitem__)
    marks = figures.memory_marks(run, views.of_calls([run["columns"]["call"][at]]), LIGHT)
    assert marks.x == (at, at + run["columns"]["held"][at], None)
    assert not figures.memory_marks(run, Selection(), LIGHT).x


def test_what_holds_the_peak_is_picked_and_follows_the_run() -> None:
    board = Dashboard(load(ROOT / "examples" / "recordings" / "resnet18-training-h200.nimble"))
    for at, run in enumerate(board.views.live["runs"]):
        board._live.value = at
        call = run["holders"][0]["call"]
        board._pick_key(f"call {call}")
        assert call in (board.marked.eager if run["run"] == "eager" else board.marked.calls)
        assert f"call {call}" in board._holders.marked


@pytest.mark.parametrize("column", ["exposed", "time"])
def test_times_on_nodes_are_those_of_their_calls(column: str) -> None:
    views = views_of("wide")
    everything = frozenset(range(views.size, len(views.graph["parent"])))
    drawn = figures.dag_figure(views, everything, views.plans[-1], column, LIGHT)
    nodes = next(trace for trace in drawn.data if trace.customdata is not None)
    values = views.calls["cost" if column == "time" else "exposed"]
    for call, text, fill in zip(nodes.customdata, nodes.text, nodes.marker.color, strict=True):
        assert (text == "?") == (values[call] < 0)
        assert text == "?" or float(text) * 1e3 == pytest.approx(values[call], abs=50 if values[call] < 9_950 else 500)
        assert (fill in LIGHT.heat) == (values[call] > 0)
    ranked = sorted(zip(nodes.customdata, nodes.marker.color, strict=True), key=lambda one: values[one[0]])
    steps = [LIGHT.heat.index(fill) for call, fill in ranked if values[call] > 0]
    assert steps == sorted(steps)


# ---------------------------------------------------------------- every report


@pytest.mark.parametrize("case", RENDERED)
def test_every_report_is_shown(case: str) -> None:
    report = RENDERED[case]()
    board = report.dashboard()
    assert board._tabs.titles == PANES
    board.select(len(report.program.calls) // 2)
    board._by.value = "module"
    for colour in [key for _, key in board._colour.options]:
        board._colour.value = colour
    assert len(board._calls.options) <= MOST_ROWS
    bundle = board._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "text/plain" in bundle
    assert "<iframe" in bundle["text/html"]


@pytest.mark.parametrize(
    ("report", "pane", "said"),
    [
        (lambda: sample_report(20, overhead=False), "Overhead", "eager was not profiled"),
        (lambda: sample_report(20, timelines=False), "Timeline", "No run was timed call by call"),
        (lambda: sample_report(0), "DAG", "the model made no call"),
        (profile_report, "DAG", "does not know which call needs which"),
        (profile_report, "Syncs", "No plan was made"),
        (plan_report, "Memory", "not known"),
        (lambda: sample_report(20), "Source", "sample_net/tokens.py: not found where it ran"),
        (lambda: sample_report(0), "Source", "No call of this report knows its source line"),
        (plan_report, "Summary", "Nothing was measured"),
    ],
)
def test_what_is_not_known_is_said(report, pane: str, said: str) -> None:
    board = Dashboard(report())
    inside = board._tabs.children[PANES.index(pane)].children
    texts = [getattr(child, "value", None) or getattr(child, "content", None) for child in inside]
    assert said in " ".join(words(text) for text in texts if isinstance(text, str))


def test_unmeasured_times_are_not_shown() -> None:
    board = Dashboard(plan_report())
    board.select(1)
    said = words(board._told.value)
    assert re.search(r"Time alone\s+not measured", said)
    assert "time" not in [key for _, key in board._colour.options]


def test_a_loaded_report_needs_no_torch(tmp_path: Path) -> None:
    path = sample_report(30).save(tmp_path / "report.nimble")
    script = (
        f"import sys; sys.modules['torch'] = None; import nimble_viz; d = nimble_viz.load({str(path)!r}).dashboard(); "
        "d.select(3); d.what_if('critical_path', 2); print(d.simulated.facts[0][0], d.marked.calls)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "SIMULATED, not measured (3,)"


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_recordings_are_shown(path: Path) -> None:
    report: Report = load(path)
    board = report.dashboard()
    slowest = max(range(len(report.costs.ns)), key=report.costs.ns.__getitem__)
    board.select(slowest)
    assert report.program.calls[slowest].operator in words(board._told.value)
    assert rings(board)
