"""Measure every way to run every row, each in a process of its own, and keep what comes of it.

    python -m benchmarks.runner --out benchmarks/results/h200.jsonl.gz --rows first --limit-s 440
    python -m benchmarks.runner --out benchmarks/results/h200.jsonl.gz --rows first --again ours --together 0

Two ways that share what was prepared (``ro`` and ``ro-skip``, say) share a process; all ways of the first rows
(``--together``) also share one, in turn. What the store holds of this GPU, driver, torch and transformers is not
measured again, unless ``--again`` names it; what failed is tried again by the next run. A row's anchor, a CUDA graph
captured by hand, is measured first in every run that measures something of the row: it tells whether times of two runs
can be compared, and is kept where ours is beside it. SIGTERM ends a run at once; complete records are kept.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import importlib.metadata
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import cycle, product
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils._pytree import tree_map

import nimble_core
from benchmarks import models, training_ways, ways
from benchmarks.measure import WARM_UPS, block, take_times
from benchmarks.store import OURS, Record, losses, read, summary, write
from benchmarks.ways import Case, Job, Ready
from nimble_core.profiling.machine import environment, finish
from nimble_core.torch_compat.compiler import COUNTERS, INDUCTOR_CONFIG

_PACKAGES = ("torch", "triton", "transformers", "torchvision", "timm", "jax")
_IMPORTED = ("torch._dynamo", "torch._inductor.compile_fx", "torchvision", "timm", "transformers")
# Compiled ahead: their processes wait for their turn, or leave what they compile in a cache. Not max-autotune, which
# chooses by timing while it compiles.
_WAITING = ("compile", "ro", "fr", "fr-graph")
_CACHED = ("aoti", "ours", "compile-graph", "step-graph", "drop-in")
_EXTRA = ("max-autotune", "aoti", "xla")  # costly, of rows that name them, and never in a shared process
_TWINS = (("ours", "ours-static"), ("ro", "ro-skip"), ("fr", "fr-skip"))  # the second uses what the first prepared
_COUNTED = ("eager", "compile", "aoti", "ours")  # one way of each kind of work
_MODULES: dict[bool, Any] = {False: ways, True: training_ways}


def child(job: Job, folder: Path) -> None:
    """Do a job; its records come to lie in ``folder``, a line each. Ends the process."""
    try:
        os.setsid()
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # a parent that is killed takes this process along
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for stream in (1, 2):
            os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        faulthandler.enable()
        os.environ["NIMBLE_CACHE_DIR"] = str(folder / "choices")  # nothing is recalled
        with (folder / "records").open("ab", buffering=0) as out:
            for record in measured(job, folder):
                out.write(msgspec.json.encode(record) + b"\n")
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def measured(job: Job, folder: Path) -> Iterator[Record]:
    """Yield records of a job's ways, each as it is complete; for no row, one that describes the machine."""
    made, cuda = dict[str, tuple[Ready | None, Record]](), job.device == "cuda"
    torch.set_num_threads(1 if job.tiny and not cuda else torch.get_num_threads())
    stamp = environment(job.device)
    blank = Record(job.row, "", job.together, job.run, packages=_packages(), environment=asdict(stamp), date=_now())
    if not job.row:
        yield blank
        return
    row = importlib.import_module(job.rows).ROWS[job.row]
    case = _MODULES[row.training].open_case(row, models.load(row, job.device, job.tiny), job)
    if job.waits or job.warm:
        INDUCTOR_CONFIG.require().compile_threads = 2  # others compile besides
    if job.waits:
        _wait_when_compiled(folder, partial(ways.choose_convolutions, case))
    # Skipping guards is a setting of the whole process: those are never timed in turn with others.
    groups = [tuple(way for way in job.ways if not way.endswith("-skip"))] if job.together else []
    groups += [(way,) for way in job.ways if not groups or way not in groups[0]]
    with nullcontext() if row.training else torch.inference_mode():
        # Ours first where a process is shared, so that it pays for loading the compiler.
        for way in sorted(job.ways, key=lambda way: way not in OURS) if job.together or job.warm else ():
            made[way] = _prepared(case, way, blank)
        for group in () if job.warm else groups:
            made |= {way: _prepared(case, way, blank) for way in group if way not in made}
            ready = {way: one for way in group if (one := made[way][0])}
            calls = {way: (_by_turns(one.run, case), one.synchronize, one.alone) for way, one in ready.items()}
            try:
                with next(iter(ready.values())).stance() if len(ready) == 1 else nullcontext():
                    found = take_times(calls, cuda=cuda, seconds=0.1 if job.tiny else 2.0)
            except Exception as error:
                found = {way: {"error": repr(error)[:300]} for way in ready}
            for way in group:
                record = replace(made[way][1], environment=asdict(finish(stamp)), **found.get(way, {}))
                with suppress(Exception):  # counting takes nothing from the times
                    counted = way in ready and way in _COUNTED and not job.together
                    record = replace(record, work=ways.work_done(case, ready[way])) if counted else record
                yield record


