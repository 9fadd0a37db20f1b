"""Synthetic Reports of any size, consistent in themselves, for tests of views, text, files and pages."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nimble_core.ir.call_graph import CallGraph, graph_from_edges
from nimble_core.ir.costs import Costs, Kernel, uniform_costs
from nimble_core.ir.measurement import Measurement, summarize
from nimble_core.ir.program import Call, Phase, Program
from nimble_core.ir.schedule import Schedule, SyncCounts
from nimble_core.ir.timeline import Timeline
from nimble_viz.collect.from_trace import from_trace
from nimble_viz.render.report import Report
from nimble_viz.report.data import (
    EAGER_ALONE,
    EqualityCheck,
    HostSync,
    Memory,
    PeerResult,
    PhaseOverhead,
    PrepareStep,
    Work,
)
from tests.support.kineto_traces import training_loop, write_trace
from tests.support.sample_parts import (
    BRANCH,
    COST_NS,
    GPU,
    choice,
    draws,
    eager_run,
    environment_of,
    flops_of,
    fused_call,
    fused_candidates,
    longest_path,
    memory_of,
    nimble_plan,
    program_of_blocks,
    replay_run,
    sources_of,
)

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>&\u2028\"'<!--"
"""A name that tries everything to leave its place in a page."""


def sample_report(
    calls: int = 60,
    *,
    width: int = 4,
    device: str = "cuda",
    complete: bool = True,
    stable: bool = True,
    overhead: bool = True,
    timelines: bool = True,
    model: str = "SampleNet",
    hostile: str = "",
) -> Report:
    """A report of a model with ``calls`` calls.

    Args:
        calls: number of calls, 0 or more.
        width: branches per block; 1 gives a chain, and so one stream.
        device: ``"cuda"`` or ``"cpu"``.
        complete: False gives what an interrupted run would have kept: no equality checks, no replay timelines.
        stable: False makes the eager samples scatter beyond the bound.
        overhead: whether eager was profiled.
        timelines: whether there are timelines.
        model: name of the model.
        hostile: text put into every string that a user's model can choose.
    """
    program, edges, meg, branch = program_of_blocks(calls, width, device, hostile)
    graph = CallGraph(calls, edges, ("RAW",) * len(edges), meg)
    costs = _costs(program, device)
    isolated, on_gpu = costs.ns, device == "cuda"
    path, path_ns = longest_path(calls, meg, isolated)
    known = frozenset(edges)
    single = Schedule(
        "single",
        (0,) * calls,
        tuple(range(calls)),
        (),
        added_order=tuple((u, u + 1) for u in range(calls - 1) if (u, u + 1) not in known),
        counts=SyncCounts(0, 0, 0, *((0, min(1, calls), min(1, calls), calls // 7) if on_gpu else ())),
    )
    nimble = nimble_plan(calls, edges, meg, branch, on_gpu)
    eager_line, profile = eager_run(program, isolated, device)
    replays = {plan.policy: replay_run(plan, program, meg, isolated, device) for plan in (single, nimble)}
    measurements = _measurements(eager_line, replays, stable)
    lines = (eager_line, *replays.values()) if complete else (eager_line,)
    lines = tuple(
        replace(line, unprofiled_ns=taken.median_ns, profiled_ns=line.length_ns)
        for line, taken in zip(lines, measurements, strict=False)
    )
    profile = replace(profile, unprofiled_ns=measurements[0].median_ns)
    return Report(
        model=model,
        dtype="float16" if on_gpu else "float32",
        batch=1,
        environment=environment_of(device),
        program=program,
        graph=graph,
        costs=costs,
        critical_path=path,
        critical_path_ns=path_ns,
        schedules=(single, nimble),
        measurements=measurements if complete else measurements[:2],
        checks=tuple(EqualityCheck(name, 3.1e-4, 1e-2, 0.71, True) for name in replays) if complete else (),
        preparation=(
            PrepareStep("record", 0.081),
            PrepareStep("build graph", 0.004),
            PrepareStep("schedule", 0.002),
            PrepareStep("capture", 0.043),
        ),
        overhead=profile if overhead else None,
        timelines=lines if timelines else (),
        memory=memory_of() if on_gpu else Memory(),
        chosen="nimble" if width > 1 else "single",
        candidates=choice(measurements, "nimble" if width > 1 else "single", max(nimble.streams, 1))
        if complete
        else (),
        warnings=() if complete else ("interrupted while measuring; what follows was measured before that",),
        complete=complete,
        work=Work(flops_of(program), (), GPU if on_gpu else None),
        sources=sources_of(hostile) if calls else (),
    )


def _costs(program: Program, device: str) -> Costs:
    calls = len(program.calls)
    jitter = draws(7)
    isolated = tuple(COST_NS[call.origins[0].operator] * (0.85 + 0.3 * next(jitter)) for call in program.calls)
    kernels = tuple(
        Kernel(call.index, f"{call.label}_kernel<float>", (64, 1, 1), (256, 1, 1), 40, 4096, call.index, ns)
        for call, ns in zip(program.calls, isolated, strict=True)
    )
    on_gpu = device == "cuda"
    return Costs(
        isolated,
        "one-stream capture, CUPTI activity" if on_gpu else "host clock around each call",
        tuple(ns * 0.03 for ns in isolated),
        kernels if on_gpu else (),
        20,
        calls if on_gpu else 0,
        calls if on_gpu else 0,
        tuple(0.02 + 0.3 * next(jitter) for _ in isolated) if on_gpu else (),
    )


def _measurements(eager: Timeline, replays: dict[str, Timeline], stable: bool) -> tuple[Measurement, ...]:
    spread = 0.02 if stable else 0.5
    lengths = {"eager": eager.length_ns / 1.45} | {name: line.length_ns * 1.04 for name, line in replays.items()}
    noise = draws(11)
    return tuple(
        summarize(name, [max(ns, 1.0) * (1 + spread * (next(noise) - 0.5)) for _ in range(48)], warmup=3)
        for name, ns in lengths.items()
    )


def timed(
    report: Report, medians: dict[str, float], *, noise: float = 0.02, samples: int = 48, seed: int = 3
) -> Report:
    """``report`` with runs of these lengths, in ns, that scatter by ``noise`` of them."""
    draw = draws(seed)
    for _ in range(8):
        next(draw)
    taken = tuple(
        summarize(name, [ns * (1 + noise * (next(draw) - 0.5)) for _ in range(samples)], 3)
        for name, ns in medians.items()
    )
    return replace(report, measurements=taken)


def busy_report() -> Report:
    """A report of a small model, measured while other programs ran: no ratio can be decided."""
    names = ("eager", EAGER_ALONE, "single", "nimble")
    report = timed(sample_report(24, width=2, device="cpu"), dict.fromkeys(names, 4e5), noise=1.6)
    measured = tuple(
        summarize(one.name, one.samples_ns, 3, [2 * k for k in range(len(one.samples_ns))], 7)
        for one in report.measurements
    )
    return replace(report, measurements=measured, environment=replace(report.environment, others=13.6, load=9.0))


def old_report() -> Report:
    """A report as earlier versions wrote it: no candidates, planned memory or FLOPs, only the graph's emitted waits."""
    report = sample_report(60)
    return replace(
        report,
        work=None,
        sources=(),
        costs=replace(report.costs, demand=()),
        schedules=tuple(
            replace(plan, counts=replace(plan.counts, forks=None, joins=None, inside=None)) for plan in report.schedules
        ),
        memory=replace(report.memory, planned=()),
        candidates=(),
    )


