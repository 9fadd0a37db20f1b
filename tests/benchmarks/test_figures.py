"""The docs' pictures: they leave nothing out silently, and are those that the committed results give."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import figures

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def test_a_speed_without_an_interval_is_a_point() -> None:
    known = {name: {"replay over single": {"value": 2.0, "low": 1.9, "high": 2.1}} for name in figures.MARKS}
    unknown = {"replay over single": {"value": 0.5, "verdict": "undecided"}}
    models = {"A, float32": {"policies": known | {"opara": unknown}, "auto": known["auto"]}}
    found = figures.speeds(models, "float32")
    assert found["A"]["nimble"] == (2.0, 1.9, 2.1)
    assert found["A"]["opara"] == (0.5, 0.5, 0.5)
    assert list(found) == ["A", figures.MEAN]
    assert figures.speeds(models, "float16") == {}


def test_the_committed_pictures_are_those_of_the_committed_results(tmp_path: Path) -> None:
    figures.main(["--out", str(tmp_path)])
    for name in ("scheduling-growth.svg", "policies.svg"):
        drawn, committed = (
            re.findall(r"<!-- (.*?) -->", (at / name).read_text(encoding="utf-8"), re.DOTALL)
            for at in (tmp_path, IMAGES)
        )
        assert drawn == committed, "run: python -m benchmarks.figures"
        assert any("python -m benchmarks." in text for text in drawn)
