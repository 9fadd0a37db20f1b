"""Have the values changed that constants were folded from?

Replays read parameters live, but not constants that were computed from them ahead (``folded_weights``). Four signs tell
that these are stale, each of which misses something: version counters, which in-place operators raise; steps of
optimizers, of which the fused ones raise none; replays that write; and counters of neighbouring buffers
(``num_batches_tracked``), since batch norm writes its running statistics without raising theirs. Writes that show
nowhere (through ``.data``, numpy, DLPack, a CUDA graph) have to be told by ``doubt``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence, Set
from operator import attrgetter

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from nimble_core.guards.reached_modules import storage_of
from nimble_core.torch_compat.dispatch import no_torch_function
from nimble_core.torch_compat.unchanged import passes
from nimble_core.utils.locks import free_after_fork

__all__ = ["FoldedValues", "announce"]

_version = attrgetter("_version")


class FoldedValues:
    """The values of the tensors that constants were folded from. They count as changed until the first ``folding``.

    Args:
        sources: name and tensor of each parameter and buffer that constants were folded from.
        modules: the modules that a run calls.
    """

    def __init__(self, sources: Sequence[tuple[str, torch.Tensor]], modules: Iterable[torch.nn.Module]) -> None:
        self.folds = 0
        """How many times folding was begun."""
        self.blind = tuple(name for name, tensor in sources if tensor.is_inference())
        """Sources without a version counter: tensors made under ``inference_mode``."""
        self._storages = {storage_of(tensor) for _, tensor in sources}
        self._counted = _counted([tensor for _, tensor in sources], self._storages, modules)
        self._passes = passes()
        self._seen: list[int] = []
        self._doubted = bool(sources)
        if sources:
            _follow_writes(self)

    def stale(self) -> bool:
        """Whether a source was written since the last ``folding``, as far as that shows. Compiled, 0.03 µs a source."""
        with no_torch_function():
            return self._doubted or not self._passes.same_versions(self._counted, self._seen)

    def doubt(self) -> None:
        """Let the sources count as changed."""
        self._doubted = bool(self._storages)

    def folding(self) -> None:
        """Remember the sources as they are; to be called just before constants are computed from them."""
        # Counted first: who ran on the old constants, and now finds nothing stale, sees that they were folded since.
        self.folds += 1
        self._doubted = False
        self._seen = list(map(_version, self._counted))

    def written(self, memory: Set[int]) -> None:
        """Doubt the sources if one is at one of these addresses, which were written."""
        if not self._doubted:
            self._doubted = not self._storages.isdisjoint(memory)


def _counted(
    sources: Sequence[torch.Tensor], storages: set[int], modules: Iterable[torch.nn.Module]
) -> list[torch.Tensor]:
    """Return the tensors whose version counters tell of changed sources.

    Of the model's tensors, those are the ones on a source's memory, with the buffers beside such a buffer. Sources that
    are not the model's count themselves.
    """
    if not sources:
        return []
    found: dict[int, torch.Tensor] = {}
    owned: set[int] = set()
    for module in modules:
        for table in (module._parameters, module._buffers):
            held = [one for one in table.values() if one is not None]
            on = [one for one in held if one.layout is torch.strided and storage_of(one) in storages]
            owned |= {storage_of(one) for one in on}
            beside = held if on and table is module._buffers else on
            found |= {id(one): one for one in beside}
    found |= {id(one): one for one in sources if storage_of(one) not in owned}
    return [tensor for tensor in found.values() if not tensor.is_inference()]


_lock = free_after_fork(threading.Lock())
_followers: weakref.WeakSet[FoldedValues] = weakref.WeakSet()
_hooked = False


def announce(memory: Set[int], *, by: FoldedValues | None = None) -> None:
    """Tell all, but who wrote, that storages at these addresses were written past version counters."""
    if _followers:
        with _lock:
            followers = list(_followers)
        for one in followers:
            if one is not by:
                one.written(memory)


def _follow_writes(values: FoldedValues) -> None:
    """Tell ``values`` of every optimizer step from now on, for as long as it lives."""
    global _hooked
    with _lock:
        _followers.add(values)
        if not _hooked:
            register_optimizer_step_post_hook(_after_step)
            _hooked = True


def _after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    if _followers:
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        announce({storage_of(parameter) for parameter in held if parameter.layout is torch.strided})
