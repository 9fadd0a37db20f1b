"""Every committed notebook runs from top to bottom on this machine, and was committed with its outputs."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs nbformat: make test installs it")
NotebookClient = pytest.importorskip("nbclient", reason="needs nbclient: make test installs it").NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ADDRESS = r"""["']?(?:https?:)?//"""
MOST_CELLS = 20
LOADED = re.compile(
    rf"""\bsrc\s*=\s*{ADDRESS}|<link[^>]*\bhref\s*=\s*{ADDRESS}|\bimport\s*(?:\(|url\()?\s*{ADDRESS}"""
    rf"""|\b(?:require|fetch)\(\[?\s*{ADDRESS}"""
)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize(
    "path",
    [path if path.stem == "quickstart" else pytest.param(path, marks=pytest.mark.slow) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(FOLDER)}}).execute()
    assert not any("widget" in kind for kind in _kinds(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_with_outputs_that_name_no_machine_and_need_no_network(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    assert all(cell.execution_count for cell in code)
    assert [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"] == []
    text = path.read_text()
    assert "/home/" not in text
    assert "/root/" not in text
    assert len(text) < 2_000_000
    # In the notebook and in the page that nbconvert makes of it: nothing is loaded, no script from elsewhere draws.
    pages = [html.unescape(output.get("data", {}).get("text/html", "")) for output in outputs]
    assert any(pages)
    assert [found[0] for page in pages for found in LOADED.finditer(page)] == []
    assert not any("plotly" in kind for kind in _kinds(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_short(path: Path) -> None:
    assert len(nbformat.read(path, as_version=4).cells) <= MOST_CELLS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere_and_the_readme_here(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert "://" in target or (FOLDER / target).exists(), target
    assert f"(notebooks/{path.name})" in (FOLDER.parent / "README.md").read_text(encoding="utf-8")


def test_what_is_loaded_is_seen() -> None:
    for page in (
        '<script type="module">import "https://a.b/c"</script>',
        "<script charset=utf-8 src='https://a.b/c.js'></script>",
        '<link rel="stylesheet" href="//a.b/c.css">',
        "<style>@import url(https://a.b/c.css)</style>",
        "<script>require(['https://a.b/c'])</script>",
    ):
        assert LOADED.search(page), page
    assert not LOADED.search('<a href="https://a.b/c">seen when asked for</a> <img src="data:image/png;base64,AA==">')


def _kinds(notebook: Any) -> set[str]:
    return {kind for cell in notebook.cells for output in cell.get("outputs", ()) for kind in output.get("data", {})}
