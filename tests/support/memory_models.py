"""Programs of whole-storage accesses for the tests of memory, and a memory that notices whose bytes are read."""

from __future__ import annotations

from collections.abc import Sequence

import networkx
from hypothesis import strategies as st

from nimble_core.ir.program import Access, Call, Program, Role, Storage, TensorRef
from nimble_core.ir.schedule import Schedule, stream_neighbours
from nimble_core.scheduling.memory_planner import MemoryPlan


def program_of(
    steps: Sequence[tuple[Sequence[int], Sequence[int]]],
    nbytes: Sequence[int],
    *,
    inputs: Sequence[int] = (0,),
    outputs: Sequence[int] = (),
) -> Program:
    """One call per step: storages read, storages written."""

    def whole(storage: int) -> TensorRef:
        return TensorRef(storage, 0, (nbytes[storage],), (1,), "uint8", 1)

    calls = tuple(
        Call(
            index,
            "aten.op.default",
            (),
            (*(Access(whole(s), False) for s in reads), *(Access(whole(s), True) for s in writes)),
        )
        for index, (reads, writes) in enumerate(steps)
    )
    roles: list[Role] = ["input" if index in inputs else "intermediate" for index in range(len(nbytes))]
    storages = tuple(Storage(size, role) for size, role in zip(nbytes, roles, strict=True))
    return Program(calls, storages, tuple(map(whole, inputs)), tuple(map(whole, outputs)))


@st.composite
def tensor_programs(draw: st.DrawFn) -> Program:
    """Calls that each make one or two storages (some empty) of what was made before, or write in place."""
    nbytes = [8]
    steps: list[tuple[list[int], list[int]]] = []
    for _ in range(draw(st.integers(0, 12))):
        reads = draw(st.lists(st.integers(max(0, len(nbytes) - 5), len(nbytes) - 1), max_size=3, unique=True))
        writes = list(range(len(nbytes), len(nbytes) + draw(st.sampled_from([1, 1, 1, 2]))))
        nbytes += [draw(st.sampled_from([0, 1, 2, 3, 5, 8, 13])) for _ in writes]
        if draw(st.integers(0, 4)) == 0:
            # Two writers of disjoint halves may run side by side: no call makes such a storage before the others.
            writes.append(draw(st.integers(1, len(nbytes) - 1)))
        steps.append((reads, writes))
    outputs = draw(st.lists(st.integers(0, len(nbytes) - 1), max_size=2, unique=True))
    return program_of(steps, nbytes, outputs=outputs)


def happens_before(schedule: Schedule) -> networkx.DiGraph:
    """The transitive closure of streams and waits, by networkx."""
    digraph = networkx.DiGraph()
    digraph.add_nodes_from(schedule.order)
    digraph.add_edges_from([*schedule.syncs, *stream_neighbours(schedule.stream, schedule.order)])
    return networkx.transitive_closure_dag(digraph)


def run_on_tagged_bytes(program: Program, plan: MemoryPlan, run: Sequence[int]) -> list[str]:
    """Execute calls in the order ``run`` on memory whose bytes remember who wrote them last.

    Whoever touches a storage for the first time tags all its bytes, a call its workspaces; lent storages and placed
    inputs have theirs from the start. Whoever touches a storage later, and the reader of the outputs after the last
    call, must find its tags, and what is kept must stay.

    Returns:
        What went wrong, in words; empty if every reader found its own bytes.
    """
    memory: list[object] = [None] * (plan.start + plan.nbytes)
    lent = plan.needs.lent
    there = [*(storage for storage, _ in lent.homes), *plan.needs.inputs]
    made = {storage for storage in there if plan.offsets[storage] >= 0}
    wrong = []

    def span(storage: int) -> range:
        return range(plan.offsets[storage], plan.offsets[storage] + program.storages[storage].nbytes)

    for storage in made:
        for byte in span(storage):
            memory[byte] = storage
    kept = [range(offset, offset + nbytes) for offset, nbytes in lent.kept]
    for span_kept in kept:
        for byte in span_kept:
            memory[byte] = "kept"
    for index in run:
        touched = sorted({access.ref.storage for access in program.calls[index].accesses})
        touched = [storage for storage in touched if plan.offsets[storage] >= 0]
        for storage in touched:
            if storage not in made:
                made.add(storage)
                for byte in span(storage):
                    memory[byte] = storage
        if plan.needs.workspaces and plan.needs.workspaces[index]:
            first = plan.workspace_offsets[index]
            for byte in range(first, first + plan.needs.workspaces[index]):
                memory[byte] = f"workspace of {index}"
        for storage in touched:
            if any(memory[byte] != storage for byte in span(storage)):
                wrong.append(f"call {index} finds other bytes in storage {storage}")
    for ref in program.outputs:
        storage = ref.storage
        if storage in made and any(memory[byte] != storage for byte in span(storage)):
            wrong.append(f"output {storage} was overwritten")
    wrong += [f"kept bytes at {one.start} were overwritten" for one in kept if any(memory[at] != "kept" for at in one)]
    return wrong