def plan_report() -> Report:
    """A report of which nothing was run: a plan."""
    report = sample_report(60, overhead=False, timelines=False)
    return replace(
        report,
        costs=uniform_costs(60),
        critical_path_ns=0.0,
        schedules=tuple(replace(plan, counts=replace(plan.counts, emitted=None)) for plan in old_report().schedules),
        measurements=(),
        checks=(),
        candidates=(),
        memory=Memory(),
    )


def profile_report() -> Report:
    """A report of code that nobody wrapped: of a hand-made trace, with a warning."""
    with tempfile.TemporaryDirectory() as folder:
        report = from_trace(write_trace(Path(folder) / "loop.json", training_loop()))
    return replace(report, warnings=("the machine was not quiet",))


def fused_report(calls: int = 60, *, width: int = 4, hostile: str = "") -> Report:
    """``sample_report`` with kernels that a compiler fused: each gelu and layer norm are one kernel.

    The first kernel changes a layout and stands for no eager call; no kernel stands for the last eager call. Calls
    beside others take longer than alone, so that the replay is far from its limit.
    """
    report = sample_report(calls, width=width, hostile=hostile)
    eager, (_, edges, _, branch) = report.program, program_of_blocks(calls, width, "cuda", hostile)
    groups: list[tuple[int, ...]] = [()]
    for call in eager.calls[:-1]:
        fuses = call.origins[0].operator == BRANCH[2] and groups[-1] == (call.index - 1,)
        if fuses:
            groups[-1] += (call.index,)
        else:
            groups.append((call.index,))
    place = {index: k for k, group in enumerate(groups) for index in group}
    joined = {(place[u], place[v]) for u, v in edges if u in place and v in place and place[u] != place[v]}
    graph = graph_from_edges(len(groups), sorted(joined | ({(0, 1)} if len(groups) > 1 else set())))
    program = replace(
        eager, calls=tuple(fused_call(k, group, eager, hostile) for k, group in enumerate(groups)), fuse="inductor"
    )
    isolated = tuple(0.6 * sum(report.costs.ns[index] for index in group) or 1500.0 for group in groups)
    demand = tuple(max((report.costs.demand[index] for index in group), default=0.01) for group in groups)
    path, path_ns = longest_path(len(groups), graph.meg, isolated)
    streams = tuple(branch[group[0]] if group else 0 for group in groups)
    size = len(groups)
    single = Schedule("inductor, single", (0,) * size, tuple(range(size)), (), counts=SyncCounts(0, 0, 0, 0, 1, 1, 0))
    nimble = replace(nimble_plan(size, graph.edges, graph.meg, streams, True), policy="inductor, nimble")
    slowed = tuple(ns * (1.9 if stream else 1.3) for ns, stream in zip(isolated, streams, strict=True))
    replays = [
        replay_run(single, program, graph.meg, isolated, "cuda"),
        replay_run(nimble, program, graph.meg, slowed, "cuda"),
    ]
    measured = {taken.name: taken for taken in report.measurements}
    ours = {line.run: 1.04 * line.length_ns for line in replays}
    best = ours["inductor, nimble"]
    others = {"eager-tuned": 4.1 * best, "compile:reduce-overhead": 1.6 * best, "compile": 1.005 * best}
    noise = draws(5)
    taken = {
        name: summarize(name, [max(ns, 1.0) * (1 + 0.006 * (next(noise) - 0.5)) for _ in range(48)], warmup=3)
        for name, ns in {**ours, **others, "cuda-graph": 0.9 * best}.items()
    }
    everyone = (measured["eager"], measured["single"], *taken.values())
    done = flops_of(eager)
    eager_line = report.timelines[0]
    return replace(
        report,
        program=program,
        graph=graph,
        work=Work(tuple(sum(done[index] for index in group) if group else None for group in groups), done, GPU),
        costs=Costs(isolated, report.costs.source, (), (), 20, size, size, demand),
        critical_path=path,
        critical_path_ns=path_ns,
        schedules=(single, nimble),
        measurements=everyone,
        checks=tuple(
            EqualityCheck(plan.policy, 3.1e-4, 1e-3, 0.71, True, "", 2.3e-4, 2.6e-4, "float64")
            for plan in (single, nimble)
        ),
        timelines=(
            eager_line,
            *(replace(line, unprofiled_ns=taken[line.run].median_ns, profiled_ns=line.length_ns) for line in replays),
        ),
        chosen="inductor, nimble",
        candidates=fused_candidates(measured, taken, max(nimble.streams, 1), hostile),
        peers=(
            PeerResult("eager-tuned", 1.9, EqualityCheck("eager-tuned", 2.2e-4, 1e-2, 0.71, True)),
            PeerResult("compile:reduce-overhead", 31.0, EqualityCheck("compile:…", 2.9e-4, 1e-2, 0.71, True)),
            PeerResult("compile", 24.0, EqualityCheck("compile", 2.9e-4, 1e-2, 0.71, True)),
            PeerResult(
                "cuda-graph",
                0.4,
                EqualityCheck("cuda-graph", 1e300, 1e-2, 0.71, False, "outputs are not finite"),
            ),
            PeerResult("tensorrt", note=f"not installed: no module named 'tensorrt'{hostile}"),
        ),
        eager=eager,
        memory=Memory(report.memory.eager_peak, tuple((plan.policy, 96_468_992) for plan in (single, nimble))),
    )


