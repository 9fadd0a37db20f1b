"""How time and memory grow with a graph: every step from hazards to a simulated, memory-planned schedule, timed apart.

``python -m benchmarks.scheduling --out FILE`` prints a table, writes the figures as JSON, and fails (exit status 1)
where a limit is missed. Each case runs in two processes of its own: one measures time and the peak of its resident
memory, one (``tracemalloc``, which slows everything) the peak of what each step allocates, its result included.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from nimble_core.algorithms.reachability import predecessor_lists
from nimble_core.algorithms.transitive_reduction import transitive_reduction
from nimble_core.ir.call_graph import CallGraph, build_graph, predecessors
from nimble_core.ir.costs import Costs
from nimble_core.ir.program import Access, Call, Program, Storage, TensorRef
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.liveness import release_plan
from nimble_core.scheduling.memory_planner import plan_memory
from nimble_core.scheduling.policies import POLICIES, nimble
from nimble_core.scheduling.simulator import EXACT, H200, simulate
from nimble_core.scheduling.verify_schedule import check_schedule

Edges = list[tuple[int, int]]

CAP = 32
"""Streams that an engine uses at most unless told otherwise."""

LIMITS_S = {
    "schedule": {1_300: 0.10, 10_000: 1.0, 100_000: 15.0},
    "check": {1_300: 0.02, 10_000: 0.2, 100_000: 4.0},
    "simulate exact": {1_300: 0.02, 10_000: 0.2, 100_000: 2.0},
    "simulate H200": {1_300: 0.15, 10_000: 1.5, 100_000: 8.0},
    "release plan": {1_300: 0.02, 10_000: 0.2, 100_000: 4.0},
}
"""Most seconds of a step by number of calls; "schedule" is hazards and policy ``nimble``: Program to Schedule."""

LIMIT_BYTES = 2 << 30
"""Most resident memory of a process that did all steps but planning the arena, at 100,000 calls."""


def chains(size: int, width: int, seed: int) -> Edges:
    """``width`` chains of equal length; one call in ten also reads the neighbouring chain. As wide as it has chains."""
    draw = random.Random(seed)
    edges: Edges = []
    for call in range(width, size):
        edges.append((call - width, call))
        if width > 1 and draw.random() < 0.1:
            row = call - call % width - width
            edges.append((row + (call + 1) % width, call))
    return edges


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
    """Make a training step: forward with skip connections, backward mirroring it, and ``sinks`` weight gradients.

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


SHAPES: dict[str, Callable[[int, int], Edges]] = {
    "chains": lambda size, width: chains(size, width, seed=1),
    "layered": lambda size, width: layered(size, width, seed=2),
    "training": lambda size, width: training(size, width, seed=3),
}
"""Edges from calls and width: number of chains, calls in a layer, weight gradients."""

