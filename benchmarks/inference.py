"""Inference against every peer: models × dtypes × batches, each row timed in one interleaved run.

    python -m benchmarks.inference --out benchmarks/results/inference-h200.json --cache .inductor

A row is one model, dtype and batch, measured in a process of its own: eager, the peers, and ours with its outputs
copied and with static ones, all from the call to the finished result, inputs copied where the way needs it; beside
them bare replays of ours and of eager's kernels on one stream. Each sample comes after an untimed run of the same. All
outputs are held against eager's and against float64 on fresh inputs; a peer that fails is reported with the reason.

Where there is a GPU, tuned eager runs before anything else: cuDNN keeps one choice for each convolution, layout and
process, and so everyone who runs channels last has that of its benchmark. Ours is prepared before the peers, and pays
for loading the compiler.

Rows are written as they finish, and a row that the file holds is not measured again; rows that failed are tried again
after the others. ``--warm-only`` compiles ahead of time, several models at once, into the directory of ``--cache``.
Beside the results lies the same as a table in Markdown. All speeds are ratios of medians of one row, above 1 where ours
is faster.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

import torch

from benchmarks.cuda import figures
from benchmarks.policies import extreme
from benchmarks.rows import (
    BEST,
    Job,
    Row,
    Settings,
    Suite,
    Told,
    about_engine,
    ahead_said,
    aligned,
    as_markdown,
    as_ratio,
    as_us,
    cached_files,
    fastest,
    machines,
    mean,
    more_models,
    parser,
    run_suite,
    sentence,
    speed_of,
    unstable,
    verdict,
    why,
)
from benchmarks.zoo import DTYPES, SUITE, load, precision
from nimble_core.api.engine import Engine
from nimble_core.api.nimble import Nimble
from nimble_core.autotune.capture_pipeline import device_for
from nimble_core.compiler.attribution import unmapped
from nimble_core.ir.measurement import Measurement, interleave, ratio
from nimble_core.profiling.machine import environment, finish
from nimble_core.runtime.device import Device
from nimble_core.scheduling.options import Options
from nimble_core.tracing.pytree import builder, flatten
from nimble_core.tracing.recorded import Recorded, Stopwatch, check_inputs, record_static, state_kept
from nimble_core.tracing.side_effects import preserved
from nimble_core.validation.equality import check_equality
from nimble_core.validation.judge import Cases, eager_cases
from nimble_viz.analysis.limit import EXPLAINED_ABOVE
from nimble_viz.collect.peer_runs import PeerRuns
from nimble_viz.collect.peers import close, peer, peer_names

__all__ = [
    "AUTOTUNED",
    "BATCHED",
    "BEST",
    "PEERS",
    "best_peer",
    "equal",
    "main",
    "markdown",
    "measure",
    "selected",
    "speed",
    "summary",
    "table",
    "warm",
]

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
NOT_PEERS = (OURS, STATIC, REPLAY, UNFUSED)

ROUNDS = 201


# -- one row -------------------------------------------------------------------------------------------------------


def measure(row: Row, settings: Settings) -> dict[str, Any]:
    """Everything about one row, measured in this process.

    Raises:
        NimbleError: ours cannot be prepared.
        Exception: the model cannot be made or run.
    """
    began, watch = time.perf_counter(), Told()
    with precision(row.dtype), ExitStack() as stack:
        files = cached_files()
        with watch("eager"):
            model, args, kwargs = _example(row, settings)
            stamp = environment(settings.device)
            if TUNED in row.peers and settings.device == "cuda":
                _tuned_first(model, args, kwargs)
            recorded, device = _recorded(model, args, kwargs)
            stack.enter_context(preserved(model))
            stack.enter_context(state_kept(recorded))
            cases = eager_cases(recorded, truth=True)
        single = Options(fuse="none", policy="single", tune="off")
        options = Options(fuse="auto", policy="auto", tune="fast", budget_s=settings.budget_s)
        with watch(UNFUSED):
            unfused, unfused_s = _prepared(stack, model, args, kwargs, single)
        with watch(OURS):
            net, net_s = _prepared(stack, model, args, kwargs, options)
        peers = PeerRuns(
            recorded,
            args,
            kwargs,
            without_autograd=torch.inference_mode,
            synchronize=device.synchronize,
            taken=("eager", *NOT_PEERS),
        )
        stack.callback(peers.close)
        for name in row.peers:
            with watch(name):
                peers.prepare(peer(name), cases)
        engine = net.engines[0]
        runs = _ours(net, args, kwargs)
        with watch("samples"):
            times = _timed(device, model, args, kwargs, runs, peers, engine, unfused.engines[0], settings.seconds)
        program = engine.recorded.recording.program
        with watch("limit"):
            about = about_engine(row, stamp, engine, device, times[REPLAY])
        ours = {
            **about,
            "eager calls": recorded.graph.size,
            "unmapped calls": unmapped(program) if program.fuse != "none" else 0,
            "memory bytes": {"ours": engine.executable.nbytes, "unfused": unfused.engines[0].executable.nbytes},
        }
        checked = {**runs, "unfused": unfused}
        with watch("equality"):
            equality = {name: asdict(_check(name, run, recorded, cases)) for name, run in checked.items()}
        return {
            "model": row.model,
            "dtype": row.dtype,
            "batch": row.batch,
            "run": settings.run,
            "environment": asdict(finish(stamp)),
            "times": {name: figures(one) for name, one in times.items()},
            "speed": {
                way: {name: asdict(ratio(times[ours_], one)) for name, one in times.items() if name not in NOT_PEERS}
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
            "compile cache files": [files, cached_files()],
            "ours": ours,
            "spent s": dict(watch.seconds),
            "wall s": time.perf_counter() - began,
        }


def warm(row: Row, settings: Settings) -> dict[str, Any]:
    """Compile what ``measure`` would of the row's peers and ours among them, and throw it away: what stays are the
    caches on disk.
    """
    began = time.perf_counter()
    notes, watch = {}, Told()
    options = Options(fuse="inductor", policy="single", budget_s=settings.budget_s)
    with precision(row.dtype), ExitStack() as stack:
        model, args, kwargs = _example(row, settings)
        if OURS in row.peers and settings.device == "cuda":  # what cuDNN chose decides of layouts
            _tuned_first(model, args, kwargs)
        for name in row.peers:
            try:
                with watch(name):
                    if name == OURS:
                        _prepared(stack, model, args, kwargs, options)
                    else:
                        with torch.inference_mode():
                            close(peer(name).prepare(model, args, kwargs))
            except Exception as error:
                notes[name] = why(error)
    return {"wall s": time.perf_counter() - began, "ways s": watch.seconds, "notes": notes}


def compiled(row: Row) -> tuple[str, ...]:
    """Ways of a row that compile something."""
    return (OURS, *(name for name in row.peers if name.startswith("compile")))


def _example(row: Row, settings: Settings) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    SUITE.update(more_models(settings.models_from))
    return load(row.model, row.dtype, row.batch, settings.device)


def _tuned_first(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Have cuDNN choose by trial what it keeps for this process."""
    with torch.inference_mode():
        peer(TUNED).prepare(model, args, kwargs)(*args, **kwargs)


