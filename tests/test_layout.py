from __future__ import annotations

from nimble_core.layout import SMALL_NBYTES, call_key, lay_out
from nimble_core.program import Access, Call, Program, Storage, TensorRef
from nimble_core.schedule import Schedule

LARGE = SMALL_NBYTES + 1


def program(storages: list[int], calls: list[tuple[list[int], list[int]]], outputs: list[int]) -> Program:
    """Calls as ``(reads, writes)`` of storages given by their sizes; storage 0 is the input."""

    def ref(storage: int) -> TensorRef:
        return TensorRef(storage, 0, (storages[storage],), (1,), "uint8", 1)

    return Program(
        calls=tuple(
            Call(
                index,
                f"op{index}",
                (),
                (*(Access(ref(s), False) for s in reads), *(Access(ref(s), True) for s in writes)),
            )
            for index, (reads, writes) in enumerate(calls)
        ),
        storages=tuple(Storage(size, "input" if i == 0 else "intermediate", "") for i, size in enumerate(storages)),
        inputs=(ref(0),),
        outputs=tuple(ref(storage) for storage in outputs),
    )


def plan(calls: int) -> Schedule:
    return Schedule("single", (0,) * calls, tuple(range(calls)), ())


def test_results_go_to_the_arena_and_workspaces_to_scratch() -> None:
    made = program([8, 100, LARGE], [([0], [1]), ([1], [2])], [2])
    layout = lay_out(made, plan(2), [(1, 700), (0, 0)])
    assert [[(b.nbytes, b.storage, b.home) for b in blocks] for blocks in layout.blocks] == [
        [(100, 1, "arena"), (700, None, "scratch")],
        [(LARGE, 2, "arena")],
    ]
    assert layout.arena == {1, 2}
    assert layout.scratch == (1024, 0)
    assert layout.kept_nbytes == 0


def test_of_several_small_results_the_first_shares_and_the_others_keep_their_memory() -> None:
    made = program([8, 100, 200, LARGE, 300], [([0], [1, 2, 3, 4]), ([1, 2, 3, 4], [])], [])
    homes = [block.home for block in lay_out(made, plan(2), [(0, 0)] * 2).blocks[0]]
    assert homes == ["arena", "kept", "arena", "kept"]
    layout = lay_out(made, plan(2), [(0, 0)] * 2)
    assert layout.kept == {2: 0, 4: 512}
    assert layout.kept_nbytes == 1024


def test_results_that_nobody_uses_are_scratch_unless_a_small_one_follows() -> None:
    made = program([8, 100, 200], [([0], [1, 2]), ([1], [])], [])
    assert [block.home for block in lay_out(made, plan(2), [(0, 0)] * 2).blocks[0]] == ["arena", "scratch"]
    made = program([8, 100, 200], [([0], [1, 2]), ([2], [])], [])
    layout = lay_out(made, plan(2), [(0, 0)] * 2)
    assert [block.home for block in layout.blocks[0]] == ["front", "arena"]
    assert (layout.front, layout.front_nbytes) == ({1: 0}, 512)


def test_results_can_be_asked_for_in_another_order() -> None:
    made = program([8, 100, 200, 300], [([0], [1, 2, 3]), ([1], [])], [])
    layout = lay_out(made, plan(2), [(0, 0)] * 2, orders={call_key(made.calls[0]): (1, 2, 0)})
    homes = [(block.storage, block.home) for block in layout.blocks[0]]
    assert homes == [(2, "front"), (3, "front"), (1, "arena")]


def test_skipped_calls_are_left_alone() -> None:
    made = program([8, 100, 200], [([0], [1]), ([1], [2])], [2])
    layout = lay_out(made, plan(2), [(1, 64)] * 2, skip=frozenset({made.calls[0].operator}))
    assert layout.blocks[0] == ()
    assert layout.scratch[0] == 0
    assert layout.arena == {2}


def test_several_temporaries_fit_whatever_each_of_them_takes() -> None:
    made = program([8, 100], [([0], [1])], [1])

    def temporaries(count: int, nbytes: int, workspace: int = 0) -> list[int]:
        blocks = lay_out(made, plan(1), [(count, nbytes)], workspace=workspace).blocks[0]
        return [block.nbytes for block in blocks if block.storage is None]

    assert temporaries(2, 1000) == [1000, 1000]
    assert temporaries(2, 1000, workspace=900) == [900, 100]
    assert temporaries(1, 900, workspace=900) == [900]
    assert temporaries(2, LARGE) == [LARGE, LARGE, SMALL_NBYTES]
    assert temporaries(0, 0) == temporaries(-1, 5) == []


def test_a_storage_is_made_by_the_first_call_in_issue_order() -> None:
    made = program([8, 100], [([0], [1]), ([0], [1])], [1])
    layout = lay_out(made, Schedule("mine", (0, 0), (1, 0), ()), [(0, 0)] * 2)
    assert [len(blocks) for blocks in layout.blocks] == [0, 1]
