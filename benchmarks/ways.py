"""Ways to run a model: eager, torch.compile in its modes, CUDA graphs captured by hand, ours; each at its best.

A way is one function from a ``Case`` (a row's model and inputs in one process) to a ``Ready``. Calls run under
``torch.inference_mode``, on inputs that are on the device; cuDNN has chosen by trial before anything else. Captures by
hand copy inputs in and clone outputs, as ours does by default. ``ro-skip`` and ``fr-skip`` call what ``ro`` and ``fr``
compiled, guards skipped; ``ours-static`` follows the plan that ``ours`` chose. ``STEPS`` are those of the paper.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks import xla
from benchmarks.models import Inference, Row, work, work_of_compiled, work_of_export, work_of_recording
from nimble_core.algorithms.antichain import level_width, width
from nimble_core.api.engine import Engine
from nimble_core.api.nimble import Nimble
from nimble_core.ir.call_graph import predecessors
from nimble_core.scheduling.options import Options
from nimble_core.torch_compat.compiler import COUNTERS, INDUCTOR_CONFIG, MODE_OPTIONS
from nimble_core.validation.bounds import BOUNDS
from nimble_core.validation.distances import relative_error
from nimble_viz.collect.peers import peer

ANCHOR = "fr-graph"  # the peer that is measured beside ours in every run
CUDA_ONLY = (ANCHOR, "graph", "ro", "ro-skip", "fr", "fr-skip", "max-autotune")
DEFAULT = (ANCHOR, "ours", "ours-static", "eager", "eager-tuned", "compile", *CUDA_ONLY[1:6])
_BOUND = 3.0  # how many times the usual tolerance of its dtype a way may be from eager
STEPS = {
    "one-stream": Options(fuse="none", policy="single"),
    "fused": Options(fuse="library", policy="single", tune="off"),
    "selected": Options(fuse="library", policy="single"),
    "several": Options(fuse="library", policy="nimble", max_streams=None),
    "streams": Options(fuse="none", policy="nimble", max_streams=None),
}
"""The paper's techniques, one more at a time: replay, operator fusion, choice of kernels by timing them, streams; and
streams alone. Without a measurement fusion folds normalisations, merges products and keeps eager's convolutions."""
_TELLING = 10.0  # how many times its error eager's outputs have to move for a check to mean anything
# Guards: of the whole process, and of code that is compiled already.
_SKIPPING = partial(torch.compiler.set_stance, "default", skip_guard_eval_unsafe=True)


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does: measure ways of a row; of no row: tell the machine.

    ``warm``: only compile them, for the cache. ``waits``: compile, and wait for its turn before anything is timed.
    """

    run: str
    rows: str = "benchmarks.models"
    device: str = "cuda"
    tiny: bool = False
    budget_s: float = 60.0
    row: str = ""
    ways: tuple[str, ...] = ()
    together: bool = False
    warm: bool = False
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """A way that can be called with inputs like those it was prepared with.

    ``work_of`` says whose work it does ("eager", "traced", "exported", "recorded"; "" of other weights than the
    model's), ``whole`` whether its CUDA graphs do all that a call does, ``alone`` whether they can be replayed
    without one, ``stance`` what it is called under, ``synchronize`` waits for its result, ``reset`` takes training back
    to its start and returns the weights, and ``kept`` owns memory that its graphs use.
    """

    run: Callable[..., Any]
    notes: tuple[str, ...] = ()
    chosen: str = ""
    work_of: str = "eager"
    engine: Engine | None = None
    counts: Mapping[str, float] = field(default_factory=dict)
    whole: bool = True
    alone: bool = True
    stance: Callable[[], AbstractContextManager[Any]] = nullcontext
    synchronize: Callable[[], object] = field(
        default_factory=lambda: torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    )
    reset: Callable[[], list[torch.Tensor]] = list
    kept: object = None


@dataclass(frozen=True, slots=True)
class Case:
    """One row in one process: what it runs, inputs to prepare and time with, others to check with, ways made so far."""

    row: Row
    given: Any
    job: Job
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    others: tuple[tuple[Any, ...], ...]
    made: dict[str, Ready] = field(default_factory=dict)


def open_case(row: Row, given: Inference, job: Job) -> Case:
    """Draw inputs; unless the job waits for its turn, choose convolutions."""
    case = Case(row, given, job, *given.fresh(), (given.fresh(),))
    if not job.waits:
        choose_convolutions(case)
    return case


def choose_convolutions(case: Case) -> None:
    """Have cuDNN choose by trial what every way then finds."""
    if case.job.device == "cuda":
        torch.backends.cudnn.benchmark = True
        with torch.inference_mode():
            case.given.model(*case.args, **case.kwargs)
        torch.backends.cudnn.benchmark = False


def check(case: Case, ready: Ready) -> dict[str, Any]:
    """How far ``ready`` is from eager on other inputs, and eager from itself: fields of a record."""
    if not ready.work_of:
        return {}
    (args, kwargs), model = case.others[0], case.given.model
    want = [one.clone() for one in tensors(model(*args, **kwargs))]
    effect = relative_error(tensors(model(*case.args, **case.kwargs)), want)
    error = relative_error(tensors(ready.run(*args, **kwargs)), want)
    return judged(error, effect, _BOUND * BOUNDS[case.row.precision].tolerance)


def judged(error: float, effect: float, bound: float) -> dict[str, Any]:
    """Return a record's fields about whether a way is right; void where outputs hardly depend on inputs."""
    if not math.isfinite(effect):
        return {"notes": ("void: eager's own outputs are not finite",)}
    void = effect == 0 or effect < _TELLING * min(error, bound)
    notes = (f"void: eager's outputs move by only {effect:.0e}",) * void
    return {"rel_err": min(error, 1e300), "effect": effect, "bound": bound, "notes": notes}


def work_done(case: Case, ready: Ready) -> dict[str, int]:
    """FLOPs, attention calls and calls of what ``ready`` runs. Compiles: to be called when all is measured."""
    if case.row.training:
        return asdict(work(partial(ready.run, *case.args))) if ready.work_of == "eager" else {}
    model, args, kwargs = case.given.model, case.args, case.kwargs
    with torch.inference_mode(False), torch.no_grad():  # inference mode would leave calls whole
        if ready.engine is not None:
            recorded = ready.engine.recorded
            return asdict(work_of_recording((recorded.eager or recorded).recording))
        if ready.work_of == "eager":
            return asdict(work(partial(model, *args, **kwargs)))
        return asdict((work_of_compiled if ready.work_of == "traced" else work_of_export)(model, args, kwargs))


def tensors(found: Any) -> list[torch.Tensor]:
    """Tensors of an output, in order."""
    if isinstance(found, torch.Tensor):
        return [found]
    parts = found.values() if isinstance(found, Mapping) else found if isinstance(found, (list, tuple)) else ()
    return [one for part in parts for one in tensors(part)]


def by_hand(ready: Ready, args: Iterable[Any], kwargs: Mapping[str, Any], *, static: bool = False) -> Ready:
    """One CUDA graph of a way, captured as PyTorch's documentation does: inputs copied in, outputs cloned.

    ``static``: the output is returned as it is, and overwritten by the next call.
    """
    with torch.inference_mode(False):  # Dynamo would compile anew, without freezing, for what inference mode makes
        own, named = [one.clone() for one in args], {name: one.clone() for name, one in kwargs.items()}
    compiled = COUNTERS.require()["stats"]["unique_graphs"]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            ready.run(*own, **named)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ready.run(*own, **named)
    if torch.is_inference_mode_enabled() and COUNTERS.require()["stats"]["unique_graphs"] != compiled:
        raise RuntimeError("compiled anew for the captured call: that is not what was prepared")
    outputs = tensors(out)

    def call(*args: Any, **kwargs: Any) -> Any:
        for held, given in zip(own, args, strict=True):
            held.copy_(given, non_blocking=True)
        for name, held in named.items():
            held.copy_(kwargs[name], non_blocking=True)
        graph.replay()
        return out if static else [one.clone() for one in outputs]

    return replace(ready, run=call, kept=ready.run)  # a package frees its weights with its last reference


def _compiled(case: Case, mode: str = "default", **more: Any) -> Ready:
    """``torch.compile(model, dynamic=False)`` in one of its modes, with further options of Inductor."""
    run: Any = torch.compile(case.given.model, options={**MODE_OPTIONS.require()(mode), **more}, dynamic=False)
    with INDUCTOR_CONFIG.require().patch(freezing="freezing" in more):  # Dynamo asks, before options reach Inductor
        for _ in range(3):
            run(*case.args, **case.kwargs)
    # Graphs that torch captures reuse the memory of their inputs: replays by themselves would read other indices.
    alone = mode == "default" or all(one.is_floating_point() for one in tensors([*case.args, *case.kwargs.values()]))
    return Ready(run, work_of="traced", alone=alone)


def _aoti(case: Case) -> Ready:
    """AOTInductor: exported, compiled, loaded without its locks, whose events no capture allows, captured by hand."""
    inductor, cuda = importlib.import_module("torch._inductor"), case.job.device == "cuda"
    with torch.inference_mode(False), torch.no_grad():
        program = torch.export.export(case.given.model, case.args, case.kwargs)
        run = inductor.aoti_load_package(inductor.aoti_compile_and_package(program), run_single_threaded=cuda)
    ready = Ready(run, work_of="exported")
    return by_hand(ready, case.args, case.kwargs) if cuda else ready


def _torchscript(case: Case) -> Ready:
    """Traced, frozen, and optimised for inference."""
    with torch.inference_mode(False), torch.no_grad():  # a frozen module's constants cannot be inference tensors
        args = tuple(one.clone() for one in case.args)
        traced: Any = torch.jit.trace(case.given.model, args, check_trace=False)
        run = torch.jit.optimize_for_inference(torch.jit.freeze(traced))
    for _ in range(3):  # profiles, then fuses
        run(*case.args)
    return Ready(run, work_of="traced")


def _xla(case: Case) -> Ready:
    size = 64 if case.job.tiny else 224
    run, synchronize = xla.resnet50(case.row.batch, size, case.row.dtype, case.job.device)
    note = "JAX: random weights, BatchNorm folded, inputs not copied; outputs not compared"
    return Ready(lambda *_, **__: run(), (note,), work_of="", synchronize=synchronize)


def of_engine(run: Callable[..., Any], engine: Engine | None) -> Ready:
    """Ours, with what it chose."""
    assert engine is not None
    name = next((one.name for one in engine.candidates if one.chosen), engine.schedule.policy)
    fuse, streams = engine.recorded.recording.program.fuse, engine.schedule.streams
    return Ready(run, engine.notes, f"{name}, fuse={fuse}, streams={streams}", "recorded", engine, counts_of(engine))


def counts_of(engine: Engine) -> dict[str, float]:
    """Count what an engine replays, a backward's engine included, and the seconds of each step of preparing it.

    ``width`` is the degree of concurrency: how many calls can run at once at most (a lower bound above 10,000 calls).
    ``planned`` are synchronisations between streams, ``emitted`` those of the captured graph, where there is one,
    ``full`` what waiting for every hazard across them would take, and ``edges`` less ``matched`` the fewest at full
    concurrency.
    """
    halves = [(engine.executable, engine.recorded.graph)]
    if engine.backward is not None:
        tuned = engine.backward.tuned
        halves.append((tuned.best, tuned.recorded.graph))
    found: dict[str, float] = {f"{step} s": round(seconds, 4) for step, seconds in engine.seconds.items()}
    for executable, graph in halves:
        schedule, waits = executable.schedule, executable.counts
        wide = (width if graph.size <= 10_000 else level_width)(predecessors(graph))
        counted = {"calls": graph.size, "edges": len(graph.meg), "matched": schedule.matched}
        counted |= {"full": waits.full, "planned": waits.planned}
        counted |= {} if waits.emitted is None else {"emitted": waits.emitted}
        for name, count in counted.items():
            found[name] = found.get(name, 0) + count
        for name, most in {"width": wide, "streams": schedule.streams}.items():
            found[name] = max(found.get(name, 0), most)
    return found


def _ours(case: Case, *, static: bool = False, given: Options | None = None) -> Ready:
    """As users get it; with static outputs the same plan. Ahead, its compiled kernels alone: nothing is to be timed."""
    options = given or Options(budget_s=case.job.budget_s, outputs="static" if static else "copy")
    if case.job.warm:
        options = replace(options, fuse="inductor", policy="single")
    first = case.made.get("ours") if static else None
    plan = first.engine.plan if first and first.engine else None
    net = Nimble(case.given.model, options).prepare(*case.args, plan=plan, **case.kwargs)
    ready = of_engine(net, net.engines[0])
    return replace(ready, chosen=first.chosen) if first else ready


WAYS: Mapping[str, Callable[[Case], Ready]] = {
    "eager": lambda case: Ready(case.given.model),
    "eager-tuned": lambda case: Ready(peer("eager-tuned").prepare(case.given.model, case.args, case.kwargs)),
    "graph": lambda case: by_hand(Ready(case.given.model), case.args, case.kwargs),
    "compile": _compiled,
    "ro": lambda case: _compiled(case, "reduce-overhead"),
    "fr": lambda case: _compiled(case, "reduce-overhead", freezing=True),
    "ro-skip": lambda case: replace(case.made.get("ro") or WAYS["ro"](case), stance=_SKIPPING),
    "fr-skip": lambda case: replace(case.made.get("fr") or WAYS["fr"](case), stance=_SKIPPING),
    ANCHOR: lambda case: by_hand(_compiled(case, freezing=True), case.args, case.kwargs),
    "max-autotune": lambda case: _compiled(case, "max-autotune", freezing=True, coordinate_descent_tuning=True),
    "aoti": _aoti,
    "xla": _xla,
    "ours": _ours,
    "ours-static": lambda case: _ours(case, static=True),
    "torchscript": _torchscript,
    **{name: partial(_ours, given=options) for name, options in STEPS.items()},
}
