"""Every policy on every model, on a CUDA GPU: speed, waits, memory, and how far the simulation is off.

    python -m benchmarks.policies --out benchmarks/results/policies-h200.json

For every model and dtype, in one run: bare replays under each policy, ``nimble`` and ``contention`` also on fewer
streams and under a memory limit, ``nimble`` without shared memory, and what ``policy="auto"`` chose. Two times are
taken of each, all in turn, each sample after an untimed run of the same:

- ``replay``: host clock, one replay and a synchronisation: what a caller sees who waits for each result;
- ``back to back``: GPU clock, mean of 5 replays in a row: without what it takes to launch one on an idle GPU.

Results are written after each model, and a model that the file holds already is not measured again. Plans that
several policies agree on are captured and measured once (``same as``). All speeds are ratios of medians, above 1 where
the first is faster.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from benchmarks.cuda import figures, write
from benchmarks.zoo import CASES, ZOO, load
from nimble_core.algorithms.critical_path import critical_path
from nimble_core.api.engine import Engine
from nimble_core.api.nimble import Nimble
from nimble_core.autotune.capture_pipeline import capture, device_for, observe, schedule_by
from nimble_core.ir.call_graph import predecessors
from nimble_core.ir.candidates import Candidate
from nimble_core.ir.costs import Costs
from nimble_core.ir.measurement import Measurement, interleave, quantile, ratio, summarize
from nimble_core.ir.program import Program
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import Timeline
from nimble_core.profiling.machine import environment
from nimble_core.runtime.device import Device, Executable
from nimble_core.scheduling.memory_lower_bound import memory_lower_bound
from nimble_core.scheduling.policies import POLICIES
from nimble_core.scheduling.simulator import simulate
from nimble_core.tracing.recorded import Recorded, Stopwatch, check_inputs, record_static, state_kept
from nimble_core.utils.errors import DeviceError
from nimble_core.validation.equality import check_equality
from nimble_core.validation.judge import eager_cases, from_same_state

OURS = ("nimble", "contention")
"""Policies that are also measured on fewer streams and under a memory limit, and watched while they run."""

CAPS = (2, 3, 4, 8)
LIMIT = 1.25
"""Size of the arena under a memory limit, in arenas of one stream."""

ROUNDS = 101
WAYS = ("replay", "back to back")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is asked for and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(ZOO), choices=list(ZOO), metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=1.5, help="time for each model, dtype and way of measuring")
    given = parser.parse_args(argv)
    results: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    results.setdefault("models", {})
    stamp = environment("cuda")
    for name in given.models:
        for dtype in CASES:
            key = f"{name}, {dtype}"
            if key not in results["models"]:
                results["models"][key] = one_model(name, dtype, given.seconds)
                results["summary"] = summary(results["models"])
                write(given.out, results, stamp)
                print(row(key, results["models"][key]), flush=True)
    print("\n".join(("", *table(summary(results["models"])))))


def one_model(name: str, dtype: str, seconds: float) -> dict[str, Any]:
    """Everything about one model in one dtype, batch 1."""
    began = time.perf_counter()
    model, args, kwargs = load(name, dtype)
    with torch.inference_mode():
        model(*args, **kwargs)
    start = time.perf_counter()
    net = Nimble(model).prepare(*args, **kwargs)
    prepare_s = time.perf_counter() - start
    signature = check_inputs(model, args, kwargs)
    device = device_for(signature.device)
    recorded = record_static(device, model, signature, strict=True, step=Stopwatch())
    with state_kept(recorded):
        result = measured(device, recorded, net.engines[0], replays_in_a_row_ns, seconds)
    result["auto"]["prepare s"] = prepare_s
    net.close()
    result["wall s"] = time.perf_counter() - began
    return result


def replays_in_a_row_ns(executable: Executable, *, replays: int = 5, untimed: int = 2) -> float:
    """GPU time of one of several replays in a row, nanoseconds."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(untimed):
        executable.replay()
    start.record()
    for _ in range(replays):
        executable.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e6 / replays


