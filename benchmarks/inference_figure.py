"""Draws the inference suite's results as one SVG: ``python -m benchmarks.inference_figure [RESULTS [OUT]]``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from benchmarks.figures import GREY, ROOT, STYLE, signed

OVER = "compile:reduce-overhead"
COLOURS = {"float32": "#0072b2", "tf32": "#56a5d6", "float16": "#d55e00"}
"""Of each dtype (Okabe and Ito's)."""

NAMES = {"float32": "float32 (TF32 in convolutions)", "tf32": "TF32", "float16": "float16"}
MEAN = "geometric mean"


class Bar(NamedTuple):
    """Speed of ours over reduce-overhead, its quartiles over neighbouring rounds, and the best peer's speed."""

    value: float
    low: float
    high: float
    best: float


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
        found.setdefault(row["model"], {})[row["dtype"]] = Bar(base["value"], base["low"], base["high"], best)
    order = sorted(found, key=lambda model: -geometric_mean([bar.value for bar in found[model].values()]))
    return {model: found[model] for model in order}, missing


def draw(axes: Axes, panel: Mapping[str, Mapping[str, Bar]]) -> None:
    """One group a model, one bar a dtype, with a mark where the best peer is."""
    means = {
        dtype: geometric_mean(values)
        for dtype in COLOURS
        if (values := [one[dtype].value for one in panel.values() if dtype in one])
    }
    y, ticks = 0.0, []
    groups: list[tuple[str, Mapping[str, Bar]]] = [*panel.items()]
    groups.append((MEAN, {dtype: Bar(mean, mean, mean, 0.0) for dtype, mean in means.items()}))
    for model, values in groups:
        start = y
        for dtype in (one for one in COLOURS if one in values):
            bar = values[dtype]
            axes.barh(y, bar.value, 0.84, color=COLOURS[dtype], alpha=1.0 if model == MEAN else 0.85, linewidth=0)
            if bar.high > bar.low:
                axes.plot((bar.low, bar.high), (y, y), color="#222222", linewidth=0.8)
            if bar.best:
                axes.plot((bar.best, bar.best), (y - 0.42, y + 0.42), color="#000000", linewidth=2.0)
            axes.annotate(
                f"{bar.value:.2f}×",
                (max(bar.value, bar.high, bar.best), y),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color="#222222",
                fontweight="bold" if model == MEAN else "normal",
            )
            y += 1.0
        ticks.append(((start + y - 1) / 2, model))
        y += 0.6
    axes.axvline(1.0, color=GREY, linewidth=1.0, zorder=3)
    axes.set_yticks([place for place, _ in ticks], [model for _, model in ticks])
    axes.get_yticklabels()[-1].set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(y - 1.0, -0.7)
    axes.set_xlim(0, 1.1 * max(max(bar.high, bar.best, bar.value) for one in panel.values() for bar in one.values()))
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_xlabel("speed over torch.compile(mode='reduce-overhead')")


def footnote(rows: Mapping[str, Any], missing: Iterable[str]) -> str:
    """Where and how it was measured, and what is not shown."""
    stamps = [row["environment"] for row in rows.values() if row["batch"] == 1]
    machines = sorted({f"{one['device_name']}, host {one['host_cpu']}, torch {one['torch']}" for one in stamps})
    dates = sorted({one["date"][:10] for one in stamps})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    left = f" Without reduce-overhead or a sound check: {'; '.join(missing)}." if missing else ""
    return (
        "Calls at batch 1, inputs and outputs copied, medians; thin lines: quartiles over neighbouring rounds; "
        f"black marks: the best peer.{left}\n{'; '.join(machines)}, {days}; python -m benchmarks.inference"
    )


def compare(file: Mapping[str, Any], out: Path) -> None:
    """Speed over reduce-overhead of every model and dtype.

    Raises:
        SystemExit: no row has it.
    """
    panel, missing = bars(file["rows"])
    if not panel:
        raise SystemExit(f"no row at batch 1 was measured beside {OVER}")
    dtypes = {dtype for one in panel.values() for dtype in one}
    lines = sum(len(one) + 0.6 for one in panel.values()) + len(dtypes)
    devices = sorted({row["environment"]["device_name"] for row in file["rows"].values()})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.4, 1.9 + 0.2 * lines))
        axes = figure.subplots()
        height = figure.get_figheight()
        figure.subplots_adjust(left=0.155, right=0.97, top=1 - 0.75 / height, bottom=1.0 / height)
        draw(axes, panel)
        axes.set_title(f"Inference on {', '.join(devices)}", pad=24)
        marks: list[Any] = [Patch(color=colour) for dtype, colour in COLOURS.items() if dtype in dtypes]
        names = [NAMES[dtype] for dtype in COLOURS if dtype in dtypes]
        axes.legend(
            [*marks, Line2D([], [], color="#000000", linewidth=2.0)],
            [*names, "best peer"],
            loc="lower left",
            bbox_to_anchor=(-0.005, 1.0),
            ncols=4,
            frameon=False,
            borderaxespad=0.2,
            handlelength=1.2,
        )
        signed(figure, 0.1 / height, footnote(file["rows"], missing), out)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the figure from the committed results, or from those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=ROOT / "results" / "inference-h200.json")
    parser.add_argument("out", type=Path, nargs="?", default=ROOT.parent / "docs" / "images" / "inference.svg")
    given = parser.parse_args(argv)
    compare(json.loads(given.results.read_text()), given.out)


if __name__ == "__main__":
    main()
