/* The graph's boxes: calls and modules, placed row by row, and the ways of edges between them. */
import { clamp } from "./tools.js";

export const W = 188, H = 38, GROUP_H = 50, GAP_X = 18, GAP_LANE = 13, TRACK = 9, GAP_Y = 34, PAD = 12, HEAD = 26;

export function createBoxes(app) {
  const { calls, size, graph } = app;
  const groups = graph.first.length;
  const children = new Map();
  graph.parent.forEach((parent, box) => { const list = children.get(parent); if (list) list.push(box); else children.set(parent, [box]); });
  const isGroup = (box) => box >= size;
  // Boxes are numbered calls, groups, then lane places: places in a row that edges hold free.
  const boxes = size + groups, nodes = boxes + graph.lane_places.length;
  const rowOf = [...graph.row], keeper = [...graph.parent], hope = [...graph.position, ...graph.lane_places], lanes = new Map();
  const laneKey = (around, call) => (around + 1) * size + call;
  const lanesOf = new Map();
  graph.lane_source.forEach((call, lane) => {
    const around = graph.lane_within[lane], all = Array.from({ length: graph.lane_rows[lane] }, (_, k) => rowOf.length + k);
    const list = lanesOf.get(around); if (list) list.push(all); else lanesOf.set(around, [all]);
    lanes.set(laneKey(around, call), [graph.lane_first[lane], rowOf.length, graph.lane_rows[lane]]);
    for (let k = 0; k < graph.lane_rows[lane]; k++) { rowOf.push(graph.lane_first[lane] + k); keeper.push(around); }
  });
  const laneAt = (around, call, row) => { const lane = lanes.get(laneKey(around, call)); return lane && row >= lane[0] && row < lane[0] + lane[2] ? lane[1] + row - lane[0] : -1; };
  /** Members of each group, row by row, in order from left to right. */
  const rowsOf = new Map();
  rowOf.forEach((row, node) => { let rows = rowsOf.get(keeper[node]); if (!rows) rowsOf.set(keeper[node], (rows = [])); (rows[row] ??= []).push(node); });
  for (const rows of rowsOf.values()) for (const row of rows) row.sort((p, q) => hope[p] - hope[q] || p - q);
  const depth = new Int32Array(boxes);
  for (let box = size; box < boxes; box++) depth[box] = graph.parent[box] < 0 ? 0 : depth[graph.parent[box]] + 1;
  for (let box = 0; box < size; box++) depth[box] = graph.parent[box] < 0 ? 0 : depth[graph.parent[box]] + 1;
  /** What pulls on what inside each group: [upper node, lower node, producer, consumer]. */
  const linksOf = new Map();
  {
    const seen = new Set();
    const link = (around, p, q, u, v) => {
      const key = p * nodes + q, ports = [p, q].some((node) => node >= size && node < boxes);
      if (!ports && seen.has(key)) return;
      seen.add(key);
      const list = linksOf.get(around); if (list) list.push([p, q, u, v]); else linksOf.set(around, [[p, q, u, v]]);
    };
    const through = (around, u, v, from, to, upper, lower) => {
      let last = upper;
      for (let row = from; row < to; row++) { const node = laneAt(around, u, row); if (last >= 0 && node >= 0) link(around, last, node, u, v); last = node; if (node < 0) return; }
      if (last >= 0 && lower >= 0) link(around, last, lower, u, v);
    };
    graph.from.forEach((u, edge) => {
      if (!graph.minimum[edge]) return;
      const v = u + graph.reach[edge];
      let p = u, q = v;
      while (graph.parent[p] !== graph.parent[q]) {
        if (depth[p] >= depth[q]) { const around = graph.parent[p]; through(around, u, v, rowOf[p] + 1, rowsOf.get(around).length, p, -1); p = around; }
        else { const around = graph.parent[q]; through(around, u, v, 0, rowOf[q], -1, q); q = around; }
      }
      through(graph.parent[p], u, v, rowOf[p] + 1, rowOf[q], p, q);
    });
  }
  /** Middles in order, far enough apart, nearest to what is wanted: weighted least squares by pooling neighbours. */
  const spread = (wanted, widths, weights) => {
    const offsets = [0], blocks = [], places = [];
    for (let at = 1; at < widths.length; at++) offsets.push(offsets[at - 1] + (widths[at - 1] + widths[at]) / 2 + (widths[at - 1] && widths[at] ? GAP_X : widths[at - 1] || widths[at] ? GAP_LANE : TRACK));
    wanted.forEach((place, at) => {
      let mean = place - offsets[at], weight = weights[at], members = 1;
      while (blocks.length && blocks[blocks.length - 1][0] > mean) { const [other, w, n] = blocks.pop(); mean = (mean * weight + other * w) / (weight + w); weight += w; members += n; }
      blocks.push([mean, weight, members]);
    });
    for (const [mean, , members] of blocks) for (let k = 0; k < members; k++) places.push(mean + offsets[places.length]);
    return places;
  };
  /** Boxes of known rows and order put beside and below each other, innermost groups first. */
  function arrange(open) {
    const wide = new Float64Array(nodes), tall = new Float64Array(nodes), x = new Float64Array(nodes), y = new Float64Array(nodes);
    const visible = new Uint8Array(boxes), shift = new Float64Array(boxes), bands = new Map();
    const child = (around, call) => { let box = call; while (graph.parent[box] !== around) box = graph.parent[box]; return box; };
    /** How far right of a box's middle edges from u pass its last row or its first, where the call at that end is. */
    const port = (box, u, end, edgeOf) => {
      if (box >= boxes || !isGroup(box) || !open.has(box)) return 0;
      const member = child(box, end), edge = edgeOf(box), node = rowOf[member] === edge ? member : laneAt(box, u, edge);
      return node < 0 ? 0 : x[node] + wide[node] / 2 + port(node, u, end, edgeOf) + shift[box] - wide[box] / 2;
    };
    const leave = (box, u) => port(box, u, u, (group) => rowsOf.get(group).length - 1), enter = (box, u, v) => port(box, u, v, () => 0);
    const inner = (around, top) => {
      const rows = rowsOf.get(around) || [], middle = new Map(), near = new Map(), tops = [], bottoms = [];
      for (const row of rows) {
        for (const box of row) {
          if (box >= boxes) continue;
          if (!isGroup(box)) { wide[box] = W; tall[box] = H; } else if (!open.has(box)) { wide[box] = W + 62; tall[box] = GROUP_H; }
        }
        spread(row.map((box) => (hope[box] / 100) * (W + GAP_X)), row.map((box) => wide[box]), row.map(() => 1)).forEach((place, at) => middle.set(row[at], place));
      }
      const pull = (node, other, by, weight, side) => { let list = near.get(node); if (!list) near.set(node, (list = [[], []])); list[side].push([other, by, weight]); };
      // Lanes, and boxes that only follow each other, are kept upright: runs of [node, offset], never far from their mean.
      const runs = (lanesOf.get(around) || []).map((lane) => lane.map((node) => [node, 0])), below = new Map(), above = new Map(), straight = new Map();
      for (const [p, q, u, v] of linksOf.get(around) || []) {
        const out = leave(p, u), into = enter(q, u, v), weight = p >= boxes && q >= boxes ? 6 : 1;
        pull(q, p, out - into, weight, 0); pull(p, q, into - out, weight, 1);
        if (p < boxes && q < boxes) { below.set(p, below.has(p) ? null : [q, out - into]); above.set(q, above.has(q) ? null : p); }
      }
      const next = (box) => { const link = below.get(box); return link && above.get(link[0]) === box ? link : null; };
      for (const row of rows) for (const box of row) {
        if (!next(box) || (above.get(box) != null && next(above.get(box)))) continue;
        const run = [[box, 0]];
        for (let link = next(box); link; link = next(link[0])) run.push([link[0], clamp(run[run.length - 1][1] + link[1], -W, W)]);
        runs.push(run);
      }
      for (let sweep = 0; sweep < 10; sweep++) {
        const down = sweep % 2 === 0;
        if (sweep > 5) for (const run of runs) { const mean = run.reduce((sum, [node, by]) => sum + middle.get(node) - by, 0) / run.length; for (const [node, by] of run) straight.set(node, mean + by); }
        for (let at = 0; at < rows.length; at++) {
          const row = rows[down ? at : rows.length - 1 - at], weights = [];
          const wanted = row.map((node) => {
            if (straight.has(node)) { weights.push(4); return straight.get(node); }
            const list = near.get(node), sides = list ? (sweep > 5 ? [...list[0], ...list[1]] : list[down ? 0 : 1]) : [];
            let sum = 0, weight = 0;
            for (const [other, by, w] of sides) { sum += (middle.get(other) + by) * w; weight += w; }
            weights.push(weight || 0.05);
            return weight ? sum / weight : middle.get(node);
          });
          spread(wanted, row.map((node) => wide[node]), weights).forEach((place, k) => middle.set(row[k], place));
        }
      }
      let down = top, left = Infinity, right = -Infinity;
      for (const row of rows) {
        const high = row.reduce((most, box) => Math.max(most, tall[box]), 0);
        for (const box of row) { x[box] = middle.get(box) - wide[box] / 2; y[box] = down; left = Math.min(left, x[box]); right = Math.max(right, x[box] + wide[box]); }
        tops.push(down); bottoms.push(down + high); down += high + GAP_Y;
      }
      bands.set(around, [tops, bottoms]);
      return rows.length ? { left, right, bottom: down - GAP_Y } : { left: 0, right: 0, bottom: top };
    };
    for (let box = boxes - 1; box >= size; box--) {
      if (!open.has(box)) continue;
      const inside = inner(box, HEAD);
      wide[box] = Math.max(inside.right - inside.left, W) + 2 * PAD; tall[box] = inside.bottom + PAD;
      shift[box] = PAD - inside.left + Math.max(0, W - (inside.right - inside.left)) / 2;
    }
    const frame = inner(-1, 0), stand = new Int32Array(size), list = [];
    const place = (box) => {
      const parent = keeper[box];
      if (parent >= 0) { if (!visible[parent] || !open.has(parent)) return; x[box] += x[parent] + shift[parent]; y[box] += y[parent]; }
      if (box >= boxes) return;
      visible[box] = 1; list.push(box);
      if (isGroup(box)) { if (!open.has(box)) stand.fill(box, graph.first[box - size], graph.last[box - size] + 1); } else stand[box] = box;
    };
    for (let box = size; box < nodes; box++) place(box);
    for (let box = 0; box < size; box++) place(box);
    return { x, y, wide, tall, list, stand, visible, bands, left: frame.left, width: Math.max(1, frame.right - frame.left), height: Math.max(1, frame.bottom) };
  }
  /** The way of the edge u → v between two visible boxes, as upright stretches [x, top, bottom, …]; none crosses a box. */
  function route(place, u, v, a, b, budget) {
    const { x, y, wide, tall, bands } = place, way = [], last = (group) => rowsOf.get(group).length - 1;
    const middle = (box) => x[box] + wide[box] / 2, base = (group) => (group < 0 ? 0 : y[group]);
    const bandTop = (group, row) => base(group) + bands.get(group)[0][row], bandBottom = (group, row) => base(group) + bands.get(group)[1][row];
    let begin = null;
    const step = (at, top, bottom) => { way.push(at, begin ?? top, bottom); begin = null; };
    const free = (row, wanted) => {
      let low = 0, high = row.length;
      while (low < high) { const half = (low + high) >> 1; if (x[row[half]] + wide[row[half]] + TRACK / 2 < wanted) low = half + 1; else high = half; }
      const box = row[low];
      if (box === undefined || x[box] - TRACK / 2 > wanted || !wide[box]) return wanted;
      const left = x[box] - TRACK, right = x[box] + wide[box] + TRACK;
      return wanted - left < right - wanted ? left : right;
    };
    const pass = (group, from, to) => {
      const begun = way[way.length - 3], span = to - from + 1, low = group < 0 ? -Infinity : x[group] + 3, high = group < 0 ? Infinity : x[group] + wide[group] - 3;
      for (let row = from; row < to; row++) {
        const lane = laneAt(group, u, row);
        if (lane < 0 && --budget.left < 0) return;
        step(lane >= 0 ? x[lane] : free(rowsOf.get(group)[row], clamp(begun + ((middle(b) - begun) * (row - from + 1)) / span, low, high)), bandTop(group, row), bandBottom(group, row));
      }
    };
    let p = a, q = b;
    const above = new Set(), inward = [];
    for (let box = a; box >= 0; box = graph.parent[box]) above.add(graph.parent[box]);
    while (!above.has(graph.parent[q])) { inward.push(q); q = graph.parent[q]; }
    const meet = graph.parent[q];
    way.push(middle(a), y[a] + tall[a], bandBottom(graph.parent[a], rowOf[a]));
    while (graph.parent[p] !== meet) {
      const group = graph.parent[p];
      pass(group, rowOf[p] + 1, last(group) + 1);
      way[way.length - 1] = bandBottom(graph.parent[group], rowOf[group]);
      p = group;
    }
    pass(meet, rowOf[p] + 1, rowOf[q]);
    for (let at = inward.length - 1; at >= 0; at--) { begin ??= y[q]; pass(q, 0, rowOf[inward[at]]); q = inward[at]; }
    step(middle(b), y[b], y[b]);
    return way;
  }
  /** What boxes are coloured by: known sum, calls without a value, and calls of each box. */
  const FIGURES = { exposed: calls.exposed, time: calls.cost }, running = {};
  const figureOf = (key, box) => {
    if (!running[key]) {
      const sum = new Float64Array(size + 1), unknown = new Int32Array(size + 1);
      FIGURES[key].forEach((value, call) => { sum[call + 1] = sum[call] + Math.max(value, 0); unknown[call + 1] = unknown[call] + (value < 0); });
      running[key] = { sum, unknown };
    }
    const { sum, unknown } = running[key], [first, last] = isGroup(box) ? [graph.first[box - size], graph.last[box - size] + 1] : [box, box + 1];
    return { sum: sum[last] - sum[first], unknown: unknown[last] - unknown[first], calls: last - first, share: sum[size] ? (sum[last] - sum[first]) / sum[size] : 0 };
  };
  return { groups, children, isGroup, boxes, rowOf, rowsOf, arrange, route, FIGURES, figureOf };
}
