"""How fast a large report is saved and loaded, opens in a browser, and is drawn while it is panned.

    python -m benchmarks.views --out benchmarks/results/views-host.json

Reports of 10,000 calls (as they are, and fused, with the eager calls beside them; both with three timelines) are saved
and loaded; the fastest of each counts. Then headless Chromium without a GPU opens them, on two cores: as the page that
``to_html`` writes, and as what a notebook holds, the same page packed into a frame. Opening ends with the second frame
that was drawn after the views are there. DAG and timeline are dragged with the mouse, and the frames that the page
draws are counted; a browser draws at most 60 a second. Exits with 1 where a limit is missed.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import options, write
from nimble_core.profiling.machine import environment
from nimble_viz import load
from nimble_viz.render.html import fragment, page
from nimble_viz.render.report import Report
from tests.support.lab import chromium
from tests.support.sample_reports import fused_report, sample_report

LIMIT_FILE_S, LIMIT_BYTES, LIMIT_S, LIMIT_FPS = 1.0, 5_000_000, 3.0, 20.0
"""Most seconds for saving, and for loading; largest file; most seconds until open; fewest frames a second."""
CORES = 2
SIZE = {"width": 1280, "height": 800}
VIEWS = {
    "DAG": ("dag", ""),
    "DAG, all open": ("dag", "Open all"),
    "DAG, all in sight": ("dag", "Fit"),
    "timeline": ("timeline", ""),
}
"""The pane that is dragged, and what is clicked there before."""

_TWO_FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
_COUNT = """() => {
  window.counted = [];
  const tick = (now) => { window.counted.push(now); window.counting = requestAnimationFrame(tick); };
  window.counting = requestAnimationFrame(tick);
}"""
_COUNTED = "() => { cancelAnimationFrame(window.counting); return window.counted; }"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print what was found of each report, write the file; 1 where a limit is missed."""
    parser = options(__doc__)
    parser.add_argument("--calls", type=int, default=10_000, help="calls of each report (default: 10,000)")
    parser.add_argument("--rounds", type=int, default=5, help="of saving, loading and opening (default: 5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of panning each view (default: 3)")
    given = parser.parse_args(argv)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # the browser's processes inherit it
    stamp, rows = environment("cpu"), {}
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        name = f"Chromium {browser.version}, headless, {SIZE['width']} × {SIZE['height']}"
        for kind, make in {"eager's kernels": sample_report, "fused": fused_report}.items():
            report, at = make(given.calls, width=8), Path(folder)
            file = {"file": saved(report, at, given.rounds)}
            rows[kind] = file | one_report(browser, report, at, given.rounds, given.seconds)
            print(*lines(f"{kind}, {given.calls:,} calls", rows[kind]), sep="\n", flush=True)
    write(given.out, {"browser": name, "calls": given.calls, "reports": rows}, stamp)
    wrong = [f"MISSED: {one}\n" for row in rows.values() for one in missed(row)]
    print(*wrong, sep="", end="")
    return int(bool(wrong))


def saved(report: Report, folder: Path, rounds: int) -> dict[str, float]:
    """Fastest seconds of saving and of loading, and bytes of the file."""
    path, times = folder / "large.nimble", list[tuple[float, float]]()
    for _ in range(rounds):
        began = time.perf_counter()
        report.save(path)
        between = time.perf_counter()
        load(path)
        times.append((between - began, time.perf_counter() - between))
    save_s, load_s = map(min, zip(*times, strict=True))
    return {"save_s": save_s, "load_s": load_s, "bytes": path.stat().st_size}


