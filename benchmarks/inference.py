"""Inference against every peer: models × dtypes × batches, each row timed in one interleaved run.

    python -m benchmarks.inference --out benchmarks/results/inference-h200.json --cache .inductor

A row is one model, dtype and batch, measured in a process of its own: eager, the peers, and ours with its outputs
copied and with static ones, all from the call to the finished result, inputs copied where the way needs it; beside
them bare replays of ours and of eager's kernels on one stream. Each sample comes after an untimed run of the same. All
outputs are held against eager's and against float64 on fresh inputs; a peer that fails is reported with the reason.

Where there is a GPU, tuned eager runs before anything else: cuDNN keeps one choice for each convolution and process,
and so everyone has that of its benchmark. Ours is prepared before the peers, and pays for loading the compiler.

Rows are written as they finish, and a row that the file holds is not measured again; rows that failed are tried again
after the others. ``--warm-only`` compiles ahead of time, several models at once, into the directory of ``--cache``.
Beside the results lies the same as a table in Markdown. All speeds are ratios of medians of one row, above 1 where ours
is faster.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import geometric_mean, median
from threading import Event, Lock
from typing import Any

import torch

from benchmarks.cuda import figures
from benchmarks.policies import candidate_figures, extreme, replays_in_a_row_ns
from benchmarks.zoo import DTYPES, SUITE, load, precision
from nimble_core import nimble as entry
from nimble_core.algorithms.critical_path import critical_path
from nimble_core.attribution import unmapped
from nimble_core.candidates import Candidate
from nimble_core.devices.base import Device
from nimble_core.environment import Environment
from nimble_core.equality import check_equality
from nimble_core.graph import predecessors
from nimble_core.host_info import environment, finish
from nimble_core.measurement import Measurement, interleave, ratio
from nimble_core.nimble import Engine, Nimble
from nimble_core.options import Options
from nimble_core.pipeline import (
    Recorded,
    Stopwatch,
    check_inputs,
    device_for,
    observe,
    record_static,
    state_kept,
)
from nimble_core.preserve import preserved
from nimble_core.structure import builder, flatten
from nimble_core.tuning import Cases, Tuned, eager_cases
from nimble_viz.peers import PeerRuns, close, peer, peer_names
from nimble_viz.report import Report
from nimble_viz.views.limit import EXPLAINED_ABOVE, limit

__all__ = [
    "AUTOTUNED",
    "BATCHED",
    "PEERS",
    "Row",
    "Settings",
    "main",
    "markdown",
    "measure",
    "selected",
    "speed",
    "summary",
    "table",
    "warm",
]

ROOT = Path(__file__).parents[1]

TUNED, OVERHEAD, AUTOTUNE = "eager-tuned", "compile:reduce-overhead", "compile:max-autotune"
PEERS = (TUNED, "torchscript", "cuda-graph", "compile", OVERHEAD, f"{OVERHEAD}+freezing")
AUTOTUNERS = (AUTOTUNE, f"{AUTOTUNE}+freezing")
AUTOTUNED = ("ResNet-50", "GoogLeNet", "Inception-v3", "MobileNetV2", "BERT-base 128", "ViT-B/16")
"""Models that ``max-autotune`` is measured on unless peers are named: it takes minutes for each."""

PRODUCTS = ("BERT-base 128", "CLIP ViT-B/32", "GPT-2 128", "T5-small 128+32", "ViT-B/16")
"""Models made of matrix products, where TF32 there makes another row; convolutions use TF32 by torch's defaults."""

BATCHED = ("ResNet-50", "GoogLeNet", "BERT-base 128", "NASNet-A mobile")
BATCHES = (8, 32)
"""Further batches, measured on these models."""

WIDE = ("GoogLeNet", "NASNet-A large", "HRNet-W18")

OURS, STATIC = "ours", "ours, static outputs"
WAYS = {"copies": OURS, "static": STATIC}
"""Ours returns outputs that belong to the caller, or its own buffers, as compiled peers with CUDA graphs do."""

REPLAY, UNFUSED = "ours, bare replay", "unfused on one stream, bare replay"

ROUNDS = 201
BEST = "best peer"


@dataclass(frozen=True, slots=True)
class Row:
    """What is measured together: a model of the suite in one dtype and batch, and the peers beside it."""

    model: str
    dtype: str
    batch: int
    peers: tuple[str, ...]

    @property
    def key(self) -> str:
        """Its name in results."""
        return f"{self.model}, {self.dtype}, batch {self.batch}"


@dataclass(frozen=True, slots=True)
class Settings:
    """How rows are measured.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        seconds: time for the samples of a row.
        budget_s: what ours may take to choose (``Options.budget_s``).
        models_from: ``module:NAME`` of a mapping of further models, like ``zoo.SUITE``; empty for none.
        run: id of the run that the row is part of.
    """

    device: str = "cuda"
    seconds: float = 4.0
    budget_s: float = 300.0
    models_from: str = ""
    run: str = ""


