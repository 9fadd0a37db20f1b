"""Draws the training suite's results as one SVG: ``python -m benchmarks.training_figure [RESULTS [OUT]]``."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.bars import INK, framed, heads, measured_on, number, shaded, times
from benchmarks.figures import GREY, STYLE, signed
from benchmarks.readme import UNSTABLE
from benchmarks.rows import BEST, speed_of
from benchmarks.train_zoo import TASKS
from benchmarks.training import COMPILED, GRAPHED, OVERHEAD, TUNED, WAYS, WHOLE, WHOLE_OVERHEAD, equal
from benchmarks.training_readme import IMAGE, RESULTS

__all__ = ["Bar", "compare", "lines", "main"]

PANELS = {"TF32": ("tf32", "float32"), "bfloat16 (autocast)": ("bf16",)}
"""Dtypes that are drawn together, from the left."""

COLOURS = {"step": "#0072b2", "drop-in": "#8cc4e8"}
NAMES = {"step": "ours, whole step", "drop-in": "ours, drop-in"}

MARKS: dict[str, dict[str, Any]] = {
    TUNED: {"marker": "d", "color": "#ffffff", "markersize": 6.5, "markeredgecolor": "#000000"},
    GRAPHED: {"marker": "s", "color": "#cc3311"},
    COMPILED: {"marker": "o", "color": "#f0b000"},
    OVERHEAD: {"marker": "o", "color": "#000000"},
    WHOLE: {"marker": "^", "color": "#f0b000", "markersize": 6.5},
    WHOLE_OVERHEAD: {"marker": "^", "color": "#000000", "markersize": 6.5},
}
"""Of each peer: circles compile the model, triangles the whole step, black ones are replayed as CUDA graphs."""

MARK: dict[str, Any] = {"linestyle": "none", "markersize": 5.5, "markeredgecolor": "#ffffff", "markeredgewidth": 0.7}
COLUMNS = (0.10, 0.21)
"""Where both numbers of a bar end, in widths of the figure from the right of its panel."""


class Bar(NamedTuple):
    """Speed of one of ours over eager, its quartiles over neighbouring rounds, and its speed over the best peer."""

    value: float
    low: float
    high: float
    best: float
    stable: bool = True

    @property
    def labels(self) -> tuple[str, str]:
        """Speed over eager and over the best peer."""
        return f"{times(self.value)}{'' if self.stable else UNSTABLE}", times(self.best)


class Line(NamedTuple):
    """What stands side by side: bars of ours by way, and every peer's speed over eager."""

    name: str
    bars: Mapping[str, Bar]
    peers: Mapping[str, float]
    mean: bool = False


def lines(rows: Mapping[str, Any], dtypes: Sequence[str]) -> list[Line]:
    """The rows in one of the dtypes: CIFAR-10's shapes, the geometric mean of those in the first, large models.

    One of ours that was not shown to learn what eager does has no bar.
    """
    models = list(TASKS)
    known = [row for row in rows.values() if row["dtype"] in dtypes]
    known.sort(key=lambda row: (models.index(row["model"]) if row["model"] in models else len(models), row["batch"]))
    small = [_line(row) for row in known if row["model"].endswith("CIFAR")]
    large = [_line(row) for row in known if not row["model"].endswith("CIFAR")]
    alike = [_line(row) for row in known if row["model"].endswith("CIFAR") and row["dtype"] == dtypes[0]]
    return [*small, *([_mean(alike)] if len(alike) > 1 else ()), *large]


def _line(row: Mapping[str, Any]) -> Line:
    eager = row["times"]["eager"]["median us"]
    bars = {}
    for way in WAYS:
        over, best = row["speed"][way].get("eager"), speed_of(row, BEST, way)
        if equal(row, way) and over and best:
            bars[way] = Bar(over["value"], over["low"], over["high"], best, over["stable"])
    peers = {name: eager / row["times"][name]["median us"] for name in MARKS if name in row["times"]}
    return Line(f"{row['model']}, {row['batch']}{', float32' * (row['dtype'] == 'float32')}", bars, peers)


def _mean(several: Sequence[Line]) -> Line:
    """Geometric means of ours; peers are left out, which are missing here and there."""
    bars = {}
    for way in WAYS:
        if every := [one.bars[way] for one in several if way in one.bars]:
            value = geometric_mean([bar.value for bar in every])
            bars[way] = Bar(value, value, value, geometric_mean([bar.best for bar in every]))
    return Line("geometric mean", bars, {}, mean=True)


