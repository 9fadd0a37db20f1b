"""What a newcomer runs first: short, and with something to open at the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_is_short_and_leads_to_its_pages(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "examples.demo"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(ended.stdout.splitlines()) <= 40
    pages = [Path(path) for path in re.findall(r"Page: (.*)", ended.stdout)]
    assert [page.parent for page in pages] == [tmp_path, tmp_path]
    assert "GoogLeNet" in pages[1].read_text(encoding="utf-8")
    assert "outputs equal eager's" in ended.stdout
