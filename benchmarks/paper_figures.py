"""Drawings of ``notebooks/paper.ipynb``: tables and SVG that follow the theme of the page, without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from benchmarks.paper import NAMES, Rows, gains, median_of, over
from benchmarks.paper_rows import PUBLISHED, ROWS
from benchmarks.table import NOTHING

COLOURS = ("#8a8f92", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#CC79A7", "#D55E00", "#F0E442")
_STYLE = "max-width:100%;font:13px system-ui,sans-serif"


def table(markdown: str) -> str:
    """Turn a table of the page into HTML; text that is none into a paragraph."""
    lines = [line.strip("| ").split(" | ") for line in markdown.splitlines()]
    if len(lines) < 3:
        return f"<p>{escape(markdown)}</p>"
    head, _, *body = lines
    rows = [_row(head, "th"), *(_row(line, "td") for line in body)]
    return f'<table style="font-size:13px">{"".join(rows)}</table>'


def _row(cells: Iterable[str], kind: str) -> str:
    return "<tr>" + "".join(f'<{kind} style="text-align:left">{escape(cell)}</{kind}>' for cell in cells) + "</tr>"


def speeds(rows: Rows, ways: Sequence[str], *, training: bool = False) -> str:
    """Draw bars of the speed over eager, model by model; a line marks what was published."""
    shown = [(name, held) for name, held in rows.items() if ROWS[name].training == training]
    found = {name: {way: one.value for way in ways if (one := over(held, way))} for name, held in shown}
    found = {name: values for name, values in found.items() if values}
    if not found:
        return f"<p>{NOTHING}</p>"
    most = max(value for name, values in found.items() for value in (*values.values(), PUBLISHED.get(name, 0.0)))
    out, y, scale = _legend([NAMES.get(way, way) for way in ways]), 40, 480 / most
    for name, values in found.items():
        title = ROWS[name].title + f", {ROWS[name].batch}" * training
        out.append(_text(4, y + 11, title))
        top = y
        for way, value in values.items():
            colour = COLOURS[ways.index(way)]
            out.append(f'<rect x="170" y="{y}" width="{value * scale:.1f}" height="11" fill="{colour}"/>')
            out.append(_text(175 + value * scale, y + 10, f"{value:.2f}x", 11))
            y += 13
        if name in PUBLISHED:
            x = 170 + PUBLISHED[name] * scale
            line = f'x1="{x:.1f}" y1="{top - 2}" x2="{x:.1f}" y2="{y}"'
            out.append(f'<line {line} stroke="currentColor" stroke-width="2" stroke-dasharray="4 3"/>')
        y += 10
    out.append(_text(4, y + 8, "speed over eager; dashed: published, on a V100"))
    return _svg(out, y + 16)


def streams_against_concurrency(rows: Rows) -> str:
    """Draw what several streams gain over one, models in the order of their degree of concurrency."""
    found = sorted(gains(rows), key=lambda one: (one.width, one.macs))
    if not found:
        return f"<p>{NOTHING}</p>"
    scale = 300 / max(one.speed for one in found)
    out = [
        _text(4, 14, "model"),
        _text(130, 14, "calls at once"),
        _text(225, 14, "MACs"),
        _text(310, 14, "over one stream"),
    ]
    for at, one in enumerate(found):
        y = 22 + 20 * at
        out += [_text(4, y + 12, one.title), _text(150, y + 12, f"{one.width:.0f}")]
        out.append(_text(225, y + 12, f"{one.macs / 1e9:.1f} G"))
        colour = COLOURS[3 if one.speed > 1.02 else 0]
        out.append(f'<rect x="310" y="{y}" width="{one.speed * scale:.1f}" height="14" fill="{colour}"/>')
        out.append(_text(315 + one.speed * scale, y + 12, f"{one.speed:.2f}x", 12))
    bottom = 24 + 20 * len(found)
    line = f'x1="{310 + scale:.1f}" y1="20" x2="{310 + scale:.1f}" y2="{bottom}"'
    out.append(f'<line {line} stroke="currentColor" stroke-dasharray="4 3"/>')
    return _svg(out, bottom + 6)


def host_speeds(rows: Rows, name: str, way: str = "several") -> str:
    """Draw one model's times: the host of eager, the device, and a replay."""
    held = rows.get(name, {})
    parts = {
        "eager, latency": median_of(held, "eager", "latency_us"),
        "eager, its host alone": median_of(held, "eager", "host_us"),
        "its kernels, on one stream": median_of(held, "one-stream", "device_us"),
        "all steps, latency": median_of(held, way, "latency_us"),
    }
    known = {what: us for what, us in parts.items() if us}
    if not known:
        return f"<p>{NOTHING}</p>"
    scale, out = 420 / max(known.values()), []
    for at, (what, us) in enumerate(known.items()):
        y = 6 + 24 * at
        out.append(_text(4, y + 13, what))
        out.append(f'<rect x="190" y="{y}" width="{us * scale:.1f}" height="17" fill="{COLOURS[at]}"/>')
        out.append(_text(195 + us * scale, y + 13, f"{us:.0f} µs", 12))
    return _svg(out, 12 + 24 * len(known))


def _legend(names: Sequence[str]) -> list[str]:
    out, x, y = [], 4.0, 2
    for name, colour in zip(names, COLOURS, strict=False):
        if x + 16 + 7 * len(name) > 715:
            x, y = 4.0, y + 17
        out.append(f'<rect x="{x:.0f}" y="{y}" width="12" height="12" fill="{colour}"/>')
        out.append(_text(x + 16, y + 11, name, 12))
        x += 26 + 7 * len(name)
    return out


def _text(x: float, y: float, words: str, size: int = 13) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="currentColor" font-size="{size}">{escape(words)}</text>'


def _svg(parts: Iterable[str], height: float) -> str:
    return f'<svg viewBox="0 0 720 {height:.0f}" width="720" style="{_STYLE}">{"".join(parts)}</svg>'
