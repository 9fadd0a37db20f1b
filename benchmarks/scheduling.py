"""How time and memory grow with a graph: every step from hazards to a simulated, memory-planned schedule, timed apart.

``python -m benchmarks.scheduling --out FILE`` prints a table, writes the figures as JSON, and fails (exit status 1)
where a limit is missed. Each case runs in a process of its own: every step is timed, then what it allocates at most,
its result included, is traced (``tracemalloc``, which slows everything). The process' resident memory is that before
the arena is planned.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import time
import tracemalloc
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import in_process, options, write
from nimble_core.algorithms.reachability import predecessor_lists
from nimble_core.ir.call_graph import CallGraph, build_graph
from nimble_core.ir.costs import Costs
from nimble_core.ir.program import Access, Call, Program, Storage, TensorRef
from nimble_core.ir.schedule import Schedule
from nimble_core.profiling.machine import environment
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


def chains(size: int, width: int) -> Edges:
    """``width`` chains of equal length; one call in ten also reads the neighbouring chain. As wide as it has chains."""
    draw = random.Random(1)
    edges: Edges = []
    for call in range(width, size):
        edges.append((call - width, call))
        if width > 1 and draw.random() < 0.1:
            row = call - call % width - width
            edges.append((row + (call + 1) % width, call))
    return edges


def layered(size: int, width: int) -> Edges:
    """Layers of ``width`` calls; each reads one to three calls of the three layers before it."""
    draw = random.Random(2)
    edges: Edges = []
    for call in range(width, size):
        begin = call - call % width
        for _ in range(draw.randint(1, 3)):
            edges.append((draw.randrange(max(0, begin - 3 * width), begin), call))
    return edges


def training(size: int, sinks: int) -> Edges:
    """Make a training step: forward with skip connections, backward mirroring it, and ``sinks`` weight gradients.

    Each weight gradient reads an activation and the gradient that arrives there, and nobody reads it.
    """
    draw = random.Random(3)
    forward = (size - sinks) // 2
    backward = size - sinks - forward
    edges: Edges = []
    for call in range(1, forward):
        edges.append((call - 1, call))
        if call > 8 and draw.random() < 0.2:
            edges.append((call - draw.randint(2, 8), call))
    gradient, call, owed = forward - 1, forward, 0
    for step in range(backward):
        mirrored = forward - 1 - min(step, forward - 1)
        edges += [(gradient, call), (mirrored, call)] if mirrored != gradient else [(gradient, call)]
        gradient, call, owed = call, call + 1, owed + sinks
        while owed >= backward and call < size:
            edges += [(gradient, call), (mirrored - 1, call)] if mirrored else [(gradient, call)]
            call, owed = call + 1, owed - backward
    return edges


SHAPES: dict[str, Callable[[int, int], Edges]] = {"chains": chains, "layered": layered, "training": training}
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


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return what the function returns; None where it takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return function()
    except TimeoutError:
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def steps_of(
    program: Program, costs: Costs, graph: CallGraph, free: Schedule, capped: Schedule
) -> dict[str, Callable[[], Any]]:
    """Return the steps by name; those after a policy work on the plan of ``nimble``, capped where they say so."""
    return {
        "build graph": lambda: build_graph(program),
        "nimble": lambda: nimble(graph, costs),
        f"nimble, {CAP} streams": lambda: nimble(graph, costs, max_streams=CAP),
        f"contention, {CAP} streams": lambda: POLICIES["contention"](graph, costs, max_streams=CAP),
        "check": lambda: check_schedule(graph, free),
        f"check, {CAP} streams": lambda: check_schedule(graph, capped),
        "simulate exact": lambda: simulate(graph, free, costs, EXACT),
        "simulate H200": lambda: simulate(graph, free, costs, H200),
        f"simulate H200, {CAP} streams": lambda: simulate(graph, capped, costs, H200),
        "release plan": lambda: release_plan(program, free),
        "arena": lambda: plan_memory(program, free),
    }


def measure(shape: str, size: int, width: int, limit_s: float, hopeless: Collection[str]) -> dict[str, Any]:
    """Run every step of one case in this process, but for the ``hopeless``.

    Returns:
        Seconds of up to five runs of each step, and the peak bytes of one; None where it was given up.
    """
    program, costs = program_of(size, SHAPES[shape](size, width)), costs_of(size)
    graph = build_graph(program)
    free, capped = nimble(graph, costs), nimble(graph, costs, max_streams=CAP)
    plans = {"nimble": free, f"nimble, {CAP} streams": capped}
    steps, samples = steps_of(program, costs, graph, free, capped), dict[str, Any]()
    for name, step in steps.items():
        if name == "arena":
            # Of this program alone: what getrusage says counts the process that started it as well.
            (held,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        samples[name] = None if name in hopeless else within(limit_s, partial(_seconds, step))
    # Tracing allocations takes several times as long, so it follows when all is timed.
    peaks = {name: taken and within(3 * limit_s, partial(_peak, steps[name])) for name, taken in samples.items()}
    return {
        "shape": shape,
        "calls": size,
        "width": width,
        "streams": {name: plan.streams for name, plan in plans.items()},
        "syncs": {name: len(plan.syncs) for name, plan in plans.items()},
        "samples_s": samples,
        "best_s": {name: taken and min(taken) for name, taken in samples.items()},
        "peak_bytes": peaks,
        "resident_bytes": int(held) * 1024,
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
        result = step()  # is part of it
        _, peak = tracemalloc.get_traced_memory()
        del result
        return peak
    finally:
        tracemalloc.stop()


def missed(result: dict[str, Any]) -> list[str]:
    """Describe the limits that a case misses."""
    seconds, calls = result["best_s"], result["calls"]
    taken = {name: (one,) for name, one in seconds.items()}
    taken |= {f"schedule, by {name}": (seconds["build graph"], seconds[name]) for name in result["streams"]}
    wrong = []
    for name, parts in taken.items():
        limit = LIMITS_S.get(name.split(",")[0], {}).get(calls)
        if limit is not None and (None in parts or sum(parts) > limit):
            wrong.append(f"{name} over {limit:g} s")
    if calls <= 100_000 and result["resident_bytes"] > LIMIT_BYTES:
        wrong.append(f"{result['resident_bytes'] / 2**30:.1f} GiB resident")
    return wrong


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Format a case as text."""
    resident = f"{result['resident_bytes'] / 2**20:.0f} MiB resident"
    yield f"{result['shape']}, {result['calls']:,} calls, width {result['width']:,}; {resident}"
    for name, seconds in result["best_s"].items():
        peak = result["peak_bytes"][name]
        time_said = "  given up" if seconds is None else f"{seconds * 1e3:>8.1f} ms"
        yield f"  {name:<28}{time_said}" + ("" if peak is None else f"{peak / 2**20:>9.1f} MiB")
    yield from (f"  MISSED: {one}" for one in result["missed"])


