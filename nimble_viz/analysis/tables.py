"""Tables as data: each is described once, and page and terminal draw any of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nimble_core.ir.measurement import Ratio
from nimble_viz.analysis.labels import ratio_figures

__all__ = ["BAR", "Cell", "bar", "cell", "number", "ratio_cell", "row", "table", "words"]

Cell = str | dict[str, Any]
"""What ``cell`` or ``bar`` return, or text as it is."""

_MARKS = {"faster": "good", "slower": "bad", "undecided": "open"}


def words(name: str, *, page: bool = False) -> dict[str, Any]:
    """Describe a column of text; ``page``: a terminal has no room for it."""
    return {"name": name, "kind": "words", "page": page}


def number(name: str, *, page: bool = False) -> dict[str, Any]:
    """Describe a column of figures, set on the right."""
    return {"name": name, "kind": "number", "page": page}


BAR = {"name": "", "kind": "bar", "page": True}
"""A column of bars."""


def cell(text: str, under: str = "", mark: str = "", tags: Iterable[tuple[str, str]] = ()) -> Cell:
    """Describe a cell: its text, what is said in small below it, and ``(tag, mark)`` beside it.

    A mark is ``"good"``, ``"bad"``, ``"open"`` for what is undecided, or empty.
    """
    return {"text": text, "under": under, "mark": mark, "tags": list(tags)}


def bar(part: float, colour: str = "") -> Cell:
    """Describe a bar that fills ``part`` of its cell, 0 to 1, in a colour of the page's theme."""
    return {"part": part, "colour": colour}


def ratio_cell(ratio: Ratio | None) -> Cell:
    """Put a ratio above its interval, marked by its verdict; None leaves the cell empty."""
    if ratio is None:
        return ""
    text, interval = ratio_figures(ratio)
    return cell(text, interval, _MARKS.get(ratio.verdict, ""))


def row(*cells: Cell, void: bool = False) -> dict[str, Any]:
    """Put cells beside each other; ``void``: its figures do not count."""
    return {"cells": list(cells), "void": void}


def table(
    title: str,
    columns: Sequence[dict[str, Any]],
    rows: Sequence[dict[str, Any]],
    *,
    about: str = "",
    below: Iterable[Cell] = (),
) -> dict[str, Any] | None:
    """Describe a table without columns that no row fills; None without rows.

    ``about`` explains it, and ``below`` adds what has no column.
    """
    if not rows:
        return None
    filled = [at for at, _ in enumerate(columns) if any(one["cells"][at] != "" for one in rows)]
    return {
        "title": title,
        "columns": [columns[at] for at in filled],
        "rows": [{**one, "cells": [one["cells"][at] for at in filled]} for one in rows],
        "about": about,
        "below": list(below),
    }
