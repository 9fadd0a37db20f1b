"""Every policy on every model, on a CUDA GPU: speed, waits, memory, and how far the simulation is off.

    python -m benchmarks.policies --out benchmarks/results/policies-h200.json

For every model and dtype, with eager's kernels, in one run: bare replays under each policy, ``nimble`` and
``contention`` also under a memory limit, ``nimble`` without shared memory, and what ``policy="auto"`` chose. All are
timed in turn, each sample after an untimed run of the same, by the host's clock (``replay``, one replay and a
synchronisation) and by the GPU's (``back to back``, mean of 5 in a row). Speeds are above 1 where the first is faster.
Plans that several policies agree on are measured once (``same as``). A model that the file holds is not measured again.
Whole calls beside eager's are the runner's: ways ``eager``, ``one-stream`` and ``streams``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from statistics import geometric_mean, median
from typing import Any

import torch

from benchmarks.common import figures, held, options, over, write
from benchmarks.models import example
from nimble_core.algorithms.critical_path import critical_path
from nimble_core.api.engine import Engine
from nimble_core.api.nimble import Nimble
from nimble_core.autotune.capture_pipeline import capture, device_for, observe, schedule_by
from nimble_core.ir.call_graph import predecessors
from nimble_core.ir.costs import Costs
from nimble_core.ir.measurement import Measurement, interleave, summarize
from nimble_core.ir.schedule import Schedule
from nimble_core.profiling.machine import environment
from nimble_core.runtime.device import Device, Executable
from nimble_core.scheduling.options import Options
from nimble_core.scheduling.policies import POLICIES
from nimble_core.scheduling.simulator import simulate
from nimble_core.tracing.recorded import Recorded, Stopwatch, check_inputs, record_static, state_kept
from nimble_core.utils.errors import DeviceError
from nimble_core.validation.eager_cases import eager_cases, from_same_state
from nimble_core.validation.equality import check_equality

DTYPES = ("float32", "float16")
MODELS = (
    "NASNet-A large", "HRNet-W18", "GoogLeNet", "Inception-v3", "ResNet-50", "MobileNetV2", "EfficientNet-B0",
    "BERT-base 128", "CLIP ViT-B/32",
)  # fmt: skip
"""What scheduling is measured on: wide graphs and narrow ones."""

OURS, LIMIT = ("nimble", "contention"), 1.25
"""Policies that are also measured under a memory limit, and that of their arenas, in arenas of one stream."""

ROUNDS, IN_A_ROW = 101, 5
WAYS = ("replay", "back to back")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is asked for and write the results file."""
    parser = options(__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS, metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each model, dtype and clock")
    given = parser.parse_args(argv)
    results, stamp = held(given.out), environment("cuda")
    for name, dtype in ((name, dtype) for name in given.models for dtype in DTYPES):
        key = f"{name}, {dtype}"
        if key not in results["models"]:
            results["models"][key] = found = one_model(name, dtype, given.seconds)
            results["summary"] = summary(results["models"])
            write(given.out, results, stamp)
            print(key, {one: found["policies"][one]["replay over single"]["value"] for one in POLICIES}, flush=True)
    print(json.dumps(summary(results["models"]), indent=1))


def one_model(name: str, dtype: str, seconds: float) -> dict[str, Any]:
    """Everything about one model in one dtype, batch 1."""
    model, args, kwargs = example(name, dtype)
    net = Nimble(model, Options(fuse="none")).prepare(*args, **kwargs)
    device, recorded = recorded_on(model, args, kwargs)
    with state_kept(recorded):
        result = measured(device, recorded, net.engines[0], replays_in_a_row_ns, seconds)
    net.close()
    return result


def recorded_on(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Device, Recorded]:
    """Record a model's calls in eager, after a first one that loads and tunes libraries; with the device it is on."""
    with torch.inference_mode():
        model(*args, **kwargs)
    signature = check_inputs(model, args, kwargs)
    device = device_for(signature.device)
    return device, record_static(device, model, signature, strict=True, step=Stopwatch())


def replays_in_a_row_ns(executable: Executable) -> float:
    """GPU time of one of several replays in a row, after two untimed ones, nanoseconds."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for done in range(2 + IN_A_ROW):
        if done == 2:
            start.record()
        executable.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e6 / IN_A_ROW


@dataclass(frozen=True, slots=True)
class Model:
    """A recorded model on its device, captured on one stream, and what its calls take there."""

    device: Device
    recorded: Recorded
    single: Executable
    costs: Costs


def measured(
    device: Device, recorded: Recorded, auto: Engine, back_to_back_ns: Callable[[Executable], float], seconds: float
) -> dict[str, Any]:
    """Capture, time and check every plan; ``auto`` is the same model as ``policy="auto"`` prepared it.

    What replays write of the model is the caller's to keep.
    """
    with ExitStack() as stack:

        def kept(executable: Executable) -> Executable:
            return stack.enter_context(closing(executable))

        single = kept(capture(device, recorded, schedule_by(recorded, "single", None, 1)))
        model = Model(device, recorded, single, observe(device, recorded, single, seconds=0.5).costs)
        plans, made = {"single": single.schedule}, {"single": single}
        plans |= {name: schedule_by(recorded, name, model.costs, None) for name in POLICIES if name not in plans}
        same = duplicates(plans)
        for name, schedule in plans.items():
            if name not in made and name not in same:
                made[name] = kept(capture(device, recorded, schedule))
        limits: dict[str, dict[str, Any]] = {}
        for name in OURS:
            found, limits[name] = limited(model, made[same.get(name, name)])
            if found is not None:
                made[f"{name}, limited"] = kept(found)
        made["auto"] = auto.executable
        unshared = kept(device.capture(recorded.recording, plans["nimble"], recorded.signature.tensors))
        made["not shared"] = unshared
        ways = {name: one.replay for name, one in made.items()}
        clock, wait = device.clock_ns, device.synchronize
        host = interleave(ways, clock_ns=clock, synchronize=wait, rounds=ROUNDS, budget_s=seconds, rehearse=True)
        times = dict(zip(WAYS, (host, in_a_row(device, made, back_to_back_ns, seconds)), strict=True))
        entries = entries_of(model, made, times)
    for name, figure in limits.items():
        figure.update(entries.pop(f"{name}, limited", {}))
    without, chosen = entries.pop("not shared"), entries.pop("auto")
    without["pool bytes"] = unshared.nbytes - sum(tensor.nbytes for tensor in recorded.signature.tensors)
    chosen["chosen"] = next((one.name for one in auto.candidates if one.chosen), auto.schedule.policy)
    return {
        "calls": recorded.graph.size,
        "policies": {
            name: {**entries[same[name]], "same as": same[name]} if name in same else entries[name] for name in plans
        },
        "memory limit": limits,
        "without shared memory": without,
        "auto": chosen,
    }


def duplicates(plans: Mapping[str, Schedule]) -> dict[str, str]:
    """Names of plans that are equal to an earlier one, with the name of that one."""
    first: dict[tuple[Any, ...], str] = {}
    names = {
        name: first.setdefault((plan.stream, plan.order, plan.syncs, any(plan.priority) and plan.priority), name)
        for name, plan in plans.items()
    }
    return {name: known for name, known in names.items() if known != name}


def limited(model: Model, executable: Executable) -> tuple[Executable | None, dict[str, Any]]:
    """Return ``executable``'s plan in an arena of at most ``LIMIT`` arenas of one stream, or None and the reason."""
    if executable.memory is None or model.single.memory is None:
        return None, {"skipped": "the device looks after its memory itself"}
    excess = executable.memory.nbytes - int(LIMIT * model.single.memory.nbytes)
    if excess <= 0:
        return None, {"fits as it is": True}
    plan, limit = executable.schedule, executable.nbytes - excess  # what lies beside the arena may stay
    try:
        return capture(model.device, model.recorded, plan, memory_limit=limit, costs=model.costs), {}
    except DeviceError as error:
        return None, {"skipped": error.what}


def in_a_row(
    device: Device, ways: Mapping[str, Executable], time_ns: Callable[[Executable], float], seconds: float
) -> dict[str, Measurement]:
    """GPU times of all executables, five rounds at least."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    order, began = random.Random(0), device.clock_ns()
    for done in range(ROUNDS):
        if done >= 5 and device.clock_ns() - began > seconds * 1e9:
            break
        for name in order.sample(list(ways), len(ways)):
            samples[name].append(time_ns(ways[name]))
    return {name: summarize(name, taken) for name, taken in samples.items()}


def entries_of(
    model: Model, executables: Mapping[str, Executable], times: Mapping[str, Mapping[str, Measurement]]
) -> dict[str, dict[str, Any]]:
    """Record of each executable plan, times, simulation, memory, and whether outputs are eager's."""
    recorded, cases = model.recorded, eager_cases(model.recorded).eager
    path_ns, _ = critical_path(predecessors(recorded.graph, meg=True), model.costs.ns)
    found = {}
    for name, one in executables.items():
        simulated_ns = simulate(recorded.graph, one.schedule, model.costs, model.device.model).length_ns
        replay, in_a_row = (times[way][name] for way in WAYS)
        found[name] = {
            "streams": one.schedule.streams,
            "syncs": asdict(one.counts),
            **{way: figures(times[way][name]) for way in WAYS},
            **{f"{way} over single": over(times[way][name], times[way]["single"]) for way in WAYS},
            "replay over critical path": replay.median_ns / path_ns if path_ns else None,
            "simulated us": simulated_ns / 1e3,
            "simulation error": simulated_ns / in_a_row.median_ns - 1,
            "memory": {"held bytes": one.nbytes} | ({"arena bytes": one.memory.nbytes} if one.memory else {}),
            "equality": asdict(check_equality(name, from_same_state(recorded, one.run), cases)),
        }
    return found


def summary(models: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Sum up the file over all models: geometric means, least and most."""
    of = {key: {**one["policies"], "auto": one["auto"]} for key, one in models.items()}
    plans = {(name, key): one for key, found in of.items() for name, one in found.items() if "same as" not in one}
    limits = {(name, key): one for key, found in models.items() for name, one in found["memory limit"].items()}
    changed = {at: limit for at, limit in limits.items() if "replay" in limit}
    every = plans | {(f"{name}, limited,", key): limit for (name, key), limit in changed.items()}
    every |= {("nimble, not shared,", key): one["without shared memory"] for key, one in models.items()}
    errors = [abs(one["simulation error"]) for (name, _), one in plans.items() if name != "auto"]
    wrong = {f"{name} on {key}": one["equality"] for (name, key), one in every.items() if not one["equality"]["passed"]}

    def speeds(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
        return {
            way: spread({key: old[way]["median us"] / new[way]["median us"] for key, (new, old) in pairs.items()})
            for way in WAYS
        }

    return {
        "speed over single": {
            policy: speeds({key: (found[policy], found["single"]) for key, found in of.items()})
            for policy in next(iter(of.values()))
        },
        "simulation error": {"plans": len(errors), "median": median(errors)},
        "memory limit": {
            "skipped": sum("skipped" in limit for limit in limits.values()),
            "speed over no limit": speeds({", ".join(at): (one, of[at[1]][at[0]]) for at, one in changed.items()}),
        },
        "shared memory over not shared": speeds(
            {key: (of[key]["nimble"], one["without shared memory"]) for key, one in models.items()}
        ),
        "equal to eager": {"checked": len(every), "not shown": {at: one["reason"] for at, one in wrong.items()}},
    }


def spread(values: Mapping[str, float]) -> dict[str, Any]:
    """Least, geometric mean and most of the values, and whose the ends are; empty if there is none."""
    if not values:
        return {}
    known = [[value, name] for name, value in values.items()]
    return {"least": min(known), "geometric mean": geometric_mean(values.values()), "most": max(known)}


if __name__ == "__main__":
    main()
