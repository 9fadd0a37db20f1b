"""The dashboard: a report's views as linked panes in a notebook, and what-if schedules simulated beside them.

Effects and linking only: ``dashboard_figures`` draws, ``dashboard_views`` tells. Needs neither torch nor a GPU.
"""

from __future__ import annotations

import gzip
import html
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import ipywidgets as widgets
import traitlets
from anywidget import AnyWidget
from plotly.graph_objects import Figure, FigureWidget

from nimble_core.scheduling.policies import POLICIES
from nimble_core.utils.units import format_count
from nimble_viz.analysis.labels import plural
from nimble_viz.render.dashboard_code import STYLE, code_html, holders_html, hottest_html, sortable
from nimble_viz.render.dashboard_figures import (
    Grouping,
    Palette,
    dag_figure,
    dag_marks,
    memory_figure,
    memory_marks,
    opened_boxes,
    overhead_figure,
    overhead_marks,
    overhead_rows,
    palette,
    timeline_figure,
    timeline_marks,
)
from nimble_viz.render.dashboard_views import (
    Selection,
    Simulated,
    Views,
    details,
    facts_html,
    host_syncs_html,
    memory_html,
    no_simulation,
    require_plan,
    search,
    simulate_plan,
    summary_html,
    syncs_html,
)
from nimble_viz.render.html import still
from nimble_viz.render.pane import notebook_bundle
from nimble_viz.report.data import ReportData

__all__ = ["MOST_ROWS", "PANES", "Dashboard"]

PANES = ("Summary", "Overhead", "DAG", "Timeline", "Syncs", "Source", "Memory")
"""Titles of the panes, in order."""

MOST_ROWS = 400
"""Lists that a row is picked from hold so many; the search finds the others."""

_MOST_STREAMS = 32
_NONE = -1
_WHOLE = ["_widget_data", "_widget_layout"]  # where plotly keeps a figure's state, as opposed to changes of it
_STYLE = (
    f"""<style>{STYLE}</style>"""
    """<style>
.nimble-dashboard { font-size: 13px; }
.nimble-dashboard h3 { margin: 0 0 6px; font-size: 15px; overflow-wrap: anywhere; }
.nimble-dashboard h4 { margin: 10px 0 4px; font-size: 13px; }
.nimble-dashboard p { margin: 2px 0 6px; overflow-wrap: anywhere; line-height: 1.4; }
.nimble-dashboard ul { margin: 4px 0; padding-left: 18px; line-height: 1.4; overflow-wrap: anywhere; }
.nimble-dashboard .widget-html-content { line-height: 1.4; }
.nimble-figure { overflow: hidden; }
.nimble-figure > * { flex: 1 1 auto; min-width: 0; height: 100%; }
.nimble-scroll { overflow-x: auto; }
.nimble-dashboard table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.nimble-dashboard th, .nimble-dashboard td { text-align: left; padding: 3px 14px 3px 0; vertical-align: top; }
.nimble-dashboard th { font-weight: 500; opacity: .75; border-bottom: 1px solid rgba(128, 128, 128, .5); }
.nimble-dashboard td { border-bottom: 1px solid rgba(128, 128, 128, .25); overflow-wrap: anywhere; }
.nimble-dashboard .nimble-whole { white-space: nowrap; }
.nimble-dashboard .nimble-facts :is(th, td) { border: 0; padding: 1px 14px 1px 0; }
.nimble-dashboard select { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px; }
</style>"""
)


