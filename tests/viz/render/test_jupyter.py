"""The magics, the report and the widget in a real JupyterLab, a real Notebook 7, and what nbconvert makes of them.

One server, one browser and one kernel serve the whole file: tests run cells of notebooks in it, as a user would.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.lab import Notebook, Server, chromium, jupyter_server, opened

pytestmark = pytest.mark.browser

SETUP = """
%load_ext nimble_viz
import time, torch
torch.set_num_threads(1)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))
        self.head = torch.nn.Linear(128, 8)

    def forward(self, x):
        return self.head(torch.cat([torch.relu(branch(x)) for branch in self.branches], 1))

def slow(x):
    time.sleep(0.2)
    return torch.relu(x)

model, x = Net().eval(), torch.randn(16, 32)
""".strip()
COMPARE = "%nimble model x -o report --policy nimble --tune off"
CELLS = {
    "setup": SETUP,
    "compare": COMPARE,
    "verdict": "from nimble_viz.analysis.tiles import tiles\nprint(tiles(report)['prepared']['figure'])",
    "board": "board = report.dashboard('dag')\nboard",
    "selected": "print(board.selected.calls, board.plan, board.dark)",
    "select": "board.select(2)",
    "stop": "%nimble slow x -o partial --policy nimble --tune off",
    "stop cell": "%%nimble\nprint('under way', flush=True)\nwhile True:\n    y = model(x)",
    "after": """
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
print(len(_global_forward_hooks), len(_global_forward_pre_hooks), _get_current_dispatch_mode_stack(), y.shape)
print(partial.complete, partial.model)
""".strip(),
    "again": "%nimble model x --policy nimble --tune off;\nprint('still works')",
}
NAMES = list(CELLS)
NOTEBOOK_7 = (
    r"^warning: Menu entry for command '[\w:-]+' is duplicated\. \(\S+/static/notebook/notebook_core\.",
    r"^warning: \[yjs#509\] Not same Y\.Doc \(\S+/static/notebook/",
    r"^uncaught: Command 'filebrowser:open-path' not registered\. \(\S+/static/notebook/notebook_core\.",
    r"^uncaught: Cannot read properties of undefined \(reading 'schema'\) \(\S+/static/notebook/notebook_core\.",
)
"""What Notebook 7.6 says of itself, of a notebook that holds ``1 + 1`` too. JupyterLab says nothing."""
_CDN = r"https://cdnjs\.cloudflare\.com/ajax/libs/(require\.js|mathjax)/"
NBCONVERT = (rf"^request: {_CDN}", rf"^error: Failed to load resource: net::ERR_INTERNET_DISCONNECTED \({_CDN}")
"""What the template of nbconvert asks the network for, for formulas and widgets, and does not get."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def server(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with jupyter_server(tmp_path_factory.mktemp("jupyter")) as started:
        started.write("lab.ipynb", list(CELLS.values()))
        yield started


@pytest.fixture(scope="module")
def lab(browser: Any, server: Server) -> Iterator[Notebook]:
    with opened(browser, server, "lab.ipynb") as notebook:
        assert "Error" not in notebook.run(0).inner_text()
        yield notebook


@pytest.fixture(scope="module")
def compared(lab: Notebook) -> Any:
    return lab.run(NAMES.index("compare"))


@pytest.fixture(scope="module")
def board(lab: Notebook, compared: Any) -> Any:
    shown = lab.run(NAMES.index("board")).locator(".nimble-viewer")
    shown.locator(".nv-title").wait_for(timeout=60_000)
    return shown


@pytest.fixture(scope="module")
def saved(lab: Notebook, board: Any, server: Server) -> dict[str, Any]:
    """The notebook file, with the report and the widget in it."""
    return lab.saved(server.folder / "lab.ipynb")


# -- the report without widgets ------------------------------------------------------------------------------------


