"""Synthetic Reports of any size, consistent in themselves, for tests of views, text, files and pages.

The model is a row of blocks; a block splits into ``width`` branches that join again, and the join also reads the
block's input (an edge that is transitive, so the full DAG has more edges than the minimum equivalent graph).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from nimble_core.ir.call_graph import CallGraph, graph_from_edges
from nimble_core.ir.candidates import Candidate
from nimble_core.ir.costs import Costs, Kernel, uniform_costs
from nimble_core.ir.environment import Environment
from nimble_core.ir.measurement import Measurement, summarize
from nimble_core.ir.occupancy import Multiprocessors
from nimble_core.ir.program import Access, Call, Origin, Phase, Program, Storage, TensorRef
from nimble_core.ir.schedule import Schedule, SyncCounts
from nimble_core.ir.timeline import Lane, Span, Timeline
from nimble_viz.collect.from_trace import from_trace
from nimble_viz.render.report import Report
from nimble_viz.report.data import (
    EAGER_ALONE,
    CallOverhead,
    EngineMemory,
    EqualityCheck,
    HostSync,
    Memory,
    OverheadProfile,
    PeerResult,
    PhaseOverhead,
    PrepareStep,
    SourceLines,
    Work,
)
from tests.support.kineto_traces import training_loop, write_trace

__all__ = [
    "CASES",
    "HOSTILE",
    "RENDERED",
    "busy_report",
    "choice",
    "fused_report",
    "old_report",
    "plan_report",
    "profile_report",
    "sample_report",
    "tangled_report",
    "timed",
    "training_report",
]

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>&\u2028\"'<!--"
"""A name that tries everything to leave its place in a page."""

_DEPTH = 3
_BRANCH = ("aten.addmm.default", "aten.gelu.default", "aten.native_layer_norm.default")
_SPLIT, _JOIN = "aten.convolution.default", "aten.cat.default"
_COST_NS = {
    "aten.addmm.default": 9200.0,
    "aten.gelu.default": 2100.0,
    "aten.native_layer_norm.default": 3600.0,
    _SPLIT: 14800.0,
    _JOIN: 2900.0,
}
_OUT = (8, 64)
_FLOPS = {
    "aten.addmm.default": 65_536,
    "aten.gelu.default": 512,
    "aten.native_layer_norm.default": 3_584,
    _SPLIT: 294_912,
}
_GPU = Multiprocessors(132, 2048, 65536, 228 << 10)


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
    program, edges, meg, branch = _program(calls, width, device, hostile)
    graph = CallGraph(calls, edges, ("RAW",) * len(edges), meg)
    jitter = _lcg(7)
    isolated = tuple(_COST_NS[call.origins[0].operator] * (0.85 + 0.3 * next(jitter)) for call in program.calls)
    kernels = tuple(
        Kernel(call.index, f"{call.label}_kernel<float>", (64, 1, 1), (256, 1, 1), 40, 4096, call.index, ns)
        for call, ns in zip(program.calls, isolated, strict=True)
    )
    on_gpu = device == "cuda"
    costs = Costs(
        isolated,
        "one-stream capture, CUPTI activity" if on_gpu else "host clock around each call",
        tuple(ns * 0.03 for ns in isolated),
        kernels if on_gpu else (),
        20,
        calls if on_gpu else 0,
        calls if on_gpu else 0,
        tuple(0.02 + 0.3 * next(jitter) for _ in isolated) if on_gpu else (),
    )
    path, path_ns = _critical_path(calls, meg, isolated)
    known = frozenset(edges)
    single = Schedule(
        "single",
        (0,) * calls,
        tuple(range(calls)),
        (),
        added_order=tuple((u, u + 1) for u in range(calls - 1) if (u, u + 1) not in known),
        counts=SyncCounts(0, 0, 0, *((0, min(1, calls), min(1, calls), calls // 7) if on_gpu else ())),
    )
    nimble = _nimble(calls, edges, meg, branch, on_gpu)
    eager_line, profile = _eager(program, isolated, device)
    replays = {plan.policy: _replay(plan, program, meg, isolated, device) for plan in (single, nimble)}
    spread = 0.02 if stable else 0.5
    lengths = {"eager": eager_line.length_ns / 1.45} | {name: line.length_ns * 1.04 for name, line in replays.items()}
    noise = _lcg(11)
    measurements = tuple(
        summarize(name, [max(ns, 1.0) * (1 + spread * (next(noise) - 0.5)) for _ in range(48)], warmup=3)
        for name, ns in lengths.items()
    )
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
        environment=_environment(device),
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
        memory=_memory() if on_gpu else Memory(),
        chosen="nimble" if width > 1 else "single",
        candidates=choice(measurements, "nimble" if width > 1 else "single", max(nimble.streams, 1))
        if complete
        else (),
        warnings=() if complete else ("interrupted while measuring; what follows was measured before that",),
        complete=complete,
        work=Work(_flops(program), (), _GPU if on_gpu else None),
        sources=_sources(hostile) if calls else (),
    )


def timed(
    report: Report, medians: dict[str, float], *, noise: float = 0.02, samples: int = 48, seed: int = 3
) -> Report:
    """``report`` with runs of these lengths, in ns, that scatter by ``noise`` of them."""
    draw = _lcg(seed)
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
    eager, (_, edges, _, branch) = report.program, _program(calls, width, "cuda", hostile)
    groups: list[tuple[int, ...]] = [()]
    for call in eager.calls[:-1]:
        fuses = call.origins[0].operator == _BRANCH[2] and groups[-1] == (call.index - 1,)
        if fuses:
            groups[-1] += (call.index,)
        else:
            groups.append((call.index,))
    place = {index: k for k, group in enumerate(groups) for index in group}
    joined = {(place[u], place[v]) for u, v in edges if u in place and v in place and place[u] != place[v]}
    graph = graph_from_edges(len(groups), sorted(joined | ({(0, 1)} if len(groups) > 1 else set())))
    program = replace(
        eager, calls=tuple(_fused(k, group, eager, hostile) for k, group in enumerate(groups)), fuse="inductor"
    )
    isolated = tuple(0.6 * sum(report.costs.ns[index] for index in group) or 1500.0 for group in groups)
    demand = tuple(max((report.costs.demand[index] for index in group), default=0.01) for group in groups)
    path, path_ns = _critical_path(len(groups), graph.meg, isolated)
    streams = tuple(branch[group[0]] if group else 0 for group in groups)
    size = len(groups)
    single = Schedule("inductor, single", (0,) * size, tuple(range(size)), (), counts=SyncCounts(0, 0, 0, 0, 1, 1, 0))
    nimble = replace(_nimble(size, graph.edges, graph.meg, streams, True), policy="inductor, nimble")
    slowed = tuple(ns * (1.9 if stream else 1.3) for ns, stream in zip(isolated, streams, strict=True))
    replays = [
        _replay(single, program, graph.meg, isolated, "cuda"),
        _replay(nimble, program, graph.meg, slowed, "cuda"),
    ]
    measured = {taken.name: taken for taken in report.measurements}
    ours = {line.run: 1.04 * line.length_ns for line in replays}
    best = ours["inductor, nimble"]
    others = {"torchscript": 4.1 * best, "compile:reduce-overhead": 1.6 * best, "compile": 1.005 * best}
    noise = _lcg(5)
    taken = {
        name: summarize(name, [max(ns, 1.0) * (1 + 0.006 * (next(noise) - 0.5)) for _ in range(48)], warmup=3)
        for name, ns in {**ours, **others, "cuda-graph": 0.9 * best}.items()
    }
    everyone = (measured["eager"], measured["single"], *taken.values())
    done = _flops(eager)
    eager_line = report.timelines[0]
    return replace(
        report,
        program=program,
        graph=graph,
        work=Work(tuple(sum(done[index] for index in group) if group else None for group in groups), done, _GPU),
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
        candidates=_fused_candidates(measured, taken, max(nimble.streams, 1), hostile),
        peers=(
            PeerResult("torchscript", 1.9, EqualityCheck("torchscript", 2.2e-4, 1e-2, 0.71, True)),
            PeerResult("compile:reduce-overhead", 31.0, EqualityCheck("compile:…", 2.9e-4, 1e-2, 0.71, True)),
            PeerResult("compile", 24.0, EqualityCheck("compile", 2.9e-4, 1e-2, 0.71, True)),
            PeerResult(
                "cuda-graph",
                0.4,
                EqualityCheck("cuda-graph", float("inf"), 1e-2, 0.71, False, "outputs are not finite"),
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


def eager_optimizer_report(device: str = "cuda") -> Report:
    """``training_report`` whose optimizer's two calls eager did not make: one row for both."""
    report = training_report(device=device)
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


