"""The memory of a captured schedule: one block, with a planned place for each call's results.

An operator allocates its results itself. Before it is issued, a pool of its own is filled with free blocks at exactly
the planned addresses, in the order in which the operator will ask: so it finds these, and nothing else. Nobody else
ever allocates from that pool, and results are compared with the plan after every call.

What this rests on (torch 2.11): a pool that may not split blocks hands out the smallest that is large enough, the one
at the lowest address first; requests up to 1 MiB and larger ones never share blocks; all blocks of the first kind count
as 2 MiB, and those of the second as what was asked for when they were made, 20 MiB at least.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

import torch

from nimble_core.ir.program import Program
from nimble_core.ir.schedule import Schedule
from nimble_core.scheduling.liveness import release_plan
from nimble_core.scheduling.memory_planner import MemoryPlan
from nimble_core.scheduling.memory_requirements import SMALL_NBYTES, Layout, next_claim
from nimble_core.torch_compat.cuda import (
    PLACING,
    allocate_to_pool,
    clear_cublas_workspaces,
    custom_allocator,
    end_allocate_to_pool,
    memory_stats,
    release_pool,
    storage_at,
)
from nimble_core.torch_compat.dispatch import conjugated, negated
from nimble_core.tracing.recording import Issuer

__all__ = ["CudaArena", "places_memory"]

_GUARD_BYTES = 512
"""Between the start of an arena's own block and the first address in it: no two blocks may start at one address."""


@cache
def places_memory() -> bool:
    """Return whether this torch has what placing memory takes."""
    return torch.cuda.get_allocator_backend() == "native" and all(one.find() is not None for one in PLACING)


@dataclass(frozen=True, slots=True)
class _Placement:
    """Addresses of all that is planned.

    Args:
        blocks: ``(address, bytes)`` for each allocation of each call, in the order in which it asks.
        storages: address of each storage.
        inputs: address of each input whose buffer is planned, by storage.
        untouched: addresses that nothing touches between the beginning of a replay and a call, by call; of each chain
            of staggered workspaces. Cells lie beside the first: one node may set all of that to zero.
    """

    blocks: Sequence[Sequence[tuple[int, int]]] = ()
    storages: Mapping[int, int] = field(default_factory=dict)
    inputs: Mapping[int, int] = field(default_factory=dict)
    untouched: Sequence[Mapping[int, Sequence[range]]] = ()


def _regions(layout: Layout, memory: MemoryPlan) -> dict[str, int]:
    """Return where each kind of block begins in the arena, and its size under ``"end"``."""
    nbytes = {
        "front": layout.front_nbytes,
        "arena": memory.nbytes,
        "kept": layout.kept_nbytes,
        "cell": layout.cells_nbytes,
        "staggered": layout.staggered_nbytes,
        "scratch": memory.scratch_nbytes,
        "end": 0,
    }
    return dict(zip(nbytes, accumulate(nbytes.values(), initial=0), strict=False))


