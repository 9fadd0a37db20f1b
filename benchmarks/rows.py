"""Suites of rows: each measured in a process of its own, kept as it comes, on one GPU or several; and what rows say.

A suite (``benchmarks.inference``, ``benchmarks.training``) is a ``Suite``: its models, what is done with a row, and how
results read. ``run_suite`` does the rest, from the options of ``parser``: rows that the results hold are not measured
again, rows that failed are tried again after the others, and results are written after every row, so that a run may be
stopped and gone on with at any time: SIGTERM ends it at once, without the row that was under way. Rows are plain
dictionaries, as they lie in the results. Speeds are ratios of medians of one row, above 1 where ours is faster.

    SUITE = Suite("benchmarks.mine", MODELS, {"measure": measure, "warm": warm}, selected, …)

    if __name__ == "__main__":
        sys.exit(run_suite(SUITE, parser(__doc__, dtypes=…, peers=…, seconds=4.0).parse_args()))
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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean, median
from threading import Event, Lock, Thread, current_thread, main_thread
from typing import Any

from benchmarks.policies import candidate_figures, replays_in_a_row_ns
from nimble_core.algorithms.critical_path import critical_path
from nimble_core.api.engine import Engine
from nimble_core.autotune.capture_pipeline import observe
from nimble_core.ir.call_graph import predecessors
from nimble_core.ir.candidates import Candidate
from nimble_core.ir.environment import Environment
from nimble_core.ir.measurement import Measurement
from nimble_core.runtime.device import Device
from nimble_core.tracing.recorded import Stopwatch
from nimble_viz.analysis.limit import limit
from nimble_viz.render.report import Report

__all__ = [
    "BEST",
    "Children",
    "Job",
    "Keeper",
    "Place",
    "Row",
    "RowError",
    "Settings",
    "StoppedError",
    "Suite",
    "Told",
    "TooSlowError",
    "about_candidate",
    "about_engine",
    "about_limit",
    "ahead_said",
    "aligned",
    "answer",
    "apart",
    "as_markdown",
    "as_ratio",
    "as_us",
    "back_to_back_us",
    "cached_files",
    "drawn",
    "failures",
    "fastest",
    "here",
    "machines",
    "mean",
    "measure_all",
    "more_models",
    "parser",
    "read",
    "run_suite",
    "sentence",
    "speed_of",
    "unstable",
    "verdict",
    "warm_all",
    "why",
    "within",
    "write",
]

ROOT = Path(__file__).parents[1]

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
        models_from: ``module:NAME`` of a mapping of further models, like the suite's own; empty for none.
        run: id of the run that the row is part of.
        peer_s: what each peer may take to get ready, where the suite bounds that.
    """

    device: str = "cuda"
    seconds: float = 4.0
    budget_s: float = 300.0
    models_from: str = ""
    run: str = ""
    peer_s: float = math.inf


Job = Callable[[Row, Settings], dict[str, Any]]
"""What is done with a row; what it returns can be written as JSON."""

Results = dict[str, Any]
"""What a file holds: ``"rows"`` and ``"failed"`` by ``Row.key``, their ``"summary"``, and what the suite adds."""


@dataclass(frozen=True, slots=True)
class Suite:
    """What makes one suite.

    Args:
        module: what ``python -m`` runs in a row's own process, with ``--child``; it calls ``run_suite`` on this suite.
        models: by name.
        jobs: ``"measure"``, whose result is the row, and ``"warm"``, which compiles ahead what is named as the row's
            peers: ``"wall s"``, ``"notes"`` of ways that failed, and ``"ways s"`` if it knows what each took.
        selected: rows to measure, from names of models and the keyword arguments ``patterns``, ``dtypes``, ``batches``
            and ``peers``.
        summary: what rows say together.
        line: one line for the terminal about a row, from its key and what was measured.
        table: results as lines for the terminal.
        markdown: the same as Markdown.
        compiled: what there is to compile for a row, peers and ours; what takes longest first.
        timed: peers that choose by timing while they compile, and so are not compiled several at once.
        figure: module whose ``compare(results, path)`` draws them; it may need what is not installed.
    """

    module: str
    models: MutableMapping[str, Any]
    jobs: Mapping[str, Job]
    selected: Callable[..., list[Row]]
    summary: Callable[[Mapping[str, dict[str, Any]]], dict[str, Any]]
    line: Callable[[str, Mapping[str, Any]], str]
    table: Callable[[Results], list[str]]
    markdown: Callable[[Results], list[str]]
    compiled: Callable[[Row], Sequence[str]] = lambda row: row.peers
    timed: tuple[str, ...] = ()
    figure: str = ""


