/* Overhead: where eager's host time went, by operator, module or call. */
import { buildIcicle } from "./icicle.js";
import { card, count, el, stepsOf, time } from "./tools.js";

const WHOLE = [["waiting", "Waits for the device"], ["loader", "Waits for the data loader"], ["remainder", "Unattributed"]];
const PARTS = [["python", "Python"], ["dispatch", "Dispatch"], ["allocation", "Allocation"], ["launch", "Launch"], ["tail", "Tail"]];
export function buildOverhead(node, app) {
  const { data, eager, cost, facts, phased, together, fate, matches, state, selected, selectEager, onSelect,
    phaseChip, panes } = app;
  if (!data.overhead) { node.append(el("div", { class: "nv-empty" }, "Eager was not profiled, so there is nothing to say about where its host time went.")); return; }
  if (!cost.call.length) { node.append(el("div", { class: "nv-empty" }, "No call of the program was found in the profile.")); return; }
  const { totals, serial } = data.overhead, view = { by: "operator", sort: "overhead", text: "", limit: 200, open: null, depth: 0 };
  const work = serial ? "Operator's own computing" : "GPU time (runs beside the host)";
  const bars = (row, scale) => el("div", { class: "nv-tracks" },
    el("div", { class: "nv-stack", style: `width:${100 * row.host / scale}%` }, [...PARTS, ...(serial ? [["work", "Work"]] : []), ...WHOLE].map(([key, label]) => row[key] > 0 && el("i", { style: `width:${(100 * row[key]) / row.host}%;background:var(--${key})`, title: `${label}: ${time(row[key])}` }))),
    el("div", { class: "nv-strip nv-hatch", style: `width:${(100 * row.exposed) / scale}%`, title: `Exposed: ${time(row.exposed)}` }),
    !serial && el("div", { class: "nv-strip", style: `width:${(100 * row.work) / scale}%;background:var(--work)`, title: `GPU time: ${time(row.work)}` }));
  const overheadSum = PARTS.reduce((sum, [key]) => sum + totals[key], 0);
  const rest = { waiting: data.overhead.waiting_ns, loader: data.overhead.loader_ns, remainder: Math.max(0, data.overhead.remainder_ns) };
  const whole = { ...totals, ...rest, host: overheadSum + (serial ? totals.work : 0) + rest.waiting + rest.loader + rest.remainder };
  const spent = phased ? facts.phases.rows.filter((row) => row.parts.work !== undefined).map(({ phase, parts }) => ({ phase, ...parts, host: PARTS.reduce((sum, [key]) => sum + parts[key], serial ? parts.work : 0) })).filter((row) => row.host > 0 || row.work > 0) : [];
  const longestPhase = spent.reduce((most, row) => Math.max(most, row.host, row.work), 1);
  const list = el("div", { class: "nv-rows" }), status = el("span", { class: "nv-push", role: "status" });
  const buttons = {};
  const by = (key, text) => (buttons[key] = el("button", { class: "nv-plain", type: "button", "aria-pressed": "false", onclick: () => { view.by = key; view.limit = 200; fill(); } }, text));
  const homeOf = (call) => (phased && eager.phase[call] === "optimizer" ? "(the optimizer)" : eager.module[call] || "(the model itself)");
  const emptyRow = (key, first) => ({ key, first, calls: new Set(), overhead: 0, host: 0, python: 0, dispatch: 0, allocation: 0, launch: 0, tail: 0, work: 0, exposed: 0 });
  const parts = ["python", "dispatch", "allocation", "launch", "tail", "work", "exposed"];
  const add = (row, call, at) => { for (const one of together.has(call) ? together : [call]) row.calls.add(one); for (const part of parts) row[part] += cost[part][at]; };
  const sum = (row) => { row.overhead = PARTS.reduce((all, [key]) => all + row[key], 0); row.host = row.overhead + (serial ? row.work : 0); return row; };
  const value = (row) => ({ overhead: row.overhead, exposed: row.exposed, work: row.work, calls: view.by === "call" ? -row.first : row.calls.size })[view.sort];
  const ranked = (rows) => rows.sort((a, b) => Boolean(a.mine) - Boolean(b.mine) || value(b) - value(a) || a.first - b.first);
  /** Modules and all that they hold: each row has the sums of everything below it, calls of its own included. */
  function forest(keep) {
    const root = { children: new Map() };
    cost.call.forEach((call, at) => {
      if (keep && !keep.has(call)) return;
      let around = root, key = "";
      for (const step of stepsOf(homeOf(call))) {
        key = key ? `${key}.${step}` : step;
        let row = around.children.get(step);
        if (!row) around.children.set(step, (row = { ...emptyRow(key, call), name: step, children: new Map(), own: null }));
        add(row, call, at);
        around = row;
      }
      add((around.own ??= { ...emptyRow(`${key} `, call), name: "(calls of its own)", mine: true, children: new Map(), own: null }), call, at);
    });
    const settle = (row, depth) => {
      while (row.children.size === 1 && !row.own) { const [only] = row.children.values(); row = { ...only, name: `${row.name}.${only.name}` }; }
      const inside = [...row.children.values()];
      if (inside.length && row.own) inside.push(row.own);
      return Object.assign(sum(row), { depth, inside: inside.map((one) => settle(one, depth + 1)) });
    };
    return [...root.children.values()].map((row) => settle(row, 0));
  }
  const everyRow = (rows) => rows.flatMap((row) => [row, ...everyRow(row.inside)]);
  /** Rows of the open modules, in order; at first so many levels are open as are read at a glance. */
  function treeRows(roots, all) {
    const deepest = all.reduce((most, row) => Math.max(most, row.depth + 1), 0), rowsTo = (depth) => all.filter((row) => row.depth < depth).length;
    if (!view.open) { view.depth = 1; while (view.depth < deepest && rowsTo(view.depth + 1) <= 24) view.depth++; view.open = new Set(all.filter((row) => row.depth < view.depth - 1).map((row) => row.key)); }
    depths.replaceChildren(el("option", { value: 0, hidden: true }, "as opened"), ...Array.from({ length: deepest }, (_, at) => el("option", { value: at + 1 }, at + 1 < deepest ? `${at + 1}` : `${at + 1}, all`)));
    depths.value = view.depth;
    const flat = (rows) => ranked(rows).flatMap((row) => [row, ...(row.inside.length && (view.text || view.open.has(row.key)) ? flat(row.inside) : [])]);
    return flat(roots);
  }
  const depths = el("select", { "aria-label": "Levels of modules", onchange: () => { view.depth = Number(depths.value); view.open = new Set(everyRow(forest()).filter((row) => row.depth < view.depth - 1).map((row) => row.key)); fill(); } });
  const levels = el("label", { hidden: true }, "Levels", depths);
  const toggle = (row, to = !view.open.has(row.key)) => { if (!row.inside.length || view.text) return; if (to) view.open.add(row.key); else view.open.delete(row.key); view.depth = 0; fill(); [...list.querySelectorAll("button.nv-row")].find((one) => one.dataset.key === row.key)?.focus(); };
  const heading = (key, text, low) => el("button", { type: "button", class: low ? "nv-num nv-low" : "nv-num", "aria-pressed": String(view.sort === key), onclick: () => { view.sort = key; fill(); } }, text, view.sort === key ? " ↓" : "");
  function rows() {
    const keep = view.text ? new Set(matches(view.text, eager)) : null, groups = new Map();
    if (view.by === "module") { const roots = forest(keep), all = everyRow(roots); modules = all.filter((row) => !row.mine).length; return treeRows(roots, all); }
    cost.call.forEach((call, at) => {
      if (keep && !keep.has(call)) return;
      const key = view.by === "call" ? call : together.has(call) ? data.overhead.shared.name : eager.operator[call];
      let row = groups.get(key);
      if (!row) groups.set(key, (row = emptyRow(key, call)));
      add(row, call, at);
    });
    return ranked([...groups.values()].map(sum));
  }
  let modules = 0;
  let current = [];
  const holds = (row) => (row.calls.size < state.markedEager.size ? [...row.calls].some((call) => state.markedEager.has(call)) : [...state.markedEager].some((call) => row.calls.has(call)));
  const on = (row) => holds(row) && !(row.inside?.length && (view.text || view.open.has(row.key))); // an open module's calls are in the rows below it
  function fill(pinned) {
    levels.hidden = view.by !== "module"; depths.disabled = view.text !== "";
    for (const [key, button] of Object.entries(buttons)) button.setAttribute("aria-pressed", String(key === view.by));
    current = rows();
    const scale = current.reduce((most, row) => Math.max(most, row.host, row.work, row.exposed), 1);
    const head = el("div", { class: "nv-row nv-top" },
      el("span", null, { operator: "Operator", module: "Module", call: "Call" }[view.by]), el("span", null, `0 to ${time(scale)}`),
      heading("overhead", "Overhead"), heading("exposed", "Exposed"), heading("work", "Work", true), heading("calls", view.by === "call" ? "Order" : "Calls", true));
    const line = (row) => {
      const whole = view.by !== "module" && together.has(row.first);
      const [short, note] = whole ? data.overhead.shared.name.slice(0, -1).split(" (") : [];
      const name = whole ? short : view.by === "call" ? `${row.key} ${eager.label[row.key]}` : view.by === "module" ? row.name : eager.label[row.first];
      const under = whole ? note : view.by === "call" ? eager.module[row.key] : view.by === "operator" && row.key !== name ? row.key : "", then = view.by === "call" ? fate(row.key).join(", ") : "";
      const folds = view.by === "module" && row.inside.length > 0, shut = folds && !(view.text || view.open.has(row.key)), fold = view.by === "module" && el("span", { class: "nv-fold", "aria-hidden": "true" }, folds ? (shut ? "▸" : "▾") : "");
      const pick = (event) => { if (folds && event.target.closest(".nv-fold")) toggle(row); else selectEager(row.first, "overhead"); };
      const walk = (event) => { if (folds && (event.key === "ArrowRight" || event.key === "ArrowLeft")) { event.preventDefault(); toggle(row, event.key === "ArrowRight"); } };
      return el("button", { class: `nv-row${on(row) ? " nv-on" : ""}`, type: "button", "data-call": row.first, "data-key": row.key, "aria-pressed": String(on(row)), "aria-expanded": folds ? String(!shut) : null, onclick: pick, onkeydown: walk },
        el("span", { class: "nv-name", style: view.by === "module" ? `padding-left:${14 * row.depth}px` : null, title: [view.by === "module" ? row.key.trim() : name, under, then].filter(Boolean).join("\n") }, fold, name, under && el("small", { style: whole ? "white-space:normal" : null }, under), then && el("small", { class: "nv-then" }, then)), bars(row, scale),
        el("span", { class: "nv-num" }, time(row.overhead)), el("span", { class: "nv-num" }, time(row.exposed)), el("span", { class: "nv-num nv-low" }, time(row.work)),
        el("span", { class: "nv-num nv-low" }, view.by === "call" ? row.key : count(row.calls.size)));
    };
    const visible = current.slice(0, view.limit), chosen = pinned && current.findIndex(on);
    list.replaceChildren(head, ...(chosen >= view.limit ? [line(current[chosen])] : []), ...visible.map(line),
      current.length > view.limit ? el("button", { class: "nv-plain nv-more", type: "button", onclick: () => { view.limit += 200; fill(); } }, `Show ${Math.min(200, current.length - view.limit)} more of ${count(current.length)}`) : "");
    if (!current.length) list.append(el("div", { class: "nv-empty" }, "Nothing matches the search."));
    status.textContent = view.by === "module" ? `${count(modules)} modules, each with all that is in it` : `${count(current.length)} ${{ operator: "operators", call: "calls" }[view.by]}`;
  }
  const field = el("input", { type: "search", placeholder: "Operator, module, source", "aria-label": "Search overhead", oninput: () => { view.text = field.value; view.limit = 200; fill(); } });
  const body = el("div", { class: "nv-lanes", style: "padding:14px 24px 32px" },
    el("div", { class: "nv-grid", style: "margin-bottom:18px" },
      card("One eager iteration, profiled", true,
        el("p", null, `${time(data.overhead.profiled_ns)} profiled; ${data.overhead.unprofiled_ns ? time(data.overhead.unprofiled_ns) : "not timed"} without the profiler. The parts are shares of the profiled run; believe wall times only from the unprofiled one.`),
        el("div", { class: "nv-whole" }, bars(whole, whole.host || 1)),
        spent.length > 0 && el("div", { class: "nv-by-phase" }, spent.map((row) => [phaseChip(row.phase), bars(row, longestPhase), el("span", { class: "nv-num" }, time(row.host))])),
        el("div", { class: "nv-columns" }, data.overhead.facts.map(([name, value]) => el("div", null, el("span", { class: "nv-small" }, name), value)))),
      card("From module to kernel", true, buildIcicle(app))),
    data.overhead.warnings.map((text) => el("div", { class: "nv-note", style: "margin:0 0 10px" }, text)), list);
  node.append(
    el("div", { class: "nv-tools" }, by("operator", "By operator"), by("module", "By module"), by("call", "By call"), levels, field, status),
    el("div", { class: "nv-legend" }, PARTS.map(([key, label]) => el("span", null, el("i", { class: "nv-key", style: `background:var(--${key})` }), label)), el("span", null, el("i", { class: "nv-key", style: "background:var(--work)" }), work), WHOLE.map(([key, label]) => whole[key] > 0 && el("span", null, el("i", { class: "nv-key", style: `background:var(--${key})` }), label)), el("span", null, el("i", { class: "nv-key nv-hatch" }), "Exposed: the device was idle meanwhile")),
    body);
  fill();
  /** Open what holds the calls that were selected elsewhere. */
  const reveal = () => { for (const row of everyRow(forest())) if (row.inside.length && holds(row) && row.calls.size > state.markedEager.size && !view.open.has(row.key)) { view.open.add(row.key); view.depth = 0; } };
  const mark = (from) => { if (selected() && from !== "overhead" && view.by === "operator" && from !== "theme" && view.text === "" && state.pane !== "overhead") { view.by = "call"; } if (view.by === "module" && from !== "overhead") reveal(); fill(true); const row = list.querySelector(".nv-on"); if (row && from !== "overhead" && row.scrollIntoView) row.scrollIntoView({ block: "center" }); };
  onSelect.push(mark);
  if (selected()) { view.by = "call"; fill(true); }
  panes.overhead.onshow = () => { const row = list.querySelector(".nv-on"); if (row) row.scrollIntoView({ block: "center" }); };
}