def one_report(browser: Any, report: Report, folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Seconds and bytes of both forms, and frames of each view of the page while it is dragged."""
    forms: dict[str, Callable[[Report], str]] = {
        "page": page,
        "notebook": lambda one: f"<!doctype html><title>a notebook</title>{fragment(one)}",
    }
    row: dict[str, Any] = {"open": {}, "pan": {}}
    for form, made in forms.items():
        text = made(report)
        path = folder / f"{form}.html"
        path.write_text(text, encoding="utf-8")
        took = []
        for at in range(rounds):
            context = browser.new_context(viewport=SIZE)
            shown = context.new_page()
            began = time.perf_counter()
            shown.goto(path.as_uri())
            frame = shown.frames[-1]
            frame.wait_for_function("() => window.nimbleViewer")
            frame.evaluate(_TWO_FRAMES)
            took.append(time.perf_counter() - began)
            if form == "page" and at == rounds - 1:
                row["pan"] = panned(shown, seconds)
            context.close()
        row["open"][form] = {"s": took, "bytes": len(text.encode())}
    return row


def panned(shown: Any, seconds: float) -> dict[str, dict[str, float]]:
    """Frames a second, and the longest between two, of each view; and what it took to show it at first."""
    found = {}
    for name, (pane, clicked) in VIEWS.items():
        began = time.perf_counter()
        shown.click(f"#nv-tab-{pane}")
        if clicked:
            shown.click(f"#nv-pane-{pane} button:text-is('{clicked}')")
        shown.evaluate(_TWO_FRAMES)
        first = time.perf_counter() - began
        found[name] = {"show_s": first} | dragged(shown, f"#nv-pane-{pane} canvas", seconds)
    return found


def dragged(shown: Any, canvas: str, seconds: float) -> dict[str, float]:
    """Drag what is drawn in a circle for so long."""
    boxes = [one.bounding_box() for one in shown.locator(f"{canvas}:visible").all()]
    box = max(boxes, key=lambda one: one["width"] * one["height"])
    middle, half = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2), min(box["width"], box["height"]) / 4
    shown.mouse.move(*middle)
    shown.mouse.down()
    shown.evaluate(_COUNT)
    began = time.perf_counter()
    while (now := time.perf_counter() - began) < seconds:
        turn = 2 * math.pi * now
        shown.mouse.move(middle[0] + half * math.sin(turn), middle[1] + half * (1 - math.cos(turn)) / 2)
    times = shown.evaluate(_COUNTED)
    shown.mouse.up()
    gaps = [later - sooner for sooner, later in pairwise(times)]
    return {"fps": 1e3 * len(gaps) / sum(gaps), "longest_ms": max(gaps), "frames": len(gaps)}


def missed(row: Mapping[str, Any]) -> list[str]:
    """Describe the limits that a report misses."""
    file, opens = row["file"], {form: median(one["s"]) for form, one in row["open"].items()}
    slow = [f"{what} {file[what]:.2f}" for what in ("save_s", "load_s") if file[what] > LIMIT_FILE_S]
    slow += [f"{file['bytes']:,} bytes"] * (file["bytes"] > LIMIT_BYTES)
    slow += [f"{form} opens in {seconds:.2f} s" for form, seconds in opens.items() if seconds > LIMIT_S]
    pans = row["pan"].items()
    return slow + [f"{name} pans at {one['fps']:.0f} frames/s" for name, one in pans if one["fps"] < LIMIT_FPS]


def lines(name: str, row: Mapping[str, Any]) -> Iterator[str]:
    """Format a report's figures as text."""
    file = row["file"]
    yield f"{name}: saved in {file['save_s']:.2f} s, loaded in {file['load_s']:.2f} s, {file['bytes']:,} bytes"
    for form, one in row["open"].items():
        least, middle, most = min(one["s"]), median(one["s"]), max(one["s"])
        yield f"  {form}: open in {middle:.2f} s ({least:.2f} to {most:.2f}), {one['bytes']:,} bytes"
    for view, one in row["pan"].items():
        frames = f"{one['fps']:.0f} frames/s, longest {one['longest_ms']:.0f} ms"
        yield f"  {view}: shown in {one['show_s']:.2f} s, {frames}"


if __name__ == "__main__":
    sys.exit(main())
