/* Keys, and what the words in heads of tables mean. */
import { el } from "./tools.js";

const KEYS = [["/", "search in this view"], ["W, S", "zoom in, zoom out: DAG, Timeline, Memory"], ["A, D", "move left, move right"], ["0", "show everything, with the drawing in focus"], ["arrows", "walk from call to call, or move along the axis, with the drawing in focus; from tab to tab on a tab"], ["Esc", "close this, or clear the selection"], ["?", "this list"]];

/** Keys for the whole viewer; ``drive`` is what the view that is shown does with W, A, S and D. */
export function createKeys(app, drive) {
  const { panes, select, state } = app;
  const help = el("div", { class: "nv-help", role: "dialog", "aria-label": "Keys", hidden: true }, el("button", { class: "nv-close", type: "button", "aria-label": "Close", onclick: () => { help.hidden = true; } }, "×"), el("h2", { class: "nv-h2" }, "Keys"),
    el("dl", { class: "nv-facts" }, KEYS.map(([keys, what]) => [el("dt", null, el("kbd", null, keys)), el("dd", null, what)])));
  function press(event) {
    const typing = event.composedPath()[0].matches?.("input:not([type=checkbox]), select, textarea");
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    const key = event.key.toLowerCase(), field = panes[state.pane].node.querySelector("input[type=search]");
    if (typing && key !== "escape") return;
    if (key === "escape") { if (!help.hidden) help.hidden = true; else if (!typing) select(-1, "key"); else return; }
    else if (key === "?") help.hidden = !help.hidden;
    else if (key === "/" && field) field.focus();
    else if (!drive()?.[key]) return;
    else drive()[key]();
    event.preventDefault();
  }
  return { help, press };
}
