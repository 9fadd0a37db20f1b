/* Source: the code line by line, with what its calls cost. */
import { count, el, lower, percent, time } from "./tools.js";

const KEYWORDS = new Set("and as assert async await break class continue def del elif else except finally for from global if import in is lambda None nonlocal not or pass raise return self True try False while with yield".split(" "));
const TOKEN = /("""|'{3})|[rbfuRBFU]{0,2}("(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?)|(#.*)|([A-Za-z_]\w*)/;
/** A line of Python in spans (words of the language, texts, comments), and the text that goes on after it; `open` is one that began before. */
function painted(text, open) {
  const parts = [], put = (piece, kind) => { if (piece) parts.push(kind ? el("span", { class: kind }, piece) : piece); };
  let rest = text;
  while (rest) {
    if (open) {
      const end = rest.indexOf(open);
      if (end < 0) { put(rest, "nv-s"); return [parts, open]; }
      put(rest.slice(0, end + 3), "nv-s"); rest = rest.slice(end + 3); open = "";
      continue;
    }
    const found = TOKEN.exec(rest);
    if (!found) { put(rest); break; }
    put(rest.slice(0, found.index));
    rest = rest.slice(found.index + found[0].length);
    if (found[1]) open = found[1];
    put(found[0], found[1] || found[2] ? "nv-s" : found[3] ? "nv-c" : KEYWORDS.has(found[4]) ? "nv-k" : "");
  }
  return [parts, open];
}
const QUIET = 3, LEAST = 8, OPENED = 400;
export function buildSource(node, app) {
  const { data, lineKey, columnsOf, selectLine, linesMarked, onSelect, panes } = app;
  const source = data.source;
  if (!source) { node.append(el("div", { class: "nv-empty" }, "No call of this report knows its source line, so there is no code to show.")); return; }
  const { functions, sides, figures } = source, both = sides.length > 1, rows = columnsOf(source.lines), known = figures.map(([key]) => key), timed = known.length > 0;
  const view = { heat: source.heat, sort: source.heat, text: "", limit: 10 };
  const of = (key, at) => rows[key][at] + (both ? rows[`${key}_backward`][at] : 0);
  const sumIn = (row, key) => row[key] + (both ? row[`${key}_backward`] : 0), all = (key) => sumIn(source.totals, key);
  const name = { ...Object.fromEntries(figures), calls: "Calls" }, said = (key, value) => (!value ? "" : key === "calls" ? count(value) : time(value));
  const byFunction = functions.map(() => []);
  rows.function.forEach((at, row) => byFunction[at].push(row));
  const share = (at) => (all(view.heat) ? of(view.heat, at) / all(view.heat) : 0), most = () => rows.line.reduce((top, _, at) => Math.max(top, share(at)), 0);
  const split = (key, at) => (both ? `${name[key]}: forward ${said(key, rows[key][at]) || "none"}, backward ${said(key, rows[`${key}_backward`][at]) || "none"}` : null);
  const times = (value, what) => `${count(value)} ${what}${value > 1 ? "s" : ""}`;
  const waits = (at) => at !== undefined && [
    rows.waits[at] > 0 && el("span", { class: "nv-tag nv-warn", title: "In eager the host waited here for the device" }, `${times(rows.waits[at], "host wait")}, ${time(rows.wait[at])}`),
    rows.after[at] > 0 && el("span", { class: "nv-tag nv-warn", title: "In eager the host waited for the device after this line, before the next call" }, `then ${times(rows.after[at], "host wait")}, ${time(rows.after_wait[at])}`)];
  /** Columns: key, title, value, whether it is left out where there is little room. */
  const columns = () => [
    ["calls", "Calls", (at) => of("calls", at), true],
    ...(timed ? [[view.heat, both ? `${name[view.heat]}, forward` : name[view.heat], (at) => rows[view.heat][at], false]] : []),
    ...(timed && both ? [[`${view.heat}_backward`, "backward", (at) => rows[`${view.heat}_backward`][at], false]] : []),
    ...known.filter((key) => key !== view.heat).map((key) => [key, name[key], (at) => of(key, at), true])];
  const cells = (at, top) => {
    const width = top ? (100 * share(at)) / top : 0, forward = both && of(view.heat, at) ? rows[view.heat][at] / of(view.heat, at) : 1;
    return [...columns().map(([key, , value, low]) => el("span", { class: `nv-num${low ? " nv-low" : ""}`, title: split(key.replace("_backward", ""), at) }, said(key, value(at)))),
      el("span", { class: "nv-meter", title: split(view.heat, at) }, el("i", { style: `width:${width * forward}%;background:var(--${both ? "forward" : "heat"})` }), both && el("i", { class: "nv-bw", style: `width:${width * (1 - forward)}%` }), el("b", null, share(at) ? percent(share(at)) : ""))];
  };
  const head = (cell) => el("div", { class: "nv-line nv-top" }, columns().map(([key, title, , low]) => cell(key, title, `nv-num${low ? " nv-low" : ""}`)), cell("share", "Share", "nv-num"), el("span", null, "Line"));
  const row = (at, top, marks, ...code) => {
    const one = functions[rows.function[at]], on = marks.has(lineKey(one.file, rows.line[at]));
    return el("button", { class: `nv-line nv-hot${on ? " nv-on" : ""}`, type: "button", "aria-pressed": String(on), "data-file": one.file, "data-line": rows.line[at], style: `--h:${top ? share(at) / top : 0}`, onclick: () => selectLine(one.file, rows.line[at], "source") }, cells(at, top), el("span", { class: "nv-code" }, ...code));
  };
  const host = el("div"), hot = el("div"), status = el("span", { class: "nv-push", role: "status" }), outside = el("p", { class: "nv-sub" }), blocks = [];
  const lineText = (at) => { const one = functions[rows.function[at]]; return one.text[rows.line[at] - one.first] || ""; };
  const placeOf = (at) => { const one = functions[rows.function[at]]; return `${one.file}:${rows.line[at]}${one.name ? `, ${one.name}` : ""}`; };
  function fillHot() {
    const words = view.text.toLowerCase().split(/\s+/).filter(Boolean), hits = (at) => { const hay = `${placeOf(at)} ${lineText(at)}`.toLowerCase(); return words.every((word) => hay.includes(word)); };
    const value = view.sort === "share" ? share : columns().find(([key]) => key === view.sort)[2];
    const ranked = rows.line.map((_, at) => at).filter(hits).sort((a, b) => value(b) - value(a) || a - b), top = most(), marks = linesMarked();
    hot.replaceChildren(head((key, title, kind) => el("button", { type: "button", class: kind, "aria-pressed": String(view.sort === key), onclick: () => { view.sort = key; fillHot(); } }, title, view.sort === key ? " ↓" : "")),
      ...ranked.slice(0, view.limit).map((at) => row(at, top, marks, painted(lineText(at).trim(), "")[0], waits(at), el("small", null, placeOf(at)))),
      ranked.length > view.limit ? el("button", { class: "nv-plain nv-more", type: "button", onclick: () => { view.limit += 50; fillHot(); } }, `Show ${count(Math.min(50, ranked.length - view.limit))} more of ${count(ranked.length)} lines`) : "", ranked.length ? "" : el("div", { class: "nv-empty" }, "No line matches the search."));
    status.textContent = `${count(ranked.length)} line${ranked.length === 1 ? "" : "s"} with calls, ${count(functions.length)} function${functions.length === 1 ? "" : "s"}`;
  }
  function fillBlock(block) {
    const one = functions[block.at], rowOn = new Map(byFunction[block.at].map((at) => [rows.line[at], at])), top = most(), marks = linesMarked(), width = columns();
    const used = [...rowOn.keys()].sort((a, b) => a - b), numbers = one.text.length ? one.text.map((_, k) => one.first + k) : used;
    const list = [head((key, title, kind) => el("span", { class: kind }, title))], quiet = [];
    const near = (line) => { const next = used[lower(used, line - QUIET)]; return line < one.first + 2 || (next !== undefined && next <= line + QUIET); };
    const flush = () => {
      const lines = quiet.splice(0);
      if (lines.length < LEAST || block.whole) { list.push(...lines); return; }
      const more = el("button", { class: "nv-quiet", type: "button", onclick: () => more.replaceWith(...lines) }, `⋯ ${count(lines.length)} lines without calls`);
      list.push(more);
    };
    const indent = one.text.reduce((least, text) => (text.trim() ? Math.min(least, text.search(/\S/)) : least), Infinity);
    let open = "";
    for (const line of numbers) {
      const at = rowOn.get(line), [spans, after] = painted((one.text[line - one.first] ?? "").slice(indent), open), code = [el("em", null, line), el("span", null, spans, waits(at))];
      open = after;
      if (at === undefined) {
        const plain = el("div", { class: "nv-line" }, width.map(([, , , low]) => el("span", { class: low ? "nv-low" : null })), el("span"), el("span", { class: "nv-code" }, code));
        if (!near(line)) { quiet.push(plain); continue; }
        flush(); list.push(plain);
      } else { flush(); list.push(row(at, top, marks, ...code)); }
    }
    flush();
    block.body.replaceChildren(...list);
    block.filled = true;
  }
  let group = null, last = null, opened = 0;
  functions.forEach((one, at) => {
    const body = el("div", { class: "nv-lines" }), sums = el("span", { class: "nv-place" }), block = { at, body, sums, whole: false, filled: false };
    const more = el("button", { class: "nv-plain", type: "button", hidden: one.text.length < 40, onclick: (event) => { event.preventDefault(); block.whole = !block.whole; more.textContent = block.whole ? "Fold quiet lines" : "All lines"; block.box.open = true; fillBlock(block); } }, "All lines");
    block.box = el("details", { class: "nv-function" }, el("summary", null, el("b", null, one.name || one.file), el("span", { class: "nv-place" }, `${one.file}:${one.first}`), sums, more), one.note && el("p", { class: "nv-sub" }, one.note), body);
    block.box.addEventListener("toggle", () => { if (block.box.open && !block.filled) fillBlock(block); });
    blocks.push(block);
    if (last !== one.group) { last = one.group; group = el("section", { "aria-label": one.group }, functions[at + 1] && functions[at + 1].group === one.group && el("h2", { class: "nv-h2" }, one.group)); host.append(group); }
    group.append(block.box);
    if (opened < OPENED) { opened += Math.min(one.text.length, 80) || 1; block.box.open = true; }
  });
  const spent = (value) => (timed ? `${time(value)}, ${percent(all(view.heat) ? value / all(view.heat) : 0)} of ${view.heat === "device" ? "GPU" : name[view.heat].toLowerCase()} time` : `${count(value)} calls`);
  function fill() {
    for (const [key, button] of Object.entries(buttons)) button.setAttribute("aria-pressed", String(key === view.heat));
    const kept = columns();
    node.style.setProperty("--columns", `${kept.map(([key, , , low]) => (key === "calls" ? "44px" : both && !low ? "96px" : "70px")).join(" ")} 104px`);
    node.style.setProperty("--narrow", `${kept.filter(([, , , low]) => !low).map(() => "64px").join(" ")} 56px`);
    fillHot();
    for (const block of blocks) {
      block.sums.textContent = spent(byFunction[block.at].reduce((sum, at) => sum + of(view.heat, at), 0));
      block.filled = false;
      if (block.box.open) fillBlock(block);
    }
    const other = source.elsewhere;
    outside.textContent = other && sumIn(other, "calls") ? `${count(sumIn(other, "calls"))} calls are of no line of Python (an optimizer's, most often)${timed ? `: ${spent(sumIn(other, view.heat))}` : ""}.` : "";
  }
  const buttons = Object.fromEntries(figures.map(([key, title, meaning]) => [key, el("button", { class: "nv-plain", type: "button", title: meaning, "aria-pressed": "false", onclick: () => { view.heat = view.sort = key; fill(); } }, title)]));
  const field = el("input", { type: "search", placeholder: "Code, function, file", "aria-label": "Search the code", oninput: () => { view.text = field.value; view.limit = 10; fillHot(); } });
  const everyBox = (open) => () => { for (const { box } of blocks) box.open = open; };
  const body = el("div", { class: "nv-lanes", style: "padding:14px 24px 32px" },
    el("section", { class: "nv-card", style: "margin-bottom:18px" }, el("h2", null, "Hottest lines"), el("div", { class: "nv-lines" }, hot)),
    host, outside, source.notes.map((text) => el("p", { class: "nv-sub" }, text)));
  node.append(
    el("div", { class: "nv-tools" }, timed && el("span", { style: "color:var(--soft)" }, "Heat by"), Object.values(buttons), field, el("button", { class: "nv-plain", type: "button", onclick: everyBox(true) }, "Open all"), el("button", { class: "nv-plain", type: "button", onclick: everyBox(false) }, "Fold all"), status),
    el("div", { class: "nv-legend" }, el("span", null, el("i", { class: "nv-key nv-scale" }), "share of all calls: colour, bar and number"), both && el("span", null, el("i", { class: "nv-key", style: "background:var(--forward)" }), "forward"), both && el("span", null, el("i", { class: "nv-key nv-bw" }), "backward, on its forward's line"), figures.map(([, title, meaning]) => el("span", { style: "white-space:normal" }, el("b", null, title), ` ${meaning}`))), body);
  fill();
  const mark = (from) => {
    const marks = linesMarked(), holds = ({ at }) => byFunction[at].some((line) => marks.has(lineKey(functions[at].file, rows.line[line])));
    const wanted = marks.size && from !== "source" ? blocks.find(holds) : null;
    if (wanted && !wanted.filled) fillBlock(wanted);
    if (wanted) wanted.box.open = true;
    for (const line of body.querySelectorAll("button[data-line]")) { const on = marks.has(lineKey(line.dataset.file, Number(line.dataset.line))); line.classList.toggle("nv-on", on); line.setAttribute("aria-pressed", String(on)); }
    const first = wanted && wanted.body.querySelector(".nv-on");
    if (first && !node.hidden) first.scrollIntoView({ block: "center" });
  };
  onSelect.push(mark);
  panes.source.onshow = () => mark("show");
}
