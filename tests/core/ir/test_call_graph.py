"""Hazards: against the bytes themselves, one by one."""

from __future__ import annotations

import itertools

import networkx
import pytest
from hypothesis import given

from nimble_core.ir.call_graph import CallGraph, build_graph, disjoint, graph_from_edges
from nimble_core.ir.program import Access, Call, Origin, Program, Role, Storage, TensorRef
from nimble_core.utils.errors import InputError
from tests.support.strategies import dags, programs, windows


def bytes_of(ref: TensorRef) -> set[int]:
    """Every byte of a window, counted out."""
    starts = (
        ref.offset + ref.itemsize * sum(i * stride for i, stride in zip(place, ref.strides, strict=True))
        for place in itertools.product(*(range(size) for size in ref.sizes))
    )
    return {start + byte for start in starts for byte in range(ref.itemsize)}


def provably_conflicting(first: Access, second: Access, program: Program) -> tuple[bool, bool]:
    """Whether two accesses share a byte that one of them writes, and whether they must be taken to do so."""
    if first.ref.storage != second.ref.storage:
        return False, False
    if program.storages[first.ref.storage].role == "generator":
        return True, True
    if not (first.write or second.write):
        return False, False
    return bool(bytes_of(first.ref) & bytes_of(second.ref)), not disjoint(first.ref, second.ref)


def closure(size: int, edges: object) -> set[tuple[int, int]]:
    digraph = networkx.DiGraph()
    digraph.add_nodes_from(range(size))
    digraph.add_edges_from(edges)
    return set(networkx.transitive_closure_dag(digraph).edges)


def all_pairs(program: Program, *, proved: bool) -> list[tuple[int, int]]:
    return [
        (u.index, v.index)
        for u, v in itertools.combinations(program.calls, 2)
        if any(provably_conflicting(a, b, program)[proved] for a in u.accesses for b in v.accesses)
    ]


@given(programs())
def test_every_conflict_of_bytes_is_ordered(program: Program) -> None:
    graph = build_graph(program)
    assert set(all_pairs(program, proved=False)) <= closure(graph.size, graph.edges)


@given(programs())
def test_orders_nothing_but_windows_that_may_overlap(program: Program) -> None:
    graph = build_graph(program)
    assert closure(graph.size, graph.edges) == closure(graph.size, all_pairs(program, proved=True))
    assert set(graph.edges) <= set(all_pairs(program, proved=True))


@given(windows(), windows())
def test_disjoint_windows_share_no_byte(first: TensorRef, second: TensorRef) -> None:
    if disjoint(first, second):
        assert not bytes_of(first) & bytes_of(second)


@given(dags())
def test_meg_is_the_transitive_reduction(graph: CallGraph) -> None:
    digraph = graph.to_networkx()
    assert set(graph.meg) == set(networkx.transitive_reduction(digraph).edges)
    assert list(graph.edges) == sorted(set(graph.edges))
    assert list(graph.meg) == sorted(graph.meg)


def tensor(storage: int, offset: int = 0, sizes: tuple[int, ...] = (4,), strides: tuple[int, ...] = (1,)) -> TensorRef:
    return TensorRef(storage, offset, sizes, strides, "float32", 4)


def program_of(*accesses: list[tuple[TensorRef, str]], roles: tuple[Role, ...] = ("intermediate",) * 8) -> Program:
    """One call per list; ``"r"``, ``"w"`` or ``"rw"`` says what it does with each tensor."""
    calls = []
    for index, touched in enumerate(accesses):
        listed = tuple(Access(ref, kind == "w") for ref, kinds in touched for kind in kinds)
        calls.append(Call(index, "aten.op.default", (), listed, origins=(Origin("aten.op.default", "block.0"),)))
    return Program(tuple(calls), tuple(Storage(4096, role) for role in roles), (), ())


A, B = tensor(0), tensor(1)


def hazards(*accesses: list[tuple[TensorRef, str]], **options: tuple[Role, ...]) -> dict[tuple[int, int], str]:
    graph = build_graph(program_of(*accesses, **options))
    return dict(zip(graph.edges, graph.kinds, strict=True))


def test_kinds_of_hazards() -> None:
    assert hazards([(A, "w")], [(A, "r")]) == {(0, 1): "RAW"}
    assert hazards([(A, "r")], [(A, "w")]) == {(0, 1): "WAR"}
    assert hazards([(A, "w")], [(A, "w")]) == {(0, 1): "WAW"}
    assert hazards([(A, "r")], [(A, "r")]) == {}
    assert hazards([(A, "rw")], [(A, "rw")]) == {(0, 1): "RAW+WAW"}
    assert hazards([(A, "w"), (B, "r")], [(A, "r"), (B, "w")]) == {(0, 1): "RAW+WAR"}


def test_waits_for_the_last_writer_and_the_readers_since_only() -> None:
    found = hazards([(A, "w")], [(A, "r")], [(A, "r")], [(A, "w")], [(A, "r")], [(A, "w")])
    assert found == {(0, 1): "RAW", (0, 2): "RAW", (1, 3): "WAR", (2, 3): "WAR", (3, 4): "RAW", (4, 5): "WAR"}


def test_a_cache_filled_slice_by_slice_forgets_readers_that_were_waited_for() -> None:
    whole, slot = tensor(0, sizes=(8,)), tensor(0, sizes=(2,))
    steps = [[(slot, "w")], [(whole, "r")]] * 4
    assert (1, 2) in hazards(*steps)
    assert (1, 4) not in hazards(*steps)


def test_columns_of_one_matrix_stay_parallel() -> None:
    # A cat along the channels of a channels-last image: sizes (2, 3 channels of 12, 4 x 4), as strided windows.
    parts = [tensor(0, 12 * index, (2, 3, 4, 4), (192, 1, 48, 12)) for index in range(4)]
    assert set(hazards(*[[(part, "w")] for part in parts], [(tensor(0, sizes=(384,)), "r")])) == {
        (index, 4) for index in range(4)
    }
    assert (0, 1) in hazards([(parts[0], "w")], [(tensor(0, 8, (2, 3, 4, 4), (192, 1, 48, 12)), "w")])


def test_empty_windows_touch_nothing() -> None:
    assert hazards([(tensor(0, sizes=(0, 4), strides=(4, 1)), "w")], [(A, "r")]) == {}


def test_random_calls_keep_their_order_even_when_listed_as_reads() -> None:
    state = TensorRef(0, 0, (), (), "uint8", 1)
    assert set(hazards([(state, "r")], [(B, "w")], [(state, "r")], roles=("generator", "intermediate"))) == {(0, 2)}


def test_edges_must_point_forward() -> None:
    for bad in [(1, 0), (0, 0), (0, 3), (-1, 1)]:
        with pytest.raises(InputError, match=r"edge \("):
            graph_from_edges(3, [bad])
