"""The docs' pictures: they leave nothing out silently, and are those that the committed results give."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import figures

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def test_the_committed_pictures_are_those_of_the_committed_results(tmp_path: Path) -> None:
    figures.main(["--out", str(tmp_path)])
    for name in ("scheduling-growth.svg", "policies.svg"):
        drawn, committed = (
            re.findall(r"<!-- (.*?) -->", (at / name).read_text(encoding="utf-8"), re.DOTALL)
            for at in (tmp_path, IMAGES)
        )
        assert drawn == committed, "run: python -m benchmarks.figures"
        assert any("python -m benchmarks." in text for text in drawn)
