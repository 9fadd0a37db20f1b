"""Draws the growth curves of ``benchmarks/results/scheduling.json`` as one SVG: ``python -m benchmarks.figures``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

ROOT = Path(__file__).parent
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

GREY = "#767676"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": "#222222",
    "axes.edgecolor": GREY,
    "axes.labelcolor": "#222222",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": "#222222",
    "ytick.labelcolor": "#222222",
    "svg.fonttype": "path",
    "svg.hashsalt": "nimble_viz",
}

Curve = list[tuple[int, float]]


def worst(results: Iterable[dict[str, Any]], axis: str, values: str, step: str) -> Curve:
    """The largest value of a step at each place of an axis, ascending; places where it was given up are left out.

    >>> worst([{"calls": 9, "s": {"a": 1.0}}, {"calls": 9, "s": {"a": 2.0}}, {"calls": 7, "s": {"a": None}}], "calls",
    ...       "s", "a")
    [(9, 2.0)]
    """
    found: dict[int, list[float | None]] = {}
    for result in results:
        found.setdefault(result[axis], []).append(result[values][step])
    known = {at: [one for one in many if one is not None] for at, many in found.items()}
    return [(at, max(many)) for at, many in sorted(known.items()) if len(many) == len(found[at])]


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Places moved as little as they can in turn, from below, until all are ``gap`` apart.

    >>> apart([2.0, 1.0, 1.5], 1.0)
    [2.5, 0.5, 1.5]
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    blocks: list[tuple[list[int], float]] = []
    for index in order:
        members, middle = [index], places[index]
        while blocks and middle - blocks[-1][1] < gap * (len(members) + len(blocks[-1][0])) / 2:
            before, centre = blocks.pop()
            middle = (centre * len(before) + middle * len(members)) / (len(before) + len(members))
            members = before + members
        blocks.append((members, middle))
    moved = [0.0] * len(places)
    for members, middle in blocks:
        for turn, index in enumerate(members):
            moved[index] = middle + gap * (turn - (len(members) - 1) / 2)
    return moved


def draw(axes: Axes, curves: dict[str, Curve], name: Callable[[float, Any], str], *, guides: bool) -> None:
    """One log-log panel with a label beside the end of each line."""
    axes.set(xscale="log", yscale="log")
    for step, curve in curves.items():
        _, colour, dashes = STEPS[step]
        axes.plot(*zip(*curve, strict=True), dashes, color=colour, linewidth=1.6, marker="o", markersize=2.6)
    left, right = min(at for c in curves.values() for at, _ in c), max(at for c in curves.values() for at, _ in c)
    low = min(value for c in curves.values() for _, value in c)
    high = max(value for c in curves.values() for _, value in c)
    axes.set_xlim(left / 1.15, right * 1.15)
    axes.set_ylim(low / 2, high * 2)
    if guides:
        # Not a fit: what growing with the calls, and with their square, looks like.
        for power, text, below in ((1, "∝ calls", True), (2, "∝ calls²", False)):
            end = min(right, left * (high * 1.5 / low) ** (1 / power))
            top = low / 1.5 * (end / left) ** power
            axes.plot((left, end), (low / 1.5, top), color="#bdbdbd", linewidth=0.9, zorder=0)
            axes.annotate(
                text,
                (end, top),
                (-1, -5) if below else (-4, 0),
                textcoords="offset points",
                ha="right",
                va="top" if below else "center",
                color=GREY,
                fontsize=8.5,
                zorder=0.5,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )
    pixels = axes.figure.dpi * 12.5 / 72
    whole = {step: curve for step, curve in curves.items() if curve[-1][0] == right}
    ends = [axes.transData.transform(curve[-1])[1] for curve in whole.values()]
    margin = axes.transAxes.transform((1.03, 0))[0]
    for (step, curve), y in zip(whole.items(), apart(ends, pixels), strict=True):
        text, colour, _ = STEPS[step]
        axes.annotate(
            text,
            curve[-1],
            axes.transData.inverted().transform((margin, y)),
            color=colour,
            va="center",
            fontsize=9.5,
            arrowprops={
                "arrowstyle": "-",
                "relpos": (0, 0.5),
                "color": colour,
                "linewidth": 0.5,
                "shrinkA": 1,
                "shrinkB": 3,
                "alpha": 0.6,
            },
            annotation_clip=False,
        )
    for step in (one for one in curves if one not in whole):
        text, colour, _ = STEPS[step]
        end = curves[step][-1]
        axes.annotate(f"{text}*", end, (0, 4), textcoords="offset points", ha="right", color=colour, fontsize=9.5)
    axes.grid(which="major", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="minor", length=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(name))
    axes.yaxis.set_minor_formatter(NullFormatter())


def seconds(value: float, _: Any = None) -> str:
    """``0.002`` reads ``"2 ms"``."""
    return f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms"


def mebibytes(value: float, _: Any = None) -> str:
    """``10.0`` reads ``"10 MiB"``."""
    return f"{value:g} MiB"


def growth(file: dict[str, Any], out: Path) -> None:
    """Time and memory against calls and against width."""
    by_calls = [one for one in file["results"] if one["shape"] != "chains" or one["width"] == 1]
    by_width = [one for one in file["results"] if one["shape"] == "chains" and one["calls"] == 10_000]

    def curves(results: list[dict[str, Any]], axis: str, values: str, scale: float = 1.0) -> dict[str, Curve]:
        found = {step: worst(results, axis, values, step) for step in STEPS}
        return {step: [(at, value * scale) for at, value in curve] for step, curve in found.items() if len(curve) > 1}

    stamp = file["environment"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.4, 8.8))
        panels = figure.subplots(2, 2)
        figure.subplots_adjust(left=0.07, right=0.845, top=0.955, bottom=0.115, wspace=0.75, hspace=0.34)
        for row, results, axis, label in (
            (panels[0], by_calls, "calls", "calls (largest of four shapes)"),
            (panels[1], by_width, "width", "parallel chains in 10,000 calls"),
        ):
            draw(row[0], curves(results, axis, "best_s"), seconds, guides=axis == "calls")
            draw(row[1], curves(results, axis, "peak_bytes", 2**-20), mebibytes, guides=axis == "calls")
            for panel, what in zip(row, ("Time", "Memory"), strict=True):
                panel.set(title=f"{what} against {axis}", xlabel=label)
                if axis == "calls":
                    panel.set_xticks((1_300, 10_000, 100_000))
        signed(
            figure,
            0.012,
            f"* given up on larger graphs: over {file['give_up_s']:g} s.   Time: fastest of up to five runs on one "
            f"thread; memory: peak of what a step allocates.\n{stamp['cpu']}, Python {stamp['python']}, "
            f"{stamp['date'][:10]}; python -m benchmarks.scheduling",
            out,
        )


def signed(figure: Figure, height: float, text: str, out: Path) -> None:
    """Write what a figure rests on below it, and the figure to ``out``: the same bytes for the same results."""
    figure.text(0.01, height, text, color=GREY, fontsize=8.5, linespacing=1.5)
    figure.savefig(out, metadata={"Date": None}, facecolor="white")


def from_command_line(draw: Callable[[Any, Path], None], results: str, image: str, what: str | None) -> None:
    """Draw the figure from the committed results, or from those of ``--results``."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--results", type=Path, default=ROOT / "results" / results)
    parser.add_argument("--out", type=Path, default=ROOT.parent / "docs" / "images" / image)
    options = parser.parse_args()
    draw(json.loads(options.results.read_text()), options.out)


if __name__ == "__main__":
    from_command_line(growth, "scheduling.json", "scheduling-growth.svg", __doc__)
