/* What several views use: tooltip, canvas, pointer, search, links. */
import { clamp, count, el, time } from "./tools.js";

export function createControls(app) {
  const { calls, fused, plans, facts, phased, critical, timed, origin, planLabel, matches, state, select,
    plan, streamOf, setPlan, onPlan, redraw } = app;
  const phaseChip = (name) => el("span", { class: "nv-phase", style: `--phase:var(--${name})` }, name);
  const phaseLegend = () => (phased ? facts.phases.rows.map((row) => phaseChip(row.cells[0])) : []);
  const tip = el("div", { class: "nv-tip", hidden: true, role: "tooltip" });
  const showTip = (event, lines) => {
    if (!lines) { tip.hidden = true; return; }
    tip.replaceChildren(el("b", null, lines[0]), ...lines.slice(1).filter(Boolean).map((line) => el("i", null, line)));
    tip.hidden = false;
    tip.style.left = tip.style.top = "0px"; // where that is depends on what is around a widget
    const box = tip.getBoundingClientRect(), below = event.clientY + 18, top = below + box.height > innerHeight ? Math.max(4, event.clientY - box.height - 12) : below;
    tip.style.left = `${clamp(event.clientX + 14, 4, Math.max(4, innerWidth - box.width - 6)) - box.left}px`;
    tip.style.top = `${top - box.top}px`;
  };
  const describe = (call) => [
    calls.label[call] === calls.operator[call] || !fused ? calls.operator[call] : calls.label[call],
    fused && calls.label[call] !== calls.operator[call] && calls.operator[call],
    `call ${call}, ${calls.phase[call]}${calls.module[call] ? `, ${calls.module[call]}` : ""}`,
    calls.writes[call] && `→ ${calls.writes[call]}`,
    ...origin(call),
    `${timed ? `cost ${time(calls.cost[call])}, ` : ""}stream ${streamOf(call)}${critical.has(call) ? ", on the critical path" : ""}`,
  ];
  function surface(parent, label, draw, height) {
    const canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": label });
    if (height) canvas.style.height = `${height}px`;
    parent.append(canvas);
    const context = canvas.getContext("2d");
    let pending = 0;
    const paint = () => {
      pending = 0;
      const width = canvas.clientWidth, tall = canvas.clientHeight;
      if (!width || !tall) return;
      const ratio = Math.min(devicePixelRatio || 1, tall > 4000 ? 1 : 3);
      if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(tall * ratio)) { canvas.width = Math.round(width * ratio); canvas.height = Math.round(tall * ratio); }
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, width, tall);
      draw(context, width, tall);
    };
    const request = () => { if (!pending) pending = requestAnimationFrame(paint); };
    new ResizeObserver(request).observe(canvas);
    redraw.push(request);
    return { canvas, request, paint };
  }
  /** Drag with one pointer, pinch with two; a press that does not move is a click. */
  function pointer(canvas, { pan, zoom, click, hover }) {
    const held = new Map();
    let moved = 0, gap = 0;
    const at = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    canvas.addEventListener("pointerdown", (event) => { if (event.button) return; canvas.setPointerCapture(event.pointerId); held.set(event.pointerId, at(event)); moved = 0; gap = 0; });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = at(event), last = held.get(event.pointerId);
      if (!last) { if (hover) hover(event, x, y); return; }
      moved += Math.abs(x - last[0]) + Math.abs(y - last[1]);
      if (held.size === 1 && moved > 3) { showTip(); pan(x - last[0], y - last[1]); }
      held.set(event.pointerId, [x, y]);
      if (held.size === 2) {
        const [a, b] = [...held.values()], wide = Math.hypot(a[0] - b[0], a[1] - b[1]);
        if (gap) zoom(wide / gap, (a[0] + b[0]) / 2, (a[1] + b[1]) / 2);
        gap = wide; moved = 99;
      }
    });
    const release = (event) => { const was = held.delete(event.pointerId); if (was && moved <= 3 && event.type === "pointerup") click(...at(event)); };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => showTip());
  }
  const search = (label, found, placeholder = "Operator, module, source") => {
    let hits = [], at = -1;
    const status = el("span", { role: "status" });
    const step = (by) => { if (!hits.length) return; at = (at + by + hits.length) % hits.length; status.textContent = `${at + 1} of ${count(hits.length)}`; found(hits[at]); };
    const field = el("input", {
      type: "search", placeholder, "aria-label": label,
      oninput: () => { hits = matches(field.value); at = -1; status.textContent = field.value ? `${count(hits.length)} found` : ""; },
      onkeydown: (event) => { if (event.key === "Enter") { event.preventDefault(); step(event.shiftKey ? -1 : 1); } },
    });
    return [field, el("button", { class: "nv-plain", type: "button", "aria-label": "Next match", onclick: () => step(1) }, "Next"), status];
  };
  const planPicker = () => {
    const picker = el("select", { "aria-label": "Schedule", onchange: () => setPlan(Number(picker.value)) }, plans.map((entry, index) => el("option", { value: index }, planLabel(entry))));
    const sync = () => { picker.value = state.plan; picker.title = planLabel(plan()); }; // a long name is cut
    sync(); onPlan.push(sync);
    return el("label", { class: "nv-schedule" }, "Schedule", picker);
  };
  const kept = (entry) => entry.promise && (entry.streams > 1 || !entry.promise.kept) && el("span", { class: entry.promise.kept ? "nv-small nv-kept" : "nv-cross", style: "white-space:normal;display:block" }, `${entry.promise.kept ? "✓" : "✗"} ${entry.promise.text}`);

  const callLink = (call, text) => el("button", { class: "nv-link", type: "button", "data-call": call, onclick: () => select(call, "link") }, text ?? `${call} ${calls.label[call]}`);
  return { phaseChip, phaseLegend, tip, showTip, describe, surface, pointer, search, planPicker, kept, callLink };
}
