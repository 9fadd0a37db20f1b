"""How long scheduling takes and how much memory: reduction, matching, chains, folding and waits, from 1,300 to 100,000
calls.

``python benchmarks/scheduling.py --out FILE`` prints a table, writes the figures as JSON, and fails (exit code 1) where
a target is missed. Each case runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nimble_core.check import check_schedule
from nimble_core.costs import Costs
from nimble_core.graph import graph_from_edges
from nimble_core.policies import nimble

Edges = list[tuple[int, int]]
LIMITS = {1_300: (0.020, None), 10_000: (1.0, None), 100_000: (30.0, 2 << 30)}
"""Calls: (seconds, peak bytes), from edges to a complete schedule."""


def layered(size: int, width: int, seed: int) -> Edges:
    """Layers of ``width`` calls; each reads one to three calls of the three layers before it."""
    draw = random.Random(seed)
    edges: Edges = []
    for call in range(width, size):
        begin = call - call % width
        for _ in range(draw.randint(1, 3)):
            edges.append((draw.randrange(max(0, begin - 3 * width), begin), call))
    return edges


def training(size: int, sinks: int, seed: int) -> Edges:
    """A training step: forward with skip connections, backward mirroring it, and ``sinks`` weight gradients.

    Each weight gradient reads an activation and the gradient that arrives there, and nobody reads it.
    """
    draw = random.Random(seed)
    forward = (size - sinks) // 2
    backward = size - sinks - forward
    edges: Edges = []
    for call in range(1, forward):
        edges.append((call - 1, call))
        if call > 8 and draw.random() < 0.2:
            edges.append((call - draw.randint(2, 8), call))
    gradient = forward - 1
    call = forward
    owed = 0
    for step in range(backward):
        mirrored = forward - 1 - min(step, forward - 1)
        edges += [(gradient, call), (mirrored, call)] if mirrored != gradient else [(gradient, call)]
        gradient = call
        call += 1
        owed += sinks
        while owed >= backward and call < size:
            edges.append((gradient, call))
            if mirrored:
                edges.append((mirrored - 1, call))
            call += 1
            owed -= backward
    return edges


CASES: dict[str, Callable[[int], Edges]] = {
    "layered, width 16": lambda size: layered(size, 16, seed=1),
    "layered, width 1,000": lambda size: layered(size, 1_000, seed=2),
    "training, 15,000 sinks": lambda size: training(size, min(15_000, size // 3), seed=3),
}


def measure(case: str, size: int, cap: int | None, repeats: int) -> dict[str, Any]:
    """Time one case in this process; seconds are medians over ``repeats``."""
    edges = CASES[case](size)
    draw = random.Random(0)
    costs = Costs(ns=tuple(draw.uniform(1_000, 50_000) for _ in range(size)), source="drawn")
    samples: dict[str, list[float]] = {"graph": [], "policy": [], "check": []}
    for _ in range(repeats):
        begin = time.perf_counter()
        graph = graph_from_edges(size, edges)
        reduced = time.perf_counter()
        schedule = nimble(graph, costs, max_streams=cap)
        planned = time.perf_counter()
        check_schedule(graph, schedule)
        checked = time.perf_counter()
        samples["graph"].append(reduced - begin)
        samples["policy"].append(planned - reduced)
        samples["check"].append(checked - planned)
    return {
        "case": case,
        "calls": size,
        "max_streams": cap,
        "edges": len(graph.edges),
        "meg_edges": len(graph.meg),
        "streams": schedule.streams,
        "syncs": len(schedule.syncs),
        "added_order": len(schedule.added_order),
        "schedule_s": statistics.median(map(sum, zip(samples["graph"], samples["policy"], strict=True))),
        "check_s": statistics.median(samples["check"]),
        "samples_s": samples,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    cpu = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return {
        "python": platform.python_version(),
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def main() -> int:
    """Run all cases, print the table, write the file; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(LIMITS), help="numbers of calls")
    parser.add_argument("--one", nargs=3, metavar=("CASE", "CALLS", "CAP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        case, size, cap = options.one[0], int(options.one[1]), int(options.one[2])
        print(json.dumps(measure(case, size, cap or None, repeats=9 if size < 5_000 else 3 if size < 50_000 else 1)))
        return 0
    results = []
    print(f"{'case':<24}{'calls':>9}{'cap':>6}{'streams':>9}{'syncs':>9}{'schedule':>11}{'check':>11}{'peak':>10}")
    for size in options.sizes:
        for case in CASES:
            for cap in (0, 32):
                command = [sys.executable, __file__, "--one", case, str(size), str(cap)]
                result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                seconds, peak = LIMITS.get(size, (None, None))
                result["within_target"] = (seconds is None or result["schedule_s"] <= seconds) and (
                    peak is None or result["peak_bytes"] <= peak
                )
                results.append(result)
                print(
                    f"{case:<24}{size:>9,}{cap or '-':>6}{result['streams']:>9,}{result['syncs']:>9,}"
                    f"{result['schedule_s'] * 1e3:>8.1f} ms{result['check_s'] * 1e3:>8.1f} ms"
                    f"{result['peak_bytes'] / 2**20:>6.0f} MiB{'' if result['within_target'] else '  MISSED'}",
                    flush=True,
                )
    if options.out:
        options.out.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")
    return 0 if all(result["within_target"] for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
