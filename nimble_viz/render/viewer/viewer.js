"use strict";
/* One report, seven views, one selection. No network, no dependencies; every text enters the page as text. */
const NimbleViewer = (() => {
  // ---------------------------------------------------------------- small tools
  const el = (tag, attributes, ...children) => {
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
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  const count = (value) => value.toLocaleString("en-US");
  const time = (ns) => {
    for (const [unit, scale] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
      if (Math.abs(ns) >= scale * 0.9995) {
        const value = ns / scale;
        return `${value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2)} ${unit}`;
      }
    }
    return `${ns.toFixed(0)} ns`;
  };
  const fixed = (value, digits) => value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  /** Points of time and lengths of runs: microseconds below 10 ms, milliseconds above. */
  const scaled = (value, unit) => { let at = 0; while (value >= 999.5 && at < 6) { value /= 1000; at++; } return `${value >= 99.95 || !at ? value.toFixed(0) : value.toPrecision(3)} ${"\u00a0kMGTPE"[at].trim()}${unit}`; };
  /** A round time: ``1.5 µs``, ``200 ns``. */
  const roundTime = (ns) => { const [unit, scale] = [["s", 1e9], ["ms", 1e6], ["µs", 1e3]].find(([, one]) => ns >= one) || ["ns", 1]; return `${Number((ns / scale).toPrecision(3))} ${unit}`; };
  const clock = (ns, digits = 1) => (Math.abs(ns) < 1e7 ? `${fixed(ns / 1e3, digits)} µs` : `${fixed(ns / 1e6, digits + 1)} ms`);
  const percent = (share) => share > 0.995 && share < 1 ? ">99%" : `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)}%`;
  const lower = (array, value) => {
    let low = 0, high = array.length;
    while (low < high) { const middle = (low + high) >> 1; if (array[middle] < value) low = middle + 1; else high = middle; }
    return low;
  };
  /** Steps of a module's path; an index stays with the list it indexes. */
  const stepsOf = (path) => {
    const steps = [];
    for (const part of path ? path.split(".") : []) if (/^\d/.test(part) && steps.length) steps[steps.length - 1] += `.${part}`; else steps.push(part);
    return steps;
  };
  /** A module's or file's path, which may be broken between its parts. */
  const dotted = (path) => path.split(/(?<=[./])/).flatMap((part, at) => (at ? [el("wbr"), part] : [part]));
  const unpack = (packed, data) => {
    if (Array.isArray(packed)) return packed;
    if (packed.r !== undefined) return unpack(data.columns[packed.r], data);
    if (packed.s !== undefined) { let fresh = packed.n; return unpack(packed.s, data).map((index) => data.strings[index < 0 ? fresh++ : index]); }
    if (packed.c) return new Array(packed.c[1]).fill(packed.c[0]);
    let total = 0;
    return packed.d.map((step) => (total += step));
  };
  const unpackAll = (columns, data) => Object.fromEntries(Object.entries(columns).map(([name, packed]) => [name, unpack(packed, data)]));

  /** Where each gap is: from the end of what ran before its span on the lane, or the run's start, to the span's start. */
  const completeGaps = (run) => {
    const reached = run.lanes.map(() => 0), since = run.start.map((start, span) => { const lane = run.lane[span], before = reached[lane]; reached[lane] = Math.max(before, start + run.length[span]); return before; });
    Object.assign(run.gaps, { lane: run.gaps.span.map((span) => run.lane[span]), call: run.gaps.span.map((span) => run.call[span]), start: run.gaps.span.map((span) => since[span]), length: run.gaps.span.map((span) => run.start[span] - since[span]) });
  };
  /** How many spans run on the device from each time on where that changes; of runs that missed none. */
  const flights = (run) => {
    const at = [], running = [], starts = [], ends = [];
    if (run.reliable) run.start.forEach((start, span) => { if (run.lanes[run.lane[span]].kind !== "host") { starts.push(start); ends.push(start + run.length[span]); } });
    ends.sort((a, b) => a - b);
    for (let begun = 0, ended = 0; ended < ends.length;) {
      const now = Math.min(starts[begun] ?? Infinity, ends[ended]);
      while (starts[begun] === now) begun++;
      while (ends[ended] === now) ended++;
      if (begun - ended !== running[running.length - 1]) { at.push(now); running.push(begun - ended); }
    }
    return { at, running };
  };

  // ---------------------------------------------------------------- colours: Okabe and Ito (2008), then patterns
  const STREAMS = {
    light: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#e8d92f", "#8a8f92"],
    dark: ["#3f9ad3", "#e8ab26", "#22b58b", "#d68fb7", "#7cc6ef", "#e5793a", "#e9de5c", "#9aa1a5"],
  };
  /** From little to much after ColorBrewer's YlOrBr: lightness alone tells the steps apart. */
  const HEAT = {
    light: ["#fbe7b2", "#fdcb62", "#fba63a", "#ee8020", "#d2600f", "#a34004", "#6b2a06"],
    dark: ["#4a2c0c", "#713d0a", "#9c4f0a", "#cb6a16", "#ee9136", "#fcbf66", "#ffe9ae"],
  };
  const ink = (hex) => {
    const [r, g, b] = [1, 3, 5].map((at) => { const c = parseInt(hex.slice(at, at + 2), 16) / 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.19 ? "#10181b" : "#ffffff";
  };
  const theme = {
    get dark() { return document.documentElement.dataset.theme === "dark"; },
    value(name) { return (this.cache[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim()); },
    cache: {},
    stream(index) { return STREAMS[this.dark ? "dark" : "light"][index % 8]; },
    /** Step ``at`` of ``steps``, spread over the whole scale; one alone is in its middle. */
    heat(at, steps) { return HEAT[this.dark ? "dark" : "light"][steps > 1 ? Math.round((6 * at) / (steps - 1)) : 3]; },
  };
  const patterns = {};
  /** Beyond eight streams the colours come round again, with stripes, dots, bars: never colour alone. */
  const streamFill = (context, index) => {
    const colour = theme.stream(index), round = Math.floor(index / 8) % 4;
    if (!round) return colour;
    const key = `${colour}${round}`;
    if (!patterns[key]) {
      const tile = el("canvas", { width: 8, height: 8 }), paint = tile.getContext("2d");
      paint.fillStyle = colour; paint.fillRect(0, 0, 8, 8);
      paint.strokeStyle = paint.fillStyle = theme.dark ? "rgba(0,0,0,.5)" : "rgba(255,255,255,.65)"; paint.lineWidth = 1.8;
      paint.beginPath();
      if (round === 1) { for (const at of [-8, 0, 8]) { paint.moveTo(at - 2, 10); paint.lineTo(at + 10, -2); } }
      else if (round === 2) { paint.arc(4, 4, 1.8, 0, 7); paint.fill(); paint.beginPath(); }
      else { paint.moveTo(4, 0); paint.lineTo(4, 8); }
      paint.stroke();
      patterns[key] = context.createPattern(tile, "repeat");
    }
    return patterns[key];
  };
  /** What has no value: hatched. */
  const unknownFill = (context) => {
    if (!patterns.unknown) {
      const tile = el("canvas", { width: 8, height: 8 }), paint = tile.getContext("2d");
      paint.fillStyle = theme.value("sunken"); paint.fillRect(0, 0, 8, 8);
      paint.strokeStyle = theme.value("line-strong"); paint.lineWidth = 1.2; paint.beginPath();
      for (const at of [-8, 0, 8]) { paint.moveTo(at - 2, 10); paint.lineTo(at + 10, -2); }
      paint.stroke();
      patterns.unknown = context.createPattern(tile, "repeat");
    }
    return patterns.unknown;
  };
  /** Upper bounds, round and rising, of at most seven steps that tell ``values`` apart; the lowest holds all below it. */
  const boundsOf = (values) => {
    const sorted = Float64Array.from(values.filter((value) => value > 0)).sort(), most = sorted[sorted.length - 1], least = sorted[Math.floor(sorted.length / 20)];
    let bounds = [];
    for (const steps of sorted.length ? [[1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]] : []) {
      bounds = [];
      for (let decade = Math.floor(Math.log10(least)); !(bounds[bounds.length - 1] >= most); decade++) {
        for (const step of steps) { const bound = Number((step * 10 ** decade).toPrecision(2)); if (bound >= least && !(bounds[bounds.length - 1] >= most)) bounds.push(bound); }
      }
      if (bounds.length <= 7) break;
    }
    return bounds.slice(-7);
  };
  const STRIPES = (mark) => [null, `repeating-linear-gradient(135deg,${mark} 0 2px,transparent 2px 6px)`, `radial-gradient(${mark} 28%,transparent 32%) 0 0/6px 6px`, `repeating-linear-gradient(90deg,${mark} 0 2px,transparent 2px 6px)`];
  const streamChip = (stream) => {
    const colour = theme.stream(stream), stripes = STRIPES(theme.dark ? "rgba(0,0,0,.5)" : "rgba(255,255,255,.65)")[Math.floor(stream / 8) % 4];
    const number = el("b", { style: `background:${colour}` }, stream);
    return el("span", { class: "nv-stream", style: `background:${stripes ? `${stripes},` : ""}${colour};color:${ink(colour)}`, title: `stream ${stream}` }, number);
  };

  // ---------------------------------------------------------------- the viewer
  function mount(root, data) {
    const began = performance.now();
    const calls = unpackAll(data.calls, data);
    const work = unpackAll(data.work, data);
    const size = calls.label.length;
    // Overhead and the eager timeline count in eager calls; where nothing was fused, these are the program's own.
    const fused = data.eager !== null, eager = fused ? unpackAll(data.eager, data) : calls;
    const standsFor = Array.from({ length: size }, () => []), became = Array.from({ length: fused ? eager.label.length : 0 }, () => []);
    if (fused) { let at = 0; calls.stands.forEach((n, call) => { for (const end = at + n; at < end; at++) { standsFor[call].push(calls.for[at]); became[calls.for[at]].push(call); } }); }
    const graph = unpackAll(data.dag.columns, data);
    const plans = data.dag.plans.map((plan) => ({ ...plan, ...unpackAll(plan.columns, data) }));
    for (const plan of plans) plan.streams = plan.stream.reduce((most, stream) => Math.max(most, stream + 1), 0);
    const runs = data.timelines.map((line) => ({ ...line, ...unpackAll(line.columns, data), gaps: unpackAll(line.gaps, data) }));
    for (const run of runs) { completeGaps(run); run.flights = flights(run); }
    const cost = data.overhead && unpackAll(data.overhead.columns, data);
    const facts = data.summary, phased = facts.phases !== null;
    const phaseChip = (name) => el("span", { class: "nv-phase", style: `--phase:var(--${name})` }, name);
    const phaseLegend = () => (phased ? facts.phases.rows.map((row) => phaseChip(row.phase)) : []);
    const critical = new Set(graph.critical);
    const state = { call: -1, eager: -1, line: null, plan: Math.max(0, data.dag.opens), pane: "summary", colour: "stream" };
    const timed = data.colours.some((one) => one.key === "time" && !one.why);
    /** What is marked as selected: calls, and eager calls; the same set where nothing was fused. */
    let marked = new Set(), markedEager = marked;
    const isEager = (run) => fused && run.run === "eager";
    const tableOf = (run) => (isEager(run) ? eager : calls), marksOf = (run) => (isEager(run) ? markedEager : marked);
    const before = Array.from({ length: size }, () => []), after = Array.from({ length: size }, () => []);
    graph.from.forEach((u, edge) => { if (graph.minimum[edge]) { const v = u + graph.reach[edge]; after[u].push(v); before[v].push(u); } });
    const together = new Set(data.overhead?.shared?.calls); // calls of the optimizer that eager does not make: one row for all
    const overheadOf = new Map(cost ? cost.call.map((call, row) => [call, row]) : []);
    const spansOf = (run) => {
      if (!run.byCall) { run.byCall = new Map(); run.call.forEach((call, span) => { if (call >= 0) { const list = run.byCall.get(call); if (list) list.push(span); else run.byCall.set(call, [span]); } }); }
      return run.byCall;
    };
    const plan = () => plans[state.plan];
    const streamOf = (call) => (plan() ? plan().stream[call] : 0);
    const nameOf = (call, table = calls) => `${table.label[call]}${table.module[call] ? ` in ${table.module[call]}` : ""}`;
    const sourceOf = (call, table = calls) => (table.file[call] ? `${table.file[call]}${table.line[call] ? `:${table.line[call]}` : ""}` : "");
    const listed = (list, most, text) => [...list.slice(0, most).map(text), ...(list.length > most ? [`and ${count(list.length - most)} more`] : [])];
    /** Lines on what a fused call stands for, and what an eager call became. */
    const origin = (call) => (!fused ? [sourceOf(call)] : standsFor[call].length ? ["stands for", ...listed(standsFor[call], 4, (other) => `eager ${other} ${nameOf(other, eager)}${sourceOf(other, eager) ? `, ${sourceOf(other, eager)}` : ""}`)] : ["no eager call explains it"]);
    const fate = (call) => (!fused ? [] : became[call].length ? listed(became[call], 3, (other) => `became ${other} ${calls.label[other]}`) : ["no call of the replay stands for it"]);
    /** Where a call is, in few words: the innermost module, and the innermost numbered block around it. */
    const whereabouts = (call) => {
      if (fused && !standsFor[call].length) return "unmapped";
      const steps = stepsOf(calls.module[call]), last = steps.length - 1;
      for (let at = last - 1; at >= 0; at--) if (/\.\d/.test(steps[at])) return `${steps[at]}${at < last - 1 ? "…" : "."}${steps[last]}`;
      return steps[last] || "model";
    };
    const planLabel = (entry) => `${entry.label} (${entry.streams} stream${entry.streams === 1 ? "" : "s"})`;

    // ---- tooltip, one for all canvases
    const tip = el("div", { class: "nv-tip", hidden: true, role: "tooltip" });
    const showTip = (event, lines) => {
      if (!lines) { tip.hidden = true; return; }
      tip.replaceChildren(el("b", null, lines[0]), ...lines.slice(1).filter(Boolean).map((line) => el("i", null, line)));
      tip.hidden = false;
      const box = tip.getBoundingClientRect();
      tip.style.left = `${clamp(event.clientX + 14, 4, Math.max(4, innerWidth - box.width - 6))}px`;
      tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? Math.max(4, event.clientY - box.height - 12) : event.clientY + 18}px`;
    };
    const describe = (call) => [
      calls.label[call] === calls.operator[call] || !fused ? calls.operator[call] : calls.label[call],
      fused && calls.label[call] !== calls.operator[call] && calls.operator[call],
      `call ${call}, ${calls.phase[call]}${calls.module[call] ? `, ${calls.module[call]}` : ""}`,
      calls.writes[call] && `→ ${calls.writes[call]}`,
      ...origin(call),
      `${timed ? `cost ${time(calls.cost[call])}, ` : ""}stream ${streamOf(call)}${critical.has(call) ? ", on the critical path" : ""}`,
    ];

    // ---- panes and their updates
    const panes = {}, redraw = [], onSelect = [], onPlan = [], shown = {};
    const live = el("div", { class: "nv-hidden", "aria-live": "polite" });
    const detail = el("aside", { class: "nv-detail", hidden: true, "aria-label": "Selected call" });
    const selected = () => state.call >= 0 || state.eager >= 0;
    function select(call, from) {
      state.call = call >= 0 && call < size ? call : -1;
      state.eager = -1; state.line = null;
      marked = new Set(state.call < 0 ? [] : [state.call]);
      markedEager = fused ? new Set(state.call < 0 ? [] : standsFor[state.call]) : marked;
      announce(from);
    }
    /** An eager call, and with it the calls that stand for it. */
    function selectEager(call, from) {
      if (!fused || !became[call]) { select(call, from); return; }
      state.eager = call; state.line = null; state.call = became[call].length ? became[call][0] : -1;
      marked = new Set(became[call]); markedEager = new Set([call]);
      announce(from);
    }
    const lineKey = (file, line) => `${line} ${file}`, callsOn = new Map();
    eager.file.forEach((file, call) => { if (file) { const key = lineKey(file, eager.line[call]), list = callsOn.get(key); if (list) list.push(call); else callsOn.set(key, [call]); } });
    const linesMarked = () => new Set([...markedEager].filter((call) => eager.file[call]).map((call) => lineKey(eager.file[call], eager.line[call])));
    const codeAt = (file, line) => { const own = data.source && data.source.functions.find((one) => one.file === file && line >= one.first && line < one.first + one.text.length); return own ? own.text[line - own.first].trim() : ""; };
    /** All calls made on one line of code, and what stands for them. */
    function selectLine(file, line, from) {
      const own = callsOn.get(lineKey(file, line)) || [];
      if (!own.length) { select(-1, from); return; }
      state.line = { file, line };
      markedEager = new Set(own); marked = fused ? new Set(own.flatMap((call) => became[call])) : markedEager;
      state.call = marked.size ? [...marked][0] : -1; state.eager = fused ? own[0] : -1;
      announce(from);
    }
    function announce(from) {
      fillDetail();
      live.textContent = !selected() ? "Nothing selected" : state.line ? `Selected line ${state.line.file}:${state.line.line}, ${count(markedEager.size)} calls` : state.eager >= 0 ? `Selected eager call ${state.eager}: ${nameOf(state.eager, eager)}; ${fate(state.eager).join(", ")}` : `Selected call ${state.call}: ${nameOf(state.call)}`;
      for (const react of onSelect) react(from);
    }
    function setPlan(index) { state.plan = index; for (const react of onPlan) react(); fillDetail(); }
    function show(name) {
      state.pane = name;
      for (const [key, pane] of Object.entries(panes)) {
        const on = key === name;
        pane.node.hidden = !on;
        pane.tab.setAttribute("aria-selected", String(on));
        pane.tab.tabIndex = on ? 0 : -1;
      }
      if (!shown[name]) { shown[name] = true; panes[name].build(panes[name].node); }
      (panes[name].onshow || (() => {}))();
      showTip();
    }
    const callLink = (call, text) => el("button", { class: "nv-link", type: "button", "data-call": call, onclick: () => select(call, "link") }, text ?? `${call} ${calls.label[call]}`);
    const eagerLink = (call) => el("div", null, el("button", { class: `nv-link${call === state.eager ? " nv-picked" : ""}`, type: "button", "data-eager": call, onclick: () => selectEager(call, "link") }, `${call} ${eager.label[call]}`), el("span", { class: "nv-small", style: "white-space:normal" }, dotted([eager.module[call], sourceOf(call, eager)].filter(Boolean).join(", "))));
    const many = (list, link) => [list.slice(0, 12).map(link), list.length > 12 && `and ${list.length - 12} more`];
    function fillDetail() {
      const call = state.call;
      detail.hidden = !selected();
      if (!selected()) return;
      const rows = [], of = fused || state.line ? [...markedEager] : [call];
      if (state.line) {
        const phases = data.phases.map((phase) => [phase, of.filter((other) => eager.phase[other] === phase).length]).filter(([, n]) => n);
        rows.push(["Code", el("code", null, codeAt(state.line.file, state.line.line) || "not in this report")]);
        rows.push([fused ? "Eager calls" : "Calls", [count(of.length), phased && phases.map(([phase, n]) => [", ", phaseChip(phase), ` ${count(n)}`]), many(of, fused ? eagerLink : (other) => el("div", null, callLink(other)))]]);
        if (fused) rows.push(["Became", marked.size ? many([...marked], (other) => el("div", null, callLink(other))) : "no call of the replay"]);
        rows.push(["Modules", listed([...new Set(of.map((other) => eager.module[other]))], 6, (name) => name || "the model itself").map((text) => el("div", null, text))]);
        rows.push(["Cost alone", `${time([...marked].reduce((sum, other) => sum + calls.cost[other], 0))} together`]);
      } else if (state.eager >= 0) {
        rows.push(["Eager call", `${state.eager} of ${count(eager.label.length)}, ${eager.operator[state.eager]}`], ["Module", dotted(eager.module[state.eager] || "the model itself")], ["Source", sourceOf(state.eager, eager) || "unknown"]);
        rows.push(["Became", became[state.eager].length ? many(became[state.eager], (other) => el("div", null, callLink(other))) : "No call of the replay stands for it: folded into weights, or not needed."]);
      }
      if (call >= 0 && !state.line) {
        rows.push([fused ? "Kernel" : "Operator", calls.operator[call]], ["Call", el("span", null, `${call} of ${count(size)}, `, phased ? phaseChip(calls.phase[call]) : calls.phase[call])]);
        if (fused) rows.push(["Stands for", standsFor[call].length ? many(standsFor[call], eagerLink) : "no eager call: nothing explains it (a change of layout, most often)"]);
        if (state.eager < 0) rows.push(["Module", dotted(calls.module[call] || (fused && !standsFor[call].length ? "unknown" : "the model itself"))]);
        if (!fused) rows.push(["Source", sourceOf(call) || "unknown"]);
        if (!fused && calls.origins[call] > 1) rows.push(["Origins", `${calls.origins[call]} operators fused into this call`]);
        rows.push(["Reads", calls.reads[call] || "nothing"], ["Writes", calls.writes[call] || "nothing"]);
        if (calls.arguments[call]) rows.push(["Arguments", calls.arguments[call]]);
        rows.push(["Cost alone", `${time(calls.cost[call])}${calls.spread.length ? ` (spread ${time(calls.spread[call])})` : ""}`]);
        rows.push(["Work", [work.flops[call] < 0 ? "FLOPs unknown" : scaled(work.flops[call], "FLOP"), scaled(work.bytes[call], "B"), calls.cost[call] > 0 && `${scaled((1e9 * work.bytes[call]) / calls.cost[call], "B/s")}`,
          calls.cost[call] > 0 && work.flops[call] > 0 && scaled((1e9 * work.flops[call]) / calls.cost[call], "FLOP/s")].filter(Boolean).join(", ")]);
        if (work.fill[call] >= 0) rows.push(["Fills the GPU", [percent(work.fill[call]), work.waves[call] >= 0 && `${work.waves[call].toFixed(2)} waves`, work.occupancy[call] >= 0 && `occupancy ${percent(work.occupancy[call])}`].filter(Boolean).join(", ")]);
        rows.push(["Critical path", critical.has(call) ? "yes" : "no"]);
        if (plan()) rows.push(["Stream", el("span", null, streamChip(streamOf(call)), `in ${plan().label}`)]);
      }
      const found = of.map((other) => overheadOf.get(other)).filter((row) => row !== undefined);
      if (found.length) {
        const sum = (key) => found.reduce((all, row) => all + cost[key][row], 0), parts = ["python", "dispatch", "allocation", "launch", "tail"].map(sum);
        rows.push(["Overhead", `${of.some((other) => together.has(other)) ? `${data.overhead.shared.name}: ` : ""}${time(parts.reduce((all, part) => all + part, 0))} in profiled eager${of.length > 1 ? `, ${count(of.length)} calls` : ""}: Python ${time(parts[0])}, dispatch ${time(parts[1])}, allocation ${time(parts[2])}, launch ${time(parts[3])}`], ["Exposed", `${time(sum("exposed"))} with the device idle`]);
      }
      for (const run of runs) {
        const spans = [...marksOf(run)].flatMap((other) => spansOf(run).get(other) || []);
        if (state.line && spans.length) rows.push([run.label, `${time(spans.reduce((sum, span) => sum + run.length[span], 0))} in ${count(spans.length)} spans`]);
        else if (spans.length) rows.push([run.label, spans.slice(0, 4).map((span) => el("div", null, `${run.lanes[run.lane[span]].name}: ${clock(run.start[span], 1)} + ${time(run.length[span])}`))]);
      }
      const links = (list) => (list.length ? [list.slice(0, 8).map((other) => el("div", null, callLink(other))), list.length > 8 && `and ${list.length - 8} more`] : "none");
      if (call >= 0 && !state.line) rows.push(["Waits for", links(before[call])], ["Needed by", links(after[call])]);
      detail.replaceChildren(
        el("button", { class: "nv-close", type: "button", "aria-label": "Clear selection", onclick: () => select(-1) }, "×"),
        el("h2", null, state.line ? `${state.line.file}:${state.line.line}` : state.eager >= 0 ? eager.label[state.eager] : calls.label[call]),
        el("nav", { "aria-label": "Show this call in" }, ["overhead", "dag", "timeline", "syncs", "source", "memory"].filter((name) => name !== state.pane).map((name) => el("button", { class: "nv-plain", type: "button", onclick: () => { show(name); fillDetail(); } }, panes[name].title))),
        el("dl", { class: "nv-facts" }, rows.map(([name, value]) => [el("dt", null, name), el("dd", null, value)])),
      );
    }

    // ---- a canvas that follows its size, the theme and the selection
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
    const haystacks = new Map();
    const textOf = (call, table) => {
      let hay = haystacks.get(table);
      if (!hay) haystacks.set(table, (hay = []));
      const own = (at, from) => `${at} ${from.operator[at]} ${from.label[at]} ${from.module[at]} ${sourceOf(at, from)}${phased ? ` ${from.phase[at]}` : ""}`;
      return (hay[call] ??= [own(call, table), ...(fused && table === calls ? standsFor[call].map((other) => own(other, eager)) : [])].join(" ").toLowerCase());
    };
    function matches(text, table = calls) {
      const words = text.toLowerCase().split(/\s+/).filter(Boolean), hits = [];
      if (words.length) for (let call = 0; call < table.label.length; call++) if (words.every((word) => textOf(call, table).includes(word))) hits.push(call);
      return hits;
    }
    const planPicker = () => {
      const picker = el("select", { "aria-label": "Schedule", onchange: () => setPlan(Number(picker.value)) }, plans.map((entry, index) => el("option", { value: index }, planLabel(entry))));
      const sync = () => { picker.value = state.plan; picker.title = planLabel(plan()); }; // a long name is cut
      sync(); onPlan.push(sync);
      return el("label", { class: "nv-schedule" }, "Schedule", picker);
    };
    const table = (heads, rows) => el("div", { class: "nv-scroll" }, el("table", null, el("thead", null, el("tr", null, heads.map(([text, numeric]) => el("th", { scope: "col", class: numeric && "nv-num" }, text)))), el("tbody", null, rows)));
    const kept = (entry) => entry.promise && (entry.streams > 1 || !entry.promise.kept) && el("span", { class: entry.promise.kept ? "nv-small nv-kept" : "nv-cross", style: "white-space:normal;display:block" }, `${entry.promise.kept ? "✓" : "✗"} ${entry.promise.text}`);
    const definitions = (rows) => el("dl", { class: "nv-facts" }, rows.map(([name, value]) => [el("dt", null, name), el("dd", null, value)]));
    const card = (title, wide, ...children) => el("section", { class: `nv-card${wide ? " nv-wide" : ""}` }, el("h2", null, title), children);

    const engineTable = (rows) => [table([["Engine"], ["Arena", 1], ["Without reuse", 1], ["Saved by reuse", 1], ["Workspaces", 1], ["Held", 1], ...(rows.some((row) => row.against) ? [["Of eager's peak", 1]] : [])], rows.map((row) => el("tr", null, el("td", { class: "nv-run" }, row.label, row.chosen && el("span", { class: "nv-tag nv-yes" }, "chosen")), ...["arena", "unshared", "saved", "workspaces", "held", ...(rows.some((one) => one.against) ? ["against"] : [])].map((key) => el("td", { class: "nv-num" }, row[key] || "–"))))),
      el("p", { class: "nv-under" }, "Arena: results of all calls and large workspaces of libraries, on all streams. Held: arena, input buffers, and what was not planned.")];

    // ---------------------------------------------------------------- Summary
    function buildSummary(node) {
      const slowest = Math.max(...facts.speed.map((row) => row.median_ns), 1);
      const mark = (value) => (value && { faster: "nv-tick", slower: "nv-cross", undecided: "nv-open" }[value.verdict]) || null;
      const ratio = (value) => (value ? [el("span", { class: mark(value), title: value.full }, value.text), el("span", { class: "nv-small" }, value.interval)] : "–");
      const speed = facts.speed.map((row) => el("tr", null,
        el("td", { class: "nv-run" }, row.label, row.peer && el("span", { class: "nv-tag" }, "peer"), row.wrong && el("span", { class: "nv-tag nv-warn" }, "outputs differ"), row.chosen && el("span", { class: "nv-tag nv-yes" }, "chosen"), !row.stable && el("span", { class: "nv-tag nv-warn", title: row.warnings.join("; ") }, "unstable")),
        el("td", { style: "min-width:64px;width:22%" }, el("div", { class: "nv-bar", style: `width:${(100 * row.median_ns) / slowest}%;margin-top:7px${row.peer ? ";background:var(--remainder)" : ""}` })),
        el("td", { class: "nv-num" }, el("b", null, row.median)),
        el("td", { class: "nv-num" }, row.spread, el("span", { class: "nv-small" }, `drift ${row.drift}`)),
        el("td", { class: "nv-num" }, ratio(row.eager)), el("td", { class: "nv-num" }, ratio(row.single)),
        el("td", { class: "nv-num" }, row.distance || "–"),
        el("td", { class: "nv-num" }, count(row.samples), el("span", { class: "nv-small" }, `after ${row.warmup}`), row.dropped > 0 && el("span", { class: "nv-small", title: "other programs interrupted them more than usual" }, `${count(row.dropped)} dropped`))));
      const number = (text, ...more) => el("td", { class: "nv-num" }, text === null || text === "" ? "–" : text, more);
      const optional = (value) => number(value === null ? null : count(value));
      const named = (row) => [row.label, row.chosen && el("span", { class: "nv-tag nv-yes" }, "chosen")];
      const tried = ({ rows, folded }) => {
        const heads = [["Plan"], ["Streams", 1], ["Syncs", 1], ["Median", 1], ["Over one stream", 1], ["Prepared in", 1], ["Pays back", 1], ["Simulated", 1], ["Memory", 1], ["Outputs"], ["Outcome"]];
        const line = (row) => el("tr", { class: row.wrong ? "nv-wrong" : null },
          el("td", null, named(row), row.wrong && el("span", { class: "nv-tag nv-warn" }, "outputs differ"), !row.stable && el("span", { class: "nv-tag nv-warn" }, "unstable")),
          number(row.streams ? count(row.streams) : ""), number(row.streams ? count(row.syncs) : ""), number(row.median, row.quartiles && el("span", { class: "nv-small" }, row.quartiles)), el("td", { class: "nv-num" }, ratio(row.single)),
          number(row.cost, row.made && el("span", { class: "nv-small" }, `kernels ${row.made}`)), number(row.pays, row.pays_single && el("span", { class: "nv-small" }, `${row.pays_single} vs one stream`)), number(row.simulated), number(row.memory),
          el("td", null, el("span", { class: row.wrong ? "nv-cross" : row.equal ? "nv-tick" : "" }, row.wrong ? "✗ differ" : row.equal ? "✓ equal" : row.outputs), row.error && el("span", { class: "nv-small" }, `error ${row.error}`)),
          el("td", { class: row.wrong ? "nv-cross" : null }, row.outcome));
        return [el("p", null, `Captured while preparing, compared with eager, and timed in turn; quartiles below each median, 99.5% intervals below each ratio. Over one stream${facts.candidates.fused && facts.candidates.single === "one stream" ? ": of eager's own kernels" : ""}. Prepared in: making the kernels and capturing; pays back: after so many calls, against eager. A plan whose outputs differ cannot be chosen.`),
          el("div", { class: "nv-tried" }, table(heads, rows.map(line))),
          folded.map((group) => el("details", { class: "nv-folded" }, el("summary", null, group.text), table([["Plan"], ["Streams", 1], ["Syncs", 1], ["Simulated", 1]], group.rows.map((row) => el("tr", null, el("td", null, row.label), number(count(row.streams)), number(count(row.syncs)), number(row.simulated))))))];
      };
      const plansTable = () => {
        const what = facts.host ? "Calls" : "Kernels", read = facts.plans.some((entry) => entry.forks !== null), seen = facts.plans.some((entry) => entry.observed);
        return [el("p", null, `Width of the DAG: ${facts.width}. So many calls at most need not wait for each other; no schedule has more calls in flight.`),
          table([["Plan"], ["Streams", 1], ...(seen ? [[`${what} in flight`, 1]] : []), ...data.sync_counts.map(([, name]) => [name, 1]), ...(read ? data.sync_ends.map(([, name]) => [name, 1]) : [])], facts.plans.map((entry) => el("tr", null,
            el("td", { class: "nv-plan" }, named(entry), kept(entry), el("span", { class: "nv-small", style: "white-space:normal" }, `promises: ${entry.promises}${entry.added_order ? `; adds ${count(entry.added_order)} orders` : ""}`)),
            number(count(entry.streams)), seen && (entry.observed ? number(`${count(entry.observed.most)} at most`, el("span", { class: "nv-small" }, `${entry.observed.mean} on average`), !entry.observed.reliable && el("span", { class: "nv-tag nv-warn" }, "unreliable")) : number(null)),
            ...data.sync_counts.map(([key]) => (entry[key] === null ? number(facts.planned ? null : "not read") : optional(entry[key]))), ...(read ? data.sync_ends.map(([key]) => optional(entry[key])) : []))))];
      };
      const rivals = (rows) => [el("p", null, `Other ways to run the model, timed in turn with ours: ${facts.best || "none"}. Above 1x ours is faster; the 99.5% interval below a ratio alone decides. Prepared in: from the model to its first finished result.`),
        el("div", { class: "nv-tried" }, table([["Peer"], ["Median", 1], ["Ours over it", 1], ["Prepared in", 1], ["Outputs"], ["Outcome"]], rows.map((row) => el("tr", { class: row.wrong ? "nv-wrong" : null },
          el("td", null, row.name, !row.stable && el("span", { class: "nv-tag nv-warn" }, "unstable")), number(row.median), el("td", { class: "nv-num" }, ratio(row.ratio)), number(row.prepare),
          el("td", null, row.median ? el("span", { class: row.wrong ? "nv-cross" : row.equal ? "nv-tick" : "" }, `${row.wrong ? "✗ " : row.equal ? "✓ " : ""}${row.outputs}`) : "–"),
          el("td", { class: row.ratio && row.ratio.verdict !== "faster" ? mark(row.ratio) : null }, row.outcome, row.note && row.note !== row.outcome && el("span", { class: "nv-small", style: "white-space:normal" }, row.note))))))];
      const distance = ({ over, text, bound, parts, sentence }) => {
        const most = parts.reduce((sum, part) => sum + part.ns, 0) || 1;
        return [el("p", { class: "nv-answer" }, `${facts.best}: ${over} of the limit, ${text} (${bound})`), sentence && el("p", null, `${sentence}.`),
          parts.length > 0 && table([["Above the limit"], [""], ["Time", 1]], parts.map((part) => el("tr", null, el("td", null, part.name, el("span", { class: "nv-small", style: "white-space:normal" }, part.meaning)), el("td", { style: "width:30%" }, el("div", { class: "nv-bar", style: `width:${(100 * part.ns) / most}%;margin-top:7px` })), number(part.text))))];
      };
      const nextHelp = ({ sentence, why, changes, replay, eager }) => {
        const parts = (split) => split && table([[split.run], [""], ["Time", 1], ["Share", 1]], split.rows.map((row) => el("tr", null, el("td", null, row.name, el("span", { class: "nv-small", style: "white-space:normal" }, row.meaning)), el("td", { style: "width:24%" }, el("div", { class: "nv-bar", style: `width:${row.share.startsWith("-") ? 0 : row.share};margin-top:7px` })), number(row.text), number(row.share))));
        return [sentence && el("p", { class: "nv-answer" }, sentence), why && el("p", null, `Basis: ${why}.`),
          changes.length > 1 && el("ul", { class: "nv-list" }, changes.slice(1).map((row) => el("li", null, `${row.what}: ${row.gain}`, el("span", { class: "nv-small" }, row.why)))),
          [replay, eager].map((split) => split && [parts(split), el("p", { class: "nv-under" }, split.note)])];
      };
      const byPhase = ({ rows, runs: names }) => {
        const most = rows.reduce((all, row) => Math.max(all, row.cost_ns), 1), profiled = rows.some((row) => row.eager);
        return [el("p", null, `Isolated: all calls of the phase, one by one; on the path: those on the critical path.${profiled ? " Eager: profiled, on the host, with the share that is overhead." : ""}${names.length ? " Replays: while any call of the phase ran; phases may run side by side." : ""}`),
          table([["Phase"], ["Calls", 1], ["Isolated", 1], [""], ["On the path", 1], ...(profiled ? [["Eager", 1]] : []), ...names.map((name) => [name, 1])], rows.map((row) => el("tr", null, el("td", null, phaseChip(row.phase)), number(count(row.calls), row.inside && el("span", { class: "nv-small" }, `${row.inside}, fused with theirs`)), number(row.cost, row.share && el("span", { class: "nv-small" }, row.share)),
            el("td", { style: "min-width:60px;width:18%" }, el("div", { class: "nv-bar", style: `width:${(100 * row.cost_ns) / most}%;margin-top:7px;background:var(--${row.phase})` })), number(row.path), profiled && number(row.eager, row.overhead && el("span", { class: "nv-small" }, `${row.overhead} overhead`)), row.replays.map((time) => number(time)))))];
      };
      const spentOn = ({ rows, basis, facts: said }) => {
        const most = Math.max(...rows.map((row) => row.ns), 1);
        return [el("p", null, `Shares ${basis}.`), table([["Spent on"], [""], ["Time", 1], ["Share", 1]], rows.map((row) => el("tr", { class: row.name === facts.profiled.bound ? "nv-on" : null }, el("td", null, row.name, el("span", { class: "nv-small", style: "white-space:normal" }, row.meaning)), el("td", { style: "width:34%" }, el("div", { class: "nv-bar", style: `width:${(100 * row.ns) / most}%;margin-top:7px` })), number(row.text), number(row.share)))), el("div", { style: "margin-top:14px" }, definitions(said))];
      };
      const hostPhases = ({ rows }) => {
        const most = Math.max(...rows.map((row) => row.eager_ns), 1);
        return [el("p", null, "Host time under the profiler, with the share that is the framework's overhead. Forward is what is none of the others."), table([["Phase"], ["Calls", 1], [""], ["Host time", 1], ["Overhead", 1]], rows.map((row) => el("tr", null, el("td", null, phaseChip(row.phase)), number(count(row.calls)), el("td", { style: "width:34%" }, el("div", { class: "nv-bar", style: `width:${(100 * row.eager_ns) / most}%;margin-top:7px;background:var(--${row.phase})` })), number(row.eager), number(row.overhead))))];
      };
      const steps = facts.preparation, most = Math.max(...steps.map((step) => step.ns), 1);
      node.append(el("div", { class: "nv-grid" },
        !facts.profiled && card("Speed", true,
          el("p", null, facts.speed.length > 0 && `Every ratio: ${facts.context}. Medians of runs taken in turn; above 1x is faster; the 99.5% interval below a ratio alone decides. Over limit: how far a replay is from the ${facts.limit ? `limit that no schedule of its calls can beat, here ${facts.limit.text} (${facts.limit.bound})` : "longest path of isolated calls, which no schedule can beat"}.`),
          facts.speed.length ? el("div", { class: "nv-speed" }, table([["Run"], [""], ["Median", 1], ["Spread", 1], ["Over eager", 1], ["Over one-stream", 1], ["Over limit", 1], ["Samples", 1]], speed)) : el("p", null, facts.planned ? "This is a plan: nothing was run, so nothing was measured." : "Nothing was measured.")),
        facts.profiled && card("What an iteration is spent on", true, ...spentOn(facts.profiled)),
        facts.warnings.length > 0 && card(`Before you believe a figure (${facts.warnings.length})`, true, el("ul", { class: "nv-list" }, facts.warnings.map((text) => el("li", null, text)))),
        phased && card(facts.profiled ? "One iteration by phase" : "The training step by phase", true, ...(facts.profiled ? hostPhases(facts.phases) : byPhase(facts.phases))),
        facts.peers.length > 0 && card("Against peers", true, ...rivals(facts.peers)),
        facts.candidates && card("Plans that were tried", true, ...tried(facts.candidates)),
        !facts.profiled && card("Plans and synchronisations", true, facts.plans.length
          ? plansTable()
          : el("p", null, "No plan was made.")),
        !facts.planned && !facts.profiled && card("Same outputs as eager?", false, facts.checks.length
          ? [el("p", null, "Fresh inputs; worst relative error over the outputs. Input effect: how far eager itself moves between two inputs."), table([["Replay"], ["Verdict"], ["Error", 1], ["Tolerance", 1], ["Input effect", 1]], facts.checks.map((check) => el("tr", null, el("td", null, check.run), el("td", null, el("span", { class: check.passed ? "nv-tick" : "nv-cross" }, check.passed ? "✓ equal" : check.differs ? "✗ differs" : "✗ not shown"), check.reason && el("span", { class: "nv-small", style: "white-space:normal" }, check.reason)), el("td", { class: "nv-num" }, check.error), el("td", { class: "nv-num" }, check.tolerance), el("td", { class: "nv-num" }, check.effect)))), facts.checks.map((check) => check.reference && el("p", { class: "nv-under" }, `${check.run}: ${check.reference}.`))]
          : el("p", null, "Outputs were not compared.")),
        facts.what_if && card("How many streams are worth it?", false, el("p", { class: "nv-answer" }, facts.what_if.answer),
          table([["Streams", 1], [""], ["Simulated", 1], ["Over one stream", 1]], facts.what_if.rows.map((row) => el("tr", { class: row.enough ? "nv-on" : null }, el("td", { class: "nv-num" }, count(row.streams)), el("td", { style: "width:40%" }, el("div", { class: "nv-bar nv-simulated", style: `width:${(100 * row.ns) / facts.what_if.rows.reduce((most, other) => Math.max(most, other.ns), 1)}%` })), el("td", { class: "nv-num" }, row.text), el("td", { class: "nv-num" }, row.over)))),
          el("p", { class: "nv-under" }, facts.what_if.note)),
        !facts.profiled && card("Program and limit", false, definitions(facts.facts)),
        facts.limit && card("Distance to the limit", false, ...distance(facts.limit)),
        facts.advice && card("What would help next", false, ...nextHelp(facts.advice)),
        !facts.profiled && card("Preparation", false, steps.length ? table([["Step"], [""], ["Time", 1]], [...steps.map((step) => el("tr", null, el("td", null, step.name), el("td", { style: "width:40%" }, el("div", { class: "nv-bar", style: `width:${(100 * step.ns) / most}%;margin-top:7px` })), el("td", { class: "nv-num" }, step.text))), el("tr", null, el("td", null, el("b", null, "Total")), el("td"), el("td", { class: "nv-num" }, el("b", null, facts.preparation_total)))]) : el("p", null, "Preparation was not timed.")),
        facts.profiled && card("Not in this report", false, el("ul", { class: "nv-list" }, facts.profiled.absent.map((row) => el("li", null, `${row.what}: ${row.why}`)))),
        !facts.planned && !facts.profiled && card("Memory", facts.memory && facts.memory.engines.length > 0, facts.memory ? [facts.memory.facts.length > 0 && definitions(facts.memory.facts), facts.memory.engines.length > 0 && engineTable(facts.memory.engines)] : el("p", null, facts.host ? "Not tracked on the host device." : "Memory is unknown.")),
        card("Environment", false, definitions(facts.environment))));
    }

    // ---------------------------------------------------------------- Overhead
    const WHOLE = [["waiting", "Waits for the device"], ["loader", "Waits for the data loader"], ["remainder", "Belongs to no call"]];
    const PARTS = [["python", "Python"], ["dispatch", "Dispatch"], ["allocation", "Allocation"], ["launch", "Launch"], ["tail", "Tail"]];
    function buildOverhead(node) {
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
      const holds = (row) => (row.calls.size < markedEager.size ? [...row.calls].some((call) => markedEager.has(call)) : [...markedEager].some((call) => row.calls.has(call)));
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
            el("div", { class: "nv-columns" }, data.overhead.facts.map(([name, value]) => el("div", null, el("span", { class: "nv-small" }, name), value))))),
        data.overhead.warnings.map((text) => el("div", { class: "nv-note", style: "margin:0 0 10px" }, text)), list);
      node.append(
        el("div", { class: "nv-tools" }, by("operator", "By operator"), by("module", "By module"), by("call", "By call"), levels, field, status),
        el("div", { class: "nv-legend" }, PARTS.map(([key, label]) => el("span", null, el("i", { class: "nv-key", style: `background:var(--${key})` }), label)), el("span", null, el("i", { class: "nv-key", style: "background:var(--work)" }), work), WHOLE.map(([key, label]) => whole[key] > 0 && el("span", null, el("i", { class: "nv-key", style: `background:var(--${key})` }), label)), el("span", null, el("i", { class: "nv-key nv-hatch" }), "Exposed: the device was idle meanwhile")),
        body);
      fill();
      /** Open what holds the calls that were selected elsewhere. */
      const reveal = () => { for (const row of everyRow(forest())) if (row.inside.length && holds(row) && row.calls.size > markedEager.size && !view.open.has(row.key)) { view.open.add(row.key); view.depth = 0; } };
      const mark = (from) => { if (selected() && from !== "overhead" && view.by === "operator" && from !== "theme" && view.text === "" && state.pane !== "overhead") { view.by = "call"; } if (view.by === "module" && from !== "overhead") reveal(); fill(true); const row = list.querySelector(".nv-on"); if (row && from !== "overhead" && row.scrollIntoView) row.scrollIntoView({ block: "center" }); };
      onSelect.push(mark);
      if (selected()) { view.by = "call"; fill(true); }
      panes.overhead.onshow = () => { const row = list.querySelector(".nv-on"); if (row) row.scrollIntoView({ block: "center" }); };
    }

    // ---------------------------------------------------------------- DAG
    const W = 188, H = 38, GROUP_H = 50, GAP_X = 18, GAP_LANE = 13, TRACK = 9, GAP_Y = 34, PAD = 12, HEAD = 26;
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
      /** How far right of a box's middle its edges leave it at the bottom, and enter it at the top. */
      const leave = (box, u) => {
        if (box >= boxes || !isGroup(box) || !open.has(box)) return 0;
        const rows = rowsOf.get(box), member = child(box, u);
        const node = rowOf[member] === rows.length - 1 ? member : laneAt(box, u, rows.length - 1);
        return node < 0 ? 0 : x[node] + wide[node] / 2 + leave(node, u) + shift[box] - wide[box] / 2;
      };
      const enter = (box, u, v) => {
        if (box >= boxes || !isGroup(box) || !open.has(box)) return 0;
        const member = child(box, v), node = rowOf[member] === 0 ? member : laneAt(box, u, 0);
        return node < 0 ? 0 : x[node] + wide[node] / 2 + enter(node, u, v) + shift[box] - wide[box] / 2;
      };
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
    let dag = null;
    function buildDag(node) {
      if (facts.profiled) { node.append(el("div", { class: "nv-empty" }, `No DAG here: ${facts.profiled.absent[0].why}. compare(model, inputs) records them.`)); return; }
      if (!size) { node.append(el("div", { class: "nv-empty" }, "The model made no call that reaches the device: there is no graph to draw.")); return; }
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
        if (state.colour === "phase") return el("span", { title: chosen.meaning }, "phase", facts.phases.rows.filter((row) => calls.phase.includes(row.phase)).map(({ phase }) => { const colour = theme.value(phase); return [el("b", { class: "nv-stream", style: `background:${colour};color:${ink(colour)}` }, phase[0].toUpperCase()), phase]; }));
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
      const cut = (context, text, room) => {
        if (context.measureText(text).width <= room) return text;
        let low = 0, high = text.length;
        while (low < high) { const half = (low + high + 1) >> 1; if (context.measureText(`${text.slice(0, half)}…`).width <= room) low = half; else high = half - 1; }
        return low ? `${text.slice(0, low)}…` : "";
      };
      /** Both ends of what does not fit. */
      const shorten = (context, text, room) => {
        if (context.measureText(text).width <= room) return text;
        let low = 0, high = text.length;
        const both = (kept) => `${text.slice(0, Math.ceil(kept / 2))}…${text.slice(text.length - Math.floor(kept / 2))}`;
        while (low < high) { const half = (low + high + 1) >> 1; if (context.measureText(both(half)).width <= room) low = half; else high = half - 1; }
        return low > 3 ? both(low) : "";
      };
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
        const touched = [], stood = new Set([...marked].map((call) => place.stand[call]));
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
          if (marked.has(call)) { rounded(paint, x[call] - 3, y[call] - 3, W + 6, H + 6, 8); paint.strokeStyle = picked; paint.lineWidth = Math.max(3, 2 / s); paint.stroke(); }
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
            const alike = graph.alike[at] > 1 ? `, no. ${count(graph.like[at])} of ${count(graph.alike[at])} alike` : "", own = `${count(n)} calls${alike}`;
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
          else { const at = box - size; showTip(event, [`${pathOf(box)}${partOf(at)}`, graph.parts[at] > 1 && "calls of other modules come between its parts", `calls ${graph.first[at]} to ${graph.last[at]}`, graph.alike[at] > 1 && `number ${graph.like[at]} of ${graph.alike[at]} groups that make these very calls`, coloured(box), open.has(box) ? "click to fold" : "click to open"]); }
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
      const tool = (text, label, act) => el("button", { class: "nv-plain", type: "button", "aria-label": label, title: label, onclick: act }, text);
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
      dag = {
        point: (call) => { reveal(call); board.paint(); const frame = board.canvas.getBoundingClientRect(); return { x: frame.left + (place.x[call] + W / 2) * view.scale + view.x, y: frame.top + (place.y[call] + H / 2) * view.scale + view.y }; },
        visible: () => place.list.length,
        colours: () => { const paint = board.canvas.getContext("2d"); return { key: state.colour, bounds, boxes: place.list.filter((box) => !isGroup(box) || !open.has(box)).map((box) => { const { colour, words } = tint(paint, box); return [box, colour, words]; }) }; },
        drawn: () => ({ boxes: place.list.filter((box) => !isGroup(box) || !open.has(box)).map((box) => [box, place.x[box], place.y[box], place.wide[box], place.tall[box]]), edges: edges.map(({ a, b, kind, way }) => ({ a, b, kind, way })) }),
      };
    }
    /** Upright stretches joined by curves that stay between two rows. */
    function trace(context, way) {
      context.beginPath(); context.moveTo(way[0], way[1]); context.lineTo(way[0], way[2]);
      for (let at = 3; at < way.length; at += 3) {
        const from = way[at - 3], high = way[at - 1], to = way[at], low = way[at + 1], half = (high + low) / 2;
        if (Math.abs(from - to) < 0.5) context.lineTo(to, low); else context.bezierCurveTo(from, half, to, half, to, low);
        if (way[at + 2] > low) context.lineTo(to, way[at + 2]);
      }
    }
    function rounded(context, x, y, wide, tall, radius) { context.beginPath(); context.roundRect(x, y, wide, tall, radius); }

    // ---------------------------------------------------------------- Timeline
    let gantt = null;
    function buildTimeline(node) {
      const drawn = runs.filter((run) => run.call.length);
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
        const owner = plans.find((entry) => entry.policy === run.run);
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
              const colour = streamLane(lane) ? theme.stream(lane) : run.lanes[lane].kind === "gpu" ? theme.value("work") : theme.value("remainder");
              context.fillStyle = streamLane(lane) && to - from > 3 ? streamFill(context, lane) : colour;
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
              const chosen = marked.has(u) || marked.has(v);
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
            showTip(event, [run.name[span], run.stream.length > 0 && `ran on stream ${run.stream[span]} of the device`, `${clock(run.start[span], 2)} + ${time(run.length[span])} on ${run.lanes[run.lane[span]].name}${run.phase[span] >= 0 ? `, ${data.phases[run.phase[span]]}` : ""}`, ...(call < 0 ? ["belongs to no call"] : isEager(run) ? [`eager call ${call}: ${nameOf(call, eager)}`, sourceOf(call, eager), ...fate(call)] : [`call ${call}: ${nameOf(call)}`, ...origin(call)])]);
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
      const tool = (text, label, act) => el("button", { class: "nv-plain", type: "button", "aria-label": label, title: label, onclick: act }, text);
      const middle = () => axis.canvas.clientWidth / 2 + gutter() / 2;
      const fit = (text, label, to) => { const button = tool(text, label, () => setRange(0, to)); fits.push([button, () => view.from === 0 && Math.abs(view.to - to) < 1e-6 * to]); return button; };
      const fitTools = [near > 0 && fit("Fit replays", "Show the replays in full; eager goes on to the right", near), fit(near ? "Fit all" : "Fit", "Show all runs in full", extent * 1.02)];
      const syncs = el("input", { type: "checkbox", onchange: () => { view.syncs = syncs.checked; refresh(); } }); syncs.checked = true;
      node.append(
        el("div", { class: "nv-tools" }, search("Search the timeline", (call) => { select(call, "search"); goTo(); }),
          drawn.length > 1 && drawn.map((run) => { const box = el("input", { type: "checkbox", onchange: () => { run.box.section.hidden = !box.checked; refresh(); } }); box.checked = true; return el("label", null, box, run.label); }),
          el("label", null, syncs, "Synchronisations"), tool("−", "Zoom out", () => zoomAt(1 / 1.6, middle(), axis.canvas.clientWidth)), tool("+", "Zoom in", () => zoomAt(1.6, middle(), axis.canvas.clientWidth)), ...fitTools,  tool("To selection", "Zoom to the selected call in the last run", goTo),
          el("span", { class: "nv-push" }, "drag to move, Ctrl and wheel to zoom, to 1 µs")),
        el("div", { class: "nv-legend" }, el("span", null, el("i", { class: "nv-key", style: "background:var(--remainder)" }), "host"), drawn.some((run) => run.lanes.some((lane) => lane.kind === "gpu")) && el("span", null, el("i", { class: "nv-key", style: "background:var(--work)" }), "GPU, eager"), el("span", null, el("i", { class: "nv-key", style: "background:var(--idle);border:1px solid var(--line-strong)" }), "idle"), el("span", null, "replay lanes: colour and name of their stream"), el("span", null, el("i", { class: "nv-edge nv-sync" }), "synchronisation"), drawn.some((run) => run.gaps.call.length) && [["launch", "launch gap"], ["line-strong", "nothing ready"], ["sync", "wait while others were ready"]].map(([colour, name]) => el("span", null, el("i", { class: "nv-edge", style: `border-top:2.5px solid var(--${colour})` }), name)), phaseLegend(), drawn.some((run) => run.distorted) ? el("span", { style: "color:var(--bad)" }, "▼ where the unprofiled run would end") : "", data.axis && el("span", { style: "white-space:normal" }, data.axis)),
        axisBox, body);
      refresh();
      onSelect.push((from) => reveal(from !== "timeline"));
      panes.timeline.onshow = () => reveal(true);
      gantt = { point: (name, call) => { const run = drawn.find((entry) => entry.run === name), span = spansOf(run).get(call)[0], frame = run.box.board.canvas.getBoundingClientRect(); return { x: frame.left + run.box.toX(run.start[span] + run.length[span] / 2, frame.width), y: frame.top + run.box.top + (run.lane[span] + 0.5) * run.box.tall }; }, zoom: setRange, range: () => [view.from, view.to] };
    }

    // ---------------------------------------------------------------- Syncs
    function buildSyncs(node) {
      const ends = (entry) => {
        const known = data.sync_ends.filter(([key]) => entry[key] !== null);
        return known.length > 0 && el("div", { class: "nv-counts nv-ends" }, known.map(([key, name, meaning]) => el("div", null, el("strong", null, count(entry[key])), el("em", null, name), el("small", null, meaning))));
      };
      const counts = el("div"), list = el("div"), view = { limit: 200, text: "" };
      const field = el("input", { type: "search", placeholder: "Operator, module, source", "aria-label": "Search synchronisations", oninput: () => { view.text = field.value; view.limit = 200; fill(); } });
      function fill() {
        const entry = facts.plans[state.plan], now = plan();
        if (!now) { counts.replaceChildren(el("div", { class: "nv-empty" }, facts.profiled ? `No plan here: ${facts.profiled.absent[0].why}.` : "No plan was made, so nothing has to wait.")); return; }
        counts.replaceChildren(el("div", { class: "nv-counts" }, data.sync_counts.map(([key, name, meaning]) => el("div", null, el("strong", null, entry[key] === null ? "not read" : count(entry[key])), el("em", null, name), el("small", null, meaning)))), kept(entry) || "", ends(entry) || "", entry.phases.length ? el("p", { class: "nv-sub" }, `Planned waits by phase: ${entry.phases.map((one) => one.text).join(", ")}.`) : "");
        const keep = view.text ? new Set(matches(view.text)) : null, rows = [];
        now.producer.forEach((u, at) => { const v = now.consumer[at]; if (!keep || keep.has(u) || keep.has(v)) rows.push([at, u, v]); });
        if (!now.producer.length) { list.replaceChildren(el("p", { class: "nv-sub" }, `${planLabel(now)} needs no synchronisation: ${now.streams > 1 ? "its streams never meet" : "all calls are on one stream"}.`)); return; }
        const side = (call) => el("td", null, streamChip(now.stream[call]), callLink(call), el("span", { class: "nv-small", style: "white-space:normal" }, phased && phaseChip(calls.phase[call]), phased && " ", calls.module[call]), fused && el("span", { class: "nv-small", style: "white-space:normal" }, standsFor[call].length ? `for eager ${listed(standsFor[call], 4, (other) => `${other} ${eager.label[other]}`).join(", ")}` : "no eager call explains it"));
        const first = rows.findIndex(([, u, v]) => marked.has(u) || marked.has(v));
        const shownRows = rows.slice(0, view.limit);
        if (first >= view.limit) shownRows.unshift(rows[first]);
        list.replaceChildren(
          table([["#", 1], ["Producer (stream, call, module)"], ["Consumer that waits for it"], ["Producer's cost", 1]], shownRows.map(([at, u, v]) => el("tr", { class: marked.has(u) || marked.has(v) ? "nv-on" : null }, el("td", { class: "nv-num" }, at + 1), side(u), side(v), el("td", { class: "nv-num" }, time(calls.cost[u]))))),
          rows.length > view.limit ? el("button", { class: "nv-plain nv-more", type: "button", onclick: () => { view.limit += 200; fill(); } }, `Show ${Math.min(200, rows.length - view.limit)} more of ${count(rows.length)}`) : "", rows.length ? "" : el("p", { class: "nv-sub" }, "Nothing matches the search."));
      }
      const host = data.host_syncs;
      node.append(plans.length > 0 ? el("div", { class: "nv-tools" }, planPicker(), field) : "", el("div", { class: "nv-lanes", style: "padding:16px 24px 32px" },
        el("section", { "aria-label": "Counts" }, el("h2", { class: "nv-h2" }, "Synchronisations across streams, counted four ways"), el("p", { class: "nv-sub" }, "Fork from and join to the capture stream, and edges inside one call, are counted apart."), counts),
        el("section", { class: "nv-card", style: "margin-bottom:16px" }, el("h2", null, "Where eager made the host wait"),
          host === null ? el("p", null, "Eager was not profiled, so its host synchronisations are unknown.") : host.length ? table([["Kind"], ["Count", 1], ["Total", 1], ...(phased ? [["Phase"]] : []), ["Source line"], ["What to do"]], host.map((row) => el("tr", null, el("td", null, row.kind), el("td", { class: "nv-num" }, count(row.count)), el("td", { class: "nv-num" }, row.total), phased && el("td", null, row.phase ? phaseChip(row.phase) : "–"), el("td", null, row.source || "unknown"), el("td", null, row.hint)))) : el("p", null, facts.host ? "None: on the host device there is nothing to wait for." : "None was seen in the profiled iteration.")),
        plans.length > 0 && el("section", { class: "nv-card" }, el("h2", null, "Planned synchronisations"), list)));
      fill();
      onSelect.push(() => { fill(); const row = list.querySelector(".nv-on"); if (row && !node.hidden) row.scrollIntoView({ block: "nearest" }); });
      onPlan.push(() => { view.limit = 200; fill(); });
      panes.syncs.onshow = () => { const row = list.querySelector(".nv-on"); if (row) row.scrollIntoView({ block: "center" }); };
    }

    // ---------------------------------------------------------------- Source
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
    function buildSource(node) {
      const source = data.source;
      if (!source) { node.append(el("div", { class: "nv-empty" }, "No call of this report knows its source line, so there is no code to show.")); return; }
      const { functions, sides, figures } = source, both = sides.length > 1, rows = unpackAll(source.lines, data), known = figures.map(([key]) => key), timed = known.length > 0;
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
        rows.after[at] > 0 && el("span", { class: "nv-tag nv-warn", title: "In eager the host waited for the device after this line, before the next call" }, `then ${times(rows.after[at], "host wait")}, ${time(rows.after_wait[at])}`),
        rows.planned[at] > 0 && el("span", { class: "nv-tag", title: "Waits for another stream, in the chosen plan, before calls of this line" }, times(rows.planned[at], "planned wait"))];
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

    // ---------------------------------------------------------------- Memory
    const bytes = (value) => { let at = 0; while (value >= 1023.5 && at < 5) { value /= 1024; at++; } return `${!at || value >= 99.95 ? value.toFixed(0) : value.toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][at]}`; };
    let curves = null;
    function buildMemory(node) {
      const memory = data.live, known = facts.memory;
      const held = known ? el("section", { class: "nv-card", style: "margin-bottom:16px" }, el("h2", null, "Measured and planned"), known.facts.length > 0 && definitions(known.facts), known.engines.length > 0 && el("div", { style: "margin-top:12px" }, engineTable(known.engines))) : "";
      if (!memory) { node.append(el("div", { class: "nv-lanes", style: "padding:16px 24px 32px" }, el("p", { class: "nv-sub" }, "What the results of each call hold is not known: this report does not say which memory its calls touch."), held)); return; }
      const shownRuns = memory.runs.slice(0, memory.alike ? 1 : 2).map((run) => ({ ...run, ...unpackAll(run.columns, data) }));
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
      const tableFor = (run) => (run.eager ? eager : calls), marksFor = (run) => (run.eager ? markedEager : marked), pick = (run, call) => (run.eager ? selectEager(call, "memory") : select(call, "memory"));
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
      const final = shownRuns[shownRuns.length - 1], wide = () => final.board.canvas.clientWidth, tool = (text, label, act) => el("button", { class: "nv-plain", type: "button", "aria-label": label, title: label, onclick: act }, text);
      body.append(held, el("section", { class: "nv-card" }, el("h2", null, "Not in the curve"), definitions(memory.fixed), el("p", { class: "nv-under" }, memory.note)));
      node.append(
        el("div", { class: "nv-tools" }, search("Search the memory curve", (call) => select(call, "search")), tool("−", "Zoom out", () => zoomAt(1 / 1.6, wide() / 2, wide())), tool("+", "Zoom in", () => zoomAt(1.6, wide() / 2, wide())), tool("Fit", "Show all calls", () => setRange(0, 1)), tool("Peak", "Select the call at the peak", () => pick(final, final.call[final.peak_at])), el("span", { class: "nv-push" }, "click a call; drag to move, Ctrl and wheel to zoom")),
        el("div", { class: "nv-legend" }, el("span", null, el("i", { class: "nv-key", style: "background:var(--work)" }), `the ${BANDS} largest results that hold the peak, numbered`), el("span", null, el("i", { class: "nv-key", style: "background:var(--remainder)" }), "all other results"), el("span", null, "▼ peak"), shownRuns.some((run) => run.marks.length > 0) && el("span", null, el("i", { class: "nv-edge nv-sync" }), "measured or planned"), el("span", null, el("i", { class: "nv-key", style: "background:var(--select)" }), "selected call, and how long its results live"), phaseLegend()), body);
      onSelect.push(() => { for (const fillList of lists) fillList(); refresh(); });
      panes.memory.onshow = refresh;
      curves = { range: () => [view.from, view.to], point: (at, call) => { const run = shownRuns[at], frame = run.board.canvas.getBoundingClientRect(); return { x: frame.left + LEFT + (((run.place.get(call) + 0.5) / run.call.length - view.from) / (view.to - view.from)) * (frame.width - LEFT - RIGHT), y: frame.top + frame.height / 2 }; } };
    }

    // ---------------------------------------------------------------- frame
    const tabs = el("div", { class: "nv-tabs", role: "tablist", "aria-label": "Views" }), holder = el("div", { class: "nv-panes" });
    for (const [name, title, build, fill] of [["summary", "Summary", buildSummary], ["overhead", "Overhead", buildOverhead, 1], ["dag", "DAG", buildDag, 1], ["timeline", "Timeline", buildTimeline, 1], ["syncs", "Syncs", buildSyncs, 1], ["source", "Source", buildSource, 1], ["memory", "Memory", buildMemory, 1]]) {
      const tab = el("button", { role: "tab", type: "button", id: `nv-tab-${name}`, "aria-controls": `nv-pane-${name}`, "aria-selected": "false", tabindex: -1, onclick: () => { show(name); fillDetail(); } }, title);
      const node = el("div", { role: "tabpanel", id: `nv-pane-${name}`, "aria-labelledby": `nv-tab-${name}`, class: `nv-pane${fill ? " nv-fill" : ""}`, hidden: true, tabindex: 0 });
      panes[name] = { tab, node, build, title };
      tabs.append(tab); holder.append(node);
    }
    tabs.addEventListener("keydown", (event) => {
      const names = Object.keys(panes), at = names.indexOf(state.pane), next = { ArrowRight: at + 1, ArrowLeft: at - 1 + names.length, Home: 0, End: names.length - 1 }[event.key];
      if (next === undefined) return;
      event.preventDefault(); show(names[next % names.length]); panes[state.pane].tab.focus();
    });
    const wish = matchMedia("(prefers-color-scheme: dark)");
    let choice = "auto", around = "";
    const themeButton = el("button", { class: "nv-plain nv-theme", type: "button", onclick: () => { choice = { auto: "light", light: "dark", dark: "auto" }[choice]; applyTheme(); } });
    function applyTheme() {
      document.documentElement.dataset.theme = choice === "auto" ? around || (wish.matches ? "dark" : "light") : choice;
      themeButton.textContent = `Theme: ${choice}`;
      theme.cache = {};
      for (const key of Object.keys(patterns)) delete patterns[key];
      for (const request of redraw) request();
      for (const react of onPlan) react();
      fillDetail();
    }
    wish.addEventListener("change", applyTheme);
    root.replaceChildren(el("div", { class: "nv" },
      el("header", { class: "nv-head" }, el("h1", { class: "nv-title" }, el("b", null, facts.model), ` · ${fused ? `${facts.provenance.facts[0][1]}` : `${count(size)} calls`} · ${facts.context}`), themeButton, el("p", { class: `nv-verdict${facts.headline.verdict === "undecided" ? " nv-open" : ""}` }, facts.headline.lead, el("span", null, facts.headline.rest))),
      !facts.complete && el("div", { class: "nv-note", role: "status" }, "Interrupted: this report holds what was measured until then. What is missing is said where it would stand."),
      tabs, el("div", { class: "nv-main" }, holder, detail), live, tip));
    applyTheme();
    show(panes[root.dataset.pane] ? root.dataset.pane : "summary");
    return { select, selectEager, selectLine, memoryPoint: (run, call) => curves.point(run, call), memoryRange: () => curves.range(), show, selected: () => state.call, selectedEager: () => state.eager, marked: () => ({ calls: [...marked], eager: [...markedEager] }), dagPoint: (call) => dag.point(call), dagBoxes: () => dag.visible(), dagDrawn: () => dag.drawn(), dagColours: () => dag.colours(), timelinePoint: (run, call) => gantt.point(run, call), timelineRange: () => gantt.range(), zoomTimeline: (from, to) => gantt.zoom(from, to), derived: (name) => { const run = runs.find((one) => one.run === name); return { flights: run.flights, gaps: run.gaps }; }, setTheme: (name) => { around = name; applyTheme(); }, mountedMs: performance.now() - began };
  }
  return { mount };
})();
