"""What a forward saved, as memory for its backward to use up: each part once it has been read, as eager frees it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from nimble_core.torch_compat.cuda import storage_at
from nimble_core.tracing.recorded import Lender, may_be_spoilt
from nimble_core.tracing.recording import Recording
from nimble_core.tracing.strides import extent

__all__ = ["leading", "lent"]


def lent(
    memory: torch.Tensor | None,
    saved: Sequence[torch.Tensor],
    leads: Collection[int] = (),
) -> tuple[list[torch.Tensor], Lender | None]:
    """Prepare what the forward saved for a backward that uses up its memory: each part once it has been read.

    Eager's backward frees what it has read as well. Each saved tensor of numbers gets a storage of its own, by which it
    is known there. Others stay as they are, and so do those at positions in ``leads`` and those that share bytes.

    Returns:
        The saved tensors, and the memory that the backward may use; None without ``memory``.
    """
    if memory is None:
        return list(saved), None
    start = memory.data_ptr()
    spans = [(one.data_ptr() - start, extent(one)) for one in saved]
    inside = [offset >= 0 and offset + nbytes <= memory.nbytes for offset, nbytes in spans]
    order = sorted((at for at in range(len(spans)) if inside[at] and spans[at][1]), key=spans.__getitem__)
    stays = [not may_be_spoilt(one) or one.is_conj() or one.is_neg() for one in saved]
    kept = {at for at in order if stays[at] or at in leads}
    until, last = 0, -1
    for at in order:
        offset, nbytes = spans[at]
        if offset < until:
            kept |= {at, last}
        if offset + nbytes > until:
            until, last = offset + nbytes, at
    found = list(saved)
    for at in order:
        if at not in kept:
            one = saved[at]
            storage = storage_at(one.data_ptr(), one.device, spans[at][1])
            found[at] = torch.empty(0, dtype=one.dtype, device=one.device)
            found[at].set_(storage, 0, one.shape, one.stride())
    return found, Lender(memory, tuple(_joined(spans[at] for at in kept)))


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join parts ``(offset, nbytes)`` of memory that overlap: a kept tensor may be a window of another."""
    start = end = 0
    for offset, nbytes in sorted(spans):
        if offset >= end:
            if end > start:
                yield start, end - start
            start = offset
        end = max(end, offset + nbytes)
    if end > start:
        yield start, end - start


def leading(backward: Recording, count: int) -> frozenset[int]:
    """Find which of the last ``count`` inputs lead to positions in memory: backwards are measured on whatever is there.

    From them come integers, or what operators read that are not torch's own and may take a number for a position
    (``torchvision.ops.roi_align`` does).
    """
    program = backward.program
    leads: set[int] = set()
    for call in reversed(program.calls):
        foreign = not call.operator.startswith("aten.")
        if foreign or any(ref.storage in leads or ref.dtype.startswith(("int", "uint")) for ref in call.writes):
            leads.update(ref.storage for ref in call.reads)
    slots = backward.inputs[len(backward.inputs) - count :]
    return frozenset(at for at, slot in enumerate(slots) if backward.storage_of[slot] in leads)