def _by_turns(run: Callable[..., Any], case: Case) -> Callable[[], Any]:
    """Call with the inputs and with a copy of them by turns: a caller's seldom lie where the last ones did."""
    with torch.inference_mode(False):  # Dynamo would compile anew for what inference mode makes
        copied = tree_map(torch.clone, (case.args, case.kwargs))
    inputs = cycle([(case.args, case.kwargs), copied])

    def call() -> Any:
        args, kwargs = next(inputs)
        return run(*args, **kwargs)

    return call


def _wait_when_compiled(folder: Path, then: Callable[[], None]) -> None:
    """Have this process say when it has compiled for the first time, and wait for its turn before it runs that."""

    def wait(_: object) -> None:
        if not (folder / "compiled").exists():
            (folder / "compiled").touch()
            while not (folder / "go").exists():
                time.sleep(0.02)
            then()

    importlib.import_module("torch._dynamo.callback").callback_handler.register_end_callback(wait)


def _prepared(case: Case, way: str, blank: Record) -> tuple[Ready | None, Record]:
    """Make a way ready, check it and warm it up; None if it fails; with its record so far."""
    record, module, before = replace(blank, way=way), _MODULES[case.row.training], _compiler_counts()
    start, found = time.perf_counter(), dict[str, Any]()
    try:
        ready = case.made[way] = module.WAYS[way](case)
        seconds = None if case.job.waits else time.perf_counter() - start
        hits, others, breaks, skips = (now - then for now, then in zip(_compiler_counts(), before, strict=True))
        with ready.stance():
            if not case.job.warm:
                found = module.check(case, ready)
                block(partial(ready.run, *case.args, **case.kwargs), ready.synchronize, WARM_UPS)
    except Exception as error:
        traceback.print_exc()
        return None, replace(record, error=repr(error)[:300])
    cache = ("partly" if hits else "cold") if others else "warm" * bool(hits)
    said = (f"graph breaks: {breaks}",) * bool(breaks) + ("Inductor skipped CUDA graphs",) * bool(skips)
    found["notes"] = (*ready.notes, *(() if way in OURS else said), *found.get("notes", ()))
    about = {name: getattr(ready, name) for name in ("chosen", "whole", "work_of", "counts")}
    return ready, replace(record, prepare_s=seconds, compile_cache=cache, **about, **found)


def _compiler_counts() -> tuple[int, int, int, int]:
    """Compilations that Inductor's cache served, and others; graph breaks; CUDA graphs that Inductor skipped."""
    counters, held = COUNTERS.require(), COUNTERS.require()["inductor"]
    others = held["fxgraph_cache_miss"] + held["fxgraph_cache_bypass"]
    return held["fxgraph_cache_hit"], others, sum(counters["graph_break"].values()), held["cudagraph_skips"]


def _packages() -> dict[str, str]:
    """Versions; ours with a digest of its sources, which tells revisions apart."""
    found = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    sources = b"".join(path.read_bytes() for path in sorted(Path(nimble_core.__file__).parent.rglob("*.py")))
    return {**found, "nimble": f"{nimble_core.__version__}+{sha256(sources).hexdigest()[:10]}"}


