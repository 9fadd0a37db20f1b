/* Summary: the first screen; below it the report's tables, limit, environment. */
import { buildIcicle } from "./icicle.js";
import { buildTiles } from "./tiles.js";
import { card, definitions, described, el, table } from "./tools.js";

export function buildSummary(node, app) {
  const { data, facts } = app, { advice } = facts;
  const number = (text) => el("td", { class: "nv-num" }, text);
  const tabled = (found, wide = true) => found && card(found.title, wide, described(found));
  node.append(...buildTiles(app), el("div", { class: "nv-grid" },
    data.before && card("What got slower", true, el("p", null, `${data.before.text}. Calls whose time alone grew beyond what both vary by, most first; red in the picture above and in the timeline.`),
      data.before.slower.length > 0 && table([["Call"], ["Before", 1], ["Now", 1], ["Times", 1]], data.before.slower.slice(0, 12).map((row) => el("tr", null, el("td", null, app.callLink(row.call)), number(row.old), number(row.new), number(row.ratio))))),
    tabled(facts.speed),
    facts.computing.length > 0 && card("What computes", true, app.cost?.call.length > 0 && buildIcicle(app), facts.computing.map(described)),
    facts.warnings.length > 0 && card(`Before you believe a figure (${facts.warnings.length})`, true, el("ul", { class: "nv-list" }, facts.warnings.map((text) => el("li", null, text)))),
    tabled(facts.phases), tabled(facts.peers), tabled(facts.candidates), tabled(facts.synchronisations), tabled(facts.checks, false),
    !facts.profiled && card("Program and limit", false, definitions(facts.facts)),
    advice && card("What each change would gain", false, advice.changes.length > 0 && el("ul", { class: "nv-list" }, advice.changes.map((row) => el("li", null, `${row.what}: ${row.gain}`, el("span", { class: "nv-small" }, row.why)))), advice.replay && described(advice.replay)),
    tabled(facts.preparation, false),
    facts.profiled && card("What was profiled", false, definitions(facts.profiled.facts)),
    facts.profiled && card("Not in this report", false, el("ul", { class: "nv-list" }, facts.profiled.absent.map((row) => el("li", null, `${row.what}: ${row.why}`)))),
    card("Environment", false, definitions(facts.environment))));
}
