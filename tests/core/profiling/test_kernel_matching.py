"""Which activity was which node: by id, and what follows for timeline and costs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nimble_core.ir.occupancy import Multiprocessors
from nimble_core.ir.schedule import Schedule
from nimble_core.ir.timeline import SelfCheck
from nimble_core.profiling.cupti import Activity
from nimble_core.profiling.kernel_matching import Told, observation, tell_by_id
from nimble_core.scheduling.verify_capture import RawGraph

GPU = Multiprocessors(132, 2048, 65536, 233472)
KERNELS = ("kernel",) * 4
DIAMOND = RawGraph((10, 11, 12, 13), KERNELS, ((0, 1), (0, 2), (1, 3), (2, 3)), (0, 1, 2, 3))
PLAN = Schedule("mine", (0, 0, 1, 0), (0, 1, 2, 3), ((0, 2), (2, 3)))


def ran(name: str, start: int, end: int, *, node: int = -1, stream: int = 7) -> Activity:
    return Activity("kernel", name, start, end, stream, node, (8, 1, 1), (64, 1, 1), 32)


def seen_as(told: Told, replay: int = 0) -> dict[int, str]:
    return {node: runs[replay].name for node, runs in told.runs.items()}


def made(told: Told, raw: RawGraph = DIAMOND, plan: Schedule = PLAN, replays: int = 1, **more: object):
    given_ = {"clock": "CUPTI activity", "profiled_ns": 0.0, "unprofiled_ns": 90.0, "gpu": GPU} | more
    return observation(told, raw, plan, replays, **given_)  # type: ignore[arg-type]


DIAMOND_RUN = [
    ran("a", 100, 110, node=0),
    ran("b", 112, 140, node=2),
    ran("c", 113, 130, node=3, stream=9),
    ran("d", 142, 150, node=4),
]
IDS = {0: 0, 2: 1, 3: 2, 4: 3}


def test_by_id_each_kernel_is_its_call_on_its_planned_stream() -> None:
    told = tell_by_id(DIAMOND_RUN, DIAMOND, IDS, 1)
    assert told.check == SelfCheck(4, 4, "graph node id")
    seen = made(told)
    spans = [(span.lane, span.start_ns, span.end_ns, span.call) for span in seen.timeline.spans]
    assert spans == [(0, 0.0, 10.0, 0), (0, 12.0, 40.0, 1), (1, 13.0, 30.0, 2), (0, 42.0, 50.0, 3)]
    assert seen.timeline.streams == (7, 7, 9, 7)
    assert len(seen.timeline.spans) == 4
    assert [kernel.node for kernel in seen.costs.kernels] == [0, 2, 3, 4]
    assert seen.timeline.reliable
    assert seen.timeline.note == ""
    assert seen.costs.ns == (10.0, 28.0, 17.0, 8.0)
    assert seen.costs.source == "CUPTI, kernels of 1 replays of policy mine"
    assert (seen.timeline.profiled_ns, seen.timeline.unprofiled_ns) == (50.0, 90.0)


def test_what_was_launched_ahead_begins_when_what_it_waits_for_has_ended() -> None:
    raw = replace(DIAMOND, ahead=((0, 1), (2, 3)))
    early = [DIAMOND_RUN[0], ran("b", 104, 140, node=2), *DIAMOND_RUN[2:]]
    spans = made(tell_by_id(early, raw, IDS, 1), raw).timeline.spans
    assert [(span.call, span.start_ns, span.end_ns) for span in spans] == [
        (0, 0.0, 10.0),
        (1, 10.0, 40.0),
        (2, 13.0, 30.0),
        (3, 42.0, 50.0),
    ]


def test_a_node_missed_in_one_replay_makes_it_unreliable() -> None:
    again = [replace(one, start_ns=one.start_ns + 500, end_ns=one.end_ns + 500) for one in DIAMOND_RUN]
    told = tell_by_id(DIAMOND_RUN + again[:-1], DIAMOND, IDS, 2)
    assert told.check == SelfCheck(4, 3, "graph node id")
    seen = made(told, replays=2)
    assert not seen.timeline.reliable
    assert not seen.costs.reliable
    assert seen.timeline.note == "3 of 4 nodes seen in every replay"


def test_kernels_of_unknown_nodes_make_it_unreliable_and_work_outside_graphs_does_not() -> None:
    for outside in (ran("fill of the random state", 90, 95), ran("fill of the random state", 151, 155)):
        told = tell_by_id(sorted([outside, *DIAMOND_RUN], key=lambda one: one.start_ns), DIAMOND, IDS, 1)
        assert told.check == SelfCheck(4, 4, "graph node id")
        assert seen_as(told) == dict(enumerate("abcd"))
    told = tell_by_id([*DIAMOND_RUN, ran("x", 160, 161, node=77)], DIAMOND, IDS, 1)
    assert told.check.unexpected == 1
    assert made(told).timeline.note == "1 kernels or copies match no node"
    assert not made(told).timeline.reliable


def test_the_median_replay_is_drawn_and_medians_are_the_costs() -> None:
    one = RawGraph((5,), ("kernel",), (), (0,))
    runs = [ran("a", at, at + long, node=1) for at, long in ((0, 10), (100, 30), (200, 20))]
    seen = made(tell_by_id(runs, one, {1: 0}, 3), one, Schedule("single", (0,), (0,), ()), 3)
    assert seen.timeline.length_ns == 20
    assert seen.costs.ns == (20.0,)


@st.composite
def replayed(draw: st.DrawFn) -> tuple[RawGraph, list[Activity], dict[int, int]]:
    """A graph, and one replay of it that keeps its order; ids are twice the nodes."""
    size = draw(st.integers(1, 9))
    edges = [(u, v) for v in range(size) for u in range(v) if draw(st.integers(0, 3)) == 0]
    names = [draw(st.sampled_from("ab")) for _ in range(size)]
    end: list[int] = []
    runs = []
    for node in range(size):
        start = max([end[u] for u, v in edges if v == node], default=0) + draw(st.integers(0, 5))
        end.append(start + draw(st.integers(1, 9)))
        runs.append(ran(names[node], start, end[node], node=2 * node, stream=draw(st.integers(0, 2))))
    raw = RawGraph(tuple(range(size)), ("kernel",) * size, tuple(sorted(edges)), tuple(range(size)))
    return raw, sorted(runs, key=lambda one: (one.start_ns, one.end_ns)), {2 * n: n for n in range(size)}


@given(replayed(), st.integers(1, 3), st.lists(st.integers(0, 3000), max_size=4))
def test_ids_are_always_right_whatever_runs_outside_the_graph(
    case: tuple[RawGraph, list[Activity], dict[int, int]], replays: int, outside: list[int]
) -> None:
    raw, runs, ids = case
    seen = [replace(r, start_ns=r.start_ns + 999 * k, end_ns=r.end_ns + 999 * k) for k in range(replays) for r in runs]
    seen += [ran("fill of the random state", start, start + 1) for start in outside]
    told = tell_by_id(sorted(seen, key=lambda one: (one.start_ns, one.end_ns)), raw, ids, replays)
    size = len(raw.nodes)
    assert told.check == SelfCheck(size, size, "graph node id")
    assert all(one.node == 2 * node for node, of in told.runs.items() for one in of)
    drawn = made(told, raw, Schedule("mine", (0,) * size, tuple(range(size)), ()), replays)
    assert len(drawn.timeline.spans) == len(ids)
    assert [kernel.node for kernel in drawn.costs.kernels] == sorted(ids)