def more_models(where: str) -> Mapping[str, Any]:
    """The mapping at ``module:NAME``; an empty one for an empty string."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name) if where else {}


# -- what a row says of ours ---------------------------------------------------------------------------------------


def about_engine(
    row: Row, stamp: Environment, engine: Engine, device: Device, replay: Measurement | None
) -> dict[str, Any]:
    """What an engine runs and what it was chosen from; ``replay``: its bare replays, if they were timed."""
    program = engine.recorded.recording.program
    return {
        "chosen": next((one.name for one in engine.candidates if one.chosen), engine.schedule.policy),
        "fuse": program.fuse,
        "streams": engine.schedule.streams,
        "syncs": asdict(engine.executable.counts),
        "calls": len(program.calls),
        "candidates": [about_candidate(one) for one in engine.candidates],
        "limit": about_limit(row, stamp, engine, device, replay) if replay else None,
        "back to back us": back_to_back_us(device, engine) if replay else None,
        "launched ahead": about_ahead(engine) if replay else None,
        "notes": list(engine.notes),
    }


def about_candidate(one: Candidate) -> dict[str, Any]:
    """What was tried: figures, fusion, size, equality."""
    return {
        **candidate_figures(one),
        "fuse": one.fuse,
        "fuse s": one.fuse_s,
        "syncs": one.syncs,
        "bytes": one.nbytes,
        "equality": asdict(one.check) if one.check else None,
    }


def about_limit(
    row: Row, stamp: Environment, engine: Engine, device: Device, replay: Measurement
) -> dict[str, Any] | None:
    """What no schedule of these calls can beat, how far the bare replay is from it, and why; None if unknown."""
    recorded, costs = engine.recorded, engine.costs
    if costs is None:
        return None
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


def back_to_back_us(device: Device, engine: Engine) -> float | None:
    """GPU time of one of several replays in a row; None off CUDA."""
    if device.kind != "cuda":
        return None
    return median(replays_in_a_row_ns(engine.executable) for _ in range(21)) / 1e3


def about_ahead(engine: Engine) -> dict[str, Any] | None:
    """GPU time of one of several replays in a row, with and without kernels that are launched ahead, in turn.

    None where there are none.
    """
    from nimble_core.runtime.cuda.device import CudaExecutable

    executable = engine.executable
    if not isinstance(executable, CudaExecutable) or not executable.raw.ahead:
        return None

    def in_a_row() -> float:
        return median(replays_in_a_row_ns(executable) for _ in range(3)) / 1e3

    with_us, without_us = [], []
    for _ in range(5):
        with_us.append(in_a_row())
        with executable.none_ahead():
            without_us.append(in_a_row())
    return {"kernels": executable.counts.ahead, "us": median(with_us), "without us": median(without_us)}


def ahead_said(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What launching ahead brings, over all rows that tell, in a sentence; nothing if none does."""
    known = [one for row in rows if (one := row["ours"].get("launched ahead"))]
    if not known:
        return []
    gains = [one["without us"] / one["us"] for one in known]
    return [
        f"launched ahead: replays geometric mean {geometric_mean(gains):.3f}x as fast as without, "
        f"{min(gains):.3f}x to {max(gains):.3f}x ({len(gains)} rows)"
    ]