def _fused(index: int, group: tuple[int, ...], eager: Program, hostile: str) -> Call:
    """The call that stands for ``group``: Inductor's kernel, or the extern call of a convolution or matmul."""
    if not group:
        return Call(index, f"triton_poi_fused_clone_{index}", (), eager.calls[0].accesses if eager.calls else ())
    members = [eager.calls[at] for at in group]
    names = "_".join(call.origins[0].operator.split(".")[1] for call in members)
    extern = members[0].origins[0].operator in (_SPLIT, _BRANCH[0])
    operator = members[0].operator if extern else f"triton_per_fused_{names}_{index}{hostile}"
    writes = tuple(access for access in members[-1].accesses if access.write)
    reads = tuple(access for access in members[0].accesses if not access.write)
    origins = tuple(origin for call in members for origin in call.origins)
    return Call(index, operator, members[0].arguments, (*reads, *writes), origins=origins, eager=group)


def _fused_candidates(
    measured: dict[str, Measurement], taken: dict[str, Measurement], streams: int, hostile: str
) -> tuple[Candidate, ...]:
    right = EqualityCheck("right", 3.1e-4, 1e-2, 0.71, True)
    wrong = EqualityCheck("library, nimble", 0.4, 1e-2, 0.71, False, "differs from eager: relative error 4.0e-01")
    library = replace(taken["inductor, nimble"], name="library, nimble")
    capped = replace(taken["inductor, single"], name="inductor, critical_path, 4 streams")
    slow = replace(measured["eager"], name="library, single")
    return (
        Candidate("single", 1, 0, 0.0, measured["single"], right, 96_468_992, 0.021),
        Candidate("library, single", 1, 0, 0.0, slow, right, 96_468_992, 0.03, "library", 0.31),
        Candidate(
            "library, nimble", streams, 9, 1e6, library, wrong, 181_403_648, 0.04, "library", 0.31, note=wrong.reason
        ),
        Candidate("inductor, single", 1, 0, 0.0, taken["inductor, single"], right, 9_468_992, 0.03, "inductor", 12.3),
        Candidate(
            "inductor, nimble", streams, 31, 9e5, taken["inductor, nimble"], right, 171_966_464, 0.04, "inductor", 12.3,
            True,
        ),
        Candidate(
            capped.name, min(4, streams), 24, 9.4e5, capped, right, 121_966_464, 0.04, "inductor", 12.3
        ),
        Candidate("inductor, opara", streams, 40, 1.2e6, fuse="inductor", note="not captured: simulated slower"),
        Candidate(
            "inductor, max-autotune", 0, 0, fuse="inductor",
            note=f"the compiler failed: ninja: build stopped{hostile}",
        ),
    )  # fmt: skip


