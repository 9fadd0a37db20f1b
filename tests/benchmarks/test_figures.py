"""The docs' pictures: they leave nothing out silently, and are those that the committed results give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import figures

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def test_labels_keep_apart_and_near() -> None:
    places = [5.0, 1.0, 1.2, 9.0]
    moved = figures.apart(places, 1.0)
    assert moved == pytest.approx([5.0, 0.6, 1.6, 9.0])


def test_what_was_given_up_is_left_out() -> None:
    cases = [
        {"calls": 10, "s": {"a": 1.0}},
        {"calls": 20, "s": {"a": 2.0}},
        {"calls": 10, "s": {"a": 3.0}},
        {"calls": 20, "s": {"a": None}},
    ]
    assert figures.worst(cases, "calls", "s", "a") == [(10, 3.0)]


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