def measured(
    device: Device, recorded: Recorded, auto: Engine, back_to_back_ns: Callable[[Executable], float], seconds: float
) -> dict[str, Any]:
    """Capture, time and check every plan for one recorded model.

    Args:
        device: where.
        recorded: the model. What replays write of it is the caller's to keep.
        auto: the same model as ``policy="auto"`` prepared it.
        back_to_back_ns: times one executable, replays in a row.
        seconds: to spend on each of the two ways to time.
    """
    program, graph = recorded.recording.program, recorded.graph
    with ExitStack() as stack:

        def kept(executable: Executable) -> Executable:
            stack.callback(executable.close)
            return executable

        single = kept(capture(device, recorded, schedule_by(recorded, "single", None, 1)))
        seen = {"single": observe(device, recorded, single, seconds=0.5)}
        costs = seen["single"].costs

        plans = {"single": single.schedule, **planned(recorded, costs)}
        same = duplicates(plans)
        executables = {"single": single}
        for name, schedule in plans.items():
            if name not in executables and name not in same:
                executables[name] = kept(capture(device, recorded, schedule))

        limits: dict[str, dict[str, Any]] = {}
        for name in OURS:
            found, limits[name] = limited(device, recorded, costs, executables[same.get(name, name)], single)
            if found is not None:
                executables[f"{name}, limited"] = kept(found)
        executables["auto"] = auto.executable
        unshared = kept(device.capture(recorded.recording, plans["nimble"], recorded.signature.tensors))
        executables["not shared"] = unshared

        times = timed(device, executables, back_to_back_ns, seconds)
        for name in OURS:
            if name not in same:
                seen[name] = observe(device, recorded, executables[name], seconds=0.5)
        cases = eager_cases(recorded).eager
        path_ns, _ = critical_path(predecessors(graph, meg=True), costs.ns)

        entries: dict[str, dict[str, Any]] = {}
        for name, executable in executables.items():
            replay, in_a_row = times["replay"][name], times["back to back"][name]
            simulated_ns = simulate(graph, executable.schedule, costs, device.model).length_ns
            entries[name] = {
                "streams": executable.schedule.streams,
                "syncs": asdict(executable.counts),
                "added order": len(executable.schedule.added_order),
                "replay": figures(replay),
                "back to back": figures(in_a_row),
                "replay over single": asdict(ratio(replay, times["replay"]["single"])),
                "back to back over single": asdict(ratio(in_a_row, times["back to back"]["single"])),
                "back to back over critical path": in_a_row.median_ns / path_ns if path_ns else None,
                "simulated us": simulated_ns / 1e3,
                "simulation error": simulated_ns / in_a_row.median_ns - 1 if in_a_row.median_ns else None,
                "memory": memory_figures(program, executable, single),
                "equality": asdict(check_equality(name, from_same_state(recorded, executable.run), cases)),
            }
            if name in seen:
                entries[name]["kernels in flight"] = in_flight(seen[name].timeline)

        for name, figure in limits.items():
            figure.update(entries.pop(f"{name}, limited", {}))
        without, chosen = entries.pop("not shared"), entries.pop("auto")
        without["pool bytes"] = unshared.nbytes - sum(tensor.nbytes for tensor in recorded.signature.tensors)
        for way in WAYS:
            shared = times[way][same.get("nimble", "nimble")]
            without[f"{way}, shared over this"] = asdict(ratio(shared, times[way]["not shared"]))
        chosen["candidates"] = [candidate_figures(one) for one in auto.candidates]
        chosen["chosen"] = next((one.name for one in auto.candidates if one.chosen), auto.schedule.policy)
        chosen["prepare steps s"] = dict(auto.seconds)
        return {
            "calls": graph.size,
            "nodes": len(single.raw.nodes) if single.raw else None,
            "edges": len(graph.edges),
            "meg edges": len(graph.meg),
            "kernels seen": costs.seen,
            "kernels expected": costs.expected,
            "sum of kernels us": costs.total_ns / 1e3,
            "critical path us": path_ns / 1e3,
            "policies": {name: entries[name] if name in entries else alias(entries, same[name]) for name in plans},
            "memory limit": limits,
            "without shared memory": without,
            "auto": chosen,
        }


def planned(recorded: Recorded, costs: Costs) -> dict[str, Schedule]:
    """What each policy plans without a cap on streams, and ours with several caps."""
    wanted: list[tuple[str, int | None]] = [(policy, None) for policy in POLICIES if policy != "single"]
    wanted += [(policy, cap) for policy in OURS for cap in CAPS]
    return {
        policy if cap is None else f"{policy}, {cap} streams": schedule_by(recorded, policy, costs, cap)
        for policy, cap in wanted
    }