def _recorded(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Recorded, Device]:
    signature = check_inputs(model, args, kwargs)
    device = device_for(signature.device)
    device.warm_up(model, args, kwargs)
    return record_static(device, model, signature, strict=False, step=Stopwatch()), device


def _prepared(
    stack: ExitStack, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options
) -> tuple[Nimble, float]:
    """Ours, open until the stack unwinds; and seconds to prepare it."""
    net = Nimble(model, options)
    stack.callback(net.close)
    start = time.perf_counter()
    net.prepare(*args, **kwargs)
    return net, time.perf_counter() - start


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


# -- the run -------------------------------------------------------------------------------------------------------


JOBS: dict[str, Job] = {"measure": measure, "warm": warm}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for; 1 if a row failed, else 0."""
    options = parser(__doc__ or "", dtypes=DTYPES, peers=peer_names(), seconds=4.0)
    suite = Suite(
        "benchmarks.inference",
        SUITE,
        JOBS,
        selected,
        summary,
        line,
        table=lambda results: table(results["rows"]),
        markdown=lambda results: markdown(results["rows"]),
        compiled=compiled,
        timed=AUTOTUNERS,
        figure="benchmarks.inference_figure",
    )
    return run_suite(suite, options.parse_args(argv))


# -- what it says --------------------------------------------------------------------------------------------------


def speed(row: Mapping[str, Any], over: str, way: str = "copies") -> float | None:
    """How much faster ours is than a peer, or than the best one (``BEST``); None if it was not measured."""
    return speed_of(row, over, way)


def best_peer(row: Mapping[str, Any]) -> str:
    """Name of the fastest way that is not ours, eager among them."""
    return fastest(row, NOT_PEERS)


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
                over: {way: mean(speed(row, over, way) for row in right if row["batch"] == batch) for way in WAYS}
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
        "unstable": unstable(rows),
    }


def targets(rows: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What is asked for at batch 1, what was reached, and whether that is enough (None: nothing was measured).

    Speeds are given for both ways to return outputs. A row that was not shown to be right has no speed to speak of.
    """
    ones = {key: row for key, row in rows.items() if row["batch"] == 1}
    right = {key: row for key, row in ones.items() if equal(row)}
    limits = [row["ours"]["limit"] for row in ones.values() if row["ours"]["limit"]]

    def least(over: str, wanted: float, of: Callable[[Mapping[str, Any]], bool], what: str) -> dict[str, Any]:
        def found(way: str) -> dict[str, Any]:
            known = [(key, speed(row, over, way)) for key, row in right.items() if of(row)]
            below = {key: value for key, value in known if value is not None and value < wanted}
            return {**verdict(extreme(min, known), lambda value: value >= wanted), "below": below}

        return {"target": what, **{way: found(way) for way in WAYS}}

    def means(over: str, wanted: float) -> dict[str, Any]:
        found = {way: mean(speed(row, over, way) for row in right.values()) for way in WAYS}
        what = f"geometric mean over {over} at least {wanted:g}x"
        return {"target": what, **{way: verdict(one, lambda value: value >= wanted) for way, one in found.items()}}

    def single(what: str, found: Mapping[str, Any], enough: Callable[[float], bool]) -> dict[str, Any]:
        return {"target": what, "all": verdict(found, enough)}

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
        means(OVERHEAD, 1.4),
        means(AUTOTUNE, 1.25),
        on_wide,
        {
            "target": "more than 22.34x over eager on NASNet-A mobile",
            **{
                way: {
                    **verdict(_most(mobile, "eager", way), lambda value: value > 22.34),
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
    ]


def _most(rows: Sequence[tuple[str, Mapping[str, Any]]], over: str, way: str) -> dict[str, Any]:
    """The most that ours is faster on one of the rows, and on which; with its quartiles where times were unstable."""
    found = extreme(max, ((key, speed(row, over, way)) for key, row in rows))
    spread = dict(rows)[found["where"]]["speed"][way][over] if found else {"stable": True}
    return found if spread["stable"] else {**found, "quartiles": [spread["low"], spread["high"]]}


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
    return [
        (
            row["model"],
            row["dtype"],
            str(row["batch"]),
            as_us(row, "eager"),
            best_peer(row),
            as_us(row, best_peer(row)),
            as_us(row, OVERHEAD),
            as_us(row, OURS),
            as_us(row, STATIC),
            as_ratio(speed(row, BEST)),
            as_ratio(speed(row, OVERHEAD)),
            row["ours"]["chosen"],
            f"{row['ours']['limit']['distance']:.2f}" if row["ours"]["limit"] else "–",
            "yes" if equal(row) else "no",
        )
        for row in sorted(rows.values(), key=lambda row: (row["batch"], row["model"], row["dtype"]))
    ]


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
    for target in found["targets"]:
        for way in (way for way in ("all", *WAYS) if way in target):
            one, named = target[way], "" if way == "all" else f" ({way})"
            below = f"; below: {'; '.join(one['below'])}" if one.get("below") else ""
            lines.append(sentence(f"{target['target']}{named}", one, below))
    far = found["distance to limit"]
    if far["median"]:
        gpu = far["median, back to back"]
        lines.append(
            f"distance to limit: median {far['median']:.3f}"
            + (f", by the GPU's clock and replays in a row {gpu:.3f}" if gpu else "")
            + f" ({far['known']} rows)"
        )
    lines += ahead_said(rows.values())
    lines += [f"{key}: {why}" for key, why in far["explained"].items()]
    lines += [f"not shown equal to eager: {at}: {why}" for at, why in found["not shown equal to eager"].items()]
    lines += [f"left out: {at}: {why.removeprefix('left out: ')}" for at, why in found["peers left out"].items()]
    if found["unstable"]:
        lines.append(f"unstable: {len(found['unstable'])} times, {'; '.join(found['unstable'][:5])}")
    return lines


def table(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """Everything for the terminal: machines, one line a row, means, targets."""
    return [*machines(rows), "", *aligned(HEADS, _cells(rows)), "", *_said(rows)]


def markdown(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """The same as Markdown."""
    lines = as_markdown(HEADS, _cells(rows))
    return ["# Inference", "", *machines(rows), "", *lines, "", *(f"- {said}" for said in _said(rows))]


if __name__ == "__main__":
    sys.exit(main())