# -- one row -------------------------------------------------------------------------------------------------------


def measure(row: Row, settings: Settings) -> dict[str, Any]:
    """Everything about one row, measured in this process.

    Raises:
        NimbleError: ours cannot be prepared.
        Exception: the model cannot be made or run.
    """
    began = time.perf_counter()
    with precision(row.dtype), ExitStack() as stack:
        files = _cached_files()
        model, args, kwargs = _example(row, settings)
        stamp = environment(settings.device)
        if TUNED in row.peers and settings.device == "cuda":
            _tuned_first(model, args, kwargs)
        recorded, device = _recorded(model, args, kwargs)
        stack.enter_context(preserved(model))
        stack.enter_context(state_kept(recorded))
        cases = eager_cases(recorded, truth=True)
        unfused, unfused_s, _ = _prepared(stack, model, args, kwargs, Options(fuse="none", policy="single", tune="off"))
        options = Options(fuse="auto", policy="auto", tune="fast", budget_s=settings.budget_s)
        net, net_s, tuned = _prepared(stack, model, args, kwargs, options)
        peers = PeerRuns(
            recorded,
            args,
            kwargs,
            without_autograd=torch.inference_mode,
            synchronize=device.synchronize,
            taken=("eager", OURS, STATIC, REPLAY, UNFUSED),
        )
        stack.callback(peers.close)
        for name in row.peers:
            peers.prepare(peer(name), cases)
        engine = net.engines[0]
        runs = _ours(net, args, kwargs)
        times = _timed(device, model, args, kwargs, runs, peers, engine, unfused.engines[0], settings.seconds)
        replayed = tuned.recorded if tuned else recorded
        program = replayed.recording.program
        ours = {
            "chosen": next((one.name for one in engine.candidates if one.chosen), engine.schedule.policy),
            "fuse": program.fuse,
            "streams": engine.schedule.streams,
            "syncs": asdict(engine.executable.counts),
            "eager calls": recorded.graph.size,
            "calls": replayed.graph.size,
            "unmapped calls": unmapped(program) if program.fuse != "none" else 0,
            "candidates": [_candidate(one) for one in engine.candidates],
            "limit": _limit(row, stamp, tuned, engine, device, times[REPLAY]),
            "back to back us": _back_to_back_us(device, engine),
            "notes": list(engine.notes),
            "memory bytes": {"ours": engine.executable.nbytes, "unfused": unfused.engines[0].executable.nbytes},
        }
        checked = {**runs, "unfused": unfused}
        equality = {name: asdict(_check(name, run, recorded, cases)) for name, run in checked.items()}
        return {
            "model": row.model,
            "dtype": row.dtype,
            "batch": row.batch,
            "run": settings.run,
            "environment": asdict(finish(stamp)),
            "times": {name: figures(one) for name, one in times.items()},
            "speed": {
                way: {name: asdict(ratio(times[ours_], one)) for name, one in times.items() if _comparable(name)}
                for way, ours_ in WAYS.items()
            },
            "equality": equality,
            "peers": {
                one.name: {
                    "measured": one.name in times,
                    "prepare s": one.prepare_s,
                    "note": one.note,
                    "equality": asdict(one.check) if one.check else None,
                }
                for one in peers.results
            },
            "preparation": {
                OURS: {"s": net_s, "steps s": dict(engine.seconds)},
                "unfused": {"s": unfused_s, "steps s": dict(unfused.engines[0].seconds)},
            },
            "compile cache files": [files, _cached_files()],
            "ours": ours,
            "wall s": time.perf_counter() - began,
        }


def warm(row: Row, settings: Settings) -> dict[str, Any]:
    """Compile what ``measure`` would, and throw it away: what stays are the caches on disk."""
    began = time.perf_counter()
    notes = {}
    with precision(row.dtype), ExitStack() as stack:
        model, args, kwargs = _example(row, settings)
        if TUNED in row.peers and settings.device == "cuda":
            _tuned_first(model, args, kwargs)
        options = Options(fuse="inductor", policy="single", budget_s=settings.budget_s)
        try:
            _prepared(stack, model, args, kwargs, options)
        except Exception as error:
            notes[OURS] = _why(error)
        for name in (name for name in row.peers if name.startswith("compile")):
            try:
                with torch.inference_mode():
                    close(peer(name).prepare(model, args, kwargs))
            except Exception as error:
                notes[name] = _why(error)
    return {"wall s": time.perf_counter() - began, "notes": notes}


def _example(row: Row, settings: Settings) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    SUITE.update(_more_models(settings.models_from))
    return load(row.model, row.dtype, row.batch, settings.device)


