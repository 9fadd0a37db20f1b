"""Draws the inference suite's results as one SVG: ``python -m benchmarks.inference_figure [RESULTS [OUT]]``."""

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
from matplotlib.ticker import MaxNLocator

from benchmarks.bars import INK, framed, heads, measured_on, number, shaded, times
from benchmarks.figures import GREY, ROOT, STYLE, signed

OVER = "compile:reduce-overhead"
PANELS = (("float16",), ("float32", "tf32"))
"""Dtypes that are drawn together, from the left."""

COLOURS = {"float16": "#d55e00", "float32": "#0072b2", "tf32": "#56a5d6"}
"""Of each dtype (Okabe and Ito's)."""

NAMES = {"float16": "float16", "float32": "float32 (TF32 in convolutions)", "tf32": "TF32 in all products"}
MEAN = "geometric mean"
BEST_PEER: dict[str, Any] = {"color": "#000000", "linewidth": 2.0}
COLUMNS = (1.15, 1.34)
"""Where both numbers of a bar end, in widths of its panel."""


class Bar(NamedTuple):
    """Speed of ours over reduce-overhead, its quartiles over neighbouring rounds, the best peer's speed over it."""

    value: float
    low: float
    high: float
    best: float
    stable: bool = True

    @property
    def labels(self) -> tuple[str, str]:
        """Speed over reduce-overhead and over the best peer."""
        return f"{times(self.value)}{'' if self.stable else '†'}", times(self.value / self.best)


def bars(rows: Mapping[str, Any]) -> tuple[dict[str, dict[str, Bar]], list[str]]:
    """Bars at batch 1 by model and dtype, the fastest model first; and the rows that have none.

    A row whose outputs were not shown to be right, or whose peer failed, has none.
    """
    found: dict[str, dict[str, Bar]] = {}
    missing = []
    for row in rows.values():
        if row["batch"] != 1:
            continue
        over = row["speed"]["copies"]
        if OVER not in over or not all(check["passed"] for check in row["equality"].values()):
            missing.append(f"{row['model']}, {row['dtype']}")
            continue
        base = over[OVER]
        best = base["value"] / min(one["value"] for one in over.values())
        bar = Bar(base["value"], base["low"], base["high"], best, base["stable"])
        found.setdefault(row["model"], {})[row["dtype"]] = bar
    order = sorted(found, key=lambda model: -geometric_mean([bar.value for bar in found[model].values()]))
    return {model: found[model] for model in order}, missing


def mean(panel: Mapping[str, Mapping[str, Bar]], dtype: str) -> Bar | None:
    """Geometric means of a dtype's bars; None if there are none."""
    every = [one[dtype] for one in panel.values() if dtype in one]
    if not every:
        return None
    value = geometric_mean([bar.value for bar in every])
    return Bar(value, value, value, geometric_mean([bar.best for bar in every]))


def draw(axes: Axes, panel: Mapping[str, Mapping[str, Bar]], dtypes: Sequence[str]) -> None:
    """One row a model, one bar a dtype with a mark where the best peer is, and both speeds in numbers."""
    means = {dtype: one for dtype in dtypes if (one := mean(panel, dtype))}
    rows: list[tuple[str, Mapping[str, Bar]]] = [*panel.items(), (MEAN, means)]
    for row, (model, values) in enumerate(rows):
        shaded(axes, row)
        here = [dtype for dtype in dtypes if dtype in values]
        weight = "bold" if model == MEAN else "normal"
        for turn, dtype in enumerate(here):
            bar, height = values[dtype], (0.62 if len(here) == 1 else 0.84) / len(here)
            y = row + (turn - (len(here) - 1) / 2) * height
            axes.barh(y, bar.value, 0.94 * height, color=COLOURS[dtype], alpha=0.85, linewidth=0, zorder=2)
            if bar.high > bar.low:
                axes.plot((bar.low, bar.high), (y, y), color=INK, linewidth=0.9, zorder=4)
            axes.plot((bar.best, bar.best), (y - 0.47 * height, y + 0.47 * height), **BEST_PEER, zorder=5)
            for place, text, colour in zip(COLUMNS, bar.labels, (INK, GREY), strict=True):
                number(axes, place, y, text, colour, size=8.5 if len(here) == 1 else 7.5, weight=weight)
    heads(axes, COLUMNS, ("over reduce-\noverhead", "over best\npeer"))
    axes.axhline(len(rows) - 1.5, color=GREY, linewidth=0.8)
    framed(axes, len(rows), "torch.compile(mode='reduce-overhead')")
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))


