"""Two checkouts of this project side by side on one GPU: does the newer one take as long as the older?

    git worktree add ../older REVISION
    python -m benchmarks.revisions --older ../older --out benchmarks/results/revisions-h200.json

For each row, each checkout prepares the same seeded model in a process of its own. The older one goes first and keeps
the plan it chose; the newer one finds that plan, so that both replay the same kernels on the same streams. Then the two
are timed in turn: host time of a call, time a call when calls follow each other (throughput), and device time of the
CUDA graphs that a call replays. Two processes of one checkout differ by a few percent, so each has two, the second pair
in the other order. What disturbs a host only adds time, so ratios are those of lower quartiles, the newer over the
older, with the lowest and highest of rounds.

Only the public API is used, which both checkouts have; models are this checkout's for both.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROWS = (
    ("ResNet-50", "float16", "inference"),
    ("GoogLeNet", "float16", "inference"),
    ("MobileNetV2", "float16", "inference"),
    ("BERT-base 128", "float16", "inference"),
    ("MobileNetV2 CIFAR", "tf32", "whole step"),
    ("MobileNetV2 CIFAR", "tf32", "drop-in"),
)
"""Model, precision, and what is prepared; training at batch 32."""

BAND = 0.03
"""What a change of code that changes no kernel may move a ratio by."""

CALLS = 50
ROUNDS = 15
ROOT = Path(__file__).parents[1]


def ratios(older: list[dict[str, float]], newer: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """For each measure the newer over the older, by lower quartiles, and the lowest and highest ratio of a round.

    >>> samples = [{"host_us": value} for value in (2.0, 3.0, 4.0, 9.0)]
    >>> ratios(samples, samples[::-1])["host_us"]["ratio"]
    1.0
    """
    found = {}
    for name in older[0]:
        each = [new[name] / old[name] for old, new in zip(older, newer, strict=True)]
        first = quantiles([one[name] for one in newer])[0] / quantiles([one[name] for one in older])[0]
        found[name] = {"ratio": first, "low": min(each), "high": max(each)}
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure the rows that the file does not hold yet; 1 if one moved by more than the band, or was not compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--older", type=Path, required=True, help="the other checkout")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of results; what it holds is kept")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="times each is sampled (default: %(default)s)")
    parser.add_argument("--rows", default="", help="only rows whose name holds this")
    given = parser.parse_args(arguments)
    results: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {"rows": {}}
    unlike: list[str] = []
    for name, dtype, kind in ROWS:
        row = f"{name}, {dtype}, {kind}"
        if row in results["rows"] or given.rows not in row:
            continue
        try:
            results["rows"][row] = _measured((name, dtype, kind), given.older, given.rounds)
        except UnlikeError as error:
            unlike.append(f"{row}: {error}")
            continue
        given.out.write_text(json.dumps(results, indent=1) + "\n")
        print(row, {name: round(one["ratio"], 3) for name, one in results["rows"][row]["ratios"].items()}, flush=True)
    moved = [
        f"{row}: {name} {one['ratio']:.3f}"
        for row, found in results["rows"].items()
        for name, one in found["ratios"].items()
        if name != "host_us" and abs(one["ratio"] - 1) > BAND
    ]
    moved += unlike
    print("\n".join(moved) or f"all throughputs and device times within {BAND:.0%}")
    return int(bool(moved))


class UnlikeError(Exception):
    """Two processes chose different plans: the kept one did not pass its check in one of them."""


def _measured(row: tuple[str, str, str], older: Path, rounds: int) -> dict[str, Any]:
    samples: dict[Path, list[dict[str, float]]] = {older: [], ROOT: []}
    prepared: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as plans:
        for order in ((older, ROOT), (ROOT, older)):
            running: dict[Path, subprocess.Popen[str]] = {}
            try:
                for place in order:  # one after the other: the second finds the plan of the first
                    running[place] = _start(row, place, plans)
                    found = _told(running[place])
                    if prepared and found != prepared:
                        raise UnlikeError(f"not compared: one process prepared {prepared}, another {found}")
                    prepared = found
                for _ in range(rounds):
                    for place, process in running.items():
                        samples[place].append(_asked(process))
            finally:
                for process in running.values():
                    process.kill()
                    process.communicate()  # and close its pipes
    was, now = samples[older], samples[ROOT]
    return {"ratios": ratios(was, now), "prepared": prepared, "older": was, "newer": now}


def _start(row: tuple[str, str, str], place: Path, plans: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "NIMBLE_CACHE_DIR": plans,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(place.resolve()), os.environ.get("PYTHONPATH", "")))),
    }
    command = [sys.executable, str(Path(__file__).resolve()), *row]
    return subprocess.Popen(
        command, env=environment, cwd=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _asked(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdin is not None
    process.stdin.write("sample\n")
    process.stdin.flush()
    return _told(process)


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return dict(json.loads(line))
    raise RuntimeError(f"the process of a checkout ended with {process.wait()}")


# -- in a process of a checkout --------------------------------------------------------------------------------------


def child(name: str, dtype: str, kind: str) -> None:
    """Prepare one row with the packages on the path, say so, and take a sample for each line that comes in."""
    import torch

    cuda, measure = torch.cuda.is_available(), _neighbour("measure")
    synchronize: Callable[[], Any] = torch.cuda.synchronize if cuda else lambda: None
    call, engine = _prepared(name, dtype, kind, "cuda" if cuda else "cpu")
    for _ in range(10):
        call()
    synchronize()
    replay, graphs = measure.replayed(call, torch.cuda.CUDAGraph) if cuda else (call, 0)
    schedule, program = engine.schedule, engine.recorded.recording.program
    about = {
        "plan": schedule.policy,
        "fuse": program.fuse,
        "calls": len(program.calls),
        "streams": schedule.streams,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }
    print(json.dumps(about), flush=True)
    for _ in sys.stdin:
        found = {"host_us": _host_us(call, synchronize), "throughput_us": measure.block(call, synchronize, CALLS)}
        if graphs:
            event = partial(torch.cuda.Event, enable_timing=True)
            found["device_us"] = median(measure.device_samples(replay, synchronize, event))
        print(json.dumps(found), flush=True)


def _prepared(name: str, dtype: str, kind: str, device: str) -> tuple[Callable[[], Any], Any]:
    import torch

    from nimble_core import Nimble, Options, TrainStep

    models = _neighbour("models")
    options = Options(budget_s=60.0)
    if kind == "inference":
        model, args, kwargs = models.example(name, dtype, device=device)
        net = Nimble(model, options).prepare(*args, **kwargs)
        return lambda: net(*args, **kwargs), net.engines[0]
    task = models.load(next(row for row in models.ROWS.values() if row.title == name), device)
    model, (inputs, targets) = task.make(), task.batch()
    optimizer = task.optimizer(model.parameters())
    if kind == "whole step":
        step = TrainStep(model, task.loss_fn, optimizer, options=options).prepare(inputs, targets)
        return lambda: step(inputs, targets), step.engine
    net = Nimble(model, options).prepare(inputs, training=True)

    def drop_in() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = task.loss_fn(net(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return drop_in, net.engines[0]


def _neighbour(name: str) -> Any:
    """Load a module beside this file, also where the package ``benchmarks`` on the path is another checkout's."""
    folder = Path(__file__).resolve().parent
    if getattr(sys.modules.get("benchmarks"), "__path__", None) != [str(folder)]:
        spec = importlib.util.spec_from_file_location(
            "benchmarks", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"benchmarks.{name}")


def _host_us(call: Callable[[], Any], synchronize: Callable[[], Any]) -> float:
    """Until a call returns, the device idle before."""
    taken = []
    for _ in range(7):
        synchronize()
        start = time.perf_counter_ns()
        call()
        taken.append((time.perf_counter_ns() - start) / 1e3)
    synchronize()
    return median(taken)


if __name__ == "__main__":
    if len(sys.argv) == 4 and not sys.argv[1].startswith("-"):
        sys.path[0] = os.getcwd()  # not this file's folder: the packages are those of the checkout
        child(*sys.argv[1:])
    else:
        sys.exit(main())