def _tuned_first(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Have cuDNN choose by trial what it keeps for this process."""
    with torch.inference_mode():
        peer(TUNED).prepare(model, args, kwargs)(*args, **kwargs)


def _recorded(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Recorded, Device]:
    signature = check_inputs(model, args, kwargs)
    device = device_for(signature.device)
    device.warm_up(model, args, kwargs)
    return record_static(device, model, signature, args, kwargs, strict=False, step=Stopwatch()), device


def _prepared(
    stack: ExitStack, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options
) -> tuple[Nimble, float, Tuned | None]:
    """Ours, open until the stack unwinds; seconds to prepare it; and what was found on the way."""
    net = Nimble(model, options)
    stack.callback(net.close)
    with _tuning_kept() as kept:
        start = time.perf_counter()
        net.prepare(*args, **kwargs)
        seconds = time.perf_counter() - start
    return net, seconds, kept[-1] if kept else None


@contextmanager
def _tuning_kept() -> Iterator[list[Tuned]]:
    """Keep what tuning knows and an engine does not need: what was recorded, and what each call costs alone."""
    kept: list[Tuned] = []
    tune = entry.tune

    def keeping(*args: Any, **kwargs: Any) -> Tuned:
        kept.append(tune(*args, **kwargs))
        return kept[-1]

    entry.tune = keeping
    try:
        yield kept
    finally:
        entry.tune = tune


def _ours(net: Nimble, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Both ways to call ours, like the model."""
    engine = net.engines[0]

    def static(*args: Any, **kwargs: Any) -> Any:
        tensors = engine.signature.bind(args, kwargs)
        if tensors is None:
            raise ValueError(f"not what was prepared: {engine.signature.explain(args, kwargs)}")
        return engine.build(engine.run(tensors, static=True))

    return {OURS: net, STATIC: static}


def _timed(
    device: Device,
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ours: Mapping[str, Callable[..., Any]],
    peers: PeerRuns,
    engine: Engine,
    unfused: Engine,
    seconds: float,
) -> dict[str, Measurement]:
    """Everyone in turn; peers that fail on the way are left out."""

    def call(run: Callable[..., Any]) -> Callable[[], object]:
        def once() -> object:
            with torch.inference_mode():
                return run(*args, **kwargs)

        return once

    candidates = {"eager": call(model), **{name: call(run) for name, run in ours.items()}, **peers.timed()}
    candidates |= {REPLAY: engine.executable.replay, UNFUSED: unfused.executable.replay}
    times = interleave(
        candidates,
        clock_ns=device.clock_ns,
        synchronize=device.synchronize,
        rounds=ROUNDS,
        budget_s=seconds,
        rehearse=True,
    )
    return {name: one for name, one in times.items() if name not in peers.failed}


def _check(name: str, run: Callable[..., Any], recorded: Recorded, cases: Cases) -> Any:
    build = builder(recorded.signature.structure)

    def outputs(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = build(inputs)
        with state_kept(recorded), torch.inference_mode():
            # Clones: static outputs are overwritten by the next run, as promised.
            return [tensor.clone() for tensor in flatten(run(*args, **kwargs), what="output")[0]]

    return check_equality(name, outputs, cases.eager, references=cases.truth, lowest=cases.lowest)


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        **candidate_figures(one),
        "fuse": one.fuse,
        "fuse s": one.fuse_s,
        "syncs": one.syncs,
        "bytes": one.nbytes,
        "equality": asdict(one.check) if one.check else None,
    }


def _limit(
    row: Row, stamp: Environment, tuned: Tuned | None, engine: Engine, device: Device, replay: Measurement
) -> dict[str, Any] | None:
    """What no schedule of these calls can beat, how far the bare replay is from it, and why; None if unknown."""
    if tuned is None or tuned.costs is None:
        return None
    recorded, costs = tuned.recorded, tuned.costs
    length_ns, path = critical_path(predecessors(recorded.graph, meg=True), costs.ns)
    schedule = replace(engine.schedule, counts=engine.executable.counts)
    name = schedule.policy
    seen = observe(device, recorded, engine.executable, seconds=0.5)
    report = Report(
        model=row.model,
        dtype=row.dtype,
        batch=row.batch,
        environment=stamp,
        program=recorded.recording.program,
        graph=recorded.graph,
        costs=costs,
        critical_path=tuple(path),
        critical_path_ns=float(length_ns),
        schedules=(schedule,),
        measurements=(replace(replay, name=name),),
        timelines=(replace(seen.timeline, run=name),),
        eager=recorded.eager.recording.program if recorded.eager else None,
    )
    found = limit(report, name)
    if found is None:
        return None
    return {
        "us": found["ns"] / 1e3,
        "critical path us": length_ns / 1e3,
        "sum of calls us": costs.total_ns / 1e3,
        "bound by": found["bound"],
        "distance": found["distance"],
        "parts us": {part["name"]: part["ns"] / 1e3 for part in found["parts"]},
        "why": found["sentence"],
        "kernels seen": costs.seen,
        "kernels expected": costs.expected,
    }


def _back_to_back_us(device: Device, engine: Engine) -> float | None:
    """GPU time of one of several replays in a row; None off CUDA."""
    if device.kind != "cuda":
        return None
    return median(replays_in_a_row_ns(engine.executable) for _ in range(21)) / 1e3


def _comparable(name: str) -> bool:
    return name not in (OURS, STATIC, REPLAY, UNFUSED)


def _cached_files() -> int:
    """How many files Inductor's cache holds: none means that all was compiled for this row."""
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    return sum(len(files) for _, _, files in os.walk(cache)) if cache else 0


# -- which rows ----------------------------------------------------------------------------------------------------


def selected(
    models: Sequence[str],
    *,
    patterns: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    batches: Sequence[int] = (),
    peers: Sequence[str] | None = None,
) -> list[Row]:
    """Rows to measure, batch 1 first.

    Args:
        models: that there are.
        patterns: take only models that match one of these (``fnmatch``).
        dtypes: take these; by default float32 and float16, and TF32 where it makes a difference.
        batches: take these; by default 1, and further ones on ``BATCHED``.
        peers: take these; by default ``PEERS``, and max-autotune on ``AUTOTUNED`` at batch 1.

    >>> [row.key for row in selected(["ResNet-50", "DARTS"], patterns=["D*"])]
    ['DARTS, float32, batch 1', 'DARTS, float16, batch 1']
    """
    rows = []
    for model in models:
        if patterns and not any(fnmatchcase(model, pattern) for pattern in patterns):
            continue
        for dtype in dtypes or (one for one in DTYPES if one != "tf32" or model in PRODUCTS):
            for batch in batches or ((1, *BATCHES) if model in BATCHED else (1,)):
                wanted = PEERS + (AUTOTUNERS if model in AUTOTUNED and batch == 1 else ()) if peers is None else peers
                # cuDNN's choices are made by whoever comes first.
                rows.append(Row(model, dtype, batch, tuple(sorted(wanted, key=lambda name: name != TUNED))))
    return sorted(rows, key=lambda row: row.batch)


def _more_models(where: str) -> Mapping[str, Any]:
    """The mapping at ``module:NAME``."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name) if where else {}


# -- processes -----------------------------------------------------------------------------------------------------


class RowError(Exception):
    """A row could not be measured; says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """One of several GPUs of a host, and as large a part of its cores; by default everything.

    >>> Place(1, 2).part(range(8))
    [4, 5, 6, 7]
    """

    index: int = 0
    places: int = 1

    def part(self, cores: Iterable[int]) -> list[int]:
        """Those of the cores that belong to this GPU, neighbours; all of them if there are fewer than GPUs."""
        every = sorted(cores)
        size = len(every) // self.places
        return every[self.index * size : (self.index + 1) * size] if size else every

    @property
    def variables(self) -> dict[str, str]:
        """Variables under which a process sees only this GPU."""
        if self.places == 1:
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        known = visible.split(",") if visible else [str(index) for index in range(self.places)]
        return {"CUDA_VISIBLE_DEVICES": known[self.index]}

    def keep_to_cores(self) -> None:
        """Leave the other cores to the other places: this thread, and processes that it starts."""
        if self.places > 1:
            os.sched_setaffinity(0, self.part(os.sched_getaffinity(0)))


TASKS: dict[str, Callable[[Row, Settings], dict[str, Any]]] = {"measure": measure, "warm": warm}


def here(task: str, row: Row, settings: Settings) -> dict[str, Any]:
    """Do it in this process. Raises RowError."""
    try:
        return TASKS[task](row, settings)
    except Exception as error:
        raise RowError(_why(error)) from error


def apart(
    task: str,
    row: Row,
    settings: Settings,
    *,
    limit_s: float,
    cache: Path | None = None,
    place: Place = Place(),
) -> dict[str, Any]:
    """Do it in a process of its own, which is killed after ``limit_s`` seconds.

    Args:
        task: a key of ``TASKS``.
        row: which.
        settings: how.
        limit_s: seconds it may take.
        cache: directory of Inductor's caches; None for its default.
        place: GPU.

    Raises:
        RowError: it failed, died, or took too long; with the last that it said.
    """
    with tempfile.TemporaryDirectory(prefix="inference-") as folder:
        asked, result, log = (Path(folder, name) for name in ("asked.json", "result.json", "log"))
        asked.write_text(json.dumps({"task": task, "row": asdict(row), "settings": asdict(settings)}))
        # A choice recalled from an earlier run would show neither what it was chosen from nor what that cost.
        variables = {**os.environ, "NIMBLE_CACHE_DIR": str(Path(folder, "choices")), **place.variables}
        if cache:
            variables["TORCHINDUCTOR_CACHE_DIR"] = str(cache.resolve())
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.inference", "--child", str(asked), str(result)],
                cwd=ROOT,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = child.wait(None if math.isinf(limit_s) else limit_s)
            except subprocess.TimeoutExpired:
                raise RowError(f"killed after {limit_s:g} s{_last_words(log)}") from None
            finally:
                # The compiler's own processes go with it.
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if status or not result.exists():
            ended = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            raise RowError(f"{ended}{_last_words(log)}")
        found = dict(json.loads(result.read_text()))
        if "error" in found:
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr, flush=True)
            raise RowError(found["error"])
        return found


