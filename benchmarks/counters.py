"""What it is worth to set counters in libraries' workspaces to zero at once: the same plan with and without, in turn.

    python -m benchmarks.counters --out benchmarks/results/counters-h200.json

Every row prepares its model twice, once with workspaces where they lie without counters (``workspace_zeroing``),
and runs both in turn, in a process of its own: replays for inference; for training one step, and ten of which only the
last is waited for. A ratio above 1 says that zeroing at once is faster. Rows that the file holds are not measured
again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

from benchmarks import train_zoo, training
from benchmarks.cuda import figures, fill_rows, options_of_rows
from benchmarks.zoo import load, precision
from nimble_core.api.engine import Engine
from nimble_core.api.nimble import Nimble
from nimble_core.autotune.capture_pipeline import device_for
from nimble_core.ir.measurement import interleave, ratio
from nimble_core.ir.schedule import Schedule
from nimble_core.runtime.cuda.device import CudaDevice
from nimble_core.runtime.device import Device
from nimble_core.scheduling.memory_requirements import Layout
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.verify_capture import leading_fills
from nimble_core.tracing.recording import Recording

ROWS = {
    "BERT-base 128": ("tf32, 32, drop-in", "tf32, 32, whole step", "tf32, 32, inductor", "float32, 1, library"),
    "GPT-2 128": ("float32, 1, library",),
    "CLIP ViT-B/32": ("float32, 1, library",),
}
"""Of each model: type, batch, and what is trained or whose kernels are replayed."""
AT_ONCE, EACH = "at once", "each"
ROUNDS, SECONDS, IN_A_ROW = 301, 3.0, 10


@dataclass(frozen=True, slots=True)
class Way:
    """One of the two.

    Args:
        runs: what is timed, by name.
        engines: that run.
        owner: who closes them when it goes.
    """

    runs: Mapping[str, Callable[[], object]]
    engines: tuple[Engine, ...]
    owner: object


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the results file lacks, and print a line for each row."""
    parser = options_of_rows(__doc__, list(ROWS))
    parser.add_argument("--row", help="one of the models'; all by default")
    given = parser.parse_args(argv)
    if given.child:
        given.out.write_text(json.dumps(one_row(given.models[0], *given.row.split(", "))))
        return
    wanted = {
        f"{name}, {row}": ("--models", name, "--row", row)
        for name in given.models
        for row in ROWS[name]
        if given.row in (None, row)
    }
    fill_rows(given.out, "benchmarks.counters", wanted, line)


def one_row(name: str, dtype: str, batch: str, how: str) -> dict[str, Any]:
    """Times of both ways, and what their graphs hold."""
    make = replays if how in ("library", "inductor") else steps
    with precision(dtype):
        ways = {}
        for way in (AT_ONCE, EACH):
            with nullcontext() if way == AT_ONCE else patch.object(CudaDevice, "lay_out", sharing(CudaDevice.lay_out)):
                ways[way] = make(name, dtype, int(batch), how)
        device = device_for(ways[AT_ONCE].engines[0].signature.device)
        times = {what: both(device, {way: one.runs[what] for way, one in ways.items()}) for what in ways[EACH].runs}
    return {"graphs": {way: list(map(described, one.engines)) for way, one in ways.items()}, "times": times}


def sharing(lay_out: Callable[..., Layout | None]) -> Callable[..., Layout | None]:
    """The same, with workspaces where they share most memory."""

    def laid_out(
        device: CudaDevice, recording: Recording, schedule: Schedule, *, stagger: bool = False
    ) -> Layout | None:
        return lay_out(device, recording, schedule, stagger=False)

    return laid_out


def replays(name: str, dtype: str, batch: int, how: str) -> Way:
    """Of the kernels of ``how``, on one stream."""
    model, args, kwargs = load(name, dtype, batch)
    options = Options(fuse="library" if how == "library" else "inductor", policy="single", tune="off")
    net = Nimble(model, options).prepare(*args, **kwargs)
    return Way({"replay": net.engines[0].executable.replay}, net.engines, net)


def steps(name: str, dtype: str, batch: int, how: str) -> Way:
    """Of training with Inductor's kernels."""
    task = train_zoo.load(name, dtype, batch)
    make = training._drop_in if how == "drop-in" else training._ours
    options = Options(fuse="inductor", tune="off", outputs=task.outputs if how == "drop-in" else "copy")
    ready = make(task, training.Settings(), options)
    assert ready.engine is not None
    halves = [ready.engine] if ready.engine.backward is None else [ready.engine, ready.engine.backward]

    def step() -> object:
        return ready.step(*task.batches[0])

    def in_a_row() -> None:
        for _ in range(IN_A_ROW):
            step()

    return Way({"step": step, f"{IN_A_ROW} steps in a row": in_a_row}, tuple(halves), ready)


def both(device: Device, runs: Mapping[str, Callable[[], object]]) -> dict[str, Any]:
    """Times of both, and the speed of the one over the other."""
    taken = interleave(
        runs, clock_ns=device.clock_ns, synchronize=device.synchronize, rounds=ROUNDS, budget_s=SECONDS, rehearse=True
    )
    over = asdict(ratio(taken[AT_ONCE], taken[EACH]))
    return {"ratio": over, "times": {way: figures(one) for way, one in taken.items()}}


def described(engine: Any) -> dict[str, int]:
    """What the graph of an engine holds."""
    raw = engine.executable.raw
    return {
        "nodes": len(raw.nodes),
        "fills before a call": len(leading_fills(raw)),
        "streams": engine.executable.schedule.streams,
        "bytes": engine.executable.nbytes,
    }


def line(key: str, row: Mapping[str, Any]) -> str:
    """One row for a terminal."""
    fills = (sum(graph["fills before a call"] for graph in row["graphs"][way]) for way in (EACH, AT_ONCE))
    said = [
        f"{what} {found['ratio']['value']:.3f}x "
        f"({found['times'][EACH]['median us']:.0f} to {found['times'][AT_ONCE]['median us']:.0f} µs)"
        for what, found in row["times"].items()
    ]
    return f"{key}: {', '.join(said)}; fills {' to '.join(map(str, fills))}"


if __name__ == "__main__":
    main()
