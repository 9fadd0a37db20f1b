from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.allocations import Ask
from nimble_core.ir.program import Access, Call, Program, Storage, TensorRef
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.memory_requirements import SMALL_NBYTES, Layout, lay_out, next_claim

LARGE = SMALL_NBYTES + 1
CALLS = 8


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


def homes(layout: Layout, call: int = 0) -> list[tuple[int, int | None, str]]:
    return [(block.nbytes, block.storage, block.home) for block in layout.blocks[call]]


def test_results_go_to_the_arena_and_workspaces_to_scratch() -> None:
    made = program([8, 100, LARGE], [([0], [1]), ([1], [2])], [2])
    layout = lay_out(made, plan(2), [[Ask(100, 1), Ask(700)], [Ask(LARGE, 2)]])
    assert homes(layout) == [(100, 1, "arena"), (700, None, "scratch")]
    assert homes(layout, 1) == [(LARGE, 2, "arena")]
    assert layout.arena == {1: 100, 2: LARGE}
    assert layout.scratch == (1024, 0)
    assert layout.asked == ((2, 800), (1, LARGE))
    assert layout.kept_nbytes == 0
    assert layout.sized(made) is made


NO_ASKS: list[list[Ask]] = []
PLACED: dict[str, tuple[list[int], list[int], list[list[Ask]], list[tuple[int, int | None, str]]]] = {
    # Storages, those that a second call reads, and what the first call, which makes all of them, asks for.
    "of several small results the first shares": (
        [100, 200, LARGE, 300],
        [1, 2, 3, 4],
        NO_ASKS,
        [(100, 1, "arena"), (200, 2, "kept"), (LARGE, 3, "arena"), (300, 4, "kept")],
    ),
    "a result that nobody uses is scratch": ([100, 700], [1], NO_ASKS, [(100, 1, "arena"), (700, 2, "scratch")]),
    "tiny workspaces have cells unless a larger one comes first": (
        [100],
        [1],
        [[Ask(100, 1), Ask(4), Ask(512), Ask(513), Ask(4)], []],
        [(100, 1, "arena"), (4, None, "cell"), (512, None, "cell"), (513, None, "scratch"), (4, None, "scratch")],
    ),
    "results in another order": (
        [100, 200, 300],
        [1],
        [[Ask(200, 2), Ask(300, 3), Ask(100, 1)], []],
        [(200, 2, "front"), (300, 3, "front"), (100, 1, "arena")],
    ),
    # cuDNN's backward: a result, a workspace for it, and the next result, smaller than the workspace was.
    "a large result in a freed workspace": (
        [100, LARGE],
        [1, 2],
        [[Ask(100, 1), Ask(LARGE + 600, None, 2), Ask(LARGE, 2)], []],
        [(100, 1, "arena"), (LARGE + 600, 2, "arena")],
    ),
    "what was made by empty comes first": (
        [100, LARGE],
        [1, 2],
        [[Ask(LARGE + 5, None, 1), Ask(LARGE, 2)], []],
        [(100, 1, "arena"), (LARGE + 5, 2, "arena")],
    ),
}


@pytest.mark.parametrize("case", PLACED)
def test_where_blocks_live(case: str) -> None:
    sizes, read, asks, expected = PLACED[case]
    made = program([8, *sizes], [([0], list(range(1, len(sizes) + 1))), (read, [])], [])
    layout = lay_out(made, plan(2), asks)
    assert homes(layout) == expected
    arena = {storage: nbytes for nbytes, storage, home in expected if home == "arena" and storage is not None}
    assert layout.arena == arena
    assert [one.nbytes for one in layout.sized(made).storages] == [
        arena.get(storage, nbytes) for storage, nbytes in enumerate([8, *sizes])
    ]


def test_skipped_calls_are_left_alone() -> None:
    made = program([8, 100, 200], [([0], [1]), ([1], [2])], [2])
    skipped = frozenset({made.calls[0].operator})
    layout = lay_out(made, plan(2), [[Ask(100, 1), Ask(64)], [Ask(200, 2), Ask(64)]], skip=skipped)
    assert layout.blocks[0] == ()
    assert layout.arena == {2: 200}


def test_a_storage_is_made_by_the_first_call_in_issue_order() -> None:
    made = program([8, 100], [([0], [1]), ([0], [1])], [1])
    layout = lay_out(made, Schedule("mine", (0, 0), (1, 0), ()))
    assert [len(blocks) for blocks in layout.blocks] == [0, 1]


@st.composite
def histories(draw: st.DrawFn) -> list[Ask]:
    """Allocations of one call, some of them freed again at some time."""
    sizes = st.one_of(st.integers(1, 4096), st.integers(SMALL_NBYTES + 1, 64 << 20))
    count = draw(st.integers(1, 8))
    asks = []
    for number in range(count):
        freed = draw(st.none() | st.integers(number + 1, count))
        asks.append(Ask(draw(sizes), None, freed, draw(st.sampled_from([0, 4]))))
    kept = [number for number, ask in enumerate(asks) if ask.freed_before is None]
    storages = {number: 1 + place for place, number in enumerate(kept)}
    return [replace(ask, storage=storages.get(number)) for number, ask in enumerate(asks)]