def main() -> int:
    """Run all cases, print the table, write the file; 1 if a limit is missed."""
    parser = options(__doc__)
    parser.add_argument("--calls", type=int, default=SIZES[-1], help="leave out larger graphs")
    parser.add_argument("--limit", type=float, default=10.0, help="give a step up after this many seconds")
    parser.add_argument("--one", nargs=3, metavar=("SHAPE", "CALLS", "WIDTH"), help=argparse.SUPPRESS)
    parser.add_argument("--hopeless", nargs="*", default=[], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        shape, size, width = given.one
        print(json.dumps(measure(shape, int(size), int(width), given.limit, given.hopeless)))
        return 0
    stamp, results, given_up = environment("cpu"), list[dict[str, Any]](), set[tuple[str, str]]()
    for case in (case for case in CASES if case[1] <= given.calls):
        # What was given up once is not tried on larger graphs of that shape.
        hopeless = sorted(name for shape, name in given_up if shape == case[0])
        asked = ["--limit", str(given.limit), "--one", *map(str, case), "--hopeless", *hopeless]
        results.append(result := in_process("benchmarks.scheduling", *asked))
        given_up |= {(case[0], name) for name, seconds in result["best_s"].items() if seconds is None}
        result["missed"] = missed(result)
        print(*lines(result), sep="\n", flush=True)
    write(given.out, {"limits_s": LIMITS_S, "give_up_s": given.limit, "results": results}, stamp)
    return int(any(result["missed"] for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
