"""Draws ``benchmarks/results/policies-h200.json`` as one SVG: ``python -m benchmarks.policies_figure``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MultipleLocator

from benchmarks.figures import GREY, STYLE, from_command_line, signed

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

Speed = tuple[float, float, float]


def speeds(models: Mapping[str, Any], dtype: str) -> dict[str, dict[str, Speed]]:
    """``(median, low, high)`` over one stream of each policy's replays, by model; the last row is their mean."""
    found: dict[str, dict[str, Speed]] = {}
    for key, result in models.items():
        model, _, of = key.rpartition(", ")
        if of == dtype:
            entries = {**result["policies"], "auto": result["auto"]}
            found[model] = {
                policy: (over["value"], over["low"], over["high"])
                for policy in MARKS
                for over in (entries[policy]["replay over single"],)
            }
    if found:
        means = {policy: geometric_mean([one[policy][0] for one in found.values()]) for policy in MARKS}
        found[MEAN] = {policy: (mean, mean, mean) for policy, mean in means.items()}
    return found


def ranked(panels: Iterable[Mapping[str, Mapping[str, Speed]]]) -> list[str]:
    """Models from the one that ``contention`` speeds up most, and the mean after them."""
    gained: dict[str, list[float]] = {}
    for panel in panels:
        for model, policies in panel.items():
            gained.setdefault(model, []).append(policies["contention"][0])
    return sorted(gained, key=lambda model: (model == MEAN, -geometric_mean(gained[model])))


def draw(axes: Axes, panel: Mapping[str, Mapping[str, Speed]], order: Sequence[str]) -> None:
    """One row a model, one mark a policy, quartiles of neighbouring rounds as thin lines, ``auto`` in numbers."""
    for row, model in enumerate(order):
        if model not in panel:
            continue
        for policy, (value, low, high) in panel[model].items():
            y, style = row + BESIDE.get(policy, 0.0), MARKS[policy]
            rank = 4 if policy == "auto" else 3 if policy == "contention" else 2
            if high > low:
                axes.plot((low, high), (y, y), color=style["color"], linewidth=1.0, alpha=0.55, zorder=rank)
            axes.plot(value, y, linestyle="", zorder=rank, **style)
        axes.annotate(
            f"{panel[model]['auto'][0]:.2f}×",
            (1.015, row),
            xycoords=("axes fraction", "data"),
            color=MARKS["auto"]["color"],
            fontweight="bold" if model == MEAN else "normal",
            va="center",
            annotation_clip=False,
        )
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


def compare(file: dict[str, Any], out: Path) -> None:
    """Speed of every policy over one stream, by model, a panel for each dtype."""
    panels = {dtype: speeds(file["models"], dtype) for dtype in ("float32", "float16")}
    panels = {dtype: panel for dtype, panel in panels.items() if panel}
    order = ranked(panels.values())
    every = [speed for panel in panels.values() for policies in panel.values() for speed in policies.values()]
    stamp = file["environment"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.4, 1.75 + 0.46 * len(order)))
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        height = figure.get_figheight()
        figure.subplots_adjust(left=0.135, right=0.945, top=1 - 0.85 / height, bottom=0.92 / height, wspace=0.17)
        for one, (dtype, panel) in zip(axes, panels.items(), strict=True):
            draw(one, panel, order)
            one.set_title(dtype)
            one.set_xlim(min(low for _, low, _ in every) - 0.06, max(high for _, _, high in every) + 0.06)
            one.set_xlabel("speed over one stream")
        axes[0].set_yticks(range(len(order)), order)
        axes[0].get_yticklabels()[-1].set_fontweight("bold")
        figure.legend(
            [Line2D([], [], linestyle="", **style) for style in MARKS.values()],
            list(MARKS),
            loc="upper left",
            bbox_to_anchor=(0.125, 1.0),
            ncols=len(MARKS),
            frameon=False,
            handletextpad=0.35,
            columnspacing=1.9,
            labelcolor=[style["color"] for style in MARKS.values()],
        )
        signed(
            figure,
            0.1 / height,
            "Bare replays, host clock, medians; thin lines: quartiles over neighbouring rounds. "
            f"In numbers: auto, the plan that is used by default.\n{stamp['device_name']}, torch {stamp['torch']}, "
            f"{stamp['date'][:10]}; python -m benchmarks.policies",
            out,
        )


if __name__ == "__main__":
    from_command_line(compare, "policies-h200.json", "policies.svg", __doc__)
