/* Timeline: runs on one axis, lane by lane, with gaps and waits. */
import { clamp, clock, count, definitions, el, fixed, lower, percent, rounded, table, time, tool } from "./tools.js";
import { ink } from "./theme.js";

/** What a kernel can simulate: a policy on so many streams, shown below what was measured. */
function buildWhatIf({ policies, own, most, why, simulate, remove }, state) {
  if (why) return el("div", { class: "nv-tools nv-wrap" }, el("span", null, `What if: nothing can be simulated, ${why}.`));
  const policy = el("select", { "aria-label": "Policy to simulate" }, policies.map((name) => el("option", { value: name, selected: name === (state.simulated?.policy ?? state.asked?.policy ?? own) }, name)));
  const streams = el("input", { type: "number", min: 1, max: most, value: state.simulated?.streams ?? state.asked?.streams ?? 4, "aria-label": "Streams, at most" });
  const ask = () => { state.asked = { policy: policy.value, streams: clamp(Math.round(Number(streams.value)) || 1, 1, most) }; simulate(state.asked.policy, state.asked.streams); };
  return el("div", { class: "nv-tools nv-wrap" }, el("label", null, "What if", policy), el("label", null, "streams, at most", streams), el("button", { class: "nv-plain", type: "button", onclick: ask }, "Simulate"),
    state.simulated && el("button", { class: "nv-plain", type: "button", onclick: remove }, "Remove"), state.simulated && el("span", { class: "nv-simulated-text" }, state.simulated.text));
}

