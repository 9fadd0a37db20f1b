"""What the suites' figures share: rows of bars with numbers beside them, and where they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from benchmarks.figures import GREY

__all__ = ["INK", "framed", "heads", "measured_on", "number", "shaded", "times"]

INK = "#222222"


def times(value: float) -> str:
    """A speed; one below 1 never reads as 1.

    >>> times(1.524), times(0.996)
    ('1.52×', '0.996×')
    """
    return f"{value:.3f}×" if 0.995 <= value < 1 else f"{value:.2f}×"


def shaded(axes: Axes, row: int) -> None:
    """A band behind every other row."""
    if row % 2:
        axes.axhspan(row - 0.5, row + 0.5, color="#f5f5f5", linewidth=0, zorder=0)


def number(
    axes: Axes, place: float, y: float, text: str, colour: str = INK, *, size: float = 8.5, weight: str = "normal"
) -> None:
    """A number beside a bar that ends at ``place``, in widths of the panel."""
    axes.annotate(
        text,
        (place, y),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="center",
        fontsize=size,
        color=colour,
        fontweight=weight,
        annotation_clip=False,
    )


def heads(axes: Axes, places: Sequence[float], texts: Sequence[str]) -> None:
    """What the columns of numbers are; all but the first are grey."""
    for place, text in zip(places, texts, strict=True):
        axes.annotate(
            text, (place, 1.0), (0, 4), xycoords="axes fraction", textcoords="offset points", ha="right", va="bottom",
            fontsize=8, color=INK if place == places[0] else GREY, annotation_clip=False,
        )  # fmt: skip


def framed(axes: Axes, count: int, over: str) -> None:
    """Rows from the top, a line at 1, and what speeds are over."""
    axes.axvline(1.0, color=GREY, linewidth=1.0, zorder=3)
    axes.set_ylim(count - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_xlabel(f"speed over {over}")


def measured_on(rows: Mapping[str, Any], command: str) -> str:
    """Machines and days of the rows, and what measured them."""
    stamps = [row["environment"] for row in rows.values()]
    machines = sorted({f"{one['device_name']}, host {one['host_cpu']}, torch {one['torch']}" for one in stamps})
    dates = sorted({one["date"][:10] for one in stamps})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{'; '.join(machines)}, {days}; {command}"
