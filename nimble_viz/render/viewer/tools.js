/* Small tools: elements, numbers as text, tables. */
export const el = (tag, attributes, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined && child !== false) node.append(child instanceof Node ? child : String(child));
  }
  return node;
};
export const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
export const count = (value) => value.toLocaleString("en-US");
export const time = (ns) => {
  for (const [unit, scale] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
    if (Math.abs(ns) >= scale * 0.9995) {
      const value = ns / scale;
      return `${value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2)} ${unit}`;
    }
  }
  return `${ns.toFixed(0)} ns`;
};
export const fixed = (value, digits) => value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
/** Points of time and lengths of runs: microseconds below 10 ms, milliseconds above. */
export const scaled = (value, unit) => { let at = 0; while (value >= 999.5 && at < 6) { value /= 1000; at++; } return `${value >= 99.95 || !at ? value.toFixed(0) : value.toPrecision(3)} ${"\u00a0kMGTPE"[at].trim()}${unit}`; };
/** A round time: ``1.5 µs``, ``200 ns``. */
export const roundTime = (ns) => { const [unit, scale] = [["s", 1e9], ["ms", 1e6], ["µs", 1e3]].find(([, one]) => ns >= one) || ["ns", 1]; return `${Number((ns / scale).toPrecision(3))} ${unit}`; };
export const clock = (ns, digits = 1) => (Math.abs(ns) < 1e7 ? `${fixed(ns / 1e3, digits)} µs` : `${fixed(ns / 1e6, digits + 1)} ms`);
export const percent = (share) => share > 0.995 && share < 1 ? ">99%" : `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)}%`;
export const lower = (array, value) => {
  let low = 0, high = array.length;
  while (low < high) { const middle = (low + high) >> 1; if (array[middle] < value) low = middle + 1; else high = middle; }
  return low;
};
/** Steps of a module's path; an index stays with the list it indexes. */
export const stepsOf = (path) => {
  const steps = [];
  for (const part of path ? path.split(".") : []) if (/^\d/.test(part) && steps.length) steps[steps.length - 1] += `.${part}`; else steps.push(part);
  return steps;
};
/** A module's or file's path, which may be broken between its parts. */
export const dotted = (path) => path.split(/(?<=[./])/).flatMap((part, at) => (at ? [el("wbr"), part] : [part]));
const TERMS = {
  "Arena": "memory of all results, shared between calls that never live at once", "Break-even": "calls after which preparing with this plan is won back, about", "Emitted": "cross-stream edges read back from the captured graph",
  "Full DAG": "every hazard between streams, waited for", "Isolated": "all calls, one by one, each alone on the device", "Median": "of all samples, taken in turn with the other runs",
  "MEG": "minimum equivalent graph: no edge that others imply", "On the path": "on the critical path: the longest chain of calls that need each other", "Over eager": "how many times as fast as eager; below it the 99.5% interval",
  "Over one stream": "how many times as fast as one stream; below it the 99.5% interval", "Planned": "waits in the schedule", "Prepared in": "making the kernels and capturing",
  "Producer's cost": "time of the call that is waited for, alone", "Saved by reuse": "what sharing memory between results saves", "Simulated": "predicted by the model of a GPU, not measured",
  "Streams": "queues of the device that run side by side", "Tolerance": "the most error that counts as equal",
};
/** A table; what a word in its head means is its tooltip. */
export const table = (heads, rows) => el("div", { class: "nv-scroll" }, el("table", null, el("thead", null, el("tr", null, heads.map(([text, numeric]) => el("th", { scope: "col", class: numeric && "nv-num", title: TERMS[text] }, text)))), el("tbody", null, rows)));
const MARKS = { good: "nv-tick", bad: "nv-cross", open: "nv-open" };
const cellOf = (cell, kind) => {
  if (kind === "bar") return el("td", { class: "nv-part" }, el("div", { class: "nv-bar", style: `width:${100 * cell.part}%;${cell.colour && `background:var(--${cell.colour})`}` }));
  const { text, under, mark, tags } = cell.text === undefined ? { text: cell, tags: [] } : cell;
  return el("td", { class: kind === "number" && "nv-num" }, el("span", { class: MARKS[mark] }, text || (under ? "" : "–")), tags.map(([name, of]) => el("span", { class: `nv-tag ${{ good: "nv-yes", bad: "nv-warn" }[of] || ""}` }, name)), under && el("span", { class: "nv-small" }, under));
};
/** A table that the report describes, with what it says about it and below it. */
export const described = ({ columns, rows, about, below }) => [about && el("p", null, about),
  table(columns.map(({ name, kind }) => [name, kind === "number"]), rows.map((row) => el("tr", { class: row.void && "nv-wrong" }, row.cells.map((cell, at) => cellOf(cell, columns[at].kind))))),
  below.map((line) => el("p", { class: `nv-under ${MARKS[line.mark] || ""}` }, line.text ?? line))];
export const definitions = (rows) => el("dl", { class: "nv-facts" }, rows.map(([name, value]) => [el("dt", null, name), el("dd", null, value)]));
export const card = (title, wide, ...children) => el("section", { class: `nv-card${wide ? " nv-wide" : ""}` }, el("h2", null, title), children);
export const bytes = (value) => { let at = 0; while (value >= 1023.5 && at < 5) { value /= 1024; at++; } return `${!at || value >= 99.95 ? value.toFixed(0) : value.toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][at]}`; };
export function rounded(context, x, y, wide, tall, radius) { context.beginPath(); context.roundRect(x, y, wide, tall, radius); }
export const tool = (text, label, act) => el("button", { class: "nv-plain", type: "button", "aria-label": label, title: label, onclick: act }, text);