def duplicates(plans: Mapping[str, Schedule]) -> dict[str, str]:
    """Names of plans that are equal to an earlier one, with the name of that one."""
    first: dict[tuple[Any, ...], str] = {}
    same = {}
    for name, plan in plans.items():
        priority = plan.priority if any(plan.priority) else ()
        known = first.setdefault((plan.stream, plan.order, plan.syncs, priority), name)
        if known != name:
            same[name] = known
    return same


def alias(entries: Mapping[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """The figures of an equal plan, marked as such."""
    return {**entries[name], "same as": name}


def limited(
    device: Device, recorded: Recorded, costs: Costs, executable: Executable, single: Executable
) -> tuple[Executable | None, dict[str, Any]]:
    """``executable``'s plan with an arena of at most ``LIMIT`` arenas of one stream; what lies beside it may stay.

    Returns:
        The executable, None where the plan fits as it is or no plan was found; and what to say about it.
    """
    if executable.memory is None or single.memory is None:
        return None, {"skipped": "the device looks after its memory itself"}
    arena = int(LIMIT * single.memory.nbytes)
    limit = arena + executable.nbytes - executable.memory.nbytes
    figure: dict[str, Any] = {"limit bytes": limit, "arena limit bytes": arena}
    if executable.memory.nbytes <= arena:
        return None, {**figure, "fits as it is": True}
    try:
        found = capture(device, recorded, executable.schedule, memory_limit=limit, costs=costs)
    except DeviceError as error:
        return None, {**figure, "skipped": error.what}
    return found, figure


def timed(
    device: Device,
    executables: Mapping[str, Executable],
    back_to_back_ns: Callable[[Executable], float],
    seconds: float,
) -> dict[str, dict[str, Measurement]]:
    """Both times of every executable, by way of measuring and name; all in turn, five rounds at least."""
    replay = interleave(
        {name: executable.replay for name, executable in executables.items()},
        clock_ns=device.clock_ns,
        synchronize=device.synchronize,
        rounds=ROUNDS,
        budget_s=seconds,
        rehearse=True,
    )
    samples: dict[str, list[float]] = {name: [] for name in executables}
    began = device.clock_ns()
    for done in range(ROUNDS):
        if done >= 5 and device.clock_ns() - began > seconds * 1e9:
            break
        for name, executable in executables.items():
            samples[name].append(back_to_back_ns(executable))
    return dict(zip(WAYS, (replay, {name: summarize(name, taken) for name, taken in samples.items()}), strict=True))


def memory_figures(program: Program, executable: Executable, single: Executable) -> dict[str, Any]:
    """Bytes that an executable holds, and how small its arena could have been."""
    memory = executable.memory
    if memory is None or single.memory is None:
        return {"held bytes": executable.nbytes}
    placed = [storage for storage, offset in enumerate(memory.offsets) if offset >= 0]
    bound = memory_lower_bound(program, executable.schedule, place=placed, alignment=memory.alignment)
    apart = sum(-(-program.storages[storage].nbytes // memory.alignment) for storage in placed) * memory.alignment
    return {
        "held bytes": executable.nbytes,
        "arena bytes": memory.nbytes,
        "workspace bytes": memory.workspace_nbytes,
        "lower bound bytes": bound,
        "without reuse bytes": apart,
        "one stream's arena bytes": single.memory.nbytes,
        "arena over lower bound": memory.nbytes / bound if bound else None,
        "arena over one stream's": memory.nbytes / single.memory.nbytes if single.memory.nbytes else None,
    }


def in_flight(timeline: Timeline) -> dict[str, float]:
    """Kernels that ran at one time: mean over the replay, and most."""
    changes = sorted([(span.end_ns, -1) for span in timeline.spans] + [(span.start_ns, 1) for span in timeline.spans])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    busy_ns = sum(span.end_ns - span.start_ns for span in timeline.spans)
    return {"mean": busy_ns / timeline.length_ns if timeline.length_ns else 0.0, "max": most}


def candidate_figures(one: Candidate) -> dict[str, Any]:
    """A candidate of ``auto``; times in µs, as simulated and as it was measured while preparing."""
    return {
        "name": one.name,
        "streams": one.streams,
        "simulated us": one.simulated_ns / 1e3,
        "measured us": one.measurement.median_ns / 1e3 if one.measurement else None,
        "capture s": one.capture_s,
        "chosen": one.chosen,
        "note": one.note,
    }


def speed(faster: Mapping[str, Any], baseline: Mapping[str, Any], way: str) -> float:
    """How much faster one entry's median is than another's."""
    return float(baseline[way]["median us"] / faster[way]["median us"])


def summary(models: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What the file says over all models: geometric means, worst cases and where they are."""
    policies: dict[str, list[dict[str, Any]]] = {}
    for result in models.values():
        for policy, entry in (*result["policies"].items(), ("auto", result["auto"])):
            policies.setdefault(policy, []).append(entry)
    distinct = [
        (f"{policy} on {key}", entry)
        for key, result in models.items()
        for policy, entry in result["policies"].items()
        if "same as" not in entry
    ]
    extra = [(f"auto on {key}", result["auto"]) for key, result in models.items()]
    extra += [(f"nimble, not shared, on {key}", result["without shared memory"]) for key, result in models.items()]
    extra += [
        (f"{policy}, limited, on {key}", entry)
        for key, result in models.items()
        for policy, entry in result["memory limit"].items()
        if "replay" in entry
    ]
    errors = [entry["simulation error"] for _, entry in distinct if entry["simulation error"] is not None]
    unequal = {where: one["equality"]["reason"] for where, one in (*distinct, *extra) if not one["equality"]["passed"]}
    return {
        "models and dtypes": len(models),
        **{
            f"speed over {baseline}": {
                way: {
                    policy: geometric_mean(
                        [speed(entry, base, way) for entry, base in zip(found, policies[baseline], strict=True)]
                    )
                    for policy, found in policies.items()
                }
                for way in WAYS
            }
            for baseline in ("single", "nimble")
        },
        "simulation error": {
            "plans": len(errors),
            "median": quantile([abs(error) for error in errors], 0.5),
            "quartiles": [quantile([abs(error) for error in errors], q) for q in (0.25, 0.75)],
            "signed median": quantile(errors, 0.5),
        },
        "arena over lower bound": extreme(
            max, ((where, entry["memory"].get("arena over lower bound")) for where, entry in distinct)
        ),
        "arena over one stream's": {
            policy: spread(entry["memory"].get("arena over one stream's") for entry in found)
            for policy, found in policies.items()
        },
        "memory limit": {policy: limit_summary(models, policy) for policy in OURS},
        "auto over single": {
            way: extreme(
                min, ((key, speed(one["auto"], one["policies"]["single"], way)) for key, one in models.items())
            )
            for way in WAYS
        },
        "auto prepare s": spread(one["auto"]["prepare s"] for one in models.values()),
        "shared memory over not shared": {
            way: {
                **spread(
                    speed(one["policies"]["nimble"], one["without shared memory"], way) for one in models.values()
                ),
                "slowest": extreme(
                    min,
                    (
                        (key, speed(one["policies"]["nimble"], one["without shared memory"], way))
                        for key, one in models.items()
                    ),
                ),
            }
            for way in WAYS
        },
        "unstable": {way: [where for where, entry in (*distinct, *extra) if entry[way]["warnings"]] for way in WAYS},
        "equal to eager": {"checked": len(distinct) + len(extra), "not shown": unequal},
    }


def limit_summary(models: Mapping[str, dict[str, Any]], policy: str) -> dict[str, Any]:
    """How a policy does under the memory limit, where its plan had to change."""
    pairs = [(one["memory limit"][policy], one["policies"][policy]) for one in models.values()]
    changed = [(limit, free) for limit, free in pairs if "replay" in limit]
    return {
        "fits as it is": sum("fits as it is" in limit for limit, _ in pairs),
        "changed": len(changed),
        "skipped": sum("skipped" in limit for limit, _ in pairs),
        "arena over one stream's": spread(limit["memory"].get("arena over one stream's") for limit, _ in changed),
        "speed over no limit": {way: spread(speed(limit, free, way) for limit, free in changed) for way in WAYS},
        "speed over single": {
            way: spread(limit[f"{way} over single"]["value"] for limit, _ in changed) for way in WAYS
        },
    }


def spread(values: Iterable[float | None]) -> dict[str, float]:
    """Least, geometric mean and most of the values that are known; empty if none is.

    >>> spread([1.0, None, 4.0])
    {'least': 1.0, 'geometric mean': 2.0, 'most': 4.0}
    """
    known = [value for value in values if value]
    return {"least": min(known), "geometric mean": geometric_mean(known), "most": max(known)} if known else {}


def extreme(choose: Callable[..., tuple[float, str]], values: Iterable[tuple[str, float | None]]) -> dict[str, Any]:
    """The least or the most of named values, and its name.

    >>> extreme(max, [("a", 1.0), ("b", None), ("c", 2.0)])
    {'value': 2.0, 'where': 'c'}
    """
    known = [(value, where) for where, value in values if value is not None]
    return dict(zip(("value", "where"), choose(known), strict=True)) if known else {}


def row(key: str, result: dict[str, Any]) -> str:
    """One line for the terminal."""
    policies, auto = result["policies"], result["auto"]
    speeds = "  ".join(
        f"{policy} {speed(entry, policies['single'], 'replay'):.2f}x"
        for policy, entry in (*policies.items(), ("auto", auto))
        if policy in POLICIES or policy == "auto"
    )
    single_us = policies["single"]["replay"]["median us"]
    return f"{key:26} single {single_us:6.0f} µs  {speeds} ({auto['chosen']})  took {result['wall s']:.0f} s"


def table(found: dict[str, Any]) -> list[str]:
    """The summary as lines for the terminal."""
    over, than = found["speed over single"], found["speed over nimble"]
    arenas = found["arena over one stream's"]
    lines = [f"geometric means over {found['models and dtypes']} models and dtypes"]
    lines.append(f"{'policy':24}{'replay':>9}{'in a row':>10}{'replay':>12}{'in a row':>10}{'arena':>11}")
    lines.append(f"{'':24}{'over single':>19}{'over nimble':>22}{'of single':>11}")
    for policy in over["replay"]:
        arena = arenas[policy].get("geometric mean", 0.0)
        lines.append(
            f"{policy:24}{over['replay'][policy]:8.3f}x{over['back to back'][policy]:9.3f}x"
            f"{than['replay'][policy]:11.3f}x{than['back to back'][policy]:9.3f}x{arena:10.2f}x"
        )
    error, bound, auto = found["simulation error"], found["arena over lower bound"], found["auto over single"]
    lines.append(
        f"simulation error: median {error['median']:.1%}, quartiles {error['quartiles'][0]:.1%} and "
        f"{error['quartiles'][1]:.1%}, signed {error['signed median']:+.1%}, {error['plans']} plans"
    )
    lines.append(
        f"arena over its lower bound: at most {bound['value']:.3f} ({bound['where']})" if bound else "no arenas"
    )
    for policy, limit in found["memory limit"].items():
        line = f"{policy} in {LIMIT} arenas of one stream: {limit['fits as it is']} fit as they are, "
        line += f"{limit['changed']} changed, {limit['skipped']} skipped"
        if limit["changed"]:
            arena, free = limit["arena over one stream's"], limit["speed over no limit"]["replay"]
            line += f"; arena up to {arena['most']:.3f}, {free['geometric mean']:.3f}x as fast as without ("
            line += f"{free['least']:.3f} to {free['most']:.3f})"
        lines.append(line)
    for way in WAYS:
        shared = found["shared memory over not shared"][way]
        lines.append(
            f"shared memory over not shared, {way}: {shared['geometric mean']:.3f}x, slowest "
            f"{shared['slowest']['value']:.3f}x ({shared['slowest']['where']})"
        )
        lines.append(f"auto over single, {way}: slowest {auto[way]['value']:.3f}x ({auto[way]['where']})")
    prepare = found["auto prepare s"]
    lines.append(f"auto prepares in {prepare['least']:.2f} to {prepare['most']:.2f} s")
    for way, where in found["unstable"].items():
        lines.append(f"unstable, {way}: {len(where)}" + (f" ({'; '.join(where[:5])})" if where else ""))
    equal = found["equal to eager"]
    lines.append(f"equal to eager: {equal['checked'] - len(equal['not shown'])} of {equal['checked']}")
    lines += [f"  not shown: {where}: {reason}" for where, reason in equal["not shown"].items()]
    return lines


if __name__ == "__main__":
    main()
