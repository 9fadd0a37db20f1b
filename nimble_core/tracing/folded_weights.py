"""Constants that are computed from a model's weights, and how to compute them again in place.

A rewritten program may read tensors that no model has: a convolution's weight with the batch norm behind it folded in,
query, key and value weights side by side, a weight in another memory layout. They are right for the values that the
parameters had; ``folded_values`` notices when these change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from nimble_core.tracing.recording import Held, issuing
from nimble_core.utils.errors import DeviceError, InputError

__all__ = ["Folded", "with_held"]


@dataclass(frozen=True, slots=True)
class Folded:
    """Constants of an engine that depend on parameters and buffers.

    Args:
        compute: every constant anew from the live parameters, in the order of ``constants``; or from what a function
            gives in the place of each, its only argument. Draws no random numbers and writes nothing.
        constants: tensors that the engine reads; their memory stays where it is. No two share memory.
        sources: name and tensor of every parameter and buffer that ``compute`` reads, or an alias of it. One that is no
            tensor of the model's must share its version counter (``detach()`` in plain code, not ``.data``). The
            program must write none of them.
        held: reads on the host, which have to go on finding what they found. Their sources are among ``sources``.
    """

    compute: Callable[..., Sequence[torch.Tensor]]
    constants: tuple[torch.Tensor, ...]
    sources: tuple[tuple[str, torch.Tensor], ...]
    held: tuple[Held, ...] = ()

    def refresh(self) -> None:
        """Compute the constants anew and copy them into their memory, on the current stream.

        Nothing is written before all are computed and found to fit; what that took is free again at the end. No replay
        may run meanwhile.

        Raises:
            InputError: there are more or fewer constants than there were, or one has another shape or dtype; or a read
                on the host finds something else.
            DeviceError: they cannot be computed; out of memory, most often.
        """
        for one in self.held:
            with torch.inference_mode(False), issuing(one.sources[0][1].device.type):
                _, found = one.again()
            if found != one.found:
                raise InputError(
                    f"the model reads {one.names} on the host, and finds {found:.40} there, "
                    f"not {one.found:.40} as when it was prepared",
                    where=one.where,
                    fix="call prepare(...) again",
                )
        if not self.constants:
            return
        try:
            # The caller's modes are not those under which the constants were made.
            with torch.inference_mode(False), issuing(self.constants[0].device.type):
                values = self.compute()
        except RuntimeError as error:
            raise DeviceError(
                f"folded weights cannot be computed again: {str(error).splitlines()[0]}",
                fix="free memory if it ran out; otherwise call prepare(...) again",
            ) from error
        was, now = _described(self.constants), _described(values)
        if was != now:
            raise InputError(f"folded weights were {was}, now they are {now}", fix="call prepare(...) again")
        with torch.inference_mode():  # elsewhere, constants made under it cannot be written
            for constant, value in zip(self.constants, values, strict=True):
                if value.data_ptr() != constant.data_ptr():  # a layout that needed no copy: the parameter itself
                    constant.copy_(value)


def with_held(folded: Folded | None, held: tuple[Held, ...]) -> Folded | None:
    """Return ``folded``, which may be None, together with reads that have to keep finding what they found."""
    if not held:
        return folded
    folded = folded or Folded(tuple, (), ())
    sources = (*folded.sources, *(source for one in held for source in one.sources))
    return replace(folded, sources=sources, held=held)


def _described(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in tensors)
