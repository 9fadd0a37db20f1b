"""What the first screen of page and widget has to be."""

from __future__ import annotations

from typing import Any

FIRST_SCREEN = """(root) => {
  const box = (node) => { const { left, right, top, bottom } = node.getBoundingClientRect(); return { left, right, top, bottom }; };
  const pane = root.querySelector("#nv-pane-summary"), canvas = root.querySelector(".nv-picture canvas");
  const seen = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return { tiles: [...root.querySelectorAll(".nv-tile")].map(box), picture: box(canvas), pane: box(pane),
    sideways: pane.scrollWidth > pane.clientWidth, colours: new Set(new Uint32Array(seen.buffer)).size };
}"""  # noqa: E501  # one line of a script
"""Measures it; takes what holds the viewer's elements."""


def assert_first_screen(found: dict[str, Any]) -> None:
    """Three tiles, none over another, and one picture below them, drawn and in view without scrolling."""
    tiles, picture, pane = found["tiles"], found["picture"], found["pane"]
    assert len(tiles) == 3
    for at, one in enumerate(tiles):
        assert pane["left"] <= one["left"] < one["right"] <= pane["right"]
        for other in tiles[at + 1 :]:
            beside = other["left"] >= one["right"] or one["left"] >= other["right"]
            assert beside or other["top"] >= one["bottom"] or one["top"] >= other["bottom"]
    assert max(one["bottom"] for one in tiles) <= picture["top"] < picture["bottom"] <= pane["bottom"]
    assert not found["sideways"]
    assert found["colours"] > 4