@given(histories())
def test_the_allocator_serves_every_request_from_a_block_that_can_hold_it(asks: list[Ask]) -> None:
    results = [ask for ask in asks if ask.storage is not None]
    kept, count = [ask.nbytes for ask in results], len(results)
    # Enough calls that ask for the same, so that their workspaces are worth being staggered.
    made = program(
        [8, *(kept * CALLS)],
        [([0], list(range(1 + call * count, 1 + (call + 1) * count))) for call in range(CALLS)],
        list(range(1, CALLS * count + 1)),
    )
    all_asks = [
        [ask if ask.storage is None else replace(ask, storage=ask.storage + call * count) for ask in asks]
        for call in range(CALLS)
    ]
    layout = lay_out(made, plan(CALLS), all_asks)
    blocks = layout.blocks[0]
    assert layout.chains in ((), (tuple(range(CALLS)),))
    assert sum(block.home == "staggered" for block in blocks) == len(layout.chains)
    # The pool as ``runtime.cuda.memory`` fills it. Small blocks are handed out by address, ascending.
    claim, pool = 0, []
    for block in blocks:
        small = block.nbytes <= SMALL_NBYTES
        if not small:
            claim = next_claim(block.nbytes, claim)
        pool.append((small, 0 if small else claim, block))
    free, held = list(range(len(pool))), {}
    for number, ask in enumerate(asks):
        for earlier, one in enumerate(asks[:number]):
            if one.freed_before == number:
                free.append(held.pop(earlier))
        small = ask.nbytes <= SMALL_NBYTES
        fits = [at for at in free if pool[at][0] is small and (small or pool[at][1] >= ask.nbytes)]
        at = min(fits, key=lambda at: (pool[at][1], at))
        free.remove(at)
        held[number] = at
        assert pool[at][2].nbytes >= ask.nbytes
        if ask.storage is not None:
            assert pool[at][2].storage == ask.storage
    order = {"front": 0, "arena": 1, "kept": 2, "cell": 3, "staggered": 4, "scratch": 5}
    small_homes = [order[block.home] for block in blocks if block.nbytes <= SMALL_NBYTES]
    assert small_homes == sorted(small_homes)
    assert small_homes.count(1) <= 1
    assert not any(block.home == "cell" and block.storage is not None for block in blocks), "results last"


def test_workspaces_with_counters_are_staggered_unless_something_is_in_the_way() -> None:
    size = 17
    made = program([8, *[100] * size], [([call], [call + 1]) for call in range(size)], [size])
    small, large = Ask(700, zeroed=4), Ask(LARGE, None, 2, zeroed=600)
    asks = [[Ask(100, call + 1), large if call % 2 else small] for call in range(size)]
    asks[4] = [Ask(100, 5), Ask(900), small]  # small blocks are handed out by address, and scratch lies above
    layout = lay_out(made, plan(size), asks)
    blocks = [layout.blocks[call][-1] for call in range(size)]
    assert [call for call in range(size) if blocks[call].home == "scratch"] == [4]
    assert layout.chains == ((0, 2, 6, 8, 10, 12, 14, 16), (1, 3, 5, 7, 9, 11, 13, 15))
    places = [(blocks[call].untouched, blocks[call].offset) for call in (16, 14, 0, 15, 1)]
    end = 7 * 512 + 1024  # of the first chain
    assert places == [(512, 0), (512, 512), (512, 7 * 512), (1024, end), (1024, end + 7 * 1024)]
    assert layout.staggered_nbytes == blocks[1].offset + -(-LARGE // 512) * 512
    assert layout.scratch == (0, 0, 0, 0, 2048, *[0] * 12)
    assert layout.workspaces == (0,) * size
    as_ever = lay_out(made, plan(size), asks, stagger=False)
    assert (as_ever.staggered_nbytes, as_ever.chains) == (0, ())
    assert as_ever.scratch[:6] == (1024, 0, 1024, 0, 2048, 0)
    assert [bool(nbytes) for nbytes in as_ever.workspaces] == [call % 2 == 1 for call in range(size)]


def test_a_workspace_whose_memory_a_result_gets_is_not_staggered() -> None:
    size = 8
    made = program([8, *[LARGE] * size], [([call], [call + 1]) for call in range(size)], [size])
    asks = [[Ask(LARGE, None, 1, zeroed=4), Ask(LARGE, call + 1)] for call in range(size)]
    assert {block.home for blocks in lay_out(made, plan(size), asks).blocks for block in blocks} == {"arena"}
