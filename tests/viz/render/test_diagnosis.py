"""A diagnosis in the terminal and as JSON."""

from __future__ import annotations

import json

import pytest

from nimble_viz.render.diagnosis import Blocker, Diagnosis

HOSTILE = "<script>\x1b[31m&\u202e"
BLOCKER = Blocker(
    "values-read-with-item", ".item()", "reads", "keep it", "net.0", "model.py", 3, "y = x.item()", (4, 12), times=2
)


def test_the_mark_stands_below_the_code() -> None:
    lines = str(Diagnosis("Net", (BLOCKER,))).splitlines()
    at = next(number for number, line in enumerate(lines) if "y = x.item()" in line)
    assert lines[at].index("x.item()") == lines[at + 1].index("^")
    assert lines[at + 1].count("^") == len("x.item()")
    assert "where    net.0, model.py:3 (2 times)" in lines[at + 2]
    assert "docs/troubleshooting.md#values-read-with-item" in lines[at + 4]


@pytest.mark.parametrize("width", [60, 100])
def test_of_long_lines_the_marked_part_is_shown(width: int) -> None:
    code = f"{'a + ' * 60}x.item()"
    one = Blocker("inputs", "", "w", "i", code=code, mark=(240, 248))
    lines = Diagnosis("Net", (one,)).to_text(width).splitlines()
    at = next(number for number, line in enumerate(lines) if "x.item()" in line)
    assert lines[at].index("x.item()") == lines[at + 1].index("^")
    assert max(map(len, lines)) <= width


def test_nothing_that_a_terminal_would_obey() -> None:
    one = Blocker("inputs", HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, 1, HOSTILE, (0, 3), HOSTILE)
    found = Diagnosis(HOSTILE, (one,), (HOSTILE,))
    for text in (str(found), found.to_json()):
        assert not set(text) & {"\x1b", "\u202e"}


def test_json_holds_everything() -> None:
    whole = json.loads(Diagnosis("Net", (BLOCKER,), ("a note",)).to_json())
    assert (whole["ok"], whole["notes"], whole["blockers"][0]["mark"]) == (False, ["a note"], [4, 12])
    assert whole["blockers"][0]["link"] == BLOCKER.link