def cached_files() -> int:
    """How many files Inductor's cache holds: none means that all was compiled for this row."""
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    return sum(len(files) for _, _, files in os.walk(cache)) if cache else 0


# -- processes -----------------------------------------------------------------------------------------------------


class RowError(Exception):
    """A row could not be measured; says why."""


class StoppedError(Exception):
    """The run was told to stop before a row was done: nobody knows whether it can be measured."""


class TooSlowError(BaseException):
    """A block was not done in its time. No ``Exception``, so that nobody inside takes it for a reason to try again."""


class Told(Stopwatch):
    """A stopwatch that says what begins, and when: the last words of a row that is killed."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what is inside under ``name``."""
        print(f"{name} from {sum(self.seconds.values()):.0f} s on", flush=True)
        with super().__call__(name):
            yield


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Let a block of the main thread take no longer than that; other threads are not bounded.

    Python raises between two of its own instructions: a call into C ends first, and processes that the block started
    are left to themselves.

    Raises:
        TooSlowError: it took longer.
    """
    if math.isinf(seconds) or current_thread() is not main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise TooSlowError(f"not ready after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    # Again and again: what is raised inside a destructor is printed and lost.
    signal.setitimer(signal.ITIMER_REAL, seconds, 10.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


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


@dataclass(slots=True)
class Children:
    """The processes of a run, which one signal ends all, from whatever thread they were started.

    Args:
        stopped: whether the run was told to stop.
        running: leaders of their own process groups.
    """

    stopped: bool = False
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)

    @contextmanager
    def minding(self, child: subprocess.Popen[bytes]) -> Iterator[None]:
        """While a block waits for a child; after it the child is gone, with all that it started."""
        self.running.add(child)
        try:
            if self.stopped:
                _end(child)
            yield
        finally:
            # The compiler's own processes go with it.
            _end(child)
            child.wait()
            self.running.discard(child)

    @contextmanager
    def ended_by(self, number: signal.Signals) -> Iterator[None]:
        """Within a block of the main thread, let a signal end the children instead of this process."""

        def stop(*_: object) -> None:
            self.stopped = True
            for child in tuple(self.running):
                _end(child)

        if current_thread() is not main_thread():
            yield
            return
        before = signal.signal(number, stop)
        try:
            yield
        finally:
            signal.signal(number, before)


def _end(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """Let this process, and its group, not outlive whoever holds the other end of its standard input.

    A parent that is killed cannot end its children, and theirs is the GPU. Waiting for the end of a pipe takes no time
    from what is measured.
    """
    line, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def watch() -> None:
        os.read(line, 1)
        os.killpg(0, signal.SIGKILL)

    Thread(target=watch, daemon=True).start()


def here(suite: Suite, job: str, row: Row, settings: Settings) -> dict[str, Any]:
    """Do it in this process. Raises RowError."""
    try:
        return suite.jobs[job](row, settings)
    except Exception as error:
        raise RowError(why(error)) from error


def apart(
    suite: Suite,
    job: str,
    row: Row,
    settings: Settings,
    *,
    limit_s: float,
    children: Children,
    cache: Path | None = None,
    place: Place = Place(),
) -> dict[str, Any]:
    """Do it in a process of its own, which is killed after ``limit_s`` seconds.

    Args:
        suite: of the row.
        job: a key of its ``jobs``.
        row: which.
        settings: how.
        limit_s: seconds it may take.
        children: of the run.
        cache: directory of Inductor's caches; None for its default.
        place: GPU.

    Raises:
        RowError: it failed, died, or took too long; with the last that it said.
        StoppedError: the run was told to stop.
    """
    if children.stopped:
        raise StoppedError
    with tempfile.TemporaryDirectory(prefix=f"{suite.module.rpartition('.')[2]}-") as folder:
        asked, result, log = (Path(folder, name) for name in ("asked.json", "result.json", "log"))
        asked.write_text(json.dumps({"job": job, "row": asdict(row), "settings": asdict(settings)}))
        # A choice recalled from an earlier run would show neither what it was chosen from nor what that cost.
        variables = {**os.environ, "NIMBLE_CACHE_DIR": str(Path(folder, "choices")), **place.variables}
        if cache:
            variables["TORCHINDUCTOR_CACHE_DIR"] = str(cache.resolve())
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", suite.module, "--child", str(asked), str(result)],
                cwd=ROOT,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with child, children.minding(child):
                try:
                    status = child.wait(None if math.isinf(limit_s) else limit_s)
                except subprocess.TimeoutExpired:
                    raise RowError(f"killed after {limit_s:g} s{_last_words(log)}") from None
        if status or not result.exists():
            if children.stopped:
                raise StoppedError
            ended = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            raise RowError(f"{ended}{_last_words(log)}")
        found = dict(json.loads(result.read_text()))
        if "error" in found:
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr, flush=True)
            raise RowError(found["error"])
        return found


def answer(suite: Suite, asked: Path, result: Path) -> None:
    """The other side of ``apart``: do what a file asks for, and write what came of it, or ``"error"``."""
    wanted = json.loads(asked.read_text())
    row = Row(**{**wanted["row"], "peers": tuple(wanted["row"]["peers"])})
    try:
        found = suite.jobs[wanted["job"]](row, Settings(**wanted["settings"]))
    except Exception as error:
        traceback.print_exc()
        found = {"error": why(error)}
    result.write_text(json.dumps(found))


def why(error: BaseException) -> str:
    """Kind and message of an error, on one line and not too long.

    >>> why(ValueError("no such weights"))
    'ValueError: no such weights'
    """
    return _short(f"{type(error).__name__}: {error}")


def _last_words(log: Path) -> str:
    """The last line that was said, after a colon; the last few are printed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    print("\n".join(lines[-20:]), file=sys.stderr, flush=True)
    return f": {_short(lines[-1])}" if lines else ""


