"""The site of docs/ builds without a warning, holds every page, finds words, and loads nothing from elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return folder


def test_every_page_is_there_and_found(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"pypi"} | {"index"}
    assert {path.stem for path in site.glob("*.html")} == pages | {"404"}
    found = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert {one["location"].partition(".html")[0] for one in found} == pages
    assert any("programmatic dependent launch" in one["text"] for one in found)


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(https?:)?//"
    assert re.search(loaded, '<script src="https://a.b/c.js">')
    assert [page.name for page in site.glob("*.html") if re.search(loaded, page.read_text(encoding="utf-8"))] == []
    assert not re.search(r"url\([\"']?(https?:)?//", (site / "code.css").read_text(encoding="utf-8"))


def test_the_first_page_is_the_readme_with_its_picture(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="images/replay.svg"' in page
    assert 'href="guide.html"' in page
    assert "<code>CONTRIBUTING.md</code>" in page


def test_the_picture_is_drawn_from_the_recording(tmp_path: Path) -> None:
    recording, drawn = ROOT / "examples" / "recordings" / "googlenet-h200.nimble", tmp_path / "replay.svg"
    script = ROOT / "docs" / "draw_replay.py"
    subprocess.run([sys.executable, str(script), str(recording), str(drawn)], cwd=ROOT, check=True, timeout=120)
    assert drawn.read_text(encoding="utf-8") == (ROOT / "docs" / "images" / "replay.svg").read_text(encoding="utf-8")
