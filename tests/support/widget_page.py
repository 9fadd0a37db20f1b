"""A page that shows a widget as a notebook does: its own code, and a model that keeps what it is told."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

from nimble_viz.render.widget import ReportWidget

_PAGE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<body style="background: {ground}; margin: 16px"><div id="place"></div>
<script type="module">
const bytes = (text) => new DataView(Uint8Array.from(atob(text), (one) => one.charCodeAt(0)).buffer);
const state = {state}, heard = new Map();
state._data = bytes(state._data);
window.sent = []; window.saved = [];
window.model = {{
  get: (name) => state[name],
  set: (name, value) => {{
    state[name] = value; window.saved.push(name);
    for (const react of heard.get(`change:${{name}}`) ?? []) react();
  }},
  save_changes: () => {{}},
  send: (what) => window.sent.push(what),
  on: (event, react) => heard.set(event, [...(heard.get(event) ?? []), react]),
  off: (event, react) => heard.set(event, (heard.get(event) ?? []).filter((one) => one !== react)),
}};
const code = {code};
const {{ default: widget }} = await import(URL.createObjectURL(new Blob([code], {{ type: "text/javascript" }})));
window.end = await widget.render({{ model, el: document.getElementById("place") }});
window.viewer = document.querySelector(".nimble-viewer").viewer;
</script>"""


def synced(widget: ReportWidget) -> dict[str, Any]:
    """What a page gets of a widget's traits, but its code."""
    state = widget.get_state()
    kept = {name: state[name] for name in ("_pane", "_what_if", "selected", "plan", "dark", "simulated")}
    return kept | {"_data": b64encode(state["_data"]).decode()}


def widget_page(widget: ReportWidget, *, dark: bool = False) -> str:
    """An HTML document with this widget in it; ``model`` and ``viewer`` are its globals."""

    def embedded(value: object) -> str:
        return json.dumps(value).replace("<", "\\u003c")

    code = embedded(widget.get_state()["_esm"])
    return _PAGE.format(state=embedded(synced(widget)), code=code, ground="#111" if dark else "#fff")