def _short(text: str, length: int = 400) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[:length]}…"


# -- the run -------------------------------------------------------------------------------------------------------


def run_suite(suite: Suite, given: argparse.Namespace) -> int:
    """Measure what is asked for.

    Args:
        suite: what there is to measure.
        given: what ``parser`` made of the command line.

    Returns:
        Exit status: 1 if a row failed, 2 if nothing can be done, 143 if SIGTERM ended the run, else 0.
    """
    if given.child:
        _end_with_parent()
        answer(suite, *given.child)
        return 0
    if given.out is None:
        print("--out FILE is missing", file=sys.stderr)
        return 2
    results = read(given.out)
    if given.show:
        print("\n".join(suite.table(results)))
        return 0
    name = given.run or f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
    settings = Settings(given.device, given.seconds, given.budget_s, given.models_from, name, given.peer_s)
    models = [*suite.models, *(one for one in more_models(given.models_from) if one not in suite.models)]
    rows = suite.selected(
        models, patterns=given.models, dtypes=given.dtypes, batches=given.batches, peers=given.peers or None
    )
    if not rows:
        print(f"no model matches; there are {', '.join(models)}", file=sys.stderr)
        return 2

    children = Children()

    def done(job: str, row: Row, place: Place) -> dict[str, Any]:
        if given.in_process:
            return here(suite, job, row, settings)
        return apart(suite, job, row, settings, limit_s=given.row_s, children=children, cache=given.cache, place=place)

    missing = [row for row in rows if given.again or row.key not in results["rows"]]
    missing.sort(key=lambda row: row.key in results["failed"])
    with nullcontext() if given.in_process else children.ended_by(signal.SIGTERM):
        if given.warm_only:
            if measured := len(rows) - len(missing):
                print(f"measured already, and not compiled: {_counted(measured)}", flush=True)
            fine = warm_all(
                _to_compile(suite, missing, given.jobs), done, given.jobs, given.limit_s, given.cache, given.gpus
            )
            return _TERMINATED if children.stopped else int(not fine)
        keeper = Keeper(suite, given.out, results, name)
        left = measure_all(missing, done, keeper, given.limit_s, given.gpus)
    if left:
        when = "by SIGTERM" if children.stopped else f"after {given.limit_s:g} s"
        print(f"stopped {when}, rows left: {left}", flush=True)
    print("\n".join(("", *suite.table(results), *failures(results))))
    print(drawn(suite, given.out, results))
    return _TERMINATED if children.stopped else int(keeper.failures > 0)