def _place(layout: Layout, memory: MemoryPlan, start: int) -> _Placement:
    """Give every block an address; ``start`` is that of the arena's own memory."""
    regions = _regions(layout, memory)

    def located(offset: int) -> int:
        in_arena = start + regions["arena"] + offset - memory.start
        return in_arena if offset >= memory.start else layout.lent_address + offset

    chain_of = {call: number for number, calls in enumerate(layout.chains) for call in calls}
    untouched: list[dict[int, list[range]]] = [{} for _ in layout.chains or [()]]
    storages: dict[int, int] = {}
    planned = []
    for call, blocks in enumerate(layout.blocks):
        running = {
            "scratch": start + regions["scratch"] + (memory.scratch_offsets[call] if memory.scratch_offsets else 0),
            "workspace": located(memory.workspace_offsets[call] if memory.workspace_offsets else 0),
        }
        placed = []
        for block in blocks:
            if block.home in running:
                address = running[block.home]
                running[block.home] += -(-block.nbytes // memory.alignment) * memory.alignment
            elif block.home == "arena" and block.storage is not None:
                address = located(memory.offsets[block.storage])
            else:
                address = start + regions[block.home] + block.offset
            if block.storage is not None:
                storages[block.storage] = address
            if block.untouched:
                chain = chain_of[call] if block.home == "staggered" else 0
                untouched[chain].setdefault(call, []).append(range(address, address + block.untouched))
            placed.append((address, block.nbytes))
        planned.append(placed)
    inputs = {one: located(memory.offsets[one]) for one in layout.inputs if memory.offsets[one] >= 0}
    return _Placement(planned, storages, inputs, untouched)


class _Placer:
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


class CudaArena:
    """The memory of one captured schedule: a single block, which the allocator serves calls from.

    Args:
        device: which GPU.
        program: the calls.
        schedule: the schedule to be captured.
        layout: what each call allocates; None: all is left to torch's allocator, which reuses memory on each stream.
        memory: where it goes.
    """

    def __init__(
        self,
        device: torch.device,
        program: Program,
        schedule: Schedule,
        layout: Layout | None,
        memory: MemoryPlan | None,
    ) -> None:
        self.memory = memory
        self.nbytes = 0
        self._device = device.index
        self._asked = {} if layout is None else dict(enumerate(layout.asked))
        self._as_asked = True
        self._allocated: tuple[int, int] | None = None  # up to the last placed call: to ask takes long
        self._surprises = 0
        self._releases: Sequence[Sequence[int]] = release_plan(program, schedule)
        self._places = _Placement()
        self._made: list[list[int]] = []
        self._placer: _Placer | None = None
        self._block: torch.Tensor | None = None
        if layout is None or memory is None:
            return
        self._made = [[block.storage for block in blocks if block.storage is not None] for blocks in layout.blocks]
        self._releases = _last_uses(program, schedule, {one for made in self._made for one in made}, self._releases)
        self.nbytes = _regions(layout, memory)["end"]
        if any(layout.blocks):
            self._placer = _Placer(device.index)
            self._block = torch.empty(self.nbytes + _GUARD_BYTES, dtype=torch.uint8, device=device)
            self._places = _place(layout, memory, self._block.data_ptr() + _GUARD_BYTES)

    @property
    def inputs(self) -> Mapping[int, int]:
        """Address of each input whose buffer is planned, by storage."""
        return self._places.inputs

    @property
    def untouched(self) -> Sequence[Mapping[int, Sequence[range]]]:
        """Addresses that nothing touches between the beginning of a replay and a call; see ``zeroed_at_once``."""
        return self._places.untouched

    def input(self, storage: int, example: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return the uninitialised buffer of an input at its place; it may be larger than the input."""
        dtype, device = example.dtype, example.device
        if example.shape == torch.Size(sizes):
            like = torch.empty_like(example, device="meta")
        else:
            like = torch.empty(tuple(sizes), dtype=dtype, device="meta")
        memory = storage_at(self.inputs[storage], device, like.nbytes)
        return torch.empty(0, dtype=dtype, device=device).set_(memory, 0, like.shape, like.stride())

    def dead_before(self, position: int) -> Sequence[int]:
        """Return the storages to release before the call at this place of the issue order."""
        return self._releases[position]

    @contextmanager
    def placing(self, call: int) -> Iterator[None]:
        """Direct what ``call`` allocates inside to where it was planned."""
        if self._placer is None or not self._places.blocks[call]:
            yield
            self._allocated = None
            return
        # A library's workspace that an earlier call got is not this call's: it asks for its own.
        clear_cublas_workspaces()
        try:
            before = self._allocated or _allocations(self._device)
            with self._placer.placing(self._places.blocks[call]) as made:
                yield
                after = self._allocated = _allocations(self._device)
            asked = (after[0] - before[0] - made[0], after[1] - before[1] - made[1])
            self._as_asked = self._asked[call] == asked
        finally:
            clear_cublas_workspaces()

    def placed(self, call: int, issuer: Issuer) -> bool:
        """Return whether ``call`` asked for what was planned, and its results are where they should be."""
        if self._placer is None:
            return True
        surprised = len(self._placer.surprises) > self._surprises
        self._surprises = len(self._placer.surprises)
        # Also what is freed again counts: a workspace larger than in the recording may have run over its block.
        return (
            not surprised
            and (self._as_asked or not self._places.blocks[call])
            and all(
                (tensor := issuer.tensor_on(storage)) is None
                or tensor.untyped_storage().data_ptr() == self._places.storages[storage]
                for storage in self._made[call]
            )
        )

    def settled(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs as views of the block itself, so that the allocator's pools can go."""
        if self._block is None:
            return outputs
        block = self._block
        start, end = block.data_ptr(), block.data_ptr() + block.nbytes
        settled = []
        for tensor in outputs:
            address = tensor.untyped_storage().data_ptr()
            if start < address < end:
                view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                offset = (address - start) // tensor.element_size() + tensor.storage_offset()
                view.set_(block.untyped_storage(), offset, tensor.shape, tensor.stride())
                view = conjugated(view) if tensor.is_conj() else view
                tensor = negated(view) if tensor.is_neg() else view
            settled.append(tensor)
        return settled

    @property
    def all(self) -> torch.Tensor | None:
        """Every byte that calls use; None if there is none."""
        return None if self._block is None or not self.nbytes else self._block[_GUARD_BYTES:]

    def capture_ended(self) -> None:
        """Release the pools; nothing may be alive in them."""
        if self._placer is not None:
            self._placer.release()

    def close(self) -> None:
        """Free the block."""
        self._block = None
        if self._placer is not None:
            self._placer.release()
            self._placer.close()
            self._placer = None


def _last_uses(
    program: Program, schedule: Schedule, placed: set[int], releases: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Release placed storages right after their last use is issued; the others as in ``releases``."""
    last: dict[int, int] = {}
    for position, call in enumerate(schedule.order):
        for access in program.calls[call].accesses:
            if access.ref.storage in placed:
                last[access.ref.storage] = position
    for ref in program.outputs:
        last.pop(ref.storage, None)
    before = [[storage for storage in storages if storage not in placed] for storages in releases]
    for storage, position in last.items():
        if position + 1 < len(before):
            before[position + 1].append(storage)
    return before


def _allocations(device: int) -> tuple[int, int]:
    """Return ``(allocations, bytes asked for)`` so far."""
    stats = memory_stats(device)
    return stats["allocation"]["all"]["allocated"], stats["requested_bytes"]["all"]["allocated"]
