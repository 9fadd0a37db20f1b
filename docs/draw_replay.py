"""Draw one eager call and the replays that fit into its time, from a recorded report, as an SVG that moves.

    python docs/draw_replay.py examples/recordings/googlenet-h200.nimble docs/images/replay.svg

Each run is drawn as it was profiled, scaled to its median without a profiler. Colours follow the reader's light or dark
setting; who asked for less motion sees the whole picture at once.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

import nimble_viz
from nimble_core.ir.timeline import Timeline
from nimble_core.utils.units import format_ns

WIDTH, LEFT, RIGHT = 880, 120, 16  # pixels
AXIS = WIDTH - LEFT - RIGHT
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c8c8c")  # as in the viewer

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 12px; fill: #59636e }
.strong { font-weight: 600; font-size: 15px }
.card { fill: #ffffff }
.rail { fill: #f0f2f5 }
.host { fill: #8b949e }
.head { fill: #cf222e }
.cover { animation: sweep 9s linear infinite }
@keyframes sweep { from { transform: translateX(0) } 80%, to { transform: translateX(100%) } }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .small { fill: #9198a1 } .card { fill: #0d1117 } .rail { fill: #1c2128 }
}
@media (prefers-reduced-motion: reduce) { .cover { display: none } }
"""


def lanes(line: Timeline, width: float) -> list[tuple[str, str, str]]:
    """Name, kind and SVG path data of each lane, its spans over ``width`` pixels, 14 pixels high."""
    zero = min(span.start_ns for span in line.spans)
    scale = width / max(span.end_ns - zero for span in line.spans)
    found = []
    for at, lane in enumerate(line.lanes):
        boxes = [
            f"M{(span.start_ns - zero) * scale:.1f} 0h{max((span.end_ns - span.start_ns) * scale - 0.2, 0.3):.1f}v14H"
            f"{(span.start_ns - zero) * scale:.1f}z"
            for span in line.spans
            if span.lane == at
        ]
        found.append((lane.name, lane.kind, "".join(boxes)))
    return found


def drawing(report: nimble_viz.Report) -> str:
    """SVG of the report's eager run above its chosen replay."""
    eager, chosen = report.measurement("eager"), report.measurement(report.chosen)
    step = AXIS * chosen.median_ns / eager.median_ns
    fit = int(AXIS / step)
    top, parts = 66, []
    for _, kind, path in lanes(report.timeline("eager"), AXIS):
        label = "host" if kind == "host" else "GPU"
        fill = 'class="host"' if kind == "host" else f'fill="{COLOURS[0]}"'
        parts += _row(top, f"eager, {label}", f'<path {fill} d="{path}"/>')
        top += 24
    top += 14
    replay = lanes(report.timeline(report.chosen), step - 3)
    for at, (name, _, path) in enumerate(replay):
        again = "".join(f'<use href="#lane{at}" x="{step * turn:.1f}"/>' for turn in range(1, fit))
        body = f'<path id="lane{at}" fill="{COLOURS[at % len(COLOURS)]}" d="{path}"/>{again}'
        parts += _row(top, f"replay, {name}", body)
        top += 20
    middles = [LEFT + step * (turn + 0.5) for turn in range(fit)]
    calls = "".join(
        f'<text class="small" text-anchor="middle" x="{x:.1f}" y="{top + 11}">{turn}</text>'
        for turn, x in enumerate(middles, start=1)
    )
    height, device = top + 44, report.environment.device_name
    ratio = report.ratio(report.chosen, baseline="eager")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
        f"<style>{STYLE}</style>"
        f'<rect class="card" width="{WIDTH}" height="{height}" rx="8"/>'
        f'<text class="strong" x="16" y="28">{escape(report.model)} on an {escape(device)}: one eager call, '
        f"and {fit} replays in the same time</text>"
        f'<text class="small" x="16" y="48">eager {format_ns(eager.median_ns)}, replay {format_ns(chosen.median_ns)} '
        f"a call: {ratio.value:.1f}x [{ratio.low:.1f}, {ratio.high:.1f}]; outputs checked against float64</text>"
        f'{"".join(parts)}{calls}<text class="small" x="16" y="{top + 11}">calls done</text>'
        f'<svg x="{LEFT}" y="58" width="{AXIS + RIGHT}" height="{top - 42}" viewBox="0 0 {AXIS + RIGHT} {top - 42}">'
        f'<g class="cover"><rect class="card" width="{AXIS + RIGHT}" height="{top - 42}"/>'
        f'<rect class="head" width="2" height="{top - 42}"/></g></svg>'
        f'<text class="small" x="{LEFT}" y="{height - 10}">0</text>'
        f'<text class="small" text-anchor="end" x="{LEFT + AXIS}" y="{height - 10}">{format_ns(eager.median_ns)}</text>'
        "</svg>\n"
    )


def _row(top: float, label: str, body: str) -> list[str]:
    return [
        f'<text class="small" x="16" y="{top + 11}">{escape(label)}</text>',
        f'<rect class="rail" x="{LEFT}" y="{top}" width="{AXIS}" height="14"/>',
        f'<g transform="translate({LEFT} {top})">{body}</g>',
    ]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(drawing(nimble_viz.load(sys.argv[1])), encoding="utf-8")
