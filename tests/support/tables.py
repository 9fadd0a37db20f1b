"""Read the tables that page and terminal draw."""

from __future__ import annotations

from typing import Any

from nimble_viz.analysis.tables import Cell


def shown(table: dict[str, Any] | None) -> dict[str, dict[str, str]]:
    """Texts of a table's cells, by the first cell of their row and the name of their column."""
    if table is None:
        return {}
    names = [column["name"] for column in table["columns"]]
    return {
        text_of(row["cells"][0]): dict(zip(names, map(text_of, row["cells"]), strict=True)) for row in table["rows"]
    }


def text_of(cell: Cell) -> str:
    """What a cell says, without what is small below it; nothing of a bar."""
    return cell if isinstance(cell, str) else cell.get("text", "")
