"""Values that show what kernels do: weights and activations that are neither zero nor the same everywhere.

A model with random weights, a zero-initialised head or an empty cache computes nearly the same whatever it is given,
and so would wrong kernels. Here zeros become random numbers, all others are scaled at random, and what one kernel
hands to the next is replaced by fresh numbers of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from nimble_core.tracing.operator_traits import storage_address
from nimble_core.tracing.recording import Recording

__all__ = ["Copies", "StandIns", "fresh_like"]

_ZEROS_BECOME = 0.5
"""Standard deviation of what zeros become, of biases for one."""
_LARGE = 1e4
"""What is greater, or not finite, is a mask's, and stays."""


class _OnePerMemory:
    """Other tensors in place of tensors: views of one memory become views of one tensor.

    Args:
        make: from all elements of a memory, and a tensor that shows some of them, to what takes their place.
    """

    def __init__(self, make: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self._make = make
        self._bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what takes the place of a strided tensor that has elements."""
        key = (storage_address(tensor), tensor.dtype)
        if key not in self._bases:
            shown = tensor.detach()
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(shown.untyped_storage())
            self._bases[key] = self._make(whole, shown)
        return self._bases[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class StandIns:
    """Values for a model's parameters, buffers and constants, the same for all recordings of one model.

    Nothing of the model is written: stand-ins are copies.

    Args:
        seed: of the random numbers.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._places = _OnePerMemory(self._exercising)

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator for a device, which nobody else draws from."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the stand-in of a tensor."""
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or not tensor.numel():
            return tensor
        return self._places.of(tensor)

    def given(self, recording: Recording, folded: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return stand-ins for all that a recording is given, by slot.

        Args:
            recording: whose.
            folded: constants that were computed from stand-ins, by the address of those they replace.
        """
        return {
            slot: folded[storage_address(one)] if storage_address(one) in folded else self.of(one)
            for slot, one in recording.given.items()
        }

    def _exercising(self, whole: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
        """Return other values for all elements of one memory, of which ``shown`` is a window."""
        wide = whole.float() if whole.dtype.itemsize < 4 else whole
        generator = self.generator(whole.device)
        most = wide.abs().max()
        if not bool(torch.isfinite(most)) or float(most) > _LARGE:
            return whole.clone()
        if not float(most):
            size = _ZEROS_BECOME if shown.dim() < 2 else float(max(shown[0].numel(), 1)) ** -0.5
            # Of no sign: an optimizer takes roots of means of squares, which are zero at first.
            return torch.empty_like(wide).normal_(0.0, size, generator=generator).abs_().to(whole.dtype)
        return (wide * torch.empty_like(wide).uniform_(0.5, 1.5, generator=generator)).to(whole.dtype)


class Copies:
    """Copies of tensors, for one run to write.

    Args:
        dtype: what floating-point numbers become; None: they stay what they are.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._places = _OnePerMemory(lambda whole, _: self._copied(whole))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of a tensor."""
        whole = tensor.layout is torch.strided and tensor.numel()
        return self._places.of(tensor) if whole else self._copied(tensor.detach())

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        to = self._dtype if tensor.is_floating_point() else None
        return tensor.to(to or tensor.dtype, copy=True)


def fresh_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    """Return random numbers of the same kind: of the same signs, or shares of one; None where there is no such kind.

    Kinds matter to who reads them: logarithms and roots take no negative numbers. Whole numbers are counts, positions
    or masks, whatever their type, and say where others read: there are none like them.
    """
    low, high = (float(one) for one in torch.aminmax(tensor.float() if tensor.dtype.itemsize < 4 else tensor))
    if not (abs(low) < _LARGE and abs(high) < _LARGE) or bool((tensor == tensor.round()).all()):
        return None
    wide = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
    drawn = torch.empty(tensor.shape, dtype=wide, device=tensor.device)
    kinds: list[tuple[bool, Callable[[], torch.Tensor]]] = [
        (low >= 0 and high <= 1, lambda: drawn.uniform_(0.01, 0.99, generator=generator)),
        (low >= 0, lambda: drawn.normal_(generator=generator).abs_()),
        (high <= 0, lambda: drawn.normal_(generator=generator).abs_().neg_()),
        (True, lambda: drawn.normal_(generator=generator)),
    ]
    return next(make for fits, make in kinds if fits)().to(tensor.dtype)
