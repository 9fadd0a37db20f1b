/* An icicle of where eager's time goes: modules, in them operators, in these kernels; a click goes down and selects. */
import { count, el, percent, stepsOf, time } from "./tools.js";

const ICE_TALL = 22, ICE_LEAST = 0.003, ICE_NAMED = 0.02; // of the whole width

/** Modules, operators and kernels by ``device`` time, or by the host's: each node with the calls and the time below it. */
function icicleTree({ data, cost, eager, runs, phased }, device) {
  const root = { name: "all", kind: "module", ns: 0, exposed: 0, calls: [], inside: new Map() }, kernels = new Map(), serial = data.overhead.serial;
  const run = runs.find((one) => one.run === "eager");
  if (run && !serial) run.call.forEach((call, span) => { if (call >= 0 && run.lanes[run.lane[span]].kind === "gpu") kernels.set(call, [...(kernels.get(call) ?? []), span]); });
  const put = (path, call, ns, exposed) => {
    let at = root;
    for (const step of [null, ...path]) {
      if (step) { const key = `${step.kind} ${step.name}`; if (!at.inside.has(key)) at.inside.set(key, { ...step, ns: 0, exposed: 0, calls: [], inside: new Map(), above: at }); at = at.inside.get(key); }
      at.ns += ns; at.exposed += exposed;
      if (at.calls[at.calls.length - 1] !== call) at.calls.push(call);
    }
  };
  cost.call.forEach((call, row) => {
    const host = cost.python[row] + cost.dispatch[row] + cost.allocation[row] + cost.launch[row] + cost.tail[row] + (serial ? cost.work[row] : 0), ns = device ? cost.work[row] : host;
    const home = phased && eager.phase[call] === "optimizer" ? "(the optimizer)" : eager.module[call];
    const path = [...stepsOf(home).map((name) => ({ name, kind: "module" })), { name: eager.label[call], kind: "operator" }];
    const own = device ? kernels.get(call) ?? [] : [], all = own.reduce((sum, span) => sum + run.length[span], 0);
    if (!all) put(path, call, ns, cost.exposed[row]);
    else for (const span of own) put([...path, { name: run.name[span], kind: "kernel" }], call, (ns * run.length[span]) / all, (cost.exposed[row] * run.length[span]) / all);
  });
  return root;
}

export function buildIcicle(app) {
  const { fused, data, eager, sourceOf, select, selectEager, selectAll, showTip } = app, box = el("div", { class: "nv-icicle", onpointerleave: () => showTip() });
  let device = true, focus = null, root = null;
  const pick = (node) => { const [call] = node.calls; if (node.calls.length > 1) { if (fused) selectAll([], node.calls, "overhead"); else selectAll(node.calls, [], "overhead"); } else if (fused) selectEager(call, "overhead"); else select(call, "overhead"); };
  const tell = (node) => [node.name, `${time(node.ns)}, ${percent(node.ns / (root.ns || 1))} of ${device ? "all work" : "all host time"}`, `${node.kind}, ${count(node.calls.length)} call${node.calls.length === 1 ? "" : "s"}, ${time(node.exposed)} of overhead exposed`, sourceOf(node.calls[0], eager)];
  function draw() {
    showTip(); // what it is about may be gone
    root = icicleTree(app, device);
    const path = [root];
    for (const key of focus ?? []) { const next = path[path.length - 1].inside.get(key); if (!next) break; path.push(next); }
    const whole = path[path.length - 1], board = el("div", { class: "nv-ice" });
    let deepest = 0;
    const show = (node, keys, left, width, level) => {
      deepest = Math.max(deepest, level);
      board.append(el("button", { type: "button", class: `nv-ice-${node.kind}`, style: `left:${100 * left}%;width:${100 * width}%;top:${ICE_TALL * level}px`, onclick: () => { focus = keys; draw(); if (keys.length) pick(node); }, onpointermove: (event) => showTip(event, tell(node)), "aria-label": node.name }, width > ICE_NAMED && node.name));
      if (level < path.length - 1) return;
      let at = left;
      for (const [key, one] of [...node.inside].sort(([, a], [, b]) => b.ns - a.ns)) { const part = width * (one.ns / (node.ns || 1)); if (part > ICE_LEAST) show(one, [...keys, key], at, part, level + 1); at += part; }
    };
    path.forEach((node, level) => show(node, (focus ?? []).slice(0, level), 0, 1, level));
    board.style.height = `${ICE_TALL * (deepest + 1)}px`;
    const by = (text, on) => el("button", { class: "nv-plain", type: "button", "aria-pressed": String(device === on), onclick: () => { device = on; focus = null; draw(); } }, text);
    box.replaceChildren(el("p", { style: "max-width:none" }, by(data.overhead.serial ? "Computing" : "Device time", true), " ", by("Host time", false), " ", whole === root ? "Modules, in them operators, in these kernels; a click goes down to the call and its line." : `${whole.name}: ${time(whole.ns)}. Click a bar above it to go up.`), board);
  }
  draw();
  return box;
}