_TERMINATED = 128 + signal.SIGTERM
"""Exit status, as of whoever dies of it."""


def _to_compile(suite: Suite, rows: Sequence[Row], jobs: int) -> list[Row]:
    """What to compile, as peers of rows: a way at a time if there are several jobs, since each keeps to one core.

    Row after row: where the time is up, it is up for whole rows.
    """
    if jobs == 1:
        return [replace(row, peers=tuple(suite.compiled(row))) for row in rows]
    return [replace(row, peers=(way,)) for row in rows for way in suite.compiled(row) if way not in suite.timed]


def _counted(rows: int) -> str:
    return f"{rows} row{'s' * (rows != 1)}"


Done = Callable[[str, Row, Place], dict[str, Any]]
"""Does a job with a row at a place, wherever that runs. Raises RowError, and StoppedError when it is to be the last."""


@dataclass(slots=True)
class Keeper:
    """Writes every row as it comes, from whatever thread.

    Args:
        suite: of the rows.
        out: file.
        results: what it holds, and goes on to hold.
        run: id of the run.
        failures: how many rows failed in this run.
    """

    suite: Suite
    out: Path
    results: Results
    run: str
    failures: int = 0
    lock: Lock = field(default_factory=Lock)

    def keep(self, row: Row, found: dict[str, Any]) -> None:
        """A row was measured."""
        with self.lock:
            self.results["failed"].pop(row.key, None)
            self.results["rows"][row.key] = found
            print(self.suite.line(row.key, found), flush=True)
            write(self.suite, self.out, self.results)

    def fail(self, row: Row, reason: str, seconds: float) -> None:
        """Note a failure; what was measured before stays."""
        with self.lock:
            self.failures += 1
            self.results["failed"][row.key] = {"reason": reason, "run": self.run, "wall s": seconds}
            print(f"{row.key}: failed after {seconds:.0f} s: {reason}", flush=True)
            write(self.suite, self.out, self.results)


def measure_all(rows: Sequence[Row], done: Done, keeper: Keeper, limit_s: float, gpus: int) -> int:
    """Row after row on each GPU, none begun once the time is up; returns how many are left, one cut short included."""
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
            except StoppedError:
                stopped.set()
                waiting.append(row)
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


def warm_all(rows: Sequence[Row], done: Done, jobs: int, limit_s: float, cache: Path | None, gpus: int) -> bool:
    """Compile for all rows, ``jobs`` at once, on any GPU; returns whether all could be.

    Says of each what took how long, and at the end how many there are and what the cache holds. What compilers
    choose by timing is not kept from several at once: configurations of kernels that were picked are forgotten.
    """
    began = time.monotonic()
    ended: Counter[str] = Counter()
    lock = Lock()

    def say(row: Row, how: str, more: str = "") -> None:
        with lock:
            ended[how] += 1
            print(f"[{ended.total()}/{len(rows)}] {row.key}: {how}{more}", flush=True)

    def one(index: int) -> None:
        row = rows[index]
        if time.monotonic() - began > limit_s:
            say(row, "not begun", f", {limit_s:g} s are over")
            return
        try:
            found = done("warm", row, Place(index % gpus, gpus))
        except StoppedError:
            say(row, "not done", ", stopped")
        except RowError as error:
            say(row, "failed", f": {error}")
        else:
            ways = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in found.get("ways s", {}).items())
            notes = "; ".join(f"{name} left out: {note}" for name, note in found["notes"].items())
            say(row, "compiled", "; ".join(filter(None, (f" in {found['wall s']:.0f} s", ways, notes))))

    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        list(pool.map(one, range(len(rows))))
    held = f"; {cache} holds {sum(path.is_file() for path in cache.rglob('*'))} files" if cache else ""
    counts = ", ".join(f"{how}: {count}" for how, count in sorted(ended.items())) or "nothing to compile"
    print(f"{counts}; {time.monotonic() - began:.0f} s{held}", flush=True)
    if jobs > 1 and cache:
        for picked in cache.rglob("*.best_config"):
            picked.unlink()
    return ended["compiled"] == len(rows)


