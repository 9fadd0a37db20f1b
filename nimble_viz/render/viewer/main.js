/* One report, seven views, one selection. No network, no dependencies; every text enters the page as text. */
import { count, el } from "./tools.js";
import { createTheme } from "./theme.js";
import { completeRun, readReport } from "./report.js";
import { createSelection } from "./selection.js";
import { createControls } from "./controls.js";
import { createKeys } from "./help.js";
import { createDetail } from "./detail.js";
import { buildSummary } from "./summary.js";
import { buildOverhead } from "./overhead.js";
import { buildDag } from "./dag.js";
import { buildTimeline } from "./timeline.js";
import { buildSyncs } from "./syncs.js";
import { buildSource } from "./source.js";
import { buildMemory } from "./memory.js";

const VIEWS = [["summary", "Summary", buildSummary], ["overhead", "Overhead", buildOverhead], ["dag", "DAG", buildDag], ["timeline", "Timeline", buildTimeline], ["syncs", "Syncs", buildSyncs], ["source", "Source", buildSource], ["memory", "Memory", buildMemory]];

/** The value that Python packed: JSON, gzipped. */
export async function decode(packed) {
  return JSON.parse(await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
}

/** Show ``data`` in ``root``.
 *
 * ``themed``: the element that the style sheet's custom properties are set on; ``pane``: the view to open first;
 * ``guided``: somebody else says which theme it is, so there is no button for it; ``whatIf``: what the timeline offers
 * to simulate, and ``simulate(policy, streams)``, ``remove()`` that do it. Returns what scripts may call.
 */
export function mount(root, data, { themed = document.documentElement, pane = "", guided = false, whatIf = null } = {}) {
  const panes = {}, redraw = [], onPlan = [], onSelect = [], onPane = [], built = {};
  const app = { ...readReport(data), ...createTheme(themed), panes, redraw, onPlan, onSelect, onPane, whatIf };
  Object.assign(app, createSelection(app), { show });
  Object.assign(app, createControls(app));
  Object.assign(app, createDetail(app));
  const { facts, fused, runs, size, state, theme } = app;
  const tabs = el("div", { class: "nv-tabs", role: "tablist", "aria-label": "Views" }), holder = el("div", { class: "nv-panes" });
  for (const [name, title, build] of VIEWS) {
    const tab = el("button", { role: "tab", type: "button", id: `nv-tab-${name}`, "aria-controls": `nv-pane-${name}`, "aria-selected": "false", tabindex: -1, onclick: () => show(name) }, title);
    const node = el("div", { role: "tabpanel", id: `nv-pane-${name}`, "aria-labelledby": `nv-tab-${name}`, class: `nv-pane${name === "summary" ? "" : " nv-fill"}`, hidden: true, tabindex: 0 });
    panes[name] = { tab, node, build, title, onSelect: [] };
    tabs.append(tab); holder.append(node);
  }
  /** Fill a view; one that was there before, as another run changes it, is made anew. */
  function make(name) {
    const one = panes[name];
    one.onSelect = []; one.onshow = null;
    one.node.replaceChildren();
    built[name] = one.build(one.node, { ...app, onSelect: one.onSelect }) ?? {};
  }
  function show(name) {
    if (!panes[name]) return;
    state.pane = name;
    for (const [key, one] of Object.entries(panes)) {
      const on = key === name;
      one.node.hidden = !on;
      one.tab.setAttribute("aria-selected", String(on));
      one.tab.tabIndex = on ? 0 : -1;
    }
    if (!built[name]) make(name);
    panes[name].onshow?.();
    app.showTip();
    app.fillDetail();
    for (const react of onPane) react();
  }
  tabs.addEventListener("keydown", (event) => {
    const names = Object.keys(panes), at = names.indexOf(state.pane), next = { ArrowRight: at + 1, ArrowLeft: at - 1 + names.length, Home: 0, End: names.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault(); show(names[next % names.length]); panes[state.pane].tab.focus();
  });
  const keys = createKeys(app, () => built[state.pane]?.drive);
  const wish = matchMedia("(prefers-color-scheme: dark)");
  let choice = "auto", around = "";
  const themeButton = el("button", { class: "nv-plain nv-theme", type: "button", hidden: guided, onclick: () => { choice = { auto: "light", light: "dark", dark: "auto" }[choice]; applyTheme(); } });
  function applyTheme() {
    themed.dataset.theme = choice === "auto" ? around || (wish.matches ? "dark" : "light") : choice;
    themeButton.textContent = `Theme: ${choice}`;
    app.repaint();
    for (const request of redraw) request();
    for (const react of onPlan) react();
    app.fillDetail();
  }
  if (!guided) wish.addEventListener("change", applyTheme);
  const help = el("button", { class: "nv-plain nv-keys", type: "button", "aria-label": "Keys", title: "Keys (?)", onclick: () => { keys.help.hidden = !keys.help.hidden; } }, "?");
  root.replaceChildren(el("div", { class: "nv-box" }, el("div", { class: "nv", onkeydown: keys.press },
    el("header", { class: "nv-head" }, el("h1", { class: "nv-title" }, el("b", null, facts.model), ` · ${fused ? `${facts.provenance[0][1]}` : `${count(size)} calls`} · ${facts.context}`), el("span", { class: "nv-buttons" }, help, themeButton)),
    !facts.complete && el("div", { class: "nv-note", role: "status" }, "Interrupted: this report holds what was measured until then. What is missing is said where it would stand."),
    tabs, el("div", { class: "nv-main" }, holder, app.detail), app.live, keys.help)), app.tip);
  if (!guided) document.addEventListener("keydown", (event) => { if (event.target === document.body) keys.press(event); });
  applyTheme();
  show(panes[pane] ? pane : "summary");
  const { select, selectEager, selectLine, selectAll, setPlan } = app;
  const marked = () => ({ calls: [...state.marked], eager: [...state.markedEager] });
  /** Show a simulated run in the timeline, or none. */
  function setSimulated(shown, open = true) {
    state.simulated = shown && { ...shown, run: completeRun(structuredClone(shown.run)) };
    if (built.timeline) make("timeline");
    if (shown && open && state.pane !== "timeline") show("timeline");
  }
  return {
    select, selectEager, selectLine, selectAll, setPlan, setSimulated, show, marked, onSelect, onPlan, onPane,
    plan: () => state.plan, pane: () => state.pane, selected: () => state.call, selectedEager: () => state.eager, setTheme: (name) => { around = name; applyTheme(); }, dark: () => theme.dark,
    views: built, runs,
  };
}
