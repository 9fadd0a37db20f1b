/* Memory: live bytes call by call, and what holds the peak. */
import { bytes, clamp, count, definitions, described, dotted, el, table, tool } from "./tools.js";

export function buildMemory(node, app) {
  const { theme, data, calls, eager, facts, phased, sourceOf, columnsOf, state, select, selectEager, onSelect, phaseChip,
    phaseLegend, showTip, surface, pointer, search, panes } = app;
  const memory = data.live, known = facts.memory;
  const held = known ? el("section", { class: "nv-card", style: "margin-bottom:16px" }, el("h2", null, "Measured and planned"), known.facts.length > 0 && definitions(known.facts), known.engines && el("div", { style: "margin-top:12px" }, described(known.engines))) : "";
  if (!memory) { node.append(el("div", { class: "nv-lanes", style: "padding:16px 24px 32px" }, el("p", { class: "nv-sub" }, "What the results of each call hold is not known: this report does not say which memory its calls touch."), held)); return; }
  const shownRuns = memory.runs.slice(0, memory.alike ? 1 : 2).map((run) => ({ ...run, ...columnsOf(run.columns) }));
  if (memory.alike) {
    const [first, second] = memory.runs;
    Object.assign(shownRuns[0], { label: `${first.label} and ${second.label}, which issue calls in the same order`, marks: [...first.marks.map(([text, value]) => [`eager: ${text}`, value]), ...second.marks.map(([text, value]) => [`replay: ${text}`, value])], facts: second.facts });
  }
  const view = { from: 0, to: 1 }, highest = shownRuns.reduce((most, run) => Math.max(most, run.peak), 1);
  const ceiling = 1.1 * Math.max(highest, ...shownRuns.flatMap((run) => run.marks.map(([, value]) => value)).filter((value) => value <= 1.8 * highest));
  const LEFT = 74, RIGHT = 14, FOOT = 44, BANDS = 12, lists = [];
  const refresh = () => { for (const run of shownRuns) run.board.request(); };
  const setRange = (from, to) => { const wide = clamp(to - from, Math.min(1, 12 / shownRuns.reduce((most, run) => Math.max(most, run.call.length), 12)), 1); view.from = clamp(from, 0, 1 - wide); view.to = view.from + wide; refresh(); };
  const shareAt = (x, width) => view.from + ((x - LEFT) / (width - LEFT - RIGHT)) * (view.to - view.from);
  const zoomAt = (by, x, width) => { const at = shareAt(x, width); setRange(at - (at - view.from) / by, at + (view.to - at) / by); };
  const tableFor = (run) => (run.eager ? eager : calls), marksFor = (run) => (run.eager ? state.markedEager : state.marked), pick = (run, call) => (run.eager ? selectEager(call, "memory") : select(call, "memory"));
  const body = el("div", { class: "nv-lanes", style: "padding:14px 24px 32px" });
  for (const run of shownRuns) {
    const marks = []; // what reads the same number shares one label
    for (const [text, value] of [...run.marks].sort((a, b) => b[1] - a[1])) { const same = marks.find((one) => bytes(one[1]) === bytes(value)); if (same) same[0].push(text); else marks.push([[text], value]); }
    const above = run.marks.filter(([, value]) => value > ceiling).length, TOP = 14 + 15 * above;
    const n = run.call.length, own = tableFor(run), place = (run.place = new Map(run.call.map((call, at) => [call, at])));
    const bands = run.holders.slice(0, BANDS).map((row, at) => ({ ...row, number: at + 1 })).sort((a, b) => a.first - b.first || b.bytes - a.bytes);
    const xOf = (at, width) => LEFT + ((at / n - view.from) / (view.to - view.from)) * (width - LEFT - RIGHT), atX = (x, width) => clamp(Math.floor(shareAt(x, width) * n), 0, n - 1);
    /** Columns to draw: [position, left, right]; where calls are narrower than a pixel, the highest of each pixel. */
    const spotsOf = (from, to, width) => {
      const wide = Math.max(1, Math.round(width - LEFT - RIGHT)), step = (to - from) / wide;
      if (step <= 1) return Array.from({ length: to - from }, (_, k) => [from + k, xOf(from + k, width), xOf(from + k + 1, width)]);
      return Array.from({ length: wide }, (_, k) => { let best = from + Math.floor(k * step); for (let at = best; at < Math.min(to, from + Math.ceil((k + 1) * step)); at++) if (run.live[at] > run.live[best]) best = at; return [best, LEFT + k, LEFT + k + 1]; });
    };
    function draw(paint, width, height) {
      const floor = height - FOOT, y = (value) => floor - (value / ceiling) * (floor - TOP), from = clamp(Math.floor(view.from * n), 0, n - 1), to = clamp(Math.ceil(view.to * n), from + 1, n), spots = spotsOf(from, to, width);
      paint.font = `11px ${theme.value("sans")}`; paint.textBaseline = "middle"; paint.lineWidth = 1;
      const unit = 2 ** Math.floor(Math.log2(ceiling / 3));
      for (let value = 0; value <= ceiling; value += unit) { paint.strokeStyle = theme.value("line"); paint.beginPath(); paint.moveTo(LEFT, Math.round(y(value)) + 0.5); paint.lineTo(width - RIGHT, Math.round(y(value)) + 0.5); paint.stroke(); paint.textAlign = "right"; paint.fillStyle = theme.value("faint"); paint.fillText(bytes(value).replace(/\.0+ /, " "), LEFT - 8, y(value)); }
      paint.save(); paint.beginPath(); paint.rect(LEFT, 0, width - LEFT - RIGHT, height); paint.clip();
      const steps = () => { paint.beginPath(); spots.forEach(([at, left, right], k) => { if (k) paint.lineTo(left, y(run.live[at])); else paint.moveTo(left, y(run.live[at])); paint.lineTo(right, y(run.live[at])); }); };
      steps(); paint.lineTo(spots[spots.length - 1][2], floor); paint.lineTo(spots[0][1], floor);
      paint.fillStyle = theme.value("remainder"); paint.globalAlpha = 0.6; paint.fill();
      const base = new Float64Array(spots.length), labels = [];
      bands.forEach((band, order) => {
        const chosen = marksFor(run).has(band.call);
        paint.fillStyle = theme.value(chosen ? "select" : "work"); paint.globalAlpha = chosen || order % 2 === 0 ? 0.95 : 0.7;
        const pieces = [];
        let now = null;
        spots.forEach(([at, left, right], k) => {
          if (at < band.first || at > band.last) { now = null; return; }
          if (now && now[2] === base[k]) now[1] = right; else pieces.push((now = [left, right, base[k]]));
          base[k] += band.bytes;
        });
        for (const [left, right, under] of pieces) { const up = y(under + band.bytes); paint.fillRect(left, up, right - left, Math.max(y(under) - up - 0.8, 0.4)); }
        if (pieces.length) labels.push([band, pieces.reduce((widest, one) => (one[1] - one[0] > widest[1] - widest[0] ? one : widest))]);
      });
      paint.globalAlpha = 1; paint.textAlign = "center"; paint.fillStyle = theme.dark ? "#0c1416" : "#ffffff";
      for (const [band, [left, right, under]] of labels) { const tall = y(under) - y(under + band.bytes), x0 = Math.max(left, LEFT), x1 = Math.min(right, width - RIGHT); if (x1 - x0 > 20 && tall > 11) paint.fillText(`#${band.number}`, (x0 + x1) / 2, y(under) - tall / 2); }
      paint.strokeStyle = theme.value("text"); paint.lineWidth = spots.length < to - from ? 0.5 : 1.2; steps(); paint.stroke();
      if (phased) for (const [at, left, right] of spots) { paint.fillStyle = theme.value(own.phase[run.call[at]]); paint.fillRect(left, floor + 3, right - left + 0.4, 4); }
      paint.fillStyle = paint.strokeStyle = theme.value("select"); paint.lineWidth = 1.5;
      for (const call of [...marksFor(run)].slice(0, 400)) {
        const at = place.get(call), left = xOf(at, width), middle = (left + xOf(at + 1, width)) / 2;
        paint.globalAlpha = 0.8; paint.beginPath(); paint.moveTo(middle, TOP); paint.lineTo(middle, floor + 12); paint.stroke(); paint.globalAlpha = 1;
        paint.fillRect(left, floor + 10, Math.max(3, xOf(at + run.held[at] + 1, width) - left), 4);
      }
      const peak = (xOf(run.peak_at, width) + xOf(run.peak_at + 1, width)) / 2, tip = y(run.peak) - 2;
      paint.fillStyle = theme.value("critical"); paint.beginPath(); paint.moveTo(peak, tip); paint.lineTo(peak - 5, tip - 8); paint.lineTo(peak + 5, tip - 8); paint.fill();
      paint.restore();
      let free = 10;
      for (const [texts, value] of marks) {
        const fits = value <= ceiling, room = width - LEFT - RIGHT - 8, labelled = (text) => `${text} ${bytes(value)}${fits ? "" : " ↑ above this chart"}`, joined = labelled(texts.join(", "));
        const lines = paint.measureText(joined).width <= room ? [joined] : texts.map(labelled);
        paint.strokeStyle = theme.value("sync"); paint.lineWidth = 1.4;
        if (fits) { paint.setLineDash([6, 4]); paint.beginPath(); paint.moveTo(LEFT, y(value)); paint.lineTo(width - RIGHT, y(value)); paint.stroke(); paint.setLineDash([]); }
        for (const [line, label] of lines.entries()) {
          const wide = paint.measureText(label).width, at = fits ? Math.max(free, y(value) - 8 - 15 * (lines.length - 1 - line)) : free;
          paint.fillStyle = theme.value("surface"); paint.globalAlpha = 0.85; paint.fillRect(width - RIGHT - wide - 8, at - 7, wide + 8, 14); paint.globalAlpha = 1;
          paint.fillStyle = theme.value("sync"); paint.textAlign = "right"; paint.fillText(label, width - RIGHT - 4, at);
          free = at + 15;
        }
      }
      paint.fillStyle = theme.value("faint"); paint.textAlign = "left"; paint.fillText(`call ${count(run.call[from])}`, LEFT, height - 14); paint.textAlign = "right"; paint.fillText(`call ${count(run.call[to - 1])}`, width - RIGHT, height - 14); paint.textAlign = "center"; paint.fillText("calls in the order of issue", (LEFT + width - RIGHT) / 2, height - 14);
    }
    const stage = el("div", { class: "nv-curve" });
    run.board = surface(stage, `Live bytes of ${run.label}, call by call: ${run.peak_text} at most, at ${run.where}. Left and right arrows walk the calls, plus and minus zoom, 0 shows all.`, draw, 250 + 15 * above);
    const canvas = run.board.canvas;
    pointer(canvas, {
      pan: (dx) => { const by = (-dx / (canvas.clientWidth - LEFT - RIGHT)) * (view.to - view.from); setRange(view.from + by, view.to + by); },
      zoom: (by, x) => zoomAt(by, x, canvas.clientWidth),
      click: (x) => pick(run, run.call[atX(x, canvas.clientWidth)]),
      hover: (event, x) => {
        if (x < LEFT || x > canvas.clientWidth - RIGHT) { showTip(); return; }
        const at = atX(x, canvas.clientWidth), call = run.call[at], change = run.live[at] - (at ? run.live[at - 1] : 0), until = run.call[at + run.held[at]];
        showTip(event, [`${bytes(run.live[at])} live during call ${call} ${own.label[call]}`, own.module[call], run.makes[at] ? `makes ${bytes(run.makes[at])}, ${run.held[at] ? `held until call ${until} ${own.label[until]}` : "used by this call alone"}` : "makes nothing new", change !== 0 && `${change > 0 ? "+" : "−"}${bytes(Math.abs(change))} since the call before`, sourceOf(call, own)]);
      },
    });
    canvas.addEventListener("wheel", (event) => { if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoomAt(Math.exp(-event.deltaY * 0.006), event.offsetX, canvas.clientWidth); } }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const now = [...marksFor(run)].map((call) => place.get(call))[0] ?? run.peak_at, middle = canvas.clientWidth / 2, walk = (by) => () => pick(run, run.call[clamp(now + by, 0, n - 1)]);
      const act = { ArrowLeft: walk(-1), ArrowRight: walk(1), "+": () => zoomAt(1.5, middle, canvas.clientWidth), "=": () => zoomAt(1.5, middle, canvas.clientWidth), "-": () => zoomAt(1 / 1.5, middle, canvas.clientWidth), 0: () => setRange(0, 1) }[event.key];
      if (act) { event.preventDefault(); act(); }
    });
    const list = el("div"), largest = run.holders.length ? run.holders[0].bytes : 1;
    const side = (call) => [el("button", { class: "nv-link", type: "button", "data-call": call, onclick: () => pick(run, call) }, `${call} ${own.label[call]}`), el("span", { class: "nv-small", style: "white-space:normal" }, phased && phaseChip(own.phase[call]), phased && " ", dotted(own.module[call] || "the model itself"))];
    const fillList = () => list.replaceChildren(
      table([["#", 1], ["Size", 1], [""], ["Made by"], ["Last used by"], ["Held for", 1]], run.holders.map((row, at) => el("tr", { class: marksFor(run).has(row.call) ? "nv-on" : null },
        el("td", { class: "nv-num" }, at + 1), el("td", { class: "nv-num" }, row.size, el("span", { class: "nv-small" }, row.share)), el("td", { style: "width:20%;min-width:60px" }, el("div", { class: "nv-bar", style: `width:${(100 * row.bytes) / largest}%;margin-top:7px;background:var(--work)` })),
        el("td", null, side(row.call)), el("td", null, row.output ? ["the end", el("span", { class: "nv-small" }, "an output")] : side(row.last_call)), el("td", { class: "nv-num" }, `${count(row.last - row.first + 1)} call${row.last > row.first ? "s" : ""}`)))),
      run.more > 0 ? el("p", { class: "nv-under" }, `${count(run.more)} more results hold ${bytes(run.more_bytes)} of the peak.`) : "");
    lists.push(fillList);
    fillList();
    body.append(el("section", { class: "nv-card", style: "margin-bottom:16px" }, el("h2", null, run.label), el("p", { class: "nv-answer" }, `${run.peak_text} of results are live at most, at ${run.where}.`), stage,
      el("p", { class: "nv-under" }, `${run.facts.map(([text, value]) => `${text}: ${value}`).join(". ")}.`), el("h2", { style: "margin-top:16px" }, "What holds the peak"), list));
  }
  const final = shownRuns[shownRuns.length - 1], wide = () => final.board.canvas.clientWidth;
  body.append(held, el("section", { class: "nv-card" }, el("h2", null, "Not in the curve"), definitions(memory.fixed), el("p", { class: "nv-under" }, memory.note)));
  node.append(
    el("div", { class: "nv-tools" }, search("Search the memory curve", (call) => select(call, "search")), tool("−", "Zoom out", () => zoomAt(1 / 1.6, wide() / 2, wide())), tool("+", "Zoom in", () => zoomAt(1.6, wide() / 2, wide())), tool("Fit", "Show all calls", () => setRange(0, 1)), tool("Peak", "Select the call at the peak", () => pick(final, final.call[final.peak_at])), el("span", { class: "nv-push" }, "click a call; drag to move, Ctrl and wheel to zoom")),
    el("div", { class: "nv-legend" }, el("span", null, el("i", { class: "nv-key", style: "background:var(--work)" }), `the ${BANDS} largest results that hold the peak, numbered`), el("span", null, el("i", { class: "nv-key", style: "background:var(--remainder)" }), "all other results"), el("span", null, "▼ peak"), shownRuns.some((run) => run.marks.length > 0) && el("span", null, el("i", { class: "nv-edge nv-sync" }), "measured or planned"), el("span", null, el("i", { class: "nv-key", style: "background:var(--select)" }), "selected call, and how long its results live"), phaseLegend()), body);
  onSelect.push(() => { for (const fillList of lists) fillList(); refresh(); });
  panes.memory.onshow = refresh;
  const move = (by) => () => setRange(view.from + by * (view.to - view.from), view.to + by * (view.to - view.from));
  return { drive: { a: move(-0.125), d: move(0.125), w: () => zoomAt(1.5, wide() / 2, wide()), s: () => zoomAt(1 / 1.5, wide() / 2, wide()) }, range: () => [view.from, view.to], point: (at, call) => { const run = shownRuns[at], frame = run.board.canvas.getBoundingClientRect(); return { x: frame.left + LEFT + (((run.place.get(call) + 0.5) / run.call.length - view.from) / (view.to - view.from)) * (frame.width - LEFT - RIGHT), y: frame.top + frame.height / 2 }; } };
}
