/* What is selected, in all views at once. */
import { count, el } from "./tools.js";

export function createSelection(app) {
  const { data, size, fused, eager, standsFor, became, plans, callsOn, isEager, nameOf, fate, lineKey,
    panes, onSelect, onPlan } = app;
  const state = { call: -1, eager: -1, line: null, plan: Math.max(0, data.dag.opens), pane: "", colour: "stream", simulated: null, marked: new Set(), markedEager: new Set() };
  if (!fused) state.markedEager = state.marked;
  const live = el("div", { class: "nv-hidden", "aria-live": "polite" });
  const plan = () => plans[state.plan];
  const streamOf = (call) => (plan() ? plan().stream[call] : 0);
  const marksOf = (run) => (isEager(run) ? state.markedEager : state.marked);
  const selected = () => state.call >= 0 || state.eager >= 0;
  function select(call, from) {
    state.call = call >= 0 && call < size ? call : -1;
    state.eager = -1; state.line = null;
    state.marked = new Set(state.call < 0 ? [] : [state.call]);
    state.markedEager = fused ? new Set(state.call < 0 ? [] : standsFor[state.call]) : state.marked;
    announce(from);
  }
  /** An eager call, and with it the calls that stand for it. */
  function selectEager(call, from) {
    if (!fused || !became[call]) { select(call, from); return; }
    state.eager = call; state.line = null; state.call = became[call].length ? became[call][0] : -1;
    state.marked = new Set(became[call]); state.markedEager = new Set([call]);
    announce(from);
  }
  const linesMarked = () => new Set([...state.markedEager].filter((call) => eager.file[call]).map((call) => lineKey(eager.file[call], eager.line[call])));
  /** All calls made on one line of code, and what stands for them. */
  function selectLine(file, line, from) {
    const own = callsOn.get(lineKey(file, line)) || [];
    if (!own.length) { select(-1, from); return; }
    state.line = { file, line };
    state.markedEager = new Set(own); state.marked = fused ? new Set(own.flatMap((call) => became[call])) : state.markedEager;
    state.call = state.marked.size ? [...state.marked][0] : -1; state.eager = fused ? own[0] : -1;
    announce(from);
  }
  /** Calls and eager calls, as code asks for them: none, one as a click does, or several together. */
  function selectAll(own, ownEager, from) {
    if (own.length + ownEager.length === 0) { select(-1, from); return; }
    if (own.length === 1 && (!fused || [...standsFor[own[0]]].every((call) => ownEager.includes(call)) && ownEager.length === standsFor[own[0]].length)) { select(own[0], from); return; }
    if (fused && ownEager.length === 1) { selectEager(ownEager[0], from); return; }
    state.line = { title: `${count(Math.max(own.length, ownEager.length))} calls` };
    state.marked = new Set(own); state.markedEager = fused ? new Set(ownEager) : state.marked;
    state.call = own.length ? own[0] : -1; state.eager = fused && ownEager.length ? ownEager[0] : -1;
    announce(from);
  }
  function announce(from) {
    app.fillDetail();
    live.textContent = !selected() ? "Nothing selected" : state.line ? (state.line.file ? `Selected line ${state.line.file}:${state.line.line}, ${count(state.markedEager.size)} calls` : `Selected ${state.line.title}`) : state.eager >= 0 ? `Selected eager call ${state.eager}: ${nameOf(state.eager, eager)}; ${fate(state.eager).join(", ")}` : `Selected call ${state.call}: ${nameOf(state.call)}`;
    for (const react of [...Object.values(panes).flatMap((pane) => pane.onSelect), ...onSelect]) react(from);
  }
  function setPlan(index) { state.plan = index; for (const react of onPlan) react(); app.fillDetail(); }
  return { state, live, selected, select, selectEager, selectLine, selectAll, linesMarked, marksOf, plan, streamOf, setPlan };
}
