"""Random state: put back what a preparation draws, and detect models that set it (``torch.manual_seed``).

All threads share the generators of Python, numpy and torch. All are put back after each run: numbers that other threads
draw meanwhile may be drawn again, and count as drawn by the model.

A replay continues from wherever the last draw left off, so a model may change a generator by draws alone. The second
recording of a model that draws starts from seeds of its own: an unknown seed, or a state that an earlier draw has
already left, was therefore set by somebody. A capture refuses to set a seed unless it is the current one.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch

__all__ = ["TORCH", "Draws", "RandomStates", "random_state_kept", "seed_otherwise", "state_of"]

PYTHON, NUMPY, TORCH = "Python's random", "numpy.random", "torch"
_HOST = "torch on the host"
"""Torch's generator on the host, where ``TORCH`` is a GPU's."""

_seeds = count(20_001)  # each is used once, so that no two recordings draw the same


class _Generator(NamedTuple):
    """A generator that all threads share; ``encode`` turns its state into bytes, to compare."""

    get: Callable[[], Any]
    put: Callable[[Any], object]
    encode: Callable[[Any], bytes]
    seed: Callable[[int], object]


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
    """What is drawn from the generators that all threads share, since this was made."""

    def __init__(self, device: torch.device) -> None:
        self._generators = _shared(device)
        self._before = {name: one.get() for name, one in self._generators.items()}
        self._seed = torch.initial_seed()

    def drawn(self) -> list[str]:
        """Return which of Python's and numpy's generators were drawn from, by name."""
        found = ((name, self._generators[name]) for name in (PYTHON, NUMPY) if name in self._generators)
        return [name for name, one in found if one.encode(one.get()) != one.encode(self._before[name])]

    def seed_set(self) -> bool:
        """Whether torch's generator on the host has another seed."""
        return torch.initial_seed() != self._seed

    def end(self) -> None:
        """Put all back."""
        for name, one in self._generators.items():
            one.put(self._before[name])


@contextmanager
def random_state_kept(device: torch.device, generators: Iterable[torch.Generator] = ()) -> Iterator[Draws]:
    """Put back, at the end, the generators that all threads share, and the user's own ``generators``.

    Args:
        device: the device that torch draws on.
        generators: the user's own.
    """
    own = [(one, one.get_state()) for one in generators]
    drawn = Draws(device)
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
