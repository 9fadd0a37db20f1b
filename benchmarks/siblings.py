"""What merging sibling convolutions is worth without a compiler: the same model with and without it, in turn.

    python -m benchmarks.siblings --out benchmarks/results/siblings-h200.json

Each model is prepared twice with ``fuse="library"``, once with ``merge_siblings`` kept from convolutions, and both are
replayed in turn, in a process of its own. A ratio above 1 says that merging is faster. Rows that the file holds are not
measured again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

from benchmarks.cuda import figures, fill_rows, options_of_rows
from benchmarks.zoo import load, precision
from nimble_core.api.engine import Engine
from nimble_core.api.nimble import Nimble
from nimble_core.autotune.capture_pipeline import device_for
from nimble_core.ir.measurement import interleave, ratio
from nimble_core.scheduling.options import Options

MODELS = ("GoogLeNet", "Inception-v3", "DARTS")
DTYPES = ("float16", "float32")
MERGED, APART = "merged", "apart"
ROUNDS, SECONDS = 301, 4.0


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the results file lacks, and print a line for each row."""
    parser = options_of_rows(__doc__, MODELS)
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=list(DTYPES))
    given = parser.parse_args(argv)
    if given.child:
        given.out.write_text(json.dumps(one_row(given.models[0], given.dtypes[0])))
        return
    wanted = {
        f"{name}, {dtype}": ("--models", name, "--dtypes", dtype) for name in given.models for dtype in given.dtypes
    }
    fill_rows(given.out, "benchmarks.siblings", wanted, line)


def one_row(name: str, dtype: str) -> dict[str, Any]:
    """Both ways of one model at batch 1, on one stream and on as many as are fastest."""
    with precision(dtype):
        model, args, kwargs = load(name, dtype)
        return {policy: both(model, args, kwargs, policy) for policy in ("single", "auto")}


def both(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """Times of both, and what was merged."""
    options = Options(fuse="library", policy=policy)
    nets = {MERGED: Nimble(model, options).prepare(*args, **kwargs)}
    with patch("nimble_core.compiler.passes.merge_siblings._sites_pay", lambda *given: False):
        nets[APART] = Nimble(model, options).prepare(*args, **kwargs)
    engines = {name: net.engines[0] for name, net in nets.items()}
    device = device_for(engines[MERGED].signature.device)
    replays: dict[str, Callable[[], object]] = {name: one.executable.replay for name, one in engines.items()}
    taken = interleave(
        replays,
        clock_ns=device.clock_ns,
        synchronize=device.synchronize,
        rounds=ROUNDS,
        budget_s=SECONDS,
        rehearse=True,
    )
    found = {
        "ratio": asdict(ratio(taken[MERGED], taken[APART])),
        "times": {name: figures(one) for name, one in taken.items()},
        "plans": {name: described(one) for name, one in engines.items()},
    }
    for net in nets.values():
        net.close()
    return found


def described(engine: Engine) -> dict[str, Any]:
    """What was chosen for an engine."""
    program = engine.recorded.recording.program
    return {
        "fuse": program.fuse,
        "calls": len(program.calls),
        "merged": sum(choice.kernel == "merged siblings" for choice in program.choices),
        "streams": engine.schedule.streams,
        "notes": list(engine.notes),
    }


def line(key: str, row: Mapping[str, Any]) -> str:
    """One row for a terminal."""
    said = []
    for policy, found in row.items():
        times, merged = found["times"], found["plans"][MERGED]["merged"]
        said.append(
            f"{policy}: {found['ratio']['value']:.3f}x with {merged} groups merged "
            f"({times[APART]['median us']:.0f} to {times[MERGED]['median us']:.0f} µs)"
        )
    return f"{key}: {'; '.join(said)}"


if __name__ == "__main__":
    main()