export function buildTimeline(node, app) {
  const { streamFill, theme, data, calls, eager, plans, runs, phased, isEager, tableOf, spansOf, nameOf, sourceOf,
    origin, fate, slower, state, select, selectEager, marksOf, onSelect, phaseLegend, showTip, surface, pointer,
    search, callLink, panes, whatIf } = app;
  const drawn = [...runs, ...(state.simulated ? [state.simulated.run] : [])].filter((run) => run.call.length), simulation = whatIf && buildWhatIf(whatIf, state);
  if (!drawn.length) { node.append(el("div", { class: "nv-empty" }, runs.length ? "The timelines hold no spans: nothing ran on the device." : "No timeline was taken: neither eager nor a replay was traced.")); return; }
  const extent = Math.max(...drawn.map((run) => Math.max(run.length_ns, run.unprofiled_ns)));
  const view = { from: 0, to: extent * 1.02, syncs: true }, replays = drawn.filter((run) => run.run !== "eager");
  /** Where all replays can be read; where they are much shorter than eager, the view opens on it. */
  const near = replays.length && replays.length < drawn.length ? 1.02 * Math.max(...replays.map((run) => run.length_ns)) : 0;
  if (near && 2 * near < extent) view.to = near;
  const gutter = () => (node.clientWidth < 620 ? 84 : 168);
  const boards = [], body = el("div", { class: "nv-lanes" }), axisBox = el("div", { class: "nv-axis" });
  const refresh = () => { for (const board of boards) board.request(); for (const run of drawn) tellRest(run); for (const [button, on] of fits) button.setAttribute("aria-pressed", String(on())); };
  const fits = [];
  /** What of a run lies to the right of what is shown, or that all of it lies to the left. */
  const tellRest = (run) => {
    const cut = run.length_ns > view.to * 1.0005, gone = run.length_ns <= view.from;
    run.rest.hidden = !cut && !gone;
    const words = cut ? `goes on to the right, to ${clock(run.length_ns)} ▸` : `◂ ended at ${clock(run.length_ns)}`;
    if (run.rest.textContent !== words) run.rest.textContent = words;
  };
  const step = (span, room) => { const rough = span / Math.max(room / 100, 1), ten = 10 ** Math.floor(Math.log10(rough)); return [1, 2, 5, 10].map((k) => k * ten).find((value) => value >= rough); };
  const axis = surface(axisBox, "Time axis", (context, width, height) => {
    const left = gutter(), room = width - left - 8, gap = step(view.to - view.from, room), [unit, scale] = view.to > 1e7 ? ["ms", 1e6] : ["µs", 1e3], digits = clamp(Math.ceil(-Math.log10(gap / scale) - 1e-9), 0, 6);
    context.font = `11px ${theme.value("sans")}`; context.fillStyle = theme.value("soft"); context.textBaseline = "middle"; context.textAlign = "left";
    if (left > 100) context.fillText("one axis for all", 10, height / 2);
    context.textAlign = "center"; context.strokeStyle = theme.value("line-strong"); context.lineWidth = 1;
    for (let tick = Math.ceil(view.from / gap) * gap; tick <= view.to; tick += gap) {
      const at = left + ((tick - view.from) / (view.to - view.from)) * room;
      context.beginPath(); context.moveTo(at, height - 5); context.lineTo(at, height); context.stroke();
      if (at > left - 2 && at < width - 30) context.fillText(`${fixed(tick / scale, digits)} ${unit}`, at, height / 2 - 1);
    }
  }, 26);
  boards.push(axis);
  wire(axis, () => -1);
  if (drawn.length > 1) buildOverview();
  /** All runs in full on one axis of its own, and where of it the lanes below are: drag to look elsewhere. */
  function buildOverview() {
    const tall = drawn.length > 6 ? 5 : 8, pad = 5;
    const spot = (ns, width) => gutter() + (ns / (extent * 1.02)) * (width - gutter() - 8), back = (x, width) => (clamp((x - gutter()) / (width - gutter() - 8), 0, 1)) * extent * 1.02;
    const board = surface(axisBox, "All runs in full length, and which part of them is shown below", (paint, width, height) => {
      paint.font = `11px ${theme.value("sans")}`; paint.textBaseline = "middle"; paint.textAlign = "left"; paint.fillStyle = theme.value("soft");
      paint.fillText(gutter() > 100 ? `all of it, ${clock(extent)}` : "all", 10, height / 2);
      drawn.forEach((run, at) => { paint.fillStyle = theme.value(run.run === "eager" ? "work" : "accent"); paint.fillRect(gutter(), pad + at * tall + 1, Math.max(spot(run.length_ns, width) - gutter(), 1.5), tall - 2); });
      const from = Math.max(spot(view.from, width), gutter()), to = Math.min(spot(view.to, width), width - 8);
      paint.fillStyle = theme.value("ground"); paint.globalAlpha = 0.62; paint.fillRect(gutter(), 0, from - gutter(), height); paint.fillRect(to, 0, width - to, height); paint.globalAlpha = 1;
      paint.strokeStyle = theme.value("text"); paint.lineWidth = 1.5; rounded(paint, from - 1, 1, Math.max(to - from, 3) + 2, height - 3, 3); paint.stroke();
    }, 2 * pad + drawn.length * tall);
    axisBox.prepend(board.canvas);
    boards.push(board);
    const wide = () => board.canvas.clientWidth, centre = (x) => { const half = (view.to - view.from) / 2, at = back(x, wide()); setRange(at - half, at + half); };
    pointer(board.canvas, { pan: (dx) => { const by = (dx / (wide() - gutter() - 8)) * extent * 1.02; setRange(view.from + by, view.to + by); }, zoom: () => {}, click: centre });
  }
  for (const run of drawn) {
    const tall = run.lanes.length > 40 ? 7 : run.lanes.length > 16 ? 14 : run.lanes.length > 8 ? 22 : 28, pad = 6, most = run.flights.running.reduce((a, b) => Math.max(a, b), 0), strip = most > 1 ? 26 : 0, top = pad + strip;
    const order = run.lanes.map(() => []), ends = run.lanes.map(() => []);
    run.start.forEach((start, span) => { const lane = run.lane[span], reach = ends[lane]; order[lane].push(span); reach.push(Math.max(reach.length ? reach[reach.length - 1] : 0, start + run.length[span])); });
    const owner = run === state.simulated?.run ? state.simulated.plan : plans.find((entry) => entry.policy === run.run);
    const streamLane = (lane) => run.lanes[lane].kind === "stream" || run.lanes[lane].kind === "worker";
    const section = el("section", { class: "nv-section" }, el("h3", null, run.label, (run.rest = el("button", { class: "nv-link nv-rest", type: "button", title: "Show all of it", hidden: true, onclick: () => whole() })),
      el("span", null, `${run.source} (${run.clock}) · `, !run.profiled_ns ? `${clock(run.length_ns)} from first start to last end, profiled length unknown` : Math.abs(run.profiled_ns - run.length_ns) < 50 ? `${clock(run.profiled_ns)} profiled, from first start to last end` : `${clock(run.length_ns)} from first start to last end · ${clock(run.profiled_ns)} profiled`, " · ", run.unprofiled_ns ? `${clock(run.unprofiled_ns, 1)} unprofiled${run.run === "eager" ? "" : ", the bare replay"}` : "unprofiled length unknown", ` · device idle ${percent(run.idle)}`),
      run.distorted && el("span", { class: "nv-tag nv-warn" }, `▲ ${run.distortion}`), !run.reliable && el("span", { class: "nv-tag nv-warn" }, "▲ unreliable: self-check failed"), run.source === "simulated" && el("span", { class: "nv-tag" }, "simulated"), run.note && el("span", null, run.note)));
    const gapsOf = run.lanes.map(() => []);
    run.gaps.start.forEach((_, gap) => gapsOf[run.gaps.lane[gap]].push(gap));
    const toX = (ns, width) => gutter() + ((ns - view.from) / (view.to - view.from)) * (width - gutter() - 8);
    const height = top + pad + run.lanes.length * tall;
    const board = surface(section, `${run.label}: ${run.lanes.length} lanes, ${count(run.call.length)} spans`, (context, width) => {
      const left = gutter(), room = width - left - 8, span = view.to - view.from, perNs = room / span, sans = theme.value("sans");
      const gap = step(span, room), marks = marksOf(run), table = tableOf(run);
      context.strokeStyle = theme.value("line"); context.lineWidth = 1; context.beginPath();
      for (let tick = Math.ceil(view.from / gap) * gap; tick <= view.to; tick += gap) { const at = Math.round(toX(tick, width)) + 0.5; context.moveTo(at, 0); context.lineTo(at, height); }
      context.stroke();
      if (strip) drawFlights(context, width);
      for (let lane = 0; lane < run.lanes.length; lane++) {
        const y = top + lane * tall, bar = tall > 10 ? tall - 6 : tall - 2, list = order[lane];
        if (tall > 10) {
          context.font = `11.5px ${sans}`; context.textBaseline = "middle"; context.textAlign = "left"; context.fillStyle = theme.value("soft");
          context.save(); context.beginPath(); context.rect(0, y, left - (width < 620 ? 6 : 62), tall); context.clip(); context.fillText(run.lanes[lane].name, 10, y + tall / 2); context.restore();
          if (width >= 620) { context.textAlign = "right"; context.fillStyle = theme.value("faint"); if (run.lanes[lane].idle !== null) context.fillText(`${percent(run.lanes[lane].idle)} idle`, left - 8, y + tall / 2); }
        }
        context.save(); context.beginPath(); context.rect(left, 0, room + 8, height); context.clip();
        const idleFrom = Math.max(toX(0, width), left), idleTo = Math.min(toX(run.length_ns, width), width);
        if (idleTo > idleFrom) { context.fillStyle = theme.value("idle"); context.fillRect(idleFrom, y + (tall - bar) / 2, idleTo - idleFrom, bar); }
        let painted = -1;
        drawGaps(context, lane, y + tall / 2);
        for (let at = lower(ends[lane], view.from); at < list.length; at++) {
          const index = list[at], start = run.start[index];
          if (start > view.to) break;
          const x = left + (start - view.from) * perNs, wide = run.length[index] * perNs, call = run.call[index];
          if (x + wide < painted && !marks.has(call)) continue;
          const from = Math.max(x, left - 2), to = Math.min(x + Math.max(wide, 0.6), width + 2);
          const worse = slower.has(call) && !isEager(run) && run.run !== "before", colour = worse ? theme.value("bad") : streamLane(lane) ? theme.stream(lane) : run.lanes[lane].kind === "gpu" ? theme.value("work") : theme.value("remainder");
          context.fillStyle = !worse && streamLane(lane) && to - from > 3 ? streamFill(context, lane) : colour;
          context.fillRect(from, y + (tall - bar) / 2, Math.max(to - from - (wide > 3 ? 0.7 : 0), 0.5), bar);
          if (run.phase[index] >= 0) { const thin = bar > 12 ? 4 : 2; context.fillStyle = theme.value(data.phases[run.phase[index]]); context.fillRect(from, y + (tall + bar) / 2 - thin, Math.max(to - from - (wide > 3 ? 0.7 : 0), 0.5), thin); }
          painted = Math.floor(to) + (wide < 1 ? 0.4 : 0);
          if (to - from > 34 && tall > 12) {
            const label = call >= 0 ? table.label[call] : run.name[index];
            context.font = `10.5px ${sans}`; context.textAlign = "left"; context.fillStyle = ink(colour.startsWith("#") ? colour : "#888888");
            context.save(); context.beginPath(); context.rect(from, y, to - from - 3, tall); context.clip();
            if (lane >= 8 && streamLane(lane)) { context.save(); context.fillStyle = colour; context.fillRect(from + 2, y + (tall - bar) / 2 + 1, context.measureText(label).width + 5, bar - 2); context.restore(); }
            context.fillText(label, from + 4, y + tall / 2 + (phased ? -1 : 0.5)); context.restore();
          }
          if (marks.has(call)) { context.strokeStyle = theme.value("select"); context.lineWidth = 2.5; context.strokeRect(from - 1, y + (tall - bar) / 2 - 1.5, Math.max(to - from, 2) + 1, bar + 3); }
        }
        context.restore();
      }
      context.save(); context.beginPath(); context.rect(left, 0, room + 8, height); context.clip();
      if (owner && view.syncs) drawSyncs(context, width);
      if (run.unprofiled_ns && run.distorted) {
        const at = toX(run.unprofiled_ns, width);
        context.strokeStyle = theme.value("bad"); context.setLineDash([4, 3]); context.lineWidth = 1.5; context.beginPath(); context.moveTo(at, 0); context.lineTo(at, height); context.stroke(); context.setLineDash([]);
        context.fillStyle = theme.value("bad"); context.beginPath(); context.moveTo(at, 7); context.lineTo(at - 5, 0); context.lineTo(at + 5, 0); context.fill();
      }
      context.restore();
      /** How many calls run at each time: what a reader would count in the lanes below. */
      function drawFlights(paint, wideness) {
        const { at, running } = run.flights, foot = pad + strip - 5, unit = (strip - 7) / most;
        paint.font = `11px ${sans}`; paint.textBaseline = "middle"; paint.textAlign = "left"; paint.fillStyle = theme.value("faint");
        paint.fillText(left > 100 ? `in flight, ${most} at most` : `≤ ${most}`, 10, pad + strip / 2 - 2);
        paint.save(); paint.beginPath(); paint.rect(left, 0, room + 8, height); paint.clip();
        paint.fillStyle = theme.value("accent"); paint.globalAlpha = 0.4;
        let from = null, peak = 0;
        for (let k = Math.max(0, lower(at, view.from) - 1); k + 1 < at.length && at[k] <= view.to; k++) {
          from ??= toX(at[k], wideness);
          peak = Math.max(peak, running[k]);
          const to = toX(at[k + 1], wideness);
          if (to - from < 1) continue; // within a pixel the most counts: short peaks stay visible
          paint.fillRect(from, foot - peak * unit, to - from, peak * unit);
          from = to; peak = 0;
        }
        paint.restore();
      }
      /** Thin lines through idle stretches: waiting for another call, then the launch gap. */
      function drawGaps(paint, lane, middle) {
        for (const gap of gapsOf[lane]) {
          const from = run.gaps.start[gap], to = from + run.gaps.length[gap];
          if (to < view.from) continue;
          if (from > view.to) break;
          if ((to - from) * perNs < 2) continue;
          const turn = to - run.gaps.launch[gap], parts = [[from, turn, run.gaps.wait[gap] > 0 ? "sync" : "line-strong"], [turn, to, "launch"]];
          for (const [since, until, colour] of parts) {
            if ((until - since) * perNs < 0.5) continue;
            paint.strokeStyle = theme.value(colour); paint.lineWidth = colour === "line-strong" ? 1 : 2.5;
            paint.beginPath(); paint.moveTo(left + (since - view.from) * perNs, middle); paint.lineTo(left + (until - view.from) * perNs, middle); paint.stroke();
          }
        }
      }
      function drawSyncs(paint, wideness) {
        const map = spansOf(run), lines = [];
        owner.producer.forEach((u, at) => {
          const v = owner.consumer[at], a = map.get(u), b = map.get(v);
          if (!a || !b) return;
          const p = a[a.length - 1], c = b[0], end = run.start[p] + run.length[p], start = run.start[c];
          if (Math.max(end, start) >= view.from && Math.min(end, start) <= view.to) lines.push([u, v, p, c, end, start]);
        });
        const reach = Math.min(toX(run.length_ns, wideness), wideness) - Math.max(toX(0, wideness), left), crowded = 6 * lines.length > Math.max(reach, 1);
        paint.setLineDash([4, 3]);
        for (const [u, v, p, c, end, start] of lines) {
          const chosen = state.marked.has(u) || state.marked.has(v);
          if (crowded && !chosen) continue;
          paint.lineWidth = chosen ? 2.5 : 1.3; paint.globalAlpha = chosen ? 1 : 0.75; paint.strokeStyle = chosen ? theme.value("select") : theme.value("sync");
          paint.beginPath(); paint.moveTo(toX(end, wideness), top + (run.lane[p] + 0.5) * tall); paint.lineTo(toX(start, wideness), top + (run.lane[c] + 0.5) * tall); paint.stroke();
        }
        paint.setLineDash([]); paint.globalAlpha = 1;
        const free = Math.max(toX(run.length_ns, wideness), left) + 12;
        if (crowded && wideness - free > 240) { paint.fillStyle = theme.value("sync"); paint.font = `11.5px ${sans}`; paint.textAlign = "left"; paint.textBaseline = "middle"; paint.fillText(`${count(lines.length)} synchronisations: zoom in to see them`, free, height / 2); }
      }
    }, height);
    body.append(section);
    boards.push(board);
    run.box = { board, section, toX, top, tall };
    run.gapAt = (x, y) => {
      const lane = Math.floor((y - top) / tall), at = view.from + (x - gutter()) * (view.to - view.from) / (board.canvas.clientWidth - gutter() - 8);
      return x < gutter() || !gapsOf[lane] ? undefined : gapsOf[lane].find((gap) => run.gaps.start[gap] <= at && at < run.gaps.start[gap] + run.gaps.length[gap]);
    };
    if (run.facts.length) section.append(el("details", { class: "nv-figures" }, el("summary", null, "Figures of this run"), definitions(run.facts), longest(run)));
    wire(board, (x, y) => {
      const lane = Math.floor((y - top) / tall);
      if (lane < 0 || lane >= run.lanes.length || x < gutter()) return -1;
      const perNs = (board.canvas.clientWidth - gutter() - 8) / (view.to - view.from), at = view.from + (x - gutter()) / perNs, slack = 2 / perNs;
      let best = -1;
      for (let k = lower(ends[lane], at - slack); k < order[lane].length && run.start[order[lane][k]] <= at + slack; k++) { best = order[lane][k]; if (run.start[best] <= at && run.start[best] + run.length[best] >= at) break; }
      return best;
    }, run);
  }
  function setRange(from, to) {
    const wide = clamp(to - from, 1000, extent * 1.2), left = clamp(from, -extent * 0.05, extent * 1.1 - Math.min(wide, extent));
    view.from = left; view.to = left + wide;
    refresh();
  }
  function zoomAt(by, x, width) { const share = clamp((x - gutter()) / (width - gutter() - 8), 0, 1), at = view.from + share * (view.to - view.from), wide = clamp((view.to - view.from) / by, 1000, extent * 1.2); setRange(at - share * wide, at + (1 - share) * wide); }
  function wire(board, hit, run) {
    const canvas = board.canvas, perPixel = () => (view.to - view.from) / (canvas.clientWidth - gutter() - 8);
    pointer(canvas, {
      pan: (dx) => setRange(view.from - dx * perPixel(), view.to - dx * perPixel()), zoom: (by, x) => zoomAt(by, x, canvas.clientWidth),
      click: (x, y) => { const span = hit(x, y), call = span >= 0 ? run.call[span] : -1; if (call >= 0 && isEager(run)) selectEager(call, "timeline"); else select(call, "timeline"); },
      hover: (event, x, y) => {
        const span = hit(x, y);
        if (span < 0) { const gap = run && run.gapAt(x, y); showTip(event, gap === undefined ? null : whyIdle(run, gap)); return; }
        const call = run.call[span];
        showTip(event, [run.name[span], run.stream.length > 0 && `ran on stream ${run.stream[span]} of the device`, `${clock(run.start[span], 2)} + ${time(run.length[span])} on ${run.lanes[run.lane[span]].name}${run.phase[span] >= 0 ? `, ${data.phases[run.phase[span]]}` : ""}`, ...(call < 0 ? ["unattributed"] : isEager(run) ? [`eager call ${call}: ${nameOf(call, eager)}`, sourceOf(call, eager), ...fate(call)] : [`call ${call}: ${nameOf(call)}`, ...origin(call)])]);
      },
    });
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoomAt(Math.exp(-event.deltaY * 0.006), event.offsetX, canvas.clientWidth); }
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); const by = (event.deltaX || event.deltaY) * perPixel(); setRange(view.from + by, view.to + by); }
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const wide = view.to - view.from, act = { ArrowLeft: () => setRange(view.from - wide / 8, view.to - wide / 8), ArrowRight: () => setRange(view.from + wide / 8, view.to + wide / 8), "+": () => zoomAt(1.4, canvas.clientWidth / 2, canvas.clientWidth), "=": () => zoomAt(1.4, canvas.clientWidth / 2, canvas.clientWidth), "-": () => zoomAt(1 / 1.4, canvas.clientWidth / 2, canvas.clientWidth), 0: whole }[event.key];
      if (act) { event.preventDefault(); act(); }
    });
  }
  function whyIdle(run, gap) {
    const { call, awaited, length, launch, wait } = run.gaps, waiter = call[gap], other = awaited[gap], unready = length[gap] - launch[gap] - wait[gap];
    const after = other < 0 ? "it had nothing to wait for" : other === waiter ? "between two kernels of one call" : `waited for call ${other} ${calls.label[other]}, stream ${run.lane[(spansOf(run).get(other) || [0])[0]]}`;
    return [`Idle for ${time(length[gap])} before call ${waiter} ${calls.label[waiter]}`, after, ...[[unready, "nothing ready: every call left needed one that was running"], [wait[gap], "wait on another stream, while other calls were ready"], [launch[gap], "launch gap: nothing was left to wait for"]].filter(([ns]) => ns > 0).map(([ns, why]) => `${time(ns)} ${why}`)];
  }
  function longest(run) {
    return run.longest.length > 0 && [el("p", { class: "nv-sub" }, "Gaps that a faster launch or another order could save, those that delayed most first:"), table([["Call that waited"], ["For the end of"], ["Delay", 1], ["Stream idle", 1], ["Why"]], run.longest.map((row) => el("tr", null, el("td", null, callLink(row.call), el("span", { class: "nv-small" }, row.lane)), el("td", null, row.after), el("td", { class: "nv-num" }, row.delay), el("td", { class: "nv-num" }, row.text), el("td", null, row.why))))];
  }
  const whole = () => setRange(0, extent * 1.02);
  function reveal(centre) {
    let low = Infinity, high = -Infinity;
    for (const run of drawn) {
      const spans = centre ? [...marksOf(run)].flatMap((call) => spansOf(run).get(call) || []) : [];
      for (const span of spans) { low = Math.min(low, run.start[span]); high = Math.max(high, run.start[span] + run.length[span]); }
    }
    if (high > low && (high < view.from || low > view.to)) { const half = Math.max((view.to - view.from) / 2, (high - low) * 0.6); setRange((low + high) / 2 - half, (low + high) / 2 + half); }
    refresh();
  }
  const goTo = () => {
    const spansIn = (run) => [...marksOf(run)].flatMap((call) => spansOf(run).get(call) || []), run = drawn.filter((other) => spansIn(other).length).pop();
    if (!run) return;
    const spans = spansIn(run);
    const from = run.start[spans[0]], last = spans[spans.length - 1], wide = Math.max(12 * (run.start[last] + run.length[last] - from), 2000);
    setRange(from - wide * 0.4, from + wide * 0.6);
  };
  const middle = () => axis.canvas.clientWidth / 2 + gutter() / 2;
  const fit = (text, label, to) => { const button = tool(text, label, () => setRange(0, to)); fits.push([button, () => view.from === 0 && Math.abs(view.to - to) < 1e-6 * to]); return button; };
  const fitTools = [near > 0 && fit("Fit replays", "Show the replays in full; eager goes on to the right", near), fit(near ? "Fit all" : "Fit", "Show all runs in full", extent * 1.02)];
  const syncs = el("input", { type: "checkbox", onchange: () => { view.syncs = syncs.checked; refresh(); } }); syncs.checked = true;
  node.append(
    el("div", { class: "nv-tools" }, search("Search the timeline", (call) => { select(call, "search"); goTo(); }),
      drawn.length > 1 && drawn.map((run) => { const box = el("input", { type: "checkbox", onchange: () => { run.box.section.hidden = !box.checked; refresh(); } }); box.checked = true; return el("label", null, box, run.label); }),
      el("label", null, syncs, "Synchronisations"), tool("−", "Zoom out", () => zoomAt(1 / 1.6, middle(), axis.canvas.clientWidth)), tool("+", "Zoom in", () => zoomAt(1.6, middle(), axis.canvas.clientWidth)), ...fitTools,  tool("To selection", "Zoom to the selected call in the last run", goTo),
      el("span", { class: "nv-push" }, "drag to move, Ctrl and wheel to zoom, to 1 µs")),
    el("div", { class: "nv-legend" }, el("span", null, el("i", { class: "nv-key", style: "background:var(--remainder)" }), "host"), drawn.some((run) => run.lanes.some((lane) => lane.kind === "gpu")) && el("span", null, el("i", { class: "nv-key", style: "background:var(--work)" }), "GPU, eager"), el("span", null, el("i", { class: "nv-key", style: "background:var(--idle);border:1px solid var(--line-strong)" }), "idle"), el("span", null, "replay lanes: colour and name of their stream"), slower.size > 0 && el("span", null, el("i", { class: "nv-key", style: "background:var(--bad)" }), "slower than before"), el("span", null, el("i", { class: "nv-edge nv-sync" }), "synchronisation"), drawn.some((run) => run.gaps.call.length) && [["launch", "launch gap"], ["line-strong", "nothing ready"], ["sync", "wait while others were ready"]].map(([colour, name]) => el("span", null, el("i", { class: "nv-edge", style: `border-top:2.5px solid var(--${colour})` }), name)), phaseLegend(), drawn.some((run) => run.distorted) ? el("span", { style: "color:var(--bad)" }, "▼ where the unprofiled run would end") : "", data.axis && el("span", { style: "white-space:normal" }, data.axis)),
    simulation || "", axisBox, body);
  refresh();
  onSelect.push((from) => reveal(from !== "timeline"));
  let opened = false;
  panes.timeline.onshow = () => {
    reveal(true);
    if (!opened && replays.length) body.scrollTop = replays[0].box.section.offsetTop - body.offsetTop; // no further than needed: the rest fits where there is room
    opened = true;
  };
  function point(name, call) {
    const run = drawn.find((entry) => entry.run === name), span = spansOf(run).get(call)[0];
    run.box.section.scrollIntoView({ block: "nearest" });
    const frame = run.box.board.canvas.getBoundingClientRect();
    return { x: frame.left + run.box.toX(run.start[span] + run.length[span] / 2, frame.width), y: frame.top + run.box.top + (run.lane[span] + 0.5) * run.box.tall };
  }
  return { point, zoom: setRange, range: () => [view.from, view.to], drive: { a: () => setRange(view.from - (view.to - view.from) / 8, view.to - (view.to - view.from) / 8), d: () => setRange(view.from + (view.to - view.from) / 8, view.to + (view.to - view.from) / 8), w: () => zoomAt(1.4, middle(), axis.canvas.clientWidth), s: () => zoomAt(1 / 1.4, middle(), axis.canvas.clientWidth) } };
}