def footnote(rows: Mapping[str, Any], missing: Sequence[str], *, unstable: bool = False) -> str:
    """Where and how it was measured, and what is not shown, in lines that fit below the figure."""
    shown = {key: row for key, row in rows.items() if row["batch"] == 1}
    left = f"Without reduce-overhead or a sound check: {'; '.join(missing)}."
    lines = [
        "Calls at batch 1, inputs and outputs copied, medians; thin lines: quartiles over neighbouring rounds."
        + " † unstable: samples spread or drift." * unstable,
        *(textwrap.wrap(left, 150) if missing else ()),
        measured_on(shown, "python -m benchmarks.inference"),
    ]
    return "\n".join(lines)


def compare(file: Mapping[str, Any], out: Path) -> None:
    """Speed over reduce-overhead of every model and dtype, dtypes side by side.

    Raises:
        SystemExit: no row has it.
    """
    panel, missing = bars(file["rows"])
    if not panel:
        raise SystemExit(f"no row at batch 1 was measured beside {OVER}")
    dtypes = {dtype for one in panel.values() for dtype in one}
    panels = [[dtype for dtype in group if dtype in dtypes] for group in PANELS]
    panels = [group for group in panels if group]
    every = [bar for one in panel.values() for bar in one.values()]
    devices = sorted({row["environment"]["device_name"] for row in file["rows"].values()})
    note = footnote(file["rows"], missing, unstable=not all(bar.stable for bar in every))
    below = 0.61 + 0.17 * len(note.splitlines())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.4, 1.25 + below + 0.34 * (len(panel) + 1)))
        height = figure.get_figheight()
        row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        figure.subplots_adjust(left=0.145, right=0.878, top=1 - 1.1 / height, bottom=below / height, wspace=0.44)
        for axes, group in zip(row, panels, strict=True):
            draw(axes, panel, group)
            axes.set_title(" and ".join(group), fontsize=10.5)
            axes.set_xlim(0, 1.04 * max(max(bar.high, bar.best, bar.value) for bar in every))
        row[0].set_yticks(range(len(panel) + 1), [*panel, MEAN])
        row[0].get_yticklabels()[-1].set_fontweight("bold")
        figure.text(
            0.01, 1 - 0.12 / height, f"Inference on {', '.join(devices)}: speed over torch.compile", va="top",
            fontsize=12.5, fontweight="bold",
        )  # fmt: skip
        shown = [dtype for group in panels for dtype in group]
        figure.legend(
            [*(Patch(color=COLOURS[dtype], alpha=0.85) for dtype in shown), Line2D([], [], **BEST_PEER)],
            [*(NAMES[dtype] for dtype in shown), "best peer"],
            loc="upper left",
            bbox_to_anchor=(0.0, 1 - 0.32 / height),
            ncols=1 + len(shown),
            frameon=False,
            handlelength=1.2,
            columnspacing=1.6,
        )
        signed(figure, 0.1 / height, note, out)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the figure from the committed results, or from those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=ROOT / "results" / "inference-h200.json")
    parser.add_argument("out", type=Path, nargs="?", default=ROOT.parent / "docs" / "images" / "inference.svg")
    given = parser.parse_args(argv)
    compare(json.loads(given.results.read_text()), given.out)


if __name__ == "__main__":
    main()
