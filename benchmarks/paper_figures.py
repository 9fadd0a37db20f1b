"""Drawings of ``notebooks/paper.ipynb``: tables, some with bars, that follow the theme of the page, without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from benchmarks.paper import NAMES, Rows, gains, median_of, over
from benchmarks.paper_rows import PUBLISHED, ROWS
from benchmarks.table import NOTHING
from nimble_core.ir.measurement import ACROSS

COLOURS = ("#8a8f92", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#CC79A7", "#D55E00", "#F0E442")
LONGEST_PX = 420
Bar = tuple[str, float, str]
"""What is written beside a bar, how long it is, and its colour; without one it is dashed."""


def table(markdown: str) -> str:
    """Turn a table of the page into HTML; text that is none into a paragraph."""
    lines = [[escape(cell) for cell in line.strip("| ").split(" | ")] for line in markdown.splitlines()]
    return _table(lines[0], lines[2:]) if len(lines) > 2 else f"<p>{escape(markdown)}</p>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    kinds = [("th", heads), *(("td", row) for row in rows)]
    lines = ("".join(f'<{kind} style="text-align:left">{cell}</{kind}>' for cell in row) for kind, row in kinds)
    return f'<table style="font-size:13px">{"".join(f"<tr>{line}</tr>" for line in lines)}</table>'


def _drawn(heads: Sequence[str], rows: Sequence[tuple[Sequence[str], Sequence[Bar]]]) -> str:
    """Draw a table whose rows end in bars, below each other, all to one scale; a paragraph where there are none."""
    most = max((value for _, bars in rows for _, value, _ in bars), default=0.0)
    cells = []
    for words, bars in rows:
        drawn = ""
        for said, value, colour in bars:
            fill = f"background:{colour}" if colour else "border-bottom:2px dashed"
            shape = f"display:inline-block;height:11px;width:{LONGEST_PX * value / most:.0f}px;{fill}"
            drawn += f'<div><span style="{shape}"></span> {escape(said)}</div>'
        cells.append([*map(escape, words), drawn])
    return _table(heads, cells) if cells else f"<p>{NOTHING}</p>"


def speeds(rows: Rows, ways: Sequence[str], *, training: bool = False) -> str:
    """Draw the speed over eager, model by model; a dashed line is what was published."""
    found = []
    for name, held in rows.items():
        known = (
            [(way, one.value) for way in ways if (one := over(held, way))] if ROWS[name].training == training else []
        )
        bars = [(f"{value:.2f}x {NAMES.get(way, way)}", value, COLOURS[ways.index(way)]) for way, value in known]
        if bars and name in PUBLISHED:
            bars.append((f"{PUBLISHED[name]:.2f}x published, on a V100", PUBLISHED[name], ""))
        if bars:
            found.append(([ROWS[name].title + f", {ROWS[name].batch}" * training], bars))
    return _drawn(["model", "speed over eager"], found)


def streams_against_concurrency(rows: Rows) -> str:
    """Draw what several streams gain over one, models in the order of their degree of concurrency."""
    found = [
        ([one.title, f"{one.width:.0f}", f"{one.macs / 1e9:.1f} G"],
         [(f"{one.speed:.2f}x", one.speed, COLOURS[3 if one.speed > ACROSS else 0])])
        for one in sorted(gains(rows), key=lambda one: (one.width, one.macs))
    ]  # fmt: skip
    return _drawn(["model", "calls at once", "MACs", "over one stream"], found)


def host_speeds(rows: Rows, name: str, way: str = "several") -> str:
    """Draw one model's times: the host of eager, the device, and a replay."""
    parts = (
        ("eager, latency", "eager", "latency_us"),
        ("eager, its host alone", "eager", "host_us"),
        ("its kernels, on one stream", "one-stream", "device_us"),
        ("all steps, latency", way, "latency_us"),
    )
    known = [(what, us) for what, of, measure in parts if (us := median_of(rows.get(name, {}), of, measure))]
    found = [([what], [(f"{us:.0f} µs", us, COLOURS[at])]) for at, (what, us) in enumerate(known)]
    return _drawn([ROWS[name].title, "time"], found)
