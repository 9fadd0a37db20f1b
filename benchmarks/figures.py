"""Draws what ``results/scheduling.json`` and ``results/policies-h200.json`` say: ``python -m benchmarks.figures``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MultipleLocator, NullFormatter

RESULTS = Path(__file__).parent / "results"
GREY = "#767676"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 10, "text.color": "#222222", "axes.edgecolor": GREY,
    "axes.labelcolor": "#222222", "axes.spines.right": False, "axes.spines.top": False,
    "axes.titlelocation": "left", "axes.titlesize": 11.5, "axes.titleweight": "bold", "xtick.color": GREY,
    "ytick.color": GREY, "xtick.labelcolor": "#222222", "ytick.labelcolor": "#222222", "svg.fonttype": "path",
    "svg.hashsalt": "nimble_viz",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Draw both as SVG."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS.parents[1] / "docs" / "images", help="folder of pictures")
    given = parser.parse_args(argv)
    with matplotlib.rc_context(STYLE):
        growth(json.loads((RESULTS / "scheduling.json").read_text()), given.out / "scheduling-growth.svg")
        policies(json.loads((RESULTS / "policies-h200.json").read_text()), given.out / "policies.svg")


def signed(figure: Figure, height: float, text: str, out: Path) -> None:
    """Write what a figure rests on below it, and the figure to ``out``: the same bytes for the same results."""
    figure.text(0.01, height, text, color=GREY, fontsize=8.5, linespacing=1.5)
    figure.savefig(out, metadata={"Date": None}, facecolor="white")


# -- growth ----------------------------------------------------------------------------------------------------------

STEPS = {
    "arena": ("one arena", "#000000", "-."),
    "contention, 32 streams": ("policy contention", "#555555", "--"),
    "nimble, 32 streams": ("nimble, 32 streams", "#0072b2", "-"),
    "nimble": ("nimble, no cap", "#0072b2", ":"),
    "build graph": ("hazards, reduction", "#007a5a", "-"),
    "simulate H200": ("simulate H200", "#cc5f00", "-"),
    "simulate exact": ("simulate exact", "#cc5f00", ":"),
    "release plan": ("release plan", "#b0467f", "--"),
    "check": ("check", "#7a6a00", "-"),
}
"""Steps that are drawn: label, colour (Okabe and Ito's, darkened for white) and dashes: none needs its colour."""

Curve = list[tuple[int, float]]


def worst(results: Iterable[dict[str, Any]], axis: str, values: str, step: str) -> Curve:
    """Return the largest value of a step at each place of an axis, ascending, without places where it was given up."""
    found: dict[int, list[Any]] = {}
    for result in results:
        found.setdefault(result[axis], []).append(result[values][step])
    return [(at, max(many)) for at, many in sorted(found.items()) if None not in many]


def panel(axes: Axes, curves: dict[str, Curve], name: Callable[[float, Any], str], *, guides: bool) -> None:
    """One log-log panel."""
    axes.set(xscale="log", yscale="log")
    for step, curve in curves.items():
        label, colour, dashes = STEPS[step]
        axes.plot(
            *zip(*curve, strict=True), dashes, color=colour, label=label, linewidth=1.6, marker="o", markersize=2.6
        )
    places, values = ([one[place] for curve in curves.values() for one in curve] for place in (0, 1))
    left, right, low, high = min(places), max(places), min(values), max(values)
    axes.set(xlim=(left / 1.15, right * 1.15), ylim=(low / 2, high * 2))
    if guides:
        # Not a fit: what growing with the calls, and with their square, looks like.
        for power, text, offset, align in ((1, "∝ calls", (-1, -5), "top"), (2, "∝ calls²", (-4, 0), "center")):
            end = min(right, left * (high * 1.5 / low) ** (1 / power))
            top = low / 1.5 * (end / left) ** power
            axes.plot((left, end), (low / 1.5, top), color="#bdbdbd", linewidth=0.9, zorder=0)
            axes.annotate(
                text, (end, top), offset, textcoords="offset points", ha="right", va=align, color=GREY, fontsize=8.5,
                zorder=0.5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )  # fmt: skip
    axes.grid(which="major", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="minor", length=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(name))
    axes.yaxis.set_minor_formatter(NullFormatter())


def growth(file: dict[str, Any], out: Path) -> None:
    """Time and memory against calls and against width."""
    by_calls = [one for one in file["results"] if one["shape"] != "chains" or one["width"] == 1]
    by_width = [one for one in file["results"] if one["shape"] == "chains" and one["calls"] == 10_000]

    def curves(results: list[dict[str, Any]], axis: str, values: str, scale: float = 1.0) -> dict[str, Curve]:
        found = {step: worst(results, axis, values, step) for step in STEPS}
        return {step: [(at, value * scale) for at, value in curve] for step, curve in found.items() if len(curve) > 1}

    stamp, figure = file["environment"], Figure(figsize=(10.4, 8.8))
    rows = figure.subplots(2, 2)
    figure.subplots_adjust(left=0.07, right=0.985, top=0.885, bottom=0.115, wspace=0.22, hspace=0.34)
    for row, results, axis, label in (
        (rows[0], by_calls, "calls", "calls (largest of four shapes)"),
        (rows[1], by_width, "width", "parallel chains in 10,000 calls"),
    ):
        time, memory = curves(results, axis, "best_s"), curves(results, axis, "peak_bytes", 2**-20)
        panel(row[0], time, lambda s, _: f"{s:g} s" if s >= 1 else f"{s * 1e3:g} ms", guides=axis == "calls")
        panel(row[1], memory, lambda mib, _: f"{mib:g} MiB", guides=axis == "calls")
        for one, what in zip(row, ("Time", "Memory"), strict=True):
            one.set(title=f"{what} against {axis}", xlabel=label)
            if axis == "calls":
                one.set_xticks((1_300, 10_000, 100_000))
    figure.legend(
        *rows[0][0].get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0.06, 1), ncols=5, frameon=False
    )
    about = (
        f"Where a line ends, larger graphs were given up: over {file['give_up_s']:g} s.   Time: fastest of up to five "
    )
    about += "runs on one thread; memory: peak of what a step allocates.\n"
    about += f"{stamp.get('host_cpu') or stamp['cpu']}, Python {stamp['python']}, {stamp['date'][:10]}; "
    signed(figure, 0.012, f"{about}python -m benchmarks.scheduling", out)