SIZES = (1_300, 3_000, 10_000, 30_000, 100_000)
WIDTHS = (4, 16, 64, 250, 1_000, 2_500)
CASES = [
    *(("chains", size, 1) for size in SIZES),
    *(("layered", size, width) for size in SIZES for width in (16, 1_000)),
    *(("training", size, size * 15 // 100) for size in SIZES),
    *(("chains", 10_000, width) for width in WIDTHS),
]


def program_of(size: int, edges: Edges) -> Program:
    """Make a Program with exactly these hazards: each call writes a storage of its own and reads those of its sources.

    What nobody reads is an output, as a weight gradient is. Storages are of drawn sizes from 4 KiB to 4 MiB.
    """
    draw = random.Random(4)
    nbytes = [4096 << draw.randrange(11) for _ in range(size)]
    refs = [TensorRef(call, 0, (nbytes[call] // 4,), (1,), "float32", 4) for call in range(size)]
    read = {u for u, _ in edges}
    return Program(
        calls=tuple(
            Call(call, "aten.add.Tensor", (), (*(Access(refs[u], False) for u in sources), Access(refs[call], True)))
            for call, sources in enumerate(predecessor_lists(size, dict.fromkeys(edges)))
        ),
        storages=tuple(Storage(count, "intermediate") for count in nbytes),
        inputs=(),
        outputs=tuple(refs[call] for call in range(size) if call not in read),
    )


def costs_of(size: int) -> Costs:
    """Drawn durations from 1 to 50 microseconds, and the shares of a device that 50 different launches fill."""
    draw = random.Random(5)
    return Costs(
        ns=tuple(draw.uniform(1_000, 50_000) for _ in range(size)),
        demand=tuple(draw.randint(1, 50) / 50 for _ in range(size)),
        source="drawn",
    )


class OutOfTime(Exception):
    """A step took longer than it may."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block after that many seconds."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def steps_of(
    program: Program, costs: Costs, graph: CallGraph, free: Schedule, capped: Schedule
) -> dict[str, Callable[[], Any]]:
    """Return the steps by name; those after a policy work on the plan of ``nimble``, capped where they say so."""
    before = predecessors(graph)
    others = [name for name in POLICIES if name not in ("nimble", "single")]
    return {
        "build graph": lambda: build_graph(program),
        "reduction": lambda: transitive_reduction(before),
        "single": lambda: POLICIES["single"](graph, costs),
        "nimble": lambda: nimble(graph, costs),
        f"nimble, {CAP} streams": lambda: nimble(graph, costs, max_streams=CAP),
        **{
            f"{name}, {CAP} streams": functools.partial(POLICIES[name], graph, costs, max_streams=CAP)
            for name in others
        },
        "check": lambda: check_schedule(graph, free),
        f"check, {CAP} streams": lambda: check_schedule(graph, capped),
        "simulate exact": lambda: simulate(graph, free, costs, EXACT),
        "simulate H200": lambda: simulate(graph, free, costs, H200),
        f"simulate H200, {CAP} streams": lambda: simulate(graph, capped, costs, H200),
        "release plan": lambda: release_plan(program, free),
        "arena": lambda: plan_memory(program, free),
    }


def measure(
    shape: str, size: int, width: int, *, limit_s: float, hopeless: Collection[str], memory: bool
) -> dict[str, Any]:
    """Run every step of one case in this process, but for the ``hopeless``.

    Returns:
        Seconds of up to five runs of each step, or with ``memory`` the peak bytes of one; None where it was given up.
    """
    program = program_of(size, SHAPES[shape](size, width))
    costs = costs_of(size)
    graph = build_graph(program)
    free, capped = nimble(graph, costs), nimble(graph, costs, max_streams=CAP)
    plans = {"nimble": free, f"nimble, {CAP} streams": capped}
    found: dict[str, Any] = {}
    for name, step in steps_of(program, costs, graph, free, capped).items():
        if name == "arena":
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found[name] = None
        if name not in hopeless:
            with suppress(OutOfTime), at_most(limit_s):
                found[name] = _peak(step) if memory else _seconds(step)
    if memory:
        return {"peak_bytes": found}
    return {
        "shape": shape,
        "calls": size,
        "width": width,
        "edges": len(graph.edges),
        "meg_edges": len(graph.meg),
        "streams": {name: plan.streams for name, plan in plans.items()},
        "syncs": {name: len(plan.syncs) for name, plan in plans.items()},
        "samples_s": found,
        "best_s": {name: samples and min(samples) for name, samples in found.items()},
        "resident_bytes": resident,
    }


def _seconds(step: Callable[[], Any]) -> list[float]:
    """Up to five runs, for three seconds. The fastest counts: steps are deterministic, what slows one is not theirs."""
    samples: list[float] = []
    while len(samples) < 5 and sum(samples) < 3.0:
        begin = time.perf_counter()
        step()
        samples.append(time.perf_counter() - begin)
    return samples


def _peak(step: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        result = step()
        _, peak = tracemalloc.get_traced_memory()
        del result
        return peak
    finally:
        tracemalloc.stop()


def missed(result: dict[str, Any]) -> list[str]:
    """Describe the limits that a case misses."""
    seconds, calls = result["best_s"], result["calls"]
    taken = {
        "schedule": (seconds["build graph"], seconds["nimble"]),
        "schedule (capped)": (seconds["build graph"], seconds[f"nimble, {CAP} streams"]),
        **{name: (one,) for name, one in seconds.items()},
    }
    wrong = []
    for name, parts in taken.items():
        limit = LIMITS_S.get(name.split(" (")[0].split(",")[0], {}).get(calls)
        if limit is not None and (None in parts or sum(parts) > limit):
            wrong.append(f"{name} over {limit:g} s")
    if calls <= 100_000 and result["resident_bytes"] > LIMIT_BYTES:
        wrong.append(f"{result['resident_bytes'] / 2**30:.1f} GiB resident")
    return wrong


def environment() -> dict[str, Any]:
    """Describe what the figures depend on."""
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
    """Run all cases, print the table, write the file; 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    parser.add_argument("--calls", type=int, default=SIZES[-1], help="leave out larger graphs")
    parser.add_argument("--limit", type=float, default=10.0, help="give a step up after this many seconds")
    parser.add_argument("--one", nargs=4, metavar=("SHAPE", "CALLS", "WIDTH", "WHAT"), help=argparse.SUPPRESS)
    parser.add_argument("--hopeless", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        shape, size, width, what = options.one
        # Tracing allocations takes several times as long.
        memory, limit_s = what == "memory", options.limit * (3 if what == "memory" else 1)
        result = measure(shape, int(size), int(width), limit_s=limit_s, hopeless=options.hopeless, memory=memory)
        print(json.dumps(result))
        return 0
    stamp = environment()
    results = []
    given_up: list[tuple[str, int, str]] = []
    for shape, size, width in CASES:
        if size > options.calls:
            continue
        result = {}
        for what in ("time", "memory"):
            # What was given up once is not tried on larger graphs of that shape, nor for its memory.
            least = size + (what == "memory")
            hopeless = {name for one, calls, name in given_up if one == shape and calls < least}
            command = [sys.executable, "-m", "benchmarks.scheduling", "--limit", str(options.limit)]
            command += ["--one", shape, str(size), str(width), what, "--hopeless", *sorted(hopeless)]
            result |= json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            given_up += [(shape, size, name) for name, seconds in result["best_s"].items() if seconds is None]
        result["missed"] = missed(result)
        results.append(result)
        print(f"{shape}, {size:,} calls, width {width:,}; {result['resident_bytes'] / 2**20:.0f} MiB resident")
        for name, seconds in result["best_s"].items():
            peak = result["peak_bytes"][name]
            print(
                f"  {name:<28}"
                + (f"over {options.limit:>4.0f} s" if seconds is None else f"{seconds * 1e3:>8.1f} ms")
                + ("" if peak is None else f"{peak / 2**20:>9.1f} MiB")
            )
        for line in result["missed"]:
            print(f"  MISSED: {line}")
        sys.stdout.flush()
    if options.out:
        file = {"environment": stamp, "limits_s": LIMITS_S, "give_up_s": options.limit, "results": results}
        options.out.write_text(json.dumps(file, indent=1) + "\n")
    return 1 if any(result["missed"] for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
