"""What NVTX ranges cost: nothing where no tool listens, and how much where one does.

``python -m benchmarks.ranges`` prepares a small model in new processes, in turn: with ranges turned off, with no tool,
and with the tool of ``tests/support/nvtx_tool.cpp`` attached, which hears each range and writes nothing down. In each,
replays with and without what ranges add are timed in turn, and so are eager runs. Needs a C++ compiler for the tool;
without one that column is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.common import options, write
from nimble_core.profiling.machine import environment

ROOT = Path(__file__).parent.parent
TOOL = ROOT / "tests" / "support" / "nvtx_tool.cpp"
CALLS = 16
KINDS = ("turned off", "no tool", "a tool listens")
ROWS = {
    "ask_us": "asking whether a tool listens, once a process",
    "bare_us": "replay, by the class's own method",
    "replay_us": "replay, as the engine does it",
    "replay_adds_us": "what ranges add to a replay",
    "eager_us": "eager run of {calls} calls",
    "annotated_us": "eager run inside annotated(...)",
    "call_adds_us": "what annotated adds to a call",
}


def main() -> None:
    """Measure and print one row for each thing that is done."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each kind (default: 5)")
    parser.add_argument("--device", default="", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measured(given.device)))
        return
    stamp = environment(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    taken = compared(given.rounds, given.device)
    write(given.out, {"samples": taken}, stamp)
    print(table(taken))


def compared(rounds: int, device: str) -> dict[str, list[dict[str, float]]]:
    """Take samples of each kind in turn; one process each."""
    with tempfile.TemporaryDirectory() as folder:
        tool = compiled(Path(folder))
        kinds = KINDS if tool else KINDS[:2]
        taken: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind in kinds:
                taken[kind].append(sample(kind, tool, device))
    return taken


def compiled(folder: Path) -> Path | None:
    """Build the tool; None without a compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"]
    made = folder / "tool.so"
    subprocess.run([compiler, *flags, str(TOOL), "-o", str(made)], check=True)
    return made


def sample(kind: str, tool: Path | None, device: str) -> dict[str, float]:
    """Measure in one process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NVTX_")}
    if kind == "turned off":
        environment["NIMBLE_NVTX"] = "0"
    elif kind == "a tool listens":
        environment["NVTX_INJECTION64_PATH"] = str(tool)
    command = [sys.executable, "-m", "benchmarks.ranges", "--child", "--device", device]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(device: str) -> dict[str, float]:
    """Microseconds of each thing, in this process."""
    from nimble_core import Nimble, Options
    from nimble_core.profiling.nvtx import listener
    from nimble_viz.collect.annotated import annotated

    start = time.perf_counter_ns()
    listener()
    ask = time.perf_counter_ns() - start
    torch.manual_seed(0)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(CALLS))).eval().to(device)
    x = torch.randn(4, 32, device=device)
    net = Nimble(model, Options(policy="single", tune="off", fuse="none")).prepare(x)
    executable = net.engines[0].executable

    def eager() -> object:
        with torch.no_grad():
            return model(x)

    def marked() -> object:
        with torch.no_grad(), annotated(net):
            return model(x)

    settle: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    bare, replay, replay_adds = in_turn(partial(type(executable).replay, executable), executable.replay, settle, 2000)
    plain, inside, run_adds = in_turn(eager, marked, settle, 200)
    return {
        "ask_us": ask / 1e3,
        "bare_us": bare,
        "replay_us": replay,
        "replay_adds_us": replay_adds,
        "eager_us": plain,
        "annotated_us": inside,
        "call_adds_us": run_adds / CALLS,
    }


def in_turn(
    one: Callable[[], object], other: Callable[[], object], settle: Callable[[], object], count: int
) -> tuple[float, float, float]:
    """Median of each and of the differences of neighbours, microseconds; each runs until the device has finished."""
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(2 * (count + count // 10)):
        # One first, other first, in turn: what runs second finds warmer caches.
        which = index % 2 ^ index // 2 % 2
        start = time.perf_counter_ns()
        (other if which else one)()
        settle()
        times[which].append((time.perf_counter_ns() - start) / 1e3)
    first, second = (kept[count // 10 :] for kept in times)
    return median(first), median(second), median(b - a for a, b in zip(first, second, strict=True))


def table(taken: dict[str, list[dict[str, float]]]) -> str:
    """Medians over processes, with the least and the most, as a Markdown table."""
    kinds = list(taken)
    lines = [f"| µs | {' | '.join(kinds)} |", f"| --- |{' ---: |' * len(kinds)}"]
    for row, words in ROWS.items():
        cells = []
        for kind in kinds:
            samples = [one[row] for one in taken[kind]]
            cells.append(f"{median(samples):.2f} ({min(samples):.2f} to {max(samples):.2f})")
        lines.append(f"| {words.format(calls=CALLS)} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