def choice(measurements: tuple[Measurement, ...], chosen: str, streams: int, *, more: int = 0) -> tuple[Candidate, ...]:
    """What was tried: both replays, one that is wrong, two that were not captured, and ``more`` capped plans."""
    times = {taken.name: taken for taken in measurements}
    quick = replace(times["nimble"], name="opara", median_ns=0.6 * times["nimble"].median_ns)
    right = EqualityCheck("right", 3.1e-4, 1e-2, 0.71, True)
    wrong = EqualityCheck("opara", 0.4, 1e-2, 0.71, False, "differs from eager: relative error 4.0e-01")
    slower = "not captured: simulated slower"
    rest = [
        Candidate(f"{policy}, {cap} streams", cap, 3 * cap, 1e6 + 1e4 * cap, note=slower)
        for cap in range(2, 2 + more)
        for policy in ("contention", "critical_path")
    ]
    return (
        Candidate("single", 1, 0, 0.0, times["single"], right, 96_468_992, 0.021, chosen=chosen == "single"),
        Candidate("opara", streams, 61, 0.55 * quick.median_ns, quick, wrong, 181_403_648, 0.04, note=wrong.reason),
        Candidate("critical_path", streams, 44, 1.2e6, note=slower),
        Candidate("torchsched", streams, 71, 1.4e6, note="not captured: the budget was spent"),
        Candidate("nimble", streams, 44, 9.1e5, times["nimble"], right, 171_966_464, 0.034, chosen=chosen == "nimble"),
        *rest,
    )


def _memory() -> Memory:
    planned = (
        EngineMemory("single", 41_943_040, 167_772_160, 33_554_432),
        EngineMemory("nimble", 48_234_496, 167_772_160, 67_108_864),
    )
    return Memory(52_428_800, (("single", 96_468_992), ("nimble", 171_966_464)), 412_090_368, planned)


def _sources(hostile: str) -> tuple[SourceLines, ...]:
    """The function that all calls come from, and one that no call names any more."""
    forward = [f"    # nothing is called on line {line}" for line in range(18, 47)]
    forward[0] = "    def forward(self, x):"
    forward[1] = '        """A stem, branches, and what joins them.'
    forward[2] = '        """'
    forward[3] = "        x = self.stem(x)  # line 21"
    forward[12:15] = [f"        b{k} = self.{name}(x)" for k, name in enumerate(("project", "gelu", "norm"))]
    forward[26] = '        return torch.cat([x, b2], dim=1 if self.name == "join" else 0)' + hostile
    return (
        SourceLines("sample_net/modeling.py" + hostile, 18, "Block.forward" + hostile, tuple(forward)),
        SourceLines("sample_net/tokens.py", 9, "tokens", (), "not found where it ran" + hostile),
    )


