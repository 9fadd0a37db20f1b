"""Random state that a model sets (``torch.manual_seed``, ``fork_rng``, ``Generator.set_state``): no call of a replay.

A replay draws on from wherever the last draw left off, so a model may change a generator's state by draws alone. Other
threads may draw from torch's own meanwhile, so what shows it is another seed, or a state that a draw has left behind.
The second recording begins with seeds of ours, so that a seed shows that was there before, too.

In a capture torch refuses to set a seed, unless to what it is. What puts a state back there without a seed is not seen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch

__all__ = ["RandomStates", "seed_otherwise", "state_of"]

_SEED = 20_001


def seed_otherwise(device: torch.device, generators: Iterable[torch.Generator]) -> None:
    """Seed torch's generator of ``device``, and those of ``generators``, the user's own, there, as no model would."""
    for number, one in enumerate(generators, 1):
        if one.device.type == device.type:  # what a host draws for a GPU's model is a constant of it
            one.manual_seed(_SEED + number)  # each another: they are told apart by their states
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(_SEED)
    else:
        torch.default_generator.manual_seed(_SEED)


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
        self._left_behind: set[bytes] = set()

    def follow(self, generator: torch.Generator | None, before: torch.Tensor) -> bool:
        """Note a draw from a generator in the state ``before``. False if the model has set that."""
        state = _bytes(before)
        known = (generator or torch.default_generator).initial_seed() in self._seeds and state not in self._left_behind
        self._left_behind.add(state)
        return known

    def settled(self) -> bool:
        """Whether no generator has been given another seed, or a state that a draw has left behind."""
        return all(
            one.initial_seed() in self._seeds and _bytes(one.get_state()) not in self._left_behind
            for one in self._generators
        )


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())
