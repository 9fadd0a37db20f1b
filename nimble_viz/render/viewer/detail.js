/* What is known about the selected calls. */
import { clock, count, dotted, el, percent, scaled, time } from "./tools.js";

export function createDetail(app) {
  const { streamChip, data, calls, work, size, fused, eager, standsFor, became, runs, cost, phased, critical,
    before, after, together, overheadOf, spansOf, sourceOf, listed, codeAt, state, selected, select,
    selectEager, marksOf, plan, streamOf, phaseChip, callLink, panes, show } = app;
  const detail = el("aside", { class: "nv-detail", hidden: true, "aria-label": "Selected call" });
  const eagerLink = (call) => el("div", null, el("button", { class: `nv-link${call === state.eager ? " nv-picked" : ""}`, type: "button", "data-eager": call, onclick: () => selectEager(call, "link") }, `${call} ${eager.label[call]}`), el("span", { class: "nv-small", style: "white-space:normal" }, dotted([eager.module[call], sourceOf(call, eager)].filter(Boolean).join(", "))));
  const many = (list, link) => [list.slice(0, 12).map(link), list.length > 12 && `and ${list.length - 12} more`];
  function fillDetail() {
    const call = state.call;
    detail.hidden = !selected();
    if (!selected()) return;
    const rows = [], of = fused || state.line ? [...state.markedEager] : [call];
    if (state.line) {
      const phases = data.phases.map((phase) => [phase, of.filter((other) => eager.phase[other] === phase).length]).filter(([, n]) => n);
      if (state.line.file) rows.push(["Code", el("code", null, codeAt(state.line.file, state.line.line) || "not in this report")]);
      rows.push([fused ? "Eager calls" : "Calls", [count(of.length), phased && phases.map(([phase, n]) => [", ", phaseChip(phase), ` ${count(n)}`]), many(of, fused ? eagerLink : (other) => el("div", null, callLink(other)))]]);
      if (fused) rows.push(["Became", state.marked.size ? many([...state.marked], (other) => el("div", null, callLink(other))) : "no call of the replay"]);
      rows.push(["Modules", listed([...new Set(of.map((other) => eager.module[other]))], 6, (name) => name || "the model itself").map((text) => el("div", null, text))]);
      rows.push(["Cost alone", `${time([...state.marked].reduce((sum, other) => sum + calls.cost[other], 0))} together`]);
    } else if (state.eager >= 0) {
      rows.push(["Eager call", `${state.eager} of ${count(eager.label.length)}, ${eager.operator[state.eager]}`], ["Module", dotted(eager.module[state.eager] || "the model itself")], ["Source", sourceOf(state.eager, eager) || "unknown"]);
      rows.push(["Became", became[state.eager].length ? many(became[state.eager], (other) => el("div", null, callLink(other))) : "No call of the replay stands for it: folded into weights, or not needed."]);
    }
    if (call >= 0 && !state.line) {
      rows.push([fused ? "Kernel" : "Operator", calls.operator[call]], ["Call", el("span", null, `${call} of ${count(size)}, `, phased ? phaseChip(calls.phase[call]) : calls.phase[call])]);
      if (fused) rows.push(["Stands for", standsFor[call].length ? many(standsFor[call], eagerLink) : "no eager call: nothing explains it (a change of layout, most often)"]);
      if (state.eager < 0) rows.push(["Module", dotted(calls.module[call] || (fused && !standsFor[call].length ? "unknown" : "the model itself"))]);
      if (!fused) rows.push(["Source", sourceOf(call) || "unknown"]);
      if (!fused && calls.origins[call] > 1) rows.push(["Origins", `${calls.origins[call]} operators fused into this call`]);
      rows.push(["Reads", calls.reads[call] || "nothing"], ["Writes", calls.writes[call] || "nothing"]);
      if (calls.arguments[call]) rows.push(["Arguments", calls.arguments[call]]);
      rows.push(["Cost alone", `${time(calls.cost[call])}${calls.spread.length ? ` (spread ${time(calls.spread[call])})` : ""}`]);
      rows.push(["Work", [work.flops[call] < 0 ? "FLOPs unknown" : scaled(work.flops[call], "FLOP"), scaled(work.bytes[call], "B"), calls.cost[call] > 0 && `${scaled((1e9 * work.bytes[call]) / calls.cost[call], "B/s")}`,
        calls.cost[call] > 0 && work.flops[call] > 0 && scaled((1e9 * work.flops[call]) / calls.cost[call], "FLOP/s")].filter(Boolean).join(", ")]);
      if (work.fill[call] >= 0) rows.push(["Fills the GPU", [percent(work.fill[call]), work.waves[call] >= 0 && `${work.waves[call].toFixed(2)} waves`, work.occupancy[call] >= 0 && `occupancy ${percent(work.occupancy[call])}`].filter(Boolean).join(", ")]);
      rows.push(["Critical path", critical.has(call) ? "yes" : "no"]);
      if (plan()) rows.push(["Stream", el("span", null, streamChip(streamOf(call)), `in ${plan().label}`)]);
    }
    const found = of.map((other) => overheadOf.get(other)).filter((row) => row !== undefined);
    if (found.length) {
      const sum = (key) => found.reduce((all, row) => all + cost[key][row], 0), parts = ["python", "dispatch", "allocation", "launch", "tail"].map(sum);
      rows.push(["Overhead", `${of.some((other) => together.has(other)) ? `${data.overhead.shared.name}: ` : ""}${time(parts.reduce((all, part) => all + part, 0))} in profiled eager${of.length > 1 ? `, ${count(of.length)} calls` : ""}: Python ${time(parts[0])}, dispatch ${time(parts[1])}, allocation ${time(parts[2])}, launch ${time(parts[3])}`], ["Exposed", `${time(sum("exposed"))} with the device idle`]);
    }
    for (const run of runs) {
      const spans = [...marksOf(run)].flatMap((other) => spansOf(run).get(other) || []);
      if (state.line && spans.length) rows.push([run.label, `${time(spans.reduce((sum, span) => sum + run.length[span], 0))} in ${count(spans.length)} spans`]);
      else if (spans.length) rows.push([run.label, spans.slice(0, 4).map((span) => el("div", null, `${run.lanes[run.lane[span]].name}: ${clock(run.start[span], 1)} + ${time(run.length[span])}`))]);
    }
    const links = (list) => (list.length ? [list.slice(0, 8).map((other) => el("div", null, callLink(other))), list.length > 8 && `and ${list.length - 8} more`] : "none");
    if (call >= 0 && !state.line) rows.push(["Waits for", links(before[call])], ["Needed by", links(after[call])]);
    detail.replaceChildren(
      el("button", { class: "nv-close", type: "button", "aria-label": "Clear selection", onclick: () => select(-1) }, "×"),
      el("h2", null, state.line ? state.line.title ?? `${state.line.file}:${state.line.line}` : state.eager >= 0 ? eager.label[state.eager] : calls.label[call]),
      el("nav", { "aria-label": "Show this call in" }, ["overhead", "dag", "timeline", "syncs", "source", "memory"].filter((name) => name !== state.pane).map((name) => el("button", { class: "nv-plain", type: "button", onclick: () => show(name) }, panes[name].title))),
      el("dl", { class: "nv-facts" }, rows.map(([name, value]) => [el("dt", null, name), el("dd", null, value)])),
    );
  }
  return { detail, fillDetail };
}