def _last_words(log: Path) -> str:
    """The last line that was said, after a colon; the last few are printed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    print("\n".join(lines[-20:]), file=sys.stderr, flush=True)
    return f": {_short(lines[-1])}" if lines else ""


def _short(text: str, length: int = 400) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[:length]}…"


def _child(asked: Path, result: Path) -> None:
    wanted = json.loads(asked.read_text())
    row = Row(**{**wanted["row"], "peers": tuple(wanted["row"]["peers"])})
    try:
        found = TASKS[wanted["task"]](row, Settings(**wanted["settings"]))
    except Exception as error:
        traceback.print_exc()
        found = {"error": _why(error)}
    result.write_text(json.dumps(found))


def _why(error: Exception) -> str:
    return _short(f"{type(error).__name__}: {error}")


# -- the run -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for; 1 if a row failed, else 0."""
    given = _arguments(argv)
    if given.child:
        _child(*given.child)
        return 0
    if given.out is None:
        print("--out FILE is missing", file=sys.stderr)
        return 2
    results = _read(given.out)
    if given.show:
        print("\n".join(table(results["rows"])))
        return 0
    run = given.run or f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
    settings = Settings(given.device, given.seconds, given.budget_s, given.models_from, run)
    models = [*SUITE, *(name for name in _more_models(given.models_from) if name not in SUITE)]
    rows = selected(
        models, patterns=given.models, dtypes=given.dtypes, batches=given.batches, peers=given.peers or None
    )
    if not rows:
        print(f"no model matches; there are {', '.join(models)}", file=sys.stderr)
        return 2

    def done(task: str, row: Row, place: Place) -> dict[str, Any]:
        if given.in_process:
            return here(task, row, settings)
        return apart(task, row, settings, limit_s=given.row_s, cache=given.cache, place=place)

    if given.warm_only:
        return _warm(rows, done, given.jobs, given.limit_s, given.cache, given.gpus)
    keeper = _Keeper(given.out, results, run)
    missing = [row for row in rows if given.again or row.key not in results["rows"]]
    missing.sort(key=lambda row: row.key in results["failed"])
    left = _measure(missing, done, keeper, given.limit_s, given.gpus)
    if left:
        print(f"stopped after {given.limit_s:g} s, rows left: {left}", flush=True)
    print("\n".join(("", *table(results["rows"]), *_failed(results["failed"]))))
    return int(keeper.failures > 0)