def training_report(calls: int = 60, *, width: int = 4, device: str = "cuda") -> Report:
    """``sample_report`` as a training step: a third of the calls forward, one of loss, the others backward but for two.

    One more host synchronisation is in the optimizer, which makes no other operators in eager.
    """
    report = sample_report(calls, width=width, device=device)

    def phase(index: int) -> Phase:
        if index >= calls - 2:
            return "optimizer"
        return "forward" if index < calls // 3 else "loss" if index == calls // 3 else "backward"

    program = replace(
        report.program, calls=tuple(replace(call, phase=phase(call.index)) for call in report.program.calls)
    )
    assert report.overhead is not None
    rows = report.overhead.calls
    starts = {span.call: span.start_ns for span in report.timelines[0].spans[::-1] if span.lane == 0}
    order = list(dict.fromkeys(phase(call) for call in range(calls)))
    begins = [starts[next(call for call in range(calls) if phase(call) == one)] for one in order]
    phases = tuple(
        PhaseOverhead(
            one,
            ((begin, end),),
            *(sum(getattr(row, part) for row in rows if phase(row.call) == one) for part in _PARTS),
        )
        for one, begin, end in zip(order, begins, [*begins[1:], report.overhead.profiled_ns], strict=True)
    )
    waits = (*report.overhead.host_syncs, HostSync("aten::item", 3, 9_000.0, "sample_net/train.py:9", "optimizer"))
    return replace(
        report,
        program=program,
        overhead=replace(report.overhead, host_syncs=waits, phases=phases),
        warnings=(*report.warnings, "no optimizer was given: a step is forward, loss and backward"),
    )