class _Ground(AnyWidget):
    """What the page has to know and to tell once for a dashboard; nothing is seen of it.

    It brings plotly's code, packed (1.5 MB of 5), asks the page whether its background is dark, and has figures follow
    the dashboard's size. plotly's figures look at their size when the window's changes, not when their pane comes into
    view, and those that were drawn out of view keep the width that was guessed then. Each dashboard has its own: a page
    that was opened late knows nothing of what others were sent.
    """

    _esm = """
    const luminance = ([r, g, b]) => (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255;
    function dark(node) {
      for (let at = node; at; at = at.parentElement ?? at.getRootNode().host) {
        const parts = (getComputedStyle(at).backgroundColor.match(/[\\d.]+/g) ?? []).map(Number);
        if (parts.length === 3 || parts[3] > 0.5) return luminance(parts) < 0.4;
      }
      return false;
    }
    function render({ model, el }) {
      el.style.display = "none";
      const look = () => {
        const found = dark(el.parentElement ?? document.body);
        if (found !== model.get("dark")) { model.set("dark", found); model.save_changes(); }
      };
      const watch = new MutationObserver(() => setTimeout(look, 300));
      for (const node of [document.documentElement, document.body]) {
        watch.observe(node, { attributes: true });
      }
      const fit = new ResizeObserver(() => {
        const board = el.closest(".nimble-dashboard");
        for (const box of board?.querySelectorAll(".nimble-figure") ?? []) fit.observe(box);
        for (const plot of board?.querySelectorAll(".js-plotly-plot") ?? []) delete plot.layout?.width;
        window.dispatchEvent(new Event("resize"));
      });
      setTimeout(() => { look(); fit.observe(el.closest(".nimble-dashboard") ?? el); }, 50);
      return () => { watch.disconnect(); fit.disconnect(); };
    }
    export default { render };
    """
    dark = traitlets.Bool(False).tag(sync=True)
    plotly = traitlets.Bytes().tag(sync=True)

    @traitlets.default("plotly")
    def _packed(self) -> bytes:
        return _plotly_packed()


@cache
def _plotly_packed() -> bytes:
    return gzip.compress(str(FigureWidget._esm).encode(), mtime=0)


class _Figure(FigureWidget):
    """plotly's widget with its code taken from a widget that others take it from too: the page reads it once."""

    _esm = """
    export default () => {
      let own;
      return {
        async initialize(props) {
          const ground = await props.model.widget_manager.get_model(props.model.get("_ground").split("IPY_MODEL_")[1]);
          const load = async () => {
            const text = new Blob([ground.get("plotly")]).stream().pipeThrough(new DecompressionStream("gzip"));
            const url = URL.createObjectURL(new Blob([await new Response(text).text()], { type: "text/javascript" }));
            try { return await import(url); } finally { URL.revokeObjectURL(url); }
          };
          ground.nimblePlotly ??= load();
          own = (await ground.nimblePlotly).default();
          return own.initialize(props);
        },
        render: (props) => own.render(props),
      };
    };
    """
    _ground = traitlets.Instance(_Ground).tag(sync=True, **widgets.widget_serialization)

    def __init__(self, ground: _Ground) -> None:
        self._ground = ground  # ahead of all else: the page is told once, when the widget is made
        super().__init__()


class _Rows(AnyWidget):
    """Rows of HTML of which one is picked: a press of what has a ``data-key`` sends that key.

    What is marked comes into view inside of the list, and what is folded around it opens; the page stays where it is.
    """

    _esm = """
    function render({ model, el }) {
      el.classList.add("nimble-rows");
      const mark = () => {
        const keys = new Set(model.get("marked"));
        let first = null;
        for (const row of el.querySelectorAll(".nimble-row[data-key]")) {
          const on = keys.has(row.dataset.key);
          row.classList.toggle("nimble-on", on);
          row.setAttribute("aria-pressed", String(on));
          if (on) first ??= row;
        }
        for (let at = first; at && at !== el; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
        const list = first?.closest(".nimble-code"), seen = list?.getBoundingClientRect();
        const row = first?.getBoundingClientRect();
        if (list && (row.top < seen.top || row.bottom > seen.bottom)) {
          list.scrollTop += row.top - seen.top - seen.height / 2;
        }
      };
      const draw = () => { el.innerHTML = model.get("content"); mark(); };
      el.addEventListener("click", (event) => {
        const key = event.target.closest("[data-key]")?.dataset.key;
        if (key) model.send({ key });
      });
      // Keys that press a button are not the notebook's.
      el.addEventListener("keydown", (event) => { if (["Enter", " "].includes(event.key)) event.stopPropagation(); });
      model.on("change:content", draw);
      model.on("change:marked", mark);
      const shown = new IntersectionObserver((seen) => { if (seen.some((one) => one.isIntersecting)) mark(); });
      shown.observe(el);
      draw();
      return () => shown.disconnect();
    }
    export default { render };
    """
    content = traitlets.Unicode().tag(sync=True)
    marked = traitlets.List(traitlets.Unicode()).tag(sync=True)

    def __init__(self, content: str, picked: Callable[[str], None]) -> None:
        super().__init__(content=content)
        self.on_msg(lambda _, said, __: picked(str(said.get("key", ""))))