def read(path: Path) -> Results:
    """Results as they were written; empty ones if there is no file."""
    results: Results = json.loads(path.read_text()) if path.exists() else {}
    return {"rows": {}, "failed": {}, **results}


def write(suite: Suite, path: Path, results: Results) -> None:
    """Write results with their summary, all of it or nothing, and the table beside it."""
    results["summary"] = suite.summary(results["rows"])
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    beside.replace(path)
    path.with_suffix(".md").write_text("\n".join((*suite.markdown(results), *failures(results), "")))


def drawn(suite: Suite, path: Path, results: Results) -> str:
    """Draw the results beside them, and say where, or why not."""
    if not suite.figure or not results["rows"]:
        return ""
    out = path.with_suffix(".svg")
    try:
        importlib.import_module(suite.figure).compare(results, out)
    except (ImportError, SystemExit, ValueError) as error:  # no matplotlib; no row, or a type, that can be drawn
        return f"not drawn: {error}; later: python -m {suite.figure} {path} {out}"
    return f"drawn: {out}"


# -- what rows say -------------------------------------------------------------------------------------------------


def speed_of(row: Mapping[str, Any], over: str, way: str) -> float | None:
    """How much faster one of our ways is than a peer, or than the best one (``BEST``); None if it was not measured.

    >>> row = {"speed": {"copies": {"eager": {"value": 4.0}, "compile": {"value": 1.5}}}}
    >>> [speed_of(row, over, "copies") for over in ("eager", BEST, "torchscript")]
    [4.0, 1.5, None]
    """
    found = row["speed"][way]
    if over == BEST:
        return min((one["value"] for one in found.values()), default=None)
    return found[over]["value"] if over in found else None


def fastest(row: Mapping[str, Any], besides: Sequence[str]) -> str:
    """Name of the fastest that was timed, others than ``besides``."""
    names: list[str] = [name for name in row["times"] if name not in besides]
    return min(names, key=lambda name: row["times"][name]["median us"])


def mean(values: Iterable[float | None]) -> dict[str, Any]:
    """Geometric mean of those that are known, None if none is, and how many they are.

    >>> mean([2.0, None, 8.0])
    {'value': 4.0, 'rows': 2}
    """
    known = [value for value in values if value is not None]
    return {"value": geometric_mean(known) if known else None, "rows": len(known)}


def verdict(found: Mapping[str, Any], enough: Callable[[float], bool]) -> dict[str, Any]:
    """A value with whether it is enough (``"met"``); None where there is no value.

    >>> verdict({"value": 1.5, "rows": 2}, lambda value: value >= 1)
    {'value': 1.5, 'rows': 2, 'met': True}
    """
    value = found.get("value")
    return {**found, "met": None if value is None else bool(enough(value))}


