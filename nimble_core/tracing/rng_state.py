"""Random state that a model sets (``torch.manual_seed``, ``fork_rng``, ``Generator.set_state``): no call of a replay.

A replay draws on from wherever the last draw left off, so a model may change a generator's state by draws alone. Other
threads may draw from torch's own meanwhile, so what shows it is another seed, or a state that a draw has left behind;
where other threads set it, too, nothing tells. The second recording begins with seeds of ours, so that a seed shows
that was there before.

In a capture torch refuses to set a seed, unless to what it is. What puts a state back there without a seed is not seen.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable, Sequence

import torch

from nimble_core.tracing.provenance import warn

__all__ = ["OTHER_SEED", "RandomStates", "seed_otherwise", "state_of"]

OTHER_SEED = 20_001
_LOOKS, _LOOK_S = 400, 0.0005


def seed_otherwise(device: torch.device, generators: Iterable[torch.Generator]) -> None:
    """Seed torch's generator of ``device``, and those of ``generators``, the user's own, there, as no model would."""
    for number, one in enumerate(generators, 1):
        if one.device.type == device.type:  # what a host draws for a GPU's model is a constant of it
            _seed(one, OTHER_SEED + number)  # each another: they are told apart by their states
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(OTHER_SEED)
    else:
        _seed(torch.default_generator, OTHER_SEED)


def _seed(generator: torch.Generator, seed: int) -> None:
    generator.manual_seed(seed)
    if generator.device.type == "cpu":
        torch.rand((), generator=generator)  # to be seeded so again shows as a state that was left behind


def state_of(generator: torch.Generator | None) -> torch.Tensor:
    """State of a generator on the host; None is torch's own."""
    return (generator or torch.default_generator).get_state()


class RandomStates:
    """Follows generators on the host through the draws of a model that began after ``seed_otherwise``.

    Args:
        own: those of the user's that the model draws from.
    """

    def __init__(self, own: Sequence[torch.Generator]) -> None:
        self._generators = [torch.default_generator, *own]
        self._seeds = {one.initial_seed() for one in self._generators}
        self._shared = False
        self._left_behind = {_bytes(torch.Generator().manual_seed(seed).get_state()) for seed in self._seeds}

    def follow(self, generator: torch.Generator | None, before: torch.Tensor) -> bool:
        """Note a draw from a generator in the state ``before``. False if the model has set that."""
        one, state = generator or torch.default_generator, _bytes(before)
        known = one.initial_seed() in self._seeds and state not in self._left_behind
        self._left_behind.add(state)
        return known or (generator is None and self._others_set_it())

    def settled(self) -> bool:
        """Whether no generator has been given another seed, or a state that a draw has left behind."""
        changed = [
            one
            for one in self._generators
            if one.initial_seed() not in self._seeds or _bytes(one.get_state()) in self._left_behind
        ]
        return not changed or (changed == [torch.default_generator] and self._others_set_it())

    def _others_set_it(self) -> bool:
        self._shared = self._shared or _set_by_others()  # found once it stays so: looking sets another seed, too
        return self._shared


def _set_by_others() -> bool:
    """Whether torch's own state is set while this thread does not: then nothing tells whether a model does as well."""
    if threading.active_count() < 2:
        return False
    for look in range(_LOOKS):
        torch.default_generator.manual_seed(OTHER_SEED + look)
        time.sleep(_LOOK_S)
        if torch.initial_seed() != OTHER_SEED + look:
            warn(
                "other threads set torch's random state while a model was recorded: whether the model does, too, which "
                "a replay would not repeat, was not seen"
            )
            return True
    return False


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())
