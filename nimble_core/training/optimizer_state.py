"""What a captured optimizer reads on the device: each parameter's state, and each group's learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from numbers import Real
from typing import Any

import torch

from nimble_core.torch_compat.dispatch import foreach_copy_
from nimble_core.torch_compat.unchanged import same_objects
from nimble_core.training.optimizer_forms import group_place
from nimble_core.utils.errors import InputError

__all__ = ["LearningRates", "OptimizerState", "layout_of"]


_Difference = tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]
"""A tensor of the user's state that is not ours: the user's entry, the name in it, our tensor, and theirs."""


class OptimizerState:
    """The state tensors that replays read and write, kept in step with ``optimizer.state``.

    Args:
        optimizer: the user's.
        parameters: those it updates.
        places: names of these, for errors.
        made: state of each parameter in the form that the captured step takes; its values do not matter. Taken one by
            one, so that tensors which the user's replace are gone before the next are made.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        places: Sequence[str],
        made: Iterable[dict[str, torch.Tensor]],
    ) -> None:
        self.recorded = False
        """Whether an update may have been recorded with ``tensors``: from then on they stay the same."""
        self.missing = frozenset[int]()
        """Positions of the parameters whose state ``optimizer.state`` did not hold at the last ``install``."""
        self._optimizer, self._parameters, self._places = optimizer, parameters, places
        # optimizer.state and copies of its entries, as they were after the last install.
        self._installed: tuple[Any, list[dict[str, Any]]] | None = None
        taken = []
        for at, kept in enumerate(made):
            _take_over(kept, self._differing(at, kept))
            taken.append(kept)
        self.tensors = tuple(taken)

    def follow(self) -> None:
        """Take over the user's tensors where they fit, or their values; ``optimizer.state`` stays as it is."""
        if self._unchanged():
            return
        for kept, differences in zip(self.tensors, self._differences(), strict=True):
            if self.recorded:
                _copy(differences)
            else:
                _take_over(kept, differences)

    def install(self) -> None:
        """Copy the user's values into our tensors, and put these into ``optimizer.state``."""
        if self._unchanged():
            return
        differences = list(chain.from_iterable(self._differences()))
        _copy(differences)
        for entry, key, ours, _ in differences:
            entry[key] = ours
        held = self._optimizer.state
        self.missing = frozenset(
            at for at, kept in enumerate(self.tensors) if kept and not _present(held.get(self._parameters[at]))
        )
        self._installed = held, list(map(dict, held.values()))

    def _unchanged(self) -> bool:
        """Whether ``optimizer.state`` holds what it held after the last ``install``."""
        if self._installed is None or self._installed[0] is not self._optimizer.state:
            return False
        return same_objects(list(self._optimizer.state.values()), self._installed[1])

    def _differences(self) -> list[list[_Difference]]:
        return [list(self._differing(at, kept)) for at, kept in enumerate(self.tensors)]

    def _differing(self, at: int, kept: Mapping[str, torch.Tensor]) -> Iterator[_Difference]:
        """Find where the user's state of a parameter has other tensors than ``kept``: nowhere if it has none yet."""
        held = self._optimizer.state.get(self._parameters[at])
        if held is None or not _present(held):
            return
        for key, ours in kept.items():
            theirs = held.get(key)
            if not isinstance(theirs, torch.Tensor):
                raise InputError(
                    f"the optimizer's state has no tensor {key}",
                    where=self._places[at],
                    fix="load a state that is complete",
                )
            if theirs.shape != ours.shape:
                what = f"{key} in the optimizer's state has shape {list(theirs.shape)}, not {list(ours.shape)}"
                raise InputError(what, where=self._places[at], fix="load the state of this model")
            if theirs is not ours:
                yield held, key, ours, theirs


def _take_over(kept: dict[str, torch.Tensor], differences: Iterable[_Difference]) -> None:
    """Make the user's tensors ours where they fit, copies of them where not."""
    for _, key, ours, theirs in list(differences):
        fits = layout_of(ours) == layout_of(theirs)
        kept[key] = theirs if fits else torch.empty_like(ours).copy_(theirs)


def _copy(differences: Sequence[_Difference]) -> None:
    if differences:
        with torch.no_grad():
            foreach_copy_([ours for _, _, ours, _ in differences], [theirs for _, _, _, theirs in differences])


def _present(held: Mapping[str, Any] | None) -> bool:
    return held is not None and any(value is not None for value in held.values())


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what has to be equal for two tensors to have the same bytes in the same places."""
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


class LearningRates:
    """Each group's learning rate, a scalar on the device that is written when the user's changes.

    They are float32, which CUDA's fused kernels take; float64 on the host, whose kernels read them as Python numbers,
    so that float64 parameters are updated as in eager.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        kind = torch.float64 if device.type == "cpu" else torch.float32
        self.tensors = tuple(torch.empty((), dtype=kind, device=device) for _ in optimizer.param_groups)
        self._written: list[float | None] = [None] * len(self.tensors)
        self.write(self.changed())

    def changed(self) -> list[tuple[int, float | torch.Tensor]]:
        """Return the groups whose rate has to be written, and with what: a tensor on a device always has to.

        Raises:
            InputError: a rate that is not one number.
        """
        changed: list[tuple[int, float | torch.Tensor]] = []
        for at, group in enumerate(self._optimizer.param_groups):
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                if rate.numel() != 1:
                    raise InputError(f"lr has {rate.numel()} elements", where=group_place(at), fix="one number")
                if rate.device.type != "cpu":
                    changed.append((at, rate))
                    continue
                rate = rate.item()
            if rate != self._written[at]:
                if not isinstance(rate, Real):
                    raise InputError(f"lr is {rate!r}, which is no number", where=group_place(at), fix="a float")
                changed.append((at, float(rate)))
        return changed

    def write(self, changed: Sequence[tuple[int, float | torch.Tensor]]) -> None:
        """Write what ``changed`` has found to the device."""
        with torch.no_grad():
            for at, rate in changed:
                if isinstance(rate, torch.Tensor):
                    self.tensors[at].copy_(rate.reshape(()))
                    self._written[at] = None
                else:
                    self.tensors[at].fill_(rate)
                    self._written[at] = rate