def unstable(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """Times with warnings."""
    return [f"{name} on {key}" for key, row in rows.items() for name, one in row["times"].items() if one["warnings"]]


def sentence(target: str, found: Mapping[str, Any], more: str = "") -> str:
    """What became of a target: its ``verdict``, on which row and host.

    >>> sentence("at least 0.98x", {"value": 0.951, "where": "A, tf32, batch 1", "met": False})
    'MISSED: at least 0.98x: 0.951 on A, tf32, batch 1'
    """
    words = {True: "met", False: "MISSED", None: "not measured"}
    value = "" if found.get("value") is None else f" {found['value']:.3g}"
    at = f" on {found['where']}" if found.get("where") else ""
    at += f", {', '.join(found['host cpu'])}" if found.get("host cpu") else ""
    if found.get("quartiles"):
        at += " (unstable: quartiles {:.3g} to {:.3g})".format(*found["quartiles"])
    return f"{words[found['met']]}: {target}:{value}{at}{more}"


def machines(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """Machines that the rows were measured on, and the runs they come from."""
    found: dict[tuple[str, ...], list[str]] = {}
    for row in rows.values():
        stamp = row["environment"]
        machine = (stamp["device_name"], stamp["host_cpu"], f"torch {stamp['torch']}", f"Python {stamp['python']}")
        found.setdefault(machine, []).append(f"{stamp['date'][:10]} {row['run']}".strip())
    return [f"{', '.join(machine)}; runs {', '.join(sorted(set(runs)))}" for machine, runs in found.items()]


def failures(results: Results) -> list[str]:
    """Rows that failed, as a list in Markdown."""
    return [f"- failed: {key}: {one['reason']}" for key, one in sorted(results["failed"].items())]


def as_us(row: Mapping[str, Any], name: str) -> str:
    """A median for a table, in whole µs."""
    return f"{row['times'][name]['median us']:.0f}" if name in row["times"] else "–"


def as_ratio(value: float | None) -> str:
    """A ratio for a table.

    >>> as_ratio(1.234), as_ratio(None)
    ('1.23x', '–')
    """
    return f"{value:.2f}x" if value is not None else "–"


def aligned(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """A table for the terminal."""
    lines = [heads, *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(one, widths, strict=True)).rstrip() for one in lines]


def as_markdown(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """The same as Markdown."""
    return [f"| {' | '.join(one)} |" for one in (heads, ["---"] * len(heads), *cells)]


# -- options -------------------------------------------------------------------------------------------------------


def parser(
    about: str, *, dtypes: Sequence[str], peers: Sequence[str], seconds: float, models: str = "models"
) -> argparse.ArgumentParser:
    """Options of a suite; it may add its own.

    Args:
        about: the suite's docstring.
        dtypes: that there are.
        peers: that there are.
        seconds: for the samples of a row by default.
        models: what its models are called.
    """
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--out", type=Path, help="results file (JSON); a table goes beside it (.md)")
    add("--models", type=_names, default=[], metavar="GLOB,...", help="all by default")
    add("--dtypes", type=_choice(dtypes), default=[], metavar="DTYPE,...")
    add("--batches", type=lambda text: [int(one) for one in _names(text)], default=[], metavar="N,...")
    add("--peers", type=_choice(peers), default=[], metavar="PEER,...")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--seconds", type=float, default=seconds, help="time for the samples of a row")
    add("--budget-s", type=float, default=300.0, help="what ours may take to choose")
    add("--limit-s", type=float, default=math.inf, help="begin no further row after this")
    add("--row-s", type=float, default=1800.0, help="kill a row after this")
    add("--cache", type=Path, help="directory of Inductor's caches, to be kept between runs")
    add("--warm-only", action="store_true", help="only compile, into the caches")
    add("--gpus", type=int, default=1, help="GPUs of this host that measure, a row each at a time")
    add("--jobs", type=int, default=4, help="processes in which --warm-only compiles at once")
    add("--again", action="store_true", help="measure rows that the file holds already")
    add("--show", action="store_true", help="only print what the file says")
    add("--in-process", action="store_true", help="all in this process, to debug")
    add("--models-from", default="", metavar="MODULE:NAME", help=f"a mapping of further {models}")
    add("--run", default="", help="id of this run")
    add("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    options.set_defaults(peer_s=math.inf)
    return options


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _choice(known: Sequence[str]) -> Callable[[str], list[str]]:
    def chosen(text: str) -> list[str]:
        for name in _names(text):
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return _names(text)

    return chosen