def draw(axes: Axes, shown: Sequence[Line], width: float) -> None:
    """Both of ours as bars from 1, one below the other, and peers as marks over them.

    Args:
        axes: a panel.
        shown: from the top.
        width: of the panel, in widths of the figure.
    """
    places = tuple(1 + place / width for place in COLUMNS)
    for row, line in enumerate(shown):
        shaded(axes, row)
        weight = "bold" if line.mean else "normal"
        for turn, way in enumerate(WAYS):
            if (bar := line.bars.get(way)) is None:
                continue
            y = row + (turn - 0.5) * 0.4
            axes.barh(y, bar.value - 1, 0.36, left=1, color=COLOURS[way], linewidth=0, zorder=2)
            if bar.high > bar.low:
                axes.plot((bar.low, bar.high), (y, y), color=INK, linewidth=0.9, zorder=4)
            for place, text, colour in zip(places, bar.labels, (INK, GREY), strict=True):
                number(axes, place, y, text, colour, size=7.5, weight=weight)
        for name, value in line.peers.items():
            axes.plot((value,), (row,), **{**MARK, **MARKS[name]}, zorder=5)
        if line.mean:
            for edge in (row - 0.5, row + 0.5):
                axes.axhline(edge, color=GREY, linewidth=0.8)
    heads(axes, places, ("over\neager", "over best\npeer"))
    axes.set_xscale("log")
    framed(axes, len(shown), "eager")
    axes.xaxis.set_major_locator(FixedLocator([0.25, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(shown)), [line.name for line in shown])
    for line, label in zip(shown, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if line.mean else "normal")


def footnote(rows: Mapping[str, Any], *, unstable: bool) -> str:
    """Where and how it was measured, and what is not shown, in lines that fit below the figure."""
    wrong = [f"{NAMES[way]} on {key}" for key, row in rows.items() for way in WAYS if not equal(row, way)]
    lines = [
        "Steps from the call to the finished result, data on the device, medians; thin lines: quartiles over "
        "neighbouring rounds." + f" {UNSTABLE} unstable: samples spread or drift." * unstable,
        *(textwrap.wrap(f"Not shown to learn what eager does: {'; '.join(wrong)}.", 150) if wrong else ()),
        measured_on(rows, "python -m benchmarks.training"),
    ]
    return "\n".join(lines)


def compare(file: Mapping[str, Any], out: Path) -> None:
    """Speed over eager of every way, by row; precisions side by side.

    Raises:
        SystemExit: there is no row.
    """
    rows = file["rows"]
    panels = {name: found for name, dtypes in PANELS.items() if (found := lines(rows, dtypes))}
    if not panels:
        raise SystemExit("the results hold no row")
    bars = [bar for shown in panels.values() for line in shown for bar in line.bars.values()]
    speeds = [1.0, *(value for shown in panels.values() for line in shown for value in line.peers.values())]
    speeds += [value for bar in bars for value in (bar.low, bar.high)]
    devices = sorted({row["environment"]["device_name"] for row in rows.values()})
    note = footnote(rows, unstable=not all(bar.stable for bar in bars))
    below = 0.61 + 0.17 * len(note.splitlines())
    above, tallest = 1.35, max(map(len, panels.values()))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.4 if len(panels) == 1 else 15.0, above + below + 0.36 * tallest))
        inches, height = figure.get_size_inches()
        longest = max(len(line.name) for shown in panels.values() for line in shown)
        left, right = (0.3 + 0.068 * longest) / inches, 1.55 / inches
        width = (1 - len(panels) * (left + right)) / len(panels)
        for turn, (name, shown) in enumerate(panels.items()):
            size = 0.36 * len(shown) / height
            axes = figure.add_axes((left + turn * (left + width + right), 1 - above / height - size, width, size))
            draw(axes, shown, width * inches / 6.9)
            axes.set_title(name, fontsize=10.5)
            axes.set_xlim(min(speeds) / 1.06, max(speeds) * 1.06)
        figure.text(
            0.01, 1 - 0.12 / height, f"Training steps on {', '.join(devices)}: speed over eager", va="top",
            fontsize=12.5, fontweight="bold",
        )  # fmt: skip
        seen = [name for name in MARKS if any(name in line.peers for shown in panels.values() for line in shown)]
        figure.legend(
            [
                *(Patch(color=COLOURS[way]) for way in WAYS),
                *(Line2D([], [], **{**MARK, **MARKS[name]}) for name in seen),
            ],
            [*NAMES.values(), *seen],
            loc="upper left",
            bbox_to_anchor=(0.0, 1 - 0.32 / height),
            ncols=4,
            frameon=False,
            handlelength=1.2,
            columnspacing=1.6,
        )
        signed(figure, 0.1 / height, note, out)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the figure from the committed results, or from those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("out", type=Path, nargs="?", default=IMAGE)
    given = parser.parse_args(argv)
    if not given.results.exists():
        raise SystemExit(f"there is no {given.results}: measure it with python -m benchmarks.training")
    compare(json.loads(given.results.read_text(encoding="utf-8")), given.out)


if __name__ == "__main__":
    main()