Done = Callable[[str, Row, Place], dict[str, Any]]


@dataclass(slots=True)
class _Keeper:
    """Writes every row as it comes, from whatever thread."""

    out: Path
    results: dict[str, Any]
    run: str
    failures: int = 0
    lock: Lock = field(default_factory=Lock)

    def keep(self, row: Row, found: dict[str, Any]) -> None:
        with self.lock:
            self.results["failed"].pop(row.key, None)
            self.results["rows"][row.key] = found
            print(line(row.key, found), flush=True)
            write(self.out, self.results)

    def fail(self, row: Row, reason: str, seconds: float) -> None:
        """Note a failure; what was measured before stays."""
        with self.lock:
            self.failures += 1
            self.results["failed"][row.key] = {"reason": reason, "run": self.run, "wall s": seconds}
            print(f"{row.key}: failed after {seconds:.0f} s: {reason}", flush=True)
            write(self.out, self.results)


def _measure(rows: Sequence[Row], done: Done, keeper: _Keeper, limit_s: float, gpus: int) -> int:
    """Row after row on each GPU, none begun once the time is up; returns how many were not begun."""
    began = time.monotonic()
    waiting, lock, stopped = deque(rows), Lock(), Event()

    def work(place: Place) -> None:
        place.keep_to_cores()
        while not stopped.is_set() and time.monotonic() - began <= limit_s:
            with lock:
                if not waiting:
                    return
                row = waiting.popleft()
            start = time.monotonic()
            try:
                found = done("measure", row, place)
            except RowError as error:
                keeper.fail(row, str(error), time.monotonic() - start)
            else:
                keeper.keep(row, found)

    if gpus == 1:
        work(Place())
    else:
        with ThreadPoolExecutor(gpus) as pool:
            try:
                list(pool.map(work, [Place(index, gpus) for index in range(gpus)]))
            finally:
                stopped.set()
    return len(waiting)