def eager_optimizer_report() -> Report:
    """``training_report`` whose optimizer's two calls eager did not make: one row for both."""
    report = training_report()
    assert report.overhead is not None
    *rows, first, second = report.overhead.calls
    both = replace(first, **{part: getattr(first, part) + getattr(second, part) for part in (*_PARTS, "tail_ns")})
    shared = replace(report.overhead, calls=(*rows, both), shared=(first.call, second.call))

    def at_first(call: Call) -> Call:
        origins = tuple(replace(one, module="c1") for one in call.origins)
        return replace(call, origins=origins) if call.phase == "optimizer" else call

    calls = tuple(at_first(call) for call in report.program.calls)
    return replace(report, program=replace(report.program, calls=calls), overhead=shared)


_PARTS = ("python_ns", "dispatch_ns", "allocation_ns", "launch_ns", "work_ns", "exposed_ns")


def tangled_report(seed: int, calls: int = 60) -> Report:
    """A report whose graph and modules are drawn at random: long edges, edges into and out of nested modules."""
    report, draw = sample_report(calls), draws(seed)
    for _ in range(8):  # the first draws of neighbouring seeds are alike
        next(draw)
    span = 3 + int(next(draw) * calls)
    edges = sorted(
        {
            (max(0, v - 1 - int(next(draw) ** 2 * span)), v)
            for v in range(1, calls)
            for _ in range(int(next(draw) * 3.5))
        }
    )
    reach = [1 << v for v in range(calls)]
    for u, v in sorted(edges, key=lambda edge: edge[1]):
        reach[v] |= reach[u]
    after: list[list[int]] = [[] for _ in range(calls)]
    for u, v in edges:
        after[u].append(v)
    meg = [(u, v) for u, v in edges if not any(w < v and reach[v] >> w & 1 for w in after[u])]
    modules = []
    for _ in range(calls):
        previous = modules[-1] if modules else []
        kept = previous[: int(next(draw) * (len(previous) + 1.6))]
        modules.append([*kept, *(f"m{int(next(draw) * 4)}" for _ in range(int(next(draw) * 3)))][:4])
    shown = tuple(
        replace(call, origins=(replace(call.origins[0], module=".".join(module)),))
        for call, module in zip(report.program.calls, modules, strict=True)
    )
    streams = tuple(int(next(draw) * 3) for _ in range(calls))
    syncs = tuple((u, v) for u, v in edges if streams[u] != streams[v])
    single, nimble = report.schedules
    return replace(
        report,
        program=replace(report.program, calls=shown),
        graph=CallGraph(calls, tuple(edges), ("RAW",) * len(edges), tuple(meg)),
        schedules=(single, replace(nimble, stream=streams, syncs=syncs)),
        critical_path=(0,),
    )


CASES: dict[str, Callable[[], Report]] = {
    "empty": lambda: sample_report(0),
    "one call": lambda: sample_report(1),
    "two streams": lambda: sample_report(24, width=2),
    "narrow": lambda: sample_report(60, width=1),
    "wide": lambda: sample_report(60, width=12),
    "host": lambda: sample_report(60, device="cpu"),
    "unstable": lambda: sample_report(30, stable=False),
    "busy": lambda: busy_report(),
    "interrupted": lambda: sample_report(60, complete=False),
    "nothing profiled": lambda: sample_report(60, overhead=False, timelines=False),
    "hostile": lambda: sample_report(20, model=HOSTILE, hostile=HOSTILE),
    "thousand": lambda: sample_report(1_000),
    "old file": old_report,
    "many candidates": lambda: _full_search(),
    "fused": lambda: fused_report(),
    "fused hostile": lambda: fused_report(20, width=2, hostile=HOSTILE),
    "fused thousand": lambda: fused_report(1_000, width=10),
    "training": lambda: training_report(),
    "training on the host": lambda: training_report(12, width=2, device="cpu"),
    "eager optimizer": lambda: eager_optimizer_report(),
    "ten thousand": lambda: sample_report(10_000, width=8),
}
"""Every edge case of a report of something that ran, by name."""

RENDERED: dict[str, Callable[[], Report]] = {**CASES, "plan": plan_report, "profile": profile_report}
"""Every edge case that a renderer has to show, by name."""


def _full_search() -> Report:
    report = sample_report(60)
    return replace(report, candidates=choice(report.measurements, "nimble", 4, more=6))
