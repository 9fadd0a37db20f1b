"""One self-contained page: style, script and data inline, no network, no dependencies."""

from __future__ import annotations

import gzip
import html
import json
import re
from base64 import b64encode
from functools import cache
from importlib import resources
from string import Template

from nimble_viz.analysis.view_data import view_data
from nimble_viz.render.text import plain_text
from nimble_viz.report.data import ReportData

__all__ = ["asset", "fragment", "joined", "packed", "page", "still"]

_IMPORT = re.compile(r'^import \{ [\w, ]+ \} from "\./([\w.]+)";\n', re.MULTILINE)
_WIDTH = 100

# A frame is told the system's theme, not that of the notebook around it: it asks, and the notebook's page answers.
# Where scripts run the frame is there, and the text below it need not be open.
_OUTSIDE = """<script>(() => {
const frame = document.currentScript.previousElementSibling.previousElementSibling;
frame.nextElementSibling.open = false;
const dark = () => {
  for (let at = frame.parentElement; at; at = at.parentElement) {
    const parts = (getComputedStyle(at).backgroundColor.match(/[\\d.]+/g) ?? []).map(Number);
    if (parts.length === 3 || parts[3] > 0.5) return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] < 102;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
};
let told;
const tell = () => { frame.contentWindow?.postMessage({ nimbleTheme: (told = dark()) ? "dark" : "light" }, "*"); };
addEventListener("message", (event) => {
  if (event.source && event.source === frame.contentWindow && event.data === "nimbleTheme?") tell();
});
const watch = new MutationObserver(() => setTimeout(() => { if (frame.isConnected && dark() !== told) tell(); }, 300));
for (const node of [document.documentElement, document.body]) watch.observe(node, { attributes: true });
})()</script>"""
# A widget without its kernel is an error in JupyterLab, which shows nothing else of the output that holds it. What
# stands in for it is an output of its own, and shown where no widget comes up.
_INSTEAD = """<script>(() => {
const still = document.currentScript.previousElementSibling, began = performance.now();
const around = still.closest(".jp-OutputArea") ?? document;
const look = () => {
  const outputs = [...around.querySelectorAll(".jp-OutputArea-child")].filter((one) => !one.contains(still));
  const dead = outputs.filter((one) => one.innerText?.includes("Error displaying widget"));
  for (const one of dead) one.style.display = "none";
  still.hidden = !!around.querySelector(".nimble-viewer") || (!dead.length && performance.now() - began < 2500);
};
const watch = new MutationObserver(() => { if (still.isConnected) look(); });
watch.observe(around, { childList: true, subtree: true });
setTimeout(look, 2600);
look();
})()</script>"""
_INSIDE = Template("""<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><script>(async () => {
const packed = Uint8Array.from(atob("$packed"), (one) => one.charCodeAt(0));
const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
const text = await new Response(stream).text();
document.open(); document.write(text); document.close();
addEventListener("message", (event) => {
  if (event.source !== parent || !event.data?.nimbleTheme) return;
  window.nimbleTheme = event.data.nimbleTheme;
  window.nimbleViewer?.setTheme(window.nimbleTheme);
});
parent.postMessage("nimbleTheme?", "*");
})()</script>""")


def page(report: ReportData, pane: str = "summary", before: ReportData | None = None) -> str:
    """Return an HTML document that shows all views, ``pane`` first, and ``before``; it opens from a file, offline."""
    template = Template(asset("template.html"))
    return template.substitute(
        title=html.escape(f"{report.model} – nimble_viz"),
        style=asset("viewer.css"),
        script=joined("page.js"),
        plain=html.escape(plain_text(report, _WIDTH, full=True)),
        data=b64encode(packed(report, before)).decode(),
        pane=html.escape(pane),
    )


def fragment(report: ReportData, pane: str = "summary") -> str:
    """Return the page for a notebook: a sandboxed frame, with its first screen as text below it.

    The frame runs scripts in an origin of its own: it reaches neither the notebook's page nor the network. The page in
    it is packed, a fifth of its size, and follows the theme of the notebook's page.
    """
    title = html.escape(f"nimble_viz report of {report.model}")
    frame = b64encode(_gzip(page(report, pane))).decode()
    return (
        f'<iframe title="{title}" sandbox="allow-scripts" srcdoc="{html.escape(_INSIDE.substitute(packed=frame))}" '
        'style="width:100%;height:720px;border:1px solid rgba(128,128,128,.35);border-radius:8px" loading="lazy">'
        "</iframe><details open><summary>Summary as text</summary>"
        f"<pre>{html.escape(plain_text(report, _WIDTH))}</pre></details>{_OUTSIDE}"
    )


def still(report: ReportData) -> str:
    """Return ``fragment`` to stand in for the widget: hidden while that is there."""
    words = "Saved view of a report. Run its cell again for the linked one, which code can follow and drive."
    return f'<div class="nimble-still"><p><em>{words}</em></p>{fragment(report)}</div>{_INSTEAD}'


def packed(report: ReportData, before: ReportData | None = None) -> bytes:
    """Return what the viewer draws: JSON, gzipped."""
    return _gzip(json.dumps(view_data(report, before), separators=(",", ":"), ensure_ascii=False, allow_nan=False))


def _gzip(text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0)


# The viewer's files: there is nothing to build, and nothing to install.


def asset(name: str) -> str:
    """Return the text of one of the viewer's files."""
    return (resources.files("nimble_viz.render.viewer") / name).read_text(encoding="utf-8")


@cache
def joined(entry: str) -> str:
    """Return a module and all that it imports as one module without imports.

    A page that is opened from a file cannot import others, and a widget's code is one string. So the modules stand one
    after the other, each after those that it imports, without ``import`` lines and without the word ``export``. For
    that their top-level names differ, and an import is one line that names things of a file beside it.

    Args:
        entry: a file's name, ``"page.js"``.
    """
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        if name in texts:
            return
        text = asset(name)
        for needed in _IMPORT.findall(text):
            add(needed)
        texts[name] = re.sub(r"^export ", "", _IMPORT.sub("", text), flags=re.MULTILINE)

    add(entry)
    return "".join(texts.values())