def click_a_node_see_its_bar(area: Any) -> None:
    """In the frame of a report below ``area``: node to bar and row, and bar to node."""
    frame = area.frame_locator("iframe").first
    frame.locator("#nv-tab-dag").click()
    shown = frame.locator("body")
    inside = shown.element_handle().owner_frame()
    point = inside.evaluate("nimbleViewer.views.dag.point(4)")
    shown.click(position=point)
    assert inside.evaluate("nimbleViewer.selected()") == 4
    frame.locator("#nv-tab-overhead").click()
    assert frame.locator("#nv-pane-overhead .nv-on").first.get_attribute("data-call") == "4"
    frame.locator("#nv-pane-overhead button[data-call='2']").first.click()
    assert inside.evaluate("nimbleViewer.selected()") == 2
    assert "addmm" in frame.locator("aside").inner_text()


@pytest.mark.slow
def test_the_value_of_the_magic_is_a_linked_view(lab: Notebook, compared: Any) -> None:
    """Whatever was measured: on a busy machine one stream may be as fast as several, and be chosen."""
    shown = compared.frame_locator("iframe").locator(".nv-tile-prepared .nv-figure > span").first.inner_text()
    assert not compared.locator("pre:visible", has_text="prepared").count()
    click_a_node_see_its_bar(compared)
    assert shown == lab.run(NAMES.index("verdict")).inner_text().strip()
    assert lab.troubles == []


# -- the widget ----------------------------------------------------------------------------------------------------


def click_a_call(lab: Notebook, shown: Any, call: int) -> None:
    """Click a node of the widget's graph."""
    shown.scroll_into_view_if_needed()
    shown.locator("#nv-tab-dag").click()
    point = shown.evaluate(f"node => node.viewer.views.dag.point({call})")
    lab.page.mouse.click(point["x"], point["y"])
    assert shown.evaluate("node => node.viewer.selected()") == call


@pytest.mark.slow
def test_a_clicked_node_reaches_the_kernel_and_code_reaches_the_page(lab: Notebook, board: Any) -> None:
    click_a_call(lab, board, 4)
    assert lab.run(NAMES.index("selected")).inner_text().split() == ["(4,)", "nimble", "False"]
    lab.run(NAMES.index("select"))
    board.locator("aside h2", has_text="addmm").wait_for()
    assert board.evaluate("node => node.viewer.marked()") == {"calls": [2], "eager": [2]}
    board.locator("#nv-tab-overhead").click()
    assert board.locator("#nv-pane-overhead .nv-on").first.get_attribute("data-call") == "2"
    assert lab.troubles == []


@pytest.mark.slow
def test_keys_pressed_in_the_widget_are_not_the_notebooks(lab: Notebook, board: Any) -> None:
    cells = lab.page.locator(".jp-Notebook .jp-Cell").count()
    board.locator("#nv-tab-overhead").click()
    field = board.locator("#nv-pane-overhead input[type=search]")
    field.click()
    lab.page.keyboard.type("ddabx")  # deletes a cell, adds one above, one below, cuts one
    assert field.input_value() == "ddabx"
    field.fill("")
    assert lab.page.locator(".jp-Notebook .jp-Cell").count() == cells


@pytest.mark.slow
def test_a_widget_is_small_and_is_saved_from_inside(saved: dict[str, Any], lab: Notebook) -> None:
    assert lab.sent < 1_500_000


# -- themes, trust, size -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_both_follow_the_theme_of_jupyterlab(lab: Notebook, compared: Any, board: Any) -> None:
    inside = compared.frame_locator("iframe").locator("html")
    assert inside.get_attribute("data-theme") == board.get_attribute("data-theme") == "light"
    for name, theme in (("JupyterLab Dark", "dark"), ("JupyterLab Light", "light")):
        lab.theme(name)
        compared.frame_locator("iframe").locator(f"html[data-theme={theme}]").wait_for()
        lab.page.locator(f".nimble-viewer[data-theme={theme}]").wait_for()
    assert lab.troubles == []


