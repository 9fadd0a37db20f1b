"""Every committed notebook runs from top to bottom on this machine, and was committed with its outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs nbformat: make test installs it")
NotebookClient = pytest.importorskip("nbclient", reason="needs nbclient: make test installs it").NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(FOLDER)}}).execute()
    assert not any("widget" in kind for kind in _kinds(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_with_outputs_that_name_no_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in code)
    assert all(cell.execution_count for cell in code)
    assert "text/html" in _kinds(notebook)
    text = path.read_text()
    assert "/home/" not in text
    assert "/root/" not in text
    assert len(text) < 2_000_000


def _kinds(notebook: Any) -> set[str]:
    return {kind for cell in notebook.cells for output in cell.get("outputs", ()) for kind in output.get("data", {})}