# -- policies --------------------------------------------------------------------------------------------------------

MARKS: dict[str, dict[str, Any]] = {
    "nimble": {"marker": "o", "color": "#0072b2", "markersize": 5.5},
    "critical_path": {"marker": "s", "color": "#007a5a", "markersize": 5},
    "opara": {"marker": "^", "color": "#7a6a00", "markersize": 6},
    "torchsched": {"marker": "v", "color": "#b0467f", "markersize": 6},
    "contention": {"marker": "D", "color": "#000000", "markersize": 8},
    "auto": {"marker": "o", "color": "#d55e00", "markersize": 13, "fillstyle": "none", "markeredgewidth": 1.8},
}
"""Shape and colour (Okabe and Ito's, darkened for white) of each policy; ours are the large ones."""

BESIDE = {"nimble": -0.27, "critical_path": -0.14, "opara": 0.14, "torchsched": 0.27}
"""How far below its row's middle a mark is drawn, in rows, so that equal policies stay apart."""

MEAN = "geometric mean"
ENDS = ("value", "low", "high")
Speeds = dict[str, list[float]]
"""Speed over one stream of replays and the ends of its interval, if there is one, by policy."""


def speeds(models: Mapping[str, Any], dtype: str) -> dict[str, Speeds]:
    """Speeds by model; the last row is their mean."""
    found: dict[str, Speeds] = {}
    for key, result in models.items():
        model, _, of = key.rpartition(", ")
        over = {name: {**result["policies"], "auto": result["auto"]}[name]["replay over single"] for name in MARKS}
        if of == dtype:
            found[model] = {name: [one.get(end, one["value"]) for end in ENDS] for name, one in over.items()}
    means = {name: geometric_mean([one[name][0] for one in found.values()]) for name in MARKS}
    return {**found, MEAN: {name: [mean] * 3 for name, mean in means.items()}}


