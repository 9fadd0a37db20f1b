"""Workspaces that begin with counters: nothing before a call reaches its counters."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.liveness import happens_before
from nimble_core.scheduling.workspace_zeroing import Place, staggered

ENOUGH = 8
ROOM = 40 << 20
Workspaces = dict[int, tuple[int, int]]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, Workspaces]:
    """Calls on a few streams in any order, with waits, and the workspaces of those that count."""
    size = draw(st.integers(0, 40))
    streams = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    order = draw(st.permutations(range(size)))
    places = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12))
    waits = [(order[u], order[v]) for u, v in places if u < v < size and streams[order[u]] != streams[order[v]]]
    sizes = st.integers(1, 9000) | st.just(1 << 20) | st.just(32 << 20)
    counting = [call for call in range(size) if draw(st.sampled_from([True, True, True, False]))]
    workspaces = {}
    for call in counting:
        nbytes = draw(sizes)
        workspaces[call] = nbytes, min(nbytes, draw(st.sampled_from([1, 4, 16, 700])))
    return Schedule("any", tuple(streams), tuple(order), tuple(sorted(set(waits)))), workspaces


def comes_before(schedule: Schedule) -> list[set[int]]:
    """All calls that happen before each."""
    found: list[set[int]] = [set() for _ in schedule.order]
    for position, direct in enumerate(happens_before(schedule)):
        for earlier in direct:
            call, one = schedule.order[position], schedule.order[earlier]
            found[call] |= found[one] | {one}
    return found


@given(schedules(), st.sampled_from([1, 64, 512]))
def test_no_call_reaches_what_a_later_one_counts_in(made: tuple[Schedule, Workspaces], alignment: int) -> None:
    schedule, workspaces = made
    chains = staggered(schedule, workspaces, alignment)
    before = comes_before(schedule)
    for chain in chains:
        assert len(chain) >= ENOUGH
        assert all(one in before[other] for one, other in pairwise(chain))
    places = {call: place for chain in chains for call, place in chain.items()}
    assert len(places) == sum(map(len, chains))
    reach = {call: range(place.offset, place.offset + workspaces[call][0]) for call, place in places.items()}
    assert max((one.stop for one in reach.values()), default=0) <= ROOM
    for call, place in places.items():
        assert workspaces[call][1] <= place.untouched
        assert place.offset % alignment == 0
        for other, beside in reach.items():
            if other == call or beside.stop <= reach[call].start or beside.start >= reach[call].stop:
                continue
            assert other in before[call] or call in before[other], "they use the same bytes at a time"
            if other in before[call]:
                assert beside.start >= place.offset + place.untouched


def made(calls: int, streams: int = 1, nbytes: int = 9000) -> tuple[dict[int, Place], ...]:
    schedule = Schedule("mine", tuple(call % streams for call in range(calls)), tuple(range(calls)), ())
    return staggered(schedule, dict.fromkeys(range(calls), (nbytes, 4)), 512)


def test_few_of_them_stay_as_they_are() -> None:
    assert [list(chain) for chain in made(ENOUGH)] == [list(range(ENOUGH))]
    assert made(ENOUGH - 1) == ()
    (chain,) = made(2 * ENOUGH - 1, streams=2)
    assert list(chain) == list(range(0, 2 * ENOUGH, 2)), "too few on the other stream"


def test_large_ones_have_to_be_worth_their_memory() -> None:
    assert made(2 * ENOUGH, nbytes=32 << 20) == ()
    assert sum(map(len, made(2 * ENOUGH + 1, nbytes=32 << 20))) == 2 * ENOUGH + 1


def test_chains_go_from_stream_to_stream_where_calls_wait() -> None:
    size = 2 * ENOUGH
    waits = tuple(pairwise(range(size)))
    schedule = Schedule("mine", tuple(call % 2 for call in range(size)), tuple(range(size)), waits)
    (chain,) = staggered(schedule, dict.fromkeys(range(size), (1024, 4)), 512)
    assert list(chain) == list(range(size))
