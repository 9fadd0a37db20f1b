/* The viewer as a widget of a notebook's kernel: what is selected, drawn and simulated is linked both ways. */
import { decode, mount } from "./main.js";

/** Is what lies behind ``node`` dark? */
function darkBehind(node) {
  for (let at = node; at; at = at.parentElement ?? at.getRootNode().host) {
    const parts = (getComputedStyle(at).backgroundColor.match(/[\d.]+/g) ?? []).map(Number);
    if (parts.length === 3 || parts[3] > 0.5) return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] < 102;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Wait until ``node`` is shown: what is drawn fits its size. */
const shown = (node) => new Promise((done) => {
  const watch = new ResizeObserver(() => { if (node.clientWidth) { watch.disconnect(); done(); } });
  watch.observe(node);
});

const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

/** Make what anywidget asks for; ``style`` is the style sheet, which stays inside. */
export function widget(style) {
  async function render({ model, el: place }) {
    const host = place.appendChild(document.createElement("div")), sheet = document.createElement("style"), root = document.createElement("div");
    host.className = "nimble-viewer";
    sheet.textContent = style;
    root.className = "nv-root";
    host.attachShadow({ mode: "open" }).append(sheet, root);
    const [data] = await Promise.all([decode(model.get("_data")), shown(host)]);
    const policies = model.get("_what_if");
    const viewer = mount(root, data, {
      themed: host, guided: true, pane: model.get("_pane"),
      whatIf: { ...policies, simulate: (policy, streams) => model.send({ policy, streams }), remove: () => tell("simulated", null) },
    });
    const tell = (name, value) => { if (!same(model.get(name), value)) { model.set(name, value); model.save_changes(); } };
    const names = data.dag.plans.map((plan) => plan.policy);
    const hear = {
      selected: (value) => { if (!same(viewer.marked(), value)) viewer.selectAll(value.calls, value.eager, "code"); },
      plan: (value) => { const at = names.indexOf(value); if (at >= 0 && at !== viewer.plan()) viewer.setPlan(at); },
      dark: (value) => { if (value !== viewer.dark()) viewer.setTheme(value ? "dark" : "light"); },
      simulated: (value) => viewer.setSimulated(value),
    };
    viewer.onSelect.push(() => tell("selected", viewer.marked()));
    viewer.onPlan.push(() => { if (names.length) tell("plan", names[viewer.plan()]); });
    // Keys pressed in here are not JupyterLab's, which would cut a cell at an x; those with Ctrl, as to save, are. It
    // listens before any element does.
    const guard = (event) => host.toggleAttribute("data-lm-suppress-shortcuts", !event.ctrlKey && !event.metaKey);
    addEventListener("keydown", guard, true);
    const look = () => tell("dark", darkBehind(host.parentElement));
    const watch = new MutationObserver(() => setTimeout(() => { if (host.isConnected) look(); }, 300));
    for (const node of [document.documentElement, document.body]) watch.observe(node, { attributes: true });
    look();
    for (const [name, react] of Object.entries(hear)) {
      const told = () => react(model.get(name));
      model.on(`change:${name}`, (hear[name].told = told));
      if (name !== "simulated") told();
    }
    if (model.get("simulated")) viewer.setSimulated(model.get("simulated"), false);
    host.viewer = viewer; // for scripts, as nimbleViewer is in the page
    return () => { watch.disconnect(); removeEventListener("keydown", guard, true); for (const [name, react] of Object.entries(hear)) model.off(`change:${name}`, react.told); host.remove(); };
  }
  return { render };
}