class Dashboard(widgets.VBox):
    """A report's panes, linked: what is selected in one is marked in all, and told in full beside them.

    Made by ``report.dashboard()``. Everything shown is a value of the report's views; only the what-if row computes
    something, a simulation, and says so.

    Args:
        report: any report, one from a file included.

    Attributes:
        marked: the selection; set it with ``select``, ``select_eager`` and ``clear``, or observe it.
        dark: whether the figures are in the dark theme; follows the page.
        simulated: the what-if that is shown, None if there is none.
    """

    marked = traitlets.Instance(Selection, args=())
    dark = traitlets.Bool(False)
    simulated = traitlets.Instance(Simulated, allow_none=True, default_value=None)

    def __init__(self, report: ReportData) -> None:
        self.report = report
        self.views = Views(report)
        self._opened = opened_boxes(self.views)
        self._quiet = False
        self._build()
        super().__init__(children=self._frame())
        self.add_class("nimble-dashboard")
        self._draw_all()
        self._list_syncs()
        self._list_calls()
        self._tell()
        self.observe(lambda _: self._mark(), "marked")
        self.observe(lambda _: self._draw_all(), "dark")
        self.observe(lambda _: self._draw_timeline(), "simulated")
        traitlets.dlink((self._ground, "dark"), (self, "dark"))

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        instead = notebook_bundle(self.report, self.report)  # where no widget can be shown
        return bundle | instead if isinstance(bundle, dict) else (bundle[0] | instead, *bundle[1:])

    def _ipython_display_(self) -> None:
        """The widget, then what a saved notebook shows without its kernel: a page in an output of its own."""
        from IPython.display import display

        bundle = self._repr_mimebundle_()
        shown = dict(bundle if isinstance(bundle, dict) else bundle[0])
        shown.pop("text/html", None)
        shown["text/plain"] = (
            f"Dashboard of {self.report.model}: run its cell in a notebook to use it. "
            "As text: print(board.report.to_text())"
        )
        display(shown, raw=True)
        display({"text/html": still(self.report)}, raw=True)

    # ---------------------------------------------------------------- selection

    def select(self, *calls: int) -> None:
        """Select calls of the program; those that are not there are left out, none of them clears the selection.

        Raises:
            InputError: something else than numbers of calls.
        """
        self.marked = self.views.of_calls(calls)

    def select_eager(self, *calls: int) -> None:
        """Select eager calls, and with them the calls that stand for them. Raises InputError as ``select`` does."""
        self.marked = self.views.of_eager(calls)

    def clear(self) -> None:
        """Select nothing."""
        self.marked = Selection()

    def open_module(self, box: int) -> None:
        """Open a folded module of the DAG."""
        self._opened |= {box}
        self._draw_dag()

    def what_if(self, policy: str, streams: int) -> None:
        """Simulate ``policy`` on at most ``streams`` streams and show it; ``self.simulated`` holds it then.

        Does nothing where there is nothing to simulate with; the pane says why.

        Raises:
            InputError: no such policy, or no such number of streams.
        """
        require_plan(policy, streams)
        if not no_simulation(self.report):
            self.simulated = simulate_plan(self.views, policy, streams)

    # ---------------------------------------------------------------- widgets

    def _build(self) -> None:
        views, report = self.views, self.report
        self._ground = _Ground()
        self._figures = {name: _figure_widget(self._ground) for name in ("Overhead", "DAG", "Timeline", "Memory")}
        self._drawn: set[str] = set()
        for name, figure in self._figures.items():
            figure.observe(lambda _, name=name: self._drawn.add(name), "_js2py_layoutDelta")
        self._boxes = {name: widgets.Box([widget]) for name, widget in self._figures.items()}
        for holder in self._boxes.values():
            holder.add_class("nimble-figure")
        self._plain = {name: Figure() for name in self._figures}
        self._rows: list[dict[str, Any]] = []
        self._by = _dropdown(
            "Bars", [("by call", "call"), ("by operator", "operator"), ("by module", "module"), ("module tree", "tree")]
        )
        self._order = _dropdown(
            "Order",
            [
                ("most overhead", "overhead"),
                ("most exposed", "exposed"),
                ("most work", "work"),
                ("as issued", "program"),
            ],
        )
        plans = [
            (f"{plan['label']} ({plural(max(plan['stream'], default=-1) + 1, 'stream')})", at)
            for at, plan in enumerate(views.plans)
        ]
        chosen = next((at for at, plan in enumerate(views.plans) if plan["policy"] == report.chosen), len(plans) - 1)
        self._plan = _dropdown("Schedule", plans or [("none was made", _NONE)], chosen)
        known = [(one["name"], one["key"]) for one in views.colours if not one["why"]]
        known = known if views.plans else [one for one in known if one[1] != "stream"]
        self._colour = _dropdown("Colour", known or [("none", "stream")])
        self._meaning = widgets.HTML()
        self._transitive = widgets.Checkbox(
            False, description="transitive hazards", indent=False, layout={"width": "auto"}
        )
        self._fold = _button("Fold all", "Fold every module of the DAG", lambda: self._open(frozenset()))
        self._unfold = _button(
            "Unfold", "Open modules again, outer ones first", lambda: self._open(opened_boxes(views))
        )
        policies = [name for name in POLICIES if name != "single"]
        own = report.chosen.rpartition(", ")[2]
        self._policy = _dropdown("What if", policies, own if own in policies else policies[0])
        self._streams = widgets.IntSlider(
            min(4, _MOST_STREAMS),
            1,
            _MOST_STREAMS,
            description="Streams, at most",
            continuous_update=False,
            style={"description_width": "auto"},
        )
        self._simulate = _button(
            "Simulate", "Simulate this schedule and show it below the measured runs", self._run_what_if
        )
        self._near = _button("Zoom to replays", "Show as much of the axis as replays take", self._zoom)
        self._without = _button("Remove", "Take the simulated run away", lambda: self.set_trait("simulated", None))
        self._figures_text = widgets.HTML()
        self._doubts = widgets.HTML()
        why = no_simulation(report)
        for control in (self._policy, self._streams, self._simulate, self._without):
            control.disabled = bool(why)
        self._why = widgets.HTML(f"<p>Nothing can be simulated: {html.escape(why)}.</p>" if why else "")
        self._find = widgets.Text(
            placeholder="operator, module, source",
            description="Find",
            style={"description_width": "auto"},
            layout={"width": "auto"},
        )
        self._calls = _list("Calls", "Calls of the report")
        self._syncs = _list("Waits", "Planned synchronisations")
        heat = views.code["heat"] if views.code else ""
        self._hot = _Rows(hottest_html(views, heat), self._pick_key)
        self._code = _Rows(code_html(views), self._pick_key)
        live = views.live["runs"] if views.live else []
        self._live = _dropdown("Run", [(run["label"], at) for at, run in enumerate(live)] or [("none", _NONE)])
        self._holders = _Rows("", self._pick_key)
        self._told = widgets.HTML()
        self._count = widgets.HTML()
        self._sync_count = widgets.HTML()
        self._clear = _button("Clear selection", "Select nothing", self.clear)
        for control, draw in (
            (self._by, self._draw_overhead),
            (self._order, self._draw_overhead),
            (self._colour, self._draw_dag),
            (self._transitive, self._draw_dag),
            (self._live, self._draw_memory),
            (self._find, self._list_calls),
        ):
            control.observe(lambda _, draw=draw: draw(), "value")
        self._plan.observe(lambda _: self._draw_plan(), "value")
        self._calls.observe(lambda change: self._pick(change["new"]), "value")
        self._syncs.observe(lambda change: self._pick(change["new"]), "value")
        for control in (self._policy, self._streams):
            control.observe(lambda _: self._run_what_if(), "value")

    def _frame(self) -> list[widgets.Widget]:
        views = self.views
        box = widgets.VBox
        row = {"flex_flow": "row wrap", "align_items": "center"}
        overhead = (
            [
                widgets.HBox([self._by, self._order], layout=row),
                self._boxes["Overhead"],
                widgets.HTML(facts_html(views.overhead["facts"])),
            ]
            if views.overhead
            else [_said("Framework overhead is not known: eager was not profiled.")]
        )
        graph = (
            [
                widgets.HBox([self._colour, self._transitive, self._fold, self._unfold], layout=row),
                self._meaning,
                self._boxes["DAG"],
            ]
            if views.size and self.report.sampling is None
            else [
                _said(
                    "There is no DAG: "
                    + (
                        "the model made no call."
                        if not views.size
                        else "a profile of code as it is does not know which call needs which."
                    )
                )
            ]
        )
        what_if = [
            widgets.HBox([self._policy, self._streams, self._simulate, self._without, self._near], layout=row),
            self._why,
            self._figures_text,
        ]
        timeline = (
            [self._boxes["Timeline"], _said(views.axis)]
            if views.runs
            else [_said("No run was timed call by call."), self._boxes["Timeline"]]
        )
        code = [_said("Hottest lines; press a line to select its calls."), self._hot, self._code]
        live = (
            [
                widgets.HBox([self._live], layout=row),
                self._boxes["Memory"],
                widgets.HTML("<h4>What holds the peak</h4>"),
                self._holders,
                _said(views.live["note"]),
            ]
            if views.live
            else [_said("What each call's results hold is not known.")]
        )
        panes = {
            "Summary": [widgets.HTML(summary_html(views))],
            "Overhead": overhead,
            "DAG": graph,
            "Timeline": [*what_if, *timeline, self._doubts],
            "Syncs": [
                widgets.HTML(syncs_html(views)),
                self._sync_count,
                *([self._syncs] if views.plans else []),
                widgets.HTML(host_syncs_html(views)),
            ],
            "Source": code if views.code else [self._code],
            "Memory": [*live, widgets.HTML(memory_html(views))],
        }
        self._tabs = widgets.Tab(
            [box(panes[name]) for name in PANES], titles=PANES, layout={"flex": "1 1 640px", "min_width": "0"}
        )
        side = box(
            [self._find, self._count, self._calls, self._clear, self._told],
            layout={"flex": "0 1 330px", "min_width": "260px", "padding": "0 0 0 12px"},
        )
        where = html.escape(views.summary["context"])
        subject = f"<b>{html.escape(self.report.model)}</b> · {plural(views.size, 'call')} · {where}"
        head = widgets.HBox(
            [widgets.HTML(f"{_STYLE}<p>{subject}</p>"), self._plan, self._ground],
            layout=row | {"justify_content": "space-between"},
        )
        return [head, widgets.HBox([self._tabs, side], layout={"flex_flow": "row wrap", "align_items": "flex-start"})]

    # ---------------------------------------------------------------- drawing

    @property
    def _colours(self) -> Palette:
        return palette(self.dark)

    @property
    def _schedule(self) -> dict[str, Any] | None:
        at = self._plan.value
        return None if at is None or at == _NONE else self.views.plans[at]

    def _draw_all(self) -> None:
        self._draw_overhead()
        self._draw_dag()
        self._draw_timeline()
        self._draw_memory()

    def _draw_plan(self) -> None:
        self._draw_dag()
        self._draw_timeline()
        self._list_syncs()
        self._tell()

    def _draw_overhead(self) -> None:
        by: Grouping = self._by.value
        self._rows = overhead_rows(self.views, by, self._order.value)
        drawn = overhead_figure(self.views, self._rows, by, self._colours)
        self._put("Overhead", drawn, lambda _, row: self.select_eager(*self._rows[row]["eager"]))

    def _draw_dag(self) -> None:
        drawn = dag_figure(
            self.views,
            self._opened,
            self._schedule,
            self._colour.value,
            self._colours,
            transitive=self._transitive.value,
        )
        self._put("DAG", drawn, lambda _, box: self._click_box(box))
        self._meaning.value = f"<p>{html.escape(self._colour_words())}</p>"

    def _colour_words(self) -> str:
        """What the colour of the DAG means, and why others are not to be had."""
        rows = self.views.colours
        chosen = next(one for one in rows if one["key"] == self._colour.value)
        left = [f"{one['name']}: {one['why']}" for one in rows if one["why"]]
        told = [f"{chosen['name']}: {chosen['meaning']}", chosen["unknown"] and f"?: {chosen['unknown']}"]
        return ". ".join([*filter(None, told), *left]) + "."

    def _draw_memory(self) -> None:
        run = self._live_run
        if run is None:
            return
        self._put("Memory", memory_figure(self.views, run, self._colours), self._click_span)
        self._holders.content = holders_html(run)
        self._mark_rows()

    @property
    def _live_run(self) -> dict[str, Any] | None:
        return self.views.live["runs"][self._live.value] if self.views.live else None

    def _draw_timeline(self) -> None:
        plans = {plan["policy"]: plan for plan in [self._schedule] if plan}
        runs = self._runs()
        if self.simulated:
            plans[self.simulated.plan["policy"]] = self.simulated.plan
        drawn = timeline_figure(self.views, runs, plans, self._colours)
        self._put("Timeline", drawn, self._click_span)
        self._figures_text.value = facts_html(self.simulated.facts) if self.simulated else ""
        doubts = [f"{run['label']}: {mark}" for run in runs for mark in run["marks"]]
        self._doubts.value = "".join(f"<p>{html.escape(doubt)}</p>" for doubt in doubts)

    def _runs(self) -> list[dict[str, Any]]:
        """Eager, the replay of the schedule in view, and the what-if."""
        plan = self._schedule
        wanted = ("eager", plan["policy"] if plan else "")
        runs = [run for run in self.views.runs if run["run"] in wanted]
        return [*runs, self.simulated.run] if self.simulated else runs

    def _put(self, name: str, drawn: Figure, clicked: Callable[[str, int], None]) -> None:
        """Show ``drawn`` in the pane's widget, with the selection on top."""
        widget = self._figures[name]
        self._plain[name] = drawn
        self._boxes[name].layout.height = f"{drawn.layout.height}px"
        with widget.batch_update():
            widget.data = ()
            widget.layout = drawn.layout
            widget.add_traces([*drawn.data, self._marks(name)])
        widget._widget_data, widget._widget_layout = (
            widget._data,
            widget._layout,
        )  # what a page that is loaded anew gets
        self._settle(name)
        for trace in widget.data:
            if trace.customdata is not None:
                trace.on_click(lambda trace, points, _: self._clicked(trace, points.point_inds, clicked))

    def _zoom(self) -> None:
        longest = max((run["length_ns"] for run in self._runs() if run["run"] != "eager"), default=0.0)
        if longest:
            self._figures["Timeline"].layout.xaxis.range = (-0.01 * longest / 1e3, 1.01 * longest / 1e3)

    def _settle(self, name: str) -> None:
        """Send the whole figure as long as the page has not drawn it: changes that arrive while it loads are lost."""
        if name not in self._drawn:
            self._figures[name].send_state(_WHOLE)

    def _marks(self, name: str) -> Any:
        if name == "Overhead":
            return overhead_marks(self._rows, self._by.value, self.marked, self._colours)
        if name == "DAG":
            return dag_marks(self._plain[name], self.views, self._opened, self.marked, self._colours)
        if name == "Memory":
            return memory_marks(self._live_run, self.marked, self._colours)
        return timeline_marks(self._runs(), self.marked, self._colours)

    def _mark(self) -> None:
        """Follow the selection in every pane."""
        for name, widget in self._figures.items():
            if not widget.data:
                continue
            marks = self._marks(name).to_plotly_json()
            with widget.batch_update():
                widget.data[-1].update(marks | {key: marks.get(key, []) for key in ("x", "y")}, overwrite=False)
            self._settle(name)
        self._mark_rows()
        self._show_node()
        self._list_syncs()
        self._list_calls()
        self._tell()

    def _mark_rows(self) -> None:
        """Follow the selection in code and among what holds the peak."""
        self._hot.marked = self._code.marked = [f"line {row}" for row in self.views.lines_of(self.marked)]
        run = self._live_run
        of = self.marked.eager if run and run["run"] == "eager" else self.marked.calls
        self._holders.marked = [f"call {call}" for call in of]

    def _show_node(self) -> None:
        """Move the DAG to the selection where that is out of sight."""
        widget = self._figures["DAG"]
        marks = widget.data[-1]
        for axis, places in ((widget.layout.xaxis, marks.x), (widget.layout.yaxis, marks.y)):
            if not places or not axis.range:
                continue
            low, high = axis.range
            if not any(low <= place <= high for place in places):
                half = (high - low) / 2
                axis.range = (places[0] - half, places[0] + half)

    def _tell(self) -> None:
        self._told.value = details(self.views, self.marked, self._schedule)
        self._clear.disabled = not self.marked

    # ---------------------------------------------------------------- lists

    def _list_calls(self) -> None:
        found = search(self.views, self._find.value)
        rows = [(self.views.name(call), (call,)) for call in self._window(found)]
        self._offer(self._calls, rows, self.marked.calls if len(self.marked.calls) == 1 else None)
        left = len(found) - len(rows)
        self._count.value = f"<p>{plural(len(found), 'call')}" + (
            f", {format_count(left)} of them not listed: search for them</p>" if left else "</p>"
        )

    def _window(self, found: list[int]) -> list[int]:
        """As many as a list holds, the selected one among them."""
        if len(found) <= MOST_ROWS or not self.marked.calls or self.marked.calls[0] not in found:
            return found[:MOST_ROWS]
        first = max(0, min(found.index(self.marked.calls[0]) - MOST_ROWS // 2, len(found) - MOST_ROWS))
        return found[first : first + MOST_ROWS]

    def _list_syncs(self) -> None:
        plan = self._schedule
        if plan is None:
            return
        pairs = list(zip(plan["producer"], plan["consumer"], strict=True))
        of = frozenset(self.marked.calls)
        rows = sorted(pairs, key=lambda pair: of.isdisjoint(pair)) if of else pairs
        stream, name = plan["stream"], self.views.name
        shown = [
            (f"{name(v)} (stream {stream[v]})  waits for  {name(u)} (stream {stream[u]})", (u, v))
            for u, v in rows[:MOST_ROWS]
        ]
        self._offer(self._syncs, shown, self.marked.calls)
        touched = sum(not of.isdisjoint(pair) for pair in pairs)
        said = f"{plural(len(pairs), 'synchronisation')} in {plan['label']}"
        said += f"; {format_count(touched)} of the selection, listed first" if of else ""
        said += f"; {format_count(len(pairs) - MOST_ROWS)} not listed" if len(pairs) > MOST_ROWS else ""
        self._sync_count.value = f"<p><b>{html.escape(said)}</b></p>"

    def _offer(
        self, control: widgets.Select, rows: Sequence[tuple[str, tuple[int, ...]]], value: tuple[int, ...] | None
    ) -> None:
        """Fill a list without that counting as a pick."""
        self._quiet = True
        try:
            if tuple(rows) != control.options:
                control.options = rows
            control.value = value if value in {row for _, row in rows} else None
        finally:
            self._quiet = False

    # ---------------------------------------------------------------- what was clicked

    def _pick(self, calls: Iterable[int] | None) -> None:
        if calls is not None and not self._quiet:
            self.select(*calls)

    def _clicked(self, trace: Any, places: list[int], clicked: Callable[[str, int], None]) -> None:
        if places:
            clicked(trace.meta or "", int(trace.customdata[places[0]]))

    def _click_box(self, box: int) -> None:
        views = self.views
        if box < views.size:
            self.select(box)
            return
        at = box - views.size
        held = range(views.graph["first"][at], views.graph["last"][at] + 1)
        self.open_module(box)
        self.select(*held)

    def _click_span(self, run: str, call: int) -> None:
        if call < 0:
            return
        if run == "eager":
            self.select_eager(call)
        else:
            self.select(call)

    def _pick_key(self, key: str) -> None:
        """A row of code, a head that sorts, or a row of what holds the peak."""
        kind, _, what = key.partition(" ")
        if kind == "sort" and what in dict(sortable(self.views)):
            self._hot.content = hottest_html(self.views, what)
        elif kind == "line" and what.isdecimal() and int(what) < len(self.views.on_line):
            self.select_eager(*self.views.on_line[int(what)])
        elif kind == "call" and what.isdecimal():
            self._click_span(self._live_run["run"] if self._live_run else "", int(what))

    def _open(self, boxes: frozenset[int]) -> None:
        self._opened = boxes
        self._draw_dag()

    def _run_what_if(self) -> None:
        self.what_if(self._policy.value, self._streams.value)


def _figure_widget(ground: _Ground) -> FigureWidget:
    widget = _Figure(ground)
    widget._config = {
        "scrollZoom": True,
        "responsive": True,
        "displaylogo": False,
        "modeBarButtonsToRemove": ["select2d", "lasso2d"],
    }  # the only way to reach it
    return widget


def _dropdown(name: str, options: list[Any], value: Any = None) -> widgets.Dropdown:
    chosen = {} if value is None else {"value": value}
    return widgets.Dropdown(
        options=options, description=name, style={"description_width": "auto"}, layout={"width": "auto"}, **chosen
    )


def _button(text: str, meaning: str, pressed: Callable[[], Any]) -> widgets.Button:
    button = widgets.Button(description=text, tooltip=meaning, layout={"width": "auto"})
    button.on_click(lambda _: pressed())
    return button


def _list(name: str, meaning: str) -> widgets.Select:
    return widgets.Select(options=[], rows=10, tooltip=meaning, layout={"width": "auto"})


def _said(text: str) -> widgets.HTML:
    return widgets.HTML(f"<p>{html.escape(text)}</p>")
