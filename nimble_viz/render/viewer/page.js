/* The viewer as a page: its data lies beside it, and its address says what is shown: ``#view=timeline&call=20``. */
import { decode, mount } from "./main.js";

const place = document.getElementById("nimble-viewer");
const packed = Uint8Array.from(atob(document.getElementById("nimble-data").textContent), (one) => one.charCodeAt(0));
const viewer = mount(place, await decode(packed), { pane: place.dataset.pane });
if (window.nimbleTheme) viewer.setTheme(window.nimbleTheme); // said before there was a viewer
if (location.protocol !== "about:") { // a frame in a notebook has no address to link to
  const go = () => {
    const said = new URLSearchParams(location.hash.slice(1)), call = Number(said.get("call") ?? NaN), eager = Number(said.get("eager") ?? NaN);
    if (eager >= 0) viewer.selectEager(eager, "link"); else if (call >= 0) viewer.select(call, "link");
    if (said.get("view")) viewer.show(said.get("view"));
  };
  const note = () => {
    const { calls, eager } = viewer.marked(), call = viewer.selected(), said = [`view=${viewer.pane()}`];
    if (calls.length === 1) said.push(`call=${call}`); else if (eager.length === 1) said.push(`eager=${eager[0]}`);
    history.replaceState(null, "", `#${said.join("&")}`);
  };
  go();
  viewer.onSelect.push(note); viewer.onPane.push(note);
  addEventListener("hashchange", go);
}
window.nimbleViewer = viewer;