def marks(axes: Axes, found: Mapping[str, Speeds], order: Sequence[str]) -> None:
    """One row a model, one mark a policy, intervals as thin lines, ``auto`` in numbers."""
    for row, model in enumerate(order):
        for policy, (value, low, high) in found[model].items():
            y, style = row + BESIDE.get(policy, 0.0), MARKS[policy]
            rank = {"auto": 4, "contention": 3}.get(policy, 2)
            if high > low:
                axes.plot((low, high), (y, y), color=style["color"], linewidth=1.0, alpha=0.55, zorder=rank)
            axes.plot(value, y, linestyle="", zorder=rank, **style)
        axes.annotate(
            f"{found[model]['auto'][0]:.2f}×", (1.015, row), xycoords=("axes fraction", "data"), va="center",
            color=MARKS["auto"]["color"], fontweight="bold" if model == MEAN else "normal", annotation_clip=False,
        )  # fmt: skip
        if row % 2:
            axes.axhspan(row - 0.5, row + 0.5, color="#f5f5f5", linewidth=0, zorder=0)
    axes.axvline(1.0, color=GREY, linewidth=1.0, zorder=1)
    axes.axhline(len(order) - 1.5, color=GREY, linewidth=0.8)
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MultipleLocator(0.25))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))


def policies(file: dict[str, Any], out: Path) -> None:
    """Speed of every policy over one stream, by model, a panel for each dtype."""
    panels = {dtype: speeds(file["models"], dtype) for dtype in ("float32", "float16")}
    gained = {model: [found[model]["contention"][0] for found in panels.values()] for model in panels["float32"]}
    order = sorted(gained, key=lambda model: (model == MEAN, -geometric_mean(gained[model])))  # the mean last
    every = [end for found in panels.values() for one in found.values() for ends in one.values() for end in ends]
    stamp = file["environment"]
    figure = Figure(figsize=(10.4, height := 1.75 + 0.46 * len(order)))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    figure.subplots_adjust(left=0.135, right=0.945, top=1 - 0.85 / height, bottom=0.92 / height, wspace=0.17)
    for one, (dtype, found) in zip(axes, panels.items(), strict=True):
        marks(one, found, order)
        one.set(title=dtype, xlabel="speed over one stream", xlim=(min(every) - 0.06, max(every) + 0.06))
    axes[0].set_yticks(range(len(order)), order)
    axes[0].get_yticklabels()[-1].set_fontweight("bold")
    figure.legend(
        [Line2D([], [], linestyle="", **style) for style in MARKS.values()], list(MARKS), loc="upper left",
        bbox_to_anchor=(0.125, 1.0), ncols=len(MARKS), frameon=False, handletextpad=0.35, columnspacing=1.9,
        labelcolor=[style["color"] for style in MARKS.values()],
    )  # fmt: skip
    first = next(iter(file["models"].values()))["auto"]["replay over single"]
    thin = "intervals of the medians" if "verdict" in first else "quartiles over neighbouring rounds"
    about = f"Bare replays, host clock, medians; thin lines: {thin}. In numbers: auto, the plan that is used by "
    about += f"default.\n{stamp['device_name']}, torch {stamp['torch']}, {stamp['date'][:10]}; "
    signed(figure, 0.1 / height, f"{about}python -m benchmarks.policies", out)


if __name__ == "__main__":
    main()
