import itertools

import pytest

from benchmarks import measure


class Graph:  # takes so long on a device whose clock stands still otherwise
    device_ms = 0.0

    def __init__(self, us):
        self.us = us

    def replay(self):
        Graph.device_ms += self.us / 1e3


class Event:
    def record(self):
        self.at_ms = Graph.device_ms

    def elapsed_time(self, later):
        return later.at_ms - self.at_ms


def test_device_time_is_that_of_the_graphs_which_one_call_replays():
    first, second, original = Graph(30.0), Graph(12.5), Graph.replay
    replay, graphs = measure.replayed(lambda: [first.replay(), second.replay(), first.replay()], Graph)
    assert (graphs, Graph.replay) == (3, original)
    assert measure.device_samples(replay, lambda: None, Event) == pytest.approx([72.5] * measure.DEVICE_BLOCKS)


def test_ways_are_timed_in_turn_each_after_an_untimed_call_of_the_same():
    order = []
    ways = {
        name: (lambda name=name: order.append(name), lambda name=name: order.append(name.upper()), True)
        for name in "ab"
    }
    found = measure.take_times(ways, cuda=False)
    assert order[:16] == [*"aAaAbBbB"] * 2
    assert {name: len(one["latency_us"]) for name, one in found.items()} == dict.fromkeys("ab", measure.SAMPLES)
    assert set(found["a"]) == {"latency_us", "throughput_us"}, "nothing is said of a GPU that is not there"
    assert order.count("a") == 2 * measure.SAMPLES + len(found["a"]["throughput_us"]) * measure.CALLS


def test_graphs_that_need_their_call_are_not_replayed_without_it(monkeypatch):
    def refuse():
        raise AssertionError("replayed")

    monkeypatch.setattr(measure, "replayed", lambda call: (refuse, 2))
    found = measure.take_times({"a": (lambda: None, lambda: None, False)}, cuda=True, seconds=0.02)["a"]
    assert found["graphs"] == 2
    assert set(found) == {"latency_us", "throughput_us", "host_us", "graphs"}


def test_an_uncertain_latency_is_measured_again_with_pauses(monkeypatch):
    """A host at half its speed for a while says little about the median, however many samples follow one another."""
    way = (lambda: None, lambda: None, True)
    for speeds, again in (([1.0], False), ([1.0] * 200 + [2.0] * 200, True)):
        taken = itertools.cycle(speeds)
        monkeypatch.setattr(measure, "_pair", lambda *_, taken=taken, **__: (us := next(taken) * 1e3, us))
        pauses = []
        monkeypatch.setattr(measure.time, "sleep", pauses.append)
        found = measure.take_times({"a": way}, cuda=False, seconds=0.02)["a"]
        assert bool(pauses) is again
        assert again or len(found["latency_us"]) == measure.SAMPLES
        assert not again or len(found["latency_us"]) % measure.BATCH == 0
