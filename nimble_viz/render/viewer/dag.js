/* DAG: calls in their modules, edges, waits and the critical path. */
import { clamp, count, el, lower, percent, roundTime, rounded, time, tool } from "./tools.js";
import { boundsOf, ink } from "./theme.js";
import { createBoxes, W, H, PAD, HEAD } from "./boxes.js";

/** Upright stretches joined by curves that stay between two rows. */
function trace(context, way) {
  context.beginPath(); context.moveTo(way[0], way[1]); context.lineTo(way[0], way[2]);
  for (let at = 3; at < way.length; at += 3) {
    const from = way[at - 3], high = way[at - 1], to = way[at], low = way[at + 1], half = (high + low) / 2;
    if (Math.abs(from - to) < 0.5) context.lineTo(to, low); else context.bezierCurveTo(from, half, to, half, to, low);
    if (way[at + 2] > low) context.lineTo(to, way[at + 2]);
  }
}

export function buildDag(node, app) {
  const { streamChip, streamFill, theme, unknownFill, data, calls, size, graph, plans, facts, phased, critical,
    timed, before, after, nameOf, whereabouts, state, select, plan, streamOf, onSelect, onPlan, phaseLegend,
    showTip, describe, surface, pointer, search, planPicker, panes } = app;
  if (facts.profiled) { node.append(el("div", { class: "nv-empty" }, `No DAG here: ${facts.profiled.absent[0].why}. compare(model, inputs) records them.`)); return; }
  if (!size) { node.append(el("div", { class: "nv-empty" }, "The model made no call that reaches the device: there is no graph to draw.")); return; }
  const { FIGURES, arrange, children, figureOf, groups, isGroup, route } = createBoxes(app);
  const open = new Set(), view = { x: 0, y: 0, scale: 1, transitive: false, critical: false, syncs: true, edge: null };
  let level = [...(children.get(-1) || [])].filter(isGroup), budget = 400 - (children.get(-1) || []).length;
  while (level.length) {
    const more = level.reduce((sum, box) => sum + children.get(box).length, 0);
    if (more > budget) break;
    budget -= more;
    for (const box of level) open.add(box);
    level = level.flatMap((box) => children.get(box).filter(isGroup));
  }
  let place, edges;
  const status = el("span", { class: "nv-push", role: "status" });
  const stage = el("div", { class: "nv-stage" }), legend = el("div", { class: "nv-legend" });
  const board = surface(stage, `Graph of ${count(size)} calls, coloured as chosen. Arrow keys walk the graph, plus and minus zoom, 0 fits.`, draw);
  const map = el("canvas", { class: "nv-map", "aria-hidden": "true", hidden: true });
  stage.append(map);
  let sketch = null, bounds = [], mixtures = new Map();
  const scales = () => state.colour in FIGURES;
  /** How a box is coloured: what fills it, a colour that text on it can be read on, and its value in words. */
  function tint(paint, box) {
    const call = isGroup(box) ? graph.first[box - size] : box;
    if (state.colour === "stream") return { fill: streamFill(paint, streamOf(call)), colour: theme.stream(streamOf(call)), badge: String(streamOf(call)), words: timed && time(calls.cost[call]) };
    if (state.colour === "phase") { const colour = theme.value(calls.phase[call]); return { fill: colour, colour, badge: calls.phase[call][0].toUpperCase(), words: calls.phase[call] }; }
    const { sum, unknown, calls: n, share } = figureOf(state.colour, box);
    if (unknown === n) return { fill: unknownFill(paint), words: "not known", share: 0 };
    const step = lower(bounds, sum), colour = sum ? theme.heat(step, bounds.length) : "";
    return { fill: colour || theme.value("sunken"), colour, words: sum ? `${time(sum)}${isGroup(box) ? `, ${percent(share)}` : ""}` : "none", share };
  }
  /** Shares of the calls of a group by what they are coloured by: ``[colour, calls, name]``, in order. */
  function mixture(paint, box) {
    let parts = mixtures.get(box);
    if (!parts) {
      const tally = new Map(), at = box - size, streams = state.colour === "stream";
      for (let call = graph.first[at]; call <= graph.last[at]; call++) { const one = streams ? streamOf(call) : data.phases.indexOf(calls.phase[call]); tally.set(one, (tally.get(one) || 0) + 1); }
      parts = [...tally].sort((a, b) => a[0] - b[0]).map(([one, n]) => (streams ? [streamFill(paint, one), n, one] : [theme.value(data.phases[one]), n, data.phases[one]]));
      mixtures.set(box, parts);
    }
    return parts;
  }
  function recolour() {
    sketch = null; mixtures = new Map();
    bounds = scales() ? boundsOf(place.list.filter((box) => !isGroup(box) || !open.has(box)).map((box) => figureOf(state.colour, box).sum)) : [];
    fillLegend();
    board.request();
  }
  /** The whole graph in a corner, with the part in view framed; narrow graphs are drawn wider than true. */
  function drawMap(width, height) {
    const w = place.width, h = place.height, frame = Math.min(height - 24, 300), k = Math.min(130 / w, frame / h), ky = k, kx = Math.max(k, Math.min(34 / w, 1));
    map.hidden = width < 500 || height < 160 || (w * view.scale <= width && h * view.scale <= height);
    if (map.hidden) return;
    const mw = Math.ceil(w * kx) + 8, mh = Math.ceil(Math.max(h * ky, 8)) + 8, ratio = Math.min(devicePixelRatio || 1, 3);
    if (!sketch || sketch.key !== `${mw} ${mh} ${ratio}`) {
      sketch = el("canvas", { width: mw * ratio, height: mh * ratio }); sketch.key = `${mw} ${mh} ${ratio}`;
      const paint = sketch.getContext("2d"); paint.scale(ratio, ratio); paint.fillStyle = theme.value("surface"); paint.fillRect(0, 0, mw, mh);
      for (const box of place.list) {
        const opened = isGroup(box) && open.has(box);
        paint.fillStyle = opened ? theme.value("sunken") : tint(paint, box).fill;
        paint.fillRect(4 + (place.x[box] - place.left) * kx, 4 + place.y[box] * ky, Math.max(place.wide[box] * kx, 1), Math.max(place.tall[box] * ky - (opened ? 0 : 0.4), 0.6));
      }
    }
    map.style.width = `${mw}px`; map.style.height = `${mh}px`; map.width = mw * ratio; map.height = mh * ratio;
    const paint = map.getContext("2d"); paint.drawImage(sketch, 0, 0); paint.scale(ratio, ratio);
    const s = view.scale, x = clamp(4 + (-view.x / s - place.left) * kx, 1, mw - 5), y = clamp(4 + (-view.y / s) * ky, 1, mh - 5);
    const right = clamp(4 + ((width - view.x) / s - place.left) * kx, x + 4, mw - 1), bottom = clamp(4 + ((height - view.y) / s) * ky, y + 4, mh - 1);
    paint.fillStyle = theme.value("select"); paint.globalAlpha = 0.12; paint.fillRect(x, y, right - x, bottom - y); paint.globalAlpha = 1;
    paint.strokeStyle = theme.value("select"); paint.lineWidth = 1.5; paint.strokeRect(x, y, right - x, bottom - y);
    map.go = (px, py) => { view.x = width / 2 - ((px - 4) / kx + place.left) * s; view.y = height / 2 - ((py - 4) / ky) * s; board.request(); };
  }
  map.addEventListener("pointerdown", (event) => { map.setPointerCapture(event.pointerId); map.go(event.offsetX, event.offsetY); });
  map.addEventListener("pointermove", (event) => { if (event.buttons) map.go(event.offsetX, event.offsetY); });
  function relayout() {
    place = arrange(open);
    const folded = place.list.filter((box) => isGroup(box) && !open.has(box));
    status.textContent = folded.length ? `${count(folded.length)} modules folded; click one to open it` : `all ${count(size)} calls shown`;
    reconnect();
  }
  function reconnect() {
    view.edge = null;
    const seen = new Map(), total = size + groups;
    const add = (u, v, kind) => {
      const a = place.stand[u], b = place.stand[v];
      if (a === b) return;
      const key = a * total + b, edge = seen.get(key);
      if (!edge) seen.set(key, { a, b, u, v, kind, n: 1, critical: false }); else { edge.n++; if (kind > edge.kind) Object.assign(edge, { kind, u, v }); }
    };
    graph.from.forEach((u, at) => { if (graph.minimum[at]) add(u, u + graph.reach[at], 1); else if (view.transitive) add(u, u + graph.reach[at], 0); });
    const now = plan();
    if (now && view.syncs) now.producer.forEach((u, at) => add(u, now.consumer[at], 2));
    for (let at = 1; at < graph.critical.length; at++) {
      const edge = seen.get(place.stand[graph.critical[at - 1]] * total + place.stand[graph.critical[at]]);
      if (edge) edge.critical = true;
    }
    edges = [...seen.values()].sort((p, q) => p.kind - q.kind);
    const budget = { left: 200000 };
    for (const edge of edges) {
      const way = (edge.way = route(place, edge.u, edge.v, edge.a, edge.b, budget));
      edge.x0 = edge.x1 = way[0];
      for (let at = 3; at < way.length; at += 3) { edge.x0 = Math.min(edge.x0, way[at]); edge.x1 = Math.max(edge.x1, way[at]); }
      edge.y0 = way[1]; edge.y1 = way[way.length - 1];
    }
    recolour();
  }
  /** What the colours stand for, in numbers or names. */
  function key() {
    const chosen = data.colours.find((one) => one.key === state.colour), streams = plan() ? plan().streams : 0;
    if (state.colour === "stream") return el("span", { title: chosen.meaning }, streams === 1 ? "stream" : "streams", Array.from({ length: Math.min(streams, 12) }, (_, stream) => streamChip(stream)), streams > 12 && `and ${streams - 12} more`);
    if (state.colour === "phase") return el("span", { title: chosen.meaning }, "phase", facts.phases.rows.map((row) => row.cells[0]).filter((phase) => calls.phase.includes(phase)).map((phase) => { const colour = theme.value(phase); return [el("b", { class: "nv-stream", style: `background:${colour};color:${ink(colour)}` }, phase[0].toUpperCase()), phase]; }));
    const shown = place.list.filter((box) => !isGroup(box) || !open.has(box)).map((box) => figureOf(state.colour, box)), folded = shown.some((one) => one.calls > 1);
    return [el("span", { class: "nv-ramp", title: chosen.meaning }, chosen.name.toLowerCase().replace("gpu", "GPU"),
      el("span", { class: "nv-steps" }, shown.some((one) => !one.sum && one.unknown < one.calls) && el("b", { class: "nv-none" }, "none"), bounds.map((bound, at) => { const colour = theme.heat(at, bounds.length); return el("b", { style: `background:${colour};color:${ink(colour)}` }, `≤ ${roundTime(bound)}`); })),
      folded && "modules: sum, share of all"), el("span", null, chosen.meaning), chosen.unknown && el("span", null, el("i", { class: "nv-key nv-unknown" }), chosen.unknown)];
  }
  function fillLegend() {
    legend.replaceChildren(
      ...[key()].flat().filter(Boolean),
      el("span", null, el("i", { class: "nv-edge" }), "must wait (MEG)"), el("span", null, el("i", { class: "nv-edge nv-sync" }), `synchronisation across streams (${count(plan() ? plan().producer.length : 0)})`),
      ...(state.colour === "phase" ? [] : phaseLegend()),
      view.transitive ? el("span", null, el("i", { class: "nv-edge nv-trans" }), "transitive, implied by others") : "", view.critical ? el("span", null, el("i", { class: "nv-edge nv-crit" }), "critical path") : "", status);
  }
  /** Everything at once; or, from the top, as much as can still be read. */
  function fit(all) {
    const wide = board.canvas.clientWidth || 800, tall = board.canvas.clientHeight || 500;
    let left = place.left, right = place.left + place.width, edge = 0;
    view.scale = Math.min((wide - 40) / place.width, (tall - 40) / place.height, 1.25);
    if (!all && view.scale < 0.9) {
      edge = wide < 500 ? 0 : 84; // where the map of the whole lies
      const tops = place.list.filter((box) => !isGroup(box) || !open.has(box)).sort((p, q) => place.y[p] - place.y[q]), whole = view.scale;
      for (view.scale = 0.9; ; view.scale /= 1.06) {
        left = Infinity; right = -Infinity;
        for (const box of tops) { if (place.y[box] > tall / view.scale) break; left = Math.min(left, place.x[box]); right = Math.max(right, place.x[box] + place.wide[box]); }
        if (view.scale < Math.max(whole, 0.45)) { const start = tops.find((box) => critical.has(box)) ?? tops[0]; left = place.x[start]; right = left + place.wide[start]; break; }
        if ((right - left + 4 * PAD) * view.scale < wide - 40 - edge) break;
      }
    }
    view.x = (wide - edge) / 2 - ((left + right) / 2) * view.scale;
    view.y = place.height * view.scale < tall - 40 ? (tall - place.height * view.scale) / 2 : 20;
    board.request();
  }
  function zoom(by, x, y) {
    const next = clamp(view.scale * by, 0.004, 4), real = next / view.scale;
    view.x = x - (x - view.x) * real; view.y = y - (y - view.y) * real; view.scale = next;
    board.request();
  }
  const middle = () => [board.canvas.clientWidth / 2, board.canvas.clientHeight / 2];
  function reveal(call) {
    let changed = false;
    for (let box = graph.parent[call]; box >= 0; box = graph.parent[box]) if (!open.has(box)) { open.add(box); changed = true; }
    if (changed) relayout();
    const wide = board.canvas.clientWidth, tall = board.canvas.clientHeight;
    const x = place.x[call] * view.scale + view.x, y = place.y[call] * view.scale + view.y;
    if (changed || x < 20 || y < 20 || x + W * view.scale > wide - 20 || y + H * view.scale > tall - 20 || view.scale < 0.35) {
      view.scale = Math.max(view.scale, 0.6);
      view.x = wide / 2 - (place.x[call] + W / 2) * view.scale; view.y = tall / 2 - (place.y[call] + H / 2) * view.scale;
    }
    board.request();
  }
  function hit(px, py) {
    const x = (px - view.x) / view.scale, y = (py - view.y) / view.scale;
    for (let at = place.list.length - 1; at >= 0; at--) {
      const box = place.list[at];
      if (x >= place.x[box] && x <= place.x[box] + place.wide[box] && y >= place.y[box] && y <= place.y[box] + place.tall[box]) {
        return isGroup(box) && open.has(box) && y > place.y[box] + HEAD ? -1 : box;
      }
    }
    return -1;
  }
  /** The edge within a few pixels of a point: synchronisations before plain edges. */
  function edgeAt(px, py) {
    const x = (px - view.x) / view.scale, y = (py - view.y) / view.scale, slack = 5 / view.scale;
    for (let at = edges.length - 1; at >= 0; at--) {
      const { x0, x1, y0, y1, way } = edges[at];
      if (y < y0 - slack || y > y1 + slack || x < x0 - slack || x > x1 + slack) continue;
      for (let k = 0; k < way.length; k += 3) {
        if (y >= way[k + 1] && y <= way[k + 2] && Math.abs(x - way[k]) < slack) return edges[at];
        const t = k + 3 < way.length ? (y - way[k + 2]) / (way[k + 4] - way[k + 2]) : -1;
        if (t >= 0 && t <= 1) {
          let low = 0, high = 1;
          for (let step = 0; step < 12; step++) { const m = (low + high) / 2; if (1.5 * m * (1 - m) + m ** 3 < t) low = m; else high = m; }
          const on = way[k] + (way[k + 3] - way[k]) * low * low * (3 - 2 * low), slope = Math.abs(way[k + 3] - way[k]) / Math.max(way[k + 4] - way[k + 2], 1);
          if (Math.abs(x - on) < slack * Math.max(1, slope)) return edges[at];
        }
      }
    }
    return null;
  }
  /** As much of a text as fits, at least so many characters; by default its beginning. */
  const cut = (context, text, room, least = 1, part = (kept) => `${text.slice(0, kept)}…`) => {
    if (context.measureText(text).width <= room) return text;
    let low = 0, high = text.length;
    while (low < high) { const half = (low + high + 1) >> 1; if (context.measureText(part(half)).width <= room) low = half; else high = half - 1; }
    return low >= least ? part(low) : "";
  };
  /** Both ends of what does not fit. */
  const shorten = (context, text, room) => cut(context, text, room, 4, (kept) => `${text.slice(0, Math.ceil(kept / 2))}…${text.slice(text.length - Math.floor(kept / 2))}`);
  const partOf = (at) => (graph.parts[at] > 1 ? ` (part ${count(graph.part[at])} of ${count(graph.parts[at])})` : "");
  const pathOf = (box) => { const names = []; for (let at = box; at >= size; at = graph.parent[at]) names.unshift(graph.name[at - size]); return names.join("."); };
  function draw(context, width, height) {
    const { x, y, wide, tall } = place, s = view.scale;
    const x0 = -view.x / s, y0 = -view.y / s, x1 = (width - view.x) / s, y1 = (height - view.y) / s;
    const sans = theme.value("sans"), text = theme.value("text"), soft = theme.value("soft"), surfaceColour = theme.value("surface"), line = theme.value("line-strong"), picked = theme.value("select");
    drawMap(width, height);
    context.translate(view.x, view.y); context.scale(s, s);
    const seen = (box) => x[box] < x1 && x[box] + wide[box] > x0 && y[box] < y1 && y[box] + tall[box] > y0;
    for (const box of place.list) if (isGroup(box) && open.has(box) && seen(box)) {
      context.fillStyle = theme.value("sunken"); context.strokeStyle = theme.value("line"); context.lineWidth = 1;
      context.globalAlpha = 0.6; rounded(context, x[box], y[box], wide[box], tall[box], 8); context.fill(); context.globalAlpha = 1; context.stroke();
    }
    const stroke = (edge, colour, thick, dash) => {
      context.strokeStyle = colour; context.lineWidth = thick; context.setLineDash(s > 0.15 ? dash : []);
      trace(context, edge.way); context.stroke();
      if (s > 0.25) { context.setLineDash([]); context.fillStyle = colour; context.beginPath(); const a = 3.2 + thick, x = edge.way[edge.way.length - 3]; context.moveTo(x, edge.y1); context.lineTo(x - a * 0.62, edge.y1 - a * 1.3); context.lineTo(x + a * 0.62, edge.y1 - a * 1.3); context.fill(); }
    };
    const floor = 0.5 / s, sync = theme.value("sync"), plainEdge = theme.value("edge"), faint = theme.value("transitive"), strong = theme.value("critical");
    const touched = [], stood = new Set([...state.marked].map((call) => place.stand[call]));
    for (const edge of edges) {
      if (edge.y1 < y0 || edge.y0 > y1 || edge.x1 < x0 || edge.x0 > x1) continue;
      if (edge === view.edge || stood.has(edge.a) || stood.has(edge.b)) { touched.push(edge); continue; }
      if (view.critical && edge.critical) stroke(edge, strong, Math.max(5, floor), []);
      if (edge.kind === 2) stroke(edge, sync, Math.max(2, floor), [7, 4]);
      else if (edge.kind === 0) stroke(edge, faint, Math.max(1.2, floor), [2, 3]);
      else if (!(view.critical && edge.critical)) stroke(edge, plainEdge, Math.max(1.2, floor), []);
    }
    for (const edge of touched) stroke(edge, picked, Math.max(edge.kind === 2 ? 3 : 2.2, 1.6 / s), edge.kind === 2 ? [7, 4] : edge.kind ? [] : [2, 3]);
    context.setLineDash([]);
    context.textBaseline = "middle"; context.textAlign = "left"; context.lineJoin = "round";
    if (s > 0.3) for (const box of place.list) if (isGroup(box) && open.has(box) && seen(box)) {
      context.font = `11.5px ${sans}`; context.fillStyle = soft; context.strokeStyle = theme.value("sunken"); context.lineWidth = 4; // edges run through it
      const name = cut(context, `− ${graph.name[box - size]}${partOf(box - size)}${scales() ? ` · ${tint(context, box).words}` : ""}`, wide[box] - 16);
      context.strokeText(name, x[box] + 9, y[box] + HEAD / 2 + 1); context.fillText(name, x[box] + 9, y[box] + HEAD / 2 + 1);
    }
    for (const box of place.list) {
      if ((isGroup(box) && open.has(box)) || !seen(box)) continue;
      if (isGroup(box)) drawGroup(context, box); else drawCall(context, box);
    }
    function stripe(paint, call, thick) { if (phased && state.colour !== "phase") { paint.fillStyle = theme.value(calls.phase[call]); paint.fillRect(x[call] + W - thick, y[call], thick, H); } }
    function drawCall(paint, call) {
      const onPath = view.critical && critical.has(call), { fill, colour, badge, words } = tint(paint, call);
      if (s < 0.28) { paint.fillStyle = fill; paint.fillRect(x[call], y[call], W, H); stripe(paint, call, 22); }
      else {
        const from = badge ? 34 : 10, room = W - from - (phased ? 12 : 6), told = colour && !badge ? ink(colour) : "";
        rounded(paint, x[call], y[call], W, H, 6); paint.fillStyle = badge ? surfaceColour : fill; paint.fill(); paint.strokeStyle = line; paint.lineWidth = 1; paint.stroke();
        paint.save(); rounded(paint, x[call], y[call], W, H, 6); paint.clip(); if (badge) { paint.fillStyle = fill; paint.fillRect(x[call], y[call], 26, H); } stripe(paint, call, 6); paint.restore();
        paint.textBaseline = "middle";
        if (badge) {
          paint.textAlign = "center"; paint.font = `650 12px ${sans}`;
          if (state.colour === "stream" && streamOf(call) >= 8) { paint.fillStyle = colour; paint.fillRect(x[call] + 3, y[call] + H / 2 - 8, 20, 16); }
          paint.fillStyle = ink(colour); paint.fillText(badge, x[call] + 13, y[call] + H / 2 + 0.5);
        } else if (!colour) plate(paint, x[call] + 4, y[call] + 4, W - 14, H - 8);
        paint.textAlign = "left"; paint.fillStyle = told || text; paint.font = `550 12px ${sans}`; paint.fillText(cut(paint, calls.label[call], room), x[call] + from, y[call] + 13);
        paint.fillStyle = told || soft; paint.font = `10.5px ${sans}`; 
        const figure = words ? `${words} · ` : ""; paint.fillText(cut(paint, `${figure}${shorten(paint, whereabouts(call), room - paint.measureText(figure).width)}`, room), x[call] + from, y[call] + 27);
      }
      if (onPath) { rounded(paint, x[call], y[call], W, H, 6); paint.strokeStyle = strong; paint.lineWidth = Math.max(2.2, floor); paint.stroke(); }
      if (state.marked.has(call)) { rounded(paint, x[call] - 3, y[call] - 3, W + 6, H + 6, 8); paint.strokeStyle = picked; paint.lineWidth = Math.max(3, 2 / s); paint.stroke(); }
    }
    /** Ground on which text can be read over a pattern. */
    function plate(paint, left, top, wideness, height) { rounded(paint, left, top, wideness, height, 4); paint.fillStyle = theme.value("sunken"); paint.globalAlpha = 0.9; paint.fill(); paint.globalAlpha = 1; }
    function drawGroup(paint, box) {
      const at = box - size, n = graph.last[at] - graph.first[at] + 1, room = wide[box] - 18, heat = scales(), { fill, colour, words, share } = heat ? tint(paint, box) : {}, told = heat && colour ? ink(colour) : "";
      paint.fillStyle = line; rounded(paint, x[box] + 4, y[box] + 4, wide[box], tall[box], 6); paint.globalAlpha = 0.35; paint.fill(); paint.globalAlpha = 1;
      rounded(paint, x[box], y[box], wide[box], tall[box], 6); paint.fillStyle = heat ? fill : surfaceColour; paint.fill(); paint.strokeStyle = line; paint.lineWidth = 1; paint.stroke();
      if (heat && !colour) plate(paint, x[box] + 4, y[box] + 4, wide[box] - 8, tall[box] - 8);
      if (heat) {
        paint.fillStyle = told || soft; paint.globalAlpha = 0.25; paint.fillRect(x[box] + 9, y[box] + tall[box] - 9, room, 3);
        paint.globalAlpha = 1; paint.fillRect(x[box] + 9, y[box] + tall[box] - 9, room * share, 3);
      } else {
        let from = x[box] + 9;
        for (const [one, calling] of mixture(paint, box)) { const part = (room * calling) / n; paint.fillStyle = one; paint.fillRect(from, y[box] + tall[box] - 10, Math.max(part - 1, 0.5), 4); from += part; }
      }
      if (s > 0.28) {
        paint.textBaseline = "middle"; paint.textAlign = "left"; paint.fillStyle = told || text; paint.font = `550 12px ${sans}`; paint.fillText(cut(paint, `+ ${graph.name[at]}${partOf(at)}`, room), x[box] + 9, y[box] + 13);
        const own = `${count(n)} calls`;
        paint.fillStyle = told || soft; paint.font = `10.5px ${sans}`;
        paint.fillText(cut(paint, heat ? `${words} · ${own}` : `${own} · ${mixed(mixture(paint, box))}`, room), x[box] + 9, y[box] + 29);
      }
      if (stood.has(box)) { rounded(paint, x[box] - 3, y[box] - 3, wide[box] + 6, tall[box] + 6, 8); paint.strokeStyle = picked; paint.lineWidth = Math.max(3, 2 / s); paint.stroke(); }
    }
  }
  /** A mixture in words. */
  function mixed(parts) {
    if (state.colour === "phase") return parts.map(([, , phase]) => phase).join(", ");
    const used = parts.map(([, , stream]) => stream);
    return `stream${used.length > 1 ? "s" : ""} ${used.length > 2 ? `${used[0]}–${used[used.length - 1]}` : used.join(", ")}`;
  }
  /** What a tooltip says of a box's colour. */
  function coloured(box) {
    if (!scales()) return isGroup(box) && state.colour === "phase" ? mixed(mixture(board.canvas.getContext("2d"), box)) : "";
    const chosen = data.colours.find((one) => one.key === state.colour), { sum, unknown, calls: n, share } = figureOf(state.colour, box);
    if (unknown === n) return `${chosen.name}: not known`;
    return `${chosen.name}: ${sum ? time(sum) : "none"}${sum ? `, ${percent(share)} of all` : ""}${unknown ? `; not known of ${count(unknown)} of ${count(n)} calls` : ""}`;
  }
  function toggle(box) {
    const sx = place.x[box] * view.scale + view.x, sy = place.y[box] * view.scale + view.y;
    if (open.has(box)) open.delete(box); else open.add(box);
    relayout();
    view.x = sx - place.x[box] * view.scale; view.y = sy - place.y[box] * view.scale;
    board.request();
  }
  pointer(board.canvas, {
    pan: (dx, dy) => { view.x += dx; view.y += dy; board.request(); }, zoom,
    click: (x, y) => { const box = hit(x, y); if (box < 0) select(-1, "dag"); else if (isGroup(box)) toggle(box); else select(box, "dag"); },
    hover: (event, x, y) => {
      const box = hit(x, y);
      board.canvas.classList.toggle("nv-point", box >= 0);
      const edge = box < 0 || (isGroup(box) && open.has(box)) ? edgeAt(x, y) : null;
      if (edge !== view.edge) { view.edge = edge; board.request(); }
      if (edge) showTip(event, [["implied by other edges", "must wait", "synchronisation across streams"][edge.kind], `from ${edge.u} ${nameOf(edge.u)}, stream ${streamOf(edge.u)}`, `to ${edge.v} ${nameOf(edge.v)}, stream ${streamOf(edge.v)}`, edge.n > 1 && `${count(edge.n)} edges between these boxes`]);
      else if (box < 0) showTip(); else if (!isGroup(box)) showTip(event, [...describe(box), state.colour === "exposed" && coloured(box)]);
      else { const at = box - size; showTip(event, [`${pathOf(box)}${partOf(at)}`, graph.parts[at] > 1 && "calls of other modules come between its parts", `calls ${graph.first[at]} to ${graph.last[at]}`, coloured(box), open.has(box) ? "click to fold" : "click to open"]); }
    },
  });
  board.canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(-event.deltaY * 0.006), event.offsetX, event.offsetY);
    else { view.x -= event.shiftKey ? event.deltaY : event.deltaX; view.y -= event.shiftKey ? 0 : event.deltaY; board.request(); }
  }, { passive: false });
  board.canvas.addEventListener("keydown", (event) => {
    const call = state.call, go = { ArrowDown: () => after[call]?.[0], ArrowUp: () => before[call]?.[0], ArrowRight: () => (call + 1 < size ? call + 1 : undefined), ArrowLeft: () => (call > 0 ? call - 1 : undefined) }[event.key];
    if (go) { const next = call < 0 ? 0 : go(); if (next !== undefined) { select(next, "dag"); reveal(next); } }
    else if (event.key === "+" || event.key === "=") zoom(1.3, ...middle());
    else if (event.key === "-") zoom(1 / 1.3, ...middle());
    else if (event.key === "0") fit(true);
    else if (event.key === "Escape") select(-1, "dag");
    else return;
    event.preventDefault();
  });
  const check = (key, label, act) => { const box = el("input", { type: "checkbox", onchange: () => { view[key] = box.checked; act(); } }); box.checked = view[key]; return el("label", null, box, label); };
  const picker = el("select", { class: "nv-colour", "aria-label": "Colour", onchange: () => { state.colour = picker.value; recolour(); } }, data.colours.map((one) => el("option", { value: one.key, disabled: one.why !== "", title: one.meaning }, one.why ? `${one.name} (${one.why})` : one.name)));
  picker.value = state.colour;
  node.append(el("div", { class: "nv-tools" }, plans.length > 0 && planPicker(), el("label", null, "Colour", picker), search("Search the graph", (call) => { select(call, "search"); reveal(call); }, "Search calls"),
    el("span", { class: "nv-group" }, check("syncs", "Synchronisations", reconnect), check("transitive", "Transitive edges", reconnect), check("critical", "Critical path", () => { fillLegend(); board.request(); })),
    groups > 0 && el("span", { class: "nv-group" }, tool("Open all", "Open all modules", () => { for (let box = size; box < size + groups; box++) open.add(box); relayout(); fit(); }), tool("Fold all", "Fold all modules", () => { open.clear(); relayout(); fit(); }))), legend, stage);
  stage.append(el("div", { class: "nv-zoom" }, tool("−", "Zoom out", () => zoom(1 / 1.4, ...middle())), tool("+", "Zoom in", () => zoom(1.4, ...middle())), tool("Fit", "Fit everything", () => fit(true))));
  relayout(); fit();
  if (state.call >= 0) reveal(state.call);
  onSelect.push((from) => { if (state.call >= 0 && from !== "dag" && !node.hidden) reveal(state.call); board.request(); });
  onPlan.push(reconnect);
  panes.dag.onshow = () => { if (state.call >= 0) reveal(state.call); };
  const move = (by) => () => { view.x += by; board.request(); };
  return {
    drive: { a: move(80), d: move(-80), w: () => zoom(1.3, ...middle()), s: () => zoom(1 / 1.3, ...middle()) },
    point: (call) => { reveal(call); board.paint(); const frame = board.canvas.getBoundingClientRect(); return { x: frame.left + (place.x[call] + W / 2) * view.scale + view.x, y: frame.top + (place.y[call] + H / 2) * view.scale + view.y }; },
    visible: () => place.list.length,
    colours: () => { const paint = board.canvas.getContext("2d"); return { key: state.colour, bounds, boxes: place.list.filter((box) => !isGroup(box) || !open.has(box)).map((box) => { const { colour, words } = tint(paint, box); return [box, colour, words]; }) }; },
    drawn: () => ({ boxes: place.list.filter((box) => !isGroup(box) || !open.has(box)).map((box) => [box, place.x[box], place.y[box], place.wide[box], place.tall[box]]), edges: edges.map(({ a, b, kind, way }) => ({ a, b, kind, way })) }),
  };
}
