/* Syncs: waits across streams, and where eager made the host wait. */
import { count, el, table, time } from "./tools.js";

export function buildSyncs(node, app) {
  const { streamChip, data, calls, fused, eager, standsFor, plans, facts, phased, listed, planLabel, matches, state,
    plan, onSelect, onPlan, phaseChip, planPicker, kept, callLink, panes } = app;
  const ends = (entry) => {
    const known = data.sync_ends.filter(([key]) => entry[key] !== null);
    return known.length > 0 && el("div", { class: "nv-counts nv-ends" }, known.map(([key, name, meaning]) => el("div", null, el("strong", null, count(entry[key])), el("em", null, name), el("small", null, meaning))));
  };
  const counts = el("div"), list = el("div"), view = { limit: 200, text: "" };
  const field = el("input", { type: "search", placeholder: "Operator, module, source", "aria-label": "Search synchronisations", oninput: () => { view.text = field.value; view.limit = 200; fill(); } });
  function fill() {
    const entry = facts.plans[state.plan], now = plan();
    if (!now) { counts.replaceChildren(el("div", { class: "nv-empty" }, facts.profiled ? `No plan here: ${facts.profiled.absent[0].why}.` : "No plan was made, so nothing has to wait.")); return; }
    counts.replaceChildren(el("div", { class: "nv-counts" }, data.sync_counts.map(([key, name, meaning]) => el("div", null, el("strong", null, entry[key] === null ? "not read" : count(entry[key])), el("em", null, name), el("small", null, meaning)))), kept(entry) || "", ends(entry) || "");
    const keep = view.text ? new Set(matches(view.text)) : null, rows = [];
    now.producer.forEach((u, at) => { const v = now.consumer[at]; if (!keep || keep.has(u) || keep.has(v)) rows.push([at, u, v]); });
    if (!now.producer.length) { list.replaceChildren(el("p", { class: "nv-sub" }, `${planLabel(now)} needs no synchronisation: ${now.streams > 1 ? "its streams never meet" : "all calls are on one stream"}.`)); return; }
    const side = (call) => el("td", null, streamChip(now.stream[call]), callLink(call), el("span", { class: "nv-small", style: "white-space:normal" }, phased && phaseChip(calls.phase[call]), phased && " ", calls.module[call]), fused && el("span", { class: "nv-small", style: "white-space:normal" }, standsFor[call].length ? `for eager ${listed(standsFor[call], 4, (other) => `${other} ${eager.label[other]}`).join(", ")}` : "no eager call explains it"));
    const first = rows.findIndex(([, u, v]) => state.marked.has(u) || state.marked.has(v));
    const shownRows = rows.slice(0, view.limit);
    if (first >= view.limit) shownRows.unshift(rows[first]);
    list.replaceChildren(
      table([["#", 1], ["Producer (stream, call, module)"], ["Consumer that waits for it"], ["Producer's cost", 1]], shownRows.map(([at, u, v]) => el("tr", { class: state.marked.has(u) || state.marked.has(v) ? "nv-on" : null }, el("td", { class: "nv-num" }, at + 1), side(u), side(v), el("td", { class: "nv-num" }, time(calls.cost[u]))))),
      rows.length > view.limit ? el("button", { class: "nv-plain nv-more", type: "button", onclick: () => { view.limit += 200; fill(); } }, `Show ${Math.min(200, rows.length - view.limit)} more of ${count(rows.length)}`) : "", rows.length ? "" : el("p", { class: "nv-sub" }, "Nothing matches the search."));
  }
  const host = data.host_syncs;
  node.append(plans.length > 0 ? el("div", { class: "nv-tools" }, planPicker(), field) : "", el("div", { class: "nv-lanes", style: "padding:16px 24px 32px" },
    el("section", { "aria-label": "Counts" }, el("h2", { class: "nv-h2" }, "Synchronisations across streams, counted four ways"), el("p", { class: "nv-sub" }, "Fork from and join to the capture stream, and edges inside one call, are counted apart."), counts),
    el("section", { class: "nv-card", style: "margin-bottom:16px" }, el("h2", null, "Where eager made the host wait"),
      host === null ? el("p", null, "Eager was not profiled, so its host synchronisations are unknown.") : host.length ? table([["Kind"], ["Count", 1], ["Total", 1], ...(phased ? [["Phase"]] : []), ["Source line"], ["What to do"]], host.map((row) => el("tr", null, el("td", null, row.kind), el("td", { class: "nv-num" }, count(row.count)), el("td", { class: "nv-num" }, row.total), phased && el("td", null, row.phase ? phaseChip(row.phase) : "–"), el("td", null, row.source || "unknown"), el("td", null, row.hint)))) : el("p", null, facts.host ? "None: on the host device there is nothing to wait for." : "None was seen in the profiled iteration.")),
    plans.length > 0 && el("section", { class: "nv-card" }, el("h2", null, "Planned synchronisations"), list)));
  fill();
  onSelect.push(() => { fill(); const row = list.querySelector(".nv-on"); if (row && !node.hidden) row.scrollIntoView({ block: "nearest" }); });
  onPlan.push(() => { view.limit = 200; fill(); });
  panes.syncs.onshow = () => { const row = list.querySelector(".nv-on"); if (row) row.scrollIntoView({ block: "center" }); };
}
