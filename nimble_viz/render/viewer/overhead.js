/* Overhead: where eager's host time went, by operator or call, and in an icicle by module. */
import { buildIcicle } from "./icicle.js";
import { card, count, el, time } from "./tools.js";

const WHOLE = [["waiting", "Waits for the device"], ["loader", "Waits for the data loader"], ["remainder", "Unattributed"]];
const PARTS = [["python", "Python"], ["dispatch", "Dispatch"], ["allocation", "Allocation"], ["launch", "Launch"], ["tail", "Tail"]];
export function buildOverhead(node, app) {
  const { data, eager, cost, together, fate, matches, state, selected, selectEager, onSelect, panes } = app;
  if (!data.overhead) { node.append(el("div", { class: "nv-empty" }, "Eager was not profiled, so there is nothing to say about where its host time went.")); return; }
  if (!cost.call.length) { node.append(el("div", { class: "nv-empty" }, "No call of the program was found in the profile.")); return; }
  const { totals, serial } = data.overhead, view = { by: "operator", sort: "overhead", text: "", limit: 200 };
  const work = serial ? "Operator's own computing" : "GPU time (runs beside the host)";
  const bars = (row, scale) => el("div", { class: "nv-tracks" },
    el("div", { class: "nv-stack", style: `width:${100 * row.host / scale}%` }, [...PARTS, ...(serial ? [["work", "Work"]] : []), ...WHOLE].map(([key, label]) => row[key] > 0 && el("i", { style: `width:${(100 * row[key]) / row.host}%;background:var(--${key})`, title: `${label}: ${time(row[key])}` }))),
    el("div", { class: "nv-strip nv-hatch", style: `width:${(100 * row.exposed) / scale}%`, title: `Exposed: ${time(row.exposed)}` }),
    !serial && el("div", { class: "nv-strip", style: `width:${(100 * row.work) / scale}%;background:var(--work)`, title: `GPU time: ${time(row.work)}` }));
  const overheadSum = PARTS.reduce((sum, [key]) => sum + totals[key], 0);
  const rest = { waiting: data.overhead.waiting_ns, loader: data.overhead.loader_ns, remainder: Math.max(0, data.overhead.remainder_ns) };
  const whole = { ...totals, ...rest, host: overheadSum + (serial ? totals.work : 0) + rest.waiting + rest.loader + rest.remainder };
  const list = el("div", { class: "nv-rows" }), status = el("span", { class: "nv-push", role: "status" });
  const buttons = {};
  const by = (key, text) => (buttons[key] = el("button", { class: "nv-plain", type: "button", "aria-pressed": "false", onclick: () => { view.by = key; view.limit = 200; fill(); } }, text));
  const emptyRow = (key, first) => ({ key, first, calls: new Set(), overhead: 0, host: 0, python: 0, dispatch: 0, allocation: 0, launch: 0, tail: 0, work: 0, exposed: 0 });
  const parts = ["python", "dispatch", "allocation", "launch", "tail", "work", "exposed"];
  const add = (row, call, at) => { for (const one of together.has(call) ? together : [call]) row.calls.add(one); for (const part of parts) row[part] += cost[part][at]; };
  const sum = (row) => { row.overhead = PARTS.reduce((all, [key]) => all + row[key], 0); row.host = row.overhead + (serial ? row.work : 0); return row; };
  const value = (row) => ({ overhead: row.overhead, exposed: row.exposed, work: row.work, calls: view.by === "call" ? -row.first : row.calls.size })[view.sort];
  const ranked = (rows) => rows.sort((a, b) => value(b) - value(a) || a.first - b.first);
  const heading = (key, text, low) => el("button", { type: "button", class: low ? "nv-num nv-low" : "nv-num", "aria-pressed": String(view.sort === key), onclick: () => { view.sort = key; fill(); } }, text, view.sort === key ? " ↓" : "");
  function rows() {
    const keep = view.text ? new Set(matches(view.text, eager)) : null, groups = new Map();
    cost.call.forEach((call, at) => {
      if (keep && !keep.has(call)) return;
      const key = view.by === "call" ? call : together.has(call) ? data.overhead.shared.name : eager.operator[call];
      let row = groups.get(key);
      if (!row) groups.set(key, (row = emptyRow(key, call)));
      add(row, call, at);
    });
    return ranked([...groups.values()].map(sum));
  }
  let current = [];
  const holds = (row) => (row.calls.size < state.markedEager.size ? [...row.calls].some((call) => state.markedEager.has(call)) : [...state.markedEager].some((call) => row.calls.has(call)));
  function fill(pinned) {
    for (const [key, button] of Object.entries(buttons)) button.setAttribute("aria-pressed", String(key === view.by));
    current = rows();
    const scale = current.reduce((most, row) => Math.max(most, row.host, row.work, row.exposed), 1);
    const head = el("div", { class: "nv-row nv-top" },
      el("span", null, view.by === "call" ? "Call" : "Operator"), el("span", null, `0 to ${time(scale)}`),
      heading("overhead", "Overhead"), heading("exposed", "Exposed"), heading("work", "Work", true), heading("calls", view.by === "call" ? "Order" : "Calls", true));
    const line = (row) => {
      const whole = together.has(row.first);
      const [short, note] = whole ? data.overhead.shared.name.slice(0, -1).split(" (") : [];
      const name = whole ? short : view.by === "call" ? `${row.key} ${eager.label[row.key]}` : eager.label[row.first];
      const under = whole ? note : view.by === "call" ? eager.module[row.key] : row.key !== name ? row.key : "", then = view.by === "call" ? fate(row.key).join(", ") : "";
      return el("button", { class: `nv-row${holds(row) ? " nv-on" : ""}`, type: "button", "data-call": row.first, "aria-pressed": String(holds(row)), onclick: () => selectEager(row.first, "overhead") },
        el("span", { class: "nv-name", title: [name, under, then].filter(Boolean).join("\n") }, name, under && el("small", { style: whole ? "white-space:normal" : null }, under), then && el("small", { class: "nv-then" }, then)), bars(row, scale),
        el("span", { class: "nv-num" }, time(row.overhead)), el("span", { class: "nv-num" }, time(row.exposed)), el("span", { class: "nv-num nv-low" }, time(row.work)),
        el("span", { class: "nv-num nv-low" }, view.by === "call" ? row.key : count(row.calls.size)));
    };
    const visible = current.slice(0, view.limit), chosen = pinned && current.findIndex(holds);
    list.replaceChildren(head, ...(chosen >= view.limit ? [line(current[chosen])] : []), ...visible.map(line),
      current.length > view.limit ? el("button", { class: "nv-plain nv-more", type: "button", onclick: () => { view.limit += 200; fill(); } }, `Show ${Math.min(200, current.length - view.limit)} more of ${count(current.length)}`) : "");
    if (!current.length) list.append(el("div", { class: "nv-empty" }, "Nothing matches the search."));
    status.textContent = `${count(current.length)} ${view.by}s`;
  }
  const field = el("input", { type: "search", placeholder: "Operator, module, source", "aria-label": "Search overhead", oninput: () => { view.text = field.value; view.limit = 200; fill(); } });
  const body = el("div", { class: "nv-lanes", style: "padding:14px 24px 32px" },
    el("div", { class: "nv-grid", style: "margin-bottom:18px" },
      card("One eager iteration, profiled", true,
        el("p", null, `${time(data.overhead.profiled_ns)} profiled; ${data.overhead.unprofiled_ns ? time(data.overhead.unprofiled_ns) : "not timed"} without the profiler. The parts are shares of the profiled run; believe wall times only from the unprofiled one.`),
        el("div", { class: "nv-whole" }, bars(whole, whole.host || 1)),
        el("div", { class: "nv-columns" }, data.overhead.facts.map(([name, value]) => el("div", null, el("span", { class: "nv-small" }, name), value)))),
      card("From module to kernel", true, buildIcicle(app))),
    data.overhead.warnings.map((text) => el("div", { class: "nv-note", style: "margin:0 0 10px" }, text)), list);
  node.append(
    el("div", { class: "nv-tools" }, by("operator", "By operator"), by("call", "By call"), field, status),
    el("div", { class: "nv-legend" }, PARTS.map(([key, label]) => el("span", null, el("i", { class: "nv-key", style: `background:var(--${key})` }), label)), el("span", null, el("i", { class: "nv-key", style: "background:var(--work)" }), work), WHOLE.map(([key, label]) => whole[key] > 0 && el("span", null, el("i", { class: "nv-key", style: `background:var(--${key})` }), label)), el("span", null, el("i", { class: "nv-key nv-hatch" }), "Exposed: the device was idle meanwhile")),
    body);
  fill();
  const mark = (from) => { if (selected() && from !== "overhead" && view.by === "operator" && from !== "theme" && view.text === "" && state.pane !== "overhead") { view.by = "call"; } fill(true); const row = list.querySelector(".nv-on"); if (row && from !== "overhead" && row.scrollIntoView) row.scrollIntoView({ block: "center" }); };
  onSelect.push(mark);
  if (selected()) { view.by = "call"; fill(true); }
  panes.overhead.onshow = () => { const row = list.querySelector(".nv-on"); if (row) row.scrollIntoView({ block: "center" }); };
}
