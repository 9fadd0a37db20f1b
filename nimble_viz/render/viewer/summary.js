/* Summary: the first screen; below it speeds, checks, plans, limit, environment. */
import { buildIcicle } from "./icicle.js";
import { buildTiles } from "./tiles.js";
import { card, count, definitions, el, table } from "./tools.js";

export function buildSummary(node, app) {
  const { data, facts, phased, phaseChip, kept } = app;
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
    const heads = [["Plan"], ["Streams", 1], ["Syncs", 1], ["Median", 1], ["Over one stream", 1], ["Prepared in", 1], ["Break-even", 1], ["Simulated", 1], ["Memory", 1], ["Outputs"], ["Outcome"]];
    const line = (row) => el("tr", { class: row.wrong ? "nv-wrong" : null },
      el("td", null, named(row), row.wrong && el("span", { class: "nv-tag nv-warn" }, "outputs differ"), !row.stable && el("span", { class: "nv-tag nv-warn" }, "unstable")),
      number(row.streams ? count(row.streams) : ""), number(row.streams ? count(row.syncs) : ""), number(row.median, row.quartiles && el("span", { class: "nv-small" }, row.quartiles)), el("td", { class: "nv-num" }, ratio(row.single)),
      number(row.cost), number(row.pays), number(row.simulated), number(row.memory),
      el("td", null, el("span", { class: row.wrong ? "nv-cross" : row.equal ? "nv-tick" : "" }, row.wrong ? "✗ differ" : row.equal ? "✓ equal" : row.outputs), row.error && el("span", { class: "nv-small" }, `error ${row.error}`)),
      el("td", { class: row.wrong ? "nv-cross" : null }, row.outcome));
    return [el("p", null, `Captured while preparing, compared with eager, and timed in turn; quartiles below each median, 99.5% intervals below each ratio. Over one stream${facts.candidates.fused && facts.candidates.single === "one stream" ? ": of eager's own kernels" : ""}. Prepared in: making the kernels and capturing; break-even: after so many calls, against eager. A plan whose outputs differ cannot be chosen.`),
      el("div", { class: "nv-tried" }, table(heads, rows.map(line))),
      folded.map((text) => el("p", { class: "nv-under" }, `${text}.`))];
  };
  const plansTable = () => {
    const what = facts.host ? "Calls" : "Kernels", seen = facts.plans.some((entry) => entry.observed);
    return [el("p", null, `Width of the DAG: ${facts.width}. So many calls at most need not wait for each other; no schedule has more calls in flight.`),
      table([["Plan"], ["Streams", 1], ...(seen ? [[`${what} in flight`, 1]] : []), ...data.sync_counts.map(([, name]) => [name, 1])], facts.plans.map((entry) => el("tr", null,
        el("td", { class: "nv-plan" }, named(entry), kept(entry), el("span", { class: "nv-small", style: "white-space:normal" }, `promises: ${entry.promises}${entry.added_order ? `; adds ${count(entry.added_order)} orders` : ""}`)),
        number(count(entry.streams)), seen && (entry.observed ? number(`${count(entry.observed.most)} at most`, el("span", { class: "nv-small" }, `${entry.observed.mean} on average`), !entry.observed.reliable && el("span", { class: "nv-tag nv-warn" }, "unreliable")) : number(null)),
        ...data.sync_counts.map(([key]) => (entry[key] === null ? number(facts.planned ? null : "not read") : optional(entry[key]))))))];
  };
  const rivals = (rows) => [el("p", null, `Other ways to run the model, timed in turn with ours: ${facts.best || "none"}. Above 1x ours is faster; the 99.5% interval below a ratio alone decides. Prepared in: from the model to its first finished result.`),
    el("div", { class: "nv-tried" }, table([["Peer"], ["Median", 1], ["Ours over it", 1], ["Prepared in", 1], ["Outputs"], ["Outcome"]], rows.map((row) => el("tr", { class: row.wrong ? "nv-wrong" : null },
      el("td", null, row.name, !row.stable && el("span", { class: "nv-tag nv-warn" }, "unstable")), number(row.median), el("td", { class: "nv-num" }, ratio(row.ratio)), number(row.prepare),
      el("td", null, row.median ? el("span", { class: row.wrong ? "nv-cross" : row.equal ? "nv-tick" : "" }, `${row.wrong ? "✗ " : row.equal ? "✓ " : ""}${row.outputs}`) : "–"),
      el("td", { class: row.ratio && row.ratio.verdict !== "faster" ? mark(row.ratio) : null }, row.outcome, row.note && row.note !== row.outcome && el("span", { class: "nv-small", style: "white-space:normal" }, row.note))))))];
  const nextHelp = ({ changes, replay }) => {
    const parts = (split) => split && table([[split.run], [""], ["Time", 1], ["Share", 1]], split.rows.map((row) => el("tr", null, el("td", null, row.name, el("span", { class: "nv-small", style: "white-space:normal" }, row.meaning)), el("td", { style: "width:24%" }, el("div", { class: "nv-bar", style: `width:${row.share.startsWith("-") ? 0 : row.share};margin-top:7px` })), number(row.text), number(row.share))));
    return [changes.length > 0 && el("ul", { class: "nv-list" }, changes.map((row) => el("li", null, `${row.what}: ${row.gain}`, el("span", { class: "nv-small" }, row.why)))),
      replay && [parts(replay), el("p", { class: "nv-under" }, replay.note)]];
  };
  /** Of a profile of unmodified code the host's time alone is known. */
  const byPhase = ({ rows, runs: names }) => {
    const isolated = !facts.profiled, profiled = rows.some((row) => row.eager), drawn = isolated ? "cost_ns" : "eager_ns", most = rows.reduce((all, row) => Math.max(all, row[drawn]), 1);
    const said = [isolated && "Isolated: all calls of the phase, one by one; on the path: those on the critical path.", profiled && "Eager: host time under the profiler, with the share that is the framework's overhead.", names.length && "Replays: while any call of the phase ran; phases may run side by side."];
    return [el("p", null, said.filter(Boolean).join(" ")),
      table([["Phase"], ["Calls", 1], ...(isolated ? [["Isolated", 1]] : []), [""], ...(isolated ? [["On the path", 1]] : []), ...(profiled ? [["Eager", 1]] : []), ...names.map((name) => [name, 1])], rows.map((row) => el("tr", null, el("td", null, phaseChip(row.phase)), number(count(row.calls)), isolated && number(row.cost, row.share && el("span", { class: "nv-small" }, row.share)),
        el("td", { style: "min-width:60px;width:18%" }, el("div", { class: "nv-bar", style: `width:${(100 * row[drawn]) / most}%;margin-top:7px;background:var(--${row.phase})` })), isolated && number(row.path), profiled && number(row.eager, row.overhead && el("span", { class: "nv-small" }, `${row.overhead} overhead`)), row.replays.map((time) => number(time)))))];
  };
  const computes = ({ time, tables }) => tables.map(({ by, rows, rest }) => {
    const most = Math.max(...rows.map((row) => row.ns), 1), sized = rows.some((row) => row.sizes), head = (word) => word[0].toUpperCase() + word.slice(1);
    return [table([[head(by)], ["Calls", 1], [""], [head(time), 1], ["Share", 1], ["Host overhead", 1], ...(sized ? [["Longest reads"]] : [])], rows.map((row) => el("tr", null,
      el("td", null, row.name), number(count(row.calls)), el("td", { style: "min-width:60px;width:22%" }, el("div", { class: "nv-bar", style: `width:${(100 * row.ns) / most}%;margin-top:7px` })),
      number(row.time), number(row.share), number(row.overhead), sized && el("td", null, row.sizes)))), rest && el("p", { class: "nv-under" }, rest)];
  });
  const steps = facts.preparation, most = Math.max(...steps.map((step) => step.ns), 1);
  node.append(...buildTiles(app), el("div", { class: "nv-grid" },
    data.before && card("What got slower", true, el("p", null, `${data.before.text}. Calls whose time alone grew beyond what both vary by, most first; red in the picture above and in the timeline.`),
      data.before.slower.length > 0 && table([["Call"], ["Before", 1], ["Now", 1], ["Times", 1]], data.before.slower.slice(0, 12).map((row) => el("tr", null, el("td", null, app.callLink(row.call)), number(row.old), number(row.new), number(row.ratio))))),
    !facts.profiled && card("Speed", true,
      el("p", null, facts.speed.length > 0 && `Every ratio: ${facts.context}. Medians of runs taken in turn; above 1x is faster; the 99.5% interval below a ratio alone decides. Distance to the limit: how many times as long a replay takes as the ${facts.limit ? `limit that no schedule of its calls can beat, here ${facts.limit.text} (${facts.limit.bound})` : "longest path of isolated calls, which no schedule can beat"}.`),
      facts.speed.length ? el("div", { class: "nv-speed" }, table([["Run"], [""], ["Median", 1], ["Spread", 1], ["Over eager", 1], ["Over one-stream", 1], ["Distance to the limit", 1], ["Samples", 1]], speed)) : el("p", null, facts.planned ? "This is a plan: nothing was run, so nothing was measured." : "Nothing was measured.")),
    facts.computing && card("What computes", true, app.cost?.call.length > 0 && buildIcicle(app), ...computes(facts.computing)),
    facts.warnings.length > 0 && card(`Before you believe a figure (${facts.warnings.length})`, true, el("ul", { class: "nv-list" }, facts.warnings.map((text) => el("li", null, text)))),
    phased && card(facts.profiled ? "One iteration by phase" : "The training step by phase", true, ...byPhase(facts.phases)),
    facts.peers.length > 0 && card("Against peers", true, ...rivals(facts.peers)),
    facts.candidates && card("Plans that were tried", true, ...tried(facts.candidates)),
    !facts.profiled && card("Plans and synchronisations", true, facts.plans.length
      ? plansTable()
      : el("p", null, "No plan was made.")),
    !facts.planned && !facts.profiled && card("Same outputs as eager?", false, facts.checks.length
      ? [el("p", null, "Fresh inputs; worst relative error over the outputs. Sensitivity: how far eager's own outputs differ between two inputs."), table([["Replay"], ["Verdict"], ["Error", 1], ["Tolerance", 1], ["Sensitivity", 1]], facts.checks.map((check) => el("tr", null, el("td", null, check.run), el("td", null, el("span", { class: check.passed ? "nv-tick" : "nv-cross" }, check.passed ? "✓ equal" : check.differs ? "✗ differs" : "✗ not shown"), check.reason && el("span", { class: "nv-small", style: "white-space:normal" }, check.reason)), el("td", { class: "nv-num" }, check.error), el("td", { class: "nv-num" }, check.tolerance), el("td", { class: "nv-num" }, check.effect)))), facts.checks.map((check) => check.reference && el("p", { class: "nv-under" }, `${check.run}: ${check.reference}.`))]
      : el("p", null, "Outputs were not compared.")),
    !facts.profiled && card("Program and limit", false, definitions(facts.facts)),
    facts.advice && card("What each change would gain", false, ...nextHelp(facts.advice)),
    !facts.profiled && card("Preparation", false, steps.length ? table([["Step"], [""], ["Time", 1]], [...steps.map((step) => el("tr", null, el("td", null, step.name), el("td", { style: "width:40%" }, el("div", { class: "nv-bar", style: `width:${(100 * step.ns) / most}%;margin-top:7px` })), el("td", { class: "nv-num" }, step.text))), el("tr", null, el("td", null, el("b", null, "Total")), el("td"), el("td", { class: "nv-num" }, el("b", null, facts.preparation_total)))]) : el("p", null, "Preparation was not timed.")),
    facts.profiled && card("What was profiled", false, definitions(facts.profiled.facts)),
    facts.profiled && card("Not in this report", false, el("ul", { class: "nv-list" }, facts.profiled.absent.map((row) => el("li", null, `${row.what}: ${row.why}`)))),
    card("Environment", false, definitions(facts.environment))));
}
