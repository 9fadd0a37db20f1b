"""Random state: put back what a preparation draws, and detect models that set it (``torch.manual_seed``).

All threads share the generators of Python, numpy and torch. In a process of one thread, all are put back after each
run. Beside other threads, a generator is put back only if the model draws from it; numbers that others draw from it
during the run may then be drawn again. Torch's draws are calls, and so are known. For the rest, a generator counts as
drawn from by the model if it moves during a run and then stands still for as long as the run took: while other threads
draw from it all the time, nothing shows that the model does as well.

A replay continues from wherever the last draw left off, so a model may change a generator by draws alone. The second
recording of a model that draws starts from seeds of its own: an unknown seed, or a state that an earlier draw has
already left, was therefore set by somebody. A capture refuses to set a seed unless it is the current one.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from time import perf_counter, sleep
from typing import Any, NamedTuple

import torch

__all__ = ["TORCH", "Draws", "RandomStates", "alone", "random_state_kept", "seed_otherwise", "state_of"]

PYTHON, NUMPY, TORCH = "Python's random", "numpy.random", "torch"
_HOST = "torch on the host"
"""Torch's generator on the host, where ``TORCH`` is a GPU's."""

_seeds = count(20_001)  # each is used once, so that no two recordings draw the same
_POLL_S, _SHORTEST_WATCH_S, _LONGEST_WATCH_S = 0.0005, 0.05, 0.5


class _Generator(NamedTuple):
    """A generator that all threads share; ``encode`` turns its state into bytes, to compare."""

    get: Callable[[], Any]
    put: Callable[[Any], object]
    encode: Callable[[Any], bytes]
    seed: Callable[[int], object]


def alone() -> bool:
    """Whether this is the only thread, so that all that is drawn is its own."""
    return threading.active_count() < 2


def _shared(device: torch.device) -> dict[str, _Generator]:
    """Return the generators that all threads share, by name."""
    host = torch.default_generator
    found = {
        PYTHON: _Generator(random.getstate, random.setstate, pickle.dumps, random.seed),
        TORCH: _Generator(host.get_state, host.set_state, _bytes, partial(_seed, host)),
    }
    if numpy := sys.modules.get("numpy"):
        one = numpy.random
        found[NUMPY] = _Generator(one.get_state, one.set_state, pickle.dumps, one.seed)
    if device.type == "cuda":
        get, put = (partial(one, device=device) for one in (torch.cuda.get_rng_state, torch.cuda.set_rng_state))
        found[_HOST] = found[TORCH]
        found[TORCH] = _Generator(get, put, _bytes, partial(_seed_gpu, device))
    return found


class Draws:
    """What a run draws from the generators that all threads share."""

    def __init__(self, device: torch.device, known: Collection[str] | None) -> None:
        self.alone = alone()
        self._known = known
        self._generators = _shared(device)
        self._before = {name: one.get() for name, one in self._generators.items()}
        self._seed, self._start = torch.initial_seed(), perf_counter()
        self._told: set[str] = set()
        self._still: dict[str, bool] = {}

    def told(self, name: str) -> None:
        """Note that the run is about to draw from a generator."""
        self._told.add(name)

    def drawn(self) -> list[str]:
        """Return which of Python's and numpy's generators the run has drawn from, by name."""
        return [name for name in (PYTHON, NUMPY) if name in self._generators and self._draws_from(name)]

    def seed_set(self) -> bool:
        """Whether the run has given torch's generator on the host another seed."""
        name = _HOST if _HOST in self._generators else TORCH
        return torch.initial_seed() != self._seed and self._draws_from(name)

    def end(self) -> None:
        """Put back the generators that the run draws from; with no other thread, all of them."""
        for name, one in self._generators.items():
            if self.alone or (self._draws_from(name) if self._known is None else name in self._known):
                one.put(self._before[name])

    def _draws_from(self, name: str) -> bool:
        if name in self._told:
            return True
        one = self._generators[name]
        if one.encode(one.get()) == one.encode(self._before[name]):
            return False
        if not self.alone and name not in self._still:
            self._still[name] = _stands_still(one, perf_counter() - self._start)
        return self.alone or self._still[name]


def _stands_still(one: _Generator, seconds: float) -> bool:
    """Whether other threads leave a generator alone for about as many seconds."""
    before = one.encode(one.get())
    end = perf_counter() + min(max(seconds, _SHORTEST_WATCH_S), _LONGEST_WATCH_S)
    while perf_counter() < end:
        sleep(_POLL_S)
        if one.encode(one.get()) != before:
            return False
    return True


@contextmanager
def random_state_kept(
    device: torch.device, generators: Iterable[torch.Generator] = (), draws: Collection[str] | None = ()
) -> Iterator[Draws]:
    """Put back, at the end, the generators that a run inside draws from.

    Args:
        device: the device that torch draws on.
        generators: the user's own generators; always put back.
        draws: names of the shared generators that the run draws from (``Recording.draws``); None to find out.
    """
    own = [(one, one.get_state()) for one in generators]
    drawn = Draws(device, draws)
    with ExitStack() as stack:
        for one, state in own:
            stack.callback(one.set_state, state)
        stack.callback(drawn.end)
        yield drawn


def seed_otherwise(device: torch.device, generators: Iterable[torch.Generator], draws: Collection[str]) -> None:
    """Seed what a model draws from as no model would, so that branches on it and seeds that it sets show."""
    for one in generators:
        if one.device.type == device.type:  # what a host draws for a GPU's model is a constant of it
            _seed(one, next(_seeds))
    for name, shared in _shared(device).items():
        if name in draws:
            shared.seed(next(_seeds))


def _seed(generator: torch.Generator, seed: int) -> None:
    generator.manual_seed(seed)
    if generator.device.type == "cpu":
        # Draw once: a model that sets the current seed again then sets a state that a draw has left.
        torch.rand((), generator=generator, device="cpu")


def _seed_gpu(device: torch.device, seed: int) -> None:
    with torch.cuda.device(device):
        torch.cuda.manual_seed(seed)


def state_of(generator: torch.Generator | None) -> torch.Tensor:
    """Return the state of a generator on the host; None is torch's own."""
    return (generator or torch.default_generator).get_state()


class RandomStates:
    """Follows generators on the host through the draws of a run that began after ``seed_otherwise``."""

    def __init__(self, own: Sequence[torch.Generator]) -> None:
        self._generators = [torch.default_generator, *own]
        self._seeds = {one.initial_seed() for one in self._generators}
        self._left_behind = {_bytes(torch.Generator().manual_seed(seed).get_state()) for seed in self._seeds}

    def follow(self, generator: torch.Generator | None, before: torch.Tensor) -> bool:
        """Note a draw from a generator in the state ``before``. Return False if that state was set."""
        state = _bytes(before)
        known = (generator or torch.default_generator).initial_seed() in self._seeds and state not in self._left_behind
        self._left_behind.add(state)
        return known

    def settled(self) -> bool:
        """Whether no generator has an unknown seed, or a state that a draw has left behind."""
        return all(
            one.initial_seed() in self._seeds and _bytes(one.get_state()) not in self._left_behind
            for one in self._generators
        )


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())