def tangled_report(seed: int, calls: int = 60) -> Report:
    """A report whose graph and modules are drawn at random: long edges, edges into and out of nested modules."""
    report, draw = sample_report(calls), _lcg(seed)
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


_Edges = tuple[tuple[int, int], ...]


def _full_search() -> Report:
    report = sample_report(60)
    return replace(report, candidates=choice(report.measurements, "nimble", 4, more=6))


def _lcg(seed: int) -> Iterator[float]:
    """Floats in [0, 1), the same on every machine."""
    state = seed
    while True:
        state = (state * 1_103_515_245 + 12_345) % (1 << 31)
        yield state / (1 << 31)


def _program(size: int, width: int, device: str, hostile: str) -> tuple[Program, _Edges, _Edges, tuple[int, ...]]:
    """The program, its edges, those of them that are not transitive, and the branch of each call."""
    calls: list[Call] = []
    storages = [Storage(1024, "input", "args[0]")]
    edges: set[tuple[int, int]] = set()
    transitive: set[tuple[int, int]] = set()
    branches: list[int] = []
    made: list[int] = []
    dtype, itemsize = ("float16", 2) if device == "cuda" else ("float32", 4)

    def ref(storage: int) -> TensorRef:
        return TensorRef(storage, 0, _OUT, (_OUT[1], 1), dtype, itemsize)

    def add(operator: str, sources: list[int], module: str, line: int, branch: int) -> int:
        index = len(calls)
        weight = len(storages)
        storages.append(Storage(8192, "parameter", f"{module}.weight{hostile}"))
        storages.append(Storage(1024, "intermediate"))
        made.append(weight + 1)
        edges.update((source, index) for source in sources)
        branches.append(branch)
        read = [*([made[source] for source in sources] or [0]), weight]
        calls.append(
            Call(
                index,
                operator + hostile,
                (*((f"input{k}", f"%{storage}") for k, storage in enumerate(read)), ("eps", "1e-05" + hostile)),
                (*(Access(ref(storage), False) for storage in read), Access(ref(weight + 1), True)),
                origins=(Origin(operator, module + hostile, "sample_net/modeling.py" + hostile, line),),
            )
        )
        return index

    block, previous = 0, -1
    while len(calls) < size:
        name = f"encoder.layer.{block}"
        start = add(_SPLIT, [previous] if previous >= 0 else [], f"{name}.stem", 21, 0)
        ends = []
        for branch in range(width):
            last = start
            for step in range(_DEPTH):
                if len(calls) < size:
                    last = add(_BRANCH[step], [last], f"{name}.branch{branch}.{step}", 30 + step, branch)
            if last != start:
                ends.append(last)
        if len(calls) < size:
            previous = add(_JOIN, sorted({start, *ends}), f"{name}.join", 44, 0)
            transitive.add((start, previous))
        block += 1
    outputs = (ref(made[-1]),) if made else ()
    program = Program(tuple(calls), tuple(storages), (ref(0),), outputs, host_steps=size // 3, device=device)
    ordered = tuple(sorted(edges))
    return program, ordered, tuple(edge for edge in ordered if edge not in transitive), tuple(branches)


def _flops(program: Program) -> tuple[int, ...]:
    return tuple(_FLOPS.get(call.origins[0].operator, 0) for call in program.calls)


def _critical_path(size: int, edges: _Edges, ns: tuple[float, ...]) -> tuple[tuple[int, ...], float]:
    finish, before = list(ns), [-1] * size
    for producer, consumer in edges:
        if finish[producer] + ns[consumer] > finish[consumer]:
            finish[consumer], before[consumer] = finish[producer] + ns[consumer], producer
    if not size:
        return (), 0.0
    last = max(range(size), key=lambda index: (finish[index], -index))
    path = [last]
    while before[path[-1]] >= 0:
        path.append(before[path[-1]])
    return tuple(reversed(path)), finish[last]


def _nimble(size: int, edges: _Edges, meg: _Edges, branch: tuple[int, ...], on_gpu: bool) -> Schedule:
    """Each branch is a chain: its edges are the matched ones, all others are synchronisations."""
    syncs = tuple((u, v) for u, v in meg if branch[u] != branch[v])
    full = sum(branch[u] != branch[v] for u, v in edges)
    return Schedule(
        "nimble",
        branch,
        tuple(range(size)),
        syncs,
        maximum_concurrency=True,
        minimum_syncs=True,
        meg_edges=len(meg),
        matched=len(meg) - len(syncs),
        counts=SyncCounts(
            full,
            len(syncs),
            len(syncs),
            *((len(syncs), min(1, size), min(1, size), size // 7, size // 5) if on_gpu else ()),
        ),
    )


def _eager(program: Program, isolated: tuple[float, ...], device: str) -> tuple[Timeline, OverheadProfile]:
    """Eager, profiled: on CUDA the host runs ahead where it can, on the host device it does the work itself."""
    draw = _lcg(3)
    spans: list[Span] = []
    rows: list[CallOverhead] = []
    on_gpu = device == "cuda"
    host, gpu, busy = 4000.0, 0.0, 0.0
    for call in program.calls:
        work = isolated[call.index]
        python, dispatch = 5200 * (0.7 + 0.6 * next(draw)), 6800 * (0.7 + 0.6 * next(draw))
        allocation, launch = 900 * (0.5 + next(draw)), 3900 * (0.8 + 0.4 * next(draw)) if on_gpu else 0.0
        overhead = python + dispatch + allocation + launch
        began = host + python
        host += overhead + (0.0 if on_gpu else work)
        exposed = min(overhead, max(0.0, host - max(gpu, host - overhead))) if on_gpu else overhead
        spans.append(Span(0, began, host, call.index, call.operator))
        if on_gpu:
            start = max(gpu, host + 700)
            gpu = start + work
            spans.append(Span(1, start, gpu, call.index, f"{call.label}_kernel<float>"))
        busy += work
        rows.append(CallOverhead(call.index, python, dispatch, allocation, launch, work, exposed))
    spans.sort(key=lambda span: (span.start_ns, span.lane))
    lanes = (Lane("host thread", "host"), Lane("GPU stream 7", "gpu")) if on_gpu else (Lane("host thread", "host"),)
    clock = "torch.profiler" if on_gpu else "host clock"
    line = Timeline("eager", "measured", clock, lanes, tuple(spans))
    total = max(host, gpu)
    syncs = (
        (
            HostSync("cudaStreamSynchronize", 2, 31_000.0, "sample_net/modeling.py:44"),
            HostSync("cudaMemcpyAsync (device to host)", 1, 12_500.0, "sample_net/tokens.py:12"),
        )
        if on_gpu and rows
        else ()
    )
    remainder = total - sum(row.overhead_ns + (0.0 if on_gpu else row.work_ns) for row in rows)
    profile = OverheadProfile(
        tuple(rows), total, total, remainder, busy, 1 - busy / total, len(rows), len(rows), syncs, clock
    )
    return line, profile


def _replay(plan: Schedule, program: Program, meg: _Edges, isolated: tuple[float, ...], device: str) -> Timeline:
    """List simulation: a call starts when its stream is free and its predecessors are done, plus a gap."""
    before: list[list[int]] = [[] for _ in program.calls]
    for producer, consumer in meg:
        before[consumer].append(producer)
    free = [0.0] * plan.streams
    end = [0.0] * len(program.calls)
    spans = []
    for index in plan.order:
        stream = plan.stream[index]
        start = max([free[stream], *(end[producer] for producer in before[index])]) + 300
        end[index] = free[stream] = start + isolated[index]
        spans.append(Span(stream, start, end[index], index, f"{program.calls[index].label}_kernel<float>"))
    spans.sort(key=lambda span: (span.start_ns, span.lane))
    kind, clock = ("stream", "CUPTI activity") if device == "cuda" else ("worker", "host clock")
    lanes = tuple(Lane(f"{kind} {k}", "stream" if kind == "stream" else "worker") for k in range(plan.streams))
    return Timeline(plan.policy, "measured", clock, lanes, tuple(spans))


def _environment(device: str) -> Environment:
    if device == "cuda":
        return Environment(
            "cuda", "NVIDIA H200", "Example CPU 8480C", 16, 8, "2.11.0+cu130", "3.11.9", "Linux x86_64",
            "580.65", "13.0", (1980, 1965), (), 0, 0.4, (("cudnn.allow_tf32", "True"),), "2026-01-01T12:00:00+00:00",
        )  # fmt: skip
    return Environment(
        "cpu", "Example CPU 8480C", "Example CPU 8480C", 2, 2, "2.13.0+cpu", "3.11.9", "Linux x86_64", load=0.7,
        settings=(("matmul.allow_tf32", "False"),), date="2026-01-01T12:00:00+00:00",
    )  # fmt: skip
