"""What sample reports are made of: a program of blocks with branches, its costs, and runs of it on a clock.

The model is a row of blocks; a block splits into ``width`` branches that join again, and the join also reads the
block's input (an edge that is transitive, so the full DAG has more edges than the minimum equivalent graph).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nimble_core.ir.candidates import Candidate
from nimble_core.ir.environment import Environment
from nimble_core.ir.measurement import Measurement
from nimble_core.ir.occupancy import Multiprocessors
from nimble_core.ir.program import Access, Call, Origin, Program, Storage, TensorRef
from nimble_core.ir.schedule import Schedule, SyncCounts
from nimble_core.ir.timeline import Lane, Span, Timeline
from nimble_viz.report.data import (
    CallOverhead,
    EngineMemory,
    EqualityCheck,
    HostSync,
    Memory,
    OverheadProfile,
    SourceLines,
)

DEPTH = 3
BRANCH = ("aten.addmm.default", "aten.gelu.default", "aten.native_layer_norm.default")
SPLIT, _JOIN = "aten.convolution.default", "aten.cat.default"
COST_NS = {
    "aten.addmm.default": 9200.0,
    "aten.gelu.default": 2100.0,
    "aten.native_layer_norm.default": 3600.0,
    SPLIT: 14800.0,
    _JOIN: 2900.0,
}
OUT = (8, 64)
FLOPS = {
    "aten.addmm.default": 65_536,
    "aten.gelu.default": 512,
    "aten.native_layer_norm.default": 3_584,
    SPLIT: 294_912,
}
GPU = Multiprocessors(132, 2048, 65536, 228 << 10)
Edges = tuple[tuple[int, int], ...]


def memory_of() -> Memory:
    planned = (
        EngineMemory("single", 41_943_040, 167_772_160, 33_554_432),
        EngineMemory("nimble", 48_234_496, 167_772_160, 67_108_864),
    )
    return Memory(52_428_800, (("single", 96_468_992), ("nimble", 171_966_464)), 412_090_368, planned)


def sources_of(hostile: str) -> tuple[SourceLines, ...]:
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


def draws(seed: int) -> Iterator[float]:
    """Floats in [0, 1), the same on every machine."""
    state = seed
    while True:
        state = (state * 1_103_515_245 + 12_345) % (1 << 31)
        yield state / (1 << 31)


def program_of_blocks(
    size: int, width: int, device: str, hostile: str
) -> tuple[Program, Edges, Edges, tuple[int, ...]]:
    """The program, its edges, those of them that are not transitive, and the branch of each call."""
    calls: list[Call] = []
    storages = [Storage(1024, "input", "args[0]")]
    edges: set[tuple[int, int]] = set()
    transitive: set[tuple[int, int]] = set()
    branches: list[int] = []
    made: list[int] = []
    dtype, itemsize = ("float16", 2) if device == "cuda" else ("float32", 4)

    def ref(storage: int) -> TensorRef:
        return TensorRef(storage, 0, OUT, (OUT[1], 1), dtype, itemsize)

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
        start = add(SPLIT, [previous] if previous >= 0 else [], f"{name}.stem", 21, 0)
        ends = []
        for branch in range(width):
            last = start
            for step in range(DEPTH):
                if len(calls) < size:
                    last = add(BRANCH[step], [last], f"{name}.branch{branch}.{step}", 30 + step, branch)
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


def flops_of(program: Program) -> tuple[int, ...]:
    return tuple(FLOPS.get(call.origins[0].operator, 0) for call in program.calls)


def longest_path(size: int, edges: Edges, ns: tuple[float, ...]) -> tuple[tuple[int, ...], float]:
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


def nimble_plan(size: int, edges: Edges, meg: Edges, branch: tuple[int, ...], on_gpu: bool) -> Schedule:
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


def eager_run(program: Program, isolated: tuple[float, ...], device: str) -> tuple[Timeline, OverheadProfile]:
    """Eager, profiled: on CUDA the host runs ahead where it can, on the host device it does the work itself."""
    draw = draws(3)
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


def replay_run(plan: Schedule, program: Program, meg: Edges, isolated: tuple[float, ...], device: str) -> Timeline:
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


def environment_of(device: str) -> Environment:
    if device == "cuda":
        return Environment(
            "cuda", "NVIDIA H200", "Example CPU 8480C", 16, 8, "2.11.0+cu130", "3.11.9", "Linux x86_64",
            "580.65", "13.0", (1980, 1965), (), 0, 0.4, (("cudnn.allow_tf32", "True"),), "2026-01-01T12:00:00+00:00",
        )  # fmt: skip
    return Environment(
        "cpu", "Example CPU 8480C", "Example CPU 8480C", 2, 2, "2.13.0+cpu", "3.11.9", "Linux x86_64", load=0.7,
        settings=(("matmul.allow_tf32", "False"),), date="2026-01-01T12:00:00+00:00",
    )  # fmt: skip


def fused_call(index: int, group: tuple[int, ...], eager: Program, hostile: str) -> Call:
    """The call that stands for ``group``: Inductor's kernel, or the extern call of a convolution or matmul."""
    if not group:
        return Call(index, f"triton_poi_fused_clone_{index}", (), eager.calls[0].accesses if eager.calls else ())
    members = [eager.calls[at] for at in group]
    names = "_".join(call.origins[0].operator.split(".")[1] for call in members)
    extern = members[0].origins[0].operator in (SPLIT, BRANCH[0])
    operator = members[0].operator if extern else f"triton_per_fused_{names}_{index}{hostile}"
    writes = tuple(access for access in members[-1].accesses if access.write)
    reads = tuple(access for access in members[0].accesses if not access.write)
    origins = tuple(origin for call in members for origin in call.origins)
    return Call(index, operator, members[0].arguments, (*reads, *writes), origins=origins, eager=group)


def fused_candidates(
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