def plan(
    names: Sequence[str], anchor: str, held: Mapping[tuple[str, bool], Record], again: Sequence[str], run: str,
    *, together: bool = False, retrying: bool = False,
) -> list[tuple[tuple[str, ...], bool]]:  # fmt: skip
    """Ways of a row to measure, process by process, and whether these are timed in turn; an ``anchor`` first."""

    def due(way: str, shared: bool) -> bool:
        one = held.get((way, shared))
        return one is None or (one.run != run and (way in again or (retrying and bool(one.error))))

    if alone := [way for way in names if due(way, False)]:
        alone = [*filter(None, [anchor]), *(way for way in alone if way != anchor)]
    units = dict.fromkeys(next((unit for unit in _TWINS if way in unit), (way,)) for way in alone)
    jobs = [(tuple(way for way in unit if way in alone), False) for unit in units]
    failing = {way for (way, shared), one in held.items() if one.error and not shared}
    sharing = tuple(way for way in names if way not in _EXTRA and way not in failing)
    return jobs + [(sharing, True)] * (together and any(due(way, True) for way in sharing))


def _now() -> str:
    return time.strftime("%FT%TZ", time.gmtime())


@dataclass(slots=True)
class Runner:
    """One run: what was asked for, the machine, the store's records by key, and rows' anchors in this run."""

    given: argparse.Namespace
    blank: Job
    folder: Path
    held: dict[Any, Record]
    machine: Record
    method: str = "fork"
    stopped: bool = False
    anchors: dict[tuple[str, bool], Record] = field(default_factory=dict)
    running: list[Any] = field(default_factory=list)
    waiting: dict[tuple[str, tuple[str, ...]], Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def _late(self) -> bool:
        return self.stopped or time.monotonic() - self.began > self.given.limit_s

    def _started(self, job: Job) -> tuple[Any, Path, float]:
        """Start a job's process, or let the one go on that has compiled for it: with its folder, and since when."""
        if not job.together and (one := self.waiting.pop((job.row, job.ways), None)) is not None:
            (one[1] / "go").touch()
            return one[0], one[1], time.monotonic()
        folder, context = Path(tempfile.mkdtemp(dir=self.folder)), multiprocessing.get_context(self.method)
        process = context.Process(target=child, args=(job, folder))  # type: ignore[attr-defined]  # the union of contexts lacks it
        process.start()
        return process, folder, time.monotonic()

    def compile_ahead(self, jobs: Sequence[Job], limit_s: float, parallel: int) -> None:
        """Start jobs that compile and wait, or end; at most so many compile at once, none longer than ``limit_s``."""
        todo, compiling = list(jobs), list[Any]()
        while (todo or compiling) and not self._late():
            while todo and len(compiling) < parallel:
                job = todo.pop(0)
                compiling.append(self._started(job))
                self.waiting[job.row, job.ways] = compiling[-1]
            time.sleep(0.05)
            for one in tuple(compiling):
                process, folder, began = one
                if time.monotonic() - began > limit_s:
                    process.kill()
                if process.exitcode is not None or (folder / "compiled").exists():
                    compiling.remove(one)

    def do(self, jobs: Sequence[Job], limit_s: float, parallel: int = 1) -> Iterator[tuple[list[Record], str]]:
        """Do jobs, each in a process that is killed after ``limit_s`` or when the run is stopped, with all it started.

        Yields complete records of each, and how it ended if not well. This process never touches CUDA: it is forked.
        """
        waiting = list(jobs)
        while self.running or (waiting and not self._late()):
            while waiting and len(self.running) < parallel:
                self.running.append(self._started(waiting.pop(0)))
            for one in tuple(self.running):
                process, folder, began = one
                process.join(0.05)
                code, late = process.exitcode, time.monotonic() - began > limit_s
                if code is None and not (late or self.stopped):
                    continue
                process.kill()
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
                self.running.remove(one)
                texts = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
                said = [line for line in texts.get("log", b"").decode(errors="replace").splitlines() if line.strip()]
                if code is not None and code < 0:  # where it crashed, as faulthandler says
                    here = [i for i, line in enumerate(said, 1) if line.startswith("Current thread")]
                    said = [" < ".join(map(str.strip, said[here[0] : here[0] + 3]))] if here else said[:1]
                ended = "stopped" if self.stopped else f"killed after {limit_s:g} s" if late else f"ended with {code}"
                records = map(msgspec.json.Decoder(Record).decode, texts.get("records", b"").split(b"\n")[:-1])
                yield list(records), "" if code == 0 else ": ".join([ended, *said[-1:]])[:400]

    def measure(self, row: models.Row, names: tuple[str, ...], anchor: str, together: bool) -> None:
        """Measure ways in one process, and keep what comes of it, failures too; an anchor only beside ours."""
        start, slow = time.monotonic(), 3 if together else 4 if "max-autotune" in names else 1
        job = replace(self.blank, row=row.name, ways=names, together=together)
        if (told := next(self.do([job], slow * self.given.row_s), None)) is None:
            return  # too late
        records, ended = told
        lost = replace(self.machine, row=row.name, together=together, error=ended or "no record", date=_now())
        done = {way: replace(lost, way=way) for way in names if not self.stopped} | {one.way: one for one in records}
        spent_s = round((time.monotonic() - start) / len(names), 2)
        about: Any = {name: getattr(row, name) for name in ("title", "dtype", "batch", "training")}
        if anchor in done:
            self.anchors[row.name, together] = replace(done[anchor], spent_s=spent_s, **about)
        beside = self.anchors.get((row.name, together))
        medians = beside.medians if beside else {}
        leading = ("ours",) if replace(lost, way="ours").key in self.held else OURS
        if beside and not beside.error and any(one.way in leading and not one.error for one in done.values()):
            self.held[beside.key] = replace(beside, anchor=medians)
        for one in done.values():
            if one.way != anchor or one.key not in self.held or self.held[one.key].error:
                self.held[one.key] = replace(one, anchor=medians, spent_s=spent_s, **about)
            said = one.error or " / ".join(f"{name.removesuffix('_us')} {us:.1f}" for name, us in one.medians.items())
            print(f"{row.name:20} {'together ' * together}{one.way:14} {said}  {spent_s:.0f} s", flush=True)
        write(self.given.out, self.held.values())

    def due(self, row: models.Row, *, together: bool, retrying: bool) -> list[tuple[tuple[str, ...], bool]]:
        """Ways of a row to measure, process by process, as ``plan`` has it."""
        module, cuda = _MODULES[row.training], self.given.device == "cuda"
        asked = [*module.DEFAULT, *row.extra] if self.given.ways == "default" else self.given.ways.split(",")
        names = [way for way in asked if way in module.WAYS and (cuda or way not in module.CUDA_ONLY)]
        here = (row.name, self.machine.place)
        held = {(way, shared): one for (name, way, shared, place), one in self.held.items() if (name, place) == here}
        again = [way for name in self.given.again.split(",") for way in (OURS if name == "ours" else (name,))]
        anchor = "" if (row.name, False) in self.anchors else self._anchor(row)
        return plan(names, anchor, held, again, self.blank.run, together=together, retrying=retrying)

    def _anchor(self, row: models.Row) -> str:
        own: str = self.given.anchor or _MODULES[row.training].ANCHOR
        return own if self.given.device == "cuda" else "eager"

    def rows(self, rows: Mapping[str, models.Row], together: Sequence[str], *, retrying: bool) -> None:
        """Measure what is due of some rows; before that compile it, several ways at once."""
        jobs = {name: self.due(row, together=name in together, retrying=retrying) for name, row in rows.items()}
        ahead = list[Job]()
        for name, units in jobs.items():
            for unit, shared in units if self.given.jobs else ():
                waits = not (shared or rows[name].training) and unit[0] in _WAITING
                some = [unit] if waits else [(way,) for way in unit if way in _CACHED and self.given.device == "cuda"]
                ahead += [replace(self.blank, row=name, ways=one, waits=waits, warm=not waits) for one in some]
        self.compile_ahead(ahead, self.given.row_s, self.given.jobs)
        for job in ahead:
            if job.warm:
                self.waiting.pop((job.row, job.ways), None)
        for picked in self.given.cache.rglob("*.best_config") if ahead else ():
            picked.unlink(missing_ok=True)  # chosen by timing while others were running
        for name, units in jobs.items():
            for unit, shared in units:
                if not self._late():
                    self.measure(rows[name], unit, self._anchor(rows[name]), shared)


def run(given: argparse.Namespace) -> int:
    """Measure what is asked for; returns the exit status."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str((given.cache / "inductor").resolve())
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking whether there is a GPU must not touch it
    for module in _IMPORTED:
        with suppress(ImportError):
            importlib.import_module(module)
    known: Any = importlib.import_module(given.models)
    named = {name: getattr(known, name.upper(), ()) for name in ("six", "lost", "first")} | {"all": known.ROWS}
    rows = [known.ROWS[name] for name in named.get(given.rows, given.rows.split(","))]
    blank = Job(given.run or _now(), given.models, given.device, given.tiny, given.budget)
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        held = {one.key: one for one in read(given.out)}
        runner = Runner(given, blank, Path(folder), held, Record("", "", False, blank.run), given.start)
        signal.signal(signal.SIGTERM, lambda *_: setattr(runner, "stopped", True))
        try:
            told, ended = next(runner.do([blank], given.row_s), ([], ""))
            if not told and runner.method == "fork":  # an import has touched CUDA
                runner.method = "spawn"
                told, ended = next(runner.do([blank], given.row_s), ([], ""))
            if not told and not runner.stopped:
                print(f"nothing can be measured here: {ended}", file=sys.stderr)
                return 2
            runner.machine = told[0] if told else runner.machine
            together = [row.name for row in rows[: given.together]]
            batches = [rows[at : at + given.batch] for at in range(0, len(rows), given.batch)]
            for retrying, some in product((False, True), batches):
                runner.rows({row.name: row for row in some}, together, retrying=retrying)
        finally:
            stopped, runner.stopped = runner.stopped, True
            runner.running += runner.waiting.values()
            list(runner.do((), 0.0))
    return 128 + signal.SIGTERM if stopped else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print what the store says."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--out", type=Path, required=True, help="the store, for one device: benchmarks/results/h200.jsonl.gz")
    add("--rows", default="first", help="six, lost, first, all, or names")
    add("--ways", default="default", help="names; by default all that the device can do, and a row's costly ones")
    add("--anchor", default="", help="measured beside what is measured of a row; by default compiled, captured by hand")
    add("--together", type=int, default=1, help="the first so many rows are also measured in one process")
    add("--again", default="", help="measure these ways again though they are held: ours, or names")
    add("--run", default="", help="name of this run, to go on with --again: what it has measured is held")
    add("--cache", type=Path, default=Path(".inductor"), help="directory of Inductor's cache")
    add("--jobs", type=int, default=6, help="compile so many ways at once ahead; 0: none")
    add("--batch", type=int, default=6, help="of so many rows: what was compiled waits in memory for its turn")
    add("--limit-s", type=float, default=500.0, help="begin nothing after this")
    add("--row-s", type=float, default=150.0, help="kill a process after this; thrice for shared ones")
    add("--budget", type=float, default=60.0, help="Options.budget_s of ours; 60 is what users get")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="small models and few samples, to try the runner")
    add("--start", choices=("fork", "spawn"), default="fork", help="how processes begin: spawn imports all anew")
    add("--show", action="store_true", help="only print what the store says")
    add("--floor", type=float, default=0.0, help="exit status 1 where ours is decidedly below this of a peer")
    add("--models", default="benchmarks.models", help=argparse.SUPPRESS)
    given = options.parse_args(arguments)
    status = 0 if given.show else run(given)
    records = read(given.out)
    print("stopped" if status else "\n".join(summary(records)))
    if status or not (lost := losses(records, given.floor)):
        return status
    print(f"\nslower than {given.floor:g} of a peer's speed:", *lost, sep="\n", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
