"""Memory of captured calls at planned addresses, through torch's own allocator.

An operator allocates its results itself. Before it is issued, a pool of its own is filled with free blocks at exactly
the planned addresses, in the order in which the operator will ask: so it finds these, and nothing else. Nobody else
ever allocates from that pool, and results are compared with the plan after every call.

What this rests on (torch 2.11): a pool that may not split blocks hands out the smallest that is large enough, the one
at the lowest address first; requests up to 1 MiB and larger ones never share blocks; all blocks of the first kind count
as 2 MiB, and those of the second as what was asked for when they were made, 20 MiB at least.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from nimble_core.scheduling.memory_requirements import SMALL_NBYTES, next_claim
from nimble_core.torch_compat.cuda import allocate_to_pool, custom_allocator, end_allocate_to_pool, release_pool

__all__ = ["Placer"]


class Placer:
    """Hands planned addresses to the allocator, call by call.

    The allocator asks for an address while it holds its lock, so Python must not have to wait for another thread then:
    blocks are made by ``torch.UntypedStorage``, which keeps the interpreter to itself. An operator that allocates what
    nobody planned gets memory of its own from ``cudaMalloc``, kept until ``close``.

    Args:
        device: index of the GPU.
    """

    def __init__(self, device: int) -> None:
        self.surprises: list[int] = []
        self._device = device
        self._next = 0
        self._pools: list[object] = []
        prototype = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        self._allocate = prototype(self._address)
        address = ctypes.cast(self._allocate, ctypes.c_void_p).value
        # Freeing does nothing. A function of the interpreter that looks at no argument and needs no lock is at hand.
        nothing = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
        self._functions = (address or 0, nothing or 0)

    def _address(self, nbytes: int, device: int, stream: int | None) -> int:
        address, self._next = self._next, 0
        if not address:
            from cuda.bindings import runtime

            # A capture on this thread would take cudaMalloc as its end.
            _, mode = runtime.cudaThreadExchangeStreamCaptureMode(
                runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
            )
            code, pointer = runtime.cudaMalloc(nbytes)
            runtime.cudaThreadExchangeStreamCaptureMode(mode)
            address = int(pointer) if int(code) == 0 else 0
            self.surprises.append(address)
        return address

    @contextmanager
    def placing(self, blocks: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Serve this thread's allocations inside from ``blocks``: ``(address, bytes)``, in order of first use.

        Yields ``(allocations, bytes asked for)`` that making the blocks took.
        """
        allocator = custom_allocator(*self._functions)
        pool = torch.cuda.MemPool(allocator, no_split=True)
        self._pools.append((pool, allocator))
        allocate_to_pool(self._device, pool.id)
        try:
            made = []
            claim = asked = 0
            for address, nbytes in blocks:
                self._next = address
                if nbytes > SMALL_NBYTES:
                    nbytes = claim = next_claim(nbytes, claim)
                asked += nbytes
                made.append(torch.UntypedStorage(nbytes, device=f"cuda:{self._device}"))
            count = len(made)
            del made
            yield count, asked
        finally:
            end_allocate_to_pool(self._device, pool.id)
            release_pool(self._device, pool.id)

    def release(self) -> None:
        """Forget the pools; every tensor in them must be gone."""
        self._pools.clear()

    def close(self) -> None:
        """Free what was not planned; not during a capture."""
        from cuda.bindings import runtime

        while self.surprises:
            runtime.cudaFree(self.surprises.pop())