@pytest.mark.slow
def test_an_untrusted_notebook_shows_text(browser: Any, server: Server, saved: dict[str, Any]) -> None:
    other = json.loads(json.dumps(saved))
    other["cells"][0]["source"] = "# made by somebody else"
    (server.folder / "untrusted.ipynb").write_text(json.dumps(other))
    with opened(browser, server, "untrusted.ipynb") as notebook:
        for name in ("compare", "board"):
            cell = notebook.cell(NAMES.index(name))
            cell.scroll_into_view_if_needed()
            words = cell.locator("pre:visible", has_text="prepared")
            words.wait_for()
            assert "eager, one call" in words.text_content()
            assert cell.locator("script").count() == 0
        assert notebook.troubles == []


@pytest.mark.slow
def test_a_saved_widget_without_its_kernel_shows_the_page(browser: Any, server: Server, saved: dict[str, Any]) -> None:
    (server.folder / "still.ipynb").write_text(json.dumps(saved))  # signed as it was saved, and so trusted
    with opened(browser, server, "still.ipynb") as notebook:
        cell = notebook.cell(NAMES.index("board"))
        cell.scroll_into_view_if_needed()
        cell.get_by_text("Saved view of a report").wait_for()
        assert "Error displaying widget" not in cell.inner_text()
        cell.frame_locator("iframe").locator("#nv-tab-dag").click()
        assert notebook.complaints("widget model not found") == []


@pytest.mark.slow
def test_the_page_is_not_seen_beside_the_widget(board: Any, lab: Notebook) -> None:
    assert lab.cell(NAMES.index("board")).locator(".nimble-still").is_hidden()


# -- interrupts ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_interrupts_leave_everything_usable(lab: Notebook) -> None:
    cell = lab.start(NAMES.index("stop"))
    cell.locator(".jp-OutputArea", has_text=re.compile(r"measure.* \d+/\d+")).wait_for(timeout=60_000)
    lab.interrupt()
    assert lab.ended(NAMES.index("stop"))
    assert "Interrupted" in cell.frame_locator("iframe").locator(".nv-note").inner_text()
    cell = lab.start(NAMES.index("stop cell"))
    cell.locator(".jp-OutputArea", has_text="under way").wait_for(timeout=60_000)
    lab.interrupt()
    assert lab.ended(NAMES.index("stop cell"))
    said = cell.locator(".jp-OutputArea").inner_text()
    assert "KeyboardInterrupt" in said
    assert "nimble_viz" not in said
    assert lab.run(NAMES.index("after")).inner_text().split("\n")[:2] == [
        "0 0 [] torch.Size([16, 8])",
        "False slow",
    ]
    assert "still works" in lab.run(NAMES.index("again")).inner_text()
    assert lab.troubles == []


# -- elsewhere -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_notebook_7_shows_what_the_kernel_has_and_runs_more(
    browser: Any, server: Server, saved: dict[str, Any]
) -> None:
    with opened(browser, server, "lab.ipynb", classic=True) as notebook:
        shown = notebook.cell(NAMES.index("board")).locator(".nimble-viewer")
        shown.locator(".nv-title").wait_for()
        click_a_call(notebook, shown, 3)
        click_a_node_see_its_bar(notebook.run(NAMES.index("compare")))
        assert notebook.complaints(*NOTEBOOK_7) == []


def test_nbconvert_html_works_offline(browser: Any, saved: dict[str, Any], tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat: make test installs it")
    nbconvert = pytest.importorskip("nbconvert", reason="needs nbconvert: make test installs it")
    made = nbformat.reads(json.dumps(saved), as_version=4)
    for theme in ("light", "dark"):
        text, _ = nbconvert.HTMLExporter(theme=theme).from_notebook_node(made)
        path = tmp_path / f"{theme}.html"
        path.write_text(text, encoding="utf-8")
        context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
        notebook = Notebook(context.new_page())
        notebook.watch(path.as_uri())
        notebook.page.goto(path.as_uri(), wait_until="domcontentloaded")
        for at, name in enumerate(("compare", "board")):
            cell = notebook.page.locator(".jp-Cell").nth(NAMES.index(name))
            cell.scroll_into_view_if_needed()
            cell.frame_locator("iframe").locator(f"html[data-theme={theme}]").wait_for()
            if not at:
                click_a_node_see_its_bar(cell)
        assert notebook.complaints(*NBCONVERT) == []
        context.close()
