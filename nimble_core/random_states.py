"""Random state that a model sets (``torch.manual_seed``, ``fork_rng``, ``Generator.set_state``): no call of a replay.

A replay draws on from wherever the last draw left off, so between draws nothing else may change a generator's state.
On the host that is looked at. In a capture torch refuses to set a seed, unless to what it is; so the second recording
begins with other seeds than the first. What puts a state back there without a seed is not seen.
"""

from __future__ import annotations

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
    return torch.get_rng_state() if generator is None else generator.get_state()


class RandomStates:
    """Follows the states of generators on the host through the draws of a model.

    Operators are given a generator as a new object each time, so the user's own are told apart by their states.

    Args:
        own: those of the user's that the model draws from, in states that nothing else has.
    """

    def __init__(self, own: Sequence[torch.Generator]) -> None:
        self._own = own
        self._default = torch.get_rng_state()
        self._untouched = [one.get_state() for one in own]
        self._left: list[torch.Tensor] = []

    def follow(self, generator: torch.Generator | None, before: torch.Tensor, after: torch.Tensor) -> bool:
        """Note a draw. False if the state before it is none that a draw, or the beginning, has left."""
        default, left = torch.equal(before, self._default), _among(before, self._left)
        if default:
            self._default = after  # the user may give torch's own, too
        if left or generator is not None:
            self._left = [*(one for one in self._left if not torch.equal(one, before)), after]
        return default or (generator is not None and (left or _among(before, self._untouched)))

    def skip(self) -> None:
        """Take torch's own state as it is: an operator that is not torch's may have drawn from it."""
        self._default = torch.get_rng_state()

    def settled(self) -> bool:
        """Whether all are in the states in which the last draws left them."""
        return torch.equal(torch.get_rng_state(), self._default) and all(
            _among(one.get_state(), self._left) for one in self._own
        )


def _among(state: torch.Tensor, states: Iterable[torch.Tensor]) -> bool:
    return any(torch.equal(state, one) for one in states)
