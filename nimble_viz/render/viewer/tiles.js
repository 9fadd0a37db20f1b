/* The first screen: three tiles, and eager above the replay on one time axis. */
import { el, roundTime } from "./tools.js";

/** Code with a button that copies it; where a page may not, the code is selected instead. */
function pasteable(code) {
  const text = el("pre", { class: "nv-paste", tabindex: 0, "aria-label": "Code to paste" }, code);
  const copy = async () => {
    let done = await navigator.clipboard?.writeText(code).then(() => true, () => false);
    if (!done) { getSelection().selectAllChildren(text); done = document.execCommand("copy"); }
    button.textContent = done ? "Copied" : "Press Ctrl+C";
  };
  const button = el("button", { class: "nv-plain nv-copy", type: "button", onclick: copy }, "Copy");
  return el("div", { class: "nv-code-box" }, text, button);
}

/** What a time is spent on, in one bar with its parts named below. */
function spentBar({ rows, bound, basis }) {
  const colour = { host: "remainder", device: "work", input: "loader" }, most = rows.reduce((sum, row) => sum + row.ns, 0) || 1;
  return [el("p", { class: "nv-bound" }, bound), el("div", { class: "nv-stack nv-spent" }, rows.map((row) => el("i", { style: `width:${(100 * row.ns) / most}%;background:var(--${colour[row.key]})` }))),
    el("ul", { class: "nv-shares", title: `Shares ${basis}` }, rows.map((row) => el("li", { title: row.meaning }, el("i", { class: "nv-key", style: `background:var(--${colour[row.key]})` }), `${row.name} `, el("b", null, row.share), row.ns > 0 && ` ${row.text}`)))];
}

const tile = (name, title, { figure, lines, code }, ...inside) => el("section", { class: `nv-card nv-tile nv-tile-${name}` },
  el("h2", null, title), el("p", { class: "nv-figure" }, figure), inside,
  lines.length > 0 && el("ul", { class: "nv-said" }, lines.map((line) => el("li", null, line[0].toUpperCase() + line.slice(1)))), code && pasteable(code));

export function buildTiles(app) {
  const { now, prepared, next, picture } = app.facts.tiles;
  const decided = prepared.good && { faster: "nv-tick", slower: "nv-cross" }[prepared.verdict];
  const verdict = [el("span", { class: decided || "nv-open" }, prepared.figure)];
  if (prepared.verdict) verdict.push(el("span", { class: "nv-beside" }, `${{ "no difference": "from", undecided: "against" }[prepared.verdict] ?? "than"} eager, ${prepared.interval}`));
  return [
    el("div", { class: "nv-tiles" },
      tile("now", "How fast now, and what it waits for", { ...now, figure: [el("span", null, now.figure), el("span", { class: "nv-beside" }, now.of)] }, now.rows.length > 0 && spentBar(now)),
      tile("prepared", "How fast prepared", { ...prepared, figure: verdict }, prepared.of && el("p", { class: "nv-bound" }, prepared.of)),
      tile("next", "What to do next", next)),
    buildPicture(app, picture),
  ];
}

/** Both runs, lane by lane; a click opens the timeline. */
function buildPicture(app, { runs: shown, note }) {
  const { runs, slower, theme, streamFill, surface, show, showTip } = app, box = el("section", { class: "nv-card nv-wide nv-picture" });
  const drawn = shown.map((one) => ({ ...one, line: runs.find((run) => run.run === one.run) })), tall = (lanes) => (lanes > 12 ? 2 : lanes > 4 ? 5 : 9), step = (lanes) => tall(lanes) + (lanes > 12 ? 0.5 : 2);
  const lanesOf = ({ line }) => { const used = [...new Set(line.lane)].sort((a, b) => a - b); return used.length ? used : [0]; };
  const heightOf = (one) => Math.max(lanesOf(one).length * step(lanesOf(one).length), 16), extent = Math.max(...drawn.map((one) => one.ns), 1), top = 6, apart = 12;
  box.append(el("h2", null, drawn.length > 1 ? "Eager above the prepared run, on one time axis" : drawn.length ? `${drawn[0].label[0].toUpperCase()}${drawn[0].label.slice(1)}, on a time axis` : "Timeline", el("span", null, note)));
  if (!drawn.length) return box;
  const height = top + drawn.reduce((sum, one) => sum + heightOf(one) + apart, 0) + 14;
  const board = surface(box, `${drawn.map((one) => `${one.label} ${one.text}`).join(", ")}; opens the timeline`, (paint, width) => {
    const left = width < 620 ? 62 : 118, right = 66, room = width - left - right, at = (ns) => left + (ns / extent) * room, sans = theme.value("sans");
    let y = top;
    paint.font = `12px ${sans}`; paint.textBaseline = "middle";
    for (const one of drawn) {
      const { line } = one, lanes = lanesOf(one), thick = tall(lanes.length), high = heightOf(one), place = new Map(lanes.map((lane, k) => [lane, y + k * step(lanes.length)]));
      paint.fillStyle = theme.value("text"); paint.textAlign = "left"; paint.fillText(one.label, 0, y + high / 2, left - 8); paint.fillText(one.text, at(one.ns) + 7, y + high / 2);
      paint.fillStyle = theme.value("idle");
      for (const start of place.values()) paint.fillRect(left, start, Math.max(at(one.ns) - left, 1.5), thick);
      line.start.forEach((start, span) => {
        const lane = line.lane[span], { kind } = line.lanes[lane], from = at(start * one.scale);
        paint.fillStyle = kind === "host" && one.run === "eager" ? theme.value("remainder") : one.run === "eager" ? theme.value("work") : slower.has(line.call[span]) && one.run !== "before" ? theme.value("bad") : streamFill(paint, lane);
        paint.fillRect(from, place.get(lane), Math.max(line.length[span] * one.scale * (room / extent), 0.6), thick);
      });
      y += high + apart;
    }
    paint.fillStyle = theme.value("faint"); paint.strokeStyle = theme.value("line-strong"); paint.lineWidth = 1; paint.font = `11px ${sans}`; paint.textAlign = "center";
    const rough = extent / Math.max(room / 110, 1), ten = 10 ** Math.floor(Math.log10(rough)), gap = [1, 2, 5, 10].map((k) => k * ten).find((value) => value >= rough);
    for (let tick = 0; tick <= extent; tick += gap) { paint.beginPath(); paint.moveTo(at(tick), y - 7); paint.lineTo(at(tick), y - 3); paint.stroke(); paint.fillText(tick ? roundTime(tick) : "0", at(tick), y + 5); }
  }, height);
  board.canvas.addEventListener("click", () => show("timeline"));
  board.canvas.addEventListener("keydown", (event) => { if (event.key === "Enter") show("timeline"); });
  board.canvas.addEventListener("pointermove", (event) => showTip(event, ["Open the timeline", "what ran when, call by call"]));
  board.canvas.addEventListener("pointerleave", () => showTip());
  return box;
}