def _warm(rows: Sequence[Row], done: Done, jobs: int, limit_s: float, cache: Path | None, gpus: int) -> int:
    """Compile for all rows, ``jobs`` at once, on any GPU.

    What compilers choose by timing is not kept from several at once: max-autotune is left to the measuring run, and the
    configurations of kernels that were picked are forgotten.
    """
    began = time.monotonic()
    if jobs > 1:
        rows = [replace(row, peers=tuple(name for name in row.peers if name not in AUTOTUNERS)) for row in rows]

    def one(index: int) -> bool:
        row = rows[index]
        if time.monotonic() - began > limit_s:
            print(f"{row.key}: not begun, {limit_s:g} s are over", flush=True)
            return False
        try:
            found = done("warm", row, Place(index % gpus, gpus))
        except RowError as error:
            print(f"{row.key}: failed: {error}", flush=True)
            return False
        print(f"{row.key}: compiled in {found['wall s']:.0f} s {found['notes'] or ''}".rstrip(), flush=True)
        return True

    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        fine = all(list(pool.map(one, range(len(rows)))))
    if jobs > 1 and cache:
        for picked in cache.rglob("*.best_config"):
            picked.unlink()
    return int(not fine)


def _read(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {"rows": {}, "failed": {}, **results}


def write(path: Path, results: dict[str, Any]) -> None:
    """Write results with their summary, all of it or nothing, and the table beside it."""
    results["summary"] = summary(results["rows"])
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    beside.replace(path)
    path.with_suffix(".md").write_text("\n".join((*markdown(results["rows"]), *_failed(results["failed"]), "")))


# -- what it says --------------------------------------------------------------------------------------------------


def speed(row: Mapping[str, Any], over: str, way: str = "copies") -> float | None:
    """How much faster ours is than a peer, or than the best one (``BEST``); None if it was not measured."""
    found = row["speed"][way]
    if over == BEST:
        return min((one["value"] for one in found.values()), default=None)
    return found[over]["value"] if over in found else None


def best_peer(row: Mapping[str, Any]) -> str:
    """Name of the fastest way that is not ours, eager among them."""
    return min((name for name in row["times"] if _comparable(name)), key=lambda name: row["times"][name]["median us"])


def equal(row: Mapping[str, Any]) -> bool:
    """Whether ours was shown to compute what eager does."""
    return all(row["equality"][name]["passed"] for name in WAYS.values())


def summary(rows: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What the rows say together; geometric means for each batch, targets on batch 1."""
    right = [row for row in rows.values() if equal(row)]
    batches = sorted({row["batch"] for row in right})
    baselines = (BEST, "eager", *dict.fromkeys((*PEERS, *AUTOTUNERS)))
    distances = {key: found for key, row in rows.items() if (found := row["ours"]["limit"])}
    in_a_row = [us / one["us"] for key, one in distances.items() if (us := rows[key]["ours"]["back to back us"])]
    return {
        "rows": len(rows),
        "speed over": {
            f"batch {batch}": {
                over: {way: _mean(speed(row, over, way) for row in right if row["batch"] == batch) for way in WAYS}
                for over in baselines
            }
            for batch in batches
        },
        "targets": targets(rows),
        "distance to limit": {
            "median": median(one["distance"] for one in distances.values()) if distances else None,
            "median, back to back": median(in_a_row) if in_a_row else None,
            "known": len(distances),
            "explained": {key: one["why"] for key, one in distances.items() if one["distance"] > EXPLAINED_ABOVE},
        },
        "not shown equal to eager": {
            f"{name} on {key}": check["reason"]
            for key, row in rows.items()
            for name, check in row["equality"].items()
            if not check["passed"]
        },
        "peers left out": {
            f"{name} on {key}": one["note"]
            for key, row in rows.items()
            for name, one in row["peers"].items()
            if not one["measured"]
        },
        "unstable": [
            f"{name} on {key}" for key, row in rows.items() for name, one in row["times"].items() if one["warnings"]
        ],
    }


def _mean(values: Iterable[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    return {"value": geometric_mean(known) if known else None, "rows": len(known)}


def targets(rows: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What is asked for at batch 1, what was reached, and whether that is enough (None: nothing was measured).

    Speeds are given for both ways to return outputs. A row that was not shown to be right has no speed to speak of.
    """
    ones = {key: row for key, row in rows.items() if row["batch"] == 1}
    right = {key: row for key, row in ones.items() if equal(row)}
    limits = [row["ours"]["limit"] for row in ones.values() if row["ours"]["limit"]]
    unfused_s = {key: row["preparation"]["unfused"]["s"] for key, row in ones.items()}
    large_s = {key: seconds for key, seconds in unfused_s.items() if ones[key]["model"] == "NASNet-A large"}

    def least(over: str, wanted: float, of: Callable[[Mapping[str, Any]], bool], what: str) -> dict[str, Any]:
        def found(way: str) -> dict[str, Any]:
            known = [(key, speed(row, over, way)) for key, row in right.items() if of(row)]
            below = {key: value for key, value in known if value is not None and value < wanted}
            return {**_verdict(extreme(min, known), lambda value: value >= wanted), "below": below}

        return {"target": what, **{way: found(way) for way in WAYS}}

    def mean(over: str, wanted: float) -> dict[str, Any]:
        means = {way: _mean(speed(row, over, way) for row in right.values()) for way in WAYS}
        what = f"geometric mean over {over} at least {wanted:g}x"
        return {"target": what, **{way: _verdict(one, lambda value: value >= wanted) for way, one in means.items()}}

    def single(what: str, found: Mapping[str, Any], enough: Callable[[float], bool]) -> dict[str, Any]:
        return {"target": what, "all": _verdict(found, enough)}

    wide = {row["model"] for row in right.values() if row["model"] in WIDE and row["dtype"] == "float16"}
    on_wide = least(
        OVERHEAD,
        2.0,
        lambda row: row["model"] in WIDE and row["dtype"] == "float16",
        f"at least 2x over {OVERHEAD} on {', '.join(WIDE)} in float16",
    )
    for way in WAYS:
        if on_wide[way]["met"] and wide != set(WIDE):
            on_wide[way]["met"] = None
    mobile = [(key, row) for key, row in right.items() if row["model"] == "NASNet-A mobile"]
    return [
        single(
            "outputs are eager's on every row",
            {"value": len(right) / len(ones), "rows": len(ones)} if ones else {},
            lambda value: value == 1,
        ),
        least(BEST, 0.98, lambda row: True, "at least 0.98x of the best peer on every row"),
        mean(OVERHEAD, 1.4),
        mean(AUTOTUNE, 1.25),
        on_wide,
        {
            "target": "more than 22.34x over eager on NASNet-A mobile",
            **{
                way: {
                    **_verdict(
                        extreme(max, ((key, speed(row, "eager", way)) for key, row in mobile)),
                        lambda value: value > 22.34,
                    ),
                    "host cpu": sorted({row["environment"]["host_cpu"] for _, row in mobile}),
                }
                for way in WAYS
            },
        },
        single(
            "distance to limit at most 1.15 on the median row",
            {"value": median(one["distance"] for one in limits), "rows": len(limits)} if limits else {},
            lambda value: value <= 1.15,
        ),
        single(
            f"no distance above {EXPLAINED_ABOVE:g} without an explanation",
            {"value": sum(one["distance"] > EXPLAINED_ABOVE and not one["why"] for one in limits)} if limits else {},
            lambda value: value == 0,
        ),
        single(
            "preparing eager's kernels without tuning takes at most 0.35 s on average",
            {"value": sum(unfused_s.values()) / len(unfused_s), "rows": len(unfused_s)} if unfused_s else {},
            lambda value: value <= 0.35,
        ),
        single(
            "and at most 1.07 s for NASNet-A large",
            extreme(max, large_s.items()),
            lambda value: value <= 1.07,
        ),
    ]


def _verdict(found: Mapping[str, Any], enough: Callable[[float], bool]) -> dict[str, Any]:
    value = found.get("value")
    return {**found, "met": None if value is None else bool(enough(value))}


def line(key: str, row: Mapping[str, Any]) -> str:
    """One line for the terminal when a row is done."""
    ours, times = row["ours"], row["times"]
    best = best_peer(row)
    over = "  ".join(f"{way} {speed(row, BEST, way):.2f}x" for way in WAYS)
    far = f"  {ours['limit']['distance']:.2f} of limit" if ours["limit"] else ""
    return (
        f"{key:36} eager {times['eager']['median us']:8.0f}  {best} {times[best]['median us']:.0f}  "
        f"ours {times[OURS]['median us']:.0f} µs  {over} ({ours['chosen']}){far}  equal {equal(row)}  "
        f"took {row['wall s']:.0f} s"
    )


HEADS = (
    "model", "dtype", "batch", "eager µs", "best peer", "its µs", "reduce-overhead µs", "ours µs", "static µs",
    "ours over best", "over reduce-overhead", "chosen", "distance", "equal",
)  # fmt: skip


def _cells(rows: Mapping[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """The table's rows as text, under ``HEADS``."""

    def us(row: Mapping[str, Any], name: str) -> str:
        return f"{row['times'][name]['median us']:.0f}" if name in row["times"] else "–"

    def over(row: Mapping[str, Any], name: str) -> str:
        value = speed(row, name)
        return f"{value:.2f}x" if value is not None else "–"

    return [
        (
            row["model"],
            row["dtype"],
            str(row["batch"]),
            us(row, "eager"),
            best_peer(row),
            us(row, best_peer(row)),
            us(row, OVERHEAD),
            us(row, OURS),
            us(row, STATIC),
            over(row, BEST),
            over(row, OVERHEAD),
            row["ours"]["chosen"],
            f"{row['ours']['limit']['distance']:.2f}" if row["ours"]["limit"] else "–",
            "yes" if equal(row) else "no",
        )
        for row in sorted(rows.values(), key=lambda row: (row["batch"], row["model"], row["dtype"]))
    ]


def _where(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """Machines that the rows were measured on, and the runs they come from."""
    found: dict[tuple[str, ...], list[str]] = {}
    for row in rows.values():
        stamp = row["environment"]
        machine = (stamp["device_name"], stamp["host_cpu"], f"torch {stamp['torch']}", f"Python {stamp['python']}")
        found.setdefault(machine, []).append(f"{stamp['date'][:10]} {row['run']}".strip())
    return [f"{', '.join(machine)}; runs {', '.join(sorted(set(runs)))}" for machine, runs in found.items()]


def _said(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """The summary in sentences."""
    found = summary(rows)
    lines = []
    for batch, means in found["speed over"].items():
        for over, ways in means.items():
            if ways["copies"]["rows"]:
                copies, static = ways["copies"], ways["static"]
                lines.append(
                    f"{batch}: geometric mean over {over} {copies['value']:.3f}x, with static outputs "
                    f"{static['value']:.3f}x ({copies['rows']} rows)"
                )
    words = {True: "met", False: "MISSED", None: "not measured"}
    for target in found["targets"]:
        for way, verdict in ((way, target[way]) for way in ("all", *WAYS) if way in target):
            value = "" if verdict.get("value") is None else f" {verdict['value']:.3g}"
            at = f" on {verdict['where']}" if verdict.get("where") else ""
            at += f", {', '.join(verdict['host cpu'])}" if verdict.get("host cpu") else ""
            below = f"; below: {'; '.join(verdict['below'])}" if verdict.get("below") else ""
            named = "" if way == "all" else f" ({way})"
            lines.append(f"{words[verdict['met']]}: {target['target']}{named}:{value}{at}{below}")
    far = found["distance to limit"]
    if far["median"]:
        gpu = far["median, back to back"]
        lines.append(
            f"distance to limit: median {far['median']:.3f}"
            + (f", by the GPU's clock and replays in a row {gpu:.3f}" if gpu else "")
            + f" ({far['known']} rows)"
        )
    lines += [f"{key}: {why}" for key, why in far["explained"].items()]
    lines += [f"not shown equal to eager: {at}: {why}" for at, why in found["not shown equal to eager"].items()]
    lines += [f"left out: {at}: {why.removeprefix('left out: ')}" for at, why in found["peers left out"].items()]
    if found["unstable"]:
        lines.append(f"unstable: {len(found['unstable'])} times, {'; '.join(found['unstable'][:5])}")
    return lines


def _failed(failed: Mapping[str, dict[str, Any]]) -> list[str]:
    return [f"- failed: {key}: {one['reason']}" for key, one in sorted(failed.items())]


def table(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """Everything for the terminal: machines, one line a row, means, targets."""
    cells = [HEADS, *_cells(rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(one, widths, strict=True)).rstrip() for one in cells]
    return [*_where(rows), "", *lines, "", *_said(rows)]


def markdown(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """The same as Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (HEADS, ["---"] * len(HEADS), *_cells(rows))]
    return ["# Inference", "", *_where(rows), "", *lines, "", *(f"- {said}" for said in _said(rows))]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [name.strip() for name in text.split(",") if name.strip()]

    def choice(known: Sequence[str]) -> Callable[[str], list[str]]:
        def chosen(text: str) -> list[str]:
            for name in names(text):
                if name not in known:
                    raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
            return names(text)

        return chosen

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="results file (JSON); a table goes beside it (.md)")
    parser.add_argument("--models", type=names, default=[], metavar="GLOB,...", help="all by default")
    parser.add_argument("--dtypes", type=choice(DTYPES), default=[], metavar="DTYPE,...")
    parser.add_argument("--batches", type=lambda text: [int(one) for one in names(text)], default=[], metavar="N,...")
    parser.add_argument("--peers", type=choice(peer_names()), default=[], metavar="PEER,...")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=4.0, help="time for the samples of a row")
    parser.add_argument("--budget-s", type=float, default=300.0, help="what ours may take to choose")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no further row after this")
    parser.add_argument("--row-s", type=float, default=1800.0, help="kill a row after this")
    parser.add_argument("--cache", type=Path, help="directory of Inductor's caches, to be kept between runs")
    parser.add_argument("--warm-only", action="store_true", help="only compile, into the caches")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of this host that measure, a row each at a time")
    parser.add_argument("--jobs", type=int, default=4, help="models that --warm-only compiles at once")
    parser.add_argument("--again", action="store_true", help="measure rows that the file holds already")
    parser.add_argument("--show", action="store_true", help="only print what the file says")
    parser.add_argument("--in-process", action="store_true", help="all in this process, to debug")
    parser.add_argument("--models-from", default="", metavar="MODULE:NAME", help="a mapping of further models")
    parser.add_argument("--run", default="", help="id of this run")
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
