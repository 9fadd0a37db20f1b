/* One report as the views need it: columns as arrays, and what follows from them. Nothing here changes. */
import { count, stepsOf } from "./tools.js";

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
export const completeRun = (run) => { completeGaps(run); run.flights = flights(run); return run; };

/** ``data`` is what ``view_data`` makes: a table names its columns, which ``data.columns`` holds. */
export function readReport(data) {
  const columnsOf = (table) => Object.fromEntries(Object.entries(table).map(([name, at]) => [name, data.columns[at]]));
  const calls = columnsOf(data.calls);
  const work = columnsOf(data.work);
  const size = calls.label.length;
  // Overhead and the eager timeline count in eager calls; where nothing was fused, these are the program's own.
  const fused = data.eager !== null, eager = fused ? columnsOf(data.eager) : calls;
  const standsFor = Array.from({ length: size }, () => []), became = Array.from({ length: fused ? eager.label.length : 0 }, () => []);
  if (fused) { let at = 0; calls.stands.forEach((n, call) => { for (const end = at + n; at < end; at++) { standsFor[call].push(calls.for[at]); became[calls.for[at]].push(call); } }); }
  const graph = columnsOf(data.dag.columns);
  const plans = data.dag.plans.map((plan) => ({ ...plan, ...columnsOf(plan.columns) }));
  for (const plan of plans) plan.streams = plan.stream.reduce((most, stream) => Math.max(most, stream + 1), 0);
  const runs = data.timelines.map((line) => ({ ...line, ...columnsOf(line.columns), gaps: columnsOf(line.gaps) }));
  runs.forEach(completeRun);
  const cost = data.overhead && columnsOf(data.overhead.columns);
  const facts = data.summary, phased = facts.phases !== null;
  const critical = new Set(graph.critical), slower = new Set(data.before?.slower.map((row) => row.call));
  const timed = data.colours.some((one) => one.key === "time" && !one.why);
  const isEager = (run) => fused && run.run === "eager";
  const tableOf = (run) => (isEager(run) ? eager : calls);
  const before = Array.from({ length: size }, () => []), after = Array.from({ length: size }, () => []);
  graph.from.forEach((u, edge) => { if (graph.minimum[edge]) { const v = u + graph.reach[edge]; after[u].push(v); before[v].push(u); } });
  const together = new Set(data.overhead?.shared?.calls); // calls of the optimizer that eager does not make: one row for all
  const overheadOf = new Map(cost ? cost.call.map((call, row) => [call, row]) : []);
  const spansOf = (run) => {
    if (!run.byCall) { run.byCall = new Map(); run.call.forEach((call, span) => { if (call >= 0) { const list = run.byCall.get(call); if (list) list.push(span); else run.byCall.set(call, [span]); } }); }
    return run.byCall;
  };
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
  const lineKey = (file, line) => `${line} ${file}`, callsOn = new Map();
  eager.file.forEach((file, call) => { if (file) { const key = lineKey(file, eager.line[call]), list = callsOn.get(key); if (list) list.push(call); else callsOn.set(key, [call]); } });
  const codeAt = (file, line) => { const own = data.source && data.source.functions.find((one) => one.file === file && line >= one.first && line < one.first + one.text.length); return own ? own.text[line - own.first].trim() : ""; };
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
  return { data, calls, work, size, fused, eager, standsFor, became, graph, plans, runs, cost, facts, phased,
    critical, slower, timed, before, after, together, overheadOf, callsOn, isEager, tableOf, spansOf, nameOf,
    sourceOf, listed, origin, fate, whereabouts, planLabel, lineKey, codeAt, matches, columnsOf };
}
